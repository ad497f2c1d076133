"""Recorded passes: the forward and backward of a plan as one function of tensors.

A plan's generated code calls its ops, and an op decides, checks and allocates. If the tensors of a
call have the layouts of an earlier call, the ops decide the same. The second call of a layout is
recorded (:mod:`fuser.cuda.sequence`), and later calls only allocate, launch, call torch and
communicate.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import Parameter

from fuser.basic_ops.main_grad import accumulation, note_accumulation
from fuser.basic_ops.shared_memory import Versions
from fuser.basic_ops.weights import KeepsWeights, KeptBefore, as_list
from fuser.communication import Group, WeakGroup, resolved
from fuser.cuda import launch
from fuser.cuda.arguments import PLAIN
from fuser.cuda.pass_graphs import Switch
from fuser.cuda.repeated import constant_launches, repeated_launches
from fuser.cuda.sequence import LaunchSequence, Piece, record
from fuser.doors import PASSES, PassRunner
from fuser.errors import InputError, StateError
from fuser.functional.lazy import LazyTensor
from fuser.op import (
    BasicOperation,
    FusibleOperation,
    OperationContext,
    autocast_dtype,
    context_of,
)
from fuser.precision.contexts import current_state
from fuser.precision.delayed_scaling import (
    DelayedScales,
    delayed_quantizers,
    is_evaluating,
    note_uses,
    noting_uses,
)
from fuser.precision.recomputation import is_in_checkpoint
from fuser.recipe import DelayedScaling, Recipe
from fuser.runtime.executor import CompiledPlan
from fuser.runtime.gradient_paths import Needed, needing
from fuser.runtime.known_parameters import (
    MOST_LAYOUTS,
    BuffersOf,
    ParameterLayout,
    QuantizedFacts,
    buffers_reader,
    tensor_guard,
)
from fuser.runtime.saved_tensors import GatheredPart, Part, saved_as, tensor_of
from fuser.source import SourceCode
from fuser.tensors import Float8Quantizer, QuantizedTensor
from fuser.tensors.base import USAGES, note_backward_read
from fuser.torch_private import (
    dispatch_modes,
    is_any_autocast_enabled,
    is_in_selective_checkpoint,
    saved_tensor_hooks,
    without_autocast,
)

# As many layouts without a recording are remembered.
MOST_SEEN = 4 * MOST_LAYOUTS

Tensors = Sequence[torch.Tensor | None]
# Process groups, and the last op that communicates over each.
Groups = dict[Any, str]
# Reads the layouts of tensors; None if the memory of one does not hold its values.
Reader = Callable[[Tensors], tuple[Hashable, ...] | None]
# By op, the weights whose ``main_grad`` it adds to; None for one whose gradient it returns.
Owners = dict[int, tuple[torch.Tensor | None, ...]]
Forward = Callable[..., tuple[object, ...]]
Backward = Callable[..., tuple[torch.Tensor | None, ...]]


def refusal_of(op: FusibleOperation) -> str | None:
    """Why the steps of an op are not recorded; None if layouts decide all that they do.

    Fuser's own say it. Those of a user do if a class of the user's sets ``is_recordable``.
    """
    name = type(op).__name__
    if op.has_own_methods():
        return f"{name} has a method of its own, which was set on the object"
    of_user = [cls for cls in type(op).__mro__ if cls.__module__.partition(".")[0] != "fuser"]
    is_external = of_user[0] is type(op)
    if is_external and not any("is_recordable" in vars(cls) for cls in of_user):
        return f"{name} runs code that is not fuser's, and does not say that is_recordable is True"
    if getattr(op, "is_recordable", True):
        return None
    if getattr(op, "delay_wgrad_compute", False):
        return f"{name} leaves weight gradients to backward_dw"
    if is_external:
        return f"{name} says that is_recordable is {op.is_recordable}"
    return f"{name} reads a number of rows on the host"


def _refusal(recipe: Recipe | None, ops: Iterable[FusibleOperation]) -> str | None:
    """Why passes of ``ops`` are not recorded; None if they are."""
    if recipe is not None and recipe.custom():
        return "the recipe is custom"
    for op in ops:
        if (refusal := refusal_of(op)) is not None:
            return refusal
    if isinstance(recipe, DelayedScaling) and recipe.keeps_columns("input"):
        return "columns of inputs that are kept share their memory"
    return None


class RecordingPasses(PassRunner):
    """Passes and launches that are recorded once, and then repeated."""

    constant_launches = staticmethod(constant_launches)
    repeated_launches = staticmethod(repeated_launches)

    def recorded(
        self, plan: CompiledPlan, steps: Iterable[FusibleOperation]
    ) -> RecordedPasses | None:
        recipe = plan.key.recipe
        others = [op for i, op in enumerate(plan.ops) if i not in plan.counters]
        counted = {id(plan.ops[i]) for i in plan.counters}
        if _refusal(recipe, [*others, *(op for op in steps if id(op) not in counted)]) is not None:
            return None
        return RecordedPasses(plan.ops, recipe if isinstance(recipe, DelayedScaling) else None)

    def replays(self, plan: CompiledPlan) -> list[tuple[str | None, str]]:
        if plan.recorded is not None:
            recorded: RecordedPasses = plan.recorded
            return recorded.described()
        if not plan.runs_kernels:
            return []
        refusal = _refusal(plan.key.recipe, plan.ops) or "a fusion is not fuser's, or it is cut"
        return [(None, f"step by step: {refusal}")]


PASSES.open(RecordingPasses())


class Keywords(NamedTuple):
    """The keyword arguments of a call: what a recording depends on, and what it reads and keeps."""

    key: Hashable
    kept: tuple[torch.Tensor, ...] = ()
    """Inputs after the others: the buffers of quantized parameters, those of quantized weights of
    an earlier microbatch, and the scales that a recomputation reads."""
    before: tuple[KeptBefore, ...] = ()


NO_KEYWORDS = Keywords(None)
# Their representations say everything.
_CONSTANTS = frozenset((bool, int, float, str, type(None)))


def keywords_of(
    ops: Sequence[BasicOperation], rows: Sequence[Mapping[str, Any]]
) -> Keywords | None:
    """The keyword arguments ``rows`` of ``ops``; None if a pass with them cannot be repeated."""
    values = [value for row in rows for value in row.values()]
    if not _CONSTANTS.issuperset(map(type, values)) or {dict} != {*map(type, rows)}:
        return None
    key: list[Hashable] = [repr(rows)]
    kept: list[torch.Tensor] = []
    kept_before = []
    for op, row in zip(ops, rows, strict=True):
        is_first = row.get("is_first_microbatch")
        if is_first is None or not isinstance(op, KeepsWeights):
            continue
        weights = op.weights_to_keep()
        if weights is None:
            return None
        before = KeptBefore.of(op, weights, is_first)
        key.append(before is None)
        if before is None:
            continue
        kept_before.append(before)
        if before.kept is not None:
            if before.kept.layout is None:
                return None
            key.append(before.kept.layout)
            kept += before.kept.buffers
    return Keywords(tuple(key), tuple(kept), tuple(kept_before))


class RecordedPasses:
    """The recorded forwards of a compiled plan, by the layouts of their tensors.

    A change of an attribute of one of ``ops`` is a new layout. So are new quantizers of a state:
    ``recipe`` is that of the plan, if it is delayed scaling.
    """

    def __init__(self, ops: Sequence[BasicOperation], recipe: DelayedScaling | None) -> None:
        self._ops = ops
        self._communicating = [op for op in ops if op.process_groups]
        self._recipe = recipe
        modes = ("forward", "backward") if recipe is not None else ()
        self._quantizing = [op for op in ops if any(map(op.num_quantizers, modes))]
        self.packs = True
        """Whether what a backward alone reads may be one tensor."""
        self._forwards: _Recordings[RecordedForward] = _Recordings()
        self._readers: dict[int, Reader] = {}

    def described(self) -> list[tuple[str | None, str]]:
        """How the passes of each layout have run, the latest last: a side, and a text."""
        forwards = list(self._forwards.values())  # another thread may record
        return [line for forward in forwards for line in forward.described()]

    def emptied(self) -> RecordedPasses:
        """As this was at first."""
        return RecordedPasses(self._ops, self._recipe)

    def find(
        self,
        tensors: Tensors,
        extra_count: int,
        parameters: ParameterLayout,
        rows: Sequence[Mapping[str, Any]] | None = None,
        with_buffers: Sequence[torch.Tensor] | None = None,
    ) -> tuple[RecordedForward, Keywords, Groups] | None:
        """The recorded forward for such tensors: the input, parameters, and extra inputs.

        And for ``rows``, the keyword arguments of each op; with the process groups of this call,
        which are inputs too, and so are the buffers of quantized parameters: ``with_buffers`` are
        the parameters, then these, if they have been read. New for the second call of a layout:
        :meth:`RecordedForward.run` records then. None if there is none, and the plan's own code
        must run.
        """
        is_hooked = saved_tensor_hooks(False) is not None
        if (is_hooked and not is_in_checkpoint()) or launch.recording.listener is not None:
            return None
        if dispatch_modes() and is_in_selective_checkpoint():
            return None
        reader = self._readers.get(extra_count)
        if reader is None:
            reader = self._readers[extra_count] = _reader(1 + extra_count, self._ops)
        first_extra = len(tensors) - extra_count
        others = (tensors[0], *tensors[first_extra:])
        layout = reader(others)
        if layout is None:
            return None
        places = list(map(id, others))
        params: Sequence[Any] = tensors[1:first_extra]
        buffers: Sequence[torch.Tensor] = ()
        if parameters.quantized:
            if with_buffers is None:
                with_buffers = parameters.with_buffers(params)
            if with_buffers is None:  # another thread has changed one
                return None
            buffers, params = with_buffers[len(params) :], with_buffers
        may_be_parameter = Parameter in map(type, others) or not parameters.are_parameters
        if may_be_parameter and not set(places).isdisjoint(map(id, params)):
            return None  # a parameter is given as an input too
        ties = None
        if len(set(places)) < len(places):  # one tensor is given twice, such as split sizes
            ties = tuple(map(places.index, places))
        quantizers: list[list[Float8Quantizer]] = []
        scales = is_evaluated = None
        if self._recipe is not None:
            assert tensors[0] is not None  # it has a layout
            states = [op._delayed for op in self._quantizing]
            current = delayed_quantizers(self._recipe, states, tensors[0].device)
            if current is None:
                return None
            (quantizers, scales), is_evaluated = current, is_evaluating()
        keywords = keywords_of(self._ops, rows) if rows and any(rows) else NO_KEYWORDS
        if keywords is None:
            return None
        groups: Groups = {}
        group_key: Hashable = None
        if self._communicating:
            current_groups = self._groups_of(others)
            if current_groups is None:
                return None
            groups, group_key = current_groups
        # Under hooks a gathered parameter notes more reads, and all ranks have to gather the same.
        layout = (layout, ties, parameters, group_key, is_hooked and parameters.is_gathered)
        layout = (*layout, keywords.key, is_evaluated, *map(id, quantizers))
        call = next(self._forwards.calls)
        forward = self._forwards.get(layout)
        if forward is None:
            if not self._forwards.has_room(layout, call, is_first=False):
                return None
            forward = RecordedForward(quantizers, parameters, groups, packs=self.packs)
            self._forwards[layout] = forward
        forward.last_use = call
        if forward.refusal is not None:
            return None
        if buffers or scales:
            kept = (*buffers, *keywords.kept, *(scales or ()))
            keywords = Keywords(keywords.key, kept, keywords.before)
        return forward, keywords, groups

    def _groups_of(self, inputs: Tensors) -> tuple[Groups, Hashable] | None:
        """The process groups of a call, and what a recording depends on in them.

        None if the plan's own code must run: a group is refused, or an input has more than its
        values, such as the sizes of an exchange.
        """
        if any(vars(tensor) for tensor in inputs):
            return None
        resolved_groups: dict[int, Group] = {}
        groups: Groups = {}
        try:
            for op in self._communicating:
                name = type(op).__name__
                for argument in op.process_groups:
                    group = resolved_groups.get(id(argument))
                    if group is None:
                        group = resolved_groups[id(argument)] = resolved(name, argument)
                    groups[group] = name
        except (InputError, StateError):
            return None
        over = current_state().group if self._recipe is not None else None
        return groups, (over and weakref.ref(over), *map(weakref.ref, groups))


Used = TypeVar("Used", bound="RecordedForward | LaunchSequence")


class _Recordings(dict[Hashable, Used]):
    """Recordings by their layouts: at most ``MOST_LAYOUTS``, of those that recur soonest.

    If more layouts come in turn, the first keep their places and are repeated. A layout that recurs
    sooner takes the place of the one that was not used for longest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)
        """Numbers the calls."""
        self._seen: dict[Hashable, int] = {}
        """The last calls of the latest layouts without a recording."""

    def has_room(self, layout: Hashable, call: int, *, is_first: bool) -> bool:
        """Whether to record a layout now, in the place of another if there is no other.

        Not if ``call`` is the first with the layout, unless ``is_first`` and a place is free.
        """
        before = self._seen.pop(layout, 0)
        while len(self._seen) >= MOST_SEEN:
            self._seen.pop(next(iter(self._seen)), None)
        self._seen[layout] = call
        if len(self) < MOST_LAYOUTS:
            return is_first or before > 0
        oldest = min(list(self.items()), key=lambda pair: pair[1].last_use)
        if oldest[1].last_use >= before:
            return False
        self.pop(oldest[0], None)
        return True


