"""BackwardAddRMSNorm and BackwardAddLayerNorm: dx = norm_backward(dy) + d_extra."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser.basic_ops import LayerNorm, MakeExtraOutput, RMSNorm
from fuser.op import FusedOperation, Grads, OperationContext, write_grad_input
from fuser.specs import PlanKey


class _BackwardAddNorm(FusedOperation):
    """``dx = norm_backward(dy) + d_extra``, added in fp32 and rounded once.

    Unfused, the ops round the norm's gradient first, and the sum has 1.4 times this error.
    """

    side = "backward"

    @classmethod
    def kernels(
        cls, make: MakeExtraOutput, norm: Any, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        name = f"{type(norm).__name__.lower()}_backward"
        if not norm.runs_in_kernel(key.window(1, 2)):
            return ((name, 1), ("add_", 1))
        if key.ops[0].grad_input is None or not cls.fuses_quantize(make, norm, side=side, key=key):
            return ((f"{name}_add", 2),)
        return ((f"{name}_rows", 0), (f"{name}_add", 2))

    @classmethod
    def fuses_quantize(cls, make: MakeExtraOutput, norm: Any, *, side: str, key: PlanKey) -> bool:
        emits: bool = norm.fuses_quantize(side, key.window(1, 2))
        return emits

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        norm = self.members[1]
        (grad_extra,) = basic_op_grad_extra_outputs[0]
        dx, param_grads = norm.input_grad_and_param_grads(basic_op_ctxs[1], grad_output, grad_extra)
        return write_grad_input(dx, basic_op_ctxs[0]), [(), param_grads], [(), ()]


class BackwardAddRMSNorm(_BackwardAddNorm):
    """``dx = rmsnorm_backward(dy) + d_extra``."""

    window = (MakeExtraOutput, RMSNorm)


class BackwardAddLayerNorm(_BackwardAddNorm):
    """``dx = layernorm_backward(dy) + d_extra``."""

    window = (MakeExtraOutput, LayerNorm)
