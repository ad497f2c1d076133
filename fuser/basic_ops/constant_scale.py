"""ConstantScale: y = scale * x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fuser.chain import Stage
from fuser.functional import pointwise
from fuser.op import (
    BasicOperation,
    Grads,
    OperationContext,
    quantizes_values,
    write_grad_input,
    write_output,
)
from fuser.specs import PlanKey, TensorSpec
from fuser.tensors import Quantizer


class ConstantScaleState(NamedTuple):
    """The scale, as the forward found it."""

    scale: float


class ConstantScale(BasicOperation):
    """Multiply by a constant: ``y = scale * x``."""

    parameter_names = ()
    takes_scalars = True
    saves_input = False
    can_quantize_output = ("forward", "backward")
    backward_attributes = ConstantScaleState

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

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return quantizes_values(side, key)

    def stage(
        self,
        ctx: OperationContext,
        shape: tuple[int, ...],
        device: torch.device,
        extras: tuple[torch.Tensor, ...],
    ) -> tuple[Stage, torch.Tensor | None]:
        """As in ``Activation``."""
        return Stage("constant_scale", (self.scale,)), None

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        return write_output(pointwise.constant_scale(input_, self.scale), next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        state: ConstantScaleState = ctx.state
        return write_grad_input(pointwise.constant_scale(grad_output, state.scale), ctx), ()
