"""Launchers of NVFP4 with the amaxes of groups of rows, which start at multiples of 128 rows.

Data and scales are those of :mod:`fuser.cuda.nvfp4`. Amaxes of a copy are fp32 ``[tiles]``: of each
128 rows, which belong to one group. Rows after the last group are neither read nor written.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

from fuser.cuda.arguments import ELEMENTS, Producer, Struct, int32
from fuser.cuda.checks import boolean, check_buffer, check_copy, check_element, is_aligned
from fuser.cuda.launch import TILE, Kernel
from fuser.cuda.nvfp4 import BOOLEANS, signs_of
from fuser.cuda.tiled import ALIGNED, decoder_kernel, launch_decoder, launch_store, loads
from fuser.cuda.tiled import store_kernel as _store_kernel
from fuser.formats import NVFP4_BLOCK, check_multiple, nvfp4_scale_shape


def hadamard_amaxes(
    x: Producer, tiles: torch.Tensor, *, random_signs: bool = True, out: torch.Tensor
) -> None:
    """Raise ``out`` to the amaxes of the groups and of their Hadamard transforms along columns.

    Parameters
    ----------
    x
        Read; :func:`fuser.cuda.grouped.padded_rows` of ``tiles``.
    tiles
        Read; int32 ``[M / 128, 4]``.
    random_signs
        As in the reference.
    out
        Read and written; fp32 ``[G, 2]``, not negative.

    Raises
    ------
    InputError
        If a tensor does not match its description.
    """
    check_buffer("hadamard_amaxes", "tiles", tiles, torch.int32, (x.rows // TILE, 4))
    check_buffer("hadamard_amaxes", "out", out, torch.float32, (len(out), 2))
    x = x.alone or x
    launch_store(_amax(x.type), x, Struct((out, signs_of(random_signs), tiles)))


def quantize(
    x: Producer,
    tiles: torch.Tensor,
    *,
    two_dimensional: bool = False,
    hadamard: bool = False,
    random_signs: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    amax_value: torch.Tensor,
    row: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    row_amax: torch.Tensor | None = None,
    col: torch.Tensor | None = None,
    col_scale: torch.Tensor | None = None,
    col_amax: torch.Tensor | None = None,
) -> None:
    """Quantize the rows of padded groups for the given amaxes of the groups.

    Parameters
    ----------
    x, tiles
        As :func:`hadamard_amaxes` takes them.
    two_dimensional, hadamard, random_signs, stochastic, seed, row, row_scale, col, col_scale
        As in :func:`fuser.cuda.nvfp4.quantize`. Element ``i`` of a copy of the padded matrix uses
        random word ``i``.
    amax_value
        Read; fp32 ``[G, 1]``, or ``[G, 2]`` with one amax for each copy.
    row_amax, col_amax
        Written with their copies; fp32 ``[M / 128]``.

    Raises
    ------
    InputError
        If a tensor does not match its description, or K is not a multiple of 16.
    """
    what = "grouped NVFP4 quantize"
    m, k = x.rows, x.columns
    check_multiple("NVFP4", m, k, NVFP4_BLOCK)
    check_buffer(what, "tiles", tiles, torch.int32, (m // TILE, 4))
    row_shape, col_shape = (nvfp4_scale_shape(m, k, columnwise) for columnwise in BOOLEANS)
    check_copy(what, "row", row, (m, k // 2), "row_scale", row_scale, torch.uint8, row_shape)
    check_copy(what, "col", col, (k, m // 2), "col_scale", col_scale, torch.uint8, col_shape)
    amaxes = 2 if amax_value.shape[1:] == (2,) else 1
    check_buffer(what, "amax_value", amax_value, torch.float32, (len(amax_value), amaxes))
    for name, out in (("row_amax", row_amax), ("col_amax", col_amax)):
        check_buffer(what, name, out, torch.float32, (m // TILE,))
    if row is None and col is None:
        return
    aligned = x.is_aligned and is_aligned(row, 4) and is_aligned(col, 8)
    copies = (amax_value, row, row_scale, row_amax, col, col_scale, col_amax)
    rounding = (np.uint64(seed % 2**64), np.uint64(0))
    how = (int32(amaxes - 1), int32(two_dimensional), signs_of(random_signs))
    kernel = _quantize(x.type, hadamard and col is not None, stochastic, aligned)
    launch_store(kernel, x, Struct((*copies, *rounding, *how, tiles)))


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
    out: torch.Tensor,
) -> None:
    """As :func:`fuser.cuda.nvfp4.dequantize`, with an ``amax`` for each 128 rows, ``[M / 128]``.

    Raises
    ------
    InputError
        If a tensor does not match its description.
    """
    what = "grouped NVFP4 dequantize"
    rows, columns = data.shape[0], 2 * data.shape[1]
    scales = (scale, torch.uint8, nvfp4_scale_shape(rows, columns, False))
    check_copy(what, "data", data, (rows, columns // 2), "scale", *scales)
    m, k = (columns, rows) if columnwise else (rows, columns)
    check_buffer(what, "amax", amax, torch.float32, (m // TILE,))
    check_buffer(what, "out", out, out_dtype, (m, k))
    aligned = is_aligned(data, 4) and is_aligned(out, 16)
    producer = Struct((data, scale, amax, int32(columns)))
    kernel = _dequantize(check_element(what, out), columnwise, aligned)
    launch_decoder(kernel, producer, out, rows, columns, columnwise)


# -- kernels ------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _amax(producer: str) -> Kernel:
    return _store_kernel("nvfp4", producer, "GroupedHadamardAmaxStore")


@functools.lru_cache(maxsize=1024)
def _quantize(producer: str, hadamard: bool, stochastic: bool, aligned: bool) -> Kernel:
    flags = ", ".join(map(boolean, (hadamard, stochastic, aligned)))
    return _store_kernel("nvfp4", producer, f"GroupedNvfp4Store<{flags}>")


@functools.cache
def _dequantize(element: str, columnwise: bool, aligned: bool) -> Kernel:
    flags = f"{boolean(columnwise)}, {boolean(aligned)}"
    producer = f"fuser::GroupedNvfp4Producer<{element}, {flags}>"
    return decoder_kernel("nvfp4", producer, element, aligned, columnwise)


def grouped_stores(producer: str, aligned: bool) -> tuple[Kernel, ...]:
    """The kernels of a producer of padded groups with each store of NVFP4."""
    each = itertools.product(BOOLEANS, BOOLEANS)
    return (_amax(producer), *(_quantize(producer, *flags, aligned) for flags in each))


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel whose input is a matrix."""
    names = ELEMENTS.values()
    return (
        *itertools.starmap(_dequantize, itertools.product(names, BOOLEANS, BOOLEANS)),
        *(
            kernel
            for name in names
            for of_producer, of_store in ALIGNED
            for kernel in grouped_stores(
                f"fuser::GroupedProducer<{loads(name, of_producer)}>", of_store
            )
        ),
    )
