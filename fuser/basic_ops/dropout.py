"""Dropout: zero elements at random during training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fuser.errors import InputError
from fuser.op import BasicOperation, Grads, OperationContext, cast, emit, emit_grad
from fuser.plan_key import PlanKey, TensorSpec


class Dropout(BasicOperation):
    """Zero each element with probability ``p`` and scale the rest by ``1 / (1 - p)``.

    The identity in evaluation mode.

    Raises
    ------
    InputError
        If ``p`` is not in [0, 1].
    """

    saves_input = False
    emits_quantized = ("forward", "backward")

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise InputError(f"Dropout got p={p}; a probability is between 0 and 1.")
        self.dropout_probability = p

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return TensorSpec(spec.shape, autocast or spec.dtype)

    def saved_bytes(self, spec: TensorSpec) -> int:
        return math.prod(spec.shape)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ("dropout",) if side == "forward" else ("dropout_backward",)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> torch.Tensor:
        x = cast(input_, ctx.autocast_dtype or input_.dtype)
        if not self.training or self.dropout_probability == 0:
            ctx.save_for_backward(None)
            return emit(x, next_op_input_quantizer)
        y, mask = torch.native_dropout(x, self.dropout_probability, True)
        ctx.save_for_backward(mask)
        return emit(y, next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        (mask,) = ctx.saved_tensors
        if mask is None:
            return emit_grad(grad_output, ctx), ()
        keep = 1 - self.dropout_probability
        scale = 1 / keep if keep else 0.0
        dx = torch.ops.aten.native_dropout_backward(grad_output, mask, scale)
        return emit_grad(dx, ctx), ()
