"""Scaled activations: each row is multiplied by an extra input, as in mixtures of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fuser.basic_ops.activation import ActivationState, input_to_save, rounded_input
from fuser.chain import Stage
from fuser.errors import InputError, StateError
from fuser.functional import pointwise
from fuser.op import (
    Autocast,
    BasicOperation,
    Contexts,
    OperationContext,
    Specs,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    Values,
    cast,
    quantizes_values,
    write_grad_input,
    write_output,
)
from fuser.specs import PlanKey, QuantSpec, TensorSpec
from fuser.tensors import QuantizedTensor


class ScaledActivationSaved(NamedTuple):
    """What a scaled activation saves."""

    x: torch.Tensor
    scales: torch.Tensor


class ScaledActivation(BasicOperation):
    """Base class of the scaled activations: ``f(x) * scales[..., None]``.

    The extra input ``scales`` has the shape of x without its last dimension,
    and receives a gradient.

    Parameters
    ----------
    function
        The activation that is scaled.
    activation_recompute_in_mlp
        Whether :class:`~fuser.fused_ops.GroupedMLP` computes this activation again in backward, in
        place of saving it. Under delayed scaling it is saved all the same, and the plan says so.

    Raises
    ------
    StateError
        If it is to be computed again, in training, and no ``GroupedMLP`` runs it, as in te.ops.
    """

    parameter_names = ()
    num_extra_inputs = 1
    takes_floating_extras = True
    can_quantize_output = ("forward", "backward")
    rebuilds_output = True
    can_round_input = True
    stores_rebuilt_output = True
    backward_attributes = ActivationState

    def __init__(self, function: Stage, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.function = function
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def output_spec(self, spec: TensorSpec, extras: Specs, autocast: Autocast) -> TensorSpec:
        (scales,) = extras
        self._check_scales(spec.shape, scales.shape)
        features = self.function.output_features(spec.shape[-1])
        return TensorSpec((*spec.shape[:-1], features), autocast or spec.dtype)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        name = f"scaled_{self.function.name}"
        return (name if side == "forward" else f"{name}_backward",)

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return quantizes_values(side, key)

    def kept_input(self, key: PlanKey) -> QuantSpec | None:
        return rounded_input(key)

    def stage(
        self, ctx: OperationContext, shape: tuple[int, ...], device: torch.device, extras: Tensors
    ) -> tuple[Stage, torch.Tensor | None]:
        """As in ``Activation``."""
        (scales,) = extras
        self._check_scales(shape, scales.shape)
        self.function.output_features(shape[-1])
        if self.activation_recompute_in_mlp and ctx.requires_grad:
            raise self._unfused()
        return self.function.scaled, scales

    def rebuild(self, ctx: OperationContext, input_: Values | None) -> Values:
        x, scales = self.saved(ctx)
        return pointwise.chain((ctx.state.function.scaled,), x, (scales,))

    def saved(self, ctx: OperationContext) -> ScaledActivationSaved:
        """What the forward saved; its input rounded if it was saved quantized."""
        x, scales = ScaledActivationSaved(*ctx.saved_tensors)
        if isinstance(x, QuantizedTensor):  # once, as in `Activation.saved_input`
            x = x.dequantize()
        ctx.saved_tensors = saved = ScaledActivationSaved(x, scales)
        return saved

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        (ctx,), (scales,) = ctxs, inputs.extras
        self._check_scales(x.shape, scales.shape)
        if self.activation_recompute_in_mlp and ctx.requires_grad:
            raise self._unfused()
        x = cast(x, ctx.autocast_dtype or x.dtype)
        if ctx.requires_grad:
            ctx.to_save = ScaledActivationSaved(input_to_save(ctx, x), scales)
        y = pointwise.chain((self.function.scaled,), x, (scales,))
        return write_output(y, inputs.quantizer), ()

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (ctx,) = ctxs
        x, scales = self.saved(ctx)
        state: ActivationState = ctx.state
        stages, needed = (state.function.scaled,), ctx.extra_inputs_require_grad
        dx, dscales = pointwise.chain_backward(
            stages, dy, x, (scales,), needed, output=ctx.rebuilt_output
        )
        return write_grad_input(dx, ctx), (), dscales

    def _unfused(self) -> StateError:
        return StateError(
            f"{type(self).__name__}(activation_recompute_in_mlp=True) trains only inside the "
            "fusion GroupedMLP, which computes it again in backward; here it runs without. "
            "print(model.plan(x, ...)) says why, or leave the argument out."
        )

    def _check_scales(self, x: tuple[int, ...], scales: tuple[int, ...]) -> None:
        if scales != x[:-1]:
            raise InputError(
                f"{type(self).__name__} got scales of shape {tuple(scales)} for an input of shape "
                f"{tuple(x)}; it takes one scale per row, {tuple(x[:-1])}."
            )


class ScaledSReLU(ScaledActivation):
    """``max(x, 0)^2 * scales``."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(Stage("srelu"), activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledTanhSReLU(ScaledActivation):
    """``(s tanh(max(x, 0) / s))^2 * scales``: a squared ReLU below a soft bound of ``s^2``.

    Parameters
    ----------
    tanh_clamp_scale
        ``s``; finite and positive, else InputError.
    """

    def __init__(
        self, *, tanh_clamp_scale: float, activation_recompute_in_mlp: bool = False
    ) -> None:
        stage = Stage("tanh_srelu", (float(tanh_clamp_scale),))
        super().__init__(stage, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.tanh_clamp_scale = float(tanh_clamp_scale)


class ScaledSwiGLU(ScaledActivation):
    """``silu(a) b * scales[..., None]``.

    The gate ``a`` is the first half of the last dimension of x, and the linear part ``b`` the
    second. The extra input ``scales`` has the shape of x without its last dimension.

    Parameters
    ----------
    glu_interleave_size
        Gate and linear part alternate in blocks of this many columns instead, the gate first.
    activation_recompute_in_mlp
        Whether :class:`~fuser.fused_ops.GroupedMLP` computes the activation again in backward, in
        place of saving it.
    """

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        stage = Stage("swiglu", interleave=glu_interleave_size)
        super().__init__(stage, activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledSiTUGLU(ScaledActivation):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2) * scales[..., None]``.

    The gate ``a`` is the first half of the last dimension of x, and the linear part ``b`` the
    second. The extra input ``scales`` has the shape of x without its last dimension.

    Parameters
    ----------
    glu_interleave_size
        Gate and linear part alternate in blocks of this many columns instead, the gate first.
    activation_recompute_in_mlp
        Whether :class:`~fuser.fused_ops.GroupedMLP` computes the activation again in backward, in
        place of saving it.
    beta1, beta2
        Soft clipping bounds; finite and positive, else InputError.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        stage = Stage("situglu", (beta1, beta2), glu_interleave_size)
        super().__init__(stage, activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledClampedQGeGLU(ScaledActivation):
    """``ClampedSwiGLU(x) * scales[..., None]``, whose formula that op has.

    The gate ``a`` is the first half of the last dimension of x, and the linear part ``b`` the
    second. The extra input ``scales`` has the shape of x without its last dimension.

    Parameters
    ----------
    glu_interleave_size
        Gate and linear part alternate in blocks of this many columns instead, the gate first.
    activation_recompute_in_mlp
        Whether :class:`~fuser.fused_ops.GroupedMLP` computes the activation again in backward, in
        place of saving it.
    limit, alpha, glu_linear_offset
        The scalars of the formula; ``limit`` is positive.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        scalars = (limit, alpha, glu_linear_offset)
        stage = Stage("clamped_swiglu", scalars, glu_interleave_size)
        super().__init__(stage, activation_recompute_in_mlp=activation_recompute_in_mlp)
