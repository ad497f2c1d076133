"""Quantize: where a pipeline's values, or their gradients, become quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.op import BasicOperation, Grads, OperationContext
from fuser.plan_key import PlanKey, TensorSpec


class Quantize(BasicOperation):
    """Quantize the main line under a recipe; the identity outside one.

    This version has no quantized formats, so it is always the identity.

    Parameters
    ----------
    forward, backward
        Whether to quantize the values, and their gradients.
    """

    saves_input = False

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward = forward
        self._quantize_backward = backward

    def extra_repr(self) -> str:
        return f"forward={self._quantize_forward}, backward={self._quantize_backward}"

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return spec

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ()

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> torch.Tensor:
        return input_

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        return grad_output, ()