def _reader(count: int, ops: Sequence[BasicOperation] = ()) -> Reader:
    """A function of tensors that returns everything that launches over them depend on.

    With ``ops``, also the numbers of changes of their attributes. It returns None if the memory of
    a tensor does not hold its values, or was freed.
    """
    names = [f"t{i}" for i in range(count)]
    src = SourceCode(launch=launch, PLAIN=PLAIN)
    states = [src.bind(f"state{i}", op.__dict__) for i, op in enumerate(ops)]
    with src.block("def read(tensors):"):
        src.add(f"{''.join(f'{name}, ' for name in names)}= tensors")
        with src.block("try:"):
            for t in names:
                src.add(
                    f"if type({t}) not in PLAIN or {t}.is_neg(): return None",
                    f"if not (at_{t} := {t}.data_ptr()) and {t}.numel(): return None",
                )
        with src.block("except RuntimeError:  # a tensor without memory of its own"):
            src.add("return None")
        with src.block("return ("):
            src.add("id(launch.backend),", *(f"{state}.get('_changes')," for state in states))
            for t in names:
                src.add(f"{t}.dtype, {t}.shape, {t}.stride(), {t}.get_device(), at_{t} & 15,")
        src.add(")")
    return src.functions("layout")["read"]


_reader_of = functools.cache(_reader)


