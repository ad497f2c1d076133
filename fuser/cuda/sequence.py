"""Launch sequences: what a function does with tensors, recorded once and written as plain code.

A function that is called with tensors of one layout makes the same allocations, launches and calls
of torch each time; only the addresses differ. :func:`record` observes one call of it, and
:class:`LaunchSequence` repeats what it did, as generated straight-line Python.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.weak import TensorWeakRef

from fuser.cuda import cublaslt, launch, module, pass_graphs
from fuser.cuda.arguments import PLAIN, Slot, Struct, encode, end_of, filled
from fuser.cuda.launch import Kernel, Launch, begin, prepared
from fuser.cuda.pass_graphs import FEWEST_CALLS, PassGraphs
from fuser.formats import ceil_div
from fuser.report.text import format_bytes
from fuser.source import SourceCode
from fuser.torch_private import (
    TorchDispatchMode,
    cuda_device,
    empty_on_gpu,
    gelu,
    is_composite,
    is_profiler_enabled,
    scaled_mm,
    schema_of,
)
from fuser.wrapper_tensor import WrapperTensor

Result = TypeVar("Result")

# Buffers of zeros begin at multiples of this many bytes in the memory that they share.
ZEROS_ALIGNMENT = 16
# So do the pieces of a packed result: cuBLAS picks slower kernels for less.
PIECE_ALIGNMENT = 256


# -- actions ----------------------------------------------------------------------


class Dense(NamedTuple):
    """The layout of a tensor whose elements fill its memory, in any order of dimensions."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Allocation(NamedTuple):
    """A new tensor."""

    place: int
    layout: Dense
    device: torch.device
    is_zeroed: bool


class Zeroing(NamedTuple):
    """A tensor that was allocated before is cleared."""

    place: int
    nbytes: int


class Piece(NamedTuple):
    """A tensor in the memory of another one, whose place is ``base``; the offset is in bytes."""

    place: int
    base: int
    offset: int
    layout: Dense

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor of bytes."""
        shape, strides, dtype = self.layout
        raw = base[self.offset : self.offset + self.layout.nbytes]
        return raw.view(dtype).as_strided(shape, strides)


class KernelLaunch(NamedTuple):
    """A launch, with slots in place of tensors."""

    kernel: Kernel
    shape: Launch
    args: tuple[object, ...]


class RecordedCall(NamedTuple):
    """A call of torch, with slots in place of tensors; ``places`` of its results, None for None.

    ``view`` is the layout of the result, if that is another view of all memory of its argument.
    ``made`` is that of a result in memory of its own, all of which it fills.
    """

    function: Any
    args: tuple[object, ...]
    kwargs: dict[str, object]
    places: tuple[int | None, ...]
    returns_tuple: bool
    view: Dense | None = None
    made: Dense | None = None


class PythonCall(NamedTuple):
    """A call of :func:`fuser.cuda.launch.call_each_time`; the place of its result, None for None.

    ``args`` have slots for tensors, and for objects that are inputs or results of such calls.
    """

    function: Callable[..., Any]
    args: tuple[object, ...]
    place: int | None


class ProfilerRange(NamedTuple):
    """The begin of a range of torch's profiler, such as a step of a plan; None is its end."""

    title: str | None


Action = Allocation | Zeroing | Piece | KernelLaunch | RecordedCall | PythonCall | ProfilerRange


class _ActionGroup(NamedTuple):
    """Actions that follow one another: those of a graph, or others."""

    actions: list[Action]
    first: list[Action] | None = None
    """What comes before a graph of them: the memory of what others read of it, into which products
    then write, its views, and draws of seeds. None: they are run one by one."""


