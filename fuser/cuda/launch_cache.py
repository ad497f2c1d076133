"""Launch cache: records allocations and launches of a function, and repeats them.

A launcher checks its tensors, chooses a kernel and packs arguments. For tensors that differ from
earlier ones only in their addresses, the results are the same. :func:`cached_launches` records
them once, as a :class:`LaunchSequence`, and then only allocates and launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuser.cuda import launch, module
from fuser.cuda.arguments import Slot, Struct, encode, filled
from fuser.cuda.launch import Kernel, Launch, begin, prepared
from fuser.source import SourceCode

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
    if launch.recording.listener is not None:
        return function()  # recorders must see each launch
    key: list[Any] = [what]
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        elif type(tensor) in _PLAIN and not tensor.is_neg():
            key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device())
            key.append(tensor.data_ptr() & 15)
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
    sequence, result = record(tensors, function)
    _add(backend.sequences, layout, sequence)
    return result


def _add(known: dict[Any, Any], layout: Hashable, value: Any) -> None:
    """Store ``value``; above the limit, keep only the latest."""
    while len(known) >= MOST_SEQUENCES:
        known.pop(next(iter(known)), None)
    known[layout] = value


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


# -- sequences --------------------------------------------------------------------


class Allocation(NamedTuple):
    """One tensor that every repetition allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_zeroed: bool


@dataclass
class LaunchSequence:
    """The actions of a function: allocations, launches over slots, and the returned slots."""

    allocations: list[Allocation]
    launches: list[tuple[Kernel, Launch, tuple[Any, ...]]]
    result: Any = None
    is_complete: bool = True
    """False if the function did anything else."""
    # The generated function of the inputs, on a GPU.
    device: int | None = None
    written: Callable[..., Any] | None = None

    def play(self, inputs: Sequence[torch.Tensor | None]) -> Any:
        """Repeat the actions over other inputs; the result has new tensors."""
        if type(launch.backend) is not launch.LaunchBackend:
            return self._run(inputs)
        if self.written is None:
            self._write(inputs)
        assert self.written is not None
        if self.device == torch._C._cuda_getDevice():
            return self.written(*inputs)
        with torch.cuda.device(self.device):
            return self.written(*inputs)

    def _run(self, inputs: Sequence[torch.Tensor | None]) -> Any:
        tensors = [*inputs]
        for shape, dtype, device, is_zeroed in self.allocations:
            make = torch.zeros if is_zeroed else torch.empty
            tensors.append(make(shape, dtype=dtype, device=device))
        for kernel, grid, args in self.launches:
            launch.backend.run(kernel, grid, tuple(filled(arg, tensors) for arg in args))
        return filled(self.result, tensors)

    def _write(self, inputs: Sequence[torch.Tensor | None]) -> None:
        """Generate straight-line Python, with all constants inserted."""
        self.device = next(tensor.get_device() for tensor in inputs if tensor is not None)
        names = [f"t{i}" for i in range(len(inputs) + len(self.allocations))]
        given, made = names[: len(inputs)], names[len(inputs) :]
        src = SourceCode(begin=begin, memset=module.driver_memset())
        with src.block(f"def play({', '.join(given)}):"), torch.cuda.device(self.device):
            for name, (shape, dtype, device, _) in zip(made, self.allocations, strict=True):
                new = partial(torch.empty, shape, dtype=dtype, device=device)
                src.add(f"{name} = {src.bind(f'new_{name}', new)}()  # {shape}, {dtype}")
            src.add(f"launch, buffer, size, stream, extra = begin({self.device})")
            for name, (shape, dtype, _, is_zeroed) in zip(made, self.allocations, strict=True):
                if is_zeroed and 0 not in shape:
                    count = math.prod(shape) * dtype.itemsize
                    src.add(f"memset({name}.data_ptr(), 0, {count}, stream)")
            addresses = [
                "0" if i < len(inputs) and inputs[i] is None else f"{name}.data_ptr()"
                for i, name in enumerate(names)
            ]
            for i, (kernel, grid, args) in enumerate(self.launches):
                encoded = encode(kernel.symbol, args)
                ready = prepared(kernel, grid, encoded.format, self.device)
                function, sizes, shared_bytes, packer = ready
                values = ", ".join(_literal(value, addresses) for value in encoded.values)
                where = ", ".join(map(str, (function, *sizes, shared_bytes)))
                src.add(
                    f"# {kernel.symbol}",
                    f"{src.bind(f'pack_{i}', packer.pack_into)}(buffer, 0, {values})",
                    f"size.value = {packer.size}",
                    f"launch({where}, stream, 0, extra)",
                )
            src.add(f"return {_named(self.result, names)}")
        self.written = src.functions("launches")["play"]


