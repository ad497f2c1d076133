"""Launchers of FP8 in blocks of 128: the functions of ``fuser.reference.block_scaling``.

Data is uint8 and holds E4M3 or E5M2; columnwise data is stored transposed, ``[K, M]``. Scales are
fp32 in the shapes of ``formats.FP8_BLOCKS``.
The rules that all launchers of formats share are in :mod:`fuser.cuda.tiled`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from fuser.cuda.arguments import Producer, Struct, int32, int64
from fuser.cuda.checks import (
    FLOAT8,
    bits_of,
    boolean,
    check_buffers,
    check_copy,
    check_float8,
    check_matrix,
)
from fuser.cuda.launch import Kernel
from fuser.cuda.tiled import (
    as_producer,
    block_decoders,
    decode_blocks,
    launch_store,
    quantizing_kernels,
    store_kernel,
    transposes_aligned,
)
from fuser.formats import FP8_BLOCK, FP8_BLOCKS, DType, NumberFormat, fp8_block_scale_shape


def quantize(
    format_: NumberFormat,
    x: torch.Tensor | Producer,
    buffers: Mapping[str, torch.Tensor | None],
    *,
    pow2: bool = True,
    eps: float = 0.0,
) -> None:
    """Quantize ``x`` in blocks of 128 or 128x128, as the format says, in one pass.

    Moves ``b + 1`` bytes an element for one copy and ``b + 2`` for both, and 4 for every 128
    (16384) elements and copy. ``x`` is ``[M, K]``, or a producer of such values; ``pow2`` and
    ``eps`` are as in the reference.
    """
    launcher, layout = "FP8 block quantize", format_.layout
    producer, to = as_producer(launcher, x), check_float8(launcher, format_.element)
    if not check_buffers(launcher, layout, producer.rows, producer.columns, buffers):
        return
    row, row_scale, col, col_scale = map(buffers.get, (*layout.rowwise, *layout.columnwise))
    aligned = transposes_aligned(producer, row, col)
    store = Struct((row, row_scale, col, col_scale, bits_of(eps), int32(pow2)))
    block_dim = 1 if layout is FP8_BLOCKS[1] else 2
    launch_store(_quantize(producer.type, to, block_dim, aligned), producer, store)


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    block_dim: int,
    columnwise: bool,
    out: torch.Tensor,
) -> None:
    """Write ``data * scale_inv``, rounded once, to ``out``. Moves ``1 + b`` bytes an element.

    Reads a rowwise copy, or a columnwise copy, which is transposed back.
    """
    launcher = "FP8 block dequantize"
    rows, columns = check_matrix(launcher, data)
    # In both copies, the blocks of the stored matrix are along its columns.
    scale_shape = fp8_block_scale_shape(rows, columns, False, block_dim)
    scales = (scale_inv, torch.float32, scale_shape)
    check_copy(launcher, "data", data, (rows, columns), "scale_inv", *scales)
    padded = int64(scale_shape[1])
    strides = (int64(1), padded) if block_dim == 1 else (padded, int64(1))
    row_shift = int32(0 if block_dim == 1 else FP8_BLOCK.bit_length() - 1)
    producer = Struct((data, scale_inv, int32(columns), row_shift, *strides))
    decode_blocks("block_scaling", launcher, producer, dtype, out_dtype, columnwise, out)


# -- kernels ------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _quantize(producer: str, to: str, block_dim: int, aligned: bool) -> Kernel:
    store = f"Block{block_dim}dStore<{to}, {boolean(aligned)}>"
    return store_kernel("block_scaling", producer, store)


def stores(producer: str, to: DType, aligned: bool) -> tuple[Kernel, ...]:
    """The kernels of a producer with each store of FP8 blocks."""
    return tuple(_quantize(producer, FLOAT8[to], block_dim, aligned) for block_dim in (1, 2))


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel whose input is a matrix."""
    return block_decoders("block_scaling") + quantizing_kernels(stores)
