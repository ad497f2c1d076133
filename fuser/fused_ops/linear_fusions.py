"""Fusions of a linear: what comes beside its product is an epilogue of the GEMM."""

from __future__ import annotations

import torch

from fuser import gemm
from fuser.basic_ops import (
    GELU,
    Activation,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    MakeExtraOutput,
)
from fuser.basic_ops.linear_epilogues import (
    added_gemm,
    addend_refusal,
    adds_in_gemm,
    bias_refusal,
    biased_gemm,
    grad_scale_refusal,
    has_cublaslt,
    parallel_refusal,
)
from fuser.basic_ops.pointwise_ops import ConstantScaleState
from fuser.op import (
    Contexts,
    FusedOperation,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    quantizes_values,
    write_grad_input,
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
        cls, linear: BasicLinear, bias: Bias, activation: Activation | None, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        biased = (biased_gemm(linear, key), 2)
        if activation is None:
            return (biased,)
        is_exact = key.recipe is None and not key.ops[2].requires_grad
        if is_exact and _is_gelu_epilogue(activation, key.device):
            return (("addmm+gelu", 3),)
        return (biased, (activation.function.name, 1))

    @classmethod
    def fuses_quantize(
        cls, linear: BasicLinear, bias: Bias, activation: Activation | None, side: str, key: PlanKey
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


class ForwardLinearBiasAdd(FusedOperation):
    """``y = x @ weight.T + bias + extra``: one GEMM with ``beta = 1`` and a bias as its epilogue.

    Where no GEMM takes both, the bias is the epilogue, and a second kernel adds the extra input.
    An extra input in fp32, as residuals under autocast are, is added before the product is rounded.
    """

    window = (BasicLinear, Optional(Bias), AddExtraInput)
    member_names = ("linear", "bias", "add")
    side = "forward"
    communicates = True

    @classmethod
    def refuses(
        cls, linear: BasicLinear, bias: Bias | None, add: AddExtraInput, *, key: PlanKey
    ) -> str | None:
        produced, extra = key.ops[-1].input_dtype, key.ops[-1].extra_inputs[0].dtype
        # With a bias of 16 bits, cuBLASLt adds an fp32 matrix to quantized products only.
        takes_fp32 = adds_in_gemm(linear, key) and (bias is None or key.recipe is not None)
        if produced != extra and not (extra == torch.float32 and takes_fp32):
            return f"the linear produces {produced} and the extra input is {extra}."
        if bias is None:
            return addend_refusal(linear, "forward", key)
        return parallel_refusal(linear, "forward") or bias_refusal(linear, key, bias.bias)

    @classmethod
    def kernels(
        cls, linear: BasicLinear, bias: Bias | None, add: AddExtraInput, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        if bias is None:
            return ((added_gemm(linear, side, key), 2),)
        if adds_in_gemm(linear, key):
            return ((added_gemm(linear, side, key), 3),)
        return ((biased_gemm(linear, key), 2), ("add", 1))

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        linear, add, (extra,) = self.members[0], self.members[-1], inputs.extras
        add.check_extra((*x.shape[:-1], linear.out_features), extra.shape)
        bias = None if len(self.members) == 2 else self.members[1].addend(ctxs[1])
        y = linear.matmul(ctxs[0], x, bias, addend=extra, **inputs.kwargs[0])
        return write_output(y, inputs.quantizer), ()


class ForwardLinearScaleAdd(FusedOperation):
    """``y = scale * (x @ weight.T) + extra``: one GEMM with ``alpha`` and ``beta = 1``."""

    window = (BasicLinear, ConstantScale, AddExtraInput)
    member_names = ("linear", "scale", "add")
    side = "forward"
    communicates = True

    @classmethod
    def refuses(
        cls, linear: BasicLinear, scale: ConstantScale, add: AddExtraInput, *, key: PlanKey
    ) -> str | None:
        produced, extra = key.ops[-1].input_dtype, key.ops[-1].extra_inputs[0].dtype
        if produced != extra:
            return f"the linear produces {produced} and the extra input is {extra}."
        return addend_refusal(linear, "forward", key)

    @classmethod
    def kernels(
        cls, linear: BasicLinear, scale: ConstantScale, add: AddExtraInput, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        return ((added_gemm(linear, side, key), 3),)

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        (linear, scale, add), (extra,) = self.members, inputs.extras
        add.check_extra((*x.shape[:-1], linear.out_features), extra.shape)
        y = linear.matmul(ctxs[0], x, addend=extra, scale=scale.scale, **inputs.kwargs[0])
        return write_output(y, inputs.quantizer), ()


class BackwardLinearAdd(FusedOperation):
    """``dx = dy @ weight + d_extra``: one GEMM with ``beta = 1``."""

    window = (MakeExtraOutput, BasicLinear)
    member_names = ("backward_add", "linear")
    side = "backward"
    communicates = True

    @classmethod
    def refuses(cls, make: MakeExtraOutput, linear: BasicLinear, *, key: PlanKey) -> str | None:
        compute, incoming = key.autocast_dtype or linear.weight.dtype, key.ops[0].input_dtype
        if compute != incoming:
            return f"the GEMM runs in {compute} and the extra output is {incoming}."
        return addend_refusal(linear, "backward", key.window(1, 2))

    @classmethod
    def kernels(
        cls, make: MakeExtraOutput, linear: BasicLinear, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        of_linear = key.window(1, 2)
        wgrad = [(name, 0) for name in linear.kernels(side, of_linear) if name.startswith("wgrad")]
        return (*wgrad, (added_gemm(linear, side, of_linear), 2))

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        linear, (ctx, linear_ctx), (grad_extra,) = self.members[1], ctxs, grad_extras
        grad_input, param_grads = linear.op_backward(linear_ctx, dy, addend=grad_extra)
        return write_grad_input(grad_input, ctx), param_grads, ()


class BackwardLinearScale(FusedOperation):
    """``dx = scale * dy @ weight; dw = scale * dy.T @ x``: the scale is the GEMMs' ``alpha``.

    ``dy`` is quantized without it. Where torch makes the quantized GEMMs, which have no ``alpha``,
    it multiplies the scales of ``dy``.
    """

    window = (BasicLinear, ConstantScale)
    member_names = ("linear", "scale")
    side = "backward"
    communicates = True

    @classmethod
    def refuses(cls, linear: BasicLinear, scale: ConstantScale, *, key: PlanKey) -> str | None:
        return grad_scale_refusal(linear, key)

    @classmethod
    def kernels(
        cls, linear: BasicLinear, scale: ConstantScale, *, side: str, key: PlanKey
    ) -> tuple[tuple[str, int], ...]:
        names = linear.kernels(side, key.window(0, 1))
        gemms = [(name, 2 * (i + 1 == len(names))) for i, name in enumerate(names)]
        is_quantized = key.recipe is not None and key.recipe.quantizes_backward
        if is_quantized and not has_cublaslt(key):
            return tuple(step for gemm in gemms for step in (("mul scale_inv", 0), gemm))
        return tuple(gemms)

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        linear_ctx, scale_ctx = ctxs
        state: ConstantScaleState = scale_ctx.state
        grad_input, param_grads = self.members[0].op_backward(linear_ctx, dy, state.scale)
        return grad_input, param_grads, ()