class _Keeps(NamedTuple):
    """Quantized weights that a forward keeps: of one of :attr:`Keywords.before`."""

    place: int
    how: tuple[object, ...]
    parts: list[Part]
    is_list: bool

    def keep(self, before: Sequence[KeptBefore], held: Sequence[torch.Tensor]) -> None:
        """Keep them, in other buffers."""
        weights = [tensor_of(part, held) for part in self.parts]
        before[self.place].keep(self.how, weights if self.is_list else weights[0])


class _GivenParameter(NamedTuple):
    """In place of a quantized parameter in a context: its number among those of the call.

    Or in place of a saved copy of a gathered one, which is in other memory by the backward.
    """

    number: int
    usage: str | None = None

    @classmethod
    def at(cls, place: int, places: list[int], usage: str | None = None) -> _GivenParameter:
        """For the parameter at a place, which is added to ``places`` if it is not there."""
        if place not in places:
            places.append(place)
        return cls(places.index(place), usage)

    def of(self, parameters: Sequence[Any]) -> Any:
        """The parameter or its copy, of the parameters of a call."""
        parameter = parameters[self.number]
        return parameter if self.usage is None else parameter.with_usage(self.usage)


class _ReadLayouts(NamedTuple):
    """Of the saved tensors, those whose layouts a backward depends on, by their numbers."""

    inputs: tuple[int, ...]
    """The inputs: ``.data`` may give them another layout."""
    buffers_of: BuffersOf | None
    """Reads the buffers of quantized parameters, which are after those that contexts hold and are
    counted too; None if there are none, or if some are gathered."""
    again: tuple[int, ...] = ()
    """The numbers of quantized parameters if some are gathered, whose memory is another then."""


