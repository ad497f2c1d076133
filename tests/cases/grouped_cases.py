"""Groups of rows: each launcher against its reference, wherever kernels run."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from quantize_cases import (
    E4M3,
    E5M2,
    Place,
    assert_same,
    block_format,
    buffers,
    fp8_format,
    mxfp8_format,
    nvfp4_format,
)

from fuser.chain import Stage
from fuser.cuda import (
    block_scaling,
    fp8_scaling,
    grouped,
    mxfp8,
    nvfp4,
    permutation,
    pointwise,
)
from fuser.cuda.arguments import Producer
from fuser.cuda.tiled import as_producer
from fuser.formats import (
    DType,
    fp8_block_scale_shape,
    mxfp8_scale_shape,
    nvfp4_scale_shape,
    tile_count,
)
from fuser.reference import block_scaling as block_reference
from fuser.reference import fp8_scaling as fp8_reference
from fuser.reference import grouped as reference
from fuser.reference import mxfp8 as mxfp8_reference
from fuser.reference import nvfp4 as nvfp4_reference
from fuser.reference import permutation as permutation_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 50
SPLITS = {
    "even": (25, 25),
    "empty at both ends": (0, 20, 0, 3, 0),
    "one": (7,),
    "none": (0, 0, 0),
    "too many": (30, 0, 40, 5),
    "negative": (10, -4, 6),
    "as many as possible": (2**31 - 1, 2**31 - 1, 2**31 - 1),
    "many groups": tuple(i % 3 for i in range(70)),
}
EVERY_SPLIT = pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
# Whole vectors of 16 bytes, no whole vectors, more than a block takes at once, and none.
# Columns between the rows of tokens, which are read by index; None for rows that are read in order.
EVERY_ORDER = pytest.mark.parametrize(
    "between", [None, 8, 1], ids=["in order", "by index", "by index, unaligned"]
)
EVERY_WIDTH = pytest.mark.parametrize("columns", [64, 37, 2056, 4100, 0])


def check_ends(place: Place, splits: tuple[int, ...], dtype: torch.dtype) -> None:
    sizes = torch.tensor(splits, dtype=dtype)
    out = place.empty((len(splits),), torch.int32)
    with place.launching(out):
        grouped.group_ends(sizes.to(place.device), ROWS, out=out)
    total, expected = 0, []
    for size in splits:
        total = min(ROWS, total + max(size, 0))
        expected.append(total)
    assert out.tolist() == expected == reference.group_ends(sizes, ROWS).tolist()


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def written(place: Place, values: torch.Tensor, shift: int) -> torch.Tensor:
    """A copy there, ``shift`` elements after an aligned address."""
    return place.empty(values.shape, values.dtype, shift).copy_(values)


def check_tail(
    place: Place, splits: tuple[int, ...], columns: int, dtype: torch.dtype, shift: int = 0
) -> None:
    values = matrix(ROWS, columns, dtype, 1)
    values[-1:] = float("nan")
    out = written(place, values, shift)
    ends = reference.group_ends(torch.tensor(splits), ROWS)
    with place.launching():
        grouped.zero_tail(ends.to(place.device), out=out)
    assert_same(out, reference.zero_tail(ends, values.clone()), "rows")


def check_bias(
    place: Place,
    splits: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
    is_scaled: bool,
    shift: int = 0,
) -> None:
    """Rows after the last group, and their scales, are NaN."""
    ends = reference.group_ends(torch.tensor(splits), ROWS)
    values, scales = matrix(ROWS, columns, dtype, 1), matrix(1, ROWS, dtype, 2)[0]
    bias = matrix(len(splits), columns, dtype, 3)
    after = reference.is_after(ends, ROWS)
    values[after] = scales[after] = float("nan")
    factors = scales if is_scaled else None
    out = written(place, values, shift)
    given = None if factors is None else factors.to(place.device)
    with place.launching():
        grouped.add_bias(ends.to(place.device), written(place, bias, 2 * shift), given, out=out)
    assert_same(out, reference.add_bias(ends, bias, factors, values.clone()), "sum")


# -- padded to whole tiles ------------------------------------------------------

# Rows of two tiles, of less than one, of none, and of exactly one; the last rows belong to none.
PADDED_ROWS = 340
PADDED_SPLITS = (130, 0, 7, 128, 60, 0)


def check_tiles(place: Place, splits: tuple[int, ...], dtype: torch.dtype) -> None:
    sizes, groups = torch.tensor(splits, dtype=dtype), len(splits)
    ends, padded_ends = (place.empty((groups,), torch.int32) for _ in range(2))
    tiles = place.empty((tile_count(ROWS, groups), 4), torch.int32)
    with place.launching(ends, padded_ends, tiles):
        grouped.group_tiles(
            sizes.to(place.device), ROWS, ends=ends, padded_ends=padded_ends, tiles=tiles
        )
    expected = reference.group_ends(sizes, ROWS)
    assert ends.tolist() == expected.tolist()
    for made, wanted in zip(
        (padded_ends, tiles), reference.group_tiles(expected, len(tiles)), strict=True
    ):
        assert made.tolist() == wanted.tolist()
    check_definition_of_tiles(expected.tolist(), padded_ends.tolist(), tiles.tolist())


def check_tiles_of_one_size(place: Place, size: int, groups: int) -> None:
    """Groups of one size have no tiles to spare."""
    rows = size * groups
    ends, padded_ends = (place.empty((groups,), torch.int32) for _ in range(2))
    tiles = place.empty((groups * -(-size // 128), 4), torch.int32)
    with place.launching(ends, padded_ends, tiles):
        grouped.group_tiles(size, rows, ends=ends, padded_ends=padded_ends, tiles=tiles)
    assert ends.tolist() == [size * (g + 1) for g in range(groups)]
    check_definition_of_tiles(ends.tolist(), padded_ends.tolist(), tiles.tolist())
    assert -1 not in tiles[:, 0].tolist()


def check_definition_of_tiles(
    ends: list[int], padded_ends: list[int], tiles: list[list[int]]
) -> None:
    expected, end = [], 0
    for group, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        for row in range(start, stop, 128):
            expected.append([group, row, min(128, stop - row), 0])
        end += -(-(stop - start) // 128) * 128
        assert padded_ends[group] == end
    assert tiles[: len(expected)] == expected
    assert all(tile == [-1, 0, 0, 0] for tile in tiles[len(expected) :])


def padded_groups(place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ends = reference.group_ends(torch.tensor(PADDED_SPLITS), PADDED_ROWS)
    count = tile_count(PADDED_ROWS, len(PADDED_SPLITS))
    padded_ends, tiles = reference.group_tiles(ends, count)
    return ends.to(place.device), padded_ends.to(place.device), tiles.to(place.device)


def check_padding(place: Place, columns: int, dtype: torch.dtype, shift: int = 0) -> None:
    """Rows are where the definition says, and come back; nothing after the last group is read."""
    ends, padded_ends, tiles = padded_groups(place)
    values = matrix(PADDED_ROWS, columns, dtype, 1)
    values[int(ends[-1]) :] = float("nan")
    padded = place.empty((128 * len(tiles), columns), dtype)
    with place.launching():
        grouped.pad(written(place, values, shift), tiles, out=padded)
    expected, used = [], int(padded_ends[-1])
    for start, stop in zip([0, *ends.tolist()], ends.tolist(), strict=False):
        rows = values[start:stop]
        expected.append(torch.cat([rows, rows.new_zeros(-len(rows) % 128, columns)]))
    assert_same(padded[:used], torch.cat(expected), "padded")
    assert_same(padded[:used], reference.pad(values, tiles.cpu())[:used], "the reference")
    padded[used:] = float("nan")
    out = place.empty(values.shape, dtype, shift)
    with place.launching(out):
        grouped.unpad(padded, ends, padded_ends, out=out)
    values[int(ends[-1]) :] = 0
    assert_same(out, values, "rows")
    made = reference.unpad(padded.cpu(), ends.cpu(), padded_ends.cpu(), PADDED_ROWS)
    assert_same(made, values, "the reference")


# Rows without an assignment, in two groups.
EMPTY = [3, 140]


# Some groups have an amax below this epsilon, from which their scale does not follow then.
EVERY_SCALING = pytest.mark.parametrize(
    "scaling", [{"eps": 1.0}, {"pow2": True}, {"eps": 1.0, "pow2": True}], ids=str
)


def of_two_sizes(values: torch.Tensor) -> torch.Tensor:
    """The rows, of which those of the third and fourth group are 16 times smaller."""
    groups = torch.tensor(PADDED_SPLITS)
    is_small = (torch.arange(len(groups)) // 2 % 2 == 1).repeat_interleave(groups)
    rows = torch.where(is_small, 1 / 16, 1.0).to(values.dtype)
    values[: len(rows)] *= rows[:, None]
    return values


def rows_of(place: Place, values: torch.Tensor, between: int | None) -> Producer:
    """The producer of ``values``, which reads them in order or by index.

    By index, the tokens are in another order, and rows EMPTY have none: ``values`` become zeros
    there.
    """
    if between is None:
        return as_producer("a test", values.to(place.device))
    rows, columns, choices = *values.shape, 3
    generator = torch.Generator().manual_seed(9)
    order = torch.randperm(rows, generator=generator)
    numbers = order * choices + torch.arange(rows) % choices
    wide = torch.full((rows, columns + between), float("nan"), dtype=values.dtype)
    x = wide.to(place.device)[:, :columns]
    numbers[EMPTY] = -1
    x[order] = values.to(place.device)
    x[order[EMPTY]] = float("nan")
    values[EMPTY] = 0
    return permutation.gathered_rows(x, numbers.int().to(place.device), choices)


def check_gathered_rows(
    place: Place, columns: int, dtype: torch.dtype, between: int, choices: int
) -> None:
    """The rows are those that permute writes; assignments are dropped, and rows unused."""
    generator = torch.Generator().manual_seed(choices)
    indices = torch.randint(-1, 5, (40, choices), generator=generator)
    sizes, row_map, inverse_map = permutation_reference.sort_by_expert(indices, 5, 45)
    groups = len(sizes)
    ends = reference.group_ends(sizes, 45)
    _, tiles = reference.group_tiles(ends, tile_count(45, groups))
    wide = matrix(40, columns + between, dtype, 1).to(place.device)
    x = wide[:, :columns]
    inner = permutation.gathered_rows(x, row_map.to(place.device), choices)
    source = grouped.padded_rows(inner, tiles.to(place.device))
    found = place.empty((source.rows, columns))
    scale_inv = place.empty((len(tiles),), torch.float32)
    outputs = {"row": found, "col": place.empty((columns, source.rows)), "scale_inv": scale_inv}
    ones = torch.ones(groups, device=place.device)
    with place.launching():
        fp8_scaling.quantize(
            fp8_format(), source, buffers(**outputs), scale=ones, tiles=tiles.to(place.device)
        )
    padded = reference.pad(permutation_reference.permute(x.cpu(), row_map, inverse_map), tiles)
    wanted = fp8_reference.quantize_delayed(padded, torch.ones(1), E4M3)[0]
    assert wanted is not None
    used = 128 * int((tiles[:, 0] >= 0).sum())
    assert_same(found[:used], wanted[:used], "rows")
    assert_same(outputs["col"][:, :used], wanted[:used].t(), "columns")


def check_grouped_fp8(
    place: Place,
    columns: int,
    dtype: torch.dtype,
    to: DType,
    is_delayed: bool,
    between: int | None = None,
    **scaling: Any,
) -> None:
    """Each group has the bytes and the scale of a tensor of its own.

    ``scaling``: the options ``eps`` and ``pow2`` of current scaling.
    """
    ends, padded_ends, tiles = padded_groups(place)
    values = of_two_sizes(matrix(PADDED_ROWS, columns, dtype, 2))
    values[int(ends[-1]) :] = float("nan")
    groups, m = len(PADDED_SPLITS), 128 * len(tiles)
    source = grouped.padded_rows(rows_of(place, values, between), tiles)
    recorded = torch.zeros(groups, device=place.device)
    row, col = place.empty((m, columns)), place.empty((columns, m))
    scale_inv = place.empty((len(tiles),), torch.float32)
    scales = torch.tensor([3.0, 1.0, 0.7, 100.0, 2.0, 1.0], device=place.device)
    made = (fp8_format(to), source, buffers(row=row, col=col, scale_inv=scale_inv))
    with place.launching():
        if is_delayed:
            fp8_scaling.quantize(*made, scale=scales, recorded=recorded, tiles=tiles)
        else:
            fp8_scaling.amax(source, out=recorded, tiles=tiles)
            fp8_scaling.quantize(*made, amax_value=recorded, **scaling, tiles=tiles)
    start = end = 0
    for g, size in enumerate(PADDED_SPLITS):
        start, end = end, end + size
        first = int(padded_ends[g]) - -(-size // 128) * 128
        group = values[start:end]
        if size == 0:
            assert recorded[g] == 0
            continue
        if is_delayed:
            scale = scales[g : g + 1].cpu()
            data, _, inverse, amax = fp8_reference.quantize_delayed(group, scale, to)
        else:
            data, _, inverse = fp8_reference.quantize_current(group, to, **scaling)
            amax = group.abs().max().float()
        assert data is not None
        place_of = slice(first, first + size)
        assert_same(row[place_of], data, f"row of group {g}")
        assert_same(col[:, place_of], data.t(), f"column of group {g}")
        assert_same(recorded[g].view(1), amax.view(1), f"amax of group {g}")
        for tile in range(first // 128, int(padded_ends[g]) // 128):
            assert_same(scale_inv[tile : tile + 1], inverse.view(1), f"scale of tile {tile}")
        padding = slice(first + size, int(padded_ends[g]))
        assert not row[padding].any()
        assert not col[:, padding].any()
    check_dequantize(place, to, ends, padded_ends, row, col, scale_inv, dtype)


def check_dequantize(
    place: Place,
    to: DType,
    ends: torch.Tensor,
    padded_ends: torch.Tensor,
    row: torch.Tensor,
    col: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    used = int(padded_ends[-1])
    for data, columnwise in ((row, False), (col, True)):
        out = place.empty(row.shape, dtype)
        with place.launching():
            fp8_scaling.dequantize_groups(
                data, scale_inv, to, dtype, columnwise=columnwise, out=out
            )
        factors = scale_inv.cpu()[: used // 128].repeat_interleave(128)
        expected = (row.cpu()[:used].view(to.torch_dtype).float() * factors[:, None]).to(dtype)
        assert_same(out[:used], expected, "columnwise" if columnwise else "rowwise")


def check_grouped_blocks(
    place: Place,
    dtype: torch.dtype,
    block_dim: int,
    between: int | None = None,
    **scaling: Any,
) -> None:
    """Blocks of 128 do not reach over a group's end: the bytes are those of each group alone.

    ``scaling``: the options ``eps`` and ``pow2``.
    """
    _, padded_ends, tiles = padded_groups(place)
    columns, m = 136, 128 * len(tiles)
    values = of_two_sizes(matrix(PADDED_ROWS, columns, dtype, 3))
    source = grouped.padded_rows(rows_of(place, values, between), tiles)
    row, col = place.empty((m, columns)), place.empty((columns, m))
    shapes = [fp8_block_scale_shape(m, columns, c, block_dim) for c in (False, True)]
    row_scale_inv, col_scale_inv = (place.empty(shape, torch.float32) for shape in shapes)
    with place.launching():
        block_scaling.quantize(
            block_format(E4M3, block_dim),
            source,
            buffers(row=row, row_scale_inv=row_scale_inv, col=col, col_scale_inv=col_scale_inv),
            **scaling,
        )
    start = end = 0
    for g, size in enumerate(PADDED_SPLITS):
        start, end = end, end + size
        first = int(padded_ends[g]) - -(-size // 128) * 128
        if size:
            made = block_reference.quantize(values[start:end], E4M3, block_dim=block_dim, **scaling)
            data, scales, data_t, scales_t = made
            rows, tile = slice(first, first + size), slice(first // 128, int(padded_ends[g]) // 128)
            assert_same(row[rows], data, f"row of group {g}")
            assert_same(col[:, rows], data_t, f"column of group {g}")
            assert scales_t is not None
            if block_dim == 1:
                assert_same(row_scale_inv[:, rows], scales[:, :size], f"row scales of {g}")
                assert_same(col_scale_inv[tile], scales_t, f"column scales of {g}")
            else:
                assert_same(row_scale_inv[tile], scales, f"row scales of {g}")
                count = tile.stop - tile.start
                assert_same(col_scale_inv[:, tile], scales_t[:, :count], f"column scales of {g}")


def check_grouped_mxfp8(place: Place, dtype: torch.dtype, between: int | None = None) -> None:
    _, padded_ends, tiles = padded_groups(place)
    columns, m = 160, 128 * len(tiles)
    values = matrix(PADDED_ROWS, columns, dtype, 4)
    source = grouped.padded_rows(rows_of(place, values, between), tiles)
    row, col = place.empty((m, columns)), place.empty((m, columns))
    row_scale, col_scale = (place.empty(mxfp8_scale_shape(m, columns, c)) for c in (False, True))
    with place.launching():
        mxfp8.quantize(
            mxfp8_format(E5M2),
            source,
            buffers(row=row, row_scale=row_scale, col=col, col_scale=col_scale),
        )
    start = end = 0
    for g, size in enumerate(PADDED_SPLITS):
        start, end = end, end + size
        first = int(padded_ends[g]) - -(-size // 128) * 128
        if size:
            whole = torch.cat([values[start:end], values.new_zeros(-size % 32, columns)])
            data, scales, data_t, scales_t = mxfp8_reference.quantize(whole, E5M2)
            rows, blocks = slice(first, first + len(whole)), len(whole) // 32
            assert scales_t is not None
            assert_same(row[rows], data, f"row of group {g}")
            assert_same(col[rows], data_t, f"column of group {g}")
            assert_same(row_scale[rows, : columns // 32], scales[: len(whole), : columns // 32], "")
            of_group = col_scale[first // 32 : first // 32 + blocks, :columns]
            assert_same(of_group, scales_t[:blocks, :columns], f"column scales of {g}")


def check_grouped_nvfp4(
    place: Place,
    columns: int,
    dtype: torch.dtype,
    hadamard: bool,
    stochastic: bool,
    between: int | None = None,
) -> None:
    """Bytes, scales and amaxes are the reference's, whose members are those of a group alone."""
    _, padded_ends, tiles = padded_groups(place)
    m, used = 128 * len(tiles), int(padded_ends[-1])
    values = matrix(PADDED_ROWS, columns, dtype, 5)
    source = grouped.padded_rows(rows_of(place, values, between), tiles)
    amaxes = torch.zeros(len(PADDED_SPLITS), 1 + hadamard, device=place.device)
    row, col = place.empty((m, columns // 2)), place.empty((columns, m // 2))
    row_scale, col_scale = (place.empty(nvfp4_scale_shape(m, columns, c)) for c in (False, True))
    row_amax, col_amax = (place.empty((len(tiles),), torch.float32) for _ in range(2))
    options = {"hadamard": hadamard, "stochastic": stochastic, "seed": 7 * stochastic}
    with place.launching():
        if hadamard:
            nvfp4.hadamard_amax(source, out=amaxes, tiles=tiles)
        else:
            fp8_scaling.amax(source, out=amaxes.view(-1), tiles=tiles)
        of_rows = {"row": row, "row_scale": row_scale, "row_amax": row_amax}
        of_columns = {"col": col, "col_scale": col_scale, "col_amax": col_amax}
        outputs = buffers(**of_rows, **of_columns)
        nvfp4.quantize(nvfp4_format(), source, outputs, amaxes, **options, tiles=tiles)
    padded = reference.pad(values, tiles.cpu())
    wanted = nvfp4_reference.quantize_groups(padded, padded_ends.tolist(), **options)
    blocks, k_blocks = used // 16, columns // 16
    assert_same(row[:used], wanted[0][:used], "row")
    assert_same(row_scale[:used, :k_blocks], wanted[1][:used, :k_blocks], "row scales")
    assert_same(row_amax[: used // 128], wanted[2][: used // 128], "row amaxes")
    assert_same(col[:, : used // 2], wanted[3][:, : used // 2], "col")
    assert_same(col_scale[:columns, :blocks], wanted[4][:columns, :blocks], "col scales")
    assert_same(col_amax[: used // 128], wanted[5][: used // 128], "col amaxes")
    copies = ((row, row_scale, row_amax, False), (col, col_scale, col_amax, True))
    for data, scale, amax, columnwise in copies:
        out = place.empty((m, columns), dtype)
        with place.launching():
            nvfp4.dequantize(data, scale, amax, dtype, columnwise=columnwise, out=out)
        amax_of_rows = amax.cpu().repeat_interleave(128)
        of_blocks = amax_of_rows[None, ::16] if columnwise else amax_of_rows[:, None]
        expected = nvfp4_reference.dequantize(
            data.cpu(), scale.cpu(), of_blocks, dtype, columnwise=columnwise
        )
        assert_same(out[:used], expected[:used], "columnwise" if columnwise else "rowwise")


def check_chain_of_padded_groups(
    place: Place, columns: int, dtype: torch.dtype, is_backward: bool, is_padded: bool
) -> None:
    """One kernel gives what a kernel of the chain and one that quantizes give."""
    ends, padded_ends, tiles = padded_groups(place)
    used = int(padded_ends[-1])
    rows = 128 * len(tiles) if is_padded else PADDED_ROWS
    x, dy = (
        matrix(rows, n, dtype, seed).to(place.device)
        for n, seed in ((2 * columns, 1), (columns, 2))
    )
    scales = matrix(1, rows, dtype, 3)[0].to(place.device)
    stages = (Stage("swiglu").scaled,)
    width = 2 * columns if is_backward else columns
    values = place.empty((rows, width), dtype)
    with place.launching(values):
        if is_backward:
            pointwise.pointwise_backward(stages, dy, x, (scales,), values, (None,), None)
        else:
            pointwise.pointwise(stages, x, (scales,), values)
    if is_backward:
        chain = pointwise.backward_producer(stages, dy, x, (scales,), rows, columns)
    else:
        chain = pointwise.forward_producer(stages, x, (scales,), rows, columns)
    if is_padded:  # the second way takes the same rows without their padding
        values = reference.unpad(values.cpu(), ends.cpu(), padded_ends.cpu(), PADDED_ROWS)
        values = values.to(place.device)
    found = []
    for inner, has_padding in ((chain, is_padded), (as_producer("a test", values), False)):
        source = grouped.padded_rows(inner, tiles, is_padded=has_padding)
        m = source.rows
        recorded = torch.zeros(len(PADDED_SPLITS), device=place.device)
        row, col, mx = (place.empty(shape) for shape in ((m, width), (width, m), (m, width)))
        scale_inv = place.empty((len(tiles),), torch.float32)
        block, block_t = place.empty((m, width)), place.empty((width, m))
        shapes = [fp8_block_scale_shape(m, width, c, 1) for c in (False, True)]
        block_inv, block_t_inv = (place.empty(shape, torch.float32) for shape in shapes)
        outputs = {"row": row, "col": col, "scale_inv": scale_inv}
        with place.launching():
            fp8_scaling.amax(source, out=recorded, tiles=tiles)
            fp8_scaling.quantize(
                fp8_format(), source, buffers(**outputs), amax_value=recorded, tiles=tiles
            )
            block_scaling.quantize(
                block_format(E4M3, 1),
                source,
                buffers(row=block, row_scale_inv=block_inv, col=block_t, col_scale_inv=block_t_inv),
            )
        results = [recorded, row[:used], col[:, :used], scale_inv[: used // 128]]
        results += [block[:used], block_t[:, :used], block_inv[:, :used]]
        results.append(block_t_inv[: used // 128])
        if width % 32 == 0:
            scale = place.empty(mxfp8_scale_shape(m, width, False))
            with place.launching():
                mxfp8.quantize(mxfp8_format(E5M2), source, buffers(row=mx, row_scale=scale))
            results += [mx[:used], scale[:used]]
        found.append(results)
    for place_of, (one, other) in enumerate(zip(*found, strict=True)):
        assert_same(one, other, f"result {place_of}")


# Gradients of scales and biases that a kernel leaves beside the quantized gradient: activations,
# and columns of their output. Vectors of 8 columns, and none; tiles with both halves, and blocks of
# a half that are wider than a tile.
WITH_SUMS = {
    "SwiGLU": (Stage("swiglu"), 192),
    "SwiGLU, 8 interleaved": (Stage("swiglu", interleave=8), 72),
    "SwiGLU, 3 interleaved": (Stage("swiglu", interleave=3), 39),
    "SwiGLU, 136 interleaved": (Stage("swiglu", interleave=136), 272),
    "SiTUGLU": (Stage("situglu", (4.0, 25.0)), 75),
    "ClampedQGeGLU": (Stage("clamped_swiglu", (7.0, 1.702, 1.0)), 136),
    "SReLU": (Stage("srelu"), 136),
    "TanhSReLU": (Stage("tanh_srelu", (2.0,)), 67),
}


def check_sums_beside(
    place: Place,
    place_of_values: Place,
    name: str,
    dtype: torch.dtype,
    of_scales: torch.dtype,
    is_padded: bool = True,
) -> None:
    """The bytes are those without sums; the sums are near fp64's; what is in padding is not read.

    The kernel that looks for amaxes writes no sums. ``place_of_values``: where the kernel runs that
    writes the gradient unquantized.
    """
    function, columns = WITH_SUMS[name]
    _, padded_ends, tiles = padded_groups(place)
    used, groups = int(padded_ends[-1]), len(PADDED_SPLITS)
    rows = 128 * len(tiles) if is_padded else PADDED_ROWS
    wide = columns << function.is_gated
    x, dy = (matrix(rows, n, dtype, seed) for n, seed in ((wide, 1), (columns, 2)))
    scales = matrix(1, rows, of_scales, 3)[0]
    group = torch.full((rows,), -1)  # of each row
    for at, first, size, _ in tiles.tolist():
        group[first : first + size] = at
    if is_padded:
        of_tiles = tiles[:, :1].cpu().expand(-1, 128)
        is_row = torch.arange(128) < tiles[:, 2:3].cpu()
        group = torch.where(is_row, of_tiles, -1).flatten()
    for value in (x, dy, scales):
        value[group < 0] = float("nan")
    stages, t = (function.scaled,), [v.to(place.device) for v in (dy, x, scales)]
    parts = place.empty(pointwise.row_parts_shape(stages, rows, columns), FP32)
    sums = place.empty((len(tiles), wide), FP32)
    inputs = (stages, *t[:2], (t[2],), rows, columns)
    found = []
    # Sums of tiles are for the rows of padded groups, where a tile of rows is a tile of the groups.
    given = {"row_parts": parts, "sums": sums if is_padded else None}
    for beside in ({}, given):
        inner = pointwise.backward_producer(*inputs, **beside)
        source = grouped.padded_rows(inner, tiles, is_padded=is_padded)
        amaxes = torch.zeros(groups, device=place.device)
        row, col = place.empty((source.rows, wide)), place.empty((wide, source.rows))
        outputs = {"row": row, "col": col, "scale_inv": place.empty((len(tiles),), FP32)}
        before = parts.clone(), sums.clone()
        with place.launching():
            fp8_scaling.quantize(fp8_format(E5M2), source, {}, recorded=amaxes, tiles=tiles)
            assert torch.equal(before[0].view(torch.int32), parts.view(torch.int32))
            assert torch.equal(before[1].view(torch.int32), sums.view(torch.int32))
            fp8_scaling.quantize(
                fp8_format(E5M2), source, buffers(**outputs), amax_value=amaxes, tiles=tiles
            )
        used_rows = (amaxes, row[:used], col[:, :used], outputs["scale_inv"][: used // 128])
        found.append([each.clone() for each in used_rows])
    for one, other in zip(*found, strict=True):
        assert_same(one, other, "quantized")

    dscales = place.empty((rows,), of_scales)
    with place.launching(dscales):
        pointwise.sum_parts(parts, dscales)
    exact_x = x.double().nan_to_num().requires_grad_()
    exact_scales = scales.double().nan_to_num().requires_grad_()
    formula = oracles.formula_of(function)
    h = formula(exact_x)
    (h * exact_scales[:, None] * dy.double().nan_to_num()).sum().backward()
    # An activation is off by 2^-16 of itself at most in 16 bits, and its sum by little more.
    magnitude = (h * dy.double().nan_to_num()).abs().sum(-1)
    own = torch.finfo(of_scales).eps
    bound = 2**-15 * magnitude + own * exact_scales.grad.abs() + 2**-24
    off = (dscales.cpu().double() - exact_scales.grad).abs()
    assert (off <= bound)[group >= 0].all(), (off / bound)[group >= 0].max()

    if is_padded:
        dbias = place.empty((groups, wide), dtype)
        with place.launching(dbias):
            grouped.sum_groups(sums, padded_ends, out=dbias)
        values = place.empty((rows, wide), dtype)
        with place_of_values.launching(values):
            pointwise.pointwise_backward(*(*inputs[:4], values, (None,), None))
        values = values.cpu()
        # The sums are of the rounded values.
        rounded = values.double().masked_fill((group < 0)[:, None], 0)
        exact = torch.stack([rounded[group == g].sum(0) for g in range(groups)])
        most = torch.stack([rounded[group == g].abs().sum(0) for g in range(groups)])
        off = (dbias.cpu().double() - exact).abs()
        assert (off <= torch.finfo(dtype).eps * exact.abs() + 2**-20 * most).all(), off.max()
        assert not dbias[torch.tensor(PADDED_SPLITS) == 0].any()
        made = reference.sum_groups(values, tiles.cpu(), groups).double()
        assert ((made - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 2**-20 * most).all()


EVERY_FLOAT8 = pytest.mark.parametrize("to", [E4M3, E5M2], ids=lambda to: to.label)
