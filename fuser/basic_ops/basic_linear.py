"""BasicLinear: y = x @ weight.T."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import gemm
from fuser.errors import InputError, StateError
from fuser.op import (
    BasicOperation,
    Grads,
    OperationContext,
    cast,
    default_device,
    default_dtype,
)
from fuser.plan_key import PlanKey, TensorSpec
from fuser.precision import current_recipe, initialised_weight
from fuser.tensors import QuantizedTensor, Quantizer


class BasicLinear(BasicOperation):
    """Apply a linear transformation without bias: ``y = x @ weight.T``.

    Parameters
    ----------
    in_features, out_features
        Last dimension of the input and of the output.
    device, dtype
        Of the weight, shape ``[out_features, in_features]``. On the meta
        device the weight is made at the first forward, on the default device.
    tensor_parallel_mode, tensor_parallel_group, sequence_parallel
        Sharding over a process group. This version runs on one rank.
    rng_state_tracker_function
        Returns an object whose ``fork()`` is the context in which the weight
        is initialised.
    accumulate_into_main_grad
        Add the weight gradient to ``weight.main_grad`` instead of returning it.

    Raises
    ------
    InputError
        On a feature size that is not positive, or an unknown parallel mode.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        if in_features <= 0 or out_features <= 0:
            raise InputError(
                f"BasicLinear got in_features={in_features} and out_features={out_features}; "
                "both must be positive."
            )
        _check_parallelism(tensor_parallel_mode, tensor_parallel_group)
        self.in_features = in_features
        self.out_features = out_features
        self.tensor_parallel_mode = tensor_parallel_mode
        self.tensor_parallel_group = tensor_parallel_group
        self.sequence_parallel = sequence_parallel and tensor_parallel_mode is not None
        self._rng_state_tracker_function = rng_state_tracker_function
        self._accumulate_into_main_grad = accumulate_into_main_grad
        self.weight: torch.nn.Parameter
        self.register_parameter(
            "weight",
            torch.nn.Parameter(
                torch.empty(
                    out_features,
                    in_features,
                    device=default_device(device),
                    dtype=default_dtype(dtype),
                )
            ),
        )
        if not self.weight.is_meta:
            self.reset_parameters()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def reset_parameters(self) -> None:
        """Initialise the weight as torch.nn.Linear does; makes it first if it is on meta."""
        if self.weight.is_meta:
            data = torch.empty_like(self.weight, device=default_device(None))
            self.weight = torch.nn.Parameter(data, requires_grad=self.weight.requires_grad)
        tracker = self._rng_state_tracker_function
        with tracker().fork() if tracker is not None else contextlib.nullcontext():
            torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.weight = initialised_weight(self.weight)

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            self.reset_parameters()

    # -- what the planner asks ------------------------------------------------

    @property
    def saves_input(self) -> bool:  # type: ignore[override]
        """The weight gradient reads the input."""
        return self.weight.requires_grad

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        self._check_features(spec.shape)
        return TensorSpec((*spec.shape[:-1], self.out_features), autocast or self.weight.dtype)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        is_quantized = key.recipe is not None
        if side == "forward":
            return ("quantize", "mm (emulated)") if is_quantized else ("mm",)
        (op,) = key.ops
        wanted = (op.input_requires_grad, op.params[0].requires_grad)
        names = tuple(
            name for name, want in zip(("dgrad mm", "wgrad mm"), wanted, strict=True) if want
        )
        if key.recipe is None or key.recipe.backward_override is not None:
            return names
        return ("quantize", *(f"{name} (emulated)" for name in names))

    # -- what fused ops ask ---------------------------------------------------

    def epilogue_refusal(
        self, side: str, key: PlanKey, bias: torch.Tensor | None = None
    ) -> str | None:
        """Why nothing can ride on the GEMMs of ``side``, or that bias cannot; None if it can."""
        if key.recipe is not None and (side == "forward" or key.recipe.backward_override is None):
            return "quantized GEMMs are emulated here, and have no epilogue."
        if bias is None:
            return None
        if key.autocast_dtype is None and self.weight.dtype != bias.dtype:
            return f"the weight is {self.weight.dtype} and the bias {bias.dtype}."
        if bias.numel() != self.out_features:
            return f"the linear has {self.out_features} outputs and the bias {bias.numel()}."
        return None

    def operands(
        self, ctx: OperationContext, input_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and weight as the forward GEMM wants them, in the compute dtype.

        Keeps of them in ``ctx`` what the wanted gradients need.
        """
        # Not self.weight: torch.nn.Module.__getattr__ costs 0.4 us.
        x, weight = input_, self._parameters["weight"]
        assert weight is not None
        wants_grad = weight.requires_grad
        if ctx.autocast_dtype is not None:
            weight = cast(weight, ctx.autocast_dtype)  # type: ignore[assignment]
        if x.dtype is not weight.dtype:
            x = x.to(weight.dtype)
        if ctx.is_quantized:
            self._check_features(input_.shape)
            return self._quantized_operands(ctx, x, weight, wants_grad)
        if ctx.requires_grad:
            ctx.to_save = (x if wants_grad else None, weight if ctx.input_requires_grad else None)
        return x, weight

    def quantizer_roles(self, mode: str) -> tuple[str, ...]:
        return ("input", "weight") if mode == "forward" else ("grad_output",)

    def get_input_quantizer(self) -> Quantizer | None:
        """None where backward wants the original, which a quantizing producer would hide."""
        recipe = current_recipe()
        if recipe is not None and recipe.backward_override == "high_precision":
            return None
        return super().get_input_quantizer()

    def get_grad_output_quantizer(self) -> Quantizer | None:
        recipe = current_recipe()
        if recipe is not None and recipe.backward_override is not None:
            return None
        return super().get_grad_output_quantizer()

    def _quantized_operands(
        self, ctx: OperationContext, x: torch.Tensor, weight: torch.Tensor, wants_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operands of the emulated GEMM: quantized, and dequantized again."""
        input_quantizer = self.get_quantizer("forward", 0)
        weight_quantizer = self.get_quantizer("forward", 1)
        assert input_quantizer is not None
        assert weight_quantizer is not None
        # Without an override backward reads columnwise copies.
        quantized_backward = ctx.requires_grad and ctx.backward_override is None
        wants_wgrad = ctx.requires_grad and wants_grad
        wants_dgrad = ctx.requires_grad and ctx.input_requires_grad
        qx = _quantized(x, input_quantizer, quantized_backward and wants_wgrad)
        qw = _quantized(weight, weight_quantizer, quantized_backward and wants_dgrad)
        if quantized_backward:
            ctx.grad_output_quantizer = self.get_quantizer("backward", 0)  # type: ignore[attr-defined]
        if ctx.requires_grad:
            which = {None: "columnwise", "dequantized": "rowwise"}.get(ctx.backward_override)
            kept_x, kept_weight = (x, weight) if which is None else (qx, qw)
            ctx.to_save = (
                _only(kept_x, which) if wants_wgrad else None,
                _only(kept_weight, which) if wants_dgrad else None,
            )
        return qx.only("rowwise").dequantize(), qw.only("rowwise").dequantize()

    def _accumulate(self, dy: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor | None:
        """Add the weight gradient to ``main_grad``; returns what autograd is to see of it."""
        weight = self.weight
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise StateError(
                "BasicLinear accumulates its weight gradient into weight.main_grad, "
                "but the weight has no main_grad."
            )
        gemm.wgrad_accumulate(main_grad, dy, x, scale)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # Megatron-LM's hooks fire on a gradient; this one carries no values
        # unless zero_out_wgrad asks for zeros.
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight)

    # -- running --------------------------------------------------------------

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> torch.Tensor:
        x, weight = self.operands(ctx, input_)
        return gemm.linear(x, weight)

    def op_backward(
        self,
        ctx: OperationContext,
        grad_output: torch.Tensor,
        scale: float = 1.0,
        addend: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, Grads]:
        """``scale * dy @ weight (+ addend)``, and ``scale * dy.T @ x`` for the weight.

        Each is None where it is not wanted; the weight's as well where it went
        into ``main_grad``.
        """
        x, weight = ctx.saved_tensors
        if ctx.is_quantized:
            return self._quantized_backward(ctx, grad_output, x, weight, scale, addend)
        dy, dtype = grad_output, (weight if x is None else x).dtype
        if dy.dtype is not dtype:
            dy = dy.to(dtype)
        grad_input = grad_weight = None
        if weight is not None:
            grad_input = gemm.dgrad(dy, weight, scale, addend)
        if x is not None:
            accumulates = self._accumulate_into_main_grad
            grad_weight = (self._accumulate if accumulates else gemm.wgrad)(dy, x, scale)
        return grad_input, (grad_weight,)

    def _quantized_backward(
        self,
        ctx: OperationContext,
        grad_output: torch.Tensor,
        x: torch.Tensor | None,
        weight: torch.Tensor | None,
        scale: float,
        addend: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, Grads]:
        """:meth:`op_backward` of a forward under a recipe."""
        saved = weight if x is None else x
        assert saved is not None
        if ctx.backward_override != "high_precision" and not isinstance(saved, QuantizedTensor):
            raise StateError(
                "BasicLinear ran forward under a recipe, and activation checkpointing recomputed "
                "it outside one: enter fuser.autocast inside the checkpointed function."
            )
        dy_rows = dy_columns = cast(_plain(grad_output), saved.dtype)
        if ctx.backward_override is None:
            quantizer = ctx.grad_output_quantizer.with_usage(  # type: ignore[attr-defined]
                rowwise=weight is not None, columnwise=x is not None
            )
            dy = grad_output
            if not isinstance(dy, QuantizedTensor):
                dy = quantizer(dy_rows)
            if weight is not None:
                dy_rows = dy.only("rowwise").dequantize(dtype=saved.dtype)
            if x is not None:
                dy_columns = dy.only("columnwise").dequantize(dtype=saved.dtype)
        grad_input = grad_weight = None
        if weight is not None:
            grad_input = gemm.dgrad(dy_rows, _plain(weight), scale, addend)
        if x is not None:
            accumulates = self._accumulate_into_main_grad
            grad_weight = (self._accumulate if accumulates else gemm.wgrad)(
                dy_columns, _plain(x), scale
            )
        return grad_input, (grad_weight,)

    def _check_features(self, shape: tuple[int, ...]) -> None:
        if shape[-1] != self.in_features:
            raise InputError(
                f"BasicLinear({self.in_features}, {self.out_features}) got an input of shape "
                f"{tuple(shape)}; its last dimension must be {self.in_features}."
            )


def _quantized(tensor: torch.Tensor, quantizer: Quantizer, columnwise: bool) -> QuantizedTensor:
    """``tensor`` with a rowwise copy, and a columnwise one if asked; as it is if quantized."""
    if isinstance(tensor, QuantizedTensor):
        return tensor
    return quantizer.with_usage(rowwise=True, columnwise=columnwise)(tensor)


def _only(tensor: torch.Tensor, which: str | None) -> torch.Tensor:
    """The named copy of a quantized tensor alone; any tensor as it is where none is named."""
    if which is None or not isinstance(tensor, QuantizedTensor):
        return tensor
    return tensor.only(which)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def _check_parallelism(mode: str | None, group: Any | None) -> None:
    if mode not in (None, "column", "row"):
        raise InputError(f"tensor_parallel_mode is {mode!r}; it is None, 'column' or 'row'.")
    if mode is None or not torch.distributed.is_initialized():
        return
    ranks = torch.distributed.get_world_size(group)
    if ranks > 1:
        raise InputError(
            f"BasicLinear was asked for {mode} tensor parallelism over {ranks} ranks; "
            "this version of fuser runs on one."
        )
