"""Pipelines in torch.compile: what Dynamo traces, so that a compiled model has no graph break.

:func:`traced_call` reads the parameters of a pipeline as tensors, and what else the code of its ops
depends on as strings, by which Dynamo also guards: pipelines of equal structure share a graph. Each
pass is one operation (``runtime/compiled.py``) over these tensors.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fuser.basic_ops import GroupedLinear, MoeCombine, MoeDispatch
from fuser.communication import group_number, is_distributed
from fuser.cuda.launch import kernel_refusal
from fuser.doors import PASSES, PassRunner
from fuser.errors import InputError, StateError
from fuser.functional.random_seeds import MOST_DROPOUT, MOST_ROUNDING
from fuser.gemm.matmul import architecture
from fuser.op import BasicOperation, FusibleOperation
from fuser.op.structure import REFUSED, structure_of
from fuser.plan.saved_inputs import limit_here, many_rows
from fuser.precision.contexts import (
    AROUND,
    INSIDE,
    AutocastState,
    EnteredInGraph,
    current_recipe,
    entered_in,
    recipe_key_here,
    recomputing_under,
)
from fuser.precision.numbered_calls import number_call
from fuser.recipe import DelayedScaling, QParams, Recipe, recipe_of_key
from fuser.runtime.compiled import VERSION, add_passes, forward, forward_on_host
from fuser.runtime.compiled_passes import Passes, lock
from fuser.runtime.compiled_runner import copied, quantizing
from fuser.runtime.compiled_values import Facts, TensorFacts
from fuser.runtime.exported import exported_name
from fuser.runtime.graph_parameters import (
    JOINED,
    PLAIN_CLASSES,
    QUANTIZED,
    joined_text,
    tensors_of_joined,
    text_of,
)
from fuser.runtime.local_parts import check_gates, check_placement
from fuser.runtime.pipeline import OperationFuser, registered_count
from fuser.runtime.segments import PipelineSegment, Segment, Segments
from fuser.specs import PlanKey
from fuser.torch_private import (
    breaks_graph,
    call_while_tracing,
    constant_in_graphs,
    forward_ad_level,
    graph_break,
    is_functorch_active,
    is_traced_in_checkpoint,
    outside_fake_mode,
    traced_subject,
)
from fuser.version import __version__

Path: TypeAlias = tuple[str, ...]
GivenParameters: TypeAlias = tuple[Sequence[tuple[torch.Tensor, ...]], Callable[..., Any]]
"""The parameters of one call in place of those of the ops, each of the tensors that it joins, and
what calls a function with these in the ops, outside of graphs.

