"""LayerNorm, RMSNorm and L2Normalization."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fuser.errors import InputError
from fuser.op import (
    BasicOperation,
    Grads,
    OperationContext,
    cast,
    default_device,
    default_dtype,
    emit,
    emit_grad,
)
from fuser.plan_key import PlanKey, TensorSpec
from fuser.reference import normalization as reference


class _Normalization(BasicOperation):
    """What LayerNorm and RMSNorm share: gamma, the normalized shape, the compute dtype."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        if not shape or min(shape) <= 0:
            raise InputError(
                f"{type(self).__name__} got normalized_shape {normalized_shape}; every size in "
                "it must be positive."
            )
        self.normalized_shape = shape
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sm_margin = sm_margin
        self.weight: torch.nn.Parameter
        self._add_parameter("weight", device, dtype)

    def _add_parameter(
        self, name: str, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        value = torch.empty(
            self.normalized_shape, device=default_device(device), dtype=default_dtype(dtype)
        )
        self.register_parameter(name, torch.nn.Parameter(value))

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"

    def reset_parameters(self) -> None:
        """Set the gain to one and the bias to zero; makes them first if they are on meta."""
        self._reset(list(self.named_parameters(recurse=False)))

    def _reset(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        for name, parameter in parameters:
            if parameter.is_meta:
                data = torch.empty_like(parameter, device=default_device(None))
                parameter = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
                setattr(self, name, parameter)
            is_gain_of_one = name == "weight" and not self.zero_centered_gamma
            torch.nn.init.constant_(parameter, 1.0 if is_gain_of_one else 0.0)

    def pre_first_fuser_forward(self) -> None:
        # Only what is still on meta: the rest may have come from a checkpoint.
        named = list(self.named_parameters(recurse=False))
        self._reset([(name, parameter) for name, parameter in named if parameter.is_meta])

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        self._check_shape(spec.shape)
        return TensorSpec(spec.shape, autocast or self.weight.dtype)

    def saved_bytes(self, spec: TensorSpec) -> int:
        rows = math.prod(spec.shape) // math.prod(self.normalized_shape)
        return 4 * rows * self.num_statistics

    emits_quantized = ("forward", "backward")
    num_statistics = 1

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as ``[rows, elements of the normalized shape]``."""
        self._check_shape(x.shape)
        return x.reshape(-1, math.prod(self.normalized_shape))

    def gain(self, weight: torch.Tensor) -> torch.Tensor:
        """The fp32 factor of the normalized input, flat."""
        gain = weight.float().flatten()
        return gain + 1 if self.zero_centered_gamma else gain

    def input_grad_and_param_grads(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        """The gradient of the input in its dtype, and those of the parameters; as wanted."""
        raise NotImplementedError

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        dx, param_grads = self.input_grad_and_param_grads(ctx, grad_output)
        return None if dx is None else emit_grad(dx, ctx), param_grads

    def _param_grad(
        self, grad: torch.Tensor | None, parameter: torch.Tensor
    ) -> torch.Tensor | None:
        if grad is None or not parameter.requires_grad:
            return None
        return grad.view(self.normalized_shape).to(parameter.dtype)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if tuple(shape[-len(self.normalized_shape) :]) != self.normalized_shape:
            raise InputError(
                f"{type(self).__name__}({self.normalized_shape}) got an input of shape "
                f"{tuple(shape)}; its last dimensions must be {self.normalized_shape}."
            )


class LayerNorm(_Normalization):
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` (Ba et al., 2016).

    Statistics are fp32, over the last dimensions.

    Parameters
    ----------
    normalized_shape
        The last dimensions of the input, an int for one.
    eps
        Added to the variance.
    device, dtype
        Of gamma (``weight``) and beta (``bias``).
    zero_centered_gamma
        The gain is ``1 + gamma``, and gamma starts at zero.
    sm_margin
        Multiprocessors a GPU kernel leaves free. Accepted for compatibility.
    """

    num_statistics = 2

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps=eps,
            device=device,
            dtype=dtype,
            zero_centered_gamma=zero_centered_gamma,
            sm_margin=sm_margin,
        )
        self.bias: torch.nn.Parameter
        self._add_parameter("bias", device, dtype)
        if not self.weight.is_meta:
            self.reset_parameters()

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ("layernorm",) if side == "forward" else ("layernorm_backward",)

    def normalize(self, ctx: OperationContext, input_: torch.Tensor) -> torch.Tensor:
        """The output; keeps what backward needs in ``ctx``."""
        x = self.rows(input_)
        weight, bias = self.weight, self.bias
        y, mean, rstd = reference.layernorm(
            x, self.gain(weight), bias.flatten(), self.eps, ctx.autocast_dtype or weight.dtype
        )
        if ctx.requires_grad:
            ctx.save_for_backward(x, weight, mean, rstd)
        return y.view(input_.shape)

    def input_grad_and_param_grads(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        x, weight, mean, rstd = ctx.saved_tensors
        wanted = (ctx.input_requires_grad, weight.requires_grad, self.bias.requires_grad)
        dx, d_gain, d_bias = reference.layernorm_backward(
            grad_output.reshape(x.shape), x, self.gain(weight), mean, rstd, wanted
        )
        grads = (self._param_grad(d_gain, weight), self._param_grad(d_bias, self.bias))
        return None if dx is None else dx.view(grad_output.shape), grads

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> torch.Tensor:
        return emit(self.normalize(ctx, input_), next_op_input_quantizer)


class RMSNorm(_Normalization):
    """``x / sqrt(mean(x^2) + eps) * gamma`` (Zhang and Sennrich, 2019).

    Statistics are fp32, over the last dimensions. Parameters as in
    :class:`LayerNorm`; there is no beta.
    """

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps=eps,
            device=device,
            dtype=dtype,
            zero_centered_gamma=zero_centered_gamma,
            sm_margin=sm_margin,
        )
        if not self.weight.is_meta:
            self.reset_parameters()

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ("rmsnorm",) if side == "forward" else ("rmsnorm_backward",)

    def normalize(self, ctx: OperationContext, input_: torch.Tensor) -> torch.Tensor:
        """The output; keeps what backward needs in ``ctx``."""
        x = self.rows(input_)
        weight = self.weight
        y, rstd = reference.rmsnorm(
            x, self.gain(weight), self.eps, ctx.autocast_dtype or weight.dtype
        )
        if ctx.requires_grad:
            ctx.save_for_backward(x, weight, rstd)
        return y.view(input_.shape)

    def input_grad_and_param_grads(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        x, weight, rstd = ctx.saved_tensors
        wanted = (ctx.input_requires_grad, weight.requires_grad)
        dx, d_gain = reference.rmsnorm_backward(
            grad_output.reshape(x.shape), x, self.gain(weight), rstd, wanted
        )
        grads = (self._param_grad(d_gain, weight),)
        return None if dx is None else dx.view(grad_output.shape), grads

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> torch.Tensor:
        return emit(self.normalize(ctx, input_), next_op_input_quantizer)


class L2Normalization(BasicOperation):
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, in fp32 inside.

    Parameters
    ----------
    eps
        Added to the sum of squares.
    seq_length, micro_batch_size
        Accepted for compatibility.
    """

    emits_quantized = ("forward", "backward")

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps

    def extra_repr(self) -> str:
        return f"eps={self.eps}"

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return TensorSpec(spec.shape, autocast or spec.dtype)

    def saved_bytes(self, spec: TensorSpec) -> int:
        return 4 * math.prod(spec.shape[:-1])

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ("l2norm",) if side == "forward" else ("l2norm_backward",)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> torch.Tensor:
        x = cast(input_, ctx.autocast_dtype or input_.dtype)
        y, rnorm = reference.l2norm(x, self.eps)
        if ctx.requires_grad:
            ctx.save_for_backward(x, rnorm)
        return emit(y, next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        x, rnorm = ctx.saved_tensors
        return emit_grad(reference.l2norm_backward(grad_output, x, rnorm), ctx), ()
