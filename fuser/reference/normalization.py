"""LayerNorm, RMSNorm and L2 normalization in plain torch.

Inputs are ``[rows, n]``; statistics are fp32, one per row. ``gain`` is fp32 and
includes the ``1 +`` of a zero-centred gamma.
"""

from __future__ import annotations

import torch


def rmsnorm(
    x: torch.Tensor, gain: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * rstd * gain`` in ``dtype``; ``rstd = rsqrt(mean(x^2) + eps)``, shape [rows, 1]."""
    x = x.float()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * rstd * gain).to(dtype), rstd


def rmsnorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gain: torch.Tensor,
    rstd: torch.Tensor,
    needed: tuple[bool, bool] = (True, True),
    d_extra: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of ``x`` (in its dtype) and of ``gain`` (fp32); None where not ``wanted``.

    ``d_extra``, shaped like x, is added to the gradient of ``x`` before that is rounded.
    """
    x_hat = x.float() * rstd
    dy = dy.float()
    dx = d_gain = None
    if needed[1]:
        d_gain = (dy * x_hat).sum(0)
    if needed[0]:
        d_hat = dy * gain
        dx = (d_hat - x_hat * (d_hat * x_hat).mean(-1, keepdim=True)) * rstd
        dx = _plus(dx, d_extra).to(x.dtype)
    return dx, d_gain


def layernorm(
    x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x - mean) * rstd * gain + bias`` in ``dtype``; mean and rstd of shape [rows, 1]."""
    y, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], gain, bias.float(), eps)
    return y.to(dtype), mean, rstd


def layernorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gain: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needed: tuple[bool, bool, bool] = (True, True, True),
    d_extra: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of ``x`` (its dtype), ``gain`` and ``bias`` (fp32); None where not ``wanted``.

    ``d_extra``, shaped like x, is added to the gradient of ``x`` before that is rounded.
    """
    dx, d_gain, d_bias = torch.ops.aten.native_layer_norm_backward(
        dy.float(), x.float(), x.shape[-1:], mean, rstd, gain, gain, list(needed)
    )
    return _plus(dx, d_extra).to(x.dtype) if needed[0] else None, d_gain, d_bias


def l2norm(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * rnorm`` in x's dtype, and fp32 ``rnorm = rsqrt(sum(x^2) + eps)``, over the last dim."""
    x32 = x.float()
    rnorm = torch.rsqrt(x32.square().sum(-1, keepdim=True) + eps)
    return (x32 * rnorm).to(x.dtype), rnorm


def l2norm_backward(dy: torch.Tensor, x: torch.Tensor, rnorm: torch.Tensor) -> torch.Tensor:
    """Gradient of ``x``, in x's dtype."""
    dy, x_hat = dy.float(), x.float() * rnorm
    return ((dy - x_hat * (dy * x_hat).sum(-1, keepdim=True)) * rnorm).to(x.dtype)


def _plus(dx: torch.Tensor, d_extra: torch.Tensor | None) -> torch.Tensor:
    """The sum in fp32, in the memory of ``dx``, which is fp32 and which nothing else uses."""
    return dx if d_extra is None else dx.add_(d_extra)


def adaptive_layernorm(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x - mean) * rstd * (1 + scale) + shift`` in ``dtype``; with mean and rstd, fp32.

    ``x`` is ``[before, B, after, n]``, ``scale`` and ``shift`` are ``[B, n]``.
    """
    x_hat, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, eps)
    gain, bias = 1 + scale.float(), shift.float()
    return torch.addcmul(bias.unsqueeze(1), x_hat, gain.unsqueeze(1)).to(dtype), mean, rstd


def adaptive_layernorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needed: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of ``x`` (its dtype), ``scale`` and ``shift`` (fp32); None where not ``wanted``."""
    dy, x32 = dy.float(), x.float()
    dx = d_scale = d_shift = None
    if needed[0]:
        d_hat = dy * (1 + scale.float()).unsqueeze(1)
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            d_hat, x32, x.shape[-1:], mean, rstd, None, None, [True, False, False]
        )
        dx = dx.to(x.dtype)
    if needed[1]:
        d_scale = (dy * (x32 - mean) * rstd).sum((0, 2))
    if needed[2]:
        d_shift = dy.sum((0, 2))
    return dx, d_scale, d_shift
