"""BackwardLinearScale: dx = scale * dy @ weight; dw = scale * dy.T @ x."""

from __future__ import annotations

import torch

from fuser.basic_ops import BasicLinear, ConstantScale
from fuser.basic_ops.constant_scale import ConstantScaleState
from fuser.basic_ops.linear_epilogues import grad_scale_refusal, has_cublaslt
from fuser.op import Contexts, FusedOperation, StepGrads, Tensors
from fuser.specs import PlanKey


class BackwardLinearScale(FusedOperation):
    """``dx = scale * dy @ weight; dw = scale * dy.T @ x``: the scale is the GEMMs' ``alpha``.

    ``dy`` is quantized without it. Where torch makes the quantized GEMMs, which have no ``alpha``,
    it multiplies the scales of ``dy``.
    """

    window = (BasicLinear, ConstantScale)
    member_names = ("linear", "scale")
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
        if is_quantized and not has_cublaslt(key):
            return tuple(step for gemm in gemms for step in (("mul scale_inv", 0), gemm))
        return tuple(gemms)

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        linear_ctx, scale_ctx = ctxs
        state: ConstantScaleState = scale_ctx.state
        grad_input, param_grads = self.members[0].op_backward(linear_ctx, dy, state.scale)
        return grad_input, param_grads, ()
