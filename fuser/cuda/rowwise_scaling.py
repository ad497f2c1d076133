"""Launchers of FP8 with one scale a row: the functions of ``fuser.reference.rowwise_scaling``.

Data is uint8 and holds E4M3 or E5M2; columnwise data is stored transposed, ``[K, M]``. Scales are
fp32, one for each row of the data as it is stored: ``[M]`` and ``[K]``.
The rules that all launchers of formats share are in :mod:`fuser.cuda.tiled`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from fuser.cuda.arguments import ELEMENTS, Producer, Struct, int32, int64
from fuser.cuda.checks import (
    FLOAT8,
    bits_of,
    boolean,
    check_buffer,
    check_buffers,
    check_float8,
    check_matrix,
)
from fuser.cuda.launch import TILE, TILE_THREADS, Kernel, Launch
from fuser.cuda.tiled import (
    as_producer,
    block_decoders,
    decode_blocks,
    launch_store,
    loads,
    quantizing_kernels,
    store_kernel,
    transposes_aligned,
)
from fuser.errors import InputError
from fuser.formats import DType, NumberFormat, ceil_div


def amaxes(
    x: torch.Tensor | Producer,
    *,
    row_amax: torch.Tensor | None = None,
    col_amax: torch.Tensor | None = None,
) -> None:
    """Raise the amaxes of rows and columns to ``max |x|``; a NaN is above all numbers.

    Reads ``b`` bytes an element of ``x [M, K]``, or of a producer of such values. ``row_amax`` and
    ``col_amax`` are fp32 ``[M]`` and ``[K]``, zeroed by the caller.
    """
    launcher = "row-wise amaxes"
    producer = as_producer(launcher, x)
    producer = producer.alone or producer
    check_buffer(launcher, "row_amax", row_amax, torch.float32, (producer.rows,))
    check_buffer(launcher, "col_amax", col_amax, torch.float32, (producer.columns,))
    if row_amax is None and col_amax is None:
        return
    launch_store(_amaxes(producer.type), producer, Struct((row_amax, col_amax)))


def quantize(
    format_: NumberFormat,
    x: torch.Tensor | Producer,
    buffers: Mapping[str, torch.Tensor | None],
    *,
    pow2: bool = False,
    eps: float = 0.0,
    row_amax: torch.Tensor | None = None,
    col_amax: torch.Tensor | None = None,
) -> None:
    """Quantize ``x`` with scales that follow from the amaxes of rows and columns (:func:`amaxes`).

    Moves ``b + 1`` bytes an element for one copy and ``b + 2`` for both. ``x`` is ``[M, K]``, or a
    producer of such values. A rowwise copy needs ``row_amax``, fp32 ``[M]``, and a columnwise one
    ``col_amax``, ``[K]``; ``pow2`` and ``eps`` are as in the reference.
    """
    launcher, layout = "row-wise FP8 quantize", format_.layout
    producer, to = as_producer(launcher, x), check_float8(launcher, format_.element)
    m, k = producer.rows, producer.columns
    is_any = check_buffers(launcher, layout, m, k, buffers)
    row, row_scale, col, col_scale = map(buffers.get, (*layout.rowwise, *layout.columnwise))
    for name, copy, amax, size in (("row", row, row_amax, m), ("col", col, col_amax, k)):
        check_buffer(launcher, f"{name}_amax", amax, torch.float32, (size,))
        if copy is not None and amax is None:
            raise InputError(f"{launcher} got a copy without {name}_amax.")
    if not is_any:
        return
    fields = (row_amax, row, row_scale, col_amax, col, col_scale)
    store = Struct((*fields, bits_of(eps), int32(pow2)))
    if m * k:
        aligned = transposes_aligned(producer, row, col)
        launch_store(_quantize(producer.type, to, aligned), producer, store)
        return
    # Without elements there are scales still, and nothing for the producer to compute.
    kernel = _quantize(loads(ELEMENTS[producer.dtype], False), to, False)
    blocks = max(1, ceil_div(m, TILE)) * max(1, ceil_div(k, TILE))
    nothing = Struct((None, int64(0)))
    kernel(Launch((blocks * (m + k > 0),), (TILE_THREADS,)), nothing, store, int64(m), int32(k))


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
    out: torch.Tensor,
) -> None:
    """Write ``data * scale_inv``, rounded once, to ``out``. Moves ``1 + b`` bytes an element.

    Reads a rowwise copy, or a columnwise copy, which is transposed back.
    """
    launcher = "row-wise FP8 dequantize"
    rows, columns = check_matrix(launcher, data)
    check_buffer(launcher, "data", data, torch.uint8, (rows, columns))
    check_buffer(launcher, "scale_inv", scale_inv, torch.float32, (rows,))
    # Of each row there is one block, which its scale follows.
    producer = Struct((data, scale_inv, int32(columns), int32(0), int64(1), int64(0)))
    decode_blocks("rowwise_scaling", launcher, producer, dtype, out_dtype, columnwise, out)


# -- kernels ------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _amaxes(producer: str) -> Kernel:
    return store_kernel("rowwise_scaling", producer, "RowwiseAmaxStore")


@functools.lru_cache(maxsize=1024)
def _quantize(producer: str, to: str, aligned: bool) -> Kernel:
    store = f"RowwiseStore<{to}, {boolean(aligned)}>"
    return store_kernel("rowwise_scaling", producer, store)


def stores(producer: str, to: DType, aligned: bool) -> tuple[Kernel, ...]:
    """The kernels of a producer with the stores of row-wise scaling."""
    return (_amaxes(producer), _quantize(producer, FLOAT8[to], aligned))


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel whose input is a matrix."""
    return block_decoders("rowwise_scaling") + quantizing_kernels(stores)
