"""Launchers of FP8 with one scale for each group of rows, which starts at a multiple of 128 rows.

Data is uint8 and holds E4M3 or E5M2. Scales are fp32 ``[tiles]``: of each 128 rows, which belong to
one group. The rules that all launchers of formats share are in :mod:`fuser.cuda.tiled`; beyond
these, rows after the last group are neither read nor written.
"""

from __future__ import annotations

import functools

import torch

from fuser.cuda.arguments import Producer, Struct, int32, int64
from fuser.cuda.checks import (
    FLOAT8,
    bits_of,
    boolean,
    check_buffer,
    check_element,
    check_float8,
    check_matrix,
    is_aligned,
)
from fuser.cuda.launch import TILE, Kernel
from fuser.cuda.tiled import (
    decoder_kernel,
    decoder_types,
    launch_decoder,
    launch_store,
    quantizing_kernels,
    store_kernel,
    transposes_aligned,
)
from fuser.errors import InputError
from fuser.formats import DType


def quantize(
    x: Producer,
    dtype: DType,
    tiles: torch.Tensor,
    *,
    amax_value: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    pow2: bool = False,
    eps: float = 0.0,
    recorded: torch.Tensor | None = None,
    row: torch.Tensor | None = None,
    col: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
) -> None:
    """Quantize the rows of padded groups, and raise ``recorded`` to their amaxes, in one pass.

    Moves ``b + 1`` bytes an element for ``row`` or ``col``, ``b + 2`` for both.

    Parameters
    ----------
    x
        Read; :func:`fuser.cuda.grouped.padded_rows` of ``tiles``, ``[M, K]``.
    dtype
        E4M3 or E5M2.
    tiles
        Read; int32 ``[M / 128, 4]``.
    amax_value, scale
        Read; fp32 ``[G]``: of each group the amax from which its scale follows, or its scale.
    pow2, eps
        As in the reference of current scaling.
    recorded
        Read and written; fp32 ``[G]``, not negative.
    row, col
        Written; uint8 ``[M, K]`` and, transposed, ``[K, M]``.
    scale_inv
        Written with them; fp32 ``[M / 128]``.

    Raises
    ------
    InputError
        If a tensor does not match its description, or bytes are wanted and not one of
        ``amax_value`` and ``scale`` is given.
    """
    what, to = "grouped FP8 quantize", check_float8("grouped FP8 quantize", dtype)
    m, k = x.rows, x.columns
    if row is None and col is None:
        x = x.alone or x
    check_buffer(what, "tiles", tiles, torch.int32, (m // TILE, 4))
    check_buffer(what, "row", row, torch.uint8, (m, k))
    check_buffer(what, "col", col, torch.uint8, (k, m))
    vectors = [v for v in (amax_value, scale, recorded) if v is not None]
    for vector in vectors:
        check_buffer(what, "a value of each group", vector, torch.float32, (len(vectors[0]),))
    if row is not None or col is not None:
        check_buffer(what, "scale_inv", scale_inv, torch.float32, (m // TILE,))
        if scale_inv is None or (amax_value is None) == (scale is None):
            raise InputError(f"{what} takes a scale_inv, and either amax_value or scale.")
    store = (tiles, amax_value, scale, scale_inv, row, col, recorded, bits_of(eps), int32(pow2))
    aligned = transposes_aligned(x, row, col)
    launch_store(_quantize(x.type, to, aligned), x, Struct(store))


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

    Parameters
    ----------
    data
        Read; uint8 ``[M, K]``, or ``[K, M]`` if ``columnwise``, which is transposed back.
    scale_inv
        Read; fp32 ``[M / 128]``.
    dtype
        E4M3 or E5M2.
    out_dtype, out
        Written; ``[M, K]``, contiguous and of this dtype.

    Raises
    ------
    InputError
        If a tensor does not match its description.
    """
    what = "grouped FP8 dequantize"
    rows, columns = check_matrix(what, data)
    m, k = (columns, rows) if columnwise else (rows, columns)
    check_buffer(what, "data", data, torch.uint8, (rows, columns))
    check_buffer(what, "scale_inv", scale_inv, torch.float32, (m // TILE,))
    check_buffer(what, "out", out, out_dtype, (m, k))
    aligned = is_aligned(data, 8) and k % 8 == 0 and is_aligned(out, 16)
    # A scale for 128 rows of [M, K], which are 128 columns of the transposed copy.
    strides = (int32(0), int64(0), int64(1)) if columnwise else (int32(7), int64(1), int64(0))
    producer = Struct((data, scale_inv, int32(columns), *strides))
    element, of = check_element(what, out), check_float8(what, dtype)
    kernel = _dequantize(element, of, columnwise, aligned)
    launch_decoder(kernel, producer, out, rows, columns, columnwise)


# -- kernels ------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _quantize(producer: str, to: str, aligned: bool) -> Kernel:
    return store_kernel("grouped_fp8", producer, f"GroupedFp8Store<{to}, {boolean(aligned)}>")


@functools.cache
def _dequantize(element: str, of: str, columnwise: bool, aligned: bool) -> Kernel:
    producer = f"fuser::BlockProducer<{element}, {of}, {boolean(aligned)}>"
    return decoder_kernel("grouped_fp8", producer, element, aligned, columnwise)


def stores(producer: str, to: DType, aligned: bool) -> tuple[Kernel, ...]:
    """The kernels of a producer of padded groups with the store of FP8."""
    return (_quantize(producer, FLOAT8[to], aligned),) if "Grouped" in producer else ()


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel whose input is a matrix."""
    dequantizing = tuple(
        _dequantize(element, of, columnwise, aligned)
        for element, of, aligned in decoder_types()
        for columnwise in (False, True)
    )
    return dequantizing + quantizing_kernels(
        lambda producer, to, aligned: stores(f"fuser::GroupedProducer<{producer}>", to, aligned)
    )
