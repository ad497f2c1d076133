"""Identity: y = x."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.op import BasicOperation, Grads, OperationContext
from fuser.specs import PlanKey, TensorSpec
from fuser.tensors import Quantizer


class Identity(BasicOperation):
    """Return the input."""

    parameter_names = ()
    takes_scalars = True
    saves_input = False

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return spec

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ()

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        return input_

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        return grad_output, ()
