"""Identity, MakeExtraOutput and Reshape: ops that return their input by reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fuser.errors import InputError
from fuser.op import (
    BasicOperation,
    Contexts,
    Grads,
    OperationContext,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    write_grad_input,
)
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


class ReshapeState(NamedTuple):
    """What a reshape keeps for its backward."""

    input_shape: torch.Size


class Reshape(BasicOperation):
    """Reshape the input; one size may be -1, as in ``torch.reshape``."""

    parameter_names = ()
    saves_input = False

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        if any(size < -1 for size in self.shape) or self.shape.count(-1) > 1:
            raise InputError(
                f"Reshape got shape {self.shape}; its sizes must not be negative, except "
                "one, which may be -1."
            )

    def extra_repr(self) -> str:
        return f"shape={self.shape}"

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        try:
            shape = torch.empty(spec.shape, device="meta").reshape(self.shape).shape
        except RuntimeError as error:
            raise self._does_not_fit(spec.shape) from error
        return TensorSpec(tuple(shape), spec.dtype)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ()

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        ctx.state = ReshapeState(input_.shape)
        try:
            output = input_.reshape(self.shape)
        except RuntimeError as error:
            raise self._does_not_fit(input_.shape) from error
        source = getattr(input_, "high_precision_source", None)
        # Another last dimension cuts blocks; the output is then unquantized and has no source.
        if source is not None:
            output.high_precision_source = source.reshape(self.shape)  # type: ignore[attr-defined]
        return output

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        state: ReshapeState = ctx.state
        return grad_output.reshape(state.input_shape), ()

    def _does_not_fit(self, shape: tuple[int, ...]) -> InputError:
        return InputError(
            f"Reshape({self.shape}) got an input of shape {tuple(shape)}, whose "
            f"{math.prod(shape)} elements do not fit."
        )
