"""Pipelines in torch.compile: what Dynamo traces, so that a compiled model has no graph break.

:func:`traced_call` reads the parameters of a pipeline as tensors, and what else the code of its ops
depends on as strings, by which Dynamo also guards: pipelines of equal structure share a graph. Each
pass is one operation (``runtime/compiled.py``) over these tensors.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fuser.basic_ops import Dropout, GroupedLinear, MoeCombine, MoeDispatch
from fuser.communication import group_number
from fuser.cuda.launch import kernel_refusal
from fuser.errors import InputError, StateError
from fuser.functional.random_seeds import MOST_DROPOUT, MOST_ROUNDING
from fuser.gemm.matmul import architecture
from fuser.op import BasicOperation, FusibleOperation
from fuser.op.fusible import traces_ops
from fuser.op.structure import REFUSED, structure_of
from fuser.precision.contexts import (
    INSIDE,
    AutocastState,
    current_recipe,
    is_called_again_inside,
    recipe_key_here,
    recomputing_under,
)
from fuser.recipe import DelayedScaling, QParams, Recipe, recipe_of_key
from fuser.runtime.compiled import VERSION, add_passes, forward, forward_on_host
from fuser.runtime.compiled_passes import Passes, lock
from fuser.runtime.compiled_runner import copied, quantizing
from fuser.runtime.compiled_values import Facts, TensorFacts
from fuser.runtime.exported import exported_name
from fuser.runtime.local_parts import check_gates, check_placement
from fuser.runtime.pipeline import OperationFuser, registered_count
from fuser.runtime.quantized_parameters import QUANTIZED, QuantizedParameters
from fuser.runtime.segment import PipelineSegment, Segment
from fuser.runtime.segments import Segments
from fuser.specs import PlanKey
from fuser.tensors.sharding import is_distributed
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
_process = uuid.uuid4().hex


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
    """Of each parameter the text of :class:`QuantizedParameters`; empty if it is not quantized."""
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


class Trace(NamedTuple):
    """What Dynamo reads of a container or an op: its pipelines, and the modules between them."""

    parts: tuple[Pipeline | Path, ...]
    names: tuple[str, ...] = ()
    """The names of its modules: Dynamo notices if they change."""
    composites: tuple[Path, ...] = ()
    """The fused ops in it."""
    is_checkpointed: bool = False
    """Whether the call is in a checkpoint inside the graph, which runs it again."""


_pipelines: dict[str, OperationFuser] = {}
"""A copy of a pipeline for each structure, with parameters on the meta device."""
_quantized: dict[tuple[str, ...], QuantizedParameters] = {}


def _prepare_traced(context: Any) -> None:
    prepare(traced_subject(context), is_checkpointed=is_traced_in_checkpoint(context))


def prepare(container: Any, *, is_checkpointed: bool = False) -> None:
    """Before a call is traced: make the :class:`Trace` of a container or an op."""
    global _trace
    with lock, outside_fake_mode():
        paths = {}
        for name, module in container.named_modules():
            paths[id(module.__dict__)] = tuple(name.split(".")) if name else ()
        parts: list[Pipeline | Path]
        if isinstance(container, BasicOperation):
            parts = [_pipeline(container._own_pipeline(), paths)]
        else:
            parts = [_part(segment, paths) for segment in _segments_of(container).parts]
        if len(parts) > 1 and not all(_is_open(part) for part in parts):
            parts = [Pipeline("channels or extra tensors cross the modules between its pipelines")]
        composites = tuple(
            paths[id(module.__dict__)]
            for module in container.modules()
            if isinstance(module, FusibleOperation) and module.is_fused_op
        )
        _trace = Trace(tuple(parts), tuple(container._modules), composites, is_checkpointed)


_trace: Trace


@constant_in_graphs
def _trace_made_last() -> Trace:
    return _trace


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
        quantized = QuantizedParameters.of([parameter for _, _, parameter in held])
    except (InputError, StateError) as error:
        return Pipeline(str(error).removesuffix("."))
    if any(quantized.texts):
        _quantized.setdefault(quantized.texts, quantized)
    text = repr((structures, pipeline.fusions, sorted(pipeline.open_channels)))
    names = "+".join(type(op).__name__ for op in ops)
    structure = f"{names} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if structure not in _pipelines:
        _pipelines[structure] = copied(pipeline)
    quantizers = set(quantizing(ops))
    return Pipeline(
        "",
        structure,
        places,
        parameters,
        quantized.texts,
        distributed,
        summed,
        tuple(i for i, op in enumerate(ops) if _drops(op)),
        tuple(i for i, op in enumerate(ops) if op in quantizers),
        pipeline.num_extra_inputs,
        1 + len(pipeline.returned),
    )


def _is_apart(op: BasicOperation, ops: Sequence[BasicOperation]) -> bool:
    """Whether the op combines rows of other ranks, which a pipeline before it dispatched."""
    are_sent = isinstance(op, MoeCombine) and bool(op.process_groups)
    return are_sent and not any(isinstance(other, MoeDispatch) for other in ops)


def _summed_over(op: BasicOperation, name: str, parameter: Any) -> int | None:
    """The number of the group over which the gradient of a parameter is added."""
    group = check_placement(op, name, parameter) if is_distributed(parameter) else None
    return None if group is None else group_number(type(op).__name__, group)


def _drops(op: BasicOperation) -> bool:
    return isinstance(op, Dropout) and op.dropout_probability > 0


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
    # Compared by each call of the graph.
    composites = [_at(container, path)._structure for path in trace.composites]
    given = {name: value for name, value in keywords.items() if value}
    is_same = tuple(container._modules) == trace.names
    if given or not is_same:
        return _broken(container, None, x, extras, keywords, "it has keyword arguments for its ops")
    if len(trace.parts) == 1 and isinstance(trace.parts[0], Pipeline):
        return _traced_pipeline(container, None, trace.parts[0], x, extras, composites)
    if extras:
        return _broken(container, None, x, extras, keywords, "it takes no extra inputs")
    result: Any = x
    for number, part in enumerate(trace.parts):
        if isinstance(part, Pipeline):
            result = _traced_pipeline(container, number, part, result, (), composites)
        else:
            result = _at(container, part)(result)
    return result


def _traced_pipeline(
    container: Any,
    number: int | None,
    pipeline: Pipeline,
    x: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
    composites: list[str],
) -> Any:
    """The call of part ``number`` of a container, which is a pipeline; None if it is all of it."""
    reason = pipeline.refusal
    if reason == "" and len(extras) != pipeline.extra_inputs:
        reason = f"it takes {pipeline.extra_inputs} extra inputs and got {len(extras)}"
    if reason == "" and x.dim() == 0:
        reason = "its input has no dimensions"
    if reason == "" and x.is_meta:
        reason = "its input is on the meta device"
    if reason != "":
        return _broken(container, number, x, extras, {}, reason)
    ops = [_at(container, path) for path in pipeline.ops]
    # Compared by each call of the graph, and so traced again after a change of an op.
    structures = [op._structure for op in ops]
    training = [op.training for op in ops]
    fusions = [fusion.__qualname__ for fusion in getattr(container, "_fusions", ())]
    parameters = [ops[i]._parameters[name] for i, name in pipeline.parameters]
    if True in pipeline.distributed:
        pairs = zip(parameters, pipeline.distributed, strict=True)
        parameters = [p.to_local() if is_distributed else p for p, is_distributed in pairs]
    tensors = [x, *parameters, *extras]
    texts = ["", *pipeline.quantized, *[""] * len(extras)]
    kinds = [text or type(t).__name__ for t, text in zip(tensors, texts, strict=True)]
    facts = [(kind, t.dtype, t.requires_grad) for kind, t in zip(kinds, tensors, strict=True)]
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    first = tuple([min([j for j in range(i + 1) if extras[j] is e]) for i, e in enumerate(extras)])
    call = describe(
        pipeline.structure,
        recipe_key_here(),
        torch.is_grad_enabled(),
        device,
        autocast,
        pipeline.summed,
        first,
        tuple(facts),
        tuple(training),
        tuple(structures + fusions + composites),
        _trace_made_last().is_checkpointed,
        registered_count(),
    )
    reason = call.refusal
    if call.is_inside and is_called_again_inside(ops):
        reason = (
            "an op is called twice in an autocast with delayed scaling that the graph enters; "
            "enter it around the compiled function"
        )
    if reason != "":
        return _broken(container, number, x, extras, {}, reason)
    drawn = [i for i in pipeline.dropouts if training[i]]
    # Made in the graph: a recomputation gets the same ones, and a replay others.
    seeds = [torch.randint(MOST_DROPOUT, (2,), device=x.device) for _ in drawn]
    host = [ops[i]._next_call for i in pipeline.quantizing if call.is_delayed]
    if call.rounds:
        host.append(torch.randint(MOST_ROUNDING, (1,), device="cpu"))
    operation = forward_on_host if host or call.reads_sizes else forward
    results = operation(call.name, x, parameters, list(extras), seeds, host)
    return results[0] if pipeline.outputs == 1 else tuple(results[: pipeline.outputs])


def _broken(
    container: Any,
    number: int | None,
    x: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
    keywords: Mapping[str, Any],
    reason: str,
) -> Any:
    """The call of part ``number`` of a container, or of all of it, outside of the graph."""
    if not torch.compiler.is_dynamo_compiling():
        raise StateError(f"A {type(container).__name__} cannot be exported: {reason}.")
    graph_break(
        f"a {type(container).__name__} is called outside of the graph: {reason}. Without "
        "fullgraph=True it runs between two graphs."
    )
    return _called_outside(container, number, x, extras, keywords)


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
) -> Any:
    if number is None:
        return container.forward(x, *extras, **keywords)
    return _segments_of(container).parts[number].call(x, (), None)


def _segments_of(container: Any) -> Segments:
    is_op = isinstance(container, FusibleOperation)
    segments: Segments = container._own_segments() if is_op else container._current_segments()
    return segments


class Call(NamedTuple):
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
    registered: int,
) -> Call:
    """The call with such facts; ``read`` is there for Dynamo to compare it at each call."""
    recipe, key = None, recipe_key.removeprefix(INSIDE)
    pipeline = _pipelines[structure]
    if key:
        here = current_recipe()
        try:
            recipe = here if here is not None and here._key == key else recipe_of_key(key)
        except KeyError:
            return Call(
                "a custom recipe is entered in the graph; enter it around the compiled function"
            )
        if recipe.custom() and _has_states(pipeline, recipe):
            return Call("quantizers of its custom recipe have states")
    if is_functorch_active() or forward_ad_level() >= 0:
        return Call("it is transformed by torch.func, or differentiated forward")
    for kind, _, _ in tensors:
        is_plain = kind in ("Tensor", "Parameter", "FakeTensor", "FunctionalTensor")
        if not is_plain and not kind.startswith(QUANTIZED):
            return Call(f"a {kind} is among its inputs and parameters")
    try:
        with outside_fake_mode():
            like = [torch.empty(1, 1, dtype=dtype, device="meta") for _, dtype, _ in tensors]
        count = 1 + len(summed)
        pipeline.checks.kinds(like[0], like[1:count], like[count:])
    except InputError as error:
        return Call(str(error).removesuffix("."))
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
        return Call(
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
        _others(pipeline, registered),
    )
    text = repr((__version__, VERSION, facts))
    name = f"{structure} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if torch.compiler.is_exporting():
        if isinstance(recipe, DelayedScaling):
            return Call("scales of delayed scaling are no part of an exported program")
        if any(kind.startswith(QUANTIZED) for kind, _, _ in tensors):
            return Call("its parameters are quantized, which a program does not contain")
        if facts.registered:
            return Call("code from outside of fuser plans it, which another process lacks")
        # The program is under this recipe, wherever it runs.
        facts = facts._replace(recipe_key=INSIDE + key)
        with lock, outside_fake_mode():
            try:
                name = exported_name(pipeline, facts, recipe)
            except StateError as error:
                return Call(str(error).removesuffix("."))
    kinds = [kind for kind, _, _ in tensors[1 : 1 + len(summed)]]
    quantized = _quantized.get(tuple([k if k.startswith(QUANTIZED) else "" for k in kinds]))
    add_passes(name, lambda: Passes(pipeline, facts, recipe, quantized))
    is_delayed = isinstance(recipe, DelayedScaling)
    is_inside = is_delayed and recipe_key != key
    return Call("", name, is_delayed, is_inside, facts.rounds, reads_sizes)


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
        made = [
            op.quantizer_value(mode, index)
            for op in pipeline.basic_ops
            for mode in ("forward", "backward")
            for index in range(op.num_quantizers(mode))
        ]
    return any(quantizer is not None and quantizer.state_tensors() for quantizer in made)


def _rounds_at_random(recipe: Recipe | None) -> bool:
    params = () if recipe is None else vars(recipe).values()
    return any(isinstance(each, QParams) and each.stochastic_rounding for each in params)


traces_ops(traced_call)
