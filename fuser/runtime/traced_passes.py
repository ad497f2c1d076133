"""The passes that a traced call of a pipeline runs, or why it cannot be in a graph."""

from __future__ import annotations

import hashlib
import uuid
from typing import NamedTuple

import torch

from fuser.basic_ops import GroupedLinear
from fuser.cuda.launch import kernel_refusal
from fuser.errors import InputError, StateError
from fuser.gemm.matmul import architecture
from fuser.precision.contexts import (
    AROUND,
    INSIDE,
    AutocastState,
    current_recipe,
    recomputing_under,
)
from fuser.recipe import DelayedScaling, QParams, Recipe, recipe_of_key
from fuser.runtime.compiled import VERSION, add_passes
from fuser.runtime.compiled_passes import Passes, lock
from fuser.runtime.compiled_runner import copied, quantizing
from fuser.runtime.compiled_values import Facts, TensorFacts
from fuser.runtime.exported import exported_name
from fuser.runtime.graph_parameters import JOINED, PLAIN_CLASSES, QUANTIZED
from fuser.runtime.pipeline import OperationFuser
from fuser.specs import PlanKey
from fuser.torch_private import (
    constant_in_graphs,
    forward_ad_level,
    is_functorch_active,
    outside_fake_mode,
)
from fuser.version import __version__

_process = uuid.uuid4().hex
_pipelines: dict[str, OperationFuser] = {}
"""A copy of a pipeline for each structure, with parameters on the meta device."""


def note_structure(structure: str, pipeline: OperationFuser) -> None:
    """Before a call of such a pipeline is described: keep a copy."""
    if structure not in _pipelines:
        _pipelines[structure] = copied(pipeline)


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
    limit: tuple[float | None, bool, bool],
    registered: int,
) -> Call:
    """The call with such facts; ``read`` is there for Dynamo to compare it at each call."""
    recipe, key = None, recipe_key.removeprefix(INSIDE).removeprefix(AROUND)
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
        if kind not in PLAIN_CLASSES and not kind.startswith((QUANTIZED, JOINED)):
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
        limit,
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
    add_passes(name, lambda: Passes(pipeline, facts, recipe))
    is_delayed = isinstance(recipe, DelayedScaling) and bool(quantizing(pipeline.basic_ops))
    is_inside = is_delayed and recipe_key.startswith(INSIDE)
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
