"""Pipelines in torch.compile: what Dynamo traces, so that a compiled model has no graph break.

:func:`traced_call` reads the parameters of a pipeline as tensors, and what else the code of its ops
depends on as strings, by which Dynamo also guards: pipelines of equal structure share a graph. Each
pass is one operation (``runtime/compiled.py``) over these tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from fuser.basic_ops import Dropout
from fuser.cuda.launch import kernel_refusal
from fuser.functional.random_seeds import MOST_DROPOUT, MOST_ROUNDING
from fuser.op import BasicOperation, FusibleOperation
from fuser.op.fusible import traces_ops
from fuser.op.structure import REFUSED, structure_of
from fuser.precision.contexts import INSIDE, is_called_again_inside, recipe_key_here
from fuser.recipe import DelayedScaling, QParams, Recipe, recipe_of_key
from fuser.runtime.compiled import VERSION, add_passes
from fuser.runtime.compiled_passes import Facts, Passes, TensorFacts, copied, lock, quantizing
from fuser.runtime.pipeline import OperationFuser
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
    dropouts: tuple[int, ...] = ()
    """The ops that draw a seed in training."""
    quantizing: tuple[int, ...] = ()
    """The ops with quantizers."""
    is_checkpointed: bool = False
    """Whether the call is in a checkpoint inside the graph, which runs it again."""
    extra_inputs: int = 0
    outputs: int = 1


_pipelines: dict[str, OperationFuser] = {}
"""A copy of a pipeline for each structure, with parameters on the meta device."""


def _prepare_traced(context: Any) -> None:
    prepare(traced_subject(context), is_checkpointed=is_traced_in_checkpoint(context))


def prepare(container: Any, *, is_checkpointed: bool = False) -> None:
    """Before a call is traced: make the :class:`Trace` of a container or an op."""
    global _trace
    with lock, outside_fake_mode():
        runner: Any = container
        if not isinstance(container, FusibleOperation):
            pipeline = runner._current_segments().only
        elif container.is_fused_op:
            pipeline = runner._own_segments().only
        else:
            pipeline = runner._own_pipeline()
        trace = _trace_of(container, pipeline)
        _trace = trace._replace(is_checkpointed=is_checkpointed)


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
        _pipelines[structure] = copied(pipeline)
    quantizers = set(quantizing(pipeline.basic_ops))
    counts = (pipeline.num_extra_inputs, 1 + len(pipeline.returned))
    return Trace(
        "",
        structure,
        tuple(module._modules),
        ops,
        parameters,
        tuple(i for i, op in enumerate(pipeline.basic_ops) if _drops(op)),
        tuple(i for i, op in enumerate(pipeline.basic_ops) if op in quantizers),
        False,
        *counts,
    )


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
            trace.is_checkpointed,
        )
        reason = call.refusal
        if call.is_inside and is_called_again_inside(ops):
            reason = (
                "an op is called twice in an autocast with delayed scaling that the graph enters; "
                "enter it around the compiled function"
            )
        if reason == "":
            drawn = [i for i in trace.dropouts if training[i]]
            # Made in the graph: a recomputation gets the same ones, and a replay others.
            seeds = [torch.randint(MOST_DROPOUT, (2,), device=x.device) for _ in drawn]
            host = [ops[i]._next_call for i in trace.quantizing if call.is_delayed]
            if call.rounds:
                host.append(torch.randint(MOST_ROUNDING, (1,), device="cpu"))
            results = torch.ops.fuser.forward(call.name, x, parameters, list(extras), seeds, host)
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
    is_checkpointed: bool,
) -> Call:
    """The call with such facts; ``read`` is there for Dynamo to compare it at each call."""
    recipe, key = None, recipe_key.removeprefix(INSIDE)
    if key:
        try:
            recipe = recipe_of_key(key)
        except KeyError:
            return Call("custom recipes are not supported in graphs")
    for kind, _, _ in tensors:
        if kind not in ("Tensor", "Parameter", "FakeTensor", "FunctionalTensor"):
            return Call(f"a {kind} is among its inputs and parameters")
    facts = Facts(
        recipe_key,
        is_grad_enabled,
        device,
        kernel_refusal(device),
        autocast,
        parameter_count,
        tensors,
        training,
        _rounds_at_random(recipe),
        is_checkpointed,
    )
    name = f"{structure} {hashlib.sha256(repr((VERSION, facts)).encode()).hexdigest()[:16]}"
    add_passes(name, lambda: Passes(_pipelines[structure], facts, recipe))
    is_delayed = isinstance(recipe, DelayedScaling)
    return Call("", name, is_delayed, is_delayed and recipe_key != key, facts.rounds)


def _rounds_at_random(recipe: Recipe | None) -> bool:
    params = () if recipe is None else vars(recipe).values()
    return any(isinstance(each, QParams) and each.stochastic_rounding for each in params)


traces_ops(traced_call)
