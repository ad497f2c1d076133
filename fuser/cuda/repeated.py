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
    cache: Cache, what: Hashable, tensors: Sequence[torch.Tensor], function: Callable[[], None]
) -> None:
    """Call ``function``, which launches kernels over tensors that are the same at most calls.

    Its launches are recorded at the second call with the same tensors, known by their identity,
    and repeated from the third on. ``cache`` holds the tensors.

    Parameters
    ----------
    what
        Everything that ``function`` depends on besides the tensors.
    """
    key = (what, *map(id, tensors))
    _repeated(cache, key, (), function, constants=tensors)


def repeated_launches(
    cache: Cache, what: Hashable, tensors: Sequence[torch.Tensor], function: Callable[[], None]
) -> bool:
    """Call ``function``, which launches kernels over tensors of the same layouts at most calls.

    As :func:`constant_launches`, but each call may have other tensors, of which nothing is held.

    Returns
    -------
    bool
        Whether launches were repeated, and ``function`` was not called.
    """
    layouts = tuple(map(layout_of, tensors))
    if None in layouts:
        function()
        return False
    return _repeated(cache, (what, layouts), tensors, function)


def _repeated(
    cache: Cache,
    key: Hashable,
    inputs: Sequence[torch.Tensor],
    function: Callable[[], None],
    constants: Sequence[torch.Tensor] = (),
) -> bool:
    if launch.recording.listener is not None:
        function()
        return False
    key = (id(launch.backend), key)
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
        cache[key], _, _ = record(inputs, function, constants=constants, with_calls=True)
    else:
        function()
    return False
