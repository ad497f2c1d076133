"""One transformer layer as fuser plans it: bytes in memory, over links, and saved for backward.

Attention itself is not an op of fuser; its bytes are counted here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuser.basic_ops import (
    AddExtraInput,
    BasicLinear,
    GroupedLinear,
    MakeExtraOutput,
    MoeCombine,
    MoeDispatch,
    RMSNorm,
    ScaledSwiGLU,
    SwiGLU,
)
from fuser.basic_ops.collectives import CollectiveOperation
from fuser.communication import PlannedGroup
from fuser.formats import NumberFormat, ceil_div
from fuser.fused_ops.catalog import FUSIONS
from fuser.fused_ops.linear import Linear
from fuser.op import FusibleOperation
from fuser.plan.graph import OpGraph
from fuser.plan.plan import FusionPlan
from fuser.plan.transformers import Transformer
from fuser.precision import contexts
from fuser.precision.quantizer_for import make_quantizer, role_format
from fuser.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from fuser.runtime.pipeline import OperationFuser
from fuser.specs import Collective
from fuser.tensors import QuantizedTensor
from fuser.tensors.sharding import is_exact

SIDES = ("forward", "backward")
VALUE = 2  # bytes of a bf16 value

# A residual is counted as a kernel of its own, as where torch has no cuBLASLt that adds it to a
# product; and experts that are spread over ranks are no single step.
LEFT_OUT = (
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "DispatchedExperts",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "GroupedMLP",
)


@dataclass(frozen=True)
class Product:
    """A linear on this rank: ``[rows, columns] x [columns, outputs]``, for each of ``groups``.

    ``rows`` are those of all groups together. ``is_expert``: the groups are experts; a rank may
    have a single one. ``reads_activation``: the activation computes its input, and in backward the
    gradient of the linear before.
    """

    rows: int
    columns: int
    outputs: int
    groups: int = 1
    is_expert: bool = False
    reads_activation: bool = False

    @property
    def flops(self) -> int:
        """Operations of forward, and of each of the two products of backward."""
        return 2 * self.rows * self.columns * self.outputs

    @property
    def weights(self) -> int:
        """The number of weights."""
        return self.groups * self.columns * self.outputs

    def shape(self, role: str) -> tuple[int, int]:
        """The shape of ``"input"``, ``"weight"`` or ``"grad_output"`` as a matrix."""
        return {
            "input": (self.rows, self.columns),
            "weight": (self.groups * self.outputs, self.columns),
            "grad_output": (self.rows, self.outputs),
        }[role]


@dataclass(frozen=True)
class Sent:
    """A collective of tensor parallelism: the bytes that a rank receives.

    ``nbytes`` are those of the plan, ``value_bytes`` those of unquantized values.
    """

    side: str
    collective: Collective
    nbytes: int
    value_bytes: int


@dataclass(frozen=True)
class Layer:
    """The costs of a layer on one GPU, for the tokens of one microbatch.

    ``elementwise`` are bytes that kernels move through memory on each side, without products and
    without the quantization of weights; ``saved`` the bytes that are kept for backward, ``input``
    those of the layer's input alone. ``attention`` are operations of attention's forward.
    """

    recipe: Recipe | None
    products: tuple[Product, ...]
    elementwise: dict[str, float]
    sent: tuple[Sent, ...]
    saved: float
    input: int
    attention: int

    def weights_of(self, *, experts: bool) -> list[Product]:
        """The linears that are experts, or those that are not."""
        return [one for one in self.products if one.is_expert == experts]


def bytes_of(recipe: Recipe, role: str, shape: tuple[int, ...], copies: Sequence[str]) -> int:
    """Bytes of copies of a tensor that ``recipe`` quantizes in ``role``."""
    number_format: NumberFormat = role_format(recipe, role)
    return number_format.nbytes(shape, tuple(copies))


@functools.cache
def _weight(recipe: Recipe, rows: int, columns: int) -> QuantizedTensor:
    """A quantized weight without bytes, which knows how its format stores them."""
    # Delayed scaling has the format of current scaling; its quantizer belongs to an op.
    known = Float8CurrentScaling() if isinstance(recipe, DelayedScaling) else recipe
    quantizer = make_quantizer(known, "weight").with_usage(rowwise=True, columnwise=True)
    meta = torch.device("meta")
    return quantizer.tensor_class({}, (rows, columns), torch.bfloat16, meta, quantizer)


@functools.cache
def weight_bytes(recipe: Recipe, rows: int, columns: int, copies: tuple[str, ...]) -> int:
    """Bytes of copies of a quantized weight: elements and the scales of its rows, unpadded."""
    weight = _weight(recipe, rows, columns)
    layout, units, widths = (
        weight._layout.shapes(rows, columns),
        weight._layout.rows,
        weight._layout.unpadded_columns(columns),
    )
    total = 0
    for name in (name for copy in copies for name in weight._names(copy) if name in units):
        (dim, unit), shape = units[name], layout[name]
        across = widths.get(name, math.prod(shape) // shape[dim])
        size = weight._layout.buffers[name].dtype.itemsize
        total += ceil_div(rows, unit) * across * size
    return total


@functools.cache
def shards_are_whole_blocks(recipe: Recipe, rows: int, columns: int, ranks: int) -> bool:
    """Whether bytes of a weight are gathered from ``ranks`` shards, and not its values."""
    weight = _weight(recipe, rows, columns)
    return is_exact(weight, weight._quantizer, ranks)


def gathered_bytes(
    recipe: Recipe | None, product: Product, copies: tuple[str, ...], ranks: int
) -> int:
    """Bytes of a weight that ``fully_shard`` gathers from ``ranks`` shards, for these copies.

    Without a recipe, and if shards cut blocks, values are gathered. The columnwise copy of a format
    with one scale is made of the rowwise one.
    """
    rows, columns = product.shape("weight")
    if recipe is None or not shards_are_whole_blocks(recipe, rows, columns, ranks):
        return rows * columns * VALUE
    if derives_columnwise(recipe):
        copies = ("rowwise",)
    return weight_bytes(recipe, rows, columns, copies)


@functools.cache
def reduces_amaxes(recipe: Recipe) -> bool:
    """Whether shards of a weight share a scale or amax, which the ranks reduce."""
    weight = _weight(recipe, 1, 1)
    return any(name not in weight._layout.rows for name in weight.buffer_names)


def derives_columnwise(recipe: Recipe) -> bool:
    """Whether the columnwise copy of a weight is the transpose of its rowwise copy."""
    return role_format(recipe, "weight").has_one_scale


@functools.lru_cache(maxsize=256)
def plan_layer(model: Transformer, tp: int, ep: int, tokens: int, recipe: Recipe | None) -> Layer:
    """The layer of ``model`` on ranks of ``tp`` and ``ep``, with ``tokens`` rows on each GPU.

    Nothing runs: its pipelines are planned on the meta device, for compute capability 9.0.
    """
    whole = tokens * tp
    residual = torch.empty(tokens, model.hidden, dtype=torch.bfloat16, device="meta")
    heads = (whole, model.attention_features // tp)
    context = torch.empty(heads, dtype=torch.bfloat16, device="meta")
    pipelines: list[tuple[list[FusibleOperation], tuple[torch.Tensor, ...]]] = []
    if model.heads:
        pipelines.append((_before_attention(model, tp), (residual,)))
        pipelines.append((_after_attention(model, tp), (context, residual)))
    if model.experts:
        indices = torch.empty(tokens, model.top_k, dtype=torch.int32, device="meta")
        probs = torch.empty(tokens, model.top_k, dtype=torch.float32, device="meta")
        probs.requires_grad_()
        pipelines.append((_experts(model, ep, tokens), (residual, indices, probs)))
    else:
        pipelines.append((_feed_forward(model, tp), (residual,)))
    residual.requires_grad_()
    context.requires_grad_()
    fusions = tuple(one for one in FUSIONS if one.__name__ not in LEFT_OUT)
    products: list[Product] = []
    elementwise = dict.fromkeys(SIDES, 0.0)
    sent: list[Sent] = []
    saved = 0.0
    for ops, inputs in pipelines:
        with contexts.autocast(enabled=recipe is not None, recipe=recipe):
            graph, plan = OperationFuser(ops, fusions).plan_for_gpu((9, 0), *inputs)
        own_products = _products(graph)
        products += own_products.values()
        for side in SIDES:
            elementwise[side] += _elementwise(graph, plan, side)
        if recipe is not None:
            quantizing = _grouped_quantization(recipe, list(own_products.values()))
            elementwise = {side: elementwise[side] + quantizing[side] for side in SIDES}
        sent += _sent(graph)
        saved += plan.kept_bytes_per_token * graph.tokens
    if model.experts and ep > 1:  # rows from other ranks are not computed again
        rows = (tokens * model.top_k, model.hidden)
        values = math.prod(rows) * VALUE
        saved += values if recipe is None else bytes_of(recipe, "input", rows, ("columnwise",))
    # Rotary embedding reads and writes queries and keys, in forward and in backward. Queries, keys,
    # values and the output are kept.
    rotated = (model.heads + model.kv_heads) * model.head_dim * tokens * VALUE
    elementwise = {side: elementwise[side] + 2 * rotated for side in SIDES}
    saved += (model.qkv_features + model.attention_features) * tokens * VALUE
    attention = 2 * tokens * model.sequence * model.attention_features
    return Layer(
        recipe,
        tuple(products),
        elementwise,
        tuple(sent),
        saved,
        tokens * model.hidden * VALUE,
        attention,
    )


# -- the pipelines ------------------------------------------------------------------


def _before_attention(model: Transformer, tp: int) -> list[FusibleOperation]:
    return [
        MakeExtraOutput(),
        _norm(model),
        _linear(model.hidden, model.qkv_features, tp, "column"),
    ]


def _after_attention(model: Transformer, tp: int) -> list[FusibleOperation]:
    return [_linear(model.attention_features, model.hidden, tp, "row"), AddExtraInput()]


def _feed_forward(model: Transformer, tp: int) -> list[FusibleOperation]:
    fork, join = _residual()
    return [
        fork,
        _norm(model),
        _linear(model.hidden, 2 * model.intermediate, tp, "column"),
        SwiGLU(),
        _linear(model.intermediate, model.hidden, tp, "row"),
        join,
    ]


def _experts(model: Transformer, ep: int, tokens: int) -> list[FusibleOperation]:
    """The experts of one rank, which get as many rows as the rank sends to all."""
    count = model.experts // ep
    options: dict[str, Any] = {
        "bias": False,
        "device": "meta",
        "dtype": torch.bfloat16,
        "single_grouped_weight": True,
    }
    fork, join = _residual()
    dispatch = MoeDispatch(count)
    for index, channel in enumerate(("split sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    up = GroupedLinear(count, model.hidden, 2 * model.intermediate, **options)
    down = GroupedLinear(count, model.intermediate, model.hidden, **options)
    return [
        fork,
        _norm(model),
        dispatch,
        up.set_extra_input_channel(0, "split sizes"),
        ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        down.set_extra_input_channel(0, "split sizes"),
        MoeCombine().set_extra_input_channel(0, "rows"),
        join,
    ]


def _residual() -> tuple[FusibleOperation, FusibleOperation]:
    """The ops at both ends of a residual connection."""
    fork = MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False)
    return fork, AddExtraInput().set_extra_input_channel(0, "residual")


def _norm(model: Transformer) -> RMSNorm:
    return RMSNorm(model.hidden, device="meta", dtype=torch.bfloat16)


def _linear(inputs: int, outputs: int, tp: int, mode: str) -> Linear:
    options: dict[str, Any] = {"bias": False, "device": "meta", "dtype": torch.bfloat16}
    if tp > 1:
        options["tensor_parallel_mode"] = mode
        options["tensor_parallel_group"] = PlannedGroup(tp)
        options["sequence_parallel"] = True
    return Linear(inputs, outputs, **options)


# -- costs from plans -----------------------------------------------------------------


def _products(graph: OpGraph) -> dict[int, Product]:
    """The linears of a pipeline, by the index of their op."""
    products: dict[int, Product] = {}
    for index, op in enumerate(graph.ops):
        rows = math.prod(graph.main_specs[index + 1].shape[:-1])
        follows = index > 0 and isinstance(graph.ops[index - 1], (SwiGLU, ScaledSwiGLU))
        if isinstance(op, BasicLinear):
            sizes = (op.local_in_features, op.local_out_features)
            products[index] = Product(rows, *sizes, reads_activation=follows)
        elif isinstance(op, GroupedLinear):
            sizes = (op.in_features, op.out_features)
            products[index] = Product(rows, *sizes, op.num_groups, True, follows)
    return products


def _elementwise(graph: OpGraph, plan: FusionPlan, side: str) -> float:
    """Bytes that a pipeline moves through memory, without its products and its communication.

    A product's time is that of its operations, and includes what it reads and writes: its input
    and output, and its weight. Weights are quantized once a microbatch, and counted elsewhere.
    """
    moved = 0.0
    for step in plan.steps(side):
        if not all(isinstance(graph.ops[i], CollectiveOperation) for i in step.ops):
            moved += step.bytes_per_token * graph.tokens
    fixed = graph.tokens / plan.nominal_tokens  # a plan divides bytes of parameters by this number
    for i, op in enumerate(graph.ops):
        if isinstance(op, (BasicLinear, GroupedLinear)):
            of_tokens, of_weights = graph.window_bytes(i, i + 1, side)
            moved -= of_tokens + of_weights * fixed
            for _, _, of_weights in graph.quantize_kernels(i, i + 1, side):
                moved -= of_weights * fixed
    return moved


def _grouped_quantization(recipe: Recipe, products: Sequence[Product]) -> dict[str, float]:
    """Bytes by which experts' operands are quantized, which a plan of them does not count.

    The values are read and both copies written; tensors that the activation computes are written
    as copies only, in place of values.
    """
    both = ("rowwise", "columnwise")
    seconds = dict.fromkeys(SIDES, 0.0)
    for product in products:
        if not product.is_expert:
            continue
        for side, role in zip(SIDES, ("input", "grad_output"), strict=True):
            shape = product.shape(role)
            values = math.prod(shape) * VALUE
            is_computed = product.reads_activation == (role == "input")
            copies = bytes_of(recipe, role, shape, both)
            seconds[side] += copies - values if is_computed else copies + values
    return seconds


def _sent(graph: OpGraph) -> list[Sent]:
    """The communication of a pipeline's tensor parallel linears."""
    tensors = []
    for side in SIDES:
        for i in range(len(graph.ops)):
            for collective, nbytes in graph.collectives(i, i + 1, side, {}):
                is_after = collective.tensor in ("output", "grad_output")
                spec = graph.main_specs[i + is_after]
                values = replace(collective, quantization=None).nbytes(spec)
                tensors.append(Sent(side, collective, nbytes, values))
    return tensors
