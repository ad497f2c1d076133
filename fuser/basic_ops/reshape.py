"""Reshape: the same elements in another shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fuser.errors import InputError
from fuser.op import BasicOperation, Grads, OperationContext
from fuser.specs import PlanKey, TensorSpec
from fuser.tensors import Quantizer


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
