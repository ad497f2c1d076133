"""NVFP4, by kernels where they run and in plain torch elsewhere."""

from __future__ import annotations

import torch

from fuser.cuda import fp8_scaling as amax_kernels
from fuser.cuda import nvfp4 as kernels
from fuser.cuda.launch import kernels_support
from fuser.formats import nvfp4_scale_shape
from fuser.functional.lazy import (
    LazyTensor,
    buffer,
    fallback_to_torch,
    matrix_of,
    rows_of,
    source_of,
)
from fuser.reference import nvfp4 as reference

Wanted = torch.Tensor | None


@fallback_to_torch
def quantize(
    x: torch.Tensor | LazyTensor,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    two_dimensional: bool = False,
    hadamard: bool = False,
    random_signs: bool = True,
    stochastic: bool = False,
    seed: int = 0,
) -> tuple[Wanted, Wanted, Wanted, Wanted, Wanted, Wanted]:
    """Data, scales and amax, rowwise and columnwise, of ``x [M, K]``; see the reference."""
    if isinstance(x, torch.Tensor) and not kernels_support(x):
        return reference.quantize(
            x,
            rowwise=rowwise,
            columnwise=columnwise,
            two_dimensional=two_dimensional,
            hadamard=hadamard,
            random_signs=random_signs,
            stochastic=stochastic,
            seed=seed,
        )
    m, k = matrix_of(x)
    if isinstance(x, torch.Tensor):
        x = rows_of(x)
    amaxes = torch.zeros(1 + hadamard, dtype=torch.float32, device=x.device)
    if hadamard:
        kernels.hadamard_amax(source_of(x), random_signs=random_signs, out=amaxes)
    elif isinstance(x, LazyTensor):
        x.amax(amaxes)
    else:
        amax_kernels.amax(x, out=amaxes)
    row, col = buffer(x, (m, k // 2), rowwise), buffer(x, (k, m // 2), columnwise)
    row_scale = buffer(x, nvfp4_scale_shape(m, k, False), rowwise)
    col_scale = buffer(x, nvfp4_scale_shape(m, k, True), columnwise)
    # A quantized tensor's two amaxes are apart, so that one may be written without the other.
    new = torch.empty if m * k else torch.zeros
    row_amax, col_amax = (
        new((1,), dtype=torch.float32, device=x.device) if is_wanted else None
        for is_wanted in (rowwise, columnwise)
    )
    kernels.quantize(
        source_of(x),
        two_dimensional=two_dimensional,
        hadamard=hadamard,
        random_signs=random_signs,
        stochastic=stochastic,
        seed=seed,
        amax_value=amaxes,
        row=row,
        row_scale=row_scale,
        row_amax=row_amax,
        col=col,
        col_scale=col_scale,
        col_amax=col_amax,
    )
    return row, row_scale, row_amax, col, col_scale, col_amax


@fallback_to_torch
def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
) -> torch.Tensor:
    """The values ``[M, K]`` of one copy in ``out_dtype``; see the reference."""
    rows, columns = data.shape[0], 2 * data.shape[1]
    shape = (columns, rows) if columnwise else (rows, columns)
    out = torch.empty(shape, dtype=out_dtype, device=data.device)
    if not kernels_support(out):
        return reference.dequantize(data, scale, amax, out_dtype, columnwise=columnwise)
    kernels.dequantize(data, scale, amax, out_dtype, columnwise=columnwise, out=out)
    return out
