"""Launch cache: records allocations and launches of a function, and repeats them.

A launcher checks its tensors, chooses a kernel and packs arguments. For tensors that differ from
earlier ones only in their addresses, the results are the same. :func:`cached_launches` records
them once, as a :class:`~fuser.cuda.sequence.LaunchSequence`, and then only allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from fuser.cuda import launch
from fuser.cuda.arguments import layout_of
from fuser.cuda.sequence import LaunchSequence, record

# A process uses few layouts; a process whose shapes never repeat must not fill the memory.
MOST_SEQUENCES = 4096

Result = TypeVar("Result")


def cached_launches(
    what: Hashable, tensors: Sequence[torch.Tensor | None], function: Callable[[], Result]
) -> Result:
    """The result of ``function``, which allocates tensors and launches kernels.

    If it was called before with tensors of the same layout, its allocations and launches are
    repeated, and it is not called. The second such call is recorded, not the first: shapes that
    never repeat cost nothing more.

    Parameters
    ----------
    what
        Everything that ``function`` depends on besides the tensors' layouts.
    tensors
        All tensors that it reads or writes and does not allocate itself.
    function
        Returns a tensor, None, or a dict of these. A function that uses torch for more than
        allocations is called every time, and so is one that launches over other memory than these
        tensors and its allocations.
    """
    if launch.recording.listener is not None or launch.recording.is_joined:
        return function()  # recorders must see each launch
    key: list[Any] = [what]
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        elif (layout_of_one := layout_of(tensor)) is not None:
            key += layout_of_one
        else:
            return function()
    backend, layout = launch.backend, tuple(key)
    sequence: LaunchSequence | None = backend.sequences.get(layout)
    if sequence is not None:
        return sequence.play(tensors) if sequence.is_complete else function()
    if layout not in backend.seen_once:
        _add(backend.seen_once, layout, None)
        return function()
    given = [id(tensor) for tensor in tensors if tensor is not None]
    if len(set(given)) < len(given):
        return function()  # one tensor in two places: a launch cannot tell which it reads
    sequence, result, slotted = record(tensors, function)
    sequence.result = slotted(result)
    _add(backend.sequences, layout, sequence)
    return result


# Sets of tensors that a caller changes between.
MOST_CONSTANT = 4


def constant_launches(
    cache: dict[Any, LaunchSequence | None],
    what: Hashable,
    tensors: Sequence[torch.Tensor],
    function: Callable[[], None],
) -> None:
    """Call ``function``, which launches kernels over tensors that are the same at most calls.

    As :func:`cached_launches`, but tensors are known by their identity, which takes less time for
    many tensors. ``cache`` belongs to their owner: it holds them.
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


def _add(known: dict[Any, Any], layout: Hashable, value: Any) -> None:
    """Store ``value``; above the limit, keep only the latest."""
    while len(known) >= MOST_SEQUENCES:
        known.pop(next(iter(known)), None)
    known[layout] = value
