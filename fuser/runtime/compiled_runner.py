"""A pipeline's forward and backward over the tensors that a graph gives, real or fake.

A copy of the pipeline runs, whose parameters are those tensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn import Parameter

from fuser.communication import group_with_number, start_all_reduce
from fuser.cuda.launch import dry_run
from fuser.errors import StateError
from fuser.gemm.matmul import architecture
from fuser.op import BasicOperation, context_of
from fuser.plan.saved_inputs import Limit
from fuser.precision.contexts import (
    AutocastState,
    recomputing_under,
)
from fuser.precision.op_numbers import forget_op
from fuser.runtime.compiled_values import (
    Contexts,
    Ends,
    GivenBack,
    GivenTensors,
    Noted,
    Place,
    Saved,
    Sizes,
    Slice,
    Specs,
    Tensors,
)
from fuser.runtime.executor import CompiledPlan
from fuser.runtime.known_parameters import KnownParameters, ParameterLayout, tensor_guard
from fuser.runtime.pipeline import OperationFuser
from fuser.runtime.recorded import RecordedForward
from fuser.runtime.saved_tensors import Part, put_together, taken_apart
from fuser.tensors import QuantizedTensor
from fuser.torch_private import (
    is_any_autocast_enabled,
    outside_fake_mode,
    size_hint,
    storage_of,
    symbols_of,
    without_autocast,
)

MOST_LAYOUTS = 256
MOST_SIZES = 4096
TRACED = "_fuser_traced"
"""The attribute of a trace, torch's mode of fake tensors, with the results of passes in it."""


class _Pass(NamedTuple):
    """What a backward needs of its forward besides tensors; equal for equal sizes."""

    key: tuple[object, ...]
    """The sizes, and which inputs and outputs are saved."""
    places: list[Place]
    made: tuple[int, ...]
    """The saved tensors that are neither inputs nor outputs."""
    recorded: RecordedForward | None
    copied: tuple[bool, ...]
    """Whether each output is a copy, because the forward returned a view of an input."""
    contexts: Contexts
    parts: list[Part]
    ends: Ends
    specs: Specs
    reads_joined: bool
    """Whether a saved tensor is a parameter that joins several tensors, or a view of one."""
    separate: set[Hashable]
    """The strides of the gradients that a recorded backward got, where its results share no memory
    with saved tensors and parameters; nor with each other, unless they are slices."""


class _Traced(NamedTuple):
    """The results of a pass over fake tensors: those of equal blocks are not computed again."""

    results: list[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]]
    saved: Saved

    def again(self) -> list[torch.Tensor]:
        """Other tensors like them."""
        return [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype, device in self.results
        ]


