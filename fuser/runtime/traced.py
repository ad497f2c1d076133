"""Pipelines in torch.compile: what Dynamo traces, so that a compiled model has no graph break.

:func:`traced_call` reads the parameters of a pipeline as tensors, and what else the code of its ops
depends on as strings, by which Dynamo also guards: pipelines of equal structure share a graph. Each
pass is one operation (``runtime/compiled.py``) over these tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fuser.basic_ops import MoeCombine, MoeDispatch
from fuser.communication import group_number, is_distributed
from fuser.doors import PASSES, PassRunner
from fuser.errors import InputError, StateError
from fuser.functional.random_seeds import MOST_DROPOUT, MOST_ROUNDING
from fuser.op import BasicOperation, FusibleOperation
from fuser.op.structure import REFUSED, structure_of
from fuser.plan.saved_inputs import limit_here, many_rows
from fuser.precision.contexts import AROUND, EnteredInGraph, entered_in, recipe_key_here
from fuser.precision.numbered_calls import number_call
from fuser.runtime.compiled import forward, forward_on_host
from fuser.runtime.compiled_passes import lock
from fuser.runtime.compiled_runner import quantizing
from fuser.runtime.graph_parameters import joined_text, tensors_of_joined, text_of
from fuser.runtime.local_parts import check_gates, check_placement
from fuser.runtime.pipeline import OperationFuser, registered_count
from fuser.runtime.segment import PipelineSegment, Segment
from fuser.runtime.segments import Segments
from fuser.runtime.traced_passes import describe, note_structure
from fuser.torch_private import (
    breaks_graph,
    call_while_tracing,
    constant_in_graphs,
    graph_break,
    is_traced_in_checkpoint,
    outside_fake_mode,
    traced_subject,
)

Path: TypeAlias = tuple[str, ...]
GivenParameters: TypeAlias = tuple[Sequence[tuple[torch.Tensor, ...]], Callable[..., Any]]
"""The parameters of one call in place of those of the ops, each of the tensors that it joins, and
what calls a function with these in the ops, outside of graphs.

A graph takes them as they are, without a write into an op: a checkpoint inside of a graph takes no
write into what is outside of it.
"""


# -- what Dynamo reads ---------------------------------------------------------------------


class Pipeline(NamedTuple):
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

    parts: tuple[Pipeline | Path, ...]
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
        parts: list[Pipeline | Path]
        if isinstance(container, BasicOperation):
            pipelines = [container._own_pipeline()]
            parts = [_pipeline(container._own_pipeline(), paths)]
        else:
            segments = _segments_of(container).parts
            pipelines = [s.pipeline for s in segments if isinstance(s, PipelineSegment)]
            parts = [_part(segment, paths) for segment in segments]
        if len(parts) > 1 and not all(_is_open(part) for part in parts):
            parts = [Pipeline(f"channels or extra tensors cross {_modules_between(segments)}")]
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


def _part(segment: Segment, paths: Mapping[int, Path]) -> Pipeline | Path:
    if isinstance(segment, PipelineSegment):
        return _pipeline(segment.pipeline, paths)
    if segment.inputs or segment.outputs:
        return Pipeline(f"{type(segment.module).__name__} is called by itself, and has channels")
    return paths[id(segment.module.__dict__)]


def _is_open(part: Pipeline | Path) -> bool:
    return not isinstance(part, Pipeline) or (part.extra_inputs, part.outputs) == (0, 1)


def _pipeline(pipeline: OperationFuser, paths: Mapping[int, Path]) -> Pipeline:
    ops = pipeline.basic_ops
    if any(_is_apart(op, ops) for op in ops):
        return Pipeline("a MoeCombine apart from its MoeDispatch reads numbers of rows on the host")
    structures = []
    for op in ops:
        structure = structure_of(op)
        if structure.startswith(REFUSED):
            return Pipeline(structure.removeprefix(REFUSED))
        structures.append(structure)
    pipeline._find_parameters()
    owners = {id(op._parameters): i for i, op in enumerate(ops)}
    try:
        parameters = tuple((owners[id(held)], name) for held, name in pipeline._slots.slots)
        places = tuple(paths[id(op.__dict__)] for op in ops)
    except KeyError:
        return Pipeline("its ops are not modules of it")
    try:
        held: list[tuple[BasicOperation, str, Any]]
        held = [(ops[i], name, ops[i]._parameters[name]) for i, name in parameters]
        distributed = tuple(is_distributed(parameter) for _, _, parameter in held)
        summed = tuple(_summed_over(*each) for each in held)
        check_gates(ops)
        quantized = tuple([text_of(parameter) for _, _, parameter in held])
    except (InputError, StateError) as error:
        return Pipeline(str(error).removesuffix("."))
    text = repr((structures, pipeline.fusions, sorted(pipeline.open_channels)))
    names = "+".join(type(op).__name__ for op in ops)
    structure = f"{names} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    note_structure(structure, pipeline)
    quantizers = set(quantizing(ops))
    return Pipeline(
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
        refusals = [part.refusal for part in trace.parts if isinstance(part, Pipeline)]
        reason = max(refusals)
    if reason != "":
        return _broken(container, None, x, extras, keywords, given, reason)
    if len(trace.parts) == 1 and isinstance(trace.parts[0], Pipeline):
        return _traced_pipeline(container, None, trace, x, extras, given, 0)
    if extras:
        return _broken(container, None, x, extras, keywords, given, "it takes no extra inputs")
    result: Any = x
    first = 0
    for number, part in enumerate(trace.parts):
        if isinstance(part, Pipeline):
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
        return _broken(container, number, x, extras, {}, given, reason)
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
    each = [(x,), *parameters, *[(extra,) for extra in extras]]
    kinds = [
        text or type(tensors[0]).__name__
        for text, tensors in zip(["", *texts, *[""] * len(extras)], each, strict=True)
    ]
    are_trained = [True in [t.requires_grad for t in tensors] for tensors in each]
    dtypes = [tensors[0].dtype for tensors in each]
    facts = list(zip(kinds, dtypes, are_trained, strict=True))
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    first = tuple([min([j for j in range(i + 1) if extras[j] is e]) for i, e in enumerate(extras)])
    own = getattr(container, "_memory_budget", None)
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
        limit_here(own, x, pipeline.many_rows),
        registered_count(),
    )
    reason = call.refusal
    if call.is_inside and trace.is_repeated:
        reason = (
            "an op is called twice in an autocast with delayed scaling that the graph enters; "
            "enter it around the compiled function"
        )
    if reason != "":
        return _broken(container, number, x, extras, {}, given, reason)
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


def _broken(
    container: Any,
    number: int | None,
    x: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
    keywords: Mapping[str, Any],
    given: GivenParameters | None,
    reason: str,
) -> Any:
    """The call of part ``number`` of a container, or of all of it, outside of the graph."""
    if not torch.compiler.is_dynamo_compiling():
        raise StateError(f"A {type(container).__name__} cannot be exported: {reason}.")
    if torch.compiler.is_exporting():
        graph_break(f"a {type(container).__name__} cannot be exported: {reason}.")
    graph_break(
        f"a {type(container).__name__} is called outside of the graph: {reason}. Without "
        "fullgraph=True it runs between two graphs."
    )
    return _called_outside(container, number, x, extras, keywords, given)


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
