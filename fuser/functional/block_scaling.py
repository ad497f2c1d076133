"""FP8 in blocks of 128, by kernels where they run and in plain torch elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from fuser.cuda import block_scaling as kernels
from fuser.cuda.launch import kernels_support
from fuser.formats import DType, fp8_block_scale_shape
from fuser.functional.lazy import LazyTensor, buffer, fallback_to_torch, matrix_of, source_of
from fuser.reference import block_scaling as reference

Wanted = torch.Tensor | None


@fallback_to_torch
def quantize(
    x: torch.Tensor | LazyTensor,
    dtype: DType,
    *,
    block_dim: int,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = True,
    eps: float = 0.0,
) -> tuple[Wanted, Wanted, Wanted, Wanted]:
    """Data and ``scale_inv``, rowwise and columnwise, of ``x [M, K]``; see the reference."""
    if isinstance(x, torch.Tensor) and not kernels_support(x):
        return reference.quantize(
            x,
            dtype,
            block_dim=block_dim,
            rowwise=rowwise,
            columnwise=columnwise,
            pow2=pow2,
            eps=eps,
        )
    m, k = matrix_of(x)
    row_shape, col_shape = (fp8_block_scale_shape(m, k, c, block_dim) for c in (False, True))
    row, col = buffer(x, (m, k), rowwise), buffer(x, (k, m), columnwise)
    row_scale_inv = buffer(x, row_shape, rowwise, torch.float32)
    col_scale_inv = buffer(x, col_shape, columnwise, torch.float32)
    kernels.quantize(
        source_of(x),
        dtype,
        block_dim=block_dim,
        pow2=pow2,
        eps=eps,
        row=row,
        row_scale_inv=row_scale_inv,
        col=col,
        col_scale_inv=col_scale_inv,
    )
    return row, row_scale_inv, col, col_scale_inv


@fallback_to_torch
def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    block_dim: int,
    columnwise: bool,
) -> torch.Tensor:
    """The values ``[M, K]`` of one copy in ``out_dtype``; see the reference."""
    shape = data.shape[::-1] if columnwise else data.shape
    out = torch.empty(shape, dtype=out_dtype, device=data.device)
    options: dict[str, Any] = {"block_dim": block_dim, "columnwise": columnwise}
    if not kernels_support(out):
        return reference.dequantize(data, scale_inv, dtype, out_dtype, **options)
    kernels.dequantize(data, scale_inv, dtype, out_dtype, **options, out=out)
    return out
