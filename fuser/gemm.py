"""Matrix products of linear layers: forward, dgrad and wgrad, by the best library call.

``x`` is ``[..., K]``, ``weight`` is ``[N, K]``, ``dy`` is ``[..., N]``; all in one dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# ``linear(x, weight, bias=None)``: x @ weight.T (+ bias), of shape [..., N]; the
# bias is a GEMM epilogue. torch's own, by name: a wrapper would cost 0.1 us.
linear = F.linear


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``gelu(x @ weight.T + bias)``, tanh GELU as a cuBLASLt epilogue; CUDA only."""
    y: torch.Tensor = torch.ops.aten._addmm_activation(bias, _rows(x), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """``scale * (x @ weight.T) + addend``: one GEMM with ``alpha`` and ``beta = 1``."""
    y = torch.addmm(_rows(addend), _rows(x), weight.t(), alpha=scale)
    return y.view(addend.shape)


def dgrad(
    dy: torch.Tensor,
    weight: torch.Tensor,
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale * dy @ weight (+ addend)``: the gradient of x, ``[..., K]``.

    One GEMM: the scale is its ``alpha``, the addend comes with ``beta = 1``.
    """
    if dy.dim() != 2:
        addend = None if addend is None else _rows(addend)
        return dgrad(_rows(dy), weight, scale, addend).view(*dy.shape[:-1], weight.shape[1])
    if addend is not None:
        if addend.dtype is not dy.dtype:
            return dgrad(dy, weight, scale) + addend
        return torch.addmm(addend, dy, weight, alpha=scale)
    return torch.mm(dy, weight) if scale == 1.0 else _scaled_mm(dy, weight, scale)


def wgrad(dy: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``scale * dy.T @ x`` over all rows: the gradient of the weight, ``[N, K]``."""
    if dy.dim() != 2:
        dy, x = _rows(dy), _rows(x)
    return torch.mm(dy.t(), x) if scale == 1.0 else _scaled_mm(dy.t(), x, scale)


def wgrad_accumulate(
    main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, scale: float = 1.0
) -> None:
    """Add :func:`wgrad` to ``main_grad`` in place, in main_grad's precision.

    With equal dtypes this is one GEMM with ``beta = 1``. An fp32 ``main_grad``
    of 16-bit operands gets the GEMM's fp32 accumulator, not a rounded copy.
    """
    a, b = _rows(dy).t(), _rows(x)
    if a.dtype == main_grad.dtype:
        main_grad.addmm_(a, b, alpha=scale)
    elif a.is_cuda and main_grad.dtype == torch.float32:
        main_grad.add_(torch.mm(a, b, out_dtype=torch.float32), alpha=scale)
    else:
        main_grad.add_(torch.mm(a.to(main_grad.dtype), b.to(main_grad.dtype)), alpha=scale)


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    # With beta = 0 the addend is never read; an expanded scalar costs no memory.
    return torch.addmm(a.new_empty(()).expand(a.shape[0], b.shape[1]), a, b, beta=0, alpha=scale)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
