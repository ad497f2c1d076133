"""Activations and gated linear units; and those whose rows are scaled, as experts have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch

from fuser.chain import Stage
from fuser.errors import InputError, StateError
from fuser.functional import pointwise
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
    quantizes_values,
    write_grad_input,
    write_output,
)
from fuser.specs import PlanKey, QuantSpec, TensorSpec
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    QuantizedTensor,
    Quantizer,
)

__all__ = [
    "Activation",
    "ClampedSwiGLU",
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]

ActivationName = Literal[
    "clamped_swiglu",
    "clampedswiglu",
    "geglu",
    "gelu",
    "glu",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "silu",
    "situglu",
    "sreglu",
    "srelu",
    "swiglu",
]
"""The activation of a layer: the name of a class in lower case."""
Approximation = Literal["tanh", "none"]

# The quantizer of a cached input: E4M3, one scale per tensor, without a transposed copy.
INPUT_CACHE = Float8CurrentScalingQuantizer(columnwise=False)
# The quantizer of an input that a plan rounds: E4M3, one scale for 128 elements of a row.
ROUNDED_INPUT = Float8BlockQuantizer(columnwise=False, block_scaling_dim=1)


def input_to_save(ctx: OperationContext, x: torch.Tensor) -> torch.Tensor:
    """The main input as the plan wants an activation to save it: in FP8, or ``x`` itself."""
    return ROUNDED_INPUT(x) if ctx.rounds_input else x


class ActivationSaved(NamedTuple):
    """What an activation saves."""

    x: torch.Tensor


class ActivationState(NamedTuple):
    """Attributes of an activation, as its forward found them."""

    function: Stage


class _ActivationBase(BasicOperation):
    """Base class of the ops that compute an activation, perhaps with scaled rows."""

    parameter_names = ()
    can_quantize_output = ("forward", "backward")
    can_round_input = True
    stores_rebuilt_output = True
    backward_attributes = ActivationState
    function: Stage
    """The function; an attribute of the instance if the formula has scalars."""

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return quantizes_values(side, key)

    def kept_input(self, key: PlanKey) -> QuantSpec | None:
        """How :func:`input_to_save` quantizes; None if it does not."""
        return QuantSpec(ROUNDED_INPUT.format, True, False) if key.ops[0].rounds_input else None


class Activation(_ActivationBase):
    """Base class of the activations: a function of each element, or of each gate pair.

    It computes in fp32 and rounds once to the compute dtype. It saves only the
    input, from which backward computes again.

    Parameters
    ----------
    cache_quantized_input
        Save the input for backward in E4M3 with one scale, one byte per element;
        backward then computes with the rounded values.
    """

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def extra_repr(self) -> str:
        parts = [f"{scalar:g}" for scalar in self.function.scalars]
        if self.function.interleave is not None:
            parts.append(f"glu_interleave_size={self.function.interleave}")
        return ", ".join(parts)

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        features = self.function.output_features(spec.shape[-1])
        return TensorSpec((*spec.shape[:-1], features), autocast or spec.dtype)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        if side == "backward":
            return (f"{self.function.name}_backward",)
        caches = self.cache_quantized_input and key.ops[0].requires_grad
        return ("quantize", self.function.name) if caches else (self.function.name,)

    @property
    def takes_scalars(self) -> bool:  # type: ignore[override]
        """True unless the function is gated, because a gate halves the last dimension."""
        return not self.function.is_gated

    @property
    def saves_input(self) -> bool:  # type: ignore[override]
        """True unless the op saves an E4M3 copy instead."""
        return not self.cache_quantized_input

    @property
    def rebuilds_output(self) -> bool:  # type: ignore[override]
        """True unless the saved input is rounded."""
        return self.saves_input

    def rebuild(self, ctx: OperationContext, input_: Values | None) -> Values:
        x = self.saved_input(ctx)
        state: ActivationState = ctx.state
        return pointwise.chain((state.function,), x, is_plain=not ctx.has_recipe)

    def saved_bytes(self, spec: TensorSpec) -> int:
        return INPUT_CACHE.format.nbytes(spec.shape, ("rowwise",)) if not self.saves_input else 0

    def run(self, ctx: OperationContext, input_: torch.Tensor) -> Values:
        """The output. Saves the input for backward in ``ctx``."""
        x = input_ if ctx.autocast_dtype is None else cast(input_, ctx.autocast_dtype)
        if ctx.requires_grad:
            saved: torch.Tensor = x
            if self.cache_quantized_input:
                saved = INPUT_CACHE(x)
            elif ctx.rounds_input:
                saved = ROUNDED_INPUT(x)
            ctx.to_save = ActivationSaved(saved)
        return pointwise.chain((self.function,), x, is_plain=not ctx.has_recipe)

    def stage(
        self, ctx: OperationContext, shape: tuple[int, ...], device: torch.device, extras: Tensors
    ) -> tuple[Stage, torch.Tensor | None]:
        """This op as a stage of a chain, and its operand, for an input of ``shape``."""
        self.function.output_features(shape[-1])
        return self.function, None

    def saved_input(self, ctx: OperationContext) -> torch.Tensor:
        """The input of the forward, rounded if it was saved quantized."""
        x: torch.Tensor
        (x,) = ctx.saved_tensors  # of ActivationSaved
        if isinstance(x, QuantizedTensor):  # once: one kernel may compute from it what two ask for
            x = x.dequantize()
            ctx.saved_tensors = ActivationSaved(x)
        return x

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        return write_output(self.run(ctx, input_), next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        state: ActivationState = ctx.state
        dx, _ = pointwise.chain_backward(
            *((state.function,), grad_output, self.saved_input(ctx), (None,), (False,)),
            is_plain=not ctx.has_recipe,
            output=ctx.rebuilt_output,
        )
        return write_grad_input(dx, ctx), ()


class _TwoForms(Activation):
    """Base class of GELU and GEGLU: a function of the library's, or its erf form."""

    def __init__(
        self, approximate: Approximation = "tanh", *, cache_quantized_input: bool = False
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        if approximate not in get_args(Approximation):
            raise InputError(
                f"{type(self).__name__} got approximate={approximate!r}; it is 'tanh', the default "
                "as in te.ops, or 'none' for the erf form, the default of torch.nn.GELU."
            )
        if approximate == "none":
            self.function = Stage(f"{self.function.name}_erf")

    @property
    def approximate(self) -> Approximation:
        """``"tanh"`` or ``"none"``, as it was given."""
        return "none" if self.function.name.endswith("_erf") else "tanh"

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class GELU(_TwoForms):
    """Gaussian error linear unit (Hendrycks and Gimpel, 2016), ``x Phi(x)``, in one of two forms.

    Parameters
    ----------
    approximate
        ``"tanh"``: ``0.5 x (1 + tanh(0.79788456 (x + 0.044715 x^3)))``, as ``te.ops.GELU``. A plan
        calls its kernel ``gelu``. ``"none"``: ``0.5 x (1 + erf(x / sqrt(2)))``, as
        ``torch.nn.GELU()`` and most checkpoints of BERT, ViT and Whisper. A plan calls its kernel
        ``gelu_erf``. The two differ by up to 4.7e-4.
    cache_quantized_input
        As in :class:`Activation`.

    Raises
    ------
    InputError
        If ``approximate`` is anything else.
    """

    function = Stage("gelu")


class QGELU(Activation):
    """Sigmoid-approximated GELU: ``x sigmoid(1.702 x)``."""

    function = Stage("qgelu")


class ReLU(Activation):
    """``max(x, 0)``."""

    function = Stage("relu")


class SReLU(Activation):
    """Squared ReLU: ``max(x, 0)^2`` (So et al., 2021)."""

    function = Stage("srelu")


class SiLU(Activation):
    """``x sigmoid(x)``."""

    function = Stage("silu")


class GLU(Activation):
    """``sigmoid(a) b``: the gate ``a`` is the first half of the last dimension, ``b`` the second.

    The gated linear unit of Dauphin et al. (2016).
    """

    function = Stage("glu")


class GEGLU(_TwoForms):
    """``gelu(a) b`` (Shazeer, 2020).

    The gate ``a`` is the first half of the last dimension, and the linear part ``b`` the second.

    Parameters
    ----------
    approximate
        ``"tanh"``, kernel ``geglu``, or ``"none"``, the erf form, kernel ``geglu_erf``.
    cache_quantized_input
        Save the input for backward in E4M3, one byte per element, as :class:`Activation` does.
    """

    function = Stage("geglu")


class QGEGLU(Activation):
    """``qgelu(a) b``; the gate ``a`` is the first half of the last dimension, ``b`` the second."""

    function = Stage("qgeglu")


class ReGLU(Activation):
    """``relu(a) b`` (Shazeer, 2020).

    The gate ``a`` is the first half of the last dimension, and the linear part ``b`` the second.
    """

    function = Stage("reglu")


class SReGLU(Activation):
    """``max(a, 0)^2 b``.

    The gate ``a`` is the first half of the last dimension, and the linear part ``b`` the second.
    """

    function = Stage("sreglu")


class SwiGLU(Activation):
    """``silu(a) b`` (Shazeer, 2020).

    The gate ``a`` is the first half of the last dimension, and the linear part ``b`` the second.

    Parameters
    ----------
    cache_quantized_input
        Save the input for backward in E4M3, one byte per element, as :class:`Activation` does.
    glu_interleave_size
        Gate and linear part alternate in blocks of this many columns instead, the gate first.
    """

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.function = Stage("swiglu", interleave=glu_interleave_size)


class SiTUGLU(Activation):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``.

    The gate ``a`` is the first half of the last dimension, and the linear part ``b`` the second.

    Parameters
    ----------
    beta1, beta2
        Soft clipping bounds; finite and positive, else InputError.
    glu_interleave_size
        Gate and linear part alternate in blocks of this many columns instead, the gate first.
    """

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.function = Stage("situglu", (beta1, beta2), glu_interleave_size)


class ClampedSwiGLU(Activation):
    """``g sigmoid(alpha g) (clamp(b, -limit, limit) + offset)`` with ``g = min(a, limit)``.

    The gate ``a`` is the first half of the last dimension, and the linear part ``b`` the second.
    The gradient is zero where a value was clamped.

    Parameters
    ----------
    limit, alpha, glu_linear_offset
        The scalars of the formula; ``limit`` is positive.
    glu_interleave_size
        Gate and linear part alternate in blocks of this many columns instead, the gate first.
    """

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        scalars = (limit, alpha, glu_linear_offset)
        self.function = Stage("clamped_swiglu", scalars, glu_interleave_size)


class ScaledActivationSaved(NamedTuple):
    """What a scaled activation saves."""

    x: torch.Tensor
    scales: torch.Tensor


class ScaledActivation(_ActivationBase):
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

    num_extra_inputs = 1
    takes_floating_extras = True
    rebuilds_output = True

    def __init__(self, function: Stage, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.function = function
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        (scales,) = extras
        self._check_scales(spec.shape, scales.shape)
        features = self.function.output_features(spec.shape[-1])
        return TensorSpec((*spec.shape[:-1], features), autocast or spec.dtype)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        name = f"scaled_{self.function.name}"
        return (name if side == "forward" else f"{name}_backward",)

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