class PipelineRunner:
    """Runs a copy of a pipeline over the tensors of each call.

    Runners of one pipeline have one plan, which each records apart.
    """

    def __init__(self, noted: Noted, pipeline: OperationFuser) -> None:
        self.ops = pipeline.basic_ops
        self._quantizing = quantizing(self.ops)
        self._noted = noted
        self._pipeline = pipeline
        self._plan: CompiledPlan | None = None
        self._known = KnownParameters(pipeline.basic_ops)
        self._no_parameters = pipeline._slots.tensors()
        # Of the ops whose states are used, the quantized parameters; None in other places. Empty if
        # none is quantized.
        self._originals: list[QuantizedTensor | None] = []
        self._layouts: dict[tuple[int, ...], tuple[Any, Any, ParameterLayout | None]] = {}
        # Those of recorded forwards, which are the same for each repetition.
        self._recorded_passes: dict[RecordedForward, _Pass] = {}
        # Apart for fake tensors: a backward may be traced after a forward has run.
        self._known_passes: dict[bool, dict[object, _Pass]] = {False: {}, True: {}}

    @property
    def plan(self) -> CompiledPlan:
        assert self._plan is not None  # a forward comes first
        return self._plan

    def use_states_of(self, ops: Sequence[BasicOperation]) -> None:
        """Use delayed scaling's states of ``ops``, those of the pipeline that have quantizers."""
        tables: dict[int, Mapping[str, torch.Tensor | None]] = {}
        for twin, op in zip(self._quantizing, ops, strict=True):
            twin.__dict__["_delayed"] = op._delayed
            tables[id(twin._parameters)] = op._parameters
        if self._noted.has_quantized:
            slots = self._pipeline._slots.slots
            of_ops = [tables.get(id(held), {}).get(name) for held, name in slots]
            self._originals = [t if isinstance(t, QuantizedTensor) else None for t in of_ops]

    def forget_states(self) -> None:
        """Use none: states live no longer than fake tensors and models."""
        for op in self._quantizing:
            op.__dict__["_delayed"] = {}
        self._originals = []

    # -- forward -------------------------------------------------------------------

    def replayed(self, given: GivenTensors) -> list[torch.Tensor] | None:
        """The results of a recorded forward, as of an eager one; None if there is none."""
        if not self._recorded_passes:
            return None
        plan, (x, _, extras, seeds, _) = self.plan, given
        params, buffers = self._noted.parameters.apart(given.params)
        layout = self._layout(given.params, params)
        if plan.recorded is None or layout is None:
            return None
        tensors = (x, *params, *extras, *seeds)
        with_buffers = (*params, *buffers)
        entry = plan.recorded.find(tensors, len(extras) + len(seeds), layout, None, with_buffers)
        known = None if entry is None else self._recorded_passes.get(entry[0])
        if entry is None or known is None:
            return None
        recorded, keywords, groups = entry
        output, produced, _, saved, *_ = recorded.run(tensors, keywords, groups, _no_forward)
        returned = (output, *[produced[n] for n in plan.returned])
        outputs = [
            tensor.clone() if is_copied else tensor
            for tensor, is_copied in zip(returned, known.copied, strict=True)
        ]
        return [*outputs, *[saved[i] for i in known.made]]

    def forward(self, given: GivenTensors, *, is_fake: bool) -> list[torch.Tensor]:
        if not is_fake:
            return self._forward(given, is_fake=False)
        run = functools.partial(self._forward, given, is_fake=True)
        results, saved = self._traced(given.x, _layouts_of(given.inputs), given.inputs, run)
        self._noted.note_saved(saved, is_fake=True)
        return results

    def _traced(
        self,
        tensor: torch.Tensor | None,
        key: object,
        inputs: Sequence[torch.Tensor | None],
        run: Callable[[], list[torch.Tensor]],
    ) -> tuple[list[torch.Tensor], Saved]:
        """The results of a pass over fake tensors, and what its forward saves.

        If the trace of ``tensor`` has those of an equal pass, the results are other tensors like
        them, and nothing runs.
        """
        traced: dict[object, _Traced] = {}
        mode = getattr(tensor, "fake_mode", None)
        if mode is not None:
            # The trace holds them: symbols refer to it, and so would not let go of it.
            of_runners = mode.__dict__.setdefault(TRACED, weakref.WeakKeyDictionary())
            traced = of_runners.setdefault(self, {})
        if key in traced:
            return traced[key].again(), traced[key].saved
        results, saved = run(), self._noted.saved
        known = {symbol for t in inputs if t is not None for symbol in symbols_of(t)}
        # Not those with a size of their own, which each call makes.
        if not any(t.storage_offset() or symbols_of(t) - known for t in results):
            like = [(t.size(), t.stride(), t.dtype, t.device) for t in results]
            traced[key] = _Traced(like, saved)
        return results, saved

    def _forward(self, given: GivenTensors, *, is_fake: bool) -> list[torch.Tensor]:
        x, _, extras, seeds, _ = given
        if is_fake:
            self.forget_states()
        params = self._parameters(given.params)
        with self._conditions(params):
            plan = self._planned((x, *params, *extras))
            if is_fake:
                with dry_run():
                    results = plan._forward(x, extras, None)
            else:
                others = (*extras, *seeds)
                layout = self._layout(given.params, params)
                results = plan.run(x, (*params, *others), others, None, (layout, None))
                for parameter, of_op in zip(params, self._originals, strict=False):
                    if of_op is not None and isinstance(parameter, QuantizedTensor):
                        of_op._quantizer = (
                            parameter._quantizer
                        )  # an op may have given it a new state's
            output, produced, *rest = results
            if any(isinstance(t, QuantizedTensor) for t in (output, *produced)):
                raise StateError(
                    f"A {self._noted.title} returns a quantized tensor, which is not supported "
                    "inside torch.compile."
                    " Take the last Quantize out of the compiled part."
                )
            numbers = self._noted.joined
            joined = dict(zip(numbers, map(params.__getitem__, numbers), strict=True))
            taken = set(map(storage_of, (*given.inputs, *joined.values())))
            returned = (output, *(produced[n] for n in plan.returned))
            outputs = [_own(tensor, taken) for tensor in returned]
            if not rest:
                return outputs
            copied = tuple(map(operator.is_not, outputs, returned))
            known = {"input": dict(enumerate(given.inputs)), "output": dict(enumerate(outputs))}
            known["parameter"] = joined
            saved_alone = self._keep(given, known, copied, *rest, is_fake=is_fake)
        return [*outputs, *[_own(tensor, taken) for tensor in saved_alone]]

    def _keep(
        self,
        given: GivenTensors,
        known_tensors: Mapping[str, Mapping[int, torch.Tensor]],
        copied: tuple[bool, ...],
        ctxs: Any,
        saved: Tensors,
        ends: Ends,
        specs: Specs,
        *,
        is_fake: bool,
    ) -> list[torch.Tensor]:
        """Note what backward needs besides tensors; the saved tensors that are not elsewhere."""
        passes = self._known_passes[is_fake]
        recorded: RecordedForward | None = None
        contexts: Contexts = []
        parts: list[Part] = []
        if ends is None:
            recorded, held = ctxs[0], saved
        else:
            parts, held = taken_apart(saved)
            contexts = [(type(context), dict(context.__dict__)) for context in ctxs]
        key: tuple[object, ...] = _key(given.sizes())
        # A fake view of an empty tensor may have another storage, so storages of empty tensors
        # decide nothing, unless a size was a symbol when the graph was traced.
        for are_empty_apart in (True, False):
            places, saved_alone = _places(held, known_tensors, are_empty_apart=are_empty_apart)
            inputs, outs = (
                tuple([p.number for p in places if p.kind == kind]) for kind in ("input", "output")
            )
            where = Saved(inputs, outs, len(saved_alone))
            if is_fake or self._noted.has_traced(where):
                break
        key = (*key, inputs, outs)
        self._noted.note_saved(where, is_fake=is_fake)
        if key in passes:
            del passes[key]  # the last one is the latest
        elif len(passes) >= MOST_SIZES:
            passes.pop(next(iter(passes)))
        of_made = tuple(
            next(i for i, t in enumerate(held) if t is tensor) for tensor in saved_alone
        )
        reads_joined = bool(self._noted.joined) and "parameter" in [p.kind for p in places]
        facts = (contexts, parts, ends, specs, reads_joined)
        known = _Pass(key, places, of_made, recorded, copied, *facts, set())
        passes[key] = known
        if recorded is not None:
            while len(self._recorded_passes) >= MOST_LAYOUTS:
                self._recorded_passes.pop(next(iter(self._recorded_passes)))
            self._recorded_passes[recorded] = known
        return saved_alone

    # -- backward ------------------------------------------------------------------

    def backward(self, given: GivenBack, *, is_fake: bool) -> list[torch.Tensor]:
        if not is_fake:
            return self._backward(given, is_fake=False)
        tensors = (*given.grads, *given.params)
        key = (_key(given.sizes), *_layouts_of(tensors))
        run = functools.partial(self._backward, given, is_fake=True)
        return self._traced(given.grads[0], key, (*tensors, *given.saved), run)[0]

    def _backward(self, given: GivenBack, *, is_fake: bool) -> list[torch.Tensor]:
        plan, (sizes, of_inputs, of_outputs, grads, saved, params, _) = self.plan, given
        key = (*_key(sizes), tuple(of_inputs), tuple(of_outputs))
        known = self._known_passes[is_fake].get(key)
        if known is None and not is_fake:
            # That of a forward which is repeated, and so was noted many layouts ago.
            recorded_passes = self._recorded_passes.values()
            known = next((one for one in recorded_passes if one.key == key), None)
        if known is None:
            raise StateError(
                f"A compiled {self._noted.title} runs the backward of a forward that is not "
                f"known: it ran in another process, or {MOST_SIZES} other layouts ago."
                " Run each backward soon after its forward, in its process."
            )
        inputs = len(saved) - len(of_inputs) - len(of_outputs)
        outputs = inputs + len(of_inputs)
        holds_parameters = known.recorded is not None and known.recorded.holds_parameters
        reads_parameters = holds_parameters or known.reads_joined
        whole = self._parameters(params) if reads_parameters else ()
        groups: dict[str, Tensors | dict[int, torch.Tensor]] = {
            "parameter": whole,
            "saved": saved[:inputs],
            "input": dict(zip(of_inputs, saved[inputs:outputs], strict=True)),
            "output": dict(zip(of_outputs, saved[outputs:], strict=True)),
        }
        held = [
            place.of(groups[place.kind]) if place.view else groups[place.kind][place.number]
            for place in known.places
        ]
        extras: list[torch.Tensor | None] | None = None
        if known.specs:
            extras = [None] * len(plan.places)
            for n, grad in zip(plan.returned, grads[1:], strict=True):
                extras[n] = grad
        assert grads[0] is not None  # the operation makes zeros
        dy = grads[0].contiguous()
        if known.recorded is not None:
            backward = functools.partial(self._recorded_backward, params, whole)
            weights = known.recorded.given((None, *whole)) if holds_parameters else ()
            result = known.recorded.backward(backward, held, {}, weights, dy, extras, {})
        else:
            contexts = [context_of(*kind_and_values) for kind_and_values in known.contexts]
            tensors = [put_together(known.parts, held)]
            run = plan._backward if is_fake else plan.backward
            state = AutocastState(self._noted.recipe)
            dry = dry_run() if is_fake else contextlib.nullcontext()
            whole = whole or self._parameters(params)
            with self._conditions(whole), recomputing_under(state), dry:
                result = run(contexts, tensors, known.ends, dy, extras, known.specs)
        all_gradients: Sequence[Any] = result[1:] if is_fake else self._summed(result[1:])
        places = self._noted.wanted_places
        gradients = [all_gradients[place] for place in places if all_gradients[place] is not None]
        if len(gradients) != len(places):
            raise StateError(
                f"The backward of a compiled {self._noted.title} returned no gradient for an "
                "input that requires one."
            )
        layout = None
        if known.recorded is not None:
            layout = tuple([None if grad is None else grad.stride() for grad in grads])
        is_separate = layout in known.separate
        if is_separate and not self._noted.is_sliced:
            return gradients
        taken = {storage_of(grad) for grad in grads if grad is not None}
        if not is_separate:
            joined = map(whole.__getitem__, self._noted.joined) if whole else ()
            others = set(map(storage_of, (*saved, *params, *joined)))
            is_separate = others.isdisjoint(map(storage_of, gradients))
            taken |= others
        if not self._noted.slices:  # equal for all layouts, whose graphs have the places
            last = len(self._noted.facts.summed)
            pairs = list(zip(places, map(storage_of, gradients), strict=True))
            params_alone = {storage for place, storage in pairs if 0 < place <= last}
            params_alone -= {storage for place, storage in pairs if not 0 < place <= last}
            self._noted.slices = _slices(gradients, params_alone - taken)
        results = _together(gradients, self._noted.slices, taken)
        if not self._noted.is_sliced:
            is_separate = all(map(operator.is_, results, gradients))
        if layout is not None and is_separate:
            known.separate.add(layout)
        return results

    def _summed(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """The gradients of a backward, those of parameters of some rows added over ranks."""
        summed = self._noted.facts.summed
        if summed.count(None) == len(summed):
            return gradients
        sums = list(gradients)
        for place, number in enumerate(summed, start=1):
            if number is not None and sums[place] is not None:
                group = group_with_number(number)
                sums[place] = start_all_reduce(sums[place], group).wait()
        return sums

    def _recorded_backward(self, params: Tensors, whole: Tensors, *args: Any) -> Any:
        """The plan's own code, which a backward that is not recorded yet runs."""
        if not whole:
            # A recording has the parameters, and not the calls that make them.
            with outside_fake_mode():
                whole = self._parameters(params)
        with self._conditions(whole), recomputing_under(AutocastState(self._noted.recipe)):
            backward = self.plan.in_ranges[1]
            assert backward is not None
            return backward(*args)

    # -- conditions ----------------------------------------------------------------

    @contextlib.contextmanager
    def _conditions(self, params: Tensors) -> Iterator[None]:
        """The parameters in the ops, and the modes and the autocast of the traced call."""
        facts = self._noted.facts
        with contextlib.ExitStack() as stack:
            if facts.autocast is not None:
                stack.enter_context(torch.autocast(facts.device, dtype=facts.autocast))
            elif is_any_autocast_enabled():  # around a backward
                stack.enter_context(without_autocast())
            self._give(params)
            for op, training in zip(self.ops, facts.training, strict=True):
                op.__dict__["training"] = training
            try:
                yield
            finally:
                self._give(self._no_parameters)

    def _parameters(self, given: Tensors) -> Tensors:
        """The parameters that are, or have, these tensors; with the quantizers of the originals."""
        params = self._noted.parameters.made_from(given)
        for parameter, of_op in zip(params, self._originals, strict=False):
            if of_op is not None and isinstance(parameter, QuantizedTensor):
                parameter._quantizer = of_op._quantizer
        return params

    def _planned(self, inputs: Tensors) -> CompiledPlan:
        if self._plan is None:
            facts, device = self._noted.facts, inputs[0].device
            with outside_fake_mode(), torch.set_grad_enabled(facts.is_grad_enabled):
                like = [
                    _like(tensor).requires_grad_(requires_grad)
                    for tensor, (_, _, requires_grad) in zip(inputs, facts.tensors, strict=True)
                ]
                count = 1 + len(facts.summed)
                planned = self._pipeline.planned(
                    *(like[0], tuple(like[1:count]), like[count:], Limit(*facts.limit)),
                    autocast_dtype=facts.autocast,
                    device=device.type,
                    arch=architecture(device),
                    no_kernels=facts.no_kernels,
                )
            self._plan = planned.recording_apart()
            if self._plan.recorded is not None:
                self._plan.recorded.packs = False  # a graph has each saved tensor
        return self._plan

    def _give(self, params: Tensors) -> None:
        for (held, name), parameter in zip(self._pipeline._slots.slots, params, strict=True):
            held[name] = parameter

    def _layout(self, given: Tensors, params: Sequence[torch.Tensor]) -> ParameterLayout | None:
        """The layout of the parameters of these tensors; ``params`` are those not quantized."""
        addresses = tuple(map(torch.Tensor.data_ptr, given))
        guard, quantizers, layout = self._layouts.get(addresses, (None, None, None))
        originals = self._originals
        present = originals and [None if one is None else one._quantizer for one in originals]
        if guard is None or not guard(*given) or quantizers != present:
            whole = self._parameters(given) if self._noted.has_quantized else params
            layout = self._known.renew(whole)[1]
            while len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[addresses] = (tensor_guard(given), present, layout)
        return layout


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory for a plan, which depends on the hints of symbolic sizes."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.detach()
    return torch.empty(
        [size_hint(size) for size in tensor.shape], dtype=tensor.dtype, device="meta"
    )


def _layouts_of(tensors: Sequence[torch.Tensor | None]) -> tuple[object, ...]:
    """Everything but the values of tensors, and which are in one storage."""
    storages = [None if t is None else storage_of(t) for t in tensors]
    layouts = [
        (_key(t.size()), _key(t.stride()), t.dtype, t.device) for t in tensors if t is not None
    ]
    return (tuple(map(storages.index, storages)), *layouts)


def _no_forward(*_: object) -> NoReturn:
    raise StateError("A recording is incomplete.")  # only complete ones are known


def quantizing(ops: Sequence[BasicOperation]) -> list[BasicOperation]:
    """The ops with quantizers, and so with states under delayed scaling."""
    return [op for op in ops if any(map(op.num_quantizers, ("forward", "backward")))]


def copied(pipeline: OperationFuser) -> OperationFuser:
    """A pipeline of the same structure, without the memory of the parameters."""
    memo: dict[int, object] = {}
    for op in pipeline.basic_ops:
        memo[id(op._delayed)] = {}
        for parameter in op.parameters():
            like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = Parameter(like, requires_grad=parameter.requires_grad)
    ops = [copy.deepcopy(op, memo) for op in pipeline.basic_ops]
    for op in ops:
        op.__dict__["runs_in_graph"] = True
        forget_op(op._number)
    twin = OperationFuser(ops, pipeline.fusions, open_channels=pipeline.open_channels)
    twin._find_parameters()
    twin._is_started = True
    return twin


def _own(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """``tensor``, or a copy if its storage is taken: results of operations share no memory."""
    tensor = tensor.clone() if storage_of(tensor) in taken else tensor
    taken.add(storage_of(tensor))
    return tensor


def _slices(gradients: Tensors, of_params: set[int]) -> list[Slice | None]:
    """Where the gradients of parameters are that share memory with others of them alone."""
    storages = [storage_of(gradient) for gradient in gradients]
    shared = [s for s in dict.fromkeys(storages) if storages.count(s) > 1 and s in of_params]
    alone = sum(storage not in shared for storage in storages)
    return [
        Slice(alone + shared.index(storage), g.size(), g.stride(), int(g.storage_offset()))
        if storage in shared
        else None
        for g, storage in zip(gradients, storages, strict=True)
    ]


def _together(
    gradients: Tensors, slices: Sequence[Slice | None], taken: set[int]
) -> list[torch.Tensor]:
    """The gradients that share no memory, then the memory of others; copies where needed."""
    results = [_own(g, taken) for g, place in zip(gradients, slices, strict=True) if place is None]
    shared: dict[int, list[tuple[torch.Tensor, Slice]]] = {}
    for gradient, place in zip(gradients, slices, strict=True):
        if place is not None:
            shared.setdefault(place.number, []).append((gradient, place))
    for members in shared.values():
        storage, size = storage_of(members[0][0]), max(place.end() for _, place in members)
        is_there = storage not in taken and all(
            (storage_of(g), g.storage_offset(), g.stride()) == (storage, s.offset, s.stride)
            for g, s in members
        )
        memory = members[0][0].as_strided((size,), (1,), 0) if is_there else None
        if memory is None:  # a recording may have other places
            memory = members[0][0].new_empty(size)
            for gradient, place in members:
                place.of({place.number: memory}).copy_(gradient)
        taken.add(storage_of(memory))
        results.append(memory)
    return results


def _places(
    held: Tensors, tensors: Mapping[str, Mapping[int, torch.Tensor]], *, are_empty_apart: bool
) -> tuple[list[Place], list[torch.Tensor]]:
    """Where saved tensors are, and those which are none of ``tensors``, which are given by kind.

    With ``are_empty_apart`` a view without elements is none.
    """
    known: dict[int, Place] = {}
    bases: dict[int, tuple[torch.Tensor, Place]] = {}  # by storage

    def note(tensor: torch.Tensor, place: Place) -> Place:
        known.setdefault(id(tensor), place)
        bases.setdefault(storage_of(tensor), (tensor, place))
        return place

    for kind, of_kind in tensors.items():
        for number, tensor in of_kind.items():
            note(tensor, Place(kind, number))
    places: list[Place] = []
    saved_alone: list[torch.Tensor] = []
    for tensor in held:
        place = known.get(id(tensor))
        if place is None:
            is_apart = are_empty_apart and any(type(n) is int and n == 0 for n in tensor.shape)
            base = None if is_apart else bases.get(storage_of(tensor))
            if base is None:
                place = note(tensor, Place("saved", len(saved_alone)))
                saved_alone.append(tensor)
            else:
                other, place = base
                offset = tensor.storage_offset() - other.storage_offset()
                place = place._replace(view=(tensor.size(), tensor.stride(), offset))
        places.append(place)
    return places, saved_alone


def _key(sizes: Sizes) -> tuple[int | str, ...]:
    return tuple([size if type(size) is int else str(size) for size in sizes])
