"""LayerNorm, RMSNorm, L2Normalization and AdaptiveLayerNorm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch

from fuser.basic_ops.linear_operands import plain
from fuser.cuda.norm_common import takes, takes_addend
from fuser.errors import InputError
from fuser.functional import normalization as functional
from fuser.functional.lazy import materialize
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
from fuser.reference import normalization as reference
from fuser.specs import PlanKey, TensorSpec
from fuser.tensors import Quantizer


def kernel_names(norm: BasicOperation, name: str, side: str, key: PlanKey) -> tuple[str, ...]:
    """The kernel ``name`` of ``norm``; if it quantizes, first one for the statistics of rows."""
    (op_key,) = key.ops
    spec = op_key.output if side == "forward" else op_key.grad_input
    if spec is None or not norm.fuses_quantize(side, key):
        return (name,)
    return (f"{name}_rows", name)


class LayerNormSaved(NamedTuple):
    """What a LayerNorm saves; x is the sum if a fusion added an extra input."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


class RMSNormSaved(NamedTuple):
    """What an RMSNorm saves; x is the sum if a fusion added an extra input."""

    x: torch.Tensor
    weight: torch.Tensor
    rstd: torch.Tensor


class L2NormalizationSaved(NamedTuple):
    """What an L2Normalization saves."""

    x: torch.Tensor
    rnorm: torch.Tensor


class L2NormalizationState(NamedTuple):
    """Attributes of an L2Normalization, as the forward found them."""

    eps: float


class NormState(NamedTuple):
    """Attributes of a norm, as the forward found them."""

    zero_centered_gamma: bool
    eps: float


