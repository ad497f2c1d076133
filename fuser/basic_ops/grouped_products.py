"""Products of a grouped linear whose operands are quantized.

If the recipe's format has a quantizer of groups, the operands of all groups are quantized in one
launch and multiplied in one: the *padded* path, which does not read the split sizes on the host.
Otherwise each group has its own quantizers and products: the *loop*, which needs the sizes. Both
give each group the bytes of a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fuser import gemm
from fuser.basic_ops.linear_operands import original, plain, quantized, readable, saved_operand
from fuser.functional.grouped import PaddedGroups, padded_groups, padded_rows, unpad, zero_tail
from fuser.functional.lazy import LazyTensor
from fuser.gemm import grouped
from fuser.gemm.grouped import Groups
from fuser.op import BasicOperation, OperationContext
from fuser.precision.contexts import current_recipe
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import Recipe
from fuser.reference.grouped import TILE
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    QuantizedTensor,
    Quantizer,
    groups_quantizer,
    quantizes_groups,
)

Backward = tuple[torch.Tensor | None, Callable[[], torch.Tensor] | None]
"""dx, and a function that computes the gradients of the weights ``[G, N, K]``; None if unwanted."""

# -- padded --------------------------------------------------------------------------


class GroupsQuantizers(NamedTuple):
    """Quantizers by role, for all groups or one for each."""

    input: list[Quantizer]
    weight: list[Quantizer]
    grad_output: list[Quantizer]


def quantizes_groups_of(recipe: Recipe | None) -> bool:
    """Whether a grouped linear quantizes all groups in one launch under a recipe; for plans."""
    if recipe is None or recipe.delayed():
        return True
    if recipe.custom():
        return False
    roles = ("input", "weight", "grad_output")
    return all(quantizes_groups([make_quantizer(recipe, role)], 1) for role in roles)


def quantizers_of_groups(op: BasicOperation, ctx: OperationContext) -> GroupsQuantizers | None:
    """The quantizers of a grouped linear; None if one of them quantizes no groups in one launch."""
    recipe = current_recipe()
    assert recipe is not None
    groups = op.num_quantizers("backward")

    def of(mode: str, first: int, step: int) -> list[Quantizer]:
        constant = op.constant_quantizer(recipe, mode, first)
        if constant is not None:
            return [constant]
        if not recipe.delayed():
            return []
        found = [op.quantizer_value(mode, first + step * g) for g in range(groups)]
        return [quantizer for quantizer in found if quantizer is not None]

    has_gradient = ctx.requires_grad and ctx.backward_override is None
    found = GroupsQuantizers(
        of("forward", 0, 2), of("forward", 1, 2), of("backward", 0, 1) if has_gradient else []
    )
    needed = found if has_gradient else found[:2]
    return found if all(quantizes_groups(each, groups) for each in needed) else None


def quantized_rows(
    x: torch.Tensor | LazyTensor,
    groups: PaddedGroups,
    quantizers: list[Quantizer],
    *,
    rowwise: bool,
    columnwise: bool,
    is_padded: bool = False,
) -> QuantizedTensor:
    """The rows of padded groups, quantized; ``is_padded``: ``x`` has them at their places."""
    quantizer = groups_quantizer(quantizers, groups, rowwise=rowwise, columnwise=columnwise)
    return quantizer(padded_rows(x, groups, is_padded=is_padded))


def quantized_weight(
    weight: torch.Tensor, quantizers: list[Quantizer], *, columnwise: bool
) -> QuantizedTensor:
    """The weights ``[G, N, K]`` as padded groups of N rows."""
    count, n, k = weight.shape
    rows = weight.reshape(count * n, k)
    has_blocks = isinstance(quantizers[0], (Float8BlockQuantizer, MXFP8Quantizer))
    if has_blocks and n % TILE == 0:  # nothing to pad, and no scales of groups
        return quantizers[0].with_usage(rowwise=True, columnwise=columnwise)(rows)
    groups = padded_groups(n, count, count * n, weight.device)
    return quantized_rows(rows, groups, quantizers, rowwise=True, columnwise=columnwise)


def padded_forward(
    ctx: OperationContext,
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: Groups,
    quantizers: GroupsQuantizers,
    out: torch.Tensor | None,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The output, and what backward reads: where the padded groups are, the input, the weights.

    ``wanted``: whether the gradients of the weights and of the input are, which read them.
    """
    padded = groups.padded
    assert padded is not None
    override, size = ctx.backward_override, weight.shape[1]
    usages = [is_wanted and override is None for is_wanted in wanted]
    made = (
        quantized_rows(x, padded, quantizers.input, rowwise=True, columnwise=usages[0]),
        quantized_weight(weight, quantizers.weight, columnwise=usages[1]),
    )
    y = grouped.quantized_forward(*made, padded, size, x.dtype, is_split=ctx.split_accumulators[0])
    y = unpad(y, padded)
    kept: tuple[torch.Tensor, ...] = made
    if override == "high_precision":
        kept = (x, weight)
    elif override is None:
        for operand, is_wanted in zip(made, wanted, strict=True):
            if is_wanted:
                operand.release("rowwise")
    ctx.grad_output_quantizers = quantizers.grad_output  # type: ignore[attr-defined]
    saved = [tensor if is_wanted else None for tensor, is_wanted in zip(kept, wanted, strict=True)]
    return y if out is None else out.copy_(y), [padded.padded_ends, padded.tiles, *saved]


