"""Quantize: where a pipeline's values, or their gradients, become quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.op import BasicOperation, Grads, OperationContext
from fuser.plan_key import PlanKey, TensorSpec
from fuser.tensors import QuantizedTensor, Quantizer


class Quantize(BasicOperation):
    """Quantize the main line under a recipe; the identity outside one.

    Parameters
    ----------
    forward, backward
        Whether to quantize the values, and their gradients. Gradients stay as
        they are under a ``backward_override``.
    """

    saves_input = False

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward = forward
        self._quantize_backward = backward

    def extra_repr(self) -> str:
        return f"forward={self._quantize_forward}, backward={self._quantize_backward}"

    def quantizer_roles(self, mode: str) -> tuple[str, ...]:
        if mode == "forward":
            return ("input",) if self._quantize_forward else ()
        return ("grad_output",) if self._quantize_backward else ()

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return spec

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        if key.recipe is None or not self.quantizer_roles(side):
            return ()
        if side == "backward" and key.recipe.backward_override is not None:
            return ()
        return ("quantize",)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> torch.Tensor:
        if not ctx.is_quantized:
            return input_
        if self._quantize_backward and ctx.backward_override is None:
            ctx.grad_output_quantizer = self.get_quantizer("backward", 0)  # type: ignore[attr-defined]
        if not self._quantize_forward or isinstance(input_, QuantizedTensor):
            return input_
        quantizer = self.get_quantizer("forward", 0)
        assert quantizer is not None
        return quantizer(input_)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        quantizer: Quantizer | None = getattr(ctx, "grad_output_quantizer", None)
        if quantizer is None or isinstance(grad_output, QuantizedTensor):
            return grad_output, ()
        return quantizer(grad_output), ()
