"""NVFP4 in plain torch: 16 E2M1 elements share an E4M3 scale, and the tensor an fp32 amax.

Data is uint8, two values a byte, the low nibble first. Columnwise data is stored transposed,
``[K, M / 2]``, with blocks along M. Scales are uint8 and hold E4M3, padded with zeros to whole
tiles (``formats.nvfp4_scale_shape``). The scheme is that of NVIDIA, "Pretraining Large Language
Models with NVFP4" (2025): two levels of scales, 16x16 blocks for weights, stochastic rounding for
gradients and a random Hadamard transform of the operands of wgrad. Four over six, in which blocks
choose between two scales, is that of Cook et al., "Four Over Six: More Accurate NVFP4 Quantization
with Adaptive Block Scaling" (2025).

A NaN is E2M1's +6 (the format has none; the GPU's conversion does the same) in a block whose
scale is NaN; since the tensor's amax is NaN too, all of the tensor dequantizes to NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fuser.formats import (
    GROUP_TILE,
    HADAMARD_SIGNS,
    NVFP4_BLOCK,
    DType,
    check_multiple,
    nvfp4_scale_shape,
)
from fuser.reference.dropout import philox

Wanted = torch.Tensor | None  # None if not requested

FLOAT32_MAX = torch.finfo(torch.float32).max
E2M1_MAX = DType.kFloat4E2M1.max
E4M3_MAX = DType.kFloat8E4M3.max

# Rowwise and columnwise data round with independent streams: word 2 of the Philox counter.
_ROWWISE_STREAM, _COLUMNWISE_STREAM = 0, 1


def quantize(
    x: torch.Tensor,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    two_dimensional: bool = False,
    row_scaled: bool = False,
    hadamard: bool = False,
    random_signs: bool = True,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    amax_value: torch.Tensor | None = None,
    four_over_six: str | None = None,
    e4m3_max: float = E4M3_MAX,
) -> tuple[Wanted, Wanted, Wanted, Wanted, Wanted, Wanted]:
    """Quantize ``x [M, K]``, multiples of 16.

    ``two_dimensional``: blocks of 16x16 share a scale, so that both copies dequantize to the same
    values. ``row_scaled``: each row of a copy, ``[M]`` of one and ``[K]`` of the other, has an amax
    of its own. ``hadamard``: the columnwise copy is transformed along M
    (:func:`hadamard_transform`), before its amax is taken. ``stochastic``: element ``i`` of a copy,
    counted in the order it is stored in, is rounded by word ``offset + i`` of the copy's stream
    (:func:`random_words`).

    ``amax_value`` is the amax, if a group has reduced it: fp32 ``[1]``, or ``[2]`` (rowwise,
    columnwise), or with ``row_scaled`` ``[K]``, those of the rows of the columnwise copy.
    ``four_over_six`` is ``"MAE"`` or ``"MSE"``: of each block keep the one of two quantizations
    with the smaller sum of absolute errors, or of their squares: with its largest value at 6, or at
    4 (on equal sums at 6); not with ``stochastic``. ``e4m3_max`` is the largest block scale, where
    the largest value is at 6: 448, or 256.

    Returns row, row_scale, amax_row, col, col_scale, amax_col: data ``[M, K / 2]`` and
    ``[K, M / 2]``, scales in their padded shapes, amaxes fp32 ``[1]``, or of rows ``[M]`` and
    ``[K]``; None if not requested.
    """
    check_multiple("NVFP4", x.shape[0], x.shape[1], NVFP4_BLOCK)
    x = x.float()
    rows = NVFP4_BLOCK if two_dimensional else 1
    reduced = None if amax_value is None else amax_value.reshape(-1)
    results: list[Wanted] = []
    for is_wanted, is_turned in ((rowwise, False), (columnwise, True)):
        if not is_wanted:
            results += [None, None, None]
            continue
        values, amax, words = x, None, None
        if is_turned:
            values = hadamard_transform(x.t(), random_signs) if hadamard else x.t()
        if stochastic:
            stream = _COLUMNWISE_STREAM if is_turned else _ROWWISE_STREAM
            words = random_words(seed, offset, values.shape, stream, x.device)
        if row_scaled and (reduced is None or not is_turned):
            amax = amaxes_of_rows(values)
        elif reduced is not None:
            amax = (reduced if row_scaled else reduced[-is_turned:][:1]).clone()
        results += _quantize_rows(values, rows, amax, words, four_over_six, e4m3_max)
    return tuple(results)  # type: ignore[return-value]


def quantize_groups(
    x: torch.Tensor,
    ends: Sequence[int],
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    hadamard: bool = False,
    random_signs: bool = True,
    two_dimensional: bool = False,
    stochastic: bool = False,
    seed: int = 0,
    amaxes: torch.Tensor | None = None,
) -> tuple[Wanted, Wanted, Wanted, Wanted, Wanted, Wanted]:
    """Quantize groups of rows of ``x [M, K]``, each as a tensor of its own, in one set of buffers.

    ``ends`` are where the groups end, multiples of :data:`~fuser.formats.GROUP_TILE`. Random words
    are those of the whole matrix. ``amaxes``, fp32 ``[G, 1]`` or ``[G, 2]`` (rowwise, columnwise),
    replaces those of the groups. Returns what :func:`quantize` returns, with amaxes for each
    ``GROUP_TILE`` rows; rows after the last group are zeros.
    """
    m, k = x.shape
    x = x.float()
    blocks = NVFP4_BLOCK if two_dimensional else 1
    results: list[Wanted] = []
    for is_wanted, is_turned in ((rowwise, False), (columnwise, True)):
        if not is_wanted:
            results += [None, None, None]
            continue
        words = None
        if stochastic:
            shape = (k, m) if is_turned else (m, k)
            stream = _COLUMNWISE_STREAM if is_turned else _ROWWISE_STREAM
            words = random_words(seed, 0, torch.Size(shape), stream, x.device)
        scale = x.new_zeros(nvfp4_scale_shape(m, k, is_turned), dtype=torch.uint8)
        data = x.new_zeros((k, m // 2) if is_turned else (m, k // 2), dtype=torch.uint8)
        amax = x.new_zeros(m // GROUP_TILE)
        start = 0
        for g, end in enumerate(ends):
            rows, start = slice(start, end), end
            if rows.start == end:
                continue
            values, words_of_rows = x[rows], words
            amax_of_group = None if amaxes is None else amaxes[g, -is_turned:][:1]
            if is_turned:
                values = hadamard_transform(values.t(), random_signs) if hadamard else values.t()
            if words is not None:
                words_of_rows = words[:, rows] if is_turned else words[rows]
            codes, scales, largest = _quantize_rows(
                values.contiguous(), blocks, amax_of_group, words_of_rows
            )
            amax[rows.start // GROUP_TILE : end // GROUP_TILE] = largest
            if is_turned:
                data[:, rows.start // 2 : end // 2] = codes
                first, last = rows.start // NVFP4_BLOCK, end // NVFP4_BLOCK
                scale[:k, first:last] = scales[:k, : last - first]
            else:
                data[rows] = codes
                scale[rows] = scales[: len(values)]
        results += [data, scale, amax]
    return tuple(results)  # type: ignore[return-value]


def dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
    e4m3_max: float = E4M3_MAX,
) -> torch.Tensor:
    """``q * (scale * amax / (6 * 448))`` in fp32, rounded once to ``out_dtype``; ``[M, K]``.

    ``e4m3_max`` stands for the 448.

    ``amax`` is fp32 ``[1]``; or of each 128 rows of groups, ``[M / 128]``; or broadcasts to the
    blocks of ``data``, as ``[rows, 1]`` does.

    Columnwise ``data`` is ``[K, M / 2]``, and is transposed back; a Hadamard transform remains.
    """
    rows, cols = data.shape[0], 2 * data.shape[1]
    # The sign of a nibble in bit 15 and the rest from bit 9 are, read as fp16, its value * 2^-14.
    pairs = data.to(torch.int32)
    pairs = (pairs & 0x07) << 9 | (pairs & 0x08) << 12 | (pairs & 0x70) << 21 | (pairs & 0x80) << 24
    values = pairs.view(torch.float16).float().mul_(2.0**14)
    scale = scale[:rows, : cols // NVFP4_BLOCK].view(torch.float8_e4m3fn)
    if amax.dim() == 1 and len(amax) != 1:
        of_rows = amax.repeat_interleave(GROUP_TILE)
        amax = of_rows[None, ::NVFP4_BLOCK] if columnwise else of_rows[:, None]
    factor = scale.float() * amax * (1.0 / (E2M1_MAX * e4m3_max))
    out = values.view(rows, cols // NVFP4_BLOCK, NVFP4_BLOCK) * factor[..., None]
    out = out.view(rows, cols).to(out_dtype)
    return out.t().clone(memory_format=torch.contiguous_format) if columnwise else out


def hadamard_transform(x: torch.Tensor, random_signs: bool = True) -> torch.Tensor:
    """``H (signs * x) / 4`` over every 16 elements of the last dimension, rounded to bf16; in fp32.

    ``H`` is the Sylvester matrix. Sums are made in fp32, by butterflies at distances 1, 2, 4 and 8,
    in this order. A matrix product adds in another order. For bf16 and fp16 elements of like
    magnitudes it gives the same, since their sums are exact; for fp32 elements about 1 result in
    20000 differs, by a step of bf16. The signs are those of ``formats.HADAMARD_SIGNS``, all plus
    without ``random_signs``.
    """
    groups = x.float().view(*x.shape[:-1], x.shape[-1] // 16, 16)
    if random_signs:
        groups = groups * _signs(x.device)
    return _hadamard(groups).flatten(-2).bfloat16().float()


def inverse_hadamard_transform(y: torch.Tensor, random_signs: bool = True) -> torch.Tensor:
    """``signs * (H y) / 4``, which undoes :func:`hadamard_transform` but for its rounding; fp32."""
    groups = _hadamard(y.float().view(*y.shape[:-1], y.shape[-1] // 16, 16))
    if random_signs:
        groups.mul_(_signs(y.device))
    return groups.flatten(-2)


def cast_e2m1_(x: torch.Tensor, words: torch.Tensor | None = None) -> torch.Tensor:
    """E2M1 codes (sign, two bits of exponent, one of mantissa) of an fp32 ``x``: uint8 0..15.

    Overwrites ``x``. Rounds to nearest, ties to even; beyond 6 saturates; -0 keeps its sign; NaN
    gives 7, which is +6. With ``words`` (32 random bits in int64, x's shape) rounds up in magnitude
    if the top 24 bits of a word and the remainder, as fractions of the grid's step, sum to 1 or
    more.
    """
    x.clamp_(-E2M1_MAX, E2M1_MAX).nan_to_num_(nan=E2M1_MAX)
    sign = (x.view(torch.int32) >> 28).bitwise_and_(8).to(torch.uint8)
    # The grid's step is 2^(octave - 1), with octave 0 below 2, where E2M1 has its subnormals.
    # Octaves are where fp32 has its exponent.
    octave = (x.abs_().view(torch.int32) & 0x7F800000).clamp_(min=127 << 23).sub_(127 << 23)
    if words is None:
        # Adding 2^(octave + 22) leaves x / step, rounded to even, in the low bits.
        code = x.add_(octave.add_(149 << 23).view(torch.float32)).view(torch.int32).bitwise_and_(7)
        octave.sub_(149 << 23)
    else:
        # x / step in fixed point: 2^(25 - octave) leaves 24 bits after the point.
        fixed = x.mul_(((152 << 23) - octave).view(torch.float32)).to(torch.int32)
        code = fixed.add_((words >> 8).to(torch.int32)).bitwise_right_shift_(24)
    return code.add_(octave.bitwise_right_shift_(22)).to(torch.uint8).bitwise_or_(sign)


def random_words(
    seed: int, offset: int, shape: torch.Size, stream: int, device: torch.device
) -> torch.Tensor:
    """32 random bits for each element of ``shape``, as int64: words ``offset ...`` of a stream.

    Word ``i`` is word ``i % 4`` of Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As
    Easy as 1, 2, 3", 2011) with the 64-bit ``seed`` as key and the counter ``(i / 4, stream, 0)``,
    of which the first takes two words, low first.
    """
    n = shape.numel()
    first, skip = divmod(offset, 4)
    block = torch.arange(first, first + (skip + n + 3) // 4, dtype=torch.int64, device=device)
    words = torch.stack(philox(block, stream, seed, rounds=10), -1)
    return words.flatten()[skip : skip + n].view(shape)


def amaxes_of_rows(x: torch.Tensor) -> torch.Tensor:
    """The amax of each row of ``x [R, C]``, fp32 ``[R]``."""
    return x.abs().amax(1).float() if x.shape[1] else x.new_zeros(x.shape[0]).float()


def _quantize_rows(
    x: torch.Tensor,
    block_rows: int,
    amax: torch.Tensor | None,
    words: torch.Tensor | None,
    four_over_six: str | None = None,
    e4m3_max: float = E4M3_MAX,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data ``[R, C / 2]``, padded scales and amax of an fp32 ``x [R, C]``, blocks along C.

    ``amax`` is ``[1]``, or ``[R]`` for one in each row; without it that of ``x``.
    """
    rows, cols = x.shape
    blocks = x.view(rows, cols // NVFP4_BLOCK, NVFP4_BLOCK)
    largest = blocks.abs()
    for half in (8, 4, 2, 1):  # twice as fast on a CPU as one amax over 16 neighbours
        largest = torch.maximum(largest[..., :half], largest[..., half:])
    largest = largest.squeeze(-1)
    if block_rows > 1:
        largest = largest.view(rows // block_rows, block_rows, cols // NVFP4_BLOCK).amax(1)
    if amax is None:
        amax = largest.amax().reshape(1) if x.numel() else x.new_zeros(1)

    encode = torch.full_like(amax, e4m3_max * E2M1_MAX).div_(amax).clamp_(max=FLOAT32_MAX)
    encode = encode.masked_fill_(amax == 0, 1.0)
    encode = encode[:, None]  # [1, 1], or [R, 1]
    if four_over_six is None:
        unrounded = largest * (encode * (1.0 / E2M1_MAX))
        codes, scale = _quantize_blocks(blocks, unrounded, encode, words)
    else:
        unrounded = largest / E2M1_MAX * encode
        codes, scale = _quantize_blocks(blocks, unrounded, encode, None)
        codes_of_4, scale_of_4 = _quantize_blocks(
            blocks, unrounded * (E2M1_MAX / 4.0), encode, None
        )
        errors: list[torch.Tensor] = []
        for tried, its_scale in ((codes, scale), (codes_of_4, scale_of_4)):
            values = _decode(tried) * its_scale.float()[..., None] * amax[:, None, None]
            error = values.div_(E2M1_MAX * e4m3_max).sub_(blocks)
            error = error.square_() if four_over_six == "MSE" else error.abs_()
            errors.append(_sums_of_blocks(error, block_rows))
        is_four = errors[1] < errors[0]
        codes = torch.where(is_four[..., None], codes_of_4, codes)
        scale = torch.where(is_four, scale_of_4.view(torch.uint8), scale.view(torch.uint8))
    pairs = codes.flatten().view(torch.int16)
    data = (pairs | pairs >> 4).to(torch.uint8).view(rows, cols // 2)
    padded = data.new_zeros(nvfp4_scale_shape(rows, cols, columnwise=False))
    padded[:rows, : cols // NVFP4_BLOCK] = scale.view(torch.uint8)
    return data, padded, amax


def _quantize_blocks(
    blocks: torch.Tensor, unrounded: torch.Tensor, encode: torch.Tensor, words: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes ``[R, B, 16]`` and E4M3 scales ``[R, B]`` of ``blocks``.

    ``unrounded`` scales have a row for each row, or for each 16; values of a block with scale 1 are
    multiplied by ``encode``, ``[1, 1]`` or ``[R, 1]``.
    """
    unrounded = unrounded.clamp(max=E4M3_MAX)
    scale = unrounded.nan_to_num_(nan=math.nan).to(torch.float8_e4m3fn)
    per_block = (scale.float() * encode.reciprocal()).reciprocal_().clamp_(max=FLOAT32_MAX)
    if len(scale) != len(blocks):
        block_rows = len(blocks) // len(scale)
        repeated = scale.view(torch.uint8).repeat_interleave(block_rows, 0)
        scale = repeated.view(torch.float8_e4m3fn)
        per_block = per_block.repeat_interleave(block_rows, 0)
    words = None if words is None else words.view(blocks.shape)
    return cast_e2m1_(blocks * per_block[..., None], words), scale


def _decode(codes: torch.Tensor) -> torch.Tensor:
    """The values of E2M1 codes, fp32."""
    bits = codes.to(torch.int32)
    bits = (bits & 0x07) << 9 | (bits & 0x08) << 12  # fp16, times 2^-14
    return bits.to(torch.int16).view(torch.float16).float().mul_(2.0**14)


def _sums_of_blocks(error: torch.Tensor, block_rows: int) -> torch.Tensor:
    """Sums ``[R, B]`` over the blocks of ``error [R, B, 16]``, each in one order in fp32.

    The 16 elements of a row in their order; of a block of 16 rows, halves of them to each other.
    """
    total = error[..., 0]
    for place in range(1, NVFP4_BLOCK):
        total = total + error[..., place]
    if block_rows == 1:
        return total
    rows = total.view(-1, block_rows, total.shape[1])
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows.expand(-1, block_rows, -1).reshape(total.shape)


def _signs(device: torch.device) -> torch.Tensor:
    """The 16 signs, fp32; computed on the device, so that nothing is copied there."""
    bits = HADAMARD_SIGNS >> torch.arange(16, device=device)
    return 1.0 - 2.0 * (bits & 1)


def _hadamard(groups: torch.Tensor) -> torch.Tensor:
    """``H y / 4`` over the last dimension, which has 16 elements."""
    for distance in (1, 2, 4, 8):
        pairs = groups.view(*groups.shape[:-1], 8 // distance, 2, distance)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        groups = torch.stack((left + right, left - right), -2).flatten(-3)
    return groups.mul_(0.25)
