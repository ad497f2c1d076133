"""Launchers of FP8 with one scale a tensor: the functions of ``fuser.reference.fp8_scaling``.

Data is uint8 and holds E4M3 or E5M2, scales and amaxes are fp32 ``[1]``; an output that is None is
not written. The rules that all launchers of formats share are in :mod:`fuser.cuda.tiled`. Groups of
rows start at multiples of 128 rows and have amaxes and scales of their own; the scales are stored
of each 128 rows, and rows after the last group are neither read nor written.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from fuser.cuda.arguments import ELEMENTS, TILE_RUN, Producer, Struct, float32, int32, int64
from fuser.cuda.checks import (
    FLOAT8,
    bits_of,
    boolean,
    check_buffer,
    check_buffers,
    check_element,
    check_float8,
    check_matrix,
    is_aligned,
)
from fuser.cuda.launch import TILE, Kernel, Launch, tiles
from fuser.cuda.tiled import (
    as_producer,
    block_decoders,
    decode_blocks,
    decoder_types,
    launch_store,
    quantizing_kernels,
    store_kernel,
    transposes_aligned,
)
from fuser.errors import InputError
from fuser.formats import DType, NumberFormat, ceil_div
from fuser.torch_private import size_hint

# As in fp8_scaling.cu: the threads of a block, and the elements of a block in a stream.
THREADS = 256
STREAM_BLOCK = THREADS * 4 * 8

# States in one launch of the update. Each takes 40 bytes of the arguments, which may have 4 KB.
UPDATE_SIZES = (4, 96)

_ANY = NumberFormat("FP8", DType.kFloat8E4M3)  # of an amax alone


def amax(
    x: torch.Tensor | Producer, *, out: torch.Tensor, tiles: torch.Tensor | None = None
) -> None:
    """Raise ``out`` to ``max |x|``; a NaN is above all numbers. Reads ``b`` bytes an element.

    ``x`` is ``[M, K]``, or contiguous of any shape, or a producer; ``out`` is fp32 ``[1]``, zeroed
    by the caller. ``tiles``, int32 ``[M / 128, 4]``, are those of groups whose padded rows ``x``
    produces; ``out`` is then ``[G]``.
    """
    if tiles is None and isinstance(x, torch.Tensor) and x.is_contiguous():
        check_buffer("amax", "out", out, torch.float32, (1,))
        _amax(check_element("amax", x), is_aligned(x, 16))(
            _stream(x.numel()), x, out, int64(x.numel())
        )
    else:
        quantize(_ANY, x, {}, recorded=out, tiles=tiles)


def quantize(
    format_: NumberFormat,
    x: torch.Tensor | Producer,
    buffers: Mapping[str, torch.Tensor | None],
    *,
    amax_value: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    pow2: bool = False,
    eps: float = 0.0,
    recorded: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
) -> None:
    """Quantize ``x`` and raise ``recorded`` to its amax, in one pass.

    Moves ``b + 1`` bytes an element for one copy, ``b + 2`` for both. ``x`` is ``[M, K]``, or a
    producer of such values.

    The scale follows from ``amax_value``, with ``pow2`` and ``eps`` as in the reference of current
    scaling; or it is ``scale``, as in delayed scaling. With both, it is the smaller of ``scale``
    and the format's largest value over ``amax_value``, if that is finite. If neither is given, and
    ``x`` is one tile (:func:`is_one_tile`), the kernel computes the amax. ``recorded`` is not
    negative; for example an entry of an amax history. These three are fp32 ``[1]``, or with the
    ``tiles`` of groups, as :func:`amax` takes them, ``[G]``.
    """
    launcher, layout, is_grouped = "FP8 quantize", format_.layout, tiles is not None
    to = check_float8(launcher, format_.element)
    m, k = check_matrix(launcher, x) if isinstance(x, torch.Tensor) else (x.rows, x.columns)
    if is_grouped:
        check_buffer(launcher, "tiles", tiles, torch.int32, (m // TILE, 4))
    is_any = check_buffers(launcher, layout.of_groups if is_grouped else layout, m, k, buffers)
    vectors = [vector for vector in (amax_value, scale, recorded) if vector is not None]
    groups = len(vectors[0]) if is_grouped and vectors else 1
    for vector in vectors:
        check_buffer(launcher, "an amax or scale", vector, torch.float32, (groups,))
    row, col, scale_inv = map(buffers.get, layout.buffers)
    if is_any and scale_inv is None:
        raise InputError(f"{launcher} got bytes without _scale_inv.")
    finds_amax = is_any and amax_value is None and scale is None
    scaling = (amax_value, scale, scale_inv, bits_of(eps), int32(pow2))  # fuser::TensorScale
    is_stream = is_any and col is None and not finds_amax
    if is_stream and isinstance(x, torch.Tensor) and x.is_contiguous():
        _stream_cast(check_element(launcher, x), to, m * k, x, scaling, row, recorded)
        return
    producer = as_producer(launcher, x)
    if finds_amax and (is_grouped or not is_one_tile(m, k)):
        raise InputError(f"{launcher} of a matrix {[m, k]} needs its amax; it is no single tile.")
    fields: tuple[object, ...] = (*scaling, row, col, recorded)
    if is_grouped:
        producer = producer if is_any else producer.alone or producer
        fields = (tiles, *scaling[:3], row, col, recorded, *scaling[3:])
    elif m * k == 0:
        _stream_cast(ELEMENTS[producer.dtype], to, 0, None, scaling, row, recorded)
        return
    kernel = _tiled(producer.type, to, transposes_aligned(producer, row, col), is_grouped)
    launch_store(kernel, producer, Struct(fields))


def is_one_tile(rows: int, columns: int) -> bool:
    """Whether one block quantizes the whole matrix, and its width allows vectors."""
    rows = size_hint(rows)
    return 0 < rows <= TILE and 0 < columns <= TILE and columns % TILE_RUN == 0


def transpose(data: torch.Tensor, *, out: torch.Tensor) -> None:
    """Transpose ``data [M, K]``, uint8 and contiguous, to ``out [K, M]``. 2 bytes an element."""
    m, k = check_matrix("transpose", data)
    check_buffer("transpose", "data", data, torch.uint8, (m, k))
    check_buffer("transpose", "out", out, torch.uint8, (k, m))
    aligned = is_aligned(data, 8) and k % 8 == 0 and is_aligned(out, 16) and m % 16 == 0
    _transpose(aligned)(tiles(m, k), data, out, int64(m), int32(k))


def dequantize(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    out: torch.Tensor,
) -> None:
    """Write ``data * scale_inv``, rounded once, to ``out``. Moves ``1 + b`` bytes an element.

    ``data`` is contiguous, of any shape, which ``out`` has too.
    """
    check_buffer("dequantize", "data", data, torch.uint8, data.shape)
    check_buffer("dequantize", "scale_inv", scale_inv, torch.float32, (1,))
    check_buffer("dequantize", "out", out, out_dtype, data.shape)
    aligned = is_aligned(data, 8) and is_aligned(out, 16)
    kernel = _dequantize(
        check_element("dequantize", out), check_float8("dequantize", dtype), aligned
    )
    n = data.numel()
    kernel(_stream(n), data, scale_inv, out, int64(n))


def dequantize_groups(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
    out: torch.Tensor,
) -> None:
    """As :func:`dequantize`, with a scale of each 128 rows, which belong to one group.

    ``data`` is ``[M, K]``, or ``[K, M]`` if ``columnwise``, which is transposed back; ``scale_inv``
    is ``[M / 128]``.
    """
    launcher = "dequantize_groups"
    rows, columns = check_matrix(launcher, data)
    check_buffer(launcher, "data", data, torch.uint8, (rows, columns))
    tiles_of_rows = (columns if columnwise else rows) // TILE
    check_buffer(launcher, "scale_inv", scale_inv, torch.float32, (tiles_of_rows,))
    # A scale for 128 rows of [M, K], which are 128 columns of the transposed copy.
    strides = (int32(0), int64(0), int64(1)) if columnwise else (int32(7), int64(1), int64(0))
    producer = Struct((data, scale_inv, int32(columns), *strides))
    decode_blocks("grouped_fp8", launcher, producer, dtype, out_dtype, columnwise, out)


def update_delayed(
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_fp8: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor | None] | None = None,
    *,
    margin: int = 0,
    algorithm: str = "max",
) -> None:
    """Apply the reference's ``update_delayed`` to many states, up to 96 in one launch.

    Of each state there is a history, fp32 ``[length, n]``, row 0 the newest, and fp32 ``[n]``
    scales, largest values of the formats, and newest amaxes or None, as in the reference. Histories
    and scales are read and written.
    """
    if algorithm not in ("max", "most_recent"):
        raise InputError(
            f"Delayed scaling got amax algorithm {algorithm!r}; it is 'max' or 'most_recent'."
        )
    newest = [None] * len(scales) if amaxes is None else amaxes
    counts = {len(amax_histories), len(scales), len(max_fp8), len(newest)}
    if len(counts) != 1:
        raise InputError(
            f"Delayed scaling got {len(amax_histories)} amax histories, {len(scales)} scales, "
            f"{len(max_fp8)} maxima and {len(newest)} amaxes."
        )
    states = list(zip(amax_histories, scales, max_fp8, newest, strict=True))
    for history, scale, largest, amax_of_step in states:
        launcher = "update_delayed"
        length, count = check_matrix(launcher, history)
        check_buffer(launcher, "an amax history", history, torch.float32, (length, count))
        check_buffer(launcher, "a scale", scale, torch.float32, (count,))
        check_buffer(launcher, "a maximum", largest, torch.float32, (count,))
        check_buffer(launcher, "an amax", amax_of_step, torch.float32, (count,))
    states = [state for state in states if state[0].numel()]
    for first in range(0, len(states), UPDATE_SIZES[-1]):
        some = states[first : first + UPDATE_SIZES[-1]]
        size = next(size for size in UPDATE_SIZES if size >= len(some))
        fields = [part for state in some for part in (*state, *map(int32, state[0].shape))]
        fields += [None, None, None, None, int32(0), int32(0)] * (size - len(some))
        widest = max(state[1].numel() for state in some)
        _update(size)(
            Launch((widest, len(some)), (THREADS,)),
            Struct(tuple(fields)),
            float32(2.0**-margin),
            int32(algorithm == "most_recent"),
        )


# -- launches -----------------------------------------------------------------


def _stream_cast(
    element: str,
    to: str,
    n: int,
    x: torch.Tensor | None,
    scaling: tuple[object, ...],
    row: torch.Tensor | None,
    recorded: torch.Tensor | None,
) -> None:
    kernel = _cast(element, to, is_aligned(x, 16) and is_aligned(row, 8))
    kernel(_stream(n), x, Struct(scaling), row, recorded, int64(n))


@functools.lru_cache(maxsize=1024)
def _stream(n: int) -> Launch:
    """The launch of a stream; an empty tensor has one block, which writes its scale."""
    return Launch((max(1, ceil_div(n, STREAM_BLOCK)),), (THREADS,))


# -- kernels ------------------------------------------------------------------


@functools.cache
def _amax(element: str, aligned: bool) -> Kernel:
    return Kernel("fp8_scaling", f"fuser_amax<{element}, {boolean(aligned)}>")


@functools.cache
def _cast(element: str, to: str, aligned: bool) -> Kernel:
    return Kernel("fp8_scaling", f"fuser_fp8_cast<{element}, {to}, {boolean(aligned)}>")


@functools.lru_cache(maxsize=1024)
def _tiled(producer: str, to: str, aligned: bool, is_grouped: bool) -> Kernel:
    source, scope = ("grouped_fp8", "Grouped") if is_grouped else ("fp8_scaling", "")
    return store_kernel(source, producer, f"{scope}Fp8Store<{to}, {boolean(aligned)}>")


@functools.cache
def _dequantize(element: str, of: str, aligned: bool) -> Kernel:
    return Kernel("fp8_scaling", f"fuser_fp8_dequantize<{element}, {of}, {boolean(aligned)}>")


@functools.cache
def _transpose(aligned: bool) -> Kernel:
    return Kernel("fp8_scaling", f"fuser_fp8_transpose<{boolean(aligned)}>")


@functools.cache
def _update(size: int) -> Kernel:
    return Kernel("fp8_scaling", f"fuser_update_delayed<{size}>")


def stores(producer: str, to: DType, aligned: bool) -> tuple[Kernel, ...]:
    """The kernels of a producer, of a matrix or of padded groups, with the store of FP8."""
    return (_tiled(producer, FLOAT8[to], aligned, "GroupedProducer" in producer),)


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel whose input is a matrix."""
    by_element = [_amax(e, a) for e in ELEMENTS.values() for a in (False, True)]
    by_both = [kernel(*types) for kernel in (_cast, _dequantize) for types in decoder_types()]
    others = [_transpose(False), _transpose(True), *map(_update, UPDATE_SIZES)]
    grouped = quantizing_kernels(
        lambda producer, to, aligned: stores(f"fuser::GroupedProducer<{producer}>", to, aligned)
    )
    stored = (*quantizing_kernels(stores), *grouped)
    return (*by_element, *by_both, *block_decoders("grouped_fp8"), *stored, *others)
