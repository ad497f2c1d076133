"""Products of a grouped linear whose operands are quantized.

If the recipe's format has a quantizer of groups, the operands of all groups are quantized in one
launch and multiplied in one: the *padded* path, which does not read the split sizes on the host.
Otherwise each group has its own quantizers and products: the *loop*, which needs the sizes. Both
give each group the bytes of a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fuser import gemm
from fuser.basic_ops.linear_operands import original, plain, quantized, readable, saved_operand
from fuser.basic_ops.remote_rows import RemoteRows
from fuser.formats import GROUP_TILE
from fuser.functional.grouped import PaddedGroups, padded_groups, padded_rows, unpad, zero_tail
from fuser.functional.lazy import LazyTensor, materialize
from fuser.gemm import grouped, quantized_groups
from fuser.gemm.grouped import Groups
from fuser.gemm.quantized_groups import reads_columns
from fuser.op import BasicOperation, OperationContext, cast
from fuser.precision.contexts import current_recipe
from fuser.precision.quantizer_for import make_quantizer
from fuser.recipe import Recipe
from fuser.tensors import (
    Float8BlockQuantizer,
    MXFP8Quantizer,
    QuantizedTensor,
    Quantizer,
    groups_quantizer,
    quantizes_groups,
)
from fuser.tensors.gathering import note_backward_read
from fuser.tensors.grouped import can_be_joined
from fuser.tensors.stacks import is_stack

Values = torch.Tensor | LazyTensor

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
    """The quantizers of a grouped linear; None if one of them quantizes no groups in one launch.

    None too if its weights are quantized parameters of which the groups cannot be made.
    """
    recipe = current_recipe()
    assert recipe is not None
    groups = op.num_quantizers("backward")
    weights: list[Any] = list(op._parameters.values())[: op.main_grad_count]
    first = weights[0]
    has_groups = is_stack if first.dim() == 3 else can_be_joined
    if isinstance(first, QuantizedTensor) and not has_groups(weights):
        return None

    def of(mode: str) -> list[list[Quantizer]]:
        """The quantizers of each role."""
        roles = op.num_quantizers(mode) // groups
        constants = [op.constant_quantizer(recipe, mode, role) for role in range(roles)]
        if None not in constants:
            return [[constant] for constant in constants if constant is not None]
        if not recipe.delayed():
            return [[]] * roles
        values = [value for value in op.quantizer_values(mode) if value is not None]
        return [values[role::roles] for role in range(roles)]

    has_gradient = ctx.requires_grad and ctx.backward_override is None
    found = GroupsQuantizers(*of("forward"), *(of("backward") if has_gradient else [[]]))
    needed = found if has_gradient else found[:2]
    return found if all(quantizes_groups(each, groups) for each in needed) else None


class Exact:
    """Products in the compute dtype. Operands that were quantized are dequantized.

    Rows are those of the groups, or of the padded groups if these are given. Methods that make
    operands take the quantizers of the linear; here these are not used.
    """

    def __init__(self, groups: Groups) -> None:
        self.padded = groups.padded
        self.rows = groups if self.padded is None else Groups(self.padded.padded_ends, None)

    def input(
        self, x: Values, quantizers: Any, *, is_kept: bool, is_padded: bool = False
    ) -> torch.Tensor:
        """An input as the operand of the forward, and of the weight gradient if ``is_kept``.

        ``is_padded``: its rows are those of padded groups already.
        """
        if self.padded is None or is_padded:
            return materialize(x)
        return materialize(padded_rows(x, self.padded))

    def weight(self, weight: torch.Tensor, quantizers: Any, *, is_kept: bool) -> torch.Tensor:
        """The weights ``[G, N, K]`` as the operand of the forward, and of dgrad if ``is_kept``."""
        return weight

    def gradient(
        self, dy: Values, quantizers: Any, *, dgrad: bool, wgrad: bool, is_padded: bool = False
    ) -> torch.Tensor:
        """A gradient as an operand of the products that are wanted."""
        return self.input(dy, quantizers, is_kept=wgrad, is_padded=is_padded)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, size: int, *, is_padded: bool = False
    ) -> torch.Tensor:
        """``x_g @ weight_g.T``; ``size`` is N. ``is_padded``: padded rows remain padded."""
        y = grouped.forward(x, weight, self.rows)
        return y if is_padded or self.padded is None else unpad(y, self.padded)

    def dgrad(
        self, dy: torch.Tensor, weight: torch.Tensor, *, is_padded: bool = False
    ) -> torch.Tensor:
        """``dy_g @ weight_g``; ``is_padded`` as in :meth:`forward`."""
        if isinstance(weight, QuantizedTensor):
            shape = (len(self.rows.ends), -1, weight.shape[-1])
            weight = weight.dequantize(dtype=dy.dtype).view(shape)[:, : dy.shape[1]]
        dx = grouped.dgrad(dy, weight, self.rows)
        return dx if is_padded or self.padded is None else unpad(dx, self.padded)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, *, is_padded: bool = False) -> torch.Tensor:
        """``dy_g.T @ x_g``; ``is_padded`` as in :meth:`input`."""
        if isinstance(x, QuantizedTensor):
            x, is_padded = x.dequantize(dtype=dy.dtype), True
        x = self.input(x, None, is_kept=True, is_padded=is_padded)
        return grouped.wgrad(dy, x, self.rows)


class Quantized(Exact):
    """Products of quantized operands, whose rows are those of padded groups."""

    padded: PaddedGroups

    def __init__(self, groups: Groups, dtype: torch.dtype, is_split: tuple[bool, ...]) -> None:
        assert groups.padded is not None
        super().__init__(groups)
        self.dtype, self.is_split = dtype, is_split

    def input(
        self, x: Values, quantizers: Any, *, is_kept: bool, is_padded: bool = False
    ) -> torch.Tensor:
        has_columns = is_kept and needs_columns(quantizers, "input", x.device)
        return self._rows(x, quantizers.input, True, has_columns, is_padded)

    def kept_input(self, x: Values, quantizers: Any) -> torch.Tensor:
        """An input of padded rows as the operand of the weight gradient alone."""
        has_columns = needs_columns(quantizers, "input", x.device)
        return self._rows(x, quantizers.input, not has_columns, has_columns, True)

    def weight(self, weight: torch.Tensor, quantizers: Any, *, is_kept: bool) -> torch.Tensor:
        count, n, k = weight.shape
        rows, first = weight.reshape(count * n, k), quantizers.weight[0]
        usages = {
            "rowwise": True,
            "columnwise": is_kept and needs_columns(quantizers, "weight", weight.device),
        }
        if isinstance(first, (Float8BlockQuantizer, MXFP8Quantizer)) and n % GROUP_TILE == 0:
            made: torch.Tensor = first.with_usage(**usages)(rows)  # no padding, no scales of groups
            return made
        groups = padded_groups(n, count, count * n, weight.device)
        quantizer = groups_quantizer(quantizers.weight, groups, **usages)
        return quantizer(padded_rows(rows, groups))

    def gradient(
        self, dy: Values, quantizers: Any, *, dgrad: bool, wgrad: bool, is_padded: bool = False
    ) -> torch.Tensor:
        has_columns = wgrad and needs_columns(quantizers, "grad_output", dy.device)
        rowwise = dgrad or not has_columns
        return self._rows(dy, quantizers.grad_output, rowwise, has_columns, is_padded)

    def _rows(
        self,
        x: Values,
        quantizers: list[Quantizer],
        rowwise: bool,
        columnwise: bool,
        is_padded: bool,
    ) -> torch.Tensor:
        groups = self.padded
        if isinstance(x, RemoteRows):
            made = x.quantized(quantizers, groups, rowwise=rowwise, columnwise=columnwise)
            if made is not None:
                return made
            x = x.gathered()
        quantizer = groups_quantizer(quantizers, groups, rowwise=rowwise, columnwise=columnwise)
        return quantizer(padded_rows(x, groups, is_padded=is_padded))

    def forward(self, x: Any, weight: Any, size: int, *, is_padded: bool = False) -> torch.Tensor:
        how: Any = {"is_split": self.is_split[0], "is_padded": is_padded}
        return quantized_groups.quantized_forward(x, weight, self.padded, size, self.dtype, **how)

    def dgrad(self, dy: Any, weight: Any, *, is_padded: bool = False) -> torch.Tensor:
        how: Any = {"is_split": self.is_split[1], "is_padded": is_padded}
        dx = quantized_groups.quantized_dgrad(dy, weight, self.padded, self.dtype, **how)
        if dy._has("columnwise"):
            dy.release("rowwise")  # nothing reads it again
        return dx

    def wgrad(self, dy: Any, x: Any, *, is_padded: bool = False) -> torch.Tensor:
        is_split = self.is_split[2]
        return quantized_groups.quantized_wgrad(dy, x, self.padded, self.dtype, is_split=is_split)


def rows_of_groups(x: Any, dtype: torch.dtype) -> Any:
    """The input of a grouped linear as ``[T, K]`` in ``dtype``; a lazy one, of that form, as it is.

    A kernel that quantizes takes lazy rows; :class:`Exact` products and the loop write them.
    """
    if isinstance(x, LazyTensor):
        return x
    return cast(plain(x, dtype), dtype).reshape(-1, x.shape[-1])


def needs_columns(quantizers: GroupsQuantizers, role: str, device: torch.device) -> bool:
    """Whether backward reads a columnwise copy of the tensor of a role."""
    other = quantizers.input if role == "grad_output" else quantizers.grad_output
    return reads_columns(getattr(quantizers, role)[0], other[0], device)


def products_of_forward(
    ctx: OperationContext, groups: Groups, quantizers: Any, dtype: torch.dtype
) -> Exact:
    """The products of a forward; exact if ``quantizers`` is None."""
    return Exact(groups) if quantizers is None else Quantized(groups, dtype, ctx.split_accumulators)


def products_of_backward(ctx: OperationContext, groups: Groups, dtype: torch.dtype) -> Exact:
    """The products of a backward; quantized if the forward was, and nothing overrides it."""
    if groups.padded is None or ctx.backward_override is not None:
        return Exact(groups)
    return Quantized(groups, dtype, ctx.split_accumulators)


def kept(
    ctx: OperationContext,
    values: torch.Tensor,
    operand: torch.Tensor,
    is_wanted: bool,
    *,
    is_own: bool = True,
) -> torch.Tensor | None:
    """The tensor to save for backward: of an input or of weights, from which ``operand`` was made.

    This is the operand; the values, if the override is high precision; None if not wanted. An
    operand with a columnwise copy loses its rowwise copy. If it is not this call's own operand, the
    result is an alias of its columnwise copy instead.
    """
    if not is_wanted:
        return None
    if ctx.backward_override == "high_precision":
        return values
    if isinstance(operand, QuantizedTensor) and operand._has("columnwise"):
        if not is_own:
            return operand.with_usage("columnwise")
        operand.release("rowwise")
    return operand


# -- loop ------------------------------------------------------------------------------


def loop_forward(
    op: BasicOperation,
    ctx: OperationContext,
    x: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    made_weights: Sequence[QuantizedTensor],
    groups: Groups,
    y: torch.Tensor,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The output ``y``, and the operands of each group that backward reads: inputs, then weights.

    ``made_weights``: the weight of each group, quantized. ``wanted``: whether backward
    computes the gradients of the weights and of the input, which read the operands.
    """
    dtype, override = x.dtype, ctx.backward_override
    is_quantized = override is None
    usage = "rowwise" if override == "dequantized" else "columnwise"
    kept: tuple[list[Any], list[Any]] = ([], [])
    quantizers = op.quantizer_values("forward")
    has_gradient = ctx.requires_grad and is_quantized
    gradients = op.quantizer_values("backward") if has_gradient else []
    for g, rows in enumerate(groups.slices()):
        if not wanted[1] or rows.start == rows.stop or override == "high_precision":
            is_read = wanted[1] and rows.start < rows.stop
            note_backward_read(made_weights[g], "rowwise" if is_read else None)
        if rows.start == rows.stop:
            kept[0].append(None)
            kept[1].append(None)
            continue
        made = []
        for place, tensor in enumerate((x[rows], weights[g])):
            quantizer = quantizers[2 * g + place]
            assert quantizer is not None
            is_wanted = wanted[place]
            value = quantizer.with_usage(rowwise=True, columnwise=is_wanted and is_quantized)
            q = made_weights[g] if place else quantized(tensor, dtype, value)
            if override == "high_precision":
                kept[place].append(original(tensor, dtype) if is_wanted else None)
            else:
                kept[place].append(saved_operand(q, usage, value) if is_wanted else None)
            made.append(readable(q, "rowwise", value))
        is_split = ctx.split_accumulators[0]
        y[rows] = gemm.quantized_linear(made[0], made[1], dtype, is_split=is_split)
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
    """dx, and a function that computes the gradients of the weights ``[G, N, K]``.

    Either is None if it is not wanted. ``shape`` is that of the weights, ``wanted`` as in the
    forward.
    """
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
