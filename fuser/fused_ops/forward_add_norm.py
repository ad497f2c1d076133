"""ForwardAddRMSNorm and ForwardAddLayerNorm: z = x + extra; y = norm(z)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser.basic_ops import AddExtraInput, LayerNorm, MakeExtraOutput, RMSNorm
from fuser.op import FusedOperation, OperationContext, emit
from fuser.plan_key import PlanKey
from fuser.window import Optional


class _ForwardAddNorm(FusedOperation):
    """``z = x + extra; y = norm(z)``, with z as an extra output where one is made of it."""

    side = "forward"

    @classmethod
    def kernels(
        cls, add: Any, make: MakeExtraOutput | None, norm: Any, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        return (("add", 1), (type(norm).__name__.lower(), len(key.ops) - 1))

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        add = self.members[0]
        norm = self.members[-1]
        (extra,) = basic_op_extra_inputs[0]
        add.check_extra(input_.shape, extra.shape)
        z = input_ + extra
        y = emit(norm.normalize(basic_op_ctxs[-1], z), next_op_input_quantizer)
        return y, ((), ()) if len(self.members) == 2 else ((), (z,), ())


class ForwardAddRMSNorm(_ForwardAddNorm):
    """``z = x + extra; y = rmsnorm(z)``; z is also exposed where a MakeExtraOutput stands."""

    window = (AddExtraInput, Optional(MakeExtraOutput), RMSNorm)


class ForwardAddLayerNorm(_ForwardAddNorm):
    """``z = x + extra; y = layernorm(z)``; z is also exposed where a MakeExtraOutput stands."""

    window = (AddExtraInput, Optional(MakeExtraOutput), LayerNorm)
