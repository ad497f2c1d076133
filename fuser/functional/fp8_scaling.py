"""FP8 with one scale a tensor, by kernels where they run and in plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.cuda import fp8_scaling as kernels
from fuser.cuda.launch import kernels_support
from fuser.cuda.launch_cache import cached_launches
from fuser.formats import DType
from fuser.functional.lazy import (
    LazyTensor,
    buffer,
    fallback_to_torch,
    matrix_of,
    rows_of,
    source_of,
)
from fuser.reference import fp8_scaling as reference


@fallback_to_torch
def amax(x: torch.Tensor | LazyTensor) -> torch.Tensor:
    """``max |x|`` of ``[M, K]`` as fp32 ``[1]``; see the reference."""
    if isinstance(x, torch.Tensor) and not kernels_support(x):
        return reference.amax(x)
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    if isinstance(x, LazyTensor):
        x.amax(out)
    else:
        kernels.amax(rows_of(x), out=out)
    return out


@fallback_to_torch
def quantize_current(
    x: torch.Tensor | LazyTensor,
    dtype: DType,
    *,
    pow2: bool = False,
    eps: float = 0.0,
    rowwise: bool = True,
    columnwise: bool = True,
    amax_value: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Data, transposed data and ``scale_inv`` of ``x [M, K]``; see the reference."""
    if isinstance(x, torch.Tensor) and not kernels_support(x):
        return reference.quantize_current(
            x,
            dtype,
            pow2=pow2,
            eps=eps,
            rowwise=rowwise,
            columnwise=columnwise,
            amax_value=amax_value,
        )
    m, k = matrix_of(x)
    row, col = buffer(x, (m, k), rowwise), buffer(x, (k, m), columnwise)
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    if isinstance(x, torch.Tensor):
        x = rows_of(x)
    if amax_value is None and not kernels.is_one_tile(m, k):
        amax_value = amax(x)
    kernels.quantize_current(
        source_of(x),
        dtype,
        pow2=pow2,
        eps=eps,
        amax_value=amax_value,
        row=row,
        col=col,
        scale_inv=scale_inv,
    )
    return row, col, scale_inv


@fallback_to_torch
def quantize_delayed(
    x: torch.Tensor | LazyTensor,
    scale: torch.Tensor,
    dtype: DType,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Data, transposed data and ``scale_inv`` of ``x [M, K]``; see the reference.

    ``amax``, fp32 ``[1]``, is raised to that of ``x``; None records nothing.
    """
    if isinstance(x, torch.Tensor) and not kernels_support(x):
        row, col, scale_inv, seen = reference.quantize_delayed(
            x, scale, dtype, rowwise=rowwise, columnwise=columnwise
        )
        if amax is not None:
            amax.copy_(torch.maximum(amax, seen))
        return row, col, scale_inv
    m, k = matrix_of(x)
    row, col = buffer(x, (m, k), rowwise), buffer(x, (k, m), columnwise)
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    source = source_of(x)
    kernels.quantize_delayed(source, scale, dtype, row=row, col=col, scale_inv=scale_inv, amax=amax)
    return row, col, scale_inv


@fallback_to_torch
def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: DType, out_dtype: torch.dtype
) -> torch.Tensor:
    """``data * scale_inv`` in ``out_dtype``; see the reference."""
    out = torch.empty(data.shape, dtype=out_dtype, device=data.device)
    if not kernels_support(out):
        return reference.dequantize(data, scale_inv, dtype, out_dtype)
    kernels.dequantize(data.contiguous(), scale_inv, dtype, out_dtype, out=out)
    return out


@fallback_to_torch
def transpose(data: torch.Tensor) -> torch.Tensor:
    """``[M, K]`` bytes as ``[K, M]``, contiguous."""
    out = torch.empty(data.shape[::-1], dtype=data.dtype, device=data.device)
    if not kernels_support(out):
        return out.copy_(data.t())
    kernels.transpose(data.contiguous(), out=out)
    return out


@fallback_to_torch
def update_delayed(
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_fp8: Sequence[torch.Tensor],
    *,
    margin: int = 0,
    algorithm: str = "max",
) -> None:
    """Bring many states of delayed scaling up to date, all on one device; see the reference."""
    options: dict[str, Any] = {"margin": margin, "algorithm": algorithm}
    if scales and kernels_support(scales[0]):
        cached_launches(
            ("update_delayed", margin, algorithm, len(scales)),
            (*amax_histories, *scales, *max_fp8),
            lambda: kernels.update_delayed(amax_histories, scales, max_fp8, **options),
        )
        return
    for state in zip(amax_histories, scales, max_fp8, strict=True):
        reference.update_delayed(*state, **options)
