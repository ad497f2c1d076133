"""FP8 with one scale for each row of a copy, in plain torch: row-wise scaling.

Data is uint8 and holds E4M3 or E5M2; ``scale_inv`` is fp32. A tensor ``[M, K]`` has rowwise data
``[M, K]`` with a scale for each row, and columnwise data stored transposed, ``[K, M]``, with a
scale for each column of the tensor. Each copy is quantized from the original values.
The scales are those of current scaling (``reference.fp8.scale_from_amax``), row by row.
"""

from __future__ import annotations

import torch

from fuser.formats import DType
from fuser.reference.fp8 import decode, encode, scale_from_amax, transpose


def quantize(
    x: torch.Tensor,
    dtype: DType,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = False,
    eps: float = 0.0,
    col_amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Quantize ``x [M, K]`` with a scale for each row, and one for each column.

    ``pow2`` rounds scales down to powers of two; amaxes below ``eps`` count as ``eps``.
    ``col_amax``, fp32 ``[K]``, replaces the amaxes of the columns. Returns row, row_scale_inv, col,
    col_scale_inv: data ``[M, K]`` and ``[K, M]``, scales ``[M]`` and ``[K]``; None if not
    requested.
    """
    x32 = x.float()
    row = row_scale_inv = col = col_scale_inv = None
    if rowwise:
        row, row_scale_inv = _quantize_along(x32, 1, dtype, pow2, eps)
    if columnwise:
        data, col_scale_inv = _quantize_along(x32, 0, dtype, pow2, eps, col_amax)
        col = transpose(data)
    return row, row_scale_inv, col, col_scale_inv


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
) -> torch.Tensor:
    """``data * scale_inv`` in fp32, rounded once to ``out_dtype``; ``[M, K]``.

    Columnwise ``data`` is ``[K, M]``, and is transposed back.
    """
    out = (decode(data, dtype) * scale_inv[:, None]).to(out_dtype)
    return transpose(out) if columnwise else out


def _quantize_along(
    x: torch.Tensor,
    dim: int,
    dtype: DType,
    pow2: bool,
    eps: float,
    amaxes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes in x's shape and a scale for each of its lines along ``dim``; ``x`` is fp32."""
    if amaxes is not None:
        largest = amaxes.unsqueeze(dim)
    elif x.shape[dim]:
        largest = x.abs().amax(dim, keepdim=True)
    else:
        largest = x.new_zeros((x.shape[0], 1) if dim == 1 else (1, x.shape[1]))
    scale = scale_from_amax(largest, dtype.max, pow2, eps)
    return encode(x * scale, dtype).contiguous(), scale.reciprocal().flatten()
