"""Pipelines in torch.compile: each pass is one operation, so a compiled model has no graph break.

Dynamo traces :func:`traced_call`. It reads the parameters of a pipeline as tensors, and what else
the code of its ops depends on as strings, by which it also guards: pipelines of equal structure
share a graph. The operation ``fuser::forward`` runs a copy of the pipeline, made once for each
structure, over the tensors of the call. It returns the outputs and the tensors that
``fuser::backward`` reads. On fake tensors the same code runs, and launches nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Parameter

from fuser.basic_ops import Dropout
from fuser.cuda.launch import dry_run, kernel_refusal
from fuser.errors import StateError
from fuser.gemm.matmul import architecture
from fuser.op import FusibleOperation, OperationContext
from fuser.op.fusible import traces_ops
from fuser.op.structure import REFUSED, structure_of
from fuser.plan.planner import make_plan
from fuser.precision.availability import warn_if_emulated
from fuser.precision.contexts import (
    INSIDE,
    AutocastState,
    current_recipe,
    recipe_key_here,
    recomputing_under,
    use_autocast,
)
from fuser.precision.recomputation import state_of_forward
from fuser.recipe import DelayedScaling, QParams, Recipe, recipe_of_key
from fuser.runtime.executor import CompiledPlan
from fuser.runtime.known_parameters import KnownParameters, ParameterLayout, tensor_guard
from fuser.runtime.pipeline import OperationFuser, registered_fusions
from fuser.runtime.recorded import Part, RecordedForward, context_of, put_together, taken_apart
from fuser.tensors import QuantizedTensor
from fuser.torch_private import (
    breaks_graph,
    call_while_tracing,
    constant_in_graphs,
    graph_break,
    graph_task,
    outside_fake_mode,
    size_hint,
    storage_of,
    traced_subject,
)

Path: TypeAlias = tuple[str, ...]
Tensors: TypeAlias = Sequence[torch.Tensor]
Sizes: TypeAlias = Sequence["int | torch.SymInt"]
Ends: TypeAlias = "tuple[int, ...] | None"
"""The ends of the ops' saved tensors; None of a recorded forward."""
Contexts: TypeAlias = list[tuple[type[OperationContext], dict[str, Any]]]
"""The class and the attributes of each op's context."""
Specs: TypeAlias = tuple[Any, ...]
"""Shape and dtype of every extra output."""
TensorFacts: TypeAlias = tuple[str, torch.dtype, bool]
"""Of a tensor: the name of its class, its dtype, and whether it requires a gradient."""

# Part of the names of passes: another number after a change of what the operations take or return,
# because torch keeps compiled graphs on disk.
VERSION = 2
MOST_LAYOUTS = 256
MOST_SIZES = 4096


# -- what Dynamo reads ---------------------------------------------------------------------


class Trace(NamedTuple):
    """What Dynamo reads of a module that is one pipeline."""

    refusal: str
    """Why the module cannot be in a graph; empty if it can."""
    structure: str = ""
    names: tuple[str, ...] = ()
    """The names of its modules: Dynamo notices if they change."""
    ops: tuple[Path, ...] = ()
    parameters: tuple[tuple[int, str], ...] = ()
    """The number of the op and the name of each parameter."""
    random: tuple[int, ...] = ()
    """The ops that draw random numbers in training, which a recomputation would draw again."""
    extra_inputs: int = 0
    outputs: int = 1


_lock = threading.RLock()
_pipelines: dict[str, OperationFuser] = {}
"""A copy of a pipeline for each structure, with parameters on the meta device."""
_calls: dict[str, Passes] = {}


def _prepare_traced(context: Any) -> None:
    prepare(traced_subject(context))


def prepare(container: Any) -> None:
    """Before a call is traced: make the :class:`Trace` of a container or an op."""
    global _trace
    with _lock, outside_fake_mode():
        runner: Any = container
        if not isinstance(container, FusibleOperation):
            pipeline = runner._current_segments().only
        elif container.is_fused_op:
            pipeline = runner._own_segments().only
        else:
            pipeline = runner._own_pipeline()
        _trace = _trace_of(container, pipeline)


_trace: Trace


@constant_in_graphs
def _trace_made_last() -> Trace:
    return _trace


