"""MXFP8 in plain torch: 32 elements share a power-of-two scale.

Data is uint8 and holds E4M3 or E5M2; scales are uint8 and hold E8M0 (``2^(e - 127)``, 0xFF is
NaN). Rowwise blocks are 1x32, columnwise blocks 32x1, each quantized from the high-precision
values; both data tensors keep the input's shape ``[M, K]``. Scales are padded with zeros to whole
tiles (``formats.mxfp8_scale_shape``). The format is that of the OCP Microscaling Formats
specification 1.0; the scale is rounded up, so that no element of a block saturates.
"""

from __future__ import annotations

import torch

from fuser.errors import InputError
from fuser.formats import (
    MXFP8_BLOCK,
    SCALE_TILE_BLOCKS,
    SCALE_TILE_ROWS,
    DType,
    check_multiple,
    mxfp8_scale_shape,
)
from fuser.reference.fp8 import decode, encode, padded

_NAN_BITS = 0x7FC00000


def e8m0_from_amax(amax: torch.Tensor, max_inverse: float) -> torch.Tensor:
    """The exponent of ``amax * max_inverse``, rounded up to a power of two: uint8, amax's shape.

    ``max_inverse`` is 1 / 448 or 1 / 57344. NaN gives 0xFF; infinity, and values that would round
    up to it, give 0xFE; values up to 2^-127 give 0.
    """
    bits = (amax * max_inverse).view(torch.int32) & 0x7FFFFFFF
    exponent = (bits.clamp(max=0x7F000000) + 0x7FFFFF) >> 23
    exponent.masked_fill_(bits <= 0x00400000, 0).masked_fill_(bits > 0x7F800000, 0xFF)
    return exponent.to(torch.uint8)


def multiplier(e8m0: torch.Tensor) -> torch.Tensor:
    """``2^(127 - e)``, the factor that quantizes elements; fp32, NaN for 0xFF."""
    return _power_of_two(254 - e8m0.to(torch.int32))


def quantize(
    x: torch.Tensor,
    dtype: DType,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    two_dimensional: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Quantize ``x [M, K]``; with ``two_dimensional``, a block of 32x32 shares its scale.

    Returns row, row_scale, col, col_scale: data ``[M, K]`` and scales in their padded shapes; None
    if not requested.
    """
    m, k = x.shape
    check_multiple("MXFP8", m, k, MXFP8_BLOCK)
    x = x.float()
    row = row_scale = col = col_scale = None
    if two_dimensional:
        data, e8m0 = _quantize_blocks(x, dtype, MXFP8_BLOCK, MXFP8_BLOCK)
        if rowwise:
            row, row_scale = data, e8m0.repeat_interleave(MXFP8_BLOCK, 0)
        if columnwise:
            col = data.clone() if rowwise else data
            col_scale = e8m0.repeat_interleave(MXFP8_BLOCK, 1)
    else:
        if rowwise:
            row, row_scale = _quantize_blocks(x, dtype, 1, MXFP8_BLOCK)
        if columnwise:
            col, col_scale = _quantize_blocks(x, dtype, MXFP8_BLOCK, 1)
    if row_scale is not None:
        row_scale = padded(row_scale, mxfp8_scale_shape(m, k, columnwise=False))
    if col_scale is not None:
        col_scale = padded(col_scale, mxfp8_scale_shape(m, k, columnwise=True))
    return row, row_scale, col, col_scale


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
) -> torch.Tensor:
    """``data * 2^(e - 127)`` in fp32, rounded once to ``out_dtype``; ``[M, K]``.

    ``scale`` is padded, and rowwise or columnwise as ``columnwise`` says.
    """
    m, k = data.shape
    rows, cols = (MXFP8_BLOCK, 1) if columnwise else (1, MXFP8_BLOCK)
    e8m0 = scale[: m // rows, : k // cols]
    factor = _power_of_two(e8m0.to(torch.int32))[:, None, :, None]
    blocks = decode(data, dtype).view(m // rows, rows, k // cols, cols)
    return (blocks * factor).view(m, k).to(out_dtype)


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """Padded scales in the order in which block-scaled tensor cores read them; the same shape.

    Element ``(r, c)`` goes to ``tile * 512 + (r % 32) * 16 + (r / 32 % 4) * 4 + c % 4``; tiles of
    128 x 4 follow each other along a row of tiles. Rows are the GEMM's rows and columns are blocks:
    rowwise scales as they are, columnwise scales transposed.
    """
    tile_rows, tile_cols = _tiles(scale)
    tiles = scale.reshape(tile_rows, 4, 32, tile_cols, 4).permute(0, 3, 2, 1, 4)
    return tiles.clone(memory_format=torch.contiguous_format).view(scale.shape)


def unswizzle(scale: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`swizzle`."""
    tile_rows, tile_cols = _tiles(scale)
    tiles = scale.reshape(tile_rows, tile_cols, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.clone(memory_format=torch.contiguous_format).view(scale.shape)


def _tiles(scale: torch.Tensor) -> tuple[int, int]:
    rows, cols = scale.shape
    if rows % SCALE_TILE_ROWS or cols % SCALE_TILE_BLOCKS:
        raise InputError(
            f"Scales are swizzled in tiles of {SCALE_TILE_ROWS} x {SCALE_TILE_BLOCKS}, "
            f"and a scale tensor [{rows}, {cols}] does not divide into them."
        )
    return rows // SCALE_TILE_ROWS, cols // SCALE_TILE_BLOCKS


def _quantize_blocks(
    x: torch.Tensor, dtype: DType, rows: int, cols: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data ``[M, K]`` and unpadded exponents ``[M / rows, K / cols]`` of an fp32 ``x``."""
    m, k = x.shape
    blocks = x.view(m // rows, rows, k // cols, cols)
    buffer = blocks.abs()
    # Across rows first: it vectorizes, and one amax over both dimensions does not.
    largest = buffer.amax(1) if rows > 1 else buffer.squeeze(1)
    e8m0 = e8m0_from_amax(largest.amax(-1), 1.0 / dtype.max)
    product = torch.mul(blocks, multiplier(e8m0)[:, None, :, None], out=buffer)
    return encode(product, dtype).reshape(m, k).contiguous(), e8m0


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """``2^(biased - 127)`` in fp32 from an int32 exponent: 0 is a subnormal, -1 and 255 are NaN.

    Built from bits: CUDA arithmetic that flushes subnormals would lose 2^-127.
    """
    bits = (biased << 23).masked_fill_(biased == 0, 0x00400000)
    return bits.masked_fill_((biased < 0) | (biased == 255), _NAN_BITS).view(torch.float32)
