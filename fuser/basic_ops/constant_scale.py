"""ConstantScale: y = scale * x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.op import BasicOperation, Grads, OperationContext, emit, emit_grad
from fuser.plan_key import PlanKey, TensorSpec


class ConstantScale(BasicOperation):
    """Multiply by a constant: ``y = scale * x``."""

    saves_input = False
    emits_quantized = ("forward", "backward")

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def extra_repr(self) -> str:
        return f"scale={self.scale}"

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return spec

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ("mul",)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> torch.Tensor:
        return emit(input_ * self.scale, next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        return emit_grad(grad_output * self.scale, ctx), ()
