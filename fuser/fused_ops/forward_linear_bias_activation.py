"""ForwardLinearBiasActivation: y = f(x @ weight.T + bias)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser import gemm
from fuser.basic_ops import GELU, Activation, BasicLinear, Bias
from fuser.basic_ops.linear_epilogues import bias_refusal, biased_gemm
from fuser.op import FusedOperation, OperationContext, quantizes_values, write_output
from fuser.plan.window import Optional
from fuser.specs import PlanKey


class ForwardLinearBiasActivation(FusedOperation):
    """``y = f(x @ weight.T + bias)``: the bias is a GEMM epilogue.

    The activation runs in the same step. If backward does not need its input,
    tanh GELU on CUDA is a GEMM epilogue too.
    """

    window = (BasicLinear, Bias, Optional(Activation))
    side = "forward"
    communicates = True

    @classmethod
    def refuses(
        cls, linear: BasicLinear, bias: Bias, activation: Activation | None, *, key: PlanKey
    ) -> str | None:
        return bias_refusal(linear, key, bias.bias)

    @classmethod
    def kernels(
        cls,
        linear: BasicLinear,
        bias: Bias,
        activation: Activation | None,
        *,
        side: str,
        key: PlanKey,
    ) -> tuple[tuple[str, int], ...]:
        biased = (biased_gemm(linear, key), 2)
        if activation is None:
            return (biased,)
        if (
            key.recipe is None
            and not key.ops[2].requires_grad
            and _is_gelu_epilogue(activation, key.device)
        ):
            return (("addmm+gelu", 3),)
        return (biased, (activation.function.name, 1))

    @classmethod
    def fuses_quantize(
        cls,
        linear: BasicLinear,
        bias: Bias,
        activation: Activation | None,
        *,
        side: str,
        key: PlanKey,
    ) -> bool:
        return activation is not None and quantizes_values(side, key)

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
        members = self.members
        linear = members[0]
        bias = members[1].addend(basic_op_ctxs[1])
        if len(members) == 2:
            y = linear.matmul(basic_op_ctxs[0], input_, bias, **basic_op_kwargs[0])
            return write_output(y, next_op_input_quantizer), ((), ())
        activation, ctx = members[2], basic_op_ctxs[2]
        if (
            not ctx.has_recipe
            and not ctx.requires_grad
            and _is_gelu_epilogue(activation, input_.device.type)
        ):
            x, weight = linear.operands(basic_op_ctxs[0], input_)
            return gemm.linear_gelu(x, weight, bias), ((), (), ())
        y = activation.run(ctx, linear.matmul(basic_op_ctxs[0], input_, bias, **basic_op_kwargs[0]))
        return write_output(y, next_op_input_quantizer), ((), (), ())


def _is_gelu_epilogue(activation: Activation, device: str) -> bool:
    # The call is the tanh form on CUDA; on a CPU it is the erf form, and slower than two calls.
    return isinstance(activation, GELU) and activation.approximate == "tanh" and device == "cuda"
