"""Bias: y = x + bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.chain import Stage
from fuser.communication import GroupArgument, GroupRef, divided, group_size
from fuser.errors import InputError
from fuser.functional import pointwise
from fuser.op import (
    BasicOperation,
    Grads,
    OperationContext,
    cast,
    check_parameter,
    check_sizes,
    default_device,
    default_dtype,
    quantizes_values,
    write_grad_input,
    write_output,
)
from fuser.specs import PlanKey, TensorSpec
from fuser.tensors import Quantizer

STAGES = (Stage("bias"),)


class Bias(BasicOperation):
    """Add a bias to the last dimension: ``y = x + bias``.

    Parameters
    ----------
    size
        Last dimension of the input, of all ranks together.
    device, dtype
        Of the bias, shape ``[local_size]``, initialised to zero.
    tensor_parallel, tensor_parallel_group
        Whether each rank has ``size / ranks`` features of the input and of the bias; the group is
        as in ``BasicLinear``.

    Raises
    ------
    InputError
        On a size that is not positive or that the ranks do not divide, or a group without this
        rank.
    StateError
        If a group is given and torch.distributed is not initialised.
    """

    saves_input = False
    passes_gradient_on = True
    parameter_names = ("bias",)
    can_quantize_output = ("forward", "backward")

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: GroupArgument = None,
    ) -> None:
        super().__init__()
        check_sizes("Bias", size=size)
        self.size = self.local_size = size
        self.tensor_parallel = tensor_parallel
        self._group = GroupRef(tensor_parallel_group)
        if tensor_parallel:
            self.shard(tensor_parallel_group)
        # Of the ranks whose outputs are added after this op, one adds the bias (fused_ops/linear).
        self.is_added: bool = True
        self.bias: torch.nn.Parameter
        self.register_parameter(
            "bias",
            torch.nn.Parameter(
                torch.zeros(
                    self.local_size, device=default_device(device), dtype=default_dtype(dtype)
                )
            ),
        )

    @property
    def tensor_parallel_group(self) -> Any | None:
        """The argument of the constructor."""
        return self._group.group

    def shard(self, group: GroupArgument) -> None:
        """Give each rank of ``group`` its part of the features; the caller replaces the parameter.

        Raises
        ------
        InputError, StateError
            As the constructor; nothing has changed then.
        """
        self.local_size = divided("Bias's size", self.size, group_size("Bias", group))
        self.tensor_parallel, self._group = True, GroupRef(group)

    def placement_of(self, name: str) -> tuple[int | None, Any]:
        return (None, None) if self.local_size == self.size else (0, self.tensor_parallel_group)

    def extra_repr(self) -> str:
        if self.local_size == self.size:
            return f"size={self.size}"
        return f"size={self.size}, parallel over {self.size // self.local_size} ranks"

    def reset_parameters(self) -> None:
        """Set the bias to zero. A bias on meta is allocated first."""
        self.initialise("bias", torch.nn.init.zeros_)

    def pre_first_fuser_forward(self) -> None:
        if self.bias.is_meta:
            self.reset_parameters()

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        name = f"{self.part_of or 'Bias'}, whose output has {self.size} features,"
        check_parameter(name, "bias", self.bias, (self.local_size,))
        self._check_features(spec.shape)
        return TensorSpec(spec.shape, autocast or self.bias.dtype)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        if side == "forward":
            return ("add",)
        return ("sum",) if key.ops[0].params[0].requires_grad else ()

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return bool(self.kernels(side, key)) and quantizes_values(side, key)

    def addend(self, ctx: OperationContext) -> torch.Tensor:
        """The bias in the compute dtype; zeros on a rank that does not add it."""
        bias = self._parameters.get("bias")  # faster than torch.nn.Module.__getattr__
        if bias is None:
            bias = self.bias  # a plain attribute, computed by a hook
        if not self.is_added:
            return torch.zeros_like(bias, dtype=ctx.autocast_dtype or bias.dtype)
        return bias if ctx.autocast_dtype is None else cast(bias, ctx.autocast_dtype)

    def stage(
        self,
        ctx: OperationContext,
        shape: tuple[int, ...],
        device: torch.device,
        extras: tuple[torch.Tensor, ...],
    ) -> tuple[Stage, torch.Tensor | None]:
        """As in ``Activation``."""
        self._check_features(shape)
        return STAGES[0], self.addend(ctx)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        self._check_features(input_.shape)
        bias = self.addend(ctx)
        y = pointwise.chain(STAGES, cast(input_, bias.dtype), (bias,))
        return write_output(y, next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        """``dy``, and its sum over rows; None if the bias needs no gradient."""
        if not ctx.params_require_grad[0]:
            return write_grad_input(grad_output, ctx), (None,)
        if ctx.grad_input_quantizer is not None:
            dx, (dbias,) = pointwise.chain_backward(STAGES, grad_output, None, (None,), (True,))
            return write_grad_input(dx, ctx), (dbias,)
        rows = grad_output
        if rows.dim() != 2:
            rows = rows.reshape(-1, rows.shape[-1])
        return grad_output, (rows.sum(0),)

    def _check_features(self, shape: tuple[int, ...]) -> None:
        if shape[-1] != self.local_size:
            raise InputError(
                f"Bias({self.size}) got an input of shape {tuple(shape)}; "
                f"its last dimension must be {self.local_size}."
            )
