"""BackwardLinearAdd: dx = dy @ weight + d_extra."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fuser.basic_ops import BasicLinear, MakeExtraOutput
from fuser.basic_ops.linear_epilogues import added_gemm, addend_refusal
from fuser.op import FusedOperation, Grads, OperationContext, write_grad_input
from fuser.specs import PlanKey


class BackwardLinearAdd(FusedOperation):
    """``dx = dy @ weight + d_extra``: one GEMM with ``beta = 1``."""

    window = (MakeExtraOutput, BasicLinear)
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

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        linear = self.members[1]
        ctx = basic_op_ctxs[1]
        (grad_extra,) = basic_op_grad_extra_outputs[0]
        grad_input, param_grads = linear.op_backward(ctx, grad_output, addend=grad_extra)
        return write_grad_input(grad_input, basic_op_ctxs[0]), [(), param_grads], [(), ()]