def _trace_of(module: torch.nn.Module, pipeline: OperationFuser | None) -> Trace:
    if pipeline is None:
        return Trace("it has modules between its pipelines, or ops with hooks")
    structures = []
    for op in pipeline.basic_ops:
        structure = structure_of(op)
        if structure.startswith(REFUSED):
            return Trace(structure.removeprefix(REFUSED))
        structures.append(structure)
    paths = {id(op.__dict__): tuple(n.split(".")) if n else () for n, op in module.named_modules()}
    pipeline._find_parameters()
    owners = {id(op._parameters): i for i, op in enumerate(pipeline.basic_ops)}
    try:
        parameters = tuple((owners[id(held)], name) for held, name in pipeline._slots.slots)
        ops = tuple(paths[id(op.__dict__)] for op in pipeline.basic_ops)
    except KeyError:
        return Trace("its ops are not modules of it")
    text = repr((structures, pipeline.fusions, sorted(pipeline.open_channels)))
    names = "+".join(type(op).__name__ for op in pipeline.basic_ops)
    structure = f"{names} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if structure not in _pipelines:
        _pipelines[structure] = _copied(pipeline)
    random = tuple(i for i, op in enumerate(pipeline.basic_ops) if isinstance(op, Dropout))
    counts = (pipeline.num_extra_inputs, 1 + len(pipeline.returned))
    return Trace("", structure, tuple(module._modules), ops, parameters, random, *counts)


def _copied(pipeline: OperationFuser) -> OperationFuser:
    """A pipeline of the same structure, without the memory of the parameters."""
    memo: dict[int, Any] = {}
    for op in pipeline.basic_ops:
        memo[id(op._delayed)] = {}
        for parameter in op.parameters():
            like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = Parameter(like, requires_grad=parameter.requires_grad)
    ops = [copy.deepcopy(op, memo) for op in pipeline.basic_ops]
    twin = OperationFuser(ops, pipeline.fusions, open_channels=pipeline.open_channels)
    twin._find_parameters()
    twin._is_started = True
    return twin


# -- the traced call -------------------------------------------------------------------------


def traced_call(
    container: Any, x: torch.Tensor, extras: tuple[torch.Tensor, ...], keywords: Mapping[str, Any]
) -> Any:
    """The call of a container or an op, as Dynamo traces it."""
    if torch.compiler.is_dynamo_compiling():
        call_while_tracing(_prepare_traced, container)
    else:
        prepare(container)
    trace = _trace_made_last()
    reason = trace.refusal
    if reason == "" and keywords:
        reason = "it is called with keyword arguments"
    if reason == "" and (len(extras) != trace.extra_inputs or x.dim() == 0):
        reason = "it does not get one matrix and its extra inputs"
    if reason == "" and tuple(container._modules) == trace.names:
        ops = [_at(container, path) for path in trace.ops]
        # Compared by each call of the graph, and so traced again after a change of an op.
        structures = [op._structure for op in ops]
        training = [op.training for op in ops]
        fusions = [fusion.__qualname__ for fusion in getattr(container, "_fusions", ())]
        parameters = [ops[i]._parameters[name] for i, name in trace.parameters]
        facts = [(type(t).__name__, t.dtype, t.requires_grad) for t in [x, *parameters, *extras]]
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = describe(
            trace.structure,
            recipe_key_here(),
            torch.is_grad_enabled(),
            device,
            autocast,
            len(parameters),
            tuple(facts),
            tuple(training),
            tuple(structures + fusions),
            trace.random,
        )
        reason = call.removeprefix(REFUSED) if call.startswith(REFUSED) else ""
        if reason == "":
            results = torch.ops.fuser.forward(call, x, parameters, list(extras))
            return results[0] if trace.outputs == 1 else tuple(results[: trace.outputs])
    graph_break(f"{type(container).__name__} is called outside of the graph: {reason}.")
    return _called_outside(container, x, extras, keywords)


def _at(module: Any, path: Path) -> Any:
    for name in path:
        module = module._modules[name]
    return module


@breaks_graph
def _called_outside(
    container: Any, x: torch.Tensor, extras: tuple[torch.Tensor, ...], keywords: Mapping[str, Any]
) -> Any:
    return container.forward(x, *extras, **keywords)


