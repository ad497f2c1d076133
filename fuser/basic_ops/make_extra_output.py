"""MakeExtraOutput: return the main input as a second output too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.op import (
    BasicOperation,
    Contexts,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    write_grad_input,
)
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

    def extra_repr(self) -> str:
        return self.channel_text()

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return spec

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return () if side == "forward" else ("add",)

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        return x, (x,)

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (ctx,), (grad_extra,) = ctxs, grad_extras
        return write_grad_input(dy + grad_extra, ctx), (), ()
