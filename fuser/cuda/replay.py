"""Work done again: what a function allocates and launches over tensors, without asking it.

A launcher checks its tensors, picks a kernel and lays out arguments; for tensors that differ from
earlier ones in nothing but their addresses, all of it comes out the same. :func:`replayed` notes
that once, as a :class:`Tape`, and from then on only allocates and launches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuser.cuda import launch
from fuser.cuda.arguments import Slot, Struct, encode, filled
from fuser.cuda.launch import Kernel, Launch, Prepared, fire, prepared

# Layouts that a process meets are few; one whose shapes never repeat must not fill memory.
MOST_TAPES = 4096

Result = TypeVar("Result")


def replayed(
    what: Hashable, tensors: Sequence[torch.Tensor | None], function: Callable[[], Result]
) -> Result:
    """What ``function`` returns: tensors that it allocates and fills by kernels, or None.

    Where it was called before with tensors of the same layout, its allocations and launches are
    made again, and it is not called. The second such call is the one that is noted: shapes that
    never return cost nothing more.

    Parameters
    ----------
    what
        All that ``function`` depends on besides the tensors' layouts.
    tensors
        All that it reads and writes and has not allocated itself.
    function
        Returns a tensor, None, or a dict of these. One that asks torch for more than memory is
        called every time, and so is one that launches over memory of another kind than these.
    """
    key: list[Any] = [what]
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        elif type(tensor) in _PLAIN:
            key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device())
            key.append(tensor.data_ptr() & 15)
        else:
            return function()
    tapes: dict[Any, Tape | None] = launch.machine.tapes
    known = tuple(key)
    try:
        tape = tapes[known]
    except KeyError:
        if len(tapes) >= MOST_TAPES:
            tapes.clear()
        tapes[known] = None
        return function()
    if tape is None:
        tape, result = record(tensors, function)
        tapes[known] = tape
        return result
    return tape.play(tensors) if tape.is_complete else function()


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


# -- tapes --------------------------------------------------------------------


class Allocation(NamedTuple):
    """One tensor that is made anew each time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_zeroed: bool


class Packed(NamedTuple):
    """Launches as a device is given them: each picks its values out of one list."""

    device: int
    constants: list[Any]
    """What stands in the list behind the tensors' addresses."""
    launches: list[tuple[Prepared, Callable[[list[Any]], tuple[Any, ...]]]]


@dataclass
class Tape:
    """What a function did: allocations, then launches over slots; and which slots it returned."""

    allocations: list[Allocation]
    launches: list[tuple[Kernel, Launch, tuple[Any, ...]]]
    result: Any = None
    is_complete: bool = True
    """False where it did more than that."""
    packed: Packed | None = None

    def play(self, inputs: Sequence[torch.Tensor | None]) -> Any:
        """Do it again over other inputs; the result has tensors of its own."""
        tensors = [*inputs]
        for shape, dtype, device, is_zeroed in self.allocations:
            make = torch.zeros if is_zeroed else torch.empty
            tensors.append(make(shape, dtype=dtype, device=device))
        if type(launch.machine) is launch.Machine:
            self._fire(tensors)
        else:
            for kernel, grid, args in self.launches:
                launch.machine.run(kernel, grid, tuple(filled(arg, tensors) for arg in args))
        return filled(self.result, tensors)

    def _fire(self, tensors: list[torch.Tensor | None]) -> None:
        packed = self.packed
        if packed is None:
            packed = self.packed = self._pack(tensors)
        device, constants, launches = packed
        values = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        values += constants
        if device == torch._C._cuda_getDevice():
            for ready, pick in launches:
                fire(ready, pick(values), device)
        else:
            with torch.cuda.device(device):
                for ready, pick in launches:
                    fire(ready, pick(values), device)

    def _pack(self, tensors: Sequence[torch.Tensor | None]) -> Packed:
        device = next(tensor.get_device() for tensor in tensors if tensor is not None)
        packed = Packed(device, [], [])
        with torch.cuda.device(device):
            for kernel, grid, args in self.launches:
                encoded = encode(kernel.symbol, args)
                places = []
                for value in encoded.values:
                    if type(value) is Slot:
                        places.append(value.place)
                    else:
                        places.append(len(tensors) + len(packed.constants))
                        # Numbers of Python are packed faster than numpy's.
                        packed.constants.append(value.item() if isinstance(value, np.generic) else value)
                ready = prepared(kernel, grid, encoded.format, device)
                packed.launches.append((ready, operator.itemgetter(*places)))
        return packed


# -- recording ----------------------------------------------------------------


def record(
    tensors: Sequence[torch.Tensor | None], function: Callable[[], Result]
) -> tuple[Tape, Result]:
    """Call ``function``, and note what it does."""
    recorder = _Recorder(tensors)
    outer = launch.recording.listener
    launch.recording.listener = recorder.launched
    try:
        with recorder:
            result = function()
    finally:
        launch.recording.listener = outer
    tape = recorder.tape
    tape.result = recorder.slotted(result)
    return tape, result


class _Recorder(TorchDispatchMode):
    """Sees what torch is asked for, and every launch."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.tape = Tape([], [])
        self.places = {id(t): place for place, t in enumerate(tensors) if t is not None}
        self.count = len(tensors)
        self.kept: list[Any] = list(tensors)  # so that no id is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _ALLOCATING and made.is_contiguous():
            allocation = Allocation(tuple(made.shape), made.dtype, made.device, func in _ZEROING)
            self.tape.allocations.append(allocation)
            self.places[id(made)] = self.count + len(self.tape.allocations) - 1
        elif not func.is_view:
            self.tape.is_complete = False
        elif _are_alike(made, args[0]) and id(args[0]) in self.places:
            self.places[id(made)] = self.places[id(args[0])]
        self.kept.append(made)
        return made

    def launched(self, kernel: Kernel, shape: Launch, args: tuple[Any, ...]) -> None:
        """Note a launch."""
        noted = tuple(
            Struct(tuple(map(self.slotted, arg.fields))) if type(arg) is Struct
            # No tensor, or one of those that are known.
            else self.slotted(arg)
            for arg in args
        )
        self.tape.launches.append((kernel, shape, noted))

    def slotted(self, value: Any) -> Any:
        """``value`` with slots in the place of tensors."""
        if isinstance(value, torch.Tensor):
            place = self.places.get(id(value))
            if place is None:
                self.tape.is_complete = False
                return None
            return Slot(place)
        if type(value) is dict:
            return {name: self.slotted(item) for name, item in value.items()}
        return value


def _are_alike(one: Any, other: Any) -> bool:
    """Whether a view is another name of the whole tensor, such as the one that users get."""
    return (
        isinstance(one, torch.Tensor)
        and one.data_ptr() == other.data_ptr()
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    )


_aten = torch.ops.aten
_ZEROING = frozenset((_aten.zeros.default,))
_ALLOCATING = frozenset((_aten.empty.memory_format, _aten.empty_like.default, *_ZEROING))