class _Normalization(BasicOperation):
    """A norm with parameters: LayerNorm, or RMSNorm, which has no mean and no beta."""

    parameter_names: tuple[str, ...] = ("weight",)
    can_quantize_output = ("forward", "backward")
    stores_rebuilt_output = True
    backward_attributes = NormState
    grad_input_dtype = "input"
    saved: ClassVar[type[LayerNormSaved] | type[RMSNormSaved]]
    """What the norm saves: its input, its parameters and the statistics."""
    num_statistics: ClassVar[int]
    """Number of statistics of a row: 1 for ``rstd`` alone, 2 with the mean before it."""

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
        name = type(self).__name__
        if isinstance(normalized_shape, str) or not isinstance(normalized_shape, Iterable):
            check_sizes(name, normalized_shape=normalized_shape)
            normalized_shape = (normalized_shape,)
        shape = tuple(normalized_shape)
        if not shape:
            raise InputError(f"{name} got normalized_shape {shape}; it needs at least one size.")
        check_sizes(name, **{f"normalized_shape[{i}]": size for i, size in enumerate(shape)})
        self.normalized_shape = shape
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sm_margin = sm_margin
        self.weight: torch.nn.Parameter
        for name in self.parameter_names:
            value = torch.empty(shape, device=default_device(device), dtype=default_dtype(dtype))
            self.register_parameter(name, torch.nn.Parameter(value))
        if not self.weight.is_meta:
            self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"

    def reset_parameters(self) -> None:
        """Set the gain to one and the bias to zero. Parameters on meta are allocated first."""
        self._reset(self.parameter_names)

    def _reset(self, names: Iterable[str]) -> None:
        for name in names:
            is_gain_of_one = name == "weight" and not self.zero_centered_gamma
            self.initialise(name, torch.nn.init.ones_ if is_gain_of_one else torch.nn.init.zeros_)

    def pre_first_fuser_forward(self) -> None:
        # Only parameters on meta: the others may come from a checkpoint.
        self._reset([name for name in self.parameter_names if getattr(self, name).is_meta])

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        for name in self.parameter_names:
            owner = f"{type(self).__name__}({self.normalized_shape})"
            check_parameter(owner, name, getattr(self, name), self.normalized_shape)
        self._check_shape(spec.shape)
        return TensorSpec(spec.shape, autocast or self.weight.dtype)

    def saved_bytes(self, spec: TensorSpec) -> int:
        rows = math.prod(spec.shape) // math.prod(self.normalized_shape)
        return 4 * rows * self.num_statistics

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as ``[rows, elements of the normalized shape]``."""
        self._check_shape(x.shape)
        return x.reshape(-1, math.prod(self.normalized_shape))

    def normalize(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        extra: torch.Tensor | None = None,
        wants_sum: bool = False,
    ) -> tuple[Values, torch.Tensor | None]:
        """The norm of ``input_ + extra``, and that sum; ``ctx`` keeps what backward needs.

        The sum is None unless there is an ``extra`` and the sum is read, perhaps by backward.
        The kernel that writes a lazy norm also writes its sum.
        """
        x = self.rows(input_)
        parameters = [getattr(self, name) for name in self.parameter_names]
        y, statistics, z = functional.norm(
            x,
            [parameter.flatten() for parameter in parameters],
            self.eps,
            ctx.autocast_dtype or parameters[0].dtype,
            zero_centered=self.zero_centered_gamma,
            extra=None if extra is None else self.rows(extra),
            wants_sum=extra is not None and (wants_sum or ctx.requires_grad),
        )
        if ctx.requires_grad:
            ctx.to_save = self.saved(x if z is None else z, *parameters, *statistics)
        return self._shaped(y, input_.shape), None if z is None else z.view(input_.shape)

    def input_grad_and_param_grads(
        self,
        ctx: OperationContext,
        grad_output: torch.Tensor,
        d_extra: torch.Tensor | None = None,
        rounded_dx: torch.Tensor | None = None,
    ) -> tuple[Values | None, Grads]:
        """The gradient of the input, plus ``d_extra``, in its dtype, and those of the parameters.

        A gradient that is not needed is None. ``rounded_dx``, contiguous, in the dtype of
        ``grad_output`` and of fewer bits than the input, is written together with the first.
        """
        x, *saved = self.saved(*ctx.saved_tensors)
        state: NormState = ctx.state
        count = len(self.parameter_names)
        dx, grads = functional.norm_backward(
            grad_output.reshape(x.shape),
            x,
            [parameter.flatten() for parameter in saved[:count]],
            saved[count:],
            (ctx.input_requires_grad, *ctx.params_require_grad),
            zero_centered=state.zero_centered_gamma,
            d_extra=None if d_extra is None else d_extra.reshape(x.shape),
            rounded_dx=None if rounded_dx is None else rounded_dx.view(x.shape),
            output=ctx.rebuilt_output,
        )
        dx = None if dx is None else self._shaped(dx, grad_output.shape)
        return dx, tuple(map(self._param_grad, grads))

    @property
    def rebuilds_output(self) -> bool:  # type: ignore[override]
        """True if the rows of the norm are those of the next op."""
        return len(self.normalized_shape) == 1

    def rebuild(self, ctx: OperationContext, input_: Values | None) -> Values:
        x, *saved = self.saved(*ctx.saved_tensors)
        state: NormState = ctx.state
        parameters = saved[: len(self.parameter_names)]
        flat = [parameter.flatten() for parameter in parameters]
        dtype, is_centered = ctx.autocast_dtype or flat[0].dtype, state.zero_centered_gamma
        y, *_ = functional.norm(x, flat, state.eps, dtype, zero_centered=is_centered)
        return functional.with_statistics(y, saved[len(parameters) :])

    def runs_in_kernel(self, key: PlanKey) -> bool:
        """Whether this norm has kernels, also with an addition to the input or to its gradient."""
        (op_key,) = key.ops
        dtype, *others = [parameter.dtype for parameter in op_key.params]
        y = key.autocast_dtype or dtype
        is_taken = key.no_kernels is None and takes(op_key.input_dtype, y)
        return is_taken and all(other is dtype for other in others)

    def sum_refusal(self, extra: torch.dtype, x: torch.dtype, key: PlanKey) -> str | None:
        """The reason why no kernel adds ``extra`` to ``x`` and normalizes; None if one does.

        ``key`` is the norm's, whose input is the sum. Without kernels there is no reason either.
        """
        y = key.autocast_dtype or key.ops[0].params[0].dtype
        if x is extra or key.no_kernels is not None or takes_addend(x, extra, y):
            return None
        return f"no kernel adds {extra} to {x} and normalizes the sum to {y}."

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        one_dimension = len(self.normalized_shape) == 1
        return one_dimension and self.runs_in_kernel(key) and quantizes_values(side, key)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        name = type(self).__name__.lower()
        return kernel_names(self, name if side == "forward" else f"{name}_backward", side, key)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        return write_output(self.normalize(ctx, input_)[0], next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        dx, param_grads = self.input_grad_and_param_grads(ctx, grad_output)
        return None if dx is None else write_grad_input(dx, ctx), param_grads

    def _shaped(self, y: Values, shape: torch.Size) -> Values:
        """``y`` in ``shape``: the output, or the gradient of the input."""
        if len(self.normalized_shape) > 1:
            y = materialize(y)  # the rows of the new shape are not the rows of the norm
        return y.view(shape)

    def _param_grad(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        return None if grad is None else grad.view(self.normalized_shape)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if tuple(shape[-len(self.normalized_shape) :]) != self.normalized_shape:
            raise InputError(
                f"{type(self).__name__}({self.normalized_shape}) got an input of shape "
                f"{tuple(shape)}; its last dimensions must be {self.normalized_shape}."
            )


class LayerNorm(_Normalization):
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` (Ba et al., 2016).

    Statistics are in fp32, over the last dimensions.

    Parameters
    ----------
    normalized_shape
        The last dimensions of the input; an int for one dimension.
    eps
        Added to the variance.
    device, dtype
        Of gamma (``weight``) and beta (``bias``).
    zero_centered_gamma
        The gain is ``1 + gamma``, and gamma starts at zero.
    sm_margin
        Multiprocessors that a GPU kernel leaves free. Accepted for compatibility.
    """

    parameter_names = ("weight", "bias")
    saved = LayerNormSaved
    num_statistics = 2


