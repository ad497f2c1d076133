"""NVFP4 launchers: the functions of ``fuser.reference.nvfp4``.

Data is uint8, two E2M1 values a byte; columnwise data is stored transposed, ``[K, M / 2]``. Scales
are uint8 and hold E4M3, in the shapes of ``formats.nvfp4_scale_shape``.
The rules that all launchers of formats share are in :mod:`fuser.cuda.tiled`.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

from fuser.cuda.arguments import ELEMENTS, Producer, Struct, int32
from fuser.cuda.checks import (
    boolean,
    check_buffer,
    check_copy,
    check_element,
    check_matrix,
    is_aligned,
)
from fuser.cuda.launch import Kernel
from fuser.cuda.tiled import (
    ALIGNED,
    as_producer,
    decoder_kernel,
    launch_decoder,
    launch_store,
    loads,
    store_kernel,
)
from fuser.errors import InputError
from fuser.formats import HADAMARD_SIGNS, NVFP4_BLOCK, check_multiple, nvfp4_scale_shape

BOOLEANS = (False, True)


def hadamard_amax(
    x: torch.Tensor | Producer, *, random_signs: bool = True, out: torch.Tensor
) -> None:
    """Raise ``out[0]`` to ``max |x|`` and ``out[1]`` to that of its Hadamard transform along M.

    A NaN is above all numbers. Reads ``b`` bytes an element, once. Without a transform, use
    ``fp8_scaling.amax``.

    Parameters
    ----------
    x
        Read; ``[M, K]``, multiples of 16, or a producer of such values.
    random_signs
        As in the reference.
    out
        fp32 ``[2]``, zeroed by the caller; read and written.

    Raises
    ------
    InputError
        If a tensor does not match its description, or M or K is not a multiple of 16.
    """
    what = "NVFP4 hadamard_amax"
    producer = as_producer(what, x)
    producer = producer.alone or producer
    m, k = producer.rows, producer.columns
    check_multiple("NVFP4", m, k, NVFP4_BLOCK)
    check_buffer(what, "out", out, torch.float32, (2,))
    launch_store(_amax(producer.type), producer, Struct((out, signs_of(random_signs))))


def quantize(
    x: torch.Tensor | Producer,
    *,
    two_dimensional: bool = False,
    hadamard: bool = False,
    random_signs: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    amax_value: torch.Tensor,
    row: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    row_amax: torch.Tensor | None = None,
    col: torch.Tensor | None = None,
    col_scale: torch.Tensor | None = None,
    col_amax: torch.Tensor | None = None,
) -> None:
    """Quantize ``x`` in blocks of 16, or 16x16 if ``two_dimensional``, for the given amax.

    Moves ``b + 1/2`` bytes an element for one copy and ``b + 1`` for both, and 1 for every 16
    elements and copy.

    Parameters
    ----------
    x
        Read; ``[M, K]``, multiples of 16, or a producer of such values.
    two_dimensional, hadamard, random_signs, stochastic, seed, offset
        As in the reference.
    amax_value
        Read; fp32 ``[1]``, or ``[2]`` with one amax for the rowwise and one for the columnwise
        copy, as :func:`hadamard_amax` computes them.
    row, row_scale
        Written, both or neither; ``[M, K / 2]`` and ``nvfp4_scale_shape(M, K, False)``.
    col, col_scale
        Written, both or neither; ``[K, M / 2]`` and ``nvfp4_scale_shape(M, K, True)``.
    row_amax, col_amax
        Written if given, unless ``x`` is empty; fp32 ``[1]``: the amax of each copy, in a tensor
        of its own.

    Raises
    ------
    InputError
        If a tensor does not match its description, ``offset`` is negative, or M or K is no
        multiple of 16.
    """
    what = "NVFP4 quantize"
    producer = as_producer(what, x)
    m, k = producer.rows, producer.columns
    check_multiple("NVFP4", m, k, NVFP4_BLOCK)
    row_shape, col_shape = (nvfp4_scale_shape(m, k, columnwise) for columnwise in BOOLEANS)
    check_copy(what, "row", row, (m, k // 2), "row_scale", row_scale, torch.uint8, row_shape)
    check_copy(what, "col", col, (k, m // 2), "col_scale", col_scale, torch.uint8, col_shape)
    amaxes = amax_value.numel()
    if amaxes not in (1, 2):
        raise InputError(
            f"{what} takes one or two amaxes; got the shape {tuple(amax_value.shape)}."
        )
    check_buffer(what, "amax_value", amax_value, torch.float32, (amaxes,))
    for name, out in (("row_amax", row_amax), ("col_amax", col_amax)):
        if out is not None:
            check_buffer(what, name, out, torch.float32, (1,))
    if offset < 0:
        raise InputError(f"{what} got offset {offset} into its random words.")
    if row is None and col is None:
        return
    aligned = producer.is_aligned and is_aligned(row, 4) and is_aligned(col, 8)
    copies = (amax_value, row, row_scale, row_amax, col, col_scale, col_amax)
    rounding = (np.uint64(seed % 2**64), np.uint64(offset))
    how = (int32(amaxes - 1), int32(two_dimensional), signs_of(random_signs))
    store = Struct((*copies, *rounding, *how))
    kernel = _quantize(producer.type, hadamard and col is not None, stochastic, aligned)
    launch_store(kernel, producer, store)


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
    out: torch.Tensor,
) -> None:
    """Write ``q * (scale * amax / (6 * 448))``, rounded once, to ``out``.

    Moves ``1/2 + b`` bytes an element. Does not invert a Hadamard transform.

    Parameters
    ----------
    data, scale, amax
        Read; a rowwise copy, or a columnwise copy, which is transposed back; amax fp32 ``[1]``.
    out_dtype, out
        Written; ``[M, K]``, contiguous and of this dtype.

    Raises
    ------
    InputError
        If a tensor does not match its description, or M or K is not a multiple of 16.
    """
    what = "NVFP4 dequantize"
    rows, bytes_of_row = check_matrix(what, data)
    columns = 2 * bytes_of_row
    check_multiple("NVFP4", rows, columns, NVFP4_BLOCK)
    scales = (scale, torch.uint8, nvfp4_scale_shape(rows, columns, False))
    check_copy(what, "data", data, (rows, bytes_of_row), "scale", *scales)
    check_buffer(what, "amax", amax, torch.float32, (1,))
    check_buffer(what, "out", out, out_dtype, (columns, rows) if columnwise else (rows, columns))
    aligned = is_aligned(data, 4) and is_aligned(out, 16)
    producer = Struct((data, scale, amax, int32(columns)))
    kernel = _dequantize(check_element(what, out), columnwise, aligned)
    launch_decoder(kernel, producer, out, rows, columns, columnwise)


def signs_of(random_signs: bool) -> np.int32:
    """The argument of the signs of a Hadamard transform."""
    return int32(HADAMARD_SIGNS if random_signs else 0)


# -- kernels ------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _amax(producer: str) -> Kernel:
    return store_kernel("nvfp4", producer, "HadamardAmaxStore")


@functools.lru_cache(maxsize=1024)
def _quantize(producer: str, hadamard: bool, stochastic: bool, aligned: bool) -> Kernel:
    flags = ", ".join(map(boolean, (hadamard, stochastic, aligned)))
    return store_kernel("nvfp4", producer, f"Nvfp4Store<{flags}>")


@functools.cache
def _dequantize(element: str, columnwise: bool, aligned: bool) -> Kernel:
    producer = f"fuser::Nvfp4Producer<{element}, {boolean(aligned)}>"
    return decoder_kernel("nvfp4", producer, element, aligned, columnwise)


def stores(producer: str, aligned: bool) -> tuple[Kernel, ...]:
    """The kernels of a producer with each store of NVFP4."""
    quantizing = [
        _quantize(producer, hadamard, stochastic, aligned)
        for hadamard in BOOLEANS
        for stochastic in BOOLEANS
    ]
    return (_amax(producer), *quantizing)


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel whose input is a matrix."""
    names = ELEMENTS.values()
    return (
        *itertools.starmap(_dequantize, itertools.product(names, BOOLEANS, BOOLEANS)),
        *(
            kernel
            for name in names
            for of_producer, of_store in ALIGNED
            for kernel in stores(loads(name, of_producer), of_store)
        ),
    )
