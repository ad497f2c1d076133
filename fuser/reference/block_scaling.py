"""FP8 block scaling in plain torch: 128 (or 128x128) elements share an fp32 scale.

Data is uint8 and holds E4M3 or E5M2. Columnwise data is stored transposed, ``[K, M]``. A block at
an edge has as many elements as are left. ``scale_inv`` is fp32 and padded with zeros
(``formats.fp8_block_scale_shape``). The scheme is that of DeepSeek-AI, "DeepSeek-V3 Technical
Report" (2024), section 3.3: activations in tiles of 1x128, weights in blocks of 128x128.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser.formats import FP8_BLOCK, DType, ceil_div, fp8_block_scale_shape
from fuser.reference.fp8 import FLOAT32_MAX, decode, encode, padded, scale_from_amax, transpose


def quantize(
    x: torch.Tensor,
    dtype: DType,
    *,
    block_dim: int,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = True,
    eps: float = 0.0,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Quantize ``x [M, K]`` in blocks of 128 (``block_dim`` 1) or 128x128 (2).

    With ``block_dim`` 1, rowwise blocks run along K and columnwise blocks along M, each from the
    high-precision values; with 2, the columnwise data is the transpose of the rowwise bytes.
    ``pow2`` rounds scales down to powers of two; amaxes below ``eps`` count as ``eps``.

    Returns row, row_scale_inv, col, col_scale_inv: data ``[M, K]`` and ``[K, M]``, scales in their
    padded shapes; None if not requested.
    """
    m, k = x.shape
    row_shape = fp8_block_scale_shape(m, k, False, block_dim)
    col_shape = fp8_block_scale_shape(m, k, True, block_dim)
    x32, overflow = x.float(), min(torch.finfo(x.dtype).max, FLOAT32_MAX)
    row = row_scale_inv = col = col_scale_inv = None
    if block_dim == 2 and (rowwise or columnwise):
        data, scale = _quantize_blocks(x32, dtype, FP8_BLOCK, FP8_BLOCK, pow2, eps, overflow)
        if rowwise:
            row, row_scale_inv = data, padded(scale.reciprocal(), row_shape)
        if columnwise:
            col, col_scale_inv = transpose(data), padded(scale.reciprocal().t(), col_shape)
        return row, row_scale_inv, col, col_scale_inv
    if rowwise:
        row, scale = _quantize_blocks(x32, dtype, 1, FP8_BLOCK, pow2, eps, overflow)
        row_scale_inv = padded(scale.reciprocal().t(), row_shape)
    if columnwise:
        data, scale = _quantize_blocks(x32, dtype, FP8_BLOCK, 1, pow2, eps, overflow)
        col, col_scale_inv = transpose(data), padded(scale.reciprocal(), col_shape)
    return row, row_scale_inv, col, col_scale_inv


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    block_dim: int,
    columnwise: bool,
) -> torch.Tensor:
    """``data * scale_inv`` in fp32, rounded once to ``out_dtype``; ``[M, K]``.

    Columnwise ``data`` is ``[K, M]``, and is transposed back.
    """
    m, k = data.shape  # of the stored matrix: blocks run along its last dimension either way
    blocks = ceil_div(k, FP8_BLOCK)
    rows = 1 if block_dim == 1 else FP8_BLOCK
    factor = scale_inv[:blocks, :m].t() if block_dim == 1 else scale_inv[:, :blocks]
    values = _in_blocks(decode(data, dtype), rows, FP8_BLOCK) * factor[:, None, :, None]
    out = values.reshape(values.shape[0] * rows, blocks * FP8_BLOCK)[:m, :k].to(out_dtype)
    return transpose(out) if columnwise else out.contiguous()


def _quantize_blocks(
    x: torch.Tensor,
    dtype: DType,
    rows: int,
    cols: int,
    pow2: bool,
    eps: float,
    when_infinite: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data ``[M, K]`` and scales ``[M / rows, K / cols]``, rounded up, of an fp32 ``x``."""
    m, k = x.shape
    blocks = _in_blocks(x, rows, cols)
    buffer = blocks.abs()
    # Across rows first: it vectorizes, and one amax over both dimensions does not.
    largest = buffer.amax(1) if rows > 1 else buffer.squeeze(1)
    scale = scale_from_amax(largest.amax(-1), dtype.max, pow2, eps, when_infinite)
    product = torch.mul(blocks, scale[:, None, :, None], out=buffer)
    data = encode(product, dtype)
    height, width = scale.shape
    return data.reshape(height * rows, width * cols)[:m, :k].contiguous(), scale


def _in_blocks(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """``[M, K]`` as ``[M / rows, rows, K / cols, cols]``, padded with zeros."""
    m, k = x.shape
    height, width = ceil_div(m, rows), ceil_div(k, cols)
    if height * rows != m or width * cols != k:
        x = F.pad(x, (0, width * cols - k, 0, height * rows - m))
    return x.view(height, rows, width, cols)
