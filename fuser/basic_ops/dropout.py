"""Dropout: zero elements at random during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fuser.chain import Stage
from fuser.errors import InputError
from fuser.functional import pointwise
from fuser.functional.lazy import LazyTensor, materialize
from fuser.functional.random_seeds import dropout_seed
from fuser.op import (
    BasicOperation,
    Grads,
    OperationContext,
    cast,
    quantizes_values,
    write_grad_input,
    write_output,
)
from fuser.specs import PlanKey, TensorSpec
from fuser.tensors import Quantizer


class DropoutSaved(NamedTuple):
    """The seed of the mask; None if there is no mask."""

    seed: torch.Tensor | None


class DropoutState(NamedTuple):
    """The probability, as the forward found it."""

    dropout_probability: float


class Dropout(BasicOperation):
    """Zero each element with probability ``p`` and scale the rest by ``1 / (1 - p)``.

    In evaluation mode it is the identity. It saves the seed of the mask for
    backward: two numbers from torch's generator of the device.

    Raises
    ------
    InputError
        If ``p`` is not in [0, 1].
    """

    parameter_names = ()
    takes_scalars = True
    saves_input = False
    rebuilds_output = True
    can_quantize_output = ("forward", "backward")
    backward_attributes = DropoutState

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise InputError(f"Dropout got p={p}; a probability is between 0 and 1.")
        self.dropout_probability = p

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"

    @property
    def draws_seed(self) -> bool:  # type: ignore[override]
        return self.dropout_probability > 0

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return TensorSpec(spec.shape, autocast or spec.dtype)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ("dropout",) if side == "forward" else ("dropout_backward",)

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return quantizes_values(side, key)

    def stage(
        self,
        ctx: OperationContext,
        shape: tuple[int, ...],
        device: torch.device,
        extras: tuple[torch.Tensor, ...],
    ) -> tuple[Stage, torch.Tensor | None] | None:
        """As in ``Activation``; None if the op does nothing."""
        if not self.training or self.dropout_probability == 0:
            return None
        seed = dropout_seed(device)
        return Stage("dropout", (self.dropout_probability,)), seed

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        x = cast(input_, ctx.autocast_dtype or input_.dtype)
        if not self.training or self.dropout_probability == 0:
            ctx.to_save = DropoutSaved(None)
            return write_output(x, next_op_input_quantizer)
        seed = dropout_seed(x.device)
        ctx.to_save = DropoutSaved(seed)
        y = pointwise.dropout(x, seed, self.dropout_probability)
        return write_output(y, next_op_input_quantizer)

    def rebuild(
        self, ctx: OperationContext, input_: torch.Tensor | LazyTensor | None
    ) -> torch.Tensor | LazyTensor:
        assert input_ is not None
        (seed,) = DropoutSaved(*ctx.saved_tensors)
        state: DropoutState = ctx.state
        x = cast(materialize(input_), ctx.autocast_dtype or input_.dtype)
        return x if seed is None else pointwise.dropout(x, seed, state.dropout_probability)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        (seed,) = DropoutSaved(*ctx.saved_tensors)
        if seed is None:
            return write_grad_input(grad_output, ctx), ()
        state: DropoutState = ctx.state
        dx = pointwise.dropout(grad_output, seed, state.dropout_probability)
        return write_grad_input(dx, ctx), ()
