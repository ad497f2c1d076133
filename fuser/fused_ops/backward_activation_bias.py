"""BackwardActivationBias: dx = dy f'(x); db = sum(dx)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fuser.basic_ops import Activation, Bias
from fuser.op import FusedOperation, Grads, OperationContext
from fuser.plan_key import PlanKey


class BackwardActivationBias(FusedOperation):
    """``dx = dy f'(x); db = sum(dx)`` over rows, for every activation and GLU."""

    window = (Bias, Activation)
    side = "backward"

    @classmethod
    def refuses(cls, bias: Bias, activation: Activation, *, key: PlanKey) -> str | None:
        if not key.ops[0].params[0].requires_grad:
            return "the bias needs no gradient, so there is nothing to sum."
        return None

    @classmethod
    def kernels(
        cls, bias: Bias, activation: Activation, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        return ((f"{activation.functor.name}_backward", 1), ("sum", 1))

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        bias, activation = self.members
        dx = activation.input_grad(basic_op_ctxs[1], grad_output)
        dx, bias_grads = bias.op_backward(basic_op_ctxs[0], dx)
        return dx, (bias_grads, ()), ((), ())
