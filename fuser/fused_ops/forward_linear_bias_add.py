"""ForwardLinearBiasAdd: y = x @ weight.T + bias + extra."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser import gemm
from fuser.basic_ops import AddExtraInput, BasicLinear, Bias
from fuser.op import FusedOperation, OperationContext, write_output
from fuser.plan.window import Optional
from fuser.specs import PlanKey

_count_dispatch_modes = torch._C._len_torch_dispatch_stack


class ForwardLinearBiasAdd(FusedOperation):
    """``y = x @ weight.T + bias + extra``: without a bias one GEMM with ``beta = 1``.

    With a bias, the bias is the GEMM's epilogue, and the extra input is added to
    the GEMM's output; in place, unless something else may hold that output.
    """

    window = (BasicLinear, Optional(Bias), AddExtraInput)
    side = "forward"

    @classmethod
    def refuses(
        cls, linear: BasicLinear, bias: Bias | None, add: AddExtraInput, *, key: PlanKey
    ) -> str | None:
        produced = key.ops[-1].input_dtype
        extra = key.ops[-1].extra_inputs[0].dtype
        if produced != extra:
            return f"the linear produces {produced} and the extra input is {extra}."
        if bias is None:
            return linear.addend_refusal("forward", key)
        return linear.bias_refusal(key, bias.bias)

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
            return (("addmm", 2),)
        return ((linear.biased_gemm(key), 2), ("add_", 1))

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
        linear = self.members[0]
        add = self.members[-1]
        (extra,) = basic_op_extra_inputs[-1]
        add.check_extra((*input_.shape[:-1], linear.out_features), extra.shape)
        if len(self.members) == 2:
            x, weight = linear.operands(basic_op_ctxs[0], input_)
            y = gemm.linear_add(x, weight, extra)
            return write_output(y, next_op_input_quantizer), ((), ())
        bias = self.members[1].addend(basic_op_ctxs[1])
        y = linear.matmul(basic_op_ctxs[0], input_, bias, **basic_op_kwargs[0])
        # A dispatch mode may have kept the GEMM's result, as selective checkpointing does.
        y = y + extra if _count_dispatch_modes() else y.add_(extra)
        return write_output(y, next_op_input_quantizer), ((), (), ())
