"""The number formats in numpy: exact values in float64, rounding and bits by tables and integers.

A second definition, written from the formulas alone and sharing nothing with
``fuser.reference``: casts look up sorted tables of every value a format has,
and each fp32 operation is done in float64 (products of two fp32 numbers are
exact there, and quotients round to fp32 as if they were) and rounded once.

Inputs are fp32 arrays; an array of bf16 or fp16 values is passed as those
values in fp32. Scales of blocks come as one number a block, unpadded;
``padded`` and the layout functions place them as the formats store them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FLT_MAX = float(np.finfo(np.float32).max)
LARGEST_INPUT = {"float32": FLT_MAX, "bfloat16": (2.0 - 2.0**-7) * 2.0**127, "float16": 65504.0}


# -- small floats --------------------------------------------------------------------


@dataclass(frozen=True)
class SmallFloat:
    """A sign, exponent and mantissa format; ``nan`` is the byte of a NaN that was cast."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    nan: int

    @cached_property
    def values(self) -> Array:
        """Every finite value from 0 up to ``max``; the index is the code."""
        found = []
        for code in range(2 ** (self.exponent_bits + self.mantissa_bits)):
            exponent, mantissa = divmod(code, 2**self.mantissa_bits)
            fraction = mantissa / 2**self.mantissa_bits
            if exponent == 0:
                value = fraction * 2.0 ** (1 - self.bias)
            else:
                value = (1 + fraction) * 2.0 ** (exponent - self.bias)
            if value > self.max:
                break
            found.append(value)
        return np.array(found)

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def encode(self, x: Array) -> Array:
        """Codes of ``x``: nearest value, ties to the even code, saturating."""
        with np.errstate(invalid="ignore"):  # a signalling NaN
            x = np.asarray(x, np.float64)
        magnitude = np.abs(x)
        midpoints = (self.values[:-1] + self.values[1:]) / 2
        below = np.searchsorted(midpoints, magnitude, side="left")
        above = np.searchsorted(midpoints, magnitude, side="right")
        code = np.where(below % 2 == 0, below, above)
        code = code + np.where(np.signbit(x), self.sign_bit, 0)
        return np.where(np.isnan(x), self.nan, code).astype(np.uint8)

    def decode(self, code: Array) -> Array:
        """Values of codes that :meth:`encode` made, in float64."""
        magnitude = code & (self.sign_bit - 1)
        table = np.full(self.sign_bit, np.nan)
        table[: len(self.values)] = self.values
        values: Array = np.where(code & self.sign_bit, -1.0, 1.0) * table[magnitude]
        return values


E4M3 = SmallFloat(exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, nan=0x7F)
E5M2 = SmallFloat(exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0, nan=0x7F)
# It has no NaN; the hardware's cast turns one into +6.
E2M1 = SmallFloat(exponent_bits=2, mantissa_bits=1, bias=1, max=6.0, nan=0x7)

FLOAT8 = {"e4m3": E4M3, "e5m2": E5M2}


# -- fp32 arithmetic -----------------------------------------------------------------


