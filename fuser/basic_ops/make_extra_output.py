"""MakeExtraOutput: return the main input as a second output too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fuser.op import BasicOperation, Grads, OperationContext, write_grad_input
from fuser.specs import PlanKey, TensorSpec


class MakeExtraOutput(BasicOperation):
    """Return x, and x again as an extra output. Backward sums the two gradients.

    If a loss needs the extra output alone, later ops of the pipeline still run in backward, with
    zeros: their parameters get None, but an infinity that they have saved, or in their weights,
    gives NaN in the gradients of earlier ops, which plain torch would not have.

    Parameters
    ----------
    in_place
        Permission to overwrite the extra output's gradient. Accepted for
        compatibility: fuser never changes a caller's tensor, and results are
        the same.
    """

    parameter_names = ()
    takes_scalars = True
    num_extra_outputs = 1
    saves_input = False
    can_quantize_output = ("backward",)

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return spec

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return () if side == "forward" else ("add",)

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
        return input_, [(input_,)]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        ((grad_extra,),) = basic_op_grad_extra_outputs
        return write_grad_input(grad_output + grad_extra, basic_op_ctxs[0]), [()], [()]
