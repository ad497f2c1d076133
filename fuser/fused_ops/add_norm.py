"""Fusions of an addition and a norm: forward, and the gradients of both in backward."""

from __future__ import annotations

import torch

from fuser.basic_ops import AddExtraInput, LayerNorm, MakeExtraOutput, RMSNorm
from fuser.basic_ops.normalization import kernel_names
from fuser.functional.lazy import materialize
from fuser.op import (
    Contexts,
    FusedOperation,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    write_grad_input,
    write_output,
)
from fuser.plan.window import Optional
from fuser.specs import PlanKey

Norm = LayerNorm | RMSNorm


def _of_last(key: PlanKey) -> PlanKey:
    """The key of a window, narrowed to its last op."""
    return key.window(len(key.ops) - 1, len(key.ops))


class _ForwardAddNorm(FusedOperation):
    """``z = x + extra; y = norm(z)``, with z as an extra output if there is a MakeExtraOutput.

    z has the dtype that torch promotes x and extra to.
    """

    side = "forward"

    @classmethod
    def refuses(
        cls, add: object, make: MakeExtraOutput | None, norm: Norm, *, key: PlanKey
    ) -> str | None:
        extra, x = key.ops[0].extra_inputs[0].dtype, key.ops[0].input_dtype
        return norm.sum_refusal(extra, x, _of_last(key))

    @classmethod
    def kernels(
        cls, add: object, make: MakeExtraOutput | None, norm: Norm, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        count, name = len(key.ops), type(norm).__name__.lower()
        if not norm.runs_in_kernel(_of_last(key)):
            return (("add", 1), (name, count - 1))
        *first, last = kernel_names(norm, f"add_{name}", side, _of_last(key))
        return (*((name, 0) for name in first), (last, count))

    @classmethod
    def fuses_quantize(
        cls, add: object, make: MakeExtraOutput | None, norm: Norm, *, side: str, key: PlanKey
    ) -> bool:
        of_norm = _of_last(key)
        return norm.runs_in_kernel(of_norm) and norm.fuses_quantize(side, of_norm)

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        add, norm, (extra,) = self.members[0], self.members[-1], inputs.extras
        add.check_extra(x.shape, extra.shape)
        exposes_sum = len(self.members) == 3
        y, z = norm.normalize(ctxs[-1], x, extra, exposes_sum)
        return write_output(y, inputs.quantizer), (z,) if exposes_sum else ()


class ForwardAddRMSNorm(_ForwardAddNorm):
    """``z = x + extra; y = rmsnorm(z)``; z is an extra output if there is a MakeExtraOutput."""

    window = (AddExtraInput, Optional(MakeExtraOutput), RMSNorm)


class ForwardAddLayerNorm(_ForwardAddNorm):
    """``z = x + extra; y = layernorm(z)``; z is an extra output if there is a MakeExtraOutput."""

    window = (AddExtraInput, Optional(MakeExtraOutput), LayerNorm)


class _BackwardAddNorm(FusedOperation):
    """``dx = norm_backward(dy) + d_extra``, added in fp32 and rounded once.

    Unfused, the ops round the norm's gradient first, and the sum has 1.4 times this error.
    If the input is an fp32 sum with a main input of 16 bits, dx is also written in 16 bits.
    """

    side = "backward"
    stores_rebuilt_output = True

    @classmethod
    def refuses(
        cls, add: AddExtraInput | None, make: MakeExtraOutput, norm: Norm, *, key: PlanKey
    ) -> str | None:
        if add is None:
            return None
        main, of_norm = key.ops[0], key.window(2, 3)
        if not main.input_requires_grad or main.input_dtype is of_norm.ops[0].input_dtype:
            return ""  # the gradient of the sum is that of its terms
        if not norm.runs_in_kernel(of_norm):
            return key.no_kernels or f"{type(norm).__name__} has no kernel for these dtypes."
        y = key.autocast_dtype or of_norm.ops[0].params[0].dtype
        if main.input_dtype is not y:
            return f"the norm rounds its gradient to {y}, and the main input is {main.input_dtype}."
        return None

    @classmethod
    def kernels(
        cls, add: AddExtraInput | None, make: object, norm: Norm, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        count = len(key.ops)
        name = f"{type(norm).__name__.lower()}_backward"
        if add is not None:
            return ((f"{name}_add_cast", count),)
        if not norm.runs_in_kernel(key.window(1, 2)):
            return ((name, 1), ("add_", 1))
        emits = cls.fuses_quantize(add, make, norm, side=side, key=key)
        if key.ops[0].grad_input is None or not emits:
            return ((f"{name}_add", 2),)
        return ((f"{name}_rows", 0), (f"{name}_add", 2))

    @classmethod
    def fuses_quantize(
        cls, add: AddExtraInput | None, make: object, norm: Norm, *, side: str, key: PlanKey
    ) -> bool:
        return add is None and norm.fuses_quantize(side, key.window(1, 2))

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        norm, ctx = self.members[-1], ctxs[0]
        (grad_extra,) = grad_extras
        if len(ctxs) == 2:
            dx, param_grads = norm.input_grad_and_param_grads(ctxs[1], dy, grad_extra)
            return write_grad_input(dx, ctx), param_grads, ()
        dtype = ctx.input_dtype
        rounded = None
        if dy.dtype is dtype:
            rounded = torch.empty(dy.shape, dtype=dtype, device=dy.device)
        dx, param_grads = norm.input_grad_and_param_grads(ctxs[2], dy, grad_extra, rounded)
        d_sum = materialize(dx)
        main = d_sum.to(dtype) if rounded is None else rounded
        return write_grad_input(main, ctx), param_grads, (d_sum,)


class BackwardAddRMSNorm(_BackwardAddNorm):
    """``dx = rmsnorm_backward(dy) + d_extra``, also in 16 bits before an AddExtraInput."""

    window = (Optional(AddExtraInput), MakeExtraOutput, RMSNorm)
    member_names = ("add", "rmsnorm")


class BackwardAddLayerNorm(_BackwardAddNorm):
    """``dx = layernorm_backward(dy) + d_extra``, also in 16 bits before an AddExtraInput."""

    window = (Optional(AddExtraInput), MakeExtraOutput, LayerNorm)