class LaunchSequence:
    """The actions of a function in their order, and the slots of its result.

    Places count the inputs first, then the tensors that the actions make. ``constants`` are tensors
    of the function that are the same at each call, and live as long as the sequence; their places
    come after those of the inputs. With ``owns_inputs``, :meth:`play` takes a list, and empties it,
    so that an input is freed as soon as nothing reads it.
    """

    def __init__(
        self, count: int, constants: Sequence[torch.Tensor] = (), *, owns_inputs: bool = False
    ) -> None:
        self.count = count
        self.constants = constants
        self.owns_inputs = owns_inputs
        self.actions: list[Action] = []
        self.names: dict[int, int] = {}
        """By place, the place of the tensor that it is a view of, if the view is all of it."""
        self.result: Any = None
        self.refusal: str | None = None
        """Why the actions cannot be repeated; None if they can."""
        self.last_use = 0
        """The number of the call that used it last, of those that its owner counts."""
        # The generated functions of the inputs, by whether they have ranges of the profiler and
        # whether results are packed; and the index of the GPU that they run on.
        self._written: dict[tuple[bool, bool], Callable[[Sequence[torch.Tensor | None]], Any]] = {}
        self._device: int | None = None
        self.graphs: list[PassGraphs] = []
        """The CUDA graphs that replace its calls where addresses come back: of all its actions, or
        of those between calls that are made each time."""
        self.no_graphs = "it has not been repeated"
        """Why there are none; empty if there may be."""
        self.pieces: tuple[Piece, ...] = ()
        """What :meth:`pack` put into one tensor."""

    @property
    def made_from(self) -> int:
        """The place of the first tensor that the actions make."""
        return self.count + len(self.constants)

    def returns(self, result: object) -> None:
        """Set the result, with slots in place of tensors; it may show what was not recorded."""
        self.result = result
        if reads_unwritten(self.actions, result):
            self.refusal = self.refusal or "it reads memory that neither torch nor fuser wrote"

    @property
    def is_complete(self) -> bool:
        """Whether the function did nothing else, so that its actions can be repeated."""
        return self.refusal is None

    @property
    def is_written(self) -> bool:
        """Whether its code has been generated, at its first repetition."""
        return bool(self._written)

    def described(self) -> str:
        """How the repetitions of the function have run."""
        graphs = self.graphs
        refusal = None if graphs else self.no_graphs
        for graph in graphs:
            refusal = refusal or graph.refusal
        if not pass_graphs.Switch.is_on:
            refusal = "graphs are turned off"
        if refusal is None:
            hits, calls = min(graph.hits for graph in graphs), max(graph.calls for graph in graphs)
            if hits:
                how = "a CUDA graph"
                if len(graphs) > 1:
                    how = f"{len(graphs)} CUDA graphs, with calls that are made each time between,"
                return (
                    f"{how} in {hits} of {calls} repetitions, found by the "
                    f"addresses of tensors; {sum(graph.count for graph in graphs)} in all, which "
                    f"added {format_bytes(sum(graph.nbytes for graph in graphs))} to the memory "
                    "that graphs share"
                )
            refusal = f"no addresses have come back in {calls} repetitions"
        return f"{'launched call by call' if self.is_written else 'recorded'}: {refusal}"

    def play(self, inputs: Sequence[torch.Tensor | None], is_packed: bool = False) -> Any:
        """Repeat the actions over other inputs of the same layout; the result has new tensors.

        With ``is_packed``, the pieces are in one of them.
        """
        how = is_profiler_enabled(), is_packed
        written = self._written.get(how)
        if written is None:
            written = self._written[how] = self._write(inputs, *how)
        if self._device is None or self._device == cuda_device():
            return written(inputs)
        with torch.cuda.device(self._device):
            return written(inputs)

    def drop_names(self, kept: object = (), output: object = ()) -> None:
        """Leave out views of whole tensors, so that the tensors themselves are read.

        Not those of the slots in ``kept``, nor views of inputs in ``output``.
        """
        named, returned = set(_places(kept)), set(_places(output))
        to: dict[int, int] = {}
        for place, view_of in self.names.items():  # a tensor comes before its views
            base = to.get(view_of, view_of)
            if place not in named and not (place in returned and base < self.count):
                to[place] = base
        self.names = {}
        actions, self.actions = self.actions, []
        for action in actions:
            if type(action) is RecordedCall:
                if action.function.is_view and action.places[0] in to:
                    continue
                args, kwargs = _moved(action.args, to), _moved(action.kwargs, to)
                places = tuple(None if at is None else to.get(at, at) for at in action.places)
                action = action._replace(args=args, kwargs=kwargs, places=places)
            elif type(action) is KernelLaunch or type(action) is PythonCall:
                action = action._replace(args=_moved(action.args, to))
            self.actions.append(action)
        self.result = _moved(self.result, to)

    def pack(self, slots: Sequence[Slot]) -> list[int]:
        """Let :meth:`play` put results of ``slots``, one of :attr:`result`, into one tensor.

        Those are the results that the actions make in memory of their own and that nothing else
        leaves with. Returns their positions; :attr:`pieces` has where they are. Nothing is packed
        if there are fewer than two, or if the actions are too few for a graph: without one, tensors
        that products read are views, which take as long as allocations.
        """
        if sum(map(_is_work, self.actions)) < FEWEST_CALLS:
            return []
        layouts: dict[int, Dense] = {}
        for action in self.actions:
            if type(action) is Allocation:
                layouts[action.place] = action.layout
            elif type(action) is RecordedCall and action.made is not None:
                (place,) = action.places
                if place is not None and place not in _read(action):
                    layouts[place] = action.made
        leaving = list(_places(self.result))
        for action in reversed(self.actions):  # a base leaves with its views
            is_view = type(action) is RecordedCall and action.function.is_view
            if is_view and not {*leaving}.isdisjoint(action.places):
                leaving += _read(action)
        chosen = [
            at
            for at, slot in enumerate(slots)
            if slot.place in layouts and leaving.count(slot.place) == 1
        ]
        if len(chosen) < 2:
            return []
        base = 1 + max(_touched_by(self.actions).union(_made_by(self.actions)))
        offset = 0
        pieces = []
        for at in chosen:
            layout = layouts[slots[at].place]
            pieces.append(Piece(slots[at].place, base, offset, layout))
            offset += ceil_div(layout.nbytes, PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        self.pieces = tuple(pieces)
        self._packed = Dense((offset,), (1,), torch.uint8)
        rest = tuple(slot for at, slot in enumerate(slots) if at not in chosen)
        self._packed_result = tuple(
            (*rest, Slot(base)) if part is slots else part for part in self.result
        )
        return chosen

    def packed(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor with copies of others as its pieces."""
        whole = torch.empty(self._packed.shape, dtype=torch.uint8, device=tensors[0].device)
        for piece, tensor in zip(self.pieces, tensors, strict=True):
            piece.of(whole).copy_(tensor)
        return whole

    def _into_pieces(self, actions: list[Action], device: torch.device) -> list[Action]:
        """The actions, with what they put into one tensor allocated as that."""
        places = {piece.place for piece in self.pieces}
        whole = Allocation(self.pieces[0].base, self._packed, device, is_zeroed=False)
        replaced: list[Action] = [whole, *self.pieces]
        for action in actions:
            if type(action) is Allocation and action.place in places:
                if action.is_zeroed and action.layout.nbytes:
                    replaced.append(Zeroing(action.place, action.layout.nbytes))
            elif type(action) is RecordedCall and action.made and action.places[0] in places:
                replaced.append(_written_to(action, Slot(action.places[0])))
            else:
                replaced.append(action)
        return replaced

    # -- generated code -------------------------------------------------------

    def _write(
        self, inputs: Sequence[torch.Tensor | None], in_ranges: bool, is_packed: bool
    ) -> Callable[[Sequence[torch.Tensor | None]], Any]:
        """Generate straight-line Python, with all constants inserted."""
        leaving = set(_places(self.result))
        needed = _with_views_at_once(self._needed(leaving), leaving)
        actions = [one for one in needed if in_ranges or type(one) is not ProfilerRange]
        place: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        # Inputs are process groups, too.
        tensors = [one for one in (*inputs, *self.constants) if isinstance(one, torch.Tensor)]
        result = self.result
        if is_packed:
            result, actions = self._packed_result, self._into_pieces(actions, tensors[0].device)
        if type(launch.backend) is launch.LaunchBackend:
            self._device = tensors[0].get_device()
            place = torch.cuda.device(self._device)
        with place:
            units = [_ActionGroup(actions)]
            if not in_ranges:
                units, self.no_graphs = self._units(actions, tensors, result)
            return self._function(units, result)

    def _code(self, actions: Sequence[Action], read: Iterable[int]) -> _DriverCode | _BackendCode:
        """What writes the launches of ``actions``; ``read`` are places that others read."""
        if self._device is None:
            return _BackendCode()
        return _DriverCode(self._device, actions, tuple(map(Slot, read)))

    def _function(
        self, units: Sequence[_ActionGroup], result: object
    ) -> Callable[[Sequence[torch.Tensor | None]], Any]:
        """A function that does what units say; a graph gets the tensors that it reads or writes."""
        returned = set(_places(result))
        kept = returned.union(range(0 if not self.owns_inputs else self.count, self.made_from))
        touched = [_touched_by(unit.actions) | _touched_by(unit.first or ()) for unit in units]
        later = [set[int]().union(*touched[n + 1 :]) for n in range(len(units))]
        apart = [action for unit in units if unit.first is None for action in unit.actions]
        of_graphs = [touched[n] for n, unit in enumerate(units) if unit.first is not None]
        code = self._code(apart, returned.union(*of_graphs))
        src = SourceCode(**code.names, in_range=torch.profiler.record_function)
        for place, constant in enumerate(self.constants, self.count):
            src.bind(f"t{place}", constant)
        graphs: list[PassGraphs] = []
        number = 0
        for n, unit in enumerate(units):
            if unit.first is not None:
                with src.block(f"def launches_{n}(tensors):"):
                    names = self._names(self._given(units, n))
                    src.add(f"{names}= tensors", "tensors.clear()")
                    leaving = kept.difference(range(self.count)) | later[n]
                    body = self._code(unit.actions, leaving)
                    body.begin(src)
                    self._add(src, unit.actions, body, leaving, number)
                number += len(unit.actions) + len(unit.first)
        with src.block("def play(bodies, inputs):" if of_graphs else "def play(inputs):"):
            if self.count:
                src.add(f"{self._names(range(self.count))}= inputs")
            if self.owns_inputs:
                src.add("inputs.clear()")
            if apart:
                code.begin(src)
            for n, unit in enumerate(units):
                if unit.first is None:
                    self._add(src, unit.actions, code, kept | later[n], number)
                    number += len(unit.actions)
                else:
                    graphs.append(self._add_graph(src, units, n, code, kept | later[n]))
            src.add(f"return {_expression(src, result)}")
        if graphs:  # there are none in ranges of the profiler
            self.graphs = graphs
        functions = src.functions("launches")
        bodies = [
            functions[f"launches_{n}"] for n, unit in enumerate(units) if unit.first is not None
        ]
        return partial(functions["play"], bodies) if bodies else functions["play"]

    def _add_graph(
        self,
        src: SourceCode,
        units: Sequence[_ActionGroup],
        n: int,
        code: _DriverCode | _BackendCode,
        kept: set[int],
    ) -> PassGraphs:
        """Write what comes before the graph of a unit, and its replay by what is returned."""
        for number, action in enumerate(units[n].first or ()):
            if type(action) is Allocation:
                code.allocate(src, action)
            elif type(action) is Piece:
                code.take(src, action)
            else:
                assert type(action) is RecordedCall
                _call(src, number, action, f"view_{n}")
        places = self._given(units, n)
        constants = _touched_by(units[n].actions).intersection(range(self.count, self.made_from))
        address_of = src.bind("address_of", torch.Tensor.data_ptr)  # there may be hundreds
        of_constants = "".join(f"t{place}.data_ptr(), " for place in sorted(constants))
        src.add(
            f"tensors = [{self._names(places)}]",
            f"addresses = (*map({address_of}, tensors), {of_constants})",
        )
        passed = [place for place in places if place not in kept]
        if passed:
            src.add(f"{''.join(f't{place} = ' for place in passed)}None")
        graphs = PassGraphs(self._device or 0)
        body = f"bodies[{sum(unit.first is not None for unit in units[:n])}]"
        src.add(f"{src.bind(f'run_graph_{n}', graphs.run)}({body}, addresses, tensors)")
        return graphs

    def _given(self, units: Sequence[_ActionGroup], n: int) -> list[int]:
        """The places of the tensors that the graph of a unit reads or writes, constants apart."""
        here = {*range(self.count), *_made_by(units[n].first or ())}
        for unit in units[:n]:
            here.update(_made_by((*(unit.first or ()), *unit.actions)))
        pieces = {action.place for action in units[n].actions if type(action) is Piece}
        return sorted((here & _touched_by(units[n].actions)) - pieces)

    @staticmethod
    def _names(places: Iterable[int]) -> str:
        return "".join(f"t{place}, " for place in places)

    @staticmethod
    def _add(
        src: SourceCode,
        actions: Sequence[Action],
        code: _DriverCode | _BackendCode,
        kept: set[int],
        first_number: int,
    ) -> None:
        """Write actions, numbered; what is not ``kept`` is freed after the last that reads it."""
        freed = _last_uses(actions, kept)
        step = contextlib.ExitStack()
        for at, action in enumerate(actions):
            number = first_number + at
            if type(action) is Allocation:
                code.allocate(src, action)
            elif type(action) is Zeroing:
                code.clear(src, action)
            elif type(action) is Piece:
                code.take(src, action)
            elif type(action) is KernelLaunch:
                code.launch(src, number, action)
            elif type(action) is RecordedCall:
                _call(src, number, action)
            elif type(action) is PythonCall:
                target = "" if action.place is None else f"t{action.place} = "
                name = src.bind(f"call_{number}", action.function)
                args = ", ".join(_expression(src, arg) for arg in action.args)
                src.add(f"{target}{name}({args})")
            elif type(action) is ProfilerRange:
                step.close()
                if action.title is not None:
                    step.enter_context(src.block(f"with in_range({action.title!r}):"))
                    src.add("pass")
            if at in freed:
                src.add(f"{''.join(f't{place} = ' for place in freed[at])}None")
        step.close()

    # -- as CUDA graphs -------------------------------------------------------

    def _units(
        self, actions: list[Action], tensors: Sequence[torch.Tensor], result: object
    ) -> tuple[list[_ActionGroup], str]:
        """The actions in units of which some have graphs, and why none has.

        Calls that are made each time, such as collectives, end a unit.
        """
        if pass_graphs.capturer.device_of(self._device) is None:
            return [_ActionGroup(actions)], "graphs are of a GPU"
        if any(tensor.get_device() != tensors[0].get_device() for tensor in tensors):
            return [_ActionGroup(actions)], "it reads tensors of several devices"
        pieces = [action for action in actions if type(action) is Piece]
        of_pieces = {piece.base for piece in pieces}
        rows = [
            (is_call, [action for action in row if type(action) is not Piece])
            for is_call, row in groupby(actions, lambda action: type(action) is PythonCall)
        ]
        units: list[_ActionGroup] = []
        refusals: list[str] = []
        read = set(_places(result))
        for is_call, row in reversed(rows):
            places = _touched_by(row)
            bases = [one for one in row if type(one) is Allocation and one.place in of_pieces]
            others = [one for one in row if one not in bases]
            row = [*bases, *(piece for piece in pieces if piece.place in places), *others]
            unit, refusal = _ActionGroup(row), "it has too few launches"
            if not is_call and sum(map(_is_work, row)) >= FEWEST_CALLS:
                unit, refusal = _graphed(row, read, tensors[0].device)
            if unit.first is None:
                refusals.append(refusal)
            units.insert(0, unit)
            read |= _touched_by(row)
        if any(unit.first is not None for unit in units):
            return units, ""
        return units, refusals[-1] if refusals else "it has too few launches"

    def _needed(self, leaving: set[int]) -> list[Action]:
        """The actions without views and allocations that nothing reads, and that do not leave."""
        read = set(leaving)
        kept: list[Action] = []
        for action in reversed(self.actions):
            if type(action) is Allocation:
                is_needed = action.place in read
            else:
                is_view = type(action) is RecordedCall and action.function.is_view
                is_needed = not (is_view and read.isdisjoint(action.places))
            if is_needed:
                read.update(_read(action))
                kept.append(action)
        return kept[::-1]


def _graphed(row: list[Action], read: set[int], device: torch.device) -> tuple[_ActionGroup, str]:
    """The unit of a graph of actions, and why there can be none; others ``read`` these places."""
    leaving = set(read)
    for action in reversed(row):  # a base leaves with its views
        is_view = type(action) is RecordedCall and action.function.is_view
        if is_view and not leaving.isdisjoint(action.places):
            leaving.update(_read(action))
    first: list[Action] = []
    others: list[Action] = []
    for action in row:
        if type(action) is Allocation and action.place in leaving:
            first.append(action._replace(is_zeroed=False))
            if action.is_zeroed and action.layout.nbytes:
                others.append(Zeroing(action.place, action.layout.nbytes))
        elif type(action) is Piece and action.place in leaving:
            first.append(action)  # of which a view leaves
            others.append(action)
        elif type(action) is RecordedCall and _SEEDED in action.function.tags:
            if {*_read(action)}:
                return _ActionGroup(row), f"{action.function} draws numbers for a tensor"
            first.append(action)  # other numbers at each call
        elif type(action) is RecordedCall and not leaving.isdisjoint(action.places):
            known = set(_read(action))
            if action.function.is_view:
                first.append(action)
            elif leaving.intersection(p for p in action.places if p is not None) <= known:
                others.append(action)  # it returns an argument
            elif action.made is None:
                return _ActionGroup(row), f"what {action.function} returns leaves it"
            else:
                (place,) = action.places
                assert place is not None
                first.append(Allocation(place, action.made, device, is_zeroed=False))
                others.append(_written_to(action, Slot(place)))
        else:
            others.append(action)
    return _ActionGroup(others, first), ""


class _DriverCode:
    """Writes launches as calls of CUDA's driver, over addresses."""

    def __init__(self, device: int, actions: Sequence[Action], result: object) -> None:
        self.device = device
        self.names: dict[str, object] = {"begin": begin, "memset": module.driver_memset()}
        # Zeroed buffers that only launches read are parts of one, which one call clears.
        seen = set(_places(result))
        for action in actions:
            seen.update(_read_as_tensors(action))
        self.offsets: dict[int, int] = {}
        self.zeros = 0
        self.where: torch.device | None = None
        self.pieces = {one.place: one for one in actions if type(one) is Piece}
        self.read = seen
        for action in actions:
            if type(action) is Allocation and action.is_zeroed and action.place not in seen:
                self.offsets[action.place], self.where = self.zeros, action.device
                self.zeros += ceil_div(action.layout.nbytes, ZEROS_ALIGNMENT) * ZEROS_ALIGNMENT

    def begin(self, src: SourceCode) -> None:
        """Write what comes before the first action."""
        src.add(f"launch, buffer, size, stream, extra = begin({self.device})")
        if self.zeros:
            new = partial(torch.empty, self.zeros, dtype=torch.uint8, device=self.where)
            src.add(
                f"zeros = {src.bind(f'new_zeros_{self.zeros}', new)}()  # {self.zeros} bytes",
                "zeros_at = zeros.data_ptr()",
                f"memset(zeros_at, 0, {self.zeros}, stream)",
            )

    def allocate(self, src: SourceCode, action: Allocation) -> None:
        if action.place in self.offsets:
            return
        if empty_on_gpu is None or action.device.type != "cuda":
            _allocate(src, action, torch.empty)
        else:
            new = partial(empty_on_gpu, *action.layout)
            src.add(f"t{action.place} = {src.bind(f'new_{action.place}', new)}()")
        if action.is_zeroed and action.layout.nbytes:
            self.clear(src, Zeroing(action.place, action.layout.nbytes))

    def clear(self, src: SourceCode, action: Zeroing) -> None:
        src.add(f"memset({self._address(action.place)}, 0, {action.nbytes}, stream)")

    def take(self, src: SourceCode, action: Piece) -> None:
        if action.place in self.read:  # launches need its address alone
            _take(src, action)

    def launch(self, src: SourceCode, number: int, action: KernelLaunch) -> None:
        kernel, grid, args = action
        encoded = encode(kernel.symbol, args)
        ready = prepared(kernel, grid, encoded.format, self.device)
        function, sizes, shared_bytes, packer = ready
        values = ", ".join(map(self._value, encoded.values))
        where = ", ".join(map(str, (function, *sizes, shared_bytes)))
        src.add(
            f"# {kernel.symbol}",
            f"{src.bind(f'pack_{number}', packer.pack_into)}(buffer, 0, {values})",
            f"size.value = {packer.size}",
            f"launch({where}, stream, 0, extra)",
        )

    def _value(self, value: Any) -> str:
        """The expression of a value; Python's numbers are packed faster than numpy's."""
        if type(value) is Slot:
            return self._address(value.place)
        number = value.item() if isinstance(value, np.generic) else value
        return repr(number) if math.isfinite(number) else f"float('{number}')"

    def _address(self, place: int) -> str:
        """The expression of the address of a tensor."""
        if place in self.offsets:
            return f"zeros_at + {self.offsets[place]}"
        piece = self.pieces.get(place)
        if piece is not None:
            return f"t{piece.base}.data_ptr() + {piece.offset}"
        return f"t{place}.data_ptr()"


class _BackendCode:
    """Writes launches as calls of another backend, over tensors."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {"filled": filled, "run": launch.backend.run}

    def begin(self, src: SourceCode) -> None:
        """Nothing to prepare."""

    def allocate(self, src: SourceCode, action: Allocation) -> None:
        _allocate(src, action, torch.zeros if action.is_zeroed else torch.empty)

    def clear(self, src: SourceCode, action: Zeroing) -> None:
        src.add(f"t{action.place}.zero_()")

    def take(self, src: SourceCode, action: Piece) -> None:
        _take(src, action)

    def launch(self, src: SourceCode, number: int, action: KernelLaunch) -> None:
        kernel, grid, args = action
        used = sorted(set(_places(args)))
        moved = _moved(args, {place: i for i, place in enumerate(used)})
        tensors = f"({''.join(f't{place}, ' for place in used)})"
        src.bind(f"args_{number}", moved)
        src.add(
            f"# {kernel.symbol}",
            f"run({src.bind(f'kernel_{number}', kernel)}, {src.bind(f'grid_{number}', grid)}, "
            f"tuple([filled(arg, {tensors}) for arg in args_{number}]))",
        )


def _allocate(src: SourceCode, action: Allocation, contiguous: Callable[..., Any]) -> None:
    """Write the allocation of a tensor, by ``contiguous`` if it is."""
    shape, strides, dtype = action.layout
    if strides == torch.empty(shape, device="meta").stride():
        new = partial(contiguous, shape, dtype=dtype, device=action.device)
    else:
        new = partial(torch.empty_strided, shape, strides, dtype=dtype, device=action.device)
    place = action.place
    src.add(f"t{place} = {src.bind(f'new_{place}', new)}()  # {shape}, {dtype}")


def _take(src: SourceCode, piece: Piece) -> None:
    """Write the tensor of a piece."""
    place, base, start, (shape, strides, dtype) = piece
    bytes_ = f"t{base}[{start}:{start + piece.layout.nbytes}]"
    name = src.bind(f"dtype_{place}", dtype)
    src.add(f"t{place} = {bytes_}.view({name}).as_strided({tuple(shape)}, {strides})")


def _call(src: SourceCode, number: int, action: RecordedCall, stem: str = "call") -> None:
    """Write a call of torch, by the fastest of its names."""
    function, args, kwargs, places, returns_tuple, *_ = action
    known = {None, *_places((args, kwargs))}  # an argument that is returned keeps its name
    results = [f"t{place}" if place not in known else "_" for place in places]
    target = f"{''.join(f'{result}, ' for result in results)}" if returns_tuple else results[0]
    arguments = [_expression(src, arg) for arg in args]
    method = _METHODS.get(function)
    if method is not None:
        callee, arguments = f"{arguments[0]}.{method}", arguments[1:]
    else:
        # ``_op`` is the call without Python's wrapper around it.
        operation = _FUNCTIONS.get(function, function._op)
        if "out" in kwargs:
            operation = out_of(function) or operation
        if function is torch.ops.fuser.multiply.default:
            operation = cublaslt.Repeated()
        callee = src.bind(f"{stem}_{number}", operation)
    arguments += [f"{name}={_expression(src, value)}" for name, value in kwargs.items()]
    src.add(f"{target} = {callee}({', '.join(arguments)})  # {function}")


def _expression(src: SourceCode, value: object) -> str:
    """The expression of a value with slots in it."""
    if type(value) is Slot:
        return f"t{value.place}"
    if type(value) is dict:
        return f"{{{', '.join(f'{k!r}: {_expression(src, v)}' for k, v in value.items())}}}"
    if type(value) is tuple:
        return f"({''.join(f'{_expression(src, item)}, ' for item in value)})"
    if type(value) is list:
        return f"[{', '.join(_expression(src, item) for item in value)}]"
    if value is None or type(value) in (int, bool, str):
        return repr(value)
    if type(value) is float and math.isfinite(value):
        return repr(value)
    return src.bind(f"constant_{len(src.names)}", value)


def _places(value: Any) -> Iterable[int]:
    """The places of the slots in a value."""
    if type(value) is Slot:
        yield value.place
    elif type(value) is Struct:
        yield from _places(value.fields)
    elif type(value) is dict:
        yield from _places(tuple(value.values()))
    elif type(value) in (tuple, list):
        for item in value:
            yield from _places(item)


def _moved(value: Any, to: dict[int, int]) -> Any:
    """A value with other places in its slots, where ``to`` has one."""
    return _mapped(
        value, lambda one: Slot(to.get(one.place, one.place)) if type(one) is Slot else one
    )


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with ``change`` of what its structs, dictionaries, tuples and lists contain."""
    if type(value) is Struct:
        return Struct(tuple(_mapped(field, change) for field in value.fields))
    if type(value) is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


def _with_views_at_once(actions: Sequence[Action], returned: set[int]) -> list[Action]:
    """The actions, with tensors allocated as the views that are all that calls of torch read.

    Launches read an address, which the view shares.
    """
    readers: dict[int, list[int]] = {}
    for number, action in enumerate(actions):
        for place in _read_as_tensors(action):
            readers.setdefault(place, []).append(number)
    to: dict[int, int] = {}
    layouts: dict[int, Dense] = {}
    gone: set[int] = set()
    for action in actions:
        if type(action) is not Allocation or action.is_zeroed:
            continue
        last, names, layout = action.place, [], action.layout
        while last not in returned and len(readers.get(last, ())) == 1:
            (number,) = readers[last]
            call = actions[number]
            if type(call) is not RecordedCall or call.view is None or call.places[0] in returned:
                break
            assert call.places[0] is not None
            names.append(last)
            gone.add(number)
            last, layout = call.places[0], call.view
        to |= dict.fromkeys(names, last)
        layouts[action.place] = layout
    remaining: list[Action] = []
    for number, action in enumerate(actions):
        if type(action) is Allocation and action.place in layouts:
            place = to.get(action.place, action.place)
            action = action._replace(place=place, layout=layouts[action.place])
        elif type(action) is KernelLaunch:
            action = action._replace(args=_moved(action.args, to))
        if number not in gone:
            remaining.append(action)
    return remaining


def reads_unwritten(actions: Iterable[Action], result: object) -> bool:
    """Whether memory is read, or leaves in ``result``, that no action has written.

    Then something else has, such as a kernel that a user's op launches by other means.
    """
    unwritten: set[int] = set()
    bases: dict[int, int] = {}
    for action in actions:
        if type(action) is Allocation and not action.is_zeroed and action.layout.nbytes:
            bases[action.place] = action.place
            unwritten.add(action.place)
            continue
        touched = {bases[place] for place in _touched(action) if place in bases} & unwritten
        if type(action) is RecordedCall and touched:
            if action.function.is_view:
                bases |= {place: min(touched) for place in action.places if place is not None}
                continue
            if not schema_of(action.function).is_mutable:
                return True
        unwritten -= touched
    return any(bases.get(place) in unwritten for place in _places(result))


def _read(action: Action) -> Iterable[int]:
    """The places among the arguments of an action."""
    if type(action) is RecordedCall:
        return _places((action.args, action.kwargs))
    if type(action) is KernelLaunch or type(action) is PythonCall:
        return _places(action.args)
    return ()


def _read_as_tensors(action: Action) -> set[int]:
    """The places that an action reads otherwise than by their addresses."""
    return set() if type(action) is KernelLaunch else set(_read(action))


def _touched(action: Action) -> Iterable[int]:
    """The places that an action reads or writes."""
    if type(action) is Zeroing:
        yield action.place
    elif type(action) is Piece:
        yield from (action.place, action.base)
    elif type(action) is not Allocation:
        yield from _read(action)
        yield from _made_by((action,))


def _touched_by(actions: Iterable[Action]) -> set[int]:
    return {place for action in actions for place in _touched(action)}


def _last_uses(actions: Sequence[Action], kept: set[int]) -> dict[int, list[int]]:
    """The places to free after each action: of tensors that nothing reads after it."""
    last = {place: number for number, action in enumerate(actions) for place in _touched(action)}
    for piece in [action for action in actions if type(action) is Piece]:
        last[piece.base] = max(last[piece.base], last[piece.place])
    freed: dict[int, list[int]] = {}
    for place, number in last.items():
        if place not in kept:
            freed.setdefault(number, []).append(place)
    return freed


# -- recording ----------------------------------------------------------------


def record(
    tensors: Sequence[torch.Tensor | None],
    function: Callable[[], Result],
    *,
    constants: Sequence[torch.Tensor] = (),
    runs: Sequence[tuple[int, int]] = (),
    objects: Sequence[object] = (),
    with_calls: bool = False,
    owns_inputs: bool = False,
    pieces: Sequence[tuple[torch.Tensor, Piece]] = (),
) -> tuple[LaunchSequence, Result, Callable[[Any], Any]]:
    """Call ``function``, and record its actions.

    ``tensors`` are the inputs of the sequence; after them come ``objects``, process groups for
    calls that are made each time. ``runs`` are first addresses, and the addresses after the last,
    of inputs that follow one another in one memory whenever the sequence is played: a view may
    reach from one into the next. ``with_calls`` says whether the sequence may call torch, besides
    allocating. ``pieces`` are tensors in the memory of an input, with how they are there; the place
    of one is not read, and its base is the place of the input.

    Returns the sequence, whose ``result`` is not set; the result; and a function that puts slots in
    place of the tensors in a value.
    """
    count = len(tensors) + len(objects)
    sequence = LaunchSequence(count, constants, owns_inputs=owns_inputs)
    recorder = _SequenceRecorder(tensors, objects, sequence, runs, with_calls)
    for tensor, piece in pieces:
        sequence.actions.append(piece._replace(place=recorder.new(tensor)))
    recording, failure = launch.recording, module.compile_failure
    outer = recording.listener, recording.recorder
    recording.listener, recording.recorder = recorder.launched, recorder
    try:
        with recorder:
            result = function()
    finally:
        recording.listener, recording.recorder = outer
    if module.compile_failure is not failure:
        recorder.refuse("a kernel did not compile")
    return sequence, result, recorder.slotted


class _Unwrapped:
    """The dispatch of a mode, for torch does not wrap a method that is inherited.

    The first call of torch's wrapper imports torch._dynamo. That takes a second, and keeps the
    frames of the call, and so the user's model, until the garbage collector runs.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatched(func, types, args, kwargs or {})

    def dispatched(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _SequenceRecorder(_Unwrapped, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes the calls of torch and every launch."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor | None],
        objects: Sequence[object],
        sequence: LaunchSequence,
        runs: Sequence[tuple[int, int]],
        with_calls: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sequence = sequence
        self.runs = runs
        self.with_calls = with_calls
        self.count = sequence.made_from
        # A sequence makes tensors where its inputs are.
        all_tensors = [*tensors, *sequence.constants]
        self.devices = {tensor.device for tensor in all_tensors if tensor is not None}
        # Weak, so that recording keeps no memory; an id can be used again after a tensor is gone.
        self.places: dict[int, tuple[TensorWeakRef, int]] = {}
        # Objects besides tensors, with their places.
        self.objects = {id(one): (one, place) for place, one in enumerate(objects, len(tensors))}
        self.is_in_call = False
        """Whether a call is running that is repeated as a whole."""
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                self._put(tensor, place)
        for place, tensor in enumerate(sequence.constants, sequence.count):
            self._put(tensor, place)

    def dispatched(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.is_in_call:
            return func(*args, **kwargs)
        if func.namespace == "profiler":
            is_begin = type(args[0]) is str
            self.sequence.actions.append(ProfilerRange(args[0] if is_begin else None))
            return func(*args, **kwargs)
        if self.with_calls and any(issubclass(kind, WrapperTensor) for kind in types):
            with self:  # the operations on its buffers are recorded
                return types[0].__torch_dispatch__(func, types, args, kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is _aten._unsafe_view.default:  # of a product that has no other name
            func = _aten.view.default
        if func is _aten.squeeze_.dim and self.with_calls:
            return self._squeezed(*args)
        result = func(*args, **kwargs)
        if _is_on_meta(result):  # the position of a view of a quantized tensor
            return result
        if func in _ALLOCATING and result.device in self.devices and result.is_contiguous():
            where = (result.device, func in _ZEROING)
            self.sequence.actions.append(Allocation(self.new(result), _dense(result), *where))
        elif self.with_calls:
            self._called(func, args, kwargs, result)
        elif not func.is_view:
            self.refuse(f"{func} is called")
        elif _are_alike(result, args[0]) and (place := self._place(args[0])) is not None:
            self._put(result, place)
        return result

    def _squeezed(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Remove a dimension, as a product with a vector does, and record a view in its place.

        A graph replays no change of the shape of a tensor.
        """
        arguments = self.slotted((tensor, dim))
        tensor.squeeze_(dim)
        call = RecordedCall(
            _aten.squeeze.dim, arguments, {}, (self.new(tensor),), returns_tuple=False
        )
        self.sequence.actions.append(call)
        return tensor

    def launched(self, kernel: Kernel, shape: Launch, args: tuple[object, ...]) -> None:
        """Record a launch."""
        if self.is_in_call:
            return
        self.sequence.actions.append(KernelLaunch(kernel, shape, tuple(map(self.slotted, args))))

    def called(self, function: Callable[..., Result], args: tuple[object, ...]) -> Result:
        """Call, and record it as a whole: :func:`fuser.cuda.launch.call_each_time`."""
        if self.is_in_call:
            return function(*args)
        if not self.with_calls:
            self.refuse(f"{function.__qualname__} is called")
        slots = tuple(map(self._argument, args))
        self.is_in_call = True
        try:
            result = function(*args)
        finally:
            self.is_in_call = False
        place = None
        if isinstance(result, torch.Tensor):
            place = self.new(result)
        elif result is not None:
            place, self.count = self.count, self.count + 1
            self.objects[id(result)] = (result, place)
        self.sequence.actions.append(PythonCall(function, slots, place))
        return result

    def _argument(self, value: Any) -> Any:
        """An argument of a call that is made each time, with slots."""
        if id(value) in self.objects:
            return Slot(self.objects[id(value)][1])
        if type(value) in (tuple, list):
            return type(value)(map(self._argument, value))
        if not isinstance(value, (torch.Tensor, *_CONSTANTS)):
            self.refuse(f"it passes on a {type(value).__name__} that is neither an input nor made")
        return self.slotted(value)

    def _called(self, func: Any, args: Any, kwargs: Any, returned: Any) -> None:
        if func is _aten.promote_types.default:  # of dtypes alone
            return
        if not _REJECTED.isdisjoint(func.tags) and not _indexes_by_numbers(func, args):
            self.refuse(f"{func} reads values")
            return
        if func is _aten.as_strided.default and not self._is_within(returned, args, kwargs):
            self.refuse("it reads memory beside a tensor")  # which other tensors may not have
            return
        arguments = tuple(map(self.slotted, args)), self.slotted(dict(kwargs))
        results = returned if isinstance(returned, (tuple, list)) else (returned,)
        places: list[int | None] = []
        for result in results:
            if isinstance(result, torch.Tensor):
                if type(result) not in PLAIN or result.device not in self.devices:
                    self.refuse(f"{func} returns a {type(result).__name__} on {result.device}")
                place = self._place(result)
                places.append(self.new(result) if place is None else place)
            elif result is None:
                places.append(None)
            else:
                self.refuse(f"{func} returns a {type(result).__name__}")
        view = None
        if (
            func in _REORDERING
            and returned is not args[0]
            and returned.data_ptr() == args[0].data_ptr()
        ):
            view = _dense(returned)
        layout = None
        if not func.is_view and out_of(func) is not None and _fills_its_memory(returned):
            layout = _dense(returned)
        self.sequence.actions.append(
            RecordedCall(
                func, *arguments, tuple(places), isinstance(returned, (tuple, list)), view, layout
            )
        )
        base = self._place(args[0]) if func.is_view and _are_alike(returned, args[0]) else None
        if base is not None and places[0] not in (None, base):
            self.sequence.names[places[0]] = base

    def _is_within(self, view: torch.Tensor, args: Any, kwargs: Any) -> bool:
        """Whether a strided view has no memory but that of its base, or of the inputs beside it."""
        if not view.numel():
            return True
        if len(args) > 3 or kwargs:
            return False  # an offset is that in the storage, where another base is elsewhere
        base, start, end = args[0], view.data_ptr(), end_of(view)
        spans = [(base.data_ptr(), end_of(base)), *self.runs]
        return any(first <= start and end <= last for first, last in spans)

    def slotted(self, value: Any) -> Any:
        """``value`` with slots in place of tensors."""
        return _mapped(value, self._slot)

    def _slot(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = self._place(value)
        if place is None:
            self.refuse("it reads or returns a tensor that is neither an input nor its own")
            return None
        return Slot(place)

    def _place(self, tensor: torch.Tensor) -> int | None:
        known = self.places.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def new(self, tensor: torch.Tensor) -> int:
        """The place of a tensor that is not known yet."""
        place, self.count = self.count, self.count + 1
        self._put(tensor, place)
        return place

    def _put(self, tensor: torch.Tensor, place: int) -> None:
        self.places[id(tensor)] = (TensorWeakRef(tensor), place)

    def refuse(self, reason: str) -> None:
        """Note that the actions cannot be repeated."""
        self.sequence.refusal = self.sequence.refusal or reason


def _is_on_meta(result: object) -> bool:
    """Whether an operation returned tensors without values, which the layouts determine."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    return isinstance(first, torch.Tensor) and first.is_meta


def _dense(tensor: torch.Tensor) -> Dense:
    return Dense(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor that a call made has all of its memory, in some order of dimensions."""
    is_all = tensor.untyped_storage().nbytes() == tensor.nbytes
    return is_all and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _is_work(action: Action) -> bool:
    """Whether an action launches something on a GPU."""
    if type(action) is RecordedCall:
        return not action.function.is_view
    return type(action) is KernelLaunch


def _written_to(call: RecordedCall, out: Slot) -> RecordedCall:
    """A call of :data:`_OUT` that writes into a tensor."""
    if call.function in _COPIES:
        return RecordedCall(_aten.copy_.default, (out, call.args[0]), {}, call.places, False)
    return call._replace(kwargs={**call.kwargs, "out": out})


def _made_by(actions: Iterable[Action]) -> Iterable[int]:
    """The places of the tensors that allocations and views make."""
    for action in actions:
        if type(action) is Allocation:
            yield action.place
        elif type(action) is RecordedCall:
            yield from (place for place in action.places if place is not None)
        elif type(action) is PythonCall and action.place is not None:
            yield action.place


def _indexes_by_numbers(func: Any, args: Any) -> bool:
    """Whether this is an index by integers, whose result has their shape; masks count values."""
    return func is _aten.index.Tensor and all(
        index is None or index.dtype in (torch.int32, torch.int64) for index in args[1]
    )


def _are_alike(one: Any, other: Any) -> bool:
    """Whether a view is another name of the whole tensor, such as the view that users get."""
    return (
        isinstance(one, torch.Tensor)
        and one.data_ptr() == other.data_ptr()
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    )


# Arguments that are the same in every repetition.
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
_aten = torch.ops.aten
_ZEROING = frozenset((_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default))
_ALLOCATING = frozenset(
    (_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, *_ZEROING)
)
# Views that have all elements of a tensor, in as many bytes.
_REORDERING = frozenset(
    (_aten.view.default, _aten.view.dtype, _aten.t.default, _aten.transpose.int)
)
# Their results depend on values, and so may what follows.
_REJECTED = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
# Python's own names of operations, which are called faster than an operation itself.
_METHODS = {
    _aten.view.default: "view",
    _aten.view.dtype: "view",
    _aten.t.default: "t",
    _aten.detach.default: "detach",
    _aten.transpose.int: "transpose",
    _aten.as_strided.default: "as_strided",
}
_FUNCTIONS = {
    _aten.mm.default: torch.mm,
    _aten.addmm.default: torch.addmm,
    _aten._scaled_mm.default: scaled_mm,
    _aten.constant_pad_nd.default: torch.constant_pad_nd,
    _aten.add.Tensor: torch.add,
    _aten.gelu.default: gelu,
    _aten.mul.Tensor: torch.mul,
    _aten.sum.dim_IntList: torch.sum,
}
# The same with their result in memory that is given, and others by their fastest names.
_OUT: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: torch.mm,
    _aten.addmm.default: torch.addmm,
    _aten._scaled_mm.default: scaled_mm,
    _aten.add.Tensor: torch.add,
    _aten.mul.Tensor: torch.mul,
    _aten.sum.dim_IntList: torch.sum,
    _aten.stack.default: torch.stack,
    _aten.cat.default: torch.cat,
    _aten.clone.default: torch.clone,
    _aten._to_copy.default: _aten._to_copy.default,
}


@cache
def out_of(function: Any) -> Callable[..., Any] | None:
    """What writes the result of an operation into ``out``; None if there is no such form.

    The result of a call may leave a CUDA graph if there is one.
    """
    if function in _OUT:
        return _OUT[function]
    inputs = [(argument.name, str(argument.type)) for argument in schema_of(function).arguments]
    packet = function.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = schema_of(overload).arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        others = [
            (argument.name, str(argument.type)) for argument in arguments if not argument.is_out
        ]
        if outs == ["out"] and others == inputs:
            written: Callable[..., Any] = overload
            return written
    return None


_COPIES = frozenset((_aten.clone.default, _aten._to_copy.default))
_SEEDED = torch.Tag.nondeterministic_seeded
