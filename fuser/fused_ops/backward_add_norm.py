"""BackwardAddRMSNorm and BackwardAddLayerNorm: dx = norm_backward(dy) + d_extra."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser.basic_ops import LayerNorm, MakeExtraOutput, RMSNorm
from fuser.op import FusedOperation, Grads, OperationContext, emit_grad
from fuser.plan_key import PlanKey


class _BackwardAddNorm(FusedOperation):
    """``dx = norm_backward(dy) + d_extra``."""

    side = "backward"

    @classmethod
    def kernels(
        cls, make: MakeExtraOutput, norm: Any, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        return ((f"{type(norm).__name__.lower()}_backward", 1), ("add_", 1))

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        norm = self.members[1]
        (grad_extra,) = basic_op_grad_extra_outputs[0]
        grad, param_grads = norm.input_grad_and_param_grads(basic_op_ctxs[1], grad_output)
        # The norm's own gradient is a fresh tensor, so the sum may overwrite it.
        grad_input = emit_grad(grad.add_(grad_extra), basic_op_ctxs[0])
        return grad_input, [(), param_grads], [(), ()]


class BackwardAddRMSNorm(_BackwardAddNorm):
    """``dx = rmsnorm_backward(dy) + d_extra``."""

    window = (MakeExtraOutput, RMSNorm)


class BackwardAddLayerNorm(_BackwardAddNorm):
    """``dx = layernorm_backward(dy) + d_extra``."""

    window = (MakeExtraOutput, LayerNorm)
