"""Launches of functions outside of passes: recorded once, and then repeated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from fuser.cuda import launch
from fuser.cuda.arguments import layout_of
from fuser.cuda.sequence import LaunchSequence, Result, record

Cache = dict[Any, "LaunchSequence | None"]
"""What is known of earlier calls; it belongs to the owner of the tensors."""

# Sets of tensors, or of their layouts, that a caller changes between.
MOST_KNOWN = 4


def constant_launches(
    cache: Cache,
    what: Hashable,
    tensors: Sequence[torch.Tensor],
    function: Callable[[], Result],
    inputs: Sequence[torch.Tensor] = (),
    objects: Sequence[Any] = (),
) -> tuple[bool, Result]:
    """Call ``function``, which launches kernels over tensors that are the same at most calls.

    Its launches are recorded at the second call with the same tensors, known by their identity, and
    repeated from the third on. ``cache`` holds the tensors. ``what`` is everything that
    ``function`` depends on besides them, with the layouts of ``inputs``. ``inputs``, tensors, and
    ``objects``, process groups, may be others at each call.

    Returns whether launches were repeated, and ``function`` was not called; and the result, tensors
    in tuples that ``function`` makes.
    """
    if launch.recording.listener is not None:
        return False, function()
    key = (id(launch.backend), what, *map(id, tensors))
    sequence = cache.get(key)
    if sequence is not None and sequence.is_complete:
        return True, sequence.play((*inputs, *objects))
    if key not in cache:
        while len(cache) >= MOST_KNOWN:
            cache.pop(next(iter(cache)), None)
        cache[key] = None
    elif sequence is None:
        sequence, result, slotted = record(
            inputs, function, constants=tensors, objects=objects, with_calls=True
        )
        sequence.returns(slotted(result))
        cache[key] = sequence
        return False, result
    return False, function()


def repeated_launches(
    cache: Cache,
    what: Hashable,
    tensors: Sequence[torch.Tensor],
    function: Callable[[], Result],
    objects: Sequence[object] = (),
) -> tuple[bool, Result]:
    """Call ``function``, which launches kernels over tensors of the same layouts at most calls.

    The rest is as in :func:`constant_launches`; of the tensors nothing is held.
    """
    layouts = tuple(map(layout_of, tensors))
    is_one_twice = len(set(map(id, tensors))) < len(tensors)  # by which place is it read?
    if is_one_twice or None in layouts:
        return False, function()
    return constant_launches(cache, (what, layouts), (), function, tensors, objects)
