"""Fusions of pointwise ops: PointwiseChain, of any, and BackwardActivationBias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fuser.basic_ops import Activation, AddExtraInput, Bias, ConstantScale
from fuser.basic_ops.activation import ActivationState, ScaledActivation
from fuser.basic_ops.pointwise_ops import BIAS_STAGES
from fuser.chain import Stage, Stages
from fuser.functional import pointwise
from fuser.functional.lazy import materialize
from fuser.op import (
    BasicOperation,
    Contexts,
    FusedOperation,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    Values,
    cast,
    quantizes_values,
    rows,
    write_grad_input,
    write_output,
)
from fuser.plan.window import Having, Many
from fuser.specs import PlanKey

# A user's op is in a chain by its `stage` too.
_POINTWISE = Having("stage")

# Stages that are sums: the gradients of input and operand are the output's, perhaps summed.
_SUMS = ("bias", "add_extra_input")


class PointwiseChainState(NamedTuple):
    """What a chain keeps besides its input and operands, for each op that does something."""

    stages: Stages
    owners: list[int]
    """The index of the op."""
    wanted: list[bool]
    """Whether its operand needs a gradient."""


class PointwiseChain(FusedOperation):
    """``y = f_n(... f_1(x))`` of two or more pointwise ops, each rounded as if it ran alone.

    Saves only its input, and operands that backward needs. Backward computes
    the values between the ops again.
    """

    window = (_POINTWISE, Many(_POINTWISE))
    side = "joint"
    recomputes = True
    stores_rebuilt_output = True

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
        for op, op_key in zip(ops, key.ops, strict=True):
            if op_key.rounds_input or (isinstance(op, Activation) and op.cache_quantized_input):
                return f"{type(op).__name__} caches its input quantized; a chain does not."
            if isinstance(op, ConstantScale) and abs(op.scale) > pointwise.MAX_FLOAT32:
                return f"the scale {op.scale} is not finite in fp32, in which kernels compute."
        return _dtype_refusal(ops, key)

    @classmethod
    def kernels(
        cls, first: BasicOperation, rest: tuple[BasicOperation, ...], *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        name = "+".join(_name(op) for op in (first, *rest))
        return ((name if side == "forward" else f"{name}_backward", len(key.ops)),)

    @classmethod
    def fuses_quantize(cls, first: object, rest: object, *, side: str, key: PlanKey) -> bool:
        return quantizes_values(side, key)

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        ctx = ctxs[0]
        shape = tuple(x.shape)
        extras = rows(inputs.extras, [op.num_extra_inputs for op in self.members])
        # Index, stage and operand of each op that does something.
        owners: list[int] = []
        chain: list[Stage] = []
        operands: list[torch.Tensor | None] = []
        for i, op in enumerate(self.members):
            link = op.stage(ctxs[i], shape, x.device, extras[i])
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
            ctx.save_for_backward(x if _reads_again(stages) else None, *kept)
            # Whether the operand of an op, a bias or an extra input, needs a gradient.
            wanted = [
                any(ctxs[i].params_require_grad) or any(ctxs[i].extra_inputs_require_grad)
                for i in owners
            ]
            ctx.state = PointwiseChainState(stages, owners, wanted)
        y = pointwise.chain(stages, x, operands) if stages else x
        return write_output(y, inputs.quantizer), ()

    def step_rebuild(self, ctxs: Contexts, x: Values | None) -> Values:
        ctx = ctxs[0]
        state: PointwiseChainState = ctx.state
        if not state.stages:
            assert x is not None
            return x
        saved, *operands = ctx.saved_tensors
        if saved is None:
            assert x is not None
            saved = materialize(x)
        return pointwise.chain(state.stages, saved, operands)

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        ctx = ctxs[0]
        state: PointwiseChainState = ctx.state
        stages = state.stages
        grads: list[torch.Tensor | None] = []
        if not stages:
            dx = write_grad_input(dy, ctx)
        else:
            x, *operands = ctx.saved_tensors
            is_dy = [_are_sums(stages[i:]) for i in range(len(stages))]
            is_dx = [
                _are_sums(stages[: i + 1]) and ctx.grad_input_quantizer is None
                for i in range(len(stages))
            ]
            links = zip(stages, state.wanted, is_dy, is_dx, strict=True)
            asked = [
                is_wanted and (stage.name == "bias" or not (as_dy or as_dx))
                for stage, is_wanted, as_dy, as_dx in links
            ]
            dy_in = cast(dy, ctx.input_dtype)
            values, grads = pointwise.chain_backward(
                stages, dy_in, x, operands, asked, output=ctxs[-1].rebuilt_output
            )
            dx = write_grad_input(values, ctx)
            for i, stage in enumerate(stages):
                if stage.name == "add_extra_input" and state.wanted[i] and not asked[i]:
                    grads[i] = dy if is_dy[i] else dx
        of_op = dict(zip(state.owners, grads, strict=True))
        params = [of_op[i] for i, op in enumerate(self.members) if op._parameters]
        extras = [of_op[i] for i, op in enumerate(self.members) if op.num_extra_inputs]
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


def _dtype_refusal(ops: Sequence[BasicOperation], key: PlanKey) -> str | None:
    """A sentence with two dtypes of the chain that differ; None if all are equal."""
    dtype = key.ops[0].input_dtype
    dtypes = []
    for op, op_key in zip(ops, key.ops, strict=True):
        dtypes.append((op_key.input_dtype, "arrives at", op))
        if isinstance(op, Bias):
            dtypes.append((key.autocast_dtype or op_key.params[0].dtype, "is the result of", op))
        elif isinstance(op, AddExtraInput):
            dtypes.append((op_key.extra_inputs[0].dtype, "is the extra input of", op))
        elif not isinstance(op, ConstantScale):
            dtypes.append((key.autocast_dtype or dtype, "is the result of", op))
    for other, role, op in dtypes:
        if other is not dtype:
            return f"the chain begins in {dtype}, and {other} {role} {type(op).__name__}."
    return None


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
            *((*BIAS_STAGES, state.function), dy, x, (None, None), (True, False)),
            saved=1,
            is_plain=not ctx.has_recipe,
            output=ctx.rebuilt_output,
        )
        return write_grad_input(dx, bias_ctx), (dbias,), ()
