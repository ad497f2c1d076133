"""ForwardLinearScaleAdd: y = scale * (x @ weight.T) + extra."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser.basic_ops import AddExtraInput, BasicLinear, ConstantScale
from fuser.basic_ops.linear_epilogues import added_gemm, addend_refusal
from fuser.op import FusedOperation, OperationContext, write_output
from fuser.specs import PlanKey


class ForwardLinearScaleAdd(FusedOperation):
    """``y = scale * (x @ weight.T) + extra``: one GEMM with ``alpha`` and ``beta = 1``."""

    window = (BasicLinear, ConstantScale, AddExtraInput)
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
        linear, scale, add = self.members
        ((extra,),) = basic_op_extra_inputs[2:]
        add.check_extra((*input_.shape[:-1], linear.out_features), extra.shape)
        y = linear.matmul(
            basic_op_ctxs[0], input_, addend=extra, scale=scale.scale, **basic_op_kwargs[0]
        )
        return write_output(y, next_op_input_quantizer), ((), (), ())
