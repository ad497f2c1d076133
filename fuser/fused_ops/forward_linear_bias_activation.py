"""ForwardLinearBiasActivation: y = f(x @ weight.T + bias)."""

from __future__ import annotations

import torch

from fuser import gemm
from fuser.basic_ops import GELU, Activation, BasicLinear, Bias
from fuser.basic_ops.linear_epilogues import bias_refusal, biased_gemm
from fuser.op import (
    Contexts,
    FusedOperation,
    StepInputs,
    StepOutputs,
    quantizes_values,
    write_output,
)
from fuser.plan.window import Optional
from fuser.specs import PlanKey


class ForwardLinearBiasActivation(FusedOperation):
    """``y = f(x @ weight.T + bias)``: the bias is a GEMM epilogue.

    The activation runs in the same step. If backward does not need its input,
    tanh GELU on CUDA is a GEMM epilogue too.
    """

    window = (BasicLinear, Bias, Optional(Activation))
    member_names = ("linear", "bias", "activation")
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

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        linear, bias_op, *rest = self.members
        bias = bias_op.addend(ctxs[1])
        is_exact = bool(rest) and not (ctxs[2].has_recipe or ctxs[2].requires_grad)
        if is_exact and _is_gelu_epilogue(rest[0], x.device.type):
            x, weight = linear.operands(ctxs[0], x)
            return gemm.linear_gelu(x, weight, bias), ()
        y = linear.matmul(ctxs[0], x, bias, **inputs.kwargs[0])
        if rest:
            y = rest[0].run(ctxs[2], y)
        return write_output(y, inputs.quantizer), ()


def _is_gelu_epilogue(activation: Activation, device: str) -> bool:
    # The call is the tanh form on CUDA; on a CPU it is the erf form, and slower than two calls.
    return isinstance(activation, GELU) and activation.approximate == "tanh" and device == "cuda"
