"""MXFP8 launchers: the functions of ``fuser.reference.mxfp8``.

Data is uint8 and holds E4M3 or E5M2, both copies ``[M, K]``; scales are uint8 and hold E8M0, in the
shapes of ``formats.MXFP8``.
The rules that all launchers of formats share are in :mod:`fuser.cuda.tiled`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from fuser.cuda.arguments import Producer, Struct, int32, int64
from fuser.cuda.checks import (
    FLOAT8,
    boolean,
    check_buffer,
    check_buffers,
    check_copy,
    check_element,
    check_float8,
    check_matrix,
    is_aligned,
)
from fuser.cuda.launch import Kernel
from fuser.cuda.tiled import (
    as_producer,
    decoder_kernel,
    decoder_types,
    launch_decoder,
    launch_store,
    quantizing_kernels,
    store_kernel,
)
from fuser.formats import (
    MXFP8_BLOCK,
    MXFP8_SWIZZLED,
    DType,
    NumberFormat,
    check_multiple,
    mxfp8_scale_shape,
)


def quantize(
    format_: NumberFormat, x: torch.Tensor | Producer, buffers: Mapping[str, torch.Tensor | None]
) -> None:
    """Quantize ``x`` in blocks of 32, or 32x32 as the format says, in one pass.

    Moves ``b + 1`` bytes an element for one copy and ``b + 2`` for both, and 1 for every 32
    elements and copy. ``x`` is ``[M, K]``, multiples of 32, or a producer of such values. The
    format is MXFP8 of E4M3 or E5M2; with the layout ``MXFP8_SWIZZLED`` scales have the order of the
    reference's ``swizzle``, and columnwise scales are transposed first.
    """
    launcher, layout = "MXFP8 quantize", format_.layout
    producer, to = as_producer(launcher, x), check_float8(launcher, format_.element)
    m, k = producer.rows, producer.columns
    check_multiple("MXFP8", m, k, MXFP8_BLOCK)
    if not check_buffers(launcher, layout, m, k, buffers):
        return
    row, row_scale, col, col_scale = map(buffers.get, (*layout.rowwise, *layout.columnwise))
    aligned = producer.is_aligned and is_aligned(row, 8) and is_aligned(col, 8)
    store = Struct((row, row_scale, col, col_scale, int32(layout is MXFP8_SWIZZLED)))
    is_square = format_.block_size > MXFP8_BLOCK
    launch_store(_quantize(producer.type, to, is_square, aligned), producer, store)


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
    out: torch.Tensor,
) -> None:
    """Write ``data * 2^(e - 127)``, rounded once, to ``out``. Moves ``1 + b`` bytes an element.

    ``data`` and ``scale``, which is not swizzled, are the columnwise copy if ``columnwise``, else
    the rowwise one.
    """
    launcher = "MXFP8 dequantize"
    m, k = check_matrix(launcher, data)
    check_multiple("MXFP8", m, k, MXFP8_BLOCK)
    scale_shape = mxfp8_scale_shape(m, k, columnwise)
    check_copy(launcher, "data", data, (m, k), "scale", scale, torch.uint8, scale_shape)
    check_buffer(launcher, "out", out, out_dtype, (m, k))
    element, of = check_element(launcher, out), check_float8(launcher, dtype)
    aligned = is_aligned(data, 8) and is_aligned(out, 16)
    producer = Struct((data, scale, int64(scale_shape[1]), int32(k), int32(columnwise)))
    launch_decoder(_dequantize(element, of, aligned), producer, out, m, k, False)


# -- kernels ------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _quantize(producer: str, to: str, two_dimensional: bool, aligned: bool) -> Kernel:
    name = "Mxfp8SquareStore" if two_dimensional else "Mxfp8Store"
    return store_kernel("mxfp8", producer, f"{name}<{to}, {boolean(aligned)}>")


@functools.cache
def _dequantize(element: str, of: str, aligned: bool) -> Kernel:
    producer = f"fuser::Mxfp8Producer<{element}, {of}, {boolean(aligned)}>"
    return decoder_kernel("mxfp8", producer, element, aligned, False)


def stores(producer: str, to: DType, aligned: bool) -> tuple[Kernel, ...]:
    """The kernels of a producer with each store of MXFP8."""
    return tuple(_quantize(producer, FLOAT8[to], is_2d, aligned) for is_2d in (False, True))


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel whose input is a matrix."""
    dequantizing = tuple(_dequantize(*types) for types in decoder_types())
    return dequantizing + quantizing_kernels(stores)
