"""ForwardLinearScaleAdd: y = scale * (x @ weight.T) + extra."""

from __future__ import annotations

import torch

from fuser.basic_ops import AddExtraInput, BasicLinear, ConstantScale
from fuser.basic_ops.linear_epilogues import added_gemm, addend_refusal
from fuser.op import (
    Contexts,
    FusedOperation,
    StepInputs,
    StepOutputs,
    write_output,
)
from fuser.specs import PlanKey


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
        produced = key.ops[-1].input_dtype
        extra = key.ops[-1].extra_inputs[0].dtype
        if produced != extra:
            return f"the linear produces {produced} and the extra input is {extra}."
        return addend_refusal(linear, "forward", key)

    @classmethod
    def kernels(
        cls,
        linear: BasicLinear,
        scale: ConstantScale,
        add: AddExtraInput,
        *,
        side: str,
        key: PlanKey,
    ) -> tuple[tuple[str, int], ...]:
        return ((added_gemm(linear, side, key), 3),)

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        (linear, scale, add), (extra,) = self.members, inputs.extras
        add.check_extra((*x.shape[:-1], linear.out_features), extra.shape)
        y = linear.matmul(ctxs[0], x, addend=extra, scale=scale.scale, **inputs.kwargs[0])
        return write_output(y, inputs.quantizer), ()
