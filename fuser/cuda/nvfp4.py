"""NVFP4 launchers: the functions of ``fuser.reference.nvfp4``.

Data is uint8, two E2M1 values a byte; columnwise data is stored transposed, ``[K, M / 2]``. Scales
are uint8 and hold E4M3, in the shapes of ``formats.NVFP4``. Groups of rows start at multiples of
128 rows and have amaxes of their own; rows after the last group are neither read nor written.
The rules that all launchers of formats share are in :mod:`fuser.cuda.tiled`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import numpy as np
import torch

from fuser.cuda.arguments import ELEMENTS, Producer, Struct, int32
from fuser.cuda.checks import (
    boolean,
    check_buffer,
    check_buffers,
    check_copy,
    check_element,
    check_matrix,
    is_aligned,
)
from fuser.cuda.launch import TILE, Kernel
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
from fuser.formats import (
    HADAMARD_SIGNS,
    NVFP4_BLOCK,
    NumberFormat,
    check_multiple,
    nvfp4_scale_shape,
)

BOOLEANS = (False, True)


def hadamard_amax(
    x: torch.Tensor | Producer,
    *,
    random_signs: bool = True,
    out: torch.Tensor,
    tiles: torch.Tensor | None = None,
) -> None:
    """Raise ``out[0]`` to ``max |x|`` and ``out[1]`` to that of its Hadamard transform along M.

    A NaN is above all numbers. Reads ``b`` bytes an element, once. Without a transform, use
    ``fp8_scaling.amax``. ``x`` is ``[M, K]``, multiples of 16, or a producer of such values;
    ``out`` is fp32 ``[2]``, zeroed by the caller. ``tiles``, int32 ``[M / 128, 4]``, are those of
    groups whose padded rows ``x`` produces; ``out`` is then ``[G, 2]``.
    """
    launcher = "NVFP4 hadamard_amax"
    producer = as_producer(launcher, x)
    producer = producer.alone or producer
    m, k = producer.rows, producer.columns
    check_multiple("NVFP4", m, k, NVFP4_BLOCK)
    check_buffer(launcher, "tiles", tiles, torch.int32, (m // TILE, 4))
    check_buffer(launcher, "out", out, torch.float32, (2,) if tiles is None else (len(out), 2))
    fields = (out, signs_of(random_signs))
    if tiles is None:
        launch_store(_amax(producer.type, ""), producer, Struct(fields))
    else:
        launch_store(_amax(producer.type, "Grouped"), producer, Struct((*fields, tiles)))


def quantize(
    format_: NumberFormat,
    x: torch.Tensor | Producer,
    buffers: Mapping[str, torch.Tensor | None],
    amax_value: torch.Tensor,
    *,
    hadamard: bool = False,
    random_signs: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    tiles: torch.Tensor | None = None,
) -> None:
    """Quantize ``x`` in blocks of 16, or 16x16 as the format says, for the given amax.

    Moves ``b + 1/2`` bytes an element for one copy and ``b + 1`` for both, and 1 for every 16
    elements and copy; nothing if ``x`` is empty. ``x`` is ``[M, K]``, multiples of 16, or a
    producer of such values. ``amax_value`` is fp32 ``[1]``, or ``[2]`` with one amax for the
    rowwise and one for the columnwise copy (:func:`hadamard_amax`); with the ``tiles`` of groups it
    is ``[G, 1]`` or ``[G, 2]``. The options are as in the reference.
    """
    launcher, layout = "NVFP4 quantize", format_.layout
    producer = as_producer(launcher, x)
    m, k = producer.rows, producer.columns
    check_multiple("NVFP4", m, k, NVFP4_BLOCK)
    check_buffer(launcher, "tiles", tiles, torch.int32, (m // TILE, 4))
    is_any = check_buffers(launcher, layout if tiles is None else layout.of_groups, m, k, buffers)
    groups, amaxes = amax_value.shape[: amax_value.dim() - 1], amax_value.shape[-1]
    if amaxes not in (1, 2) or len(groups) != (tiles is not None):
        raise InputError(
            f"{launcher} takes one or two amaxes; got the shape {tuple(amax_value.shape)}."
        )
    check_buffer(launcher, "amax_value", amax_value, torch.float32, (*groups, amaxes))
    if offset < 0:
        raise InputError(f"{launcher} got offset {offset} into its random words.")
    if not is_any:
        return
    row, row_scale, row_amax = map(buffers.get, layout.rowwise)
    col, col_scale, col_amax = map(buffers.get, layout.columnwise)
    aligned = producer.is_aligned and is_aligned(row, 4) and is_aligned(col, 8)
    copies = (amax_value, row, row_scale, row_amax, col, col_scale, col_amax)
    rounding = (np.uint64(seed % 2**64), np.uint64(offset))
    is_square = format_.block_size > NVFP4_BLOCK
    how = (int32(amaxes - 1), int32(is_square), signs_of(random_signs))
    scope, of_scope = ("", ()) if tiles is None else ("Grouped", (tiles,))
    kernel = _quantize(producer.type, scope, hadamard and col is not None, stochastic, aligned)
    launch_store(kernel, producer, Struct((*copies, *rounding, *how, *of_scope)))


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
    out: torch.Tensor,
) -> None:
    """Write ``q * (scale * amax / (6 * 448))``, rounded once, to ``out [M, K]``.

    Moves ``1/2 + b`` bytes an element. Reads a rowwise copy, or a columnwise copy, which is
    transposed back; does not invert a Hadamard transform. ``amax`` is fp32 ``[1]``, or of each 128
    rows of groups, ``[M / 128]``.
    """
    launcher = "NVFP4 dequantize"
    rows, bytes_of_row = check_matrix(launcher, data)
    columns = 2 * bytes_of_row
    check_multiple("NVFP4", rows, columns, NVFP4_BLOCK)
    scales = (scale, torch.uint8, nvfp4_scale_shape(rows, columns, False))
    check_copy(launcher, "data", data, (rows, bytes_of_row), "scale", *scales)
    m, k = (columns, rows) if columnwise else (rows, columns)
    is_grouped = len(amax) != 1
    check_buffer(launcher, "amax", amax, torch.float32, (m // TILE,) if is_grouped else (1,))
    check_buffer(launcher, "out", out, out_dtype, (m, k))
    aligned = is_aligned(data, 4) and is_aligned(out, 16)
    producer = Struct((data, scale, amax, int32(columns)))
    kernel = _dequantize(check_element(launcher, out), columnwise, aligned, is_grouped)
    launch_decoder(kernel, producer, out, rows, columns, columnwise)


def signs_of(random_signs: bool) -> np.int32:
    """The argument of the signs of a Hadamard transform."""
    return int32(HADAMARD_SIGNS if random_signs else 0)


# -- kernels ------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _amax(producer: str, scope: str) -> Kernel:
    return store_kernel("nvfp4", producer, f"{scope}HadamardAmaxStore")


@functools.lru_cache(maxsize=1024)
def _quantize(producer: str, scope: str, hadamard: bool, stochastic: bool, aligned: bool) -> Kernel:
    flags = ", ".join(map(boolean, (hadamard, stochastic, aligned)))
    return store_kernel("nvfp4", producer, f"{scope}Nvfp4Store<{flags}>")


@functools.cache
def _dequantize(element: str, columnwise: bool, aligned: bool, is_grouped: bool) -> Kernel:
    flags = f"{boolean(columnwise)}, {boolean(aligned)}" if is_grouped else boolean(aligned)
    producer = f"fuser::{'Grouped' * is_grouped}Nvfp4Producer<{element}, {flags}>"
    return decoder_kernel("nvfp4", producer, element, aligned, columnwise)


def stores(producer: str, aligned: bool) -> tuple[Kernel, ...]:
    """The kernels of a producer, of a matrix or of padded groups, with each store of NVFP4."""
    scope = "Grouped" if "GroupedProducer" in producer else ""
    pairs = itertools.product(BOOLEANS, BOOLEANS)
    quantizing = (_quantize(producer, scope, *flags, aligned) for flags in pairs)
    return (_amax(producer, scope), *quantizing)


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel whose input is a matrix."""
    names = ELEMENTS.values()
    types = itertools.product(names, BOOLEANS, BOOLEANS, BOOLEANS)
    producers = [(loads(name, of_producer), b) for name in names for of_producer, b in ALIGNED]
    producers += [(f"fuser::GroupedProducer<{producer}>", b) for producer, b in producers]
    stored = (kernel for producer in producers for kernel in stores(*producer))
    return (*itertools.starmap(_dequantize, types), *stored)