def padded_backward(
    ctx: OperationContext,
    dy: torch.Tensor,
    saved: list[Any],
    groups: Groups,
    out: torch.Tensor | None,
    shape: tuple[int, int, int],
    wanted: tuple[bool, bool],
) -> Backward:
    """As :func:`loop_backward`."""
    padded_ends, tiles, x, weight = saved
    padded = PaddedGroups(groups.ends, padded_ends, tiles, dy.shape[0])
    dtype, (count, n, k), (wants_wgrad, wants_dgrad) = dy.dtype, shape, wanted
    if ctx.backward_override is not None:
        if isinstance(weight, QuantizedTensor):
            weight = weight.dequantize(dtype=dtype).view(count, -1, k)[:, :n]
        dx = grouped.dgrad(dy, weight, groups, out) if wants_dgrad else None

        def exact() -> torch.Tensor:
            rows = x
            if isinstance(x, QuantizedTensor):
                rows = unpad(x.dequantize(dtype=dtype), padded)
            return grouped.wgrad(dy, rows, groups)

        return dx, exact if wants_wgrad else None
    if not (wants_wgrad or wants_dgrad):
        return None, None
    gradient = quantized_rows(
        dy, padded, ctx.grad_output_quantizers, rowwise=wants_dgrad, columnwise=wants_wgrad
    )
    dx = None
    if wants_dgrad:
        is_split = ctx.split_accumulators[1]
        dx = grouped.quantized_dgrad(gradient, weight, padded, dtype, is_split=is_split)
        dx = unpad(dx, padded)
        dx = dx if out is None else out.copy_(dx)
        if wants_wgrad:
            gradient.release("rowwise")
    if not wants_wgrad:
        return dx, None
    is_split = ctx.split_accumulators[2]
    return dx, lambda: grouped.quantized_wgrad(gradient, x, padded, dtype, is_split=is_split)


# -- loop ------------------------------------------------------------------------------


def loop_forward(
    op: BasicOperation,
    ctx: OperationContext,
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: Groups,
    out: torch.Tensor | None,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The output, and the operands of each group that backward reads: inputs, then weights.

    ``wanted``: whether the gradients of the weights and of the input are, which read them.
    """
    dtype, override = x.dtype, ctx.backward_override
    is_quantized = override is None
    usage = "rowwise" if override == "dequantized" else "columnwise"
    y = x.new_empty(x.shape[0], weight.shape[1]) if out is None else out
    kept: tuple[list[Any], list[Any]] = ([], [])
    gradients: list[Quantizer | None] = []
    for g, rows in enumerate(groups.slices()):
        weight_g = weight[g]
        operands = (x[rows], weight_g)
        quantizers = [op.quantizer_value("forward", 2 * g + place) for place in (0, 1)]
        made = []
        for tensor, quantizer, is_wanted, held in zip(
            operands, quantizers, wanted, kept, strict=True
        ):
            assert quantizer is not None
            value = quantizer.with_usage(rowwise=True, columnwise=is_wanted and is_quantized)
            if rows.start == rows.stop:
                held.append(None)
                if tensor is weight_g and isinstance(quantizer, Float8Quantizer):
                    quantizer(weight_g)  # records its amax
                continue
            q = quantized(tensor, dtype, value)
            if override == "high_precision":
                held.append(original(tensor, dtype) if is_wanted else None)
            else:
                held.append(saved_operand(q, usage, value) if is_wanted else None)
            made.append(readable(q, "rowwise", value))
        if made:
            is_split = ctx.split_accumulators[0]
            y[rows] = gemm.quantized_linear(made[0], made[1], dtype, is_split=is_split)
        if ctx.requires_grad and is_quantized:
            gradients.append(op.quantizer_value("backward", g))
    ctx.grad_output_quantizers = gradients  # type: ignore[attr-defined]
    return zero_tail(groups.ends, y), [*kept[0], *kept[1]]


def loop_backward(
    ctx: OperationContext,
    dy: torch.Tensor,
    saved: list[Any],
    groups: Groups,
    out: torch.Tensor | None,
    shape: tuple[int, int, int],
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, Callable[[], torch.Tensor] | None]:
    """As :meth:`_backward`, from the operands of each group."""
    dtype, (count, _, size), (wants_wgrad, wants_dgrad) = dy.dtype, shape, wanted
    xs, weights = saved[:count], saved[count:]
    dx = None
    if wants_dgrad:
        dx = dy.new_empty(dy.shape[0], size) if out is None else out
    operands: list[Any] = []
    for g, rows in enumerate(groups.slices()):
        if rows.start == rows.stop:
            operands.append(None)
            continue
        x, weight, gradient = xs[g], weights[g], dy[rows]
        if ctx.backward_override is not None:
            if dx is not None:
                dx[rows] = gemm.dgrad(gradient, plain(weight, dtype))
            operands.append((gradient, x))
            continue
        quantizer = ctx.grad_output_quantizers[g]
        value = quantizer.with_usage(rowwise=wants_dgrad, columnwise=wants_wgrad)
        q = quantized(gradient, dtype, value)
        if dx is not None:
            dx[rows] = gemm.quantized_dgrad(
                readable(q, "rowwise", value),
                weight,
                dtype,
                is_split=ctx.split_accumulators[1],
            )
        operands.append((readable(q, "columnwise", value), x) if wants_wgrad else None)
    if dx is not None:
        zero_tail(groups.ends, dx)
    if not wants_wgrad:
        return dx, None
    is_split = ctx.split_accumulators[2]

    def wgrads() -> torch.Tensor:
        made = dy.new_zeros(shape)
        for product, pair in zip(made, operands, strict=True):
            if pair is None:
                continue
            gradient, x = pair
            if isinstance(gradient, QuantizedTensor):
                product.copy_(gemm.quantized_wgrad(gradient, x, dtype, is_split=is_split))
            else:
                product.copy_(gemm.wgrad(gradient, plain(x, dtype)))
        return made

    return dx, wgrads
