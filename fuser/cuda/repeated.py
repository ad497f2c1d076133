"""Launches of functions outside of passes: recorded once, and then repeated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from fuser.cuda import launch
from fuser.cuda.arguments import layout_of
from fuser.cuda.sequence import LaunchSequence, record

Cache = dict[Any, "LaunchSequence | None"]
"""What is known of earlier calls; it belongs to the owner of the tensors."""

# Sets of tensors, or of their layouts, that a caller changes between.
MOST_KNOWN = 4


def constant_launches(
    cache: Cache,
    what: Hashable,
    tensors: Sequence[torch.Tensor],
    function: Callable[[], None],
    inputs: Sequence[torch.Tensor] = (),
) -> bool:
    """Call ``function``, which launches kernels over tensors that are the same at most calls.

    Its launches are recorded at the second call with the same tensors, known by their identity,
    and repeated from the third on. ``cache`` holds the tensors.

    Parameters
    ----------
    what
        Everything that ``function`` depends on besides the tensors, with the layouts of ``inputs``.
    inputs
        Tensors that may be others at each call.

    Returns
    -------
    bool
        Whether launches were repeated, and ``function`` was not called.
    """
    if launch.recording.listener is not None:
        function()
        return False
    key = (id(launch.backend), what, *map(id, tensors))
    sequence = cache.get(key)
    if sequence is not None and sequence.is_complete:
        sequence.play(inputs)
        return True
    if key not in cache:
        while len(cache) >= MOST_KNOWN:
            cache.pop(next(iter(cache)), None)
        cache[key] = None
        function()
    elif sequence is None:
        cache[key], _, _ = record(inputs, function, constants=tensors, with_calls=True)
    else:
        function()
    return False


def repeated_launches(
    cache: Cache, what: Hashable, tensors: Sequence[torch.Tensor], function: Callable[[], None]
) -> bool:
    """Call ``function``, which launches kernels over tensors of the same layouts at most calls.

    The rest is as in :func:`constant_launches`; of the tensors nothing is held.
    """
    layouts = tuple(map(layout_of, tensors))
    is_one_twice = len(set(map(id, tensors))) < len(tensors)  # by which place is it read?
    if is_one_twice or None in layouts:
        function()
        return False
    return constant_launches(cache, (what, layouts), (), function, tensors)