class _Recording(NamedTuple):
    """A recorded forward."""

    sequence: LaunchSequence
    used: list[DelayedScales]
    """The states of delayed scaling that record in it, in their order."""
    keeps: list[_Keeps]
    """The weights that it keeps for other microbatches."""
    contexts: Sequence[tuple[type[OperationContext], dict[str, object]]] = ()
    saved: Sequence[Part | _GivenParameter] = ()
    """How to make each saved tensor from those that the forward saves."""
    kept: tuple[int, ...] = ()
    """Of those, the ones that are no piece of another; the last that the sequence returns has the
    pieces."""
    saved_count: int = 0
    """The number of saved tensors if each piece is one."""
    read: tuple[_ReadLayouts, _ReadLayouts] = (_ReadLayouts((), None), _ReadLayouts((), None))
    """Of the saved tensors themselves, and where the last has the pieces."""
    ends: tuple[int, ...] = ()
    specs: tuple[object, ...] = ()
    """Shape and dtype of every extra output."""
    versioned: Sequence[tuple[int, str, Callable[[Tensors], Any]]] = ()
    """The ops whose contexts hold versions, with their owners, and what picks their tensors."""
    given: Sequence[int] = ()
    """The places of the quantized parameters that contexts hold."""
    noted: Sequence[tuple[int, str]] = ()
    """The copies of gathered parameters that its backward reads, with their places."""

    def packed(self, saved: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The saved tensors of the call that is recorded, as those of a repetition."""
        others = [tensor for i, tensor in enumerate(saved) if i in self.kept]
        return (
            *others,
            self.sequence.packed([t for i, t in enumerate(saved) if i not in self.kept]),
        )

    def whole(self, saved: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The saved tensors, with each piece as a tensor."""
        *others, last = saved
        pieces = iter([piece.of(last) for piece in self.sequence.pieces])
        kept = dict(zip(self.kept, others, strict=True))
        return tuple([kept[i] if i in kept else next(pieces) for i in range(self.saved_count)])


class RecordedForward:
    """A recorded forward, and the backwards that were recorded after it.

    It saves the buffers of quantized tensors, and makes the tensors only for a backward that is not
    recorded. Recordings are below torch's autocast: they run without it.
    """

    def __init__(
        self,
        quantizers: list[list[Float8Quantizer]],
        parameters: ParameterLayout,
        groups: Groups,
        *,
        packs: bool = True,
    ) -> None:
        self.refusal: str | None = None
        """Why the forward cannot be repeated; None if it can."""
        self._parameters = parameters
        self._groups = [(WeakGroup(group), op) for group, op in groups.items()]
        self._quantizers = quantizers  # held, so that no other list has its id
        self._packs = packs
        self._constants = [
            tensor
            for quantizer in itertools.chain(*quantizers)
            for tensor in quantizer.state_tensors()
            if tensor is not None
        ]
        # Set once, when complete: another thread may record or run it at the same time.
        self._recording: _Recording | None = None
        self.last_use = 0
        """The number of the call that used it last, of those of its plan."""
        self._backwards: _Recordings[LaunchSequence] = _Recordings()
        # The buffers of the last backward: their guard, addresses and layout. There are hundreds.
        self._last_buffers: tuple[Callable[..., bool] | None, list[int], Hashable]
        self._last_buffers = (None, [], None)
        # Of gathered parameters of the last backward: what reads their buffers, and facts.
        self._last_again: tuple[BuffersOf | None, Hashable] = (None, None)

    def run(
        self, tensors: Tensors, keywords: Keywords, groups: Groups, forward: Forward, *args: object
    ) -> tuple[object, ...]:
        """The results of ``forward(*args)``, which reads ``tensors`` and has these ``keywords``.

        It communicates over ``groups``.

        If it needs a backward, these are the output, the extra outputs, this object with versions
        and quantized parameters for :meth:`backward`, the tensors to save, None, and the shapes and
        dtypes of the extra outputs. The first call records; if the forward cannot be repeated, it
        returns what ``forward`` returned.
        """
        if keywords.kept:
            tensors = (*tensors, *keywords.kept)
        known = self._recording
        if known is None:
            return self._record(tensors, keywords, groups, lambda: forward(*args))
        if known.used:
            note_uses(known.used)
        for place, usage in known.noted:
            note_backward_read(tensors[place], usage)
        inputs = (*tensors, *groups) if groups else tensors
        is_packed = (
            bool(known.sequence.pieces)
            and Switch.is_on  # without graphs a backward frees what it has read
            and saved_tensor_hooks(False) is None  # a checkpoint compares what is saved
        )
        results: tuple[Any, ...] = _played(known.sequence, inputs, is_packed)
        if known.keeps:
            for weights in known.keeps:
                weights.keep(keywords.before, results[-1])
            results = results[:-1]
        if len(results) == 2:
            return results
        output, produced, saved = results
        versions: dict[int, Versions] = {}
        for i, owner, picked in known.versioned:
            versions[i] = Versions(picked(tensors), owner)
        parameters = self.given(tensors) if known.given else ()
        return output, produced, (self, versions, parameters), saved, None, known.specs

    def described(self) -> list[tuple[str | None, str]]:
        """How its passes have run: for each a side and a text."""
        if self._recording is None:
            return [("forward", f"step by step: {self.refusal}")] if self.refusal else []
        passes = [("forward", self._recording.sequence)]
        passes += [("backward", sequence) for sequence in list(self._backwards.values())]
        return [
            (side, one.described() if one.is_complete else f"step by step: {one.refusal}")
            for side, one in passes
        ]

    @property
    def holds_parameters(self) -> bool:
        """Whether contexts hold quantized parameters."""
        return self._recording is not None and bool(self._recording.given)

    def given(self, tensors: Sequence[Any]) -> list[Any]:
        """The quantized parameters that contexts hold, of the ``tensors`` of a call."""
        assert self._recording is not None
        return [tensors[place] for place in self._recording.given]

    def _record(
        self,
        tensors: Tensors,
        keywords: Keywords,
        groups: Groups,
        forward: Callable[[], tuple[Any, ...]],
    ) -> tuple[Any, ...]:
        """The results of ``forward``, as :meth:`run` returns them, which is recorded."""
        versions: dict[int, Versions] = {}
        quantized = {id(tensors[1 + at]): (1 + at, f) for at, f in self._parameters.quantized}
        with noting_uses() as used, _noting_reads(tensors, quantized) as noted:
            sequence, results, slotted = record(
                tensors,
                forward,
                constants=self._constants,
                runs=self._parameters.memory(tensors[1:]),
                objects=list(groups),
                with_calls=True,
            )
        output, produced, *rest = results
        kept: tuple[Any, ...] = (output, produced)
        recording = _Recording(sequence, list(dict.fromkeys(used)), [], noted=noted)
        if type(output) is not torch.Tensor:
            sequence.refusal = f"the output is a {type(output).__name__}"
        if any(vars(tensor) for tensor in produced if tensor is not None):
            sequence.refusal = sequence.refusal or "an output has more than its values"
        if rest:
            contexts, to_save, ends, specs = rest
            values = [dict(context.__dict__) for context in contexts]
            versions = {i: v.pop("versions") for i, v in enumerate(values) if "versions" in v}
            held: list[torch.Tensor] = []
            given: list[int] = []
            values = [
                {name: _without(value, quantized, given) for name, value in attributes.items()}
                for attributes in values
            ]
            recording = recording._replace(
                contexts=list(zip(map(type, contexts), values, strict=True)),
                saved=[
                    _copy_of_gathered(tensor, tensors, quantized, given)
                    or _recorded_as(tensor, held, sequence, quantized)
                    for tensor in to_save
                ],
                given=given,
                ends=ends,
                specs=specs,
                versioned=[
                    (i, of_op.owner, _picked(of_op.tensors, tensors, sequence))
                    for i, of_op in versions.items()
                ],
            )
            if any(_holds_tensors(list(attributes.values())) for attributes in values):
                sequence.refusal = sequence.refusal or "a context holds a tensor"
            kept = (output, produced, tuple(held))
        buffers: list[torch.Tensor] = []
        for place, before in enumerate(keywords.before):
            if (kept_by_op := before.made()) is not None:
                weights = kept_by_op.made
                parts = [_recorded_as(weight, buffers, sequence) for weight in as_list(weights)]
                is_list = isinstance(weights, list)
                recording.keeps.append(_Keeps(place, kept_by_op.how, parts, is_list))
        sequence.returns(slotted((*kept, buffers) if recording.keeps else kept))
        self.refusal = sequence.refusal
        if self.refusal is not None:
            return results
        # With extra outputs, a caller gets the views that the ops return (executor.py).
        sequence.drop_names(
            sequence.result[:2] if any(sequence.result[1]) else (), sequence.result[0]
        )
        if rest:
            recording = self._with_saved(recording, held, tensors, quantized)
        self._recording = recording
        if not rest:
            return results
        saved = tuple(held)
        if sequence.pieces and Switch.is_on and saved_tensor_hooks(False) is None:
            saved = recording.packed(held)  # so that there is one layout of backwards
        return (*kept[:2], (self, versions, self.given(tensors)), saved, None, recording.specs)

    def _with_saved(
        self,
        recording: _Recording,
        held: Sequence[torch.Tensor],
        tensors: Tensors,
        quantized: Mapping[int, tuple[int, QuantizedFacts]],
    ) -> _Recording:
        """``recording`` with what a backward reads of the saved tensors ``held``."""
        sequence, first = recording.sequence, len(recording.given)
        slots = sequence.result[2]
        packed = sequence.pack(slots) if self._packs else []
        kept = tuple(i for i in range(len(held)) if i not in packed)
        inputs = tuple(
            i
            for i, slot in enumerate(slots)
            if slot.place < sequence.count and type(held[i]) in PLAIN
        )
        read_back = [
            (number, quantized[id(tensor)][1])
            for number, tensor in enumerate((*[tensors[at] for at in recording.given], *held))
            if id(tensor) in quantized
        ]
        later = [
            (n if n < first else first + kept.index(n - first), facts) for n, facts in read_back
        ]
        is_gathered = any(facts.is_gathered for _, facts in read_back)

        def read_of(
            inputs: tuple[int, ...], pairs: list[tuple[int, QuantizedFacts]]
        ) -> _ReadLayouts:
            if is_gathered:
                return _ReadLayouts(inputs, None, tuple(number for number, _ in pairs))
            return _ReadLayouts(inputs, buffers_reader(pairs) if pairs else None)

        read = read_of(inputs, read_back), read_of(tuple(map(kept.index, inputs)), later)
        return recording._replace(kept=kept, saved_count=len(held), read=read)

    # -- backward -------------------------------------------------------------

    def _layout_of(self, buffers: Sequence[Any]) -> Hashable:
        """As a reader reads it: again only if a buffer of a quantized parameter has changed."""
        is_same, known, layout = self._last_buffers
        try:
            addresses = list(map(torch.Tensor.data_ptr, buffers))
        except (TypeError, RuntimeError):  # one is not there, or has no memory of its own
            return None
        if is_same is None or addresses != known or not is_same(*buffers):
            layout = _reader_of(len(buffers))(buffers)
            is_same = None if layout is None else tensor_guard(buffers)
            self._last_buffers = is_same, addresses, layout
        return layout

    def _read_again(
        self, parameters: Sequence[QuantizedTensor]
    ) -> tuple[list[torch.Tensor] | None, Hashable]:
        """At the start of a backward: buffers of quantized parameters, some gathered, and facts.

        A gathered one first gets the copies that are read. None if it lacks one even so.
        """
        gatherings = [one._gathering for one in parameters if one._gathering is not None]
        for gathering in gatherings:
            for usage in gathering.backward_reads.intersection(USAGES):
                gathering.complete(usage)
        if any(gathering.lacks_columns() for gathering in gatherings):
            return None, None
        buffers_of, facts = self._last_again
        buffers = None if buffers_of is None else buffers_of(parameters)
        if buffers is None:
            all_facts = [QuantizedFacts.of(parameter) for parameter in parameters]
            known = [(place, about) for place, about in enumerate(all_facts) if about is not None]
            if len(known) < len(parameters):
                return None, None
            buffers_of, facts = buffers_reader(known), tuple(known)
            self._last_again = buffers_of, facts
            buffers = buffers_of(parameters)
        return buffers, facts

    def backward(
        self,
        backward: Backward,
        saved: list[torch.Tensor],
        versions: dict[int, Versions],
        parameters: Sequence[Any],
        dx: torch.Tensor,
        grad_extras: list[torch.Tensor | None] | None,
        owners: Owners,
        needed: Needed | None = None,
        *,
        is_part: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients that ``backward`` computes from the saved tensors; empties ``saved``.

        ``backward`` is the plan's generated code, or one of two parts, ``is_part``, which are not
        recorded. ``saved``, ``versions`` by op, and ``parameters``, quantized parameters, are of
        :meth:`run`; ``owners`` are by op the weights whose ``main_grad`` it adds their gradients
        to. None for ``needed``: all are.
        """
        grads: list[torch.Tensor | None] = [dx]
        others: tuple[object, ...] = ()
        if grad_extras is not None or owners:
            more, others = _other_tensors(grad_extras or (), owners)
            grads += more
        recording = self._recording
        assert recording is not None
        groups = [group(op) for group, op in self._groups] if self._groups else []
        is_packed = len(saved) < recording.saved_count
        read = recording.read[is_packed]
        known = layout = None
        buffers: Sequence[torch.Tensor] | None = []
        facts: Hashable = None
        if read.buffers_of is not None:  # None if one is quantized otherwise since the forward
            buffers = read.buffers_of([*parameters, *saved])
        elif read.again:
            buffers, facts = self._read_again([([*parameters, *saved])[n] for n in read.again])
        if launch.recording.listener is None and not is_part and buffers is not None:
            tensors = [*grads, *[saved[i] for i in read.inputs]]
            layout = _reader_of(len(tensors))(tensors)
            if buffers and layout is not None:
                of_buffers = self._layout_of(buffers)
                layout = None if of_buffers is None else (layout, of_buffers, facts)
            del tensors
        if layout is not None:
            autocast = is_any_autocast_enabled() and autocast_dtype(dx.device.type)
            layout = (layout, autocast, others, needed, is_packed)
            call = next(self._backwards.calls)
            known = self._backwards.get(layout)
        if known is not None and known.refusal is None:
            known.last_use = call
            for of_op in versions.values():
                of_op.check()
            played: list[Any] = saved
            played += grads
            played += buffers or ()
            played += groups
            del grads, dx, grad_extras
            result: tuple[torch.Tensor | None, ...] = _played(known, played)
            for weight in itertools.chain.from_iterable(owners.values()):
                if weight is not None:
                    note_accumulation(weight)
            return result
        contexts = [
            context_of(kind, {name: _with(value, parameters) for name, value in attributes.items()})
            for kind, attributes in recording.contexts
        ]
        for i, of_op in versions.items():
            contexts[i].versions = of_op
        for i, weights in owners.items():
            contexts[i].main_grad_owners = weights
        if needed is not None:
            contexts = needing(contexts, needed)
        inputs = [*saved, *grads, *(buffers or ())]
        whole: Sequence[torch.Tensor] = saved
        pieces: list[tuple[torch.Tensor, Piece]] = []
        if is_packed:
            whole, base = recording.whole(saved), len(saved) - 1
            apart = [tensor for i, tensor in enumerate(whole) if i not in recording.kept]
            pieces = [
                (tensor, piece._replace(base=base))
                for tensor, piece in zip(apart, recording.sequence.pieces, strict=True)
            ]
            del apart
        held = [tuple([_saved(part, whole, parameters) for part in recording.saved])]
        saved.clear()
        del whole
        args = (contexts, held, recording.ends, dx, grad_extras, recording.specs)
        # With a tensor that is there twice, a recording could not tell which one is read.
        are_distinct = len(set(map(id, inputs))) == len(inputs)
        is_new = layout is not None and known is None and are_distinct
        if not is_new or not self._backwards.has_room(layout, call, is_first=True):
            del inputs, pieces
            return backward(*args)
        sequence, result, slotted = record(
            inputs,
            lambda: backward(*args),
            constants=self._constants,
            objects=groups,
            with_calls=True,
            owns_inputs=True,
            pieces=pieces,
        )
        sequence.returns(slotted(result))
        sequence.drop_names()
        sequence.last_use = call
        self._backwards[layout] = sequence
        return result


def _recorded_as(
    tensor: torch.Tensor | None,
    held: list[torch.Tensor],
    sequence: LaunchSequence,
    quantized: Container[int] = (),
) -> Part:
    """As a replay saves a tensor; ``sequence`` cannot be repeated if the tensor is not plain.

    Nor ``quantized``: the ids of quantized parameters, which are inputs.
    """
    saved = saved_as(tensor, held)
    is_input = id(tensor) in quantized
    is_whole = isinstance(saved, int) and isinstance(tensor, QuantizedTensor)
    if isinstance(saved, GatheredPart) or (is_whole and not is_input):
        sequence.refusal = sequence.refusal or f"it saves {tensor}, which refers to another"
    return saved


def _copy_of_gathered(
    tensor: torch.Tensor | None,
    tensors: Tensors,
    quantized: Mapping[int, tuple[int, QuantizedFacts]],
    places: list[int],
) -> _GivenParameter | None:
    """A saved gathered parameter, or copy, whose place is added to ``places``; else None."""
    gathering = getattr(tensor, "_gathering", None)
    if gathering is None:
        return None
    assert isinstance(tensor, QuantizedTensor)
    buffers = _buffer_ids(tensor)
    for place, _ in quantized.values():
        parameter: Any = tensors[place]
        if parameter._gathering is not gathering or tensor._view_of is not None:
            continue
        for usage in (None, *filter(parameter._has, USAGES)):
            is_whole = usage is None and parameter is tensor
            if is_whole or (usage and _buffer_ids(parameter.with_usage(usage)) == buffers):
                return _GivenParameter.at(place, places, usage)
    return None


def _saved(
    part: Part | _GivenParameter, held: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """A saved tensor, from those of a call and the parameters that it was given."""
    return part.of(parameters) if isinstance(part, _GivenParameter) else tensor_of(part, held)


def _buffer_ids(tensor: QuantizedTensor) -> dict[str, int]:
    return {name: id(buffer) for name, buffer in tensor.buffers().items() if buffer is not None}


@contextlib.contextmanager
def _noting_reads(
    tensors: Tensors, quantized: Mapping[int, tuple[int, QuantizedFacts]]
) -> Iterator[list[tuple[int, str]]]:
    """Yield a list that gets the reads of gathered parameters that a forward notes inside."""
    noted: list[tuple[int, str]] = []
    gathered = [
        (place, tensors[place]._gathering.backward_reads)  # type: ignore[union-attr]
        for place, facts in quantized.values()
        if facts.is_gathered
    ]
    before = [set(reads) for _, reads in gathered]
    for _, reads in gathered:
        reads.clear()
    try:
        yield noted
    finally:
        for (place, reads), others in zip(gathered, before, strict=True):
            noted += [(place, usage) for usage in sorted(reads)]
            reads |= others


def _without(
    value: Any, quantized: Mapping[int, tuple[int, QuantizedFacts]], places: list[int]
) -> Any:
    """A value of a context without quantized parameters, whose places are added to ``places``."""
    if isinstance(value, (tuple, list)):
        parts = [_without(part, quantized, places) for part in value]
        return value if all(map(operator.is_, parts, value)) else _like(value, parts)
    if id(value) not in quantized:
        return value
    return _GivenParameter.at(quantized[id(value)][0], places)


def _with(value: Any, parameters: Sequence[Any]) -> Any:
    """The inverse of :func:`_without`, with the parameters of a call."""
    if not parameters:
        return value
    if type(value) is _GivenParameter:
        return value.of(parameters)
    if isinstance(value, (tuple, list)):
        parts = [_with(part, parameters) for part in value]
        return value if all(map(operator.is_, parts, value)) else _like(value, parts)
    return value


def _like(value: Any, parts: list[Any]) -> Any:
    """A tuple or list with other parts."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _other_tensors(
    extras: Sequence[torch.Tensor | None], owners: Owners
) -> tuple[list[torch.Tensor | None], tuple[object, ...]]:
    """The tensors besides dx that a backward reads: gradients of extra outputs, and ``main_grad``.

    And what it depends on besides them. A buffer that is not there is None.
    """
    tensors: list[torch.Tensor | None] = []
    key: list[object] = []
    for grad in extras:
        key.append(grad is None)
        if grad is not None:
            tensors.append(grad)
    for owner in itertools.chain.from_iterable(owners.values()):
        buffer, options = (None, None) if owner is None else accumulation(owner)
        key.append(options)
        if owner is not None:
            tensors.append(buffer)
    return tensors, tuple(key)


def _played(sequence: LaunchSequence, tensors: Tensors, is_packed: bool = False) -> Any:
    if not is_any_autocast_enabled():
        return sequence.play(tensors, is_packed)
    with without_autocast():
        return sequence.play(tensors, is_packed)


def _picked(
    some: Sequence[torch.Tensor], tensors: Tensors, sequence: LaunchSequence
) -> Callable[[Tensors], Any]:
    """A function that picks ``some`` of ``tensors``, from the inputs of ``sequence``."""
    by_id = {id(tensor): place for place, tensor in enumerate(tensors)}
    places: list[Any] = [by_id.get(id(tensor)) for tensor in some]
    if None in places:
        sequence.refusal = sequence.refusal or "it reads the version of what is no input"
        return tuple
    if len(places) == 1:  # of which ``itemgetter`` makes no tuple
        return lambda inputs: (inputs[places[0]],)
    return operator.itemgetter(*places)


def _holds_tensors(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensors, value))
    return isinstance(value, (torch.Tensor, LazyTensor))
