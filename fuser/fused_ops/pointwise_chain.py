"""PointwiseChain: consecutive pointwise ops as one kernel in forward and one in backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fuser.basic_ops import Activation, AddExtraInput, Bias, ConstantScale
from fuser.basic_ops.scaled_activation import ScaledActivation
from fuser.chain import Stage, Stages
from fuser.functional import pointwise
from fuser.op import (
    FusedOperation,
    Grads,
    OperationContext,
    cast,
    quantizes_values,
    write_grad_input,
    write_output,
)
from fuser.plan.window import Having, Many
from fuser.specs import PlanKey

# A user's op is in a chain by its `stage` too.
_POINTWISE = Having("stage")

# Stages that are sums: the gradients of input and operand are the output's, perhaps summed.
_SUMS = ("bias", "add_extra_input")


class PointwiseChain(FusedOperation):
    """``y = f_n(... f_1(x))`` of two or more pointwise ops, each rounded as if it ran alone.

    Saves only its input, and operands that backward needs. Backward computes
    the values between the ops again.
    """

    window = (_POINTWISE, Many(_POINTWISE))
    side = "joint"
    recomputes = True

    @classmethod
    def refuses(cls, first: Any, rest: tuple[Any, ...], *, key: PlanKey) -> str | None:
        if key.no_kernels is not None:
            return key.no_kernels
        ops = (first, *rest)
        activations = [op for op in ops if isinstance(op, (Activation, ScaledActivation))]
        gated = [op for op in activations if op.function.is_gated]
        if len(gated) > 1:
            names = " and ".join(type(op).__name__ for op in gated)
            return f"a chain halves its columns at most once, and {names} both do."
        for op in ops:
            if isinstance(op, Activation) and op.cache_quantized_input:
                return f"{type(op).__name__} caches its input quantized; a chain does not."
            if isinstance(op, ConstantScale) and abs(op.scale) > pointwise.MAX_FLOAT32:
                return f"the scale {op.scale} is not finite in fp32, in which kernels compute."
        return _dtype_refusal(ops, key)

    @classmethod
    def kernels(
        cls, first: Any, rest: tuple[Any, ...], *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        name = "+".join(_name(op) for op in (first, *rest))
        return ((name if side == "forward" else f"{name}_backward", len(key.ops)),)

    @classmethod
    def fuses_quantize(cls, first: Any, rest: tuple[Any, ...], *, side: str, key: PlanKey) -> bool:
        return quantizes_values(side, key)

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
        ctx: Any = basic_op_ctxs[0]
        shape = tuple(input_.shape)
        # Index, stage and operand of each op that does something.
        owners: list[int] = []
        chain: list[Stage] = []
        operands: list[torch.Tensor | None] = []
        for i, op in enumerate(self.members):
            extras = basic_op_extra_inputs[i]
            link = op.stage(basic_op_ctxs[i], shape, input_.device, extras)
            if link is not None:
                stage, operand = link
                owners.append(i)
                chain.append(stage)
                operands.append(operand)
                shape = (*shape[:-1], shape[-1] // (1 + stage.is_gated))
        stages = tuple(chain)
        if ctx.requires_grad:
            kept = [
                operand if stage.name not in _SUMS or _reads_again(stages[i:]) else None
                for i, (stage, operand) in enumerate(zip(stages, operands, strict=True))
            ]
            ctx.save_for_backward(input_ if _reads_again(stages) else None, *kept)
            ctx.stages, ctx.owners = stages, owners
            ctx.wanted = [_wants_grad(basic_op_ctxs[i]) for i in owners]
        y = pointwise.chain(stages, input_, operands) if stages else input_
        return write_output(y, next_op_input_quantizer), ((),) * len(self.members)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        ctx: Any = basic_op_ctxs[0]
        stages: Stages = ctx.stages
        grads: list[torch.Tensor | None] = []
        if not stages:
            dx = write_grad_input(grad_output, ctx)
        else:
            x, *operands = ctx.saved_tensors
            dy = cast(grad_output, ctx.input_dtype)
            is_dy = [_are_sums(stages[i:]) for i in range(len(stages))]
            is_dx = [
                _are_sums(stages[: i + 1]) and ctx.grad_input_quantizer is None
                for i in range(len(stages))
            ]
            asked = [
                is_wanted and (stage.name == "bias" or not (as_dy or as_dx))
                for stage, is_wanted, as_dy, as_dx in zip(
                    stages, ctx.wanted, is_dy, is_dx, strict=True
                )
            ]
            values, grads = pointwise.chain_backward(stages, dy, x, operands, asked)
            dx = write_grad_input(values, ctx)
            for i, stage in enumerate(stages):
                if stage.name == "add_extra_input" and ctx.wanted[i] and not asked[i]:
                    grads[i] = grad_output if is_dy[i] else dx
        found = dict(zip(ctx.owners, grads, strict=True))
        params = [(found[i],) if op._parameters else () for i, op in enumerate(self.members)]
        extras = [(found[i],) if op.num_extra_inputs else () for i, op in enumerate(self.members)]
        return dx, params, extras


def _name(op: Any) -> str:
    """The name of an op in the name of a kernel."""
    name: str = op.kernels("forward", None)[-1]
    return name


def _are_sums(stages: Stages) -> bool:
    """Whether ``stages`` leave a gradient unchanged."""
    return all(stage.name in _SUMS for stage in stages)


def _reads_again(stages: Stages) -> bool:
    """Whether backward reads the input of ``stages``."""
    return any(stage.is_activation for stage in stages)


def _wants_grad(ctx: OperationContext) -> bool:
    """Whether the operand of an op, a bias or an extra input, needs a gradient."""
    return any(ctx.params_require_grad) or any(ctx.extra_inputs_require_grad)


def _dtype_refusal(ops: Sequence[Any], key: PlanKey) -> str | None:
    """A sentence with two dtypes of the chain that differ; None if all are equal."""
    dtype = key.ops[0].input_dtype
    found = []
    for op, op_key in zip(ops, key.ops, strict=True):
        found.append((op_key.input_dtype, "arrives at", op))
        if isinstance(op, Bias):
            found.append((key.autocast_dtype or op_key.params[0].dtype, "is the result of", op))
        elif isinstance(op, AddExtraInput):
            found.append((op_key.extra_inputs[0].dtype, "is the extra input of", op))
        elif not isinstance(op, ConstantScale):
            found.append((key.autocast_dtype or dtype, "is the result of", op))
    for other, what, op in found:
        if other is not dtype:
            return f"the chain begins in {dtype}, and {other} {what} {type(op).__name__}."
    return None