class RMSNorm(_Normalization):
    """``x / sqrt(mean(x^2) + eps) * gamma`` (Zhang and Sennrich, 2019).

    Statistics are in fp32, over the last dimensions. Parameters as in
    :class:`LayerNorm`; there is no beta.
    """

    saved = RMSNormSaved
    num_statistics = 1


class L2Normalization(BasicOperation):
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, computed in fp32.

    Parameters
    ----------
    eps
        Added to the sum of squares.
    seq_length, micro_batch_size
        Accepted for compatibility.
    """

    parameter_names = ()
    can_quantize_output = ("forward", "backward")
    rebuilds_output = True
    backward_attributes = L2NormalizationState

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
        name = "l2norm" if side == "forward" else "l2norm_backward"
        return kernel_names(self, name, side, key)

    def fuses_quantize(self, side: str, key: PlanKey) -> bool:
        return quantizes_values(side, key)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        x = cast(input_, ctx.autocast_dtype or input_.dtype)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y, (rnorm,), _ = functional.norm(rows, (), self.eps, rows.dtype)
        if ctx.requires_grad:
            ctx.to_save = L2NormalizationSaved(rows, rnorm)
        return write_output(y.view(x.shape), next_op_input_quantizer)

    def rebuild(self, ctx: OperationContext, input_: Values | None) -> Values:
        x, rnorm = L2NormalizationSaved(*ctx.saved_tensors)
        state: L2NormalizationState = ctx.state
        y, *_ = functional.norm(x, (), state.eps, x.dtype)
        return functional.with_statistics(y, [rnorm])

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        x, rnorm = L2NormalizationSaved(*ctx.saved_tensors)
        dx, _ = functional.norm_backward(grad_output.reshape(x.shape), x, (), (rnorm,), (True,))
        assert dx is not None
        return write_grad_input(dx.view(grad_output.shape), ctx), ()


class AdaptiveLayerNormSaved(NamedTuple):
    """What an adaptive layer norm saves."""

    x: torch.Tensor
    gain: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


class AdaptiveLayerNormState(NamedTuple):
    """What an adaptive layer norm keeps besides: its batch dimension, and its extra inputs."""

    batch_dim: int
    extras: tuple[TensorSpec, ...]


class AdaptiveLayerNorm(BasicOperation):
    """``y = (x - mean) / sqrt(variance + eps) * (1 + scale) + shift``, as in diffusion models.

    Statistics are over the last dimension. The op computes in fp32 and rounds
    the result once. The extra inputs ``scale`` and ``shift`` have the shape
    ``[batch, hidden_size]``, or the rank of x with ones between, and receive
    gradients. There are no parameters. The op runs in torch on every device.

    Parameters
    ----------
    hidden_size
        Last dimension of the input.
    eps
        Added to the variance; finite and not negative.
    batch_dim
        The dimension of the input that is the batch. The scale and the shift of
        a sample hold for all other dimensions except the last.

    Raises
    ------
    InputError
        If ``hidden_size`` is not positive, ``eps`` or ``batch_dim`` negative.
    """

    num_extra_inputs = 2
    takes_floating_extras = True
    can_quantize_output = ("forward", "backward")

    def __init__(self, hidden_size: int, *, eps: float = 1e-5, batch_dim: int = 0) -> None:
        super().__init__()
        check_sizes("AdaptiveLayerNorm", hidden_size=hidden_size)
        if not 0 <= eps < math.inf or batch_dim < 0:
            raise InputError(
                f"AdaptiveLayerNorm got eps {eps} and batch_dim {batch_dim}; eps must be finite, "
                "and neither of them negative."
            )
        self.hidden_size = hidden_size
        self.eps = eps
        self.batch_dim = batch_dim

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, batch_dim={self.batch_dim}"

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        self._check_shapes(spec.shape, *(extra.shape for extra in extras))
        return TensorSpec(spec.shape, autocast or spec.dtype)

    def saved_bytes(self, spec: TensorSpec) -> int:
        return 2 * 4 * math.prod(spec.shape[:-1])

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        if side == "forward":
            return ("layer_norm", "addcmul")
        (op,) = key.ops
        scale, shift = op.extra_inputs
        is_launched = {
            "mul": op.input_requires_grad,
            "layer_norm_backward": op.input_requires_grad,
            "mul_sum": scale.requires_grad,
            "sum": shift.requires_grad,
        }
        return tuple(name for name, is_one in is_launched.items() if is_one)

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        (ctx,), (scale, shift) = ctxs, inputs.extras
        self._check_shapes(x.shape, scale.shape, shift.shape)
        x = plain(x, x.dtype)
        rows = self._rows(x, self.batch_dim)
        batch = (x.shape[self.batch_dim], self.hidden_size)
        gain, bias = (plain(t, t.dtype).reshape(batch) for t in (scale, shift))
        dtype = ctx.autocast_dtype or x.dtype
        y, mean, rstd = reference.adaptive_layernorm(rows, gain, bias, self.eps, dtype)
        if ctx.requires_grad:
            ctx.to_save = AdaptiveLayerNormSaved(x, gain, mean, rstd)
            specs = tuple(TensorSpec(extra.shape, extra.dtype) for extra in inputs.extras)
            ctx.state = AdaptiveLayerNormState(self.batch_dim, specs)
        return write_output(y.view(x.shape), inputs.quantizer), ()

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (ctx,) = ctxs
        x, gain, mean, rstd = AdaptiveLayerNormSaved(*ctx.saved_tensors)
        state: AdaptiveLayerNormState = ctx.state
        rows = self._rows(x, state.batch_dim)
        dy = self._rows(plain(dy, dy.dtype), state.batch_dim)
        of_scale, of_shift = ctx.extra_inputs_require_grad
        needed = (ctx.input_requires_grad, of_scale, of_shift)
        dx, *grads = reference.adaptive_layernorm_backward(dy, rows, gain, mean, rstd, needed)
        shaped = tuple(
            None if grad is None else grad.to(spec.dtype).view(spec.shape)
            for grad, spec in zip(grads, state.extras, strict=True)
        )
        return None if dx is None else write_grad_input(dx.view(x.shape), ctx), (), shaped

    @staticmethod
    def _rows(x: torch.Tensor, batch_dim: int) -> torch.Tensor:
        """``x`` as ``[before, batch, after, hidden_size]``."""
        before, after = x.shape[:batch_dim], x.shape[batch_dim + 1 : -1]
        batch, hidden_size = x.shape[batch_dim], x.shape[-1]
        return x.reshape(math.prod(before), batch, math.prod(after), hidden_size)

    def _check_shapes(
        self, x: tuple[int, ...], scale: tuple[int, ...], shift: tuple[int, ...]
    ) -> None:
        rank = max(2, self.batch_dim + 2)
        if len(x) < rank or x[-1] != self.hidden_size:
            raise InputError(
                f"AdaptiveLayerNorm got an input of shape {tuple(x)}; it must have {rank} "
                f"dimensions or more, of which {self.batch_dim} is the batch and the last is "
                f"{self.hidden_size}."
            )
        short = (x[self.batch_dim], self.hidden_size)
        long = tuple(n if i in (self.batch_dim, len(x) - 1) else 1 for i, n in enumerate(x))
        for name, shape in (("scale", scale), ("shift", shift)):
            if tuple(shape) not in (short, long):
                raise InputError(
                    f"AdaptiveLayerNorm got a {name} of shape {tuple(shape)} for an input of shape "
                    f"{tuple(x)} with samples along dimension {self.batch_dim}; it takes {short} "
                    f"or {long}."
                )