@constant_in_graphs
def describe(
    structure: str,
    recipe_key: str,
    is_grad_enabled: bool,
    device: str,
    autocast: torch.dtype | None,
    parameter_count: int,
    tensors: tuple[TensorFacts, ...],
    training: tuple[bool, ...],
    read: tuple[str, ...],
    random: tuple[int, ...],
) -> str:
    """The name of the passes of such a call; or, after :data:`REFUSED`, why there are none.

    ``read`` is there for Dynamo to compare it at each call.
    """
    recipe, key = None, recipe_key.removeprefix(INSIDE)
    if key:
        try:
            recipe = recipe_of_key(key)
        except KeyError:
            return f"{REFUSED}custom recipes are not supported in graphs"
    if isinstance(recipe, DelayedScaling):
        return f"{REFUSED}delayed scaling is not supported in graphs yet"
    if any(training[i] for i in random) or _rounds_at_random(recipe):
        return f"{REFUSED}it draws random numbers, which is not supported in graphs yet"
    for kind, _, _ in tensors:
        if kind not in ("Tensor", "Parameter", "FakeTensor", "FunctionalTensor"):
            return f"{REFUSED}a {kind} is among its inputs and parameters"
    facts = Facts(recipe_key, is_grad_enabled, device, autocast, parameter_count, tensors, training)
    name = f"{structure} {hashlib.sha256(repr((VERSION, facts)).encode()).hexdigest()[:16]}"
    with _lock:
        if name not in _calls:
            _calls[name] = Passes(_pipelines[structure], facts, recipe)
    return name


def _rounds_at_random(recipe: Recipe | None) -> bool:
    params = () if recipe is None else vars(recipe).values()
    return any(isinstance(each, QParams) and each.stochastic_rounding for each in params)


class Facts(NamedTuple):
    """What a plan depends on besides the structure of its pipeline."""

    recipe_key: str
    is_grad_enabled: bool
    device: str
    autocast: torch.dtype | None
    parameter_count: int
    tensors: tuple[TensorFacts, ...]
    """The input, the parameters, and the extra inputs."""
    training: tuple[bool, ...]


# -- passes --------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a saved tensor is: it is, or views, an input, an output or another saved tensor."""

    kind: str
    """"input", "output" or "saved"."""
    number: int
    view: tuple[torch.Size, tuple[int, ...], int | torch.SymInt] | None = None
    """Size, stride and offset in that tensor, if it is a view."""

    def of(self, tensors: Tensors | dict[int, torch.Tensor]) -> torch.Tensor:
        """The saved tensor, from the inputs, outputs or saved tensors."""
        tensor = tensors[self.number]
        if self.view is None:
            return tensor
        size, stride, offset = self.view
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class _Pass(NamedTuple):
    """What a backward needs of its forward besides tensors; equal for equal sizes."""

    places: list[Place]
    made: tuple[int, ...]
    """The saved tensors that are neither inputs nor outputs."""
    recorded: RecordedForward | None
    contexts: Contexts
    parts: list[Part]
    ends: Ends
    specs: Specs


