"""BackwardLinearScale: dx = scale * dy @ weight; dw = scale * dy.T @ x."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fuser.basic_ops import BasicLinear, ConstantScale
from fuser.basic_ops.linear_epilogues import grad_scale_refusal
from fuser.cuda import cublaslt
from fuser.op import FusedOperation, Grads, OperationContext
from fuser.specs import PlanKey


class BackwardLinearScale(FusedOperation):
    """``dx = scale * dy @ weight; dw = scale * dy.T @ x``: the scale is the GEMMs' ``alpha``.

    ``dy`` is quantized without it. Where torch makes the quantized GEMMs, which have no ``alpha``,
    it multiplies the scales of ``dy``.
    """

    window = (BasicLinear, ConstantScale)
    side = "backward"
    communicates = True

    @classmethod
    def refuses(cls, linear: BasicLinear, scale: ConstantScale, *, key: PlanKey) -> str | None:
        return grad_scale_refusal(linear, key)

    @classmethod
    def kernels(
        cls, linear: BasicLinear, scale: ConstantScale, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        names = linear.kernels(side, key.window(0, 1))
        gemms = [(name, 2 * (i + 1 == len(names))) for i, name in enumerate(names)]
        is_quantized = key.recipe is not None and key.recipe.quantizes_backward
        if is_quantized and cublaslt.library(key.device) is None:
            return tuple(step for gemm in gemms for step in (("mul scale_inv", 0), gemm))
        return tuple(gemms)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        linear_ctx, scale_ctx = basic_op_ctxs
        scale = scale_ctx.scale
        grad_input, param_grads = self.members[0].op_backward(linear_ctx, grad_output, scale)
        return grad_input, [param_grads, ()], [(), ()]