def fp32(x: Array | float) -> Array:
    """``x`` rounded to fp32, subnormals kept."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(x, np.float64).astype(np.float32)


def bfloat16(x: Array) -> Array:
    """fp32 ``x`` rounded to bf16, ties to even, as fp32; NaN stays NaN."""
    bits: Array = bits_of(x).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    rounded = bits.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def product(a: Array | float, b: Array | float) -> Array:
    """``a * b`` of fp32 numbers, rounded once."""
    with np.errstate(all="ignore"):
        return fp32(np.asarray(a, np.float64) * np.asarray(b, np.float64))


def quotient(a: Array | float, b: Array | float) -> Array:
    """``a / b`` of fp32 numbers, rounded once."""
    with np.errstate(all="ignore"):
        return fp32(np.asarray(a, np.float64) / np.asarray(b, np.float64))


def bits_of(x: Array) -> Array:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def from_bits(bits: Array) -> Array:
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


# -- blocks --------------------------------------------------------------------------


def rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def block_amax(x: Array, rows: int, columns: int) -> Array:
    """Largest magnitude of each block of ``rows x columns``; NaN where a block holds one."""
    m, k = x.shape
    whole = np.zeros((rounded_up(m, rows), rounded_up(k, columns)), np.float32)
    whole[:m, :k] = np.abs(x)
    tiled = whole.reshape(whole.shape[0] // rows, rows, whole.shape[1] // columns, columns)
    amaxes: Array = tiled.max(axis=(1, 3), initial=0)
    return amaxes


def spread(scales: Array, rows: int, columns: int, shape: tuple[int, ...]) -> Array:
    """One number an element from one number a block."""
    return scales.repeat(rows, axis=0).repeat(columns, axis=1)[: shape[0], : shape[1]]


def padded(scales: Array, row_multiple: int, column_multiple: int) -> Array:
    """``scales`` with zero rows and columns behind, up to the multiples."""
    m, k = scales.shape
    whole = np.zeros((rounded_up(m, row_multiple), rounded_up(k, column_multiple)), scales.dtype)
    whole[:m, :k] = scales
    return whole


# -- FP8 with fp32 scales ------------------------------------------------------------


def scale_from_amax(
    amax: Array, max_fp8: float, pow2: bool, eps: float, when_infinite: float
) -> Array:
    """The scale of each amax, one after the other."""
    scales = [_scale(a, max_fp8, pow2, fp32(eps), when_infinite) for a in np.ravel(amax)]
    return np.array(scales, np.float32).reshape(np.shape(amax))


def _scale(amax: Array, max_fp8: float, pow2: bool, eps: Array, when_infinite: float) -> Array:
    if amax < eps:
        amax = eps
    if amax == 0 or np.isinf(amax) or np.isnan(amax):
        return fp32(1)
    scale = quotient(max_fp8, amax)
    if np.isinf(scale):
        scale = fp32(when_infinite)
    if pow2:
        scale = from_bits(bits_of(scale) & np.uint32(0xFF800000)).reshape(())
    return scale


def quantize_current(
    x: Array, to: SmallFloat, pow2: bool = False, eps: float = 0.0, amax: Array | None = None
) -> tuple[Array, Array]:
    """Codes ``[M, K]`` and ``scale_inv`` ``[1]``, from the amax of the whole tensor."""
    if amax is None:
        amax = np.array([np.abs(x).max(initial=0)], np.float32)
    scale = scale_from_amax(amax, to.max, pow2, eps, FLT_MAX)
    return to.encode(product(x, scale)), quotient(1, scale)


def quantize_blocks(
    x: Array,
    to: SmallFloat,
    rows: int,
    columns: int,
    pow2: bool = True,
    eps: float = 0.0,
    largest_input: float = FLT_MAX,
) -> tuple[Array, Array]:
    """Codes ``[M, K]`` and ``scale_inv``, one a block of ``rows x columns``."""
    scale = scale_from_amax(block_amax(x, rows, columns), to.max, pow2, eps, largest_input)
    return to.encode(product(x, spread(scale, rows, columns, x.shape))), quotient(1, scale)


def fp8_block_buffers(
    x: Array,
    to: SmallFloat,
    block_dim: int,
    pow2: bool = True,
    eps: float = 0.0,
    largest_input: float = FLT_MAX,
) -> tuple[Array, Array, Array, Array]:
    """Rowwise data and ``scale_inv``, columnwise data and ``scale_inv``, as they are stored."""
    options = (pow2, eps, largest_input)
    if block_dim == 2:
        codes, scale_inv = quantize_blocks(x, to, 128, 128, *options)
        return codes, padded(scale_inv, 1, 4), codes.T, padded(scale_inv.T, 1, 4)
    row, row_scale = quantize_blocks(x, to, 1, 128, *options)
    column, column_scale = quantize_blocks(x, to, 128, 1, *options)
    return row, padded(row_scale.T, 1, 4), column.T, padded(column_scale, 1, 4)


def fp8_rowwise_buffers(
    x: Array, to: SmallFloat, pow2: bool = False, eps: float = 0.0
) -> tuple[Array, Array, Array, Array]:
    """Rowwise data and a ``scale_inv`` a row, columnwise data and one a column, as stored."""
    copies: list[Array] = []
    for values in (x, x.T):
        codes, scale_inv = quantize_blocks(values, to, 1, max(values.shape[1], 1), pow2, eps)
        copies += [codes, scale_inv.reshape(-1)]
    return copies[0], copies[1], copies[2], copies[3]


def delayed_scale_loop(
    steps: Iterable[float],
    length: int,
    max_fp8: float,
    scale: float,
    margin: int = 0,
    algorithm: str = "max",
) -> list[tuple[float, list[float]]]:
    """Scale and sorted history of one tensor after each step, whose amaxes are ``steps``.

    The newest amax stands in front. A zero amax leaves the history where it is.
    """
    history = deque([0.0] * length, maxlen=length)
    after = []
    for newest in steps:
        history[0] = newest
        amax = newest if algorithm == "most_recent" else float(np.max(list(history)))
        if newest != 0:
            history.appendleft(0.0)
        if np.isfinite(amax) and amax > 0:
            scale = float(quotient(max_fp8 * 2.0**-margin, amax))
        if np.isinf(scale):
            scale = FLT_MAX
        after.append((scale, sorted(history)))
    return after


# -- MXFP8 ---------------------------------------------------------------------------


def e8m0_from_amax(amax: Array, max_fp8: float) -> Array:
    """Exponent bytes: the power of two at or above ``amax / max_fp8``, biased by 127."""
    one_over_max = quotient(1, max_fp8)
    return np.array(
        [_e8m0(int(b)) for b in bits_of(product(amax, one_over_max)).ravel()], np.uint8
    ).reshape(np.shape(amax))


def _e8m0(bits: int) -> int:
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    if exponent == 0xFF:
        return 0xFF if mantissa else 0xFE
    rounds_down = mantissa == 0 or exponent == 0xFE or (exponent == 0 and mantissa <= 0x400000)
    return exponent if rounds_down else exponent + 1


def multiplier(e8m0: Array) -> Array:
    """``2^(127 - e)`` as fp32; NaN for 255."""
    exact = np.ldexp(1.0, 127 - e8m0.astype(np.int64))
    return fp32(np.where(e8m0 == 255, np.nan, exact))


def quantize_mxfp8(x: Array, to: SmallFloat, rows: int, columns: int) -> tuple[Array, Array]:
    """Codes ``[M, K]`` and an exponent byte a block of ``rows x columns``."""
    e8m0 = e8m0_from_amax(block_amax(x, rows, columns), to.max)
    return to.encode(product(x, spread(multiplier(e8m0), rows, columns, x.shape))), e8m0


def mxfp8_buffers(
    x: Array, to: SmallFloat, two_dimensional: bool = False
) -> tuple[Array, Array, Array, Array]:
    """Rowwise data and scales, columnwise data and scales, as they are stored."""
    other = 32 if two_dimensional else 1
    row, row_scale = quantize_mxfp8(x, to, other, 32)
    column, column_scale = quantize_mxfp8(x, to, 32, other)
    row_scale = row_scale.repeat(other, axis=0)
    column_scale = column_scale.repeat(other, axis=1)
    return row, padded(row_scale, 128, 4), column, padded(column_scale, 4, 128)


def dequantize_mxfp8(codes: Array, e8m0: Array, to: SmallFloat, rows: int, columns: int) -> Array:
    """Values in fp32 from unpadded exponent bytes."""
    exact = np.ldexp(1.0, e8m0.astype(np.int64) - 127)
    scale = np.where(e8m0 == 255, np.nan, exact)
    return product(to.decode(codes), spread(scale, rows, columns, codes.shape))


def swizzle(scales: Array) -> Array:
    """``scales`` ``[128 i, 4 j]`` element by element into tiles of 128x4, in the same shape."""
    rows, columns = scales.shape
    out = np.zeros(rows * columns, scales.dtype)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (columns // 4) + c // 4
            out[tile * 512 + (r % 32) * 16 + ((r // 32) % 4) * 4 + c % 4] = scales[r, c]
    return out.reshape(rows, columns)


# -- NVFP4 ---------------------------------------------------------------------------


def nvfp4_encode_scale(amax: Array) -> Array:
    """``448 * 6 / amax`` in fp32, at most FLT_MAX, 1 for an amax of 0; NaN stays NaN."""
    scale = np.minimum(quotient(448.0 * 6.0, amax), np.float32(FLT_MAX))
    scales: Array = np.where(amax == 0, np.float32(1), scale)
    return scales


def nvfp4_scales(x: Array, rows: int, columns: int, amax: Array) -> tuple[Array, Array]:
    """E4M3 byte of each block, and the fp32 factor its elements are multiplied with."""
    s_enc = nvfp4_encode_scale(amax)
    s_dec = quotient(1, s_enc)
    wanted = product(block_amax(x, rows, columns), product(s_enc, quotient(1, 6)))
    scale = E4M3.encode(np.minimum(wanted, np.float32(FLT_MAX)))
    factor = quotient(1, product(E4M3.decode(scale), s_dec))
    return scale, np.minimum(factor, np.float32(FLT_MAX))


def quantize_nvfp4(
    x: Array, rows: int, columns: int, amax: Array | None = None, words: Array | None = None
) -> tuple[Array, Array, Array]:
    """E2M1 codes ``[M, K]``, an E4M3 byte a block of ``rows x columns``, amax ``[1]``."""
    if amax is None:
        amax = np.array([np.abs(x).max(initial=0)], np.float32)
    scale, factor = nvfp4_scales(x, rows, columns, amax)
    scaled = product(x, spread(factor, rows, columns, x.shape))
    codes = E2M1.encode(scaled) if words is None else e2m1_at_random(scaled, words)
    return codes, scale, amax


def e2m1_at_random(x: Array, words: Array) -> Array:
    """E2M1 codes of ``x``, up in magnitude where the remainder and 24 random bits reach 1."""
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), E2M1.max)
    below = np.searchsorted(E2M1.values, magnitude, side="right") - 1
    below = np.minimum(below, len(E2M1.values) - 2)
    floor, ceiling = E2M1.values[below], E2M1.values[below + 1]
    remainder = (magnitude - floor) / (ceiling - floor)
    code = below + (remainder * 2**24 + (words >> 8) >= 2**24)
    code = code + np.where(np.signbit(x), E2M1.sign_bit, 0)
    return np.where(np.isnan(x), E2M1.nan, code).astype(np.uint8)


def hadamard(x: Array, mask: int) -> Array:
    """``H (signs * x) / 4`` over every 16 elements of the last dimension, rounded to bf16.

    Bit ``i`` of ``mask`` changes the sign of element ``i``; pairs at distance 1
    are combined first, then 2, 4 and 8, each sum rounded to fp32.
    """
    signs = np.array([-1.0 if mask >> i & 1 else 1.0 for i in range(16)])
    y = fp32(x.reshape(-1, 16) * signs)
    for distance in (1, 2, 4, 8):
        pairs = y.reshape(-1, 2, distance).astype(np.float64)
        left, right = pairs[:, 0], pairs[:, 1]
        y = fp32(np.stack((left + right, left - right), axis=1))
    return bfloat16(product(y.reshape(x.shape), 0.25))


def hadamard_by_matrix(x: Array, mask: int) -> Array:
    """:func:`hadamard` as one product with a matrix, whose sums are made in float64."""
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.array([-1.0 if mask >> i & 1 else 1.0 for i in range(16)])
    groups = x.reshape(-1, 16).astype(np.float64)
    return bfloat16(fp32((groups * signs) @ matrix / 4).reshape(x.shape))


def packed(codes: Array) -> Array:
    """Two codes a byte along the last dimension, the first in the low nibble."""
    pairs: Array = codes[:, 0::2] | codes[:, 1::2] << 4
    return pairs


def unpacked(data: Array) -> Array:
    """The codes of :func:`packed`."""
    return np.stack((data & 0xF, data >> 4), axis=-1).reshape(data.shape[0], -1)


def nvfp4_copy(
    x: Array, two_dimensional: bool = False, amax: Array | None = None, words: Array | None = None
) -> tuple[Array, Array, Array]:
    """Data, scales and amax of ``x`` as they are stored; the columnwise copy is that of ``x.T``."""
    rows = 16 if two_dimensional else 1
    codes, scale, amax = quantize_nvfp4(x, rows, 16, amax, words)
    return packed(codes), padded(scale.repeat(rows, axis=0), 128, 4), amax


def dequantize_nvfp4(codes: Array, scale: Array, amax: Array, rows: int, columns: int) -> Array:
    """Values in fp32 from unpacked codes and unpadded scales."""
    one_over_maxes = quotient(1, 6.0 * 448.0)
    factor = product(product(E4M3.decode(scale), amax), one_over_maxes)
    return product(E2M1.decode(codes), spread(factor, rows, columns, codes.shape))


# -- random numbers ------------------------------------------------------------------


def philox_4x32_10(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Four random words of 32 bits from a counter of four and a key of two.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11): ten
    rounds of two 32x32 -> 64 bit products, the key raised before each but the first.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def random_words(seed: int, offset: int, shape: tuple[int, ...], stream: int) -> Array:
    """Words ``offset ...`` of a stream: four a counter ``(low, high, stream, 0)``, key ``seed``."""
    key = (seed % 2**32, seed >> 32 & 0xFFFFFFFF)
    last = offset + int(np.prod(shape))
    words: list[int] = []
    for block in range(offset // 4, -(-last // 4)):
        words += philox_4x32_10((block % 2**32, block >> 32, stream, 0), key)
    skip = offset % 4
    return np.array(words[skip : skip + last - offset], np.int64).reshape(shape)