class Passes:
    """Forward and backward of pipelines of one structure, over tensors with the same facts."""

    def __init__(self, pipeline: OperationFuser, facts: Facts, recipe: Recipe | None) -> None:
        self.facts = facts
        self.saved_inputs: tuple[int, ...] = ()
        """The inputs that backward reads."""
        self.saved_outputs: tuple[int, ...] = ()
        self.saved_count = 0
        """The number of other saved tensors."""
        self.output_count = 1 + len(pipeline.returned)
        self._pipeline = pipeline
        self._recipe = recipe
        self._run: CompiledPlan | None = None
        self._known = KnownParameters(pipeline.basic_ops)
        self._no_parameters = pipeline._slots.tensors()
        self._layouts: dict[tuple[int, ...], tuple[Any, ParameterLayout | None]] = {}
        # Apart for fake tensors: a backward may be traced after a forward has run.
        self._passes: dict[bool, dict[tuple[int | str, ...], _Pass]] = {False: {}, True: {}}

    # -- forward -------------------------------------------------------------------

    def forward(
        self, x: torch.Tensor, params: Tensors, extras: Tensors, *, is_fake: bool
    ) -> list[torch.Tensor]:
        """The outputs, and the saved tensors that are neither inputs nor outputs."""
        inputs = (x, *params, *extras)
        if not is_fake:
            self._check_recipe()
        with _lock, torch.no_grad(), self._conditions(params):
            if not is_fake:
                self._check_recomputation()
            run = self._plan(inputs)
            if is_fake:
                with dry_run():
                    results = run._forward(x, extras, None)
            else:
                results = run.run(x, inputs[1:], extras, None, self._layout(params))
            output, produced, *rest = results
            outputs: list[torch.Tensor] = []
            if any(isinstance(t, QuantizedTensor) for t in (output, *produced)):
                raise StateError(
                    f"A {self._title()} returns a quantized tensor, which is not supported inside "
                    "torch.compile."
                )
            taken = set(map(storage_of, inputs))
            for tensor in (output, *(produced[n] for n in run.returned)):
                outputs.append(_own(tensor, taken))
            if not rest:
                return outputs
            made = self._keep(self._passes[is_fake], inputs, outputs, *rest)
        return [*outputs, *made]

    def _keep(
        self,
        passes: dict[tuple[int | str, ...], _Pass],
        inputs: Tensors,
        outputs: Tensors,
        ctxs: Any,
        saved: Tensors,
        ends: Ends,
        specs: Specs,
    ) -> list[torch.Tensor]:
        """Note what backward needs besides tensors; the saved tensors that are not elsewhere."""
        recorded: RecordedForward | None = None
        contexts: Contexts = []
        parts: list[Part] = []
        if ends is None:
            recorded, held = ctxs[0], saved
        else:
            parts, held = taken_apart(saved)
            contexts = [(type(context), dict(context.__dict__)) for context in ctxs]
        count = self.facts.parameter_count
        key = _key(layout_sizes((inputs[0], *inputs[1 + count :])), inputs[1 : 1 + count])
        known = passes.get(key)
        if known is not None and recorded is not None and known.recorded is recorded:
            return [held[i] for i in known.made]
        made: list[torch.Tensor] = []
        places = [_place(tensor, inputs, outputs, made) for tensor in held]
        numbers = {
            kind: {p.number for p in places if p.kind == kind} for kind in ("input", "output")
        }
        where = (tuple(sorted(numbers["input"])), tuple(sorted(numbers["output"])), len(made))
        traced = (self.saved_inputs, self.saved_outputs, self.saved_count)
        if any(self._passes.values()) and where != traced:
            raise StateError(
                f"A compiled {self._title()} saved other tensors than when it was traced: inputs, "
                f"outputs and a number of others {where}, and not {traced}."
            )
        self.saved_inputs, self.saved_outputs, self.saved_count = where
        passes.pop(key, None)
        while len(passes) >= MOST_SIZES:
            passes.pop(next(iter(passes)))
        of_made = tuple(next(i for i, t in enumerate(held) if t is tensor) for tensor in made)
        passes[key] = _Pass(places, of_made, recorded, contexts, parts, ends, specs)
        return made

    # -- backward ------------------------------------------------------------------

    def backward(
        self,
        sizes: Sizes,
        grads: Sequence[torch.Tensor | None],
        saved: Tensors,
        params: Tensors,
        *,
        is_fake: bool,
    ) -> list[torch.Tensor]:
        """The gradients of the inputs that require one.

        ``saved`` are the saved tensors that forward returned, then the inputs and the outputs among
        them.
        """
        run, facts = self._run, self.facts
        assert run is not None  # a forward comes first
        known = self._passes[is_fake][_key(sizes, params)]
        inputs = len(saved) - len(self.saved_inputs) - len(self.saved_outputs)
        outputs = inputs + len(self.saved_inputs)
        groups: dict[str, Tensors | dict[int, torch.Tensor]] = {
            "saved": saved[:inputs],
            "input": dict(zip(self.saved_inputs, saved[inputs:outputs], strict=True)),
            "output": dict(zip(self.saved_outputs, saved[outputs:], strict=True)),
        }
        with _lock, torch.no_grad(), self._conditions(params):
            held = [place.of(groups[place.kind]) for place in known.places]
            extras: list[torch.Tensor | None] | None = None
            if known.specs:
                extras = [None] * len(run.places)
                for n, grad in zip(run.returned, grads[1:], strict=True):
                    extras[n] = grad
            assert grads[0] is not None  # _gradients makes zeros
            dy = grads[0].contiguous()
            if known.recorded is not None:
                replayed = run.in_ranges[1]
                assert replayed is not None
                result = known.recorded.backward(replayed, held, {}, dy, extras, {})
            else:
                contexts = [context_of(*each) for each in known.contexts]
                tensors = [put_together(known.parts, held)]
                with dry_run() if is_fake else contextlib.nullcontext():
                    backward = run._backward if is_fake else run.backward
                    result = backward(contexts, tensors, known.ends, dy, extras, known.specs)
            taken = set(map(storage_of, (*saved, *params, *(g for g in grads if g is not None))))
            gradients: list[torch.Tensor] = []
            for gradient, (_, _, requires_grad) in zip(result[1:], facts.tensors, strict=True):
                if requires_grad:
                    if gradient is None:
                        raise StateError(
                            f"The backward of a compiled {self._title()} returned no gradient for "
                            "an input that requires one."
                        )
                    gradients.append(_own(gradient, taken))
            return gradients

    # -- conditions ----------------------------------------------------------------

    @contextlib.contextmanager
    def _conditions(self, params: Tensors) -> Iterator[None]:
        """The parameters, the recipe and the autocast of the traced call."""
        with contextlib.ExitStack() as stack:
            if self._recipe is not None:
                use_autocast()
            stack.enter_context(recomputing_under(AutocastState(self._recipe)))
            if self.facts.autocast is not None:
                stack.enter_context(torch.autocast(self.facts.device, dtype=self.facts.autocast))
            self._give(params)
            for op, training in zip(self._pipeline.basic_ops, self.facts.training, strict=True):
                op.__dict__["training"] = training
            try:
                yield
            finally:
                self._give(self._no_parameters)

    def _check_recipe(self) -> None:
        """Refuse a call under another recipe than the traced one, which another thread set."""
        if self.facts.recipe_key.startswith(INSIDE) or graph_task() != -1:
            return
        recipe = current_recipe()
        if recipe is not self._recipe and recipe != self._recipe:
            raise StateError(
                f"A compiled {self._title()} runs under {self._recipe}, which another thread uses, "
                f"and this thread is under {recipe}. Enter fuser.autocast inside the compiled "
                "function if threads use different recipes."
            )

    def _check_recomputation(self) -> None:
        """Refuse a recomputation under another recipe than that of its forward."""
        again = state_of_forward(self._pipeline.basic_ops)
        if again is not None and again.recipe != self._recipe:
            raise StateError(
                f"A compiled {self._title()} is recomputed under {self._recipe}, and its forward "
                f"ran under {again.recipe}. Enter fuser.autocast inside the checkpointed function."
            )

    def _title(self) -> str:
        return "pipeline of " + ", ".join(type(op).__name__ for op in self._pipeline.basic_ops)

    def _plan(self, inputs: Tensors) -> CompiledPlan:
        if self._run is None:
            pipeline, facts = self._pipeline, self.facts
            device = inputs[0].device
            with outside_fake_mode(), torch.set_grad_enabled(facts.is_grad_enabled):
                like = [
                    torch.empty(
                        [size_hint(size) for size in tensor.shape],
                        dtype=tensor.dtype,
                        device="meta",
                    ).requires_grad_(requires_grad)
                    for tensor, (_, _, requires_grad) in zip(inputs, facts.tensors, strict=True)
                ]
                x, params = like[0], tuple(like[1 : 1 + facts.parameter_count])
                extras = like[1 + facts.parameter_count :]
                graph = pipeline._graph(x, extras, facts.autocast)
                key = pipeline._plan_key(
                    pipeline._op_keys(graph, x, params, extras),
                    autocast_dtype=facts.autocast,
                    device=device.type,
                    arch=architecture(device),
                    no_kernels=kernel_refusal(device.type),
                )
                if key.recipe is not None:
                    warn_if_emulated(key.recipe, key.arch)
                planned = make_plan(graph, key, registered_fusions())
            self._run = CompiledPlan(
                planned.plan,
                key,
                pipeline.basic_ops,
                pipeline.sources,
                pipeline.returned,
                pipeline._slots.counts,
                planned.forward,
                planned.backward,
            )
        return self._run

    def _give(self, params: Tensors) -> None:
        for (held, name), parameter in zip(self._pipeline._slots.slots, params, strict=True):
            held[name] = parameter

    def _layout(self, params: Tensors) -> ParameterLayout | None:
        addresses = tuple(map(torch.Tensor.data_ptr, params))
        guard, layout = self._layouts.get(addresses, (None, None))
        if guard is None or not guard(*params):
            layout = self._known.renew(params)[1]
            while len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[addresses] = (tensor_guard(params), layout)
        return layout


