"""Products of a grouped linear whose groups are quantized and multiplied one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fuser import gemm
from fuser.basic_ops.grouped_parameters import are_quantized, note_reads
from fuser.basic_ops.grouped_products import (
    Gradients,
    GroupedLinearSaved,
    QuantizedProduct,
    Saved,
    SeparateWeights,
    Usages,
    Weights,
)
from fuser.basic_ops.linear_operands import original, plain, quantized, readable, saved_operand
from fuser.functional.grouped import zero_tail
from fuser.functional.lazy import materialize
from fuser.op import Values
from fuser.tensors import QuantizedTensor, Quantizer
from fuser.tensors.gathering import gather_noted_reads
from fuser.tensors.stacks import matrices


class GroupOperands(NamedTuple):
    """Rows of all groups, and each group of them quantized; None for one without rows."""

    values: torch.Tensor
    groups: list[QuantizedTensor | None]


@dataclass(frozen=True)
class LoopedProduct(QuantizedProduct):
    """The product of each group alone, with quantizers of its own; the split sizes are read."""

    @property
    def _usage(self) -> str:
        """The copy of operands that backward reads, unless it reads their values."""
        return "columnwise" if self.ctx.backward_override is None else "rowwise"

    def _with_rows(self, operand: GroupOperands) -> Iterator[tuple[int, slice, Any]]:
        """The groups that have rows: number, rows, and operand."""
        rows_of_groups = self.groups.slices()
        for g, (rows, of_group) in enumerate(zip(rows_of_groups, operand.groups, strict=True)):
            if rows.start < rows.stop:
                yield g, rows, of_group

    def _quantized(
        self, x: Any, role: str, usages: Usages, is_padded: bool
    ) -> tuple[GroupOperands, None]:
        operand = GroupOperands(x, [None] * self.linear.num_groups)
        quantizers = self._each(role, usages)
        for g, rows, _ in self._with_rows(operand):
            operand.groups[g] = quantized(x[rows], self.dtype, quantizers[g])
        return operand, None

    def _each(self, role: str, usages: Usages) -> list[Quantizer]:
        """The quantizer of each group, with these copies."""
        copies = {"rowwise": usages[0], "columnwise": usages[1]}
        return [quantizer.with_usage(**copies) for quantizer in getattr(self.quantizers, role)]

    def _reads_columns(self, role: str, device: torch.device) -> bool:
        return True

    # -- forward -----------------------------------------------------------------------

    def forward(self, x: Values, *args: Any, **kwargs: Any) -> torch.Tensor:
        # It keeps its operands, whatever the plan, which did not foresee this loop.
        self.ctx.keeps_weight = True
        return super().forward(materialize(x), *args, **{**kwargs, "keeps_input": True})

    def _weights(self) -> Weights:
        return self.linear.read_weights(self.ctx, self.dtype)

    def _weight_operand(self, weights: Weights, *args: Any, **kwargs: Any) -> Any:
        if are_quantized(weights) and weights[0].dim() == 3:
            weights = matrices(weights[0])  # not quantized if rows cut blocks
        return super()._weight_operand(weights, *args, **kwargs)

    def _parameters_as_operand(self, weights: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
        return list(self.linear.bound(weights))

    def _quantized_weight(
        self, weight: Weights, usages: Usages, scaling: torch.Tensor | None = None
    ) -> list[QuantizedTensor]:
        pairs = zip(weight, self._each("weight", usages), strict=True)
        return [quantized(one, self.dtype, quantizer) for one, quantizer in pairs]

    def _multiplied(self, x: GroupOperands, weight: list[QuantizedTensor]) -> torch.Tensor:
        y = x.values.new_empty(len(x.values), self.linear.out_features)
        is_split = self.ctx.split_accumulators[0]
        for g, rows, operand in self._with_rows(x):
            rowwise = readable(operand, "rowwise", self.quantizers.input[g])
            of_weight = readable(weight[g], "rowwise", self.quantizers.weight[g])
            y[rows] = gemm.quantized_linear(rowwise, of_weight, self.dtype, is_split=is_split)
        return zero_tail(self.groups.ends, y)

    def _saved_input(self, x: Any, operand: GroupOperands) -> Saved:
        saved: list[torch.Tensor | None] = [None] * self.linear.num_groups
        for g, rows, of_group in self._with_rows(operand):
            saved[g] = self._saved_operand(x[rows], of_group, self.quantizers.input[g])
        return tuple(saved)

    def _saved_weight(
        self, weights: Weights, operand: list[QuantizedTensor], is_own: bool
    ) -> tuple[Saved, SeparateWeights | None]:
        saved: list[torch.Tensor | None] = [None] * self.linear.num_groups
        separate, is_read = None, self.wants_dgrad
        if are_quantized(weights) and weights[0].dim() == 3:
            # Its matrices are taken in backward: fully_shard gathers the copy that is read before.
            note_reads(weights, self._usage, is_read=is_read)
            is_values = self.ctx.backward_override == "high_precision"
            separate = SeparateWeights(None if is_values else self._usage, weights)
            separate, is_read = separate if is_read else None, False
        # Also of a group without rows, which may have some on other ranks: all gather one copy.
        note_reads(operand, self._usage, is_read=is_read)
        for g, rows in enumerate(self.groups.slices() if is_read else ()):
            if rows.start < rows.stop:
                saved[g] = self._saved_operand(weights[g], operand[g], self.quantizers.weight[g])
        return tuple(saved), separate

    def _saved_operand(
        self, values: torch.Tensor, operand: QuantizedTensor, quantizer: Quantizer
    ) -> torch.Tensor:
        if self.ctx.backward_override == "high_precision":
            return original(values, self.dtype)
        is_made = not operand._has("columnwise") and operand.derives_columnwise
        if operand is values and is_made and self.ctx.backward_override is None:
            return operand.with_usage("rowwise")  # backward makes the other copy, and frees it
        return saved_operand(operand, self._usage, quantizer)

    # -- backward ----------------------------------------------------------------------

    def backward(
        self, held: list[Values], leading: torch.Size, **options: Any
    ) -> tuple[torch.Tensor | None, Gradients, Gradients]:
        gather_noted_reads(self.linear._parts("weight"))
        self.ctx.rebuilt_input = None  # nothing was computed of it yet
        return super().backward(held, leading, **options)

    def _gradient(self, dy: Any) -> Any:
        if self.is_exact:
            return GroupOperands(dy, [None] * self.linear.num_groups)
        return super()._gradient(dy)

    def _dgrad(self, dy: GroupOperands, weight: Sequence[Any], *_: object) -> torch.Tensor:
        dx = dy.values.new_empty(len(dy.values), self.linear.in_features)
        is_split = self.ctx.split_accumulators[1]
        for g, rows, gradient in self._with_rows(dy):
            if gradient is None:
                dx[rows] = gemm.dgrad(dy.values[rows], plain(weight[g], self.dtype))
            else:
                rowwise = readable(gradient, "rowwise", self.quantizers.grad_output[g])
                dx[rows] = gemm.quantized_dgrad(rowwise, weight[g], self.dtype, is_split=is_split)
        return zero_tail(self.groups.ends, dx)

    def _weight_of_backward(self, saved: GroupedLinearSaved) -> Sequence[Any]:
        """The weight of each group; those of a stack with the copy that is read."""
        separate: SeparateWeights | None = self.ctx.state.separate
        if separate is None:
            return saved.weight
        usage, (stack,) = separate
        weights = matrices(stack, usage)
        if usage is None:
            return weights
        quantizers = self._each("weight", (usage == "rowwise", usage == "columnwise"))
        return [
            readable(w, usage, q) if isinstance(w, QuantizedTensor) else q(w)
            for w, q in zip(weights, quantizers, strict=True)
        ]

    def _wgrad(self, dy: GroupOperands, x: Saved, *_: object) -> torch.Tensor:
        linear, is_split = self.linear, self.ctx.split_accumulators[2]
        size = (linear.num_groups, linear.out_features, linear.in_features)
        products = dy.values.new_zeros(size)
        for g, rows, gradient in self._with_rows(dy):
            if gradient is None:
                product = gemm.wgrad(dy.values[rows], plain(x[g], self.dtype))
            else:
                columns = readable(gradient, "columnwise", self.quantizers.grad_output[g])
                product = gemm.quantized_wgrad(columns, x[g], self.dtype, is_split=is_split)
            products[g].copy_(product)
        return products
