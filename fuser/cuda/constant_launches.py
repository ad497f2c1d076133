"""Launches over tensors that stay the same: recorded once, and then repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.cuda import launch
from fuser.cuda.sequence import LaunchSequence, record

# Sets of tensors that a caller changes between.
MOST_CONSTANT = 4


def constant_launches(
    cache: dict[Any, LaunchSequence | None],
    what: Any,
    tensors: Sequence[torch.Tensor],
    function: Callable[[], None],
) -> None:
    """Call ``function``, which launches kernels over tensors that are the same at most calls.

    Its launches are recorded at the second call with the same tensors, known by their identity,
    and repeated from the third on.

    Parameters
    ----------
    cache
        Belongs to the owner of the tensors: it holds them.
    what
        Everything that ``function`` depends on besides the tensors.
    """
    if launch.recording.listener is not None:
        return function()
    key = (id(launch.backend), what, *map(id, tensors))
    sequence = cache.get(key)
    if sequence is not None and sequence.is_complete:
        sequence.play(())
    elif key not in cache:
        while len(cache) >= MOST_CONSTANT:
            cache.pop(next(iter(cache)), None)
        cache[key] = None
        function()
    elif sequence is None:
        cache[key], _, _ = record((), function, constants=tensors)
    else:
        function()
    return None
