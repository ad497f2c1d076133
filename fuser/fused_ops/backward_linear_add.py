"""BackwardLinearAdd: dx = dy @ weight + d_extra."""

from __future__ import annotations

import torch

from fuser.basic_ops import BasicLinear, MakeExtraOutput
from fuser.basic_ops.linear_epilogues import added_gemm, addend_refusal
from fuser.op import (
    Contexts,
    FusedOperation,
    StepGrads,
    Tensors,
    write_grad_input,
)
from fuser.specs import PlanKey


class BackwardLinearAdd(FusedOperation):
    """``dx = dy @ weight + d_extra``: one GEMM with ``beta = 1``."""

    window = (MakeExtraOutput, BasicLinear)
    member_names = ("backward_add", "linear")
    side = "backward"
    communicates = True

    @classmethod
    def refuses(cls, make: MakeExtraOutput, linear: BasicLinear, *, key: PlanKey) -> str | None:
        compute = key.autocast_dtype or linear.weight.dtype
        incoming = key.ops[0].input_dtype
        if compute != incoming:
            return f"the GEMM runs in {compute} and the extra output is {incoming}."
        return addend_refusal(linear, "backward", key.window(1, 2))

    @classmethod
    def kernels(
        cls, make: MakeExtraOutput, linear: BasicLinear, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        own = key.window(1, 2)
        wgrad = [(name, 0) for name in linear.kernels(side, own) if name.startswith("wgrad")]
        return (*wgrad, (added_gemm(linear, side, own), 2))

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        linear, (ctx, linear_ctx), (grad_extra,) = self.members[1], ctxs, grad_extras
        grad_input, param_grads = linear.op_backward(linear_ctx, dy, addend=grad_extra)
        return write_grad_input(grad_input, ctx), param_grads, ()
