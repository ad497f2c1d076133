"""ForwardLinearBiasAdd: y = x @ weight.T + bias + extra."""

from __future__ import annotations

import torch

from fuser.basic_ops import AddExtraInput, BasicLinear, Bias
from fuser.basic_ops.linear_epilogues import (
    added_gemm,
    addend_refusal,
    adds_in_gemm,
    bias_refusal,
    biased_gemm,
    parallel_refusal,
)
from fuser.op import (
    Contexts,
    FusedOperation,
    StepInputs,
    StepOutputs,
    write_output,
)
from fuser.plan.window import Optional
from fuser.specs import PlanKey


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
        produced = key.ops[-1].input_dtype
        extra = key.ops[-1].extra_inputs[0].dtype
        # With a bias of 16 bits, cuBLASLt adds an fp32 matrix to quantized products only.
        takes_fp32 = adds_in_gemm(linear, key) and (bias is None or key.recipe is not None)
        if produced != extra and not (extra == torch.float32 and takes_fp32):
            return f"the linear produces {produced} and the extra input is {extra}."
        if bias is None:
            return addend_refusal(linear, "forward", key)
        return parallel_refusal(linear, "forward") or bias_refusal(linear, key, bias.bias)

    @classmethod
    def kernels(
        cls,
        linear: BasicLinear,
        bias: Bias | None,
        add: AddExtraInput,
        *,
        side: str,
        key: PlanKey,
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