def _literal(value: Any, addresses: Sequence[str]) -> str:
    """The expression of a launch's value; Python's numbers are packed faster than numpy's."""
    if type(value) is Slot:
        return addresses[value.place]
    number = value.item() if isinstance(value, np.generic) else value
    return repr(number) if math.isfinite(number) else f"float('{number}')"


def _named(value: Any, names: Sequence[str]) -> str:
    """The expression of a result."""
    if type(value) is dict:
        return f"{{{', '.join(f'{k!r}: {_named(v, names)}' for k, v in value.items())}}}"
    return names[value.place] if type(value) is Slot else "None"


# -- recording ----------------------------------------------------------------


def record(
    tensors: Sequence[torch.Tensor | None], function: Callable[[], Result]
) -> tuple[LaunchSequence, Result]:
    """Call ``function``, and record its actions."""
    recorder = _Recorder(tensors)
    outer = launch.recording.listener
    launch.recording.listener = recorder.launched
    try:
        with recorder:
            result = function()
    finally:
        launch.recording.listener = outer
    sequence = recorder.sequence
    sequence.result = recorder.slotted(result)
    return sequence, result


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes the calls of torch and every launch."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sequence = LaunchSequence([], [])
        self.places = {id(t): place for place, t in enumerate(tensors) if t is not None}
        self.count = len(tensors)
        self.kept: list[Any] = list(tensors)  # so that no id is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _ALLOCATING and made.is_contiguous():
            allocation = Allocation(tuple(made.shape), made.dtype, made.device, func in _ZEROING)
            self.sequence.allocations.append(allocation)
            self.places[id(made)] = self.count + len(self.sequence.allocations) - 1
        elif not func.is_view:
            self.sequence.is_complete = False
        elif _are_alike(made, args[0]) and id(args[0]) in self.places:
            self.places[id(made)] = self.places[id(args[0])]
        self.kept.append(made)
        return made

    def launched(self, kernel: Kernel, shape: Launch, args: tuple[Any, ...]) -> None:
        """Record a launch."""
        self.sequence.launches.append((kernel, shape, tuple(map(self.slotted, args))))

    def slotted(self, value: Any) -> Any:
        """``value`` with slots in place of tensors."""
        if isinstance(value, torch.Tensor):
            place = self.places.get(id(value))
            if place is None:
                self.sequence.is_complete = False
                return None
            return Slot(place)
        if type(value) is Struct:
            return Struct(tuple(map(self.slotted, value.fields)))
        if type(value) is dict:
            return {name: self.slotted(item) for name, item in value.items()}
        return value


def _are_alike(one: Any, other: Any) -> bool:
    """Whether a view is another name of the whole tensor, such as the view that users get."""
    return (
        isinstance(one, torch.Tensor)
        and one.data_ptr() == other.data_ptr()
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    )


_aten = torch.ops.aten
_ZEROING = frozenset((_aten.zeros.default,))
_ALLOCATING = frozenset((_aten.empty.memory_format, _aten.empty_like.default, *_ZEROING))
