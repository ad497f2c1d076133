"""MXFP8, by kernels where they run and in plain torch elsewhere."""

from __future__ import annotations

import torch

from fuser.cuda import mxfp8 as kernels
from fuser.cuda.launch import kernels_support
from fuser.formats import DType, mxfp8_scale_shape
from fuser.functional.lazy import LazyTensor, buffer, fallback_to_torch, matrix_of, source_of
from fuser.reference import mxfp8 as reference

Wanted = torch.Tensor | None


@fallback_to_torch
def quantize(
    x: torch.Tensor | LazyTensor,
    dtype: DType,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    two_dimensional: bool = False,
) -> tuple[Wanted, Wanted, Wanted, Wanted]:
    """Data and scales, rowwise and columnwise, of ``x [M, K]``; see the reference."""
    if isinstance(x, torch.Tensor) and not kernels_support(x):
        return reference.quantize(
            x,
            dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            two_dimensional=two_dimensional,
        )
    m, k = matrix_of(x)
    row, col = buffer(x, (m, k), rowwise), buffer(x, (m, k), columnwise)
    row_scale = buffer(x, mxfp8_scale_shape(m, k, False), rowwise)
    col_scale = buffer(x, mxfp8_scale_shape(m, k, True), columnwise)
    kernels.quantize(
        source_of(x),
        dtype,
        two_dimensional=two_dimensional,
        row=row,
        row_scale=row_scale,
        col=col,
        col_scale=col_scale,
    )
    return row, row_scale, col, col_scale


@fallback_to_torch
def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
) -> torch.Tensor:
    """The values ``[M, K]`` of one copy in ``out_dtype``; see the reference."""
    out = torch.empty(data.shape, dtype=out_dtype, device=data.device)
    if not kernels_support(out):
        return reference.dequantize(data, scale, dtype, out_dtype, columnwise=columnwise)
    kernels.dequantize(data, scale, dtype, out_dtype, columnwise=columnwise, out=out)
    return out