A graph takes them as they are, without a write into an op: a checkpoint inside of a graph takes no
write into what is outside of it.
"""


# -- what Dynamo reads ---------------------------------------------------------------------


class TracedPipeline(NamedTuple):
    """What Dynamo reads of a pipeline, and why it cannot be in a graph."""

    refusal: str
    """Empty if it can."""
    structure: str = ""
    ops: tuple[Path, ...] = ()
    parameters: tuple[tuple[int, str], ...] = ()
    """The number of the op and the name of each parameter."""
    quantized: tuple[str, ...] = ()
    """Of each parameter its :func:`text_of`; empty if it is not quantized."""
    distributed: tuple[bool, ...] = ()
    """Whether each parameter is a ``DTensor``, whose local tensor the ops read."""
    summed: tuple[int | None, ...] = ()
    """The number of the group over which the gradient of each parameter is added."""
    dropouts: tuple[int, ...] = ()
    """The ops that draw a seed in training."""
    quantizing: tuple[int, ...] = ()
    """The ops with quantizers."""
    extra_inputs: int = 0
    outputs: int = 1
    many_rows: int = 0


class Trace(NamedTuple):
    """What Dynamo reads of a container or an op: its pipelines, and the modules between them."""

    parts: tuple[TracedPipeline | Path, ...]
    names: tuple[str, ...] = ()
    """The names of its modules: Dynamo notices if they change."""
    composites: tuple[Path, ...] = ()
    """The fused ops in it."""
    is_checkpointed: bool = False
    """Whether the call is in a checkpoint inside the graph, which runs it again."""
    recipe_key: str | None = None
    """That of the innermost autocast that the graph enters; None outside of all of them.

    :data:`AROUND` for code with a recipe of its own in an autocast around the graph.
    """
    is_repeated: bool = False
    """Whether one of its ops was called before in the outermost of them."""


def _prepare_traced(context: Any) -> None:
    is_checkpointed = is_traced_in_checkpoint(context)
    prepare(traced_subject(context), entered_in(context), is_checkpointed=is_checkpointed)


def prepare(
    container: Any, entered: EnteredInGraph | None = None, *, is_checkpointed: bool = False
) -> None:
    """Before a call is traced: make the :class:`Trace` of a container or an op."""
    global _trace
    with lock, outside_fake_mode():
        paths = {}
        for name, module in container.named_modules():
            paths[id(module.__dict__)] = tuple(name.split(".")) if name else ()
        parts: list[TracedPipeline | Path]
        if isinstance(container, BasicOperation):
            pipelines = [container._own_pipeline()]
            parts = [_pipeline(container._own_pipeline(), paths)]
        else:
            segments = _segments_of(container).parts
            pipelines = [s.pipeline for s in segments if isinstance(s, PipelineSegment)]
            parts = [_part(segment, paths) for segment in segments]
        if len(parts) > 1 and not all(_is_open(part) for part in parts):
            parts = [
                TracedPipeline(f"channels or extra tensors cross {_modules_between(segments)}")
            ]
        composites = tuple(
            paths[id(module.__dict__)]
            for module in container.modules()
            if isinstance(module, FusibleOperation) and module.is_fused_op
        )
        keys = [] if entered is None else entered.keys
        ops = [op for pipeline in pipelines for op in pipeline.basic_ops]
        _trace = Trace(
            *(tuple(parts), tuple(container._modules), composites, is_checkpointed),
            recipe_key=keys[-1] if keys else None,
            is_repeated=entered is not None and entered.are_called_again(ops),
        )


_trace: Trace


@constant_in_graphs
def _trace_made_last() -> Trace:
    return _trace


def _modules_between(segments: Sequence[Segment]) -> str:
    alone = [segment.module for segment in segments if not isinstance(segment, PipelineSegment)]
    hooked = [type(module).__name__ for module in alone if isinstance(module, FusibleOperation)]
    if hooked:
        return f"{' and '.join(hooked)}, which is called by itself because it has hooks"
    return "the modules between its pipelines"


def _part(segment: Segment, paths: Mapping[int, Path]) -> TracedPipeline | Path:
    if isinstance(segment, PipelineSegment):
        return _pipeline(segment.pipeline, paths)
    if segment.inputs or segment.outputs:
        return TracedPipeline(
            f"{type(segment.module).__name__} is called by itself, and has channels"
        )
    return paths[id(segment.module.__dict__)]


def _is_open(part: TracedPipeline | Path) -> bool:
    return not isinstance(part, TracedPipeline) or (part.extra_inputs, part.outputs) == (0, 1)


def _pipeline(pipeline: OperationFuser, paths: Mapping[int, Path]) -> TracedPipeline:
    ops = pipeline.basic_ops
    if any(_is_apart(op, ops) for op in ops):
        return TracedPipeline(
            "a MoeCombine apart from its MoeDispatch reads numbers of rows on the host"
        )
    structures = []
    for op in ops:
        structure = structure_of(op)
        if structure.startswith(REFUSED):
            return TracedPipeline(structure.removeprefix(REFUSED))
        structures.append(structure)
    pipeline._find_parameters()
    owners = {id(op._parameters): i for i, op in enumerate(ops)}
    try:
        parameters = tuple((owners[id(held)], name) for held, name in pipeline._slots.slots)
        places = tuple(paths[id(op.__dict__)] for op in ops)
    except KeyError:
        return TracedPipeline("its ops are not modules of it")
    try:
        held: list[tuple[BasicOperation, str, Any]]
        held = [(ops[i], name, ops[i]._parameters[name]) for i, name in parameters]
        distributed = tuple(is_distributed(parameter) for _, _, parameter in held)
        summed = tuple(_summed_over(*slot) for slot in held)
        check_gates(ops)
        quantized = tuple([text_of(parameter) for _, _, parameter in held])
    except (InputError, StateError) as error:
        return TracedPipeline(str(error).removesuffix("."))
    text = repr((structures, pipeline.fusions, sorted(pipeline.open_channels)))
    names = "+".join(type(op).__name__ for op in ops)
    structure = f"{names} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    note_structure(structure, pipeline)
    quantizers = set(quantizing(ops))
    return TracedPipeline(
        "",
        structure,
        places,
        parameters,
        quantized,
        distributed,
        summed,
        tuple(i for i, op in enumerate(ops) if op.draws_seed),
        tuple(i for i, op in enumerate(ops) if op in quantizers),
        pipeline.num_extra_inputs,
        1 + len(pipeline.returned),
        many_rows(ops),
    )


def _is_apart(op: BasicOperation, ops: Sequence[BasicOperation]) -> bool:
    """Whether the op combines rows of other ranks, which a pipeline before it dispatched."""
    are_sent = isinstance(op, MoeCombine) and bool(op.process_groups)
    return are_sent and not any(isinstance(other, MoeDispatch) for other in ops)


def _summed_over(op: BasicOperation, name: str, parameter: Any) -> int | None:
    """The number of the group over which the gradient of a parameter is added."""
    group = check_placement(op, name, parameter) if is_distributed(parameter) else None
    return None if group is None else group_number(type(op).__name__, group)


# -- the passes of a call, or why it cannot be in a graph -----------------------------------


_process = uuid.uuid4().hex
_pipelines: dict[str, OperationFuser] = {}
"""A copy of a pipeline for each structure, with parameters on the meta device."""


def note_structure(structure: str, pipeline: OperationFuser) -> None:
    """Before a call of such a pipeline is described: keep a copy."""
    if structure not in _pipelines:
        _pipelines[structure] = copied(pipeline)


class TracedCall(NamedTuple):
    """What the graph of a call contains."""

    refusal: str
    """Why the call cannot be in a graph; empty if it can."""
    name: str = ""
    """That of the passes."""
    is_delayed: bool = False
    is_inside: bool = False
    """Whether the graph enters the autocast with delayed scaling."""
    rounds: bool = False
    """Whether the recipe rounds at random."""
    reads_sizes: bool = False
    """Whether the host waits for split sizes."""


@constant_in_graphs
def describe(
    structure: str,
    recipe_key: str,
    is_grad_enabled: bool,
    device: str,
    autocast: torch.dtype | None,
    summed: tuple[int | None, ...],
    first: tuple[int, ...],
    tensors: tuple[TensorFacts, ...],
    training: tuple[bool, ...],
    read: tuple[str, ...],
    is_checkpointed: bool,
    limit: tuple[float | None, bool, bool],
    registered: int,
) -> TracedCall:
    """The call with such facts; ``read`` is there for Dynamo to compare it at each call."""
    recipe, key = None, recipe_key.removeprefix(INSIDE).removeprefix(AROUND)
    pipeline = _pipelines[structure]
    if key:
        here = current_recipe()
        try:
            recipe = here if here is not None and here._key == key else recipe_of_key(key)
        except KeyError:
            return TracedCall(
                "a custom recipe is entered in the graph; enter it around the compiled function"
            )
        if recipe.custom() and _has_states(pipeline, recipe):
            return TracedCall("quantizers of its custom recipe have states")
    if is_functorch_active() or forward_ad_level() >= 0:
        return TracedCall("it is transformed by torch.func, or differentiated forward")
    for kind, _, _ in tensors:
        if kind not in PLAIN_CLASSES and not kind.startswith((QUANTIZED, JOINED)):
            return TracedCall(f"a {kind} is among its inputs and parameters")
    try:
        with outside_fake_mode():
            like = [torch.empty(1, 1, dtype=dtype, device="meta") for _, dtype, _ in tensors]
        count = 1 + len(summed)
        pipeline.checks.kinds(like[0], like[1:count], like[count:])
    except InputError as error:
        return TracedCall(str(error).removesuffix("."))
    dtypes = iter([dtype for _, dtype, _ in tensors[1:]])
    reads_sizes = False
    for op, parameters in zip(pipeline.basic_ops, pipeline._slots.counts, strict=True):
        # Not those of the copy, which may be of a pipeline of the same structure in another dtype.
        of_op = [next(dtypes) for _ in range(parameters)]
        if not isinstance(op, GroupedLinear):
            continue
        arch = architecture(torch.device(device))
        place = PlanKey((), recipe, autocast or of_op[0], device, arch, ())
        reads_sizes |= not op.runs_at_once(place)
    if reads_sizes and recipe is not None:
        return TracedCall(
            "GroupedLinear quantizes each group alone, and split sizes decide what it keeps"
        )
    facts = Facts(
        recipe_key,
        is_grad_enabled,
        device,
        kernel_refusal(device),
        autocast,
        summed,
        first,
        tensors,
        training,
        _rounds_at_random(recipe),
        is_checkpointed,
        limit,
        _others(pipeline, registered),
    )
    text = repr((__version__, VERSION, facts))
    name = f"{structure} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if torch.compiler.is_exporting():
        if isinstance(recipe, DelayedScaling):
            return TracedCall("scales of delayed scaling are no part of an exported program")
        if any(kind.startswith(QUANTIZED) for kind, _, _ in tensors):
            return TracedCall("its parameters are quantized, which a program does not contain")
        if facts.registered:
            return TracedCall("code from outside of fuser plans it, which another process lacks")
        # The program is under this recipe, wherever it runs.
        facts = facts._replace(recipe_key=INSIDE + key)
        with lock, outside_fake_mode():
            try:
                name = exported_name(pipeline, facts, recipe)
            except StateError as error:
                return TracedCall(str(error).removesuffix("."))
    add_passes(name, lambda: Passes(pipeline, facts, recipe))
    is_delayed = isinstance(recipe, DelayedScaling) and bool(quantizing(pipeline.basic_ops))
    is_inside = is_delayed and recipe_key.startswith(INSIDE)
    return TracedCall("", name, is_delayed, is_inside, facts.rounds, reads_sizes)


def _others(pipeline: OperationFuser, registered: int) -> str:
    """What names code of the user that plans or runs; empty if there is none.

    Graphs that torch keeps on disk then belong to this process.
    """
    modules = [fusion.__module__ for fusion in pipeline.fusions]
    if not registered and all(module.partition(".")[0] == "fuser" for module in modules):
        return ""
    return f"{_process} {registered}"


def _has_states(pipeline: OperationFuser, recipe: Recipe) -> bool:
    """Whether quantizers of a custom recipe read or write tensors, as those of delayed scaling."""
    with lock, recomputing_under(AutocastState(recipe)):
        quantizers = [
            op.quantizer_value(mode, index)
            for op in pipeline.basic_ops
            for mode in ("forward", "backward")
            for index in range(op.num_quantizers(mode))
        ]
    return any(quantizer is not None and quantizer.state_tensors() for quantizer in quantizers)


def _rounds_at_random(recipe: Recipe | None) -> bool:
    params = () if recipe is None else vars(recipe).values()
    return any(isinstance(value, QParams) and value.stochastic_rounding for value in params)


# -- the traced call -------------------------------------------------------------------------


def traced_call(
    container: Any,
    x: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
    keywords: Mapping[str, Any],
    given: GivenParameters | None = None,
) -> Any:
    """The call of a container or an op, as Dynamo traces it, with its parameters or those given."""
    if torch.compiler.is_dynamo_compiling():
        call_while_tracing(_prepare_traced, container)
    else:
        prepare(container)
    trace = _trace_made_last()
    present = {name: value for name, value in keywords.items() if value}
    reason = "" if len(present) == 0 else "it has keyword arguments for its ops"
    # Dynamo of torch 2.11 compares tuples of names for equality only.
    are_present = tuple(container._modules) == trace.names
    if not are_present:
        reason = "its modules have changed while it was traced"
    if given is not None and reason == "":
        refusals = [part.refusal for part in trace.parts if isinstance(part, TracedPipeline)]
        reason = max(refusals)
    if reason != "":
        return _broken(reason, container, None, x, extras, keywords, given)
    if len(trace.parts) == 1 and isinstance(trace.parts[0], TracedPipeline):
        return _traced_pipeline(container, None, trace, x, extras, given, 0)
    if extras:
        return _broken("it takes no extra inputs", container, None, x, extras, keywords, given)
    result: Any = x
    first = 0
    for number, part in enumerate(trace.parts):
        if isinstance(part, TracedPipeline):
            result = _traced_pipeline(container, number, trace, result, (), given, first)
            first += len(part.parameters)
        else:
            result = _at(container, part)(result)
    return result


def _traced_pipeline(
    container: Any,
    number: int | None,
    trace: Trace,
    x: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
    given: GivenParameters | None,
    first_given: int,
) -> Any:
    """The call of part ``number`` of a container, which is a pipeline; None if it has no other.

    Its parameters are those of its ops, or given from ``first_given`` on.
    """
    pipeline: Any = trace.parts[0 if number is None else number]
    reason = pipeline.refusal
    if reason == "" and len(extras) != pipeline.extra_inputs:
        reason = f"it takes {pipeline.extra_inputs} extra inputs and got {len(extras)}"
    if reason == "" and x.dim() == 0:
        reason = "its input has no dimensions"
    if reason == "" and x.is_meta:
        reason = "its input is on the meta device"
    if reason != "":
        return _broken(reason, container, number, x, extras, {}, given)
    ops = [_at(container, path) for path in pipeline.ops]
    # Compared by each call of the graph, and so traced again after a change of an op.
    structures = [op._structure for op in ops]
    composites = [_at(container, path)._structure for path in trace.composites]
    training = [op.training for op in ops]
    fusions = [fusion.__qualname__ for fusion in getattr(container, "_fusions", ())]
    parameters: list[tuple[Any, ...]]
    if given is None:
        held = [ops[i]._parameters[name] for i, name in pipeline.parameters]
        pairs = zip(held, pipeline.distributed, strict=True)
        parameters = [(p.to_local() if is_distributed else p,) for p, is_distributed in pairs]
        texts = list(pipeline.quantized)
    else:
        joined = given[0][first_given : first_given + len(pipeline.parameters)]
        parameters = [tensors_of_joined(tensors) for tensors in joined]
        texts = [joined_text(tensors) for tensors in parameters]
    tuples = [(x,), *parameters, *[(extra,) for extra in extras]]
    kinds = [
        text or type(tensors[0]).__name__
        for text, tensors in zip(["", *texts, *[""] * len(extras)], tuples, strict=True)
    ]
    are_trained = [True in [t.requires_grad for t in tensors] for tensors in tuples]
    dtypes = [tensors[0].dtype for tensors in tuples]
    facts = list(zip(kinds, dtypes, are_trained, strict=True))
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    first = tuple([min([j for j in range(i + 1) if extras[j] is e]) for i, e in enumerate(extras)])
    budget = getattr(container, "_memory_budget", None)
    recipe_key = trace.recipe_key
    if recipe_key is None or recipe_key == AROUND:
        recipe_key = (recipe_key or "") + recipe_key_here()
    call = describe(
        pipeline.structure,
        recipe_key,
        torch.is_grad_enabled(),
        device,
        autocast,
        pipeline.summed,
        first,
        tuple(facts),
        tuple(training),
        tuple(structures + fusions + composites),
        trace.is_checkpointed,
        limit_here(budget, x, pipeline.many_rows),
        registered_count(),
    )
    reason = call.refusal
    if call.is_inside and trace.is_repeated:
        reason = (
            "an op is called twice in an autocast with delayed scaling that the graph enters; "
            "enter it around the compiled function"
        )
    if reason != "":
        return _broken(reason, container, number, x, extras, {}, given)
    drawn = [i for i in pipeline.dropouts if training[i]]
    # Made in the graph: a recomputation gets the same ones, and a replay others.
    seeds = [torch.randint(MOST_DROPOUT, (2,), device=x.device) for _ in drawn]
    host = [ops[i]._next_call for i in pipeline.quantizing if call.is_delayed]
    if call.rounds:
        host.append(torch.randint(MOST_ROUNDING, (1,), device="cpu"))
    operation = forward_on_host if host or call.reads_sizes else forward
    tensors = [tensor for parameter in parameters for tensor in parameter]
    results = operation(call.name, x, tensors, list(extras), seeds, host)
    return results[0] if pipeline.outputs == 1 else tuple(results[: pipeline.outputs])


def _broken(reason: str, container: Any, *call: Any) -> Any:
    """A call outside of the graph; the arguments are those of :func:`_called_outside`."""
    if not torch.compiler.is_dynamo_compiling():
        raise StateError(f"A {type(container).__name__} cannot be exported: {reason}.")
    if torch.compiler.is_exporting():
        graph_break(f"a {type(container).__name__} cannot be exported: {reason}.")
    graph_break(
        f"a {type(container).__name__} is called outside of the graph: {reason}. Without "
        "fullgraph=True it runs between two graphs."
    )
    return _called_outside(container, *call)


def _at(module: Any, path: Path) -> Any:
    for name in path:
        module = module._modules[name]
    return module


@breaks_graph
def _called_outside(
    container: Any,
    number: int | None,
    x: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
    keywords: Mapping[str, Any],
    given: GivenParameters | None,
) -> Any:
    """The call of part ``number`` of a container, or of all of it."""

    def call() -> Any:
        if number is None:
            return container.forward(x, *extras, **keywords)
        return _segments_of(container).parts[number].call(x, (), None)

    if given is None:
        return call()
    parameters, called_with = given
    return called_with(parameters, call)


def _segments_of(container: Any) -> Segments:
    is_op = isinstance(container, FusibleOperation)
    segments: Segments = container._own_segments() if is_op else container._current_segments()
    return segments


class TracedPasses(PassRunner):
    """Pipelines in the graphs of torch.compile."""

    traced_call = staticmethod(traced_call)
    new_op = staticmethod(number_call)  # before any graph, so that graphs of equal ops are one


PASSES.open(TracedPasses())
