"""AddExtraInput, Bias, ConstantScale and Dropout: pointwise ops that are no activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fuser.chain import Stage
from fuser.communication import GroupArgument, GroupRef, divided, group_size
from fuser.errors import InputError
from fuser.functional import pointwise
from fuser.functional.lazy import materialize
from fuser.functional.random_seeds import dropout_seed
from fuser.op import (
    BasicOperation,
    Contexts,
    Grads,
    OperationContext,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    Values,
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

ADD_STAGES = (Stage("add_extra_input"),)
BIAS_STAGES = (Stage("bias"),)


class AddExtraInput(BasicOperation):
    """``y = x + extra``, with the extra input in the shape of the main input.

    The sum has the dtype that torch promotes the two dtypes to. Each gradient has
    the dtype of its input.

    Parameters
    ----------
    in_place
        Permission to overwrite the extra input. Accepted for compatibility:
        fuser never changes a caller's tensor, and results are the same.
    """

    parameter_names = ()
    takes_scalars = True
    num_extra_inputs = 1
    takes_floating_extras = True
    saves_input = False
    passes_gradient_to_extras = True
    can_quantize_output = ("forward", "backward")

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def extra_repr(self) -> str:
        return self.channel_text()

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        (extra,) = extras
        self.check_extra(spec.shape, extra.shape)
        return TensorSpec(spec.shape, torch.promote_types(spec.dtype, extra.dtype))

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        if side == "forward":
            return ("add",)
        (op,) = key.ops
        dtype = torch.promote_types(op.input_dtype, op.extra_inputs[0].dtype)
        return ("cast",) if op.input_requires_grad and op.input_dtype is not dtype else ()

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return side == "forward" and quantizes_values(side, key)

    def check_extra(self, main: tuple[int, ...], extra: tuple[int, ...]) -> None:
        """Raise InputError if the shapes of the main and the extra input differ."""
        if extra != main:
            raise InputError(
                f"AddExtraInput got an extra input of shape {tuple(extra)} for a main input of "
                f"shape {tuple(main)}; the two must be equal."
            )

    def stage(
        self, ctx: OperationContext, shape: tuple[int, ...], device: torch.device, extras: Tensors
    ) -> tuple[Stage, torch.Tensor | None]:
        """As in ``Activation``."""
        (extra,) = extras
        self.check_extra(shape, extra.shape)
        return ADD_STAGES[0], extra

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        (extra,) = inputs.extras
        self.check_extra(x.shape, extra.shape)
        # A kernel adds tensors of one dtype.
        y = pointwise.chain(ADD_STAGES, x, (extra,)) if extra.dtype is x.dtype else x + extra
        return write_output(y, inputs.quantizer), ()

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (ctx,), dx = ctxs, dy
        if ctx.input_requires_grad:
            if dx.dtype.itemsize > ctx.input_dtype.itemsize:
                dx = dx.to(ctx.input_dtype)
            dx = write_grad_input(dx, ctx)
        return dx, (), (dy,)


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
        options: dict[str, Any] = {"device": default_device(device), "dtype": default_dtype(dtype)}
        zeros = torch.zeros(self.local_size, **options)
        self.register_parameter("bias", torch.nn.Parameter(zeros))

    @property
    def tensor_parallel_group(self) -> GroupArgument:
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

    def placement_of(self, name: str) -> tuple[int | None, GroupArgument]:
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
        self, ctx: OperationContext, shape: tuple[int, ...], device: torch.device, extras: Tensors
    ) -> tuple[Stage, torch.Tensor | None]:
        """As in ``Activation``."""
        self._check_features(shape)
        return BIAS_STAGES[0], self.addend(ctx)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        self._check_features(input_.shape)
        bias = self.addend(ctx)
        y = pointwise.chain(BIAS_STAGES, cast(input_, bias.dtype), (bias,))
        return write_output(y, next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        """``dy``, and its sum over rows; None if the bias needs no gradient."""
        if not ctx.params_require_grad[0]:
            return write_grad_input(grad_output, ctx), (None,)
        if ctx.grad_input_quantizer is not None:
            dx, (dbias,) = pointwise.chain_backward(
                BIAS_STAGES, grad_output, None, (None,), (True,)
            )
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


class ConstantScaleState(NamedTuple):
    """The scale, as the forward found it."""

    scale: float


class ConstantScale(BasicOperation):
    """Multiply by a constant: ``y = scale * x``."""

    parameter_names = ()
    takes_scalars = True
    saves_input = False
    can_quantize_output = ("forward", "backward")
    backward_attributes = ConstantScaleState

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def extra_repr(self) -> str:
        return f"scale={self.scale}"

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return spec

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ("mul",)

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return quantizes_values(side, key)

    def stage(
        self, ctx: OperationContext, shape: tuple[int, ...], device: torch.device, extras: Tensors
    ) -> tuple[Stage, torch.Tensor | None]:
        """As in ``Activation``."""
        return Stage("constant_scale", (self.scale,)), None

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        return write_output(pointwise.constant_scale(input_, self.scale), next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        state: ConstantScaleState = ctx.state
        return write_grad_input(pointwise.constant_scale(grad_output, state.scale), ctx), ()


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
        self, ctx: OperationContext, shape: tuple[int, ...], device: torch.device, extras: Tensors
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

    def rebuild(self, ctx: OperationContext, input_: Values | None) -> Values:
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