def _own(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """``tensor``, or a copy if its storage is taken: results of operations share no memory."""
    tensor = tensor.clone() if storage_of(tensor) in taken else tensor
    taken.add(storage_of(tensor))
    return tensor


def _place(
    tensor: torch.Tensor, inputs: Tensors, outputs: Tensors, made: list[torch.Tensor]
) -> Place:
    """Where a saved tensor is; a new one is added to ``made``."""
    for kind, tensors in (("input", inputs), ("output", outputs), ("saved", made)):
        for number, other in enumerate(tensors):
            if tensor is other:
                return Place(kind, number)
    for kind, tensors in (("input", inputs), ("output", outputs), ("saved", made)):
        for number, other in enumerate(tensors):
            if storage_of(tensor) == storage_of(other):
                offset = tensor.storage_offset() - other.storage_offset()
                view = (tensor.size(), tensor.stride(), offset)
                return Place(kind, number, view)
    made.append(tensor)
    return Place("saved", len(made) - 1)


def _key(sizes: Sizes, params: Tensors) -> tuple[int | str, ...]:
    numbers = [*sizes, *layout_sizes(params)]
    return tuple([size if type(size) is int else str(size) for size in numbers])


def layout_sizes(tensors: Tensors) -> list[int | torch.SymInt]:
    """Sizes and strides of all tensors, which are numbers or symbols."""
    return [size for tensor in tensors for size in [*tensor.shape, *tensor.stride()]]


# -- the operations ----------------------------------------------------------------------------

_library = torch.library.Library("fuser", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(  # type: ignore[no-untyped-call]
    "forward(str call, Tensor x, Tensor[] params, Tensor[] extras) -> Tensor[]", tags=_TAGS
)
_library.define(  # type: ignore[no-untyped-call]
    "backward(str call, SymInt[] sizes, Tensor?[] grads, Tensor[] saved, Tensor[] params)"
    " -> Tensor[]",
    tags=_TAGS,
)


def _passes_of(call: str) -> Passes:
    passes = _calls.get(call)
    if passes is None:
        raise StateError(f"No pipeline in this process was traced as {call!r}.")
    return passes


def _forward(
    is_fake: bool, call: str, x: torch.Tensor, params: Tensors, extras: Tensors
) -> list[torch.Tensor]:
    return _passes_of(call).forward(x, tuple(params), tuple(extras), is_fake=is_fake)


def _backward(
    is_fake: bool,
    call: str,
    sizes: Sizes,
    grads: Sequence[torch.Tensor | None],
    saved: Tensors,
    params: Tensors,
) -> list[torch.Tensor]:
    return _passes_of(call).backward(sizes, grads, saved, tuple(params), is_fake=is_fake)


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    call, x, params, extras = inputs
    passes = _passes_of(call)
    ctx.call, ctx.count = call, passes.output_count
    ctx.sizes = layout_sizes((x, *extras))
    ctx.counts = (len(params), len(extras))
    given = (x, *params, *extras)
    saved = [*output[ctx.count :], *(given[i] for i in passes.saved_inputs)]
    saved += [output[i] for i in passes.saved_outputs]
    ctx.save_for_backward(*saved, *params)
    # Gradients of the saved tensors, and of extra outputs that no loss reads, are None.
    ctx.set_materialize_grads(False)
    ctx.main = (output[0].shape, output[0].dtype, output[0].device)


def _gradients(ctx: Any, grads: Any) -> tuple[Any, ...]:
    count = ctx.counts[0]
    tensors = ctx.saved_tensors
    saved, params = tensors[: len(tensors) - count], tensors[len(tensors) - count :]
    given = list(grads[: ctx.count])
    if given[0] is None:
        shape, dtype, device = ctx.main
        given[0] = torch.zeros(shape, dtype=dtype, device=device)
    found = iter(torch.ops.fuser.backward(ctx.call, ctx.sizes, given, list(saved), list(params)))
    wanted = [requires_grad for _, _, requires_grad in _passes_of(ctx.call).facts.tensors]
    each = [next(found) if is_wanted else None for is_wanted in wanted]
    return None, each[0], each[1 : 1 + count], each[1 + count :]


for _name, _function in (("forward", _forward), ("backward", _backward)):
    _real, _fake = functools.partial(_function, False), functools.partial(_function, True)
    _library.impl(_name, _real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fuser::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "fuser::forward", _gradients, setup_context=_keep_for_backward, lib=_library
)

traces_ops(traced_call)
