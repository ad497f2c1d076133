"""AdaptiveLayerNorm: a layer norm with a scale and a shift for each sample."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fuser.basic_ops.linear_operands import plain
from fuser.errors import InputError
from fuser.op import (
    Autocast,
    BasicOperation,
    Contexts,
    Specs,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    check_sizes,
    write_grad_input,
    write_output,
)
from fuser.reference import normalization as reference
from fuser.specs import PlanKey, TensorSpec


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

    def output_spec(self, spec: TensorSpec, extras: Specs, autocast: Autocast) -> TensorSpec:
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
