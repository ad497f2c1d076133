"""BackwardActivationBias: dx = dy f'(x); db = sum(dx)."""

from __future__ import annotations

import torch

from fuser.basic_ops import Activation, Bias
from fuser.basic_ops.activation import ActivationState
from fuser.basic_ops.bias import STAGES
from fuser.functional import pointwise
from fuser.op import (
    Contexts,
    FusedOperation,
    StepGrads,
    Tensors,
    quantizes_values,
    write_grad_input,
)
from fuser.specs import PlanKey


class BackwardActivationBias(FusedOperation):
    """``dx = dy f'(x); db = sum(dx)`` over rows, for every activation and GLU."""

    window = (Bias, Activation)
    member_names = ("bias", "activation")
    side = "backward"
    stores_rebuilt_output = True

    @classmethod
    def refuses(cls, bias: Bias, activation: Activation, *, key: PlanKey) -> str | None:
        if not key.ops[0].params[0].requires_grad:
            return "the bias needs no gradient, so there is nothing to sum."
        return None

    @classmethod
    def kernels(
        cls, bias: Bias, activation: Activation, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        name = f"{activation.function.name}_backward"
        if key.no_kernels is None:
            return ((f"{name}_bias", 2),)
        return ((name, 1), ("sum", 1))

    @classmethod
    def fuses_quantize(cls, bias: Bias, activation: Activation, *, side: str, key: PlanKey) -> bool:
        return quantizes_values(side, key)

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        _, activation = self.members
        bias_ctx, ctx = ctxs
        x = activation.saved_input(ctx)
        state: ActivationState = ctx.state
        dx, (dbias, _) = pointwise.chain_backward(
            *((*STAGES, state.function), dy, x, (None, None), (True, False)),
            saved=1,
            is_plain=not ctx.has_recipe,
            output=ctx.rebuilt_output,
        )
        return write_grad_input(dx, bias_ctx), (dbias,), ()
