"""The kernel of grouped FP8 products, in the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulator import emulated, prepare

from fuser.cuda import launch as launching
from fuser.cuda import module
from fuser.cuda.arguments import Struct, int32
from fuser.cuda.launch import Kernel, Launch
from fuser.formats import round_up, tile_count
from fuser.reference import grouped

BLOCK = 128
STAGES, ROWS, COLUMNS = 4, 128, 256
# GemmShared, and what rounding its address up may take.
SHARED_BYTES = STAGES * ((ROWS + COLUMNS) * (BLOCK + 4) + 16) + 1024
FP8 = {"kE4m3": torch.float8_e4m3fn, "kE5m2": torch.float8_e5m2}
OUT = {"fuser::bf16": torch.bfloat16, "float": torch.float32}
BF16, FP32 = OUT


def kernel(grouping: str, sums: str, a: str, b: str, out: str) -> Kernel:
    template = f"fuser::Grouping::{grouping}, fuser::Sums::{sums}, fuser::Fp8::{a}, fuser::Fp8::{b}"
    return Kernel(module.KERNELS / "grouped_gemm.cu", f"fuser_grouped_gemm<{template}, {out}>")


OF_ROWS = (
    ("kFast", "kE4m3", "kE4m3", BF16),
    ("kFast", "kE5m2", "kE4m3", FP32),
    ("kSplit", "kE5m2", "kE4m3", BF16),
    ("kBlocks1d", "kE4m3", "kE4m3", BF16),
    ("kBlocks2d", "kE4m3", "kE5m2", BF16),
)
OF_DEPTH = (
    ("kFast", "kE5m2", "kE4m3", FP32),
    ("kSplit", "kE5m2", "kE4m3", BF16),
    ("kBlocks1d", "kE4m3", "kE4m3", FP32),
)
prepare(
    *(kernel("kRows", *types) for types in OF_ROWS),
    *(kernel("kDepth", *types) for types in OF_DEPTH),
)
EVERY_SPLIT = pytest.mark.parametrize("splits", [(0, 1, 128, 200), (130, 0)], ids=["many", "two"])


@dataclass(frozen=True)
class Operand:
    """Codes ``[rows, depth]``, in rows of a multiple of 16 bytes, and their values without scales.

    What is after a row is a NaN that must not be read.
    """

    codes: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(cls, rows: int, depth: int, fp8: str) -> Operand:
        values = torch.randn(rows, depth).to(FP8[fp8])
        codes = torch.full((rows, round_up(depth, 16)), 0x7F, dtype=torch.uint8)
        codes[:, :depth] = values.view(torch.uint8)
        return cls(codes[:, :depth], values.double())

    def zeroed(
        self, *, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> Operand:
        """Itself, with zeros where a mask of rows or of columns is true."""
        for matrix in (self.codes, self.values):
            if rows is not None:
                matrix[rows] = 0
            if columns is not None:
                matrix[:, columns] = 0
        return self

    def map(self, box_rows: int) -> Struct:
        backend: Any = launching.backend
        return Struct(backend.tensor_map(self.codes, box_rows))


def tiles_of(splits: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where padded groups end, and the rows of each tile."""
    ends = torch.tensor(splits).cumsum(0).int()
    return grouped.group_tiles(ends, tile_count(sum(splits), len(splits)))


def blocks_of(splits: tuple[int, ...]) -> torch.Tensor:
    """The group of each block of 128 of the padded groups."""
    sizes = torch.tensor([-(-size // BLOCK) for size in splits])
    return torch.arange(len(splits)).repeat_interleave(sizes)


def expanded(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales of blocks of ``rows`` x ``columns``, one for each element."""
    return scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def scales_like(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.5


def check(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """``magnitude``: the sum of the absolute products."""
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-23
    bound = rounding * expected.abs() + 2.0**-19 * magnitude
    wrong = (out.double() - expected).abs() > bound
    assert not (wrong | out.isnan()).any(), wrong.nonzero()[:5]


# -- groups of rows -------------------------------------------------------------


@dataclass(frozen=True)
class GroupedB:
    """The b of every group, one after the other in its rows or in its depth, with its scales."""

    operand: Operand
    scales: torch.Tensor
    scale_stride: int
    scale_rows: int
    row_step: int
    depth_step: int
    values: torch.Tensor
    """With scales: ``[G, columns, depth]``."""

    @classmethod
    def random(
        cls, groups: int, columns: int, depth: int, sums: str, fp8: str, is_in_depth: bool
    ) -> GroupedB:
        row_step, depth_step = round_up(columns, BLOCK), round_up(depth, BLOCK)
        if is_in_depth:
            operand = Operand.random(columns, groups * depth_step, fp8)
            operand.zeroed(columns=torch.arange(groups * depth_step) % depth_step >= depth)
            row_step = 0
        else:
            operand = Operand.random(groups * row_step, depth, fp8)
            operand.zeroed(rows=torch.arange(groups * row_step) % row_step >= columns)
            depth_step = 0
        rows, whole_depth = operand.codes.shape
        blocks, lines = -(-whole_depth // BLOCK), 0
        if sums == "kBlocks1d":
            scales, stride = scales_like(blocks, round_up(rows, 4)), round_up(rows, 4)
            each = expanded(scales, BLOCK, 1).T[:rows, :whole_depth]
        elif sums == "kBlocks2d":
            lines = -(-rows // BLOCK)
            scales, stride = scales_like(lines, blocks), blocks
            each = expanded(scales, BLOCK, BLOCK)[:rows, :whole_depth]
        else:
            scales, stride = scales_like(groups), 1
            by_group = scales[None] if is_in_depth else scales[:, None]
            each = expanded(by_group, rows // by_group.shape[0], whole_depth // by_group.shape[1])
        values = operand.values * each
        if is_in_depth:
            own = values.view(columns, groups, depth_step)[:, :, :depth].transpose(0, 1)
        else:
            own = values.view(groups, row_step, depth)[:, :columns]
        return cls(operand, scales, stride, lines, row_step, depth_step, own)


def check_rows(
    types: tuple[str, str, str, str],
    columns: int,
    depth: int,
    splits: tuple[int, ...],
    is_padded: bool,
    is_in_depth: bool,
) -> None:
    """One launch with ``Grouping::kRows``; ``is_in_depth`` as :class:`GroupedB` has it."""
    sums, a_type, b_type, out_type = types
    padded_ends, tiles = tiles_of(splits)
    rows, groups, group_of_tile = len(tiles) * ROWS, len(splits), blocks_of(splits)
    is_row = torch.arange(rows) % ROWS < tiles[:, 2].repeat_interleave(ROWS)
    a = Operand.random(rows, depth, a_type).zeroed(rows=~is_row)
    b = GroupedB.random(groups, columns, depth, sums, b_type, is_in_depth)
    if sums in ("kFast", "kSplit"):
        a_scales, a_stride = torch.full((len(tiles),), float("nan")), 0
        a_scales[: len(group_of_tile)] = scales_like(groups)[group_of_tile]
        of_a = expanded(a_scales.nan_to_num()[:, None], ROWS, depth)
    else:
        a_scales, a_stride = scales_like(-(-depth // BLOCK), rows), rows
        of_a = expanded(a_scales, BLOCK, 1)[:depth].T

    # Rows after the last group are left alone.
    out = torch.full((rows if is_padded else sum(splits), columns), 7.0, dtype=OUT[out_type])
    left, expected = a.values * of_a, out.double()
    magnitude = torch.zeros_like(expected)
    for tile, group in enumerate(group_of_tile.tolist()):
        first, count = (tile * ROWS, ROWS) if is_padded else tiles[tile, 1:3].tolist()
        here = left[tile * ROWS :][:count]
        expected[first : first + count] = here @ b.values[group].T
        magnitude[first : first + count] = here.abs() @ b.values[group].abs().T

    gemm = Struct(
        (
            *(out, a_scales, b.scales, padded_ends, tiles),
            *(int32(n) for n in (groups, 0, columns, depth, b.row_step, b.depth_step)),
            *(int32(n) for n in (a_stride, b.scale_stride, b.scale_rows, is_padded)),
        )
    )
    with emulated():
        kernel("kRows", *types)(
            Launch((3,), (384,), SHARED_BYTES), a.map(ROWS), b.operand.map(COLUMNS), gemm
        )
    check(out, expected, magnitude)


@EVERY_SPLIT
@pytest.mark.parametrize("types", OF_ROWS, ids="-".join)
@pytest.mark.parametrize(("columns", "depth"), [(264, 200), (128, 640)], ids=str)
@pytest.mark.parametrize(
    ("is_padded", "is_in_depth"), [(False, False), (True, True)], ids=["rows", "padded-in-depth"]
)
def test_each_group_of_rows_has_its_own_b(
    types: tuple[str, str, str, str],
    columns: int,
    depth: int,
    splits: tuple[int, ...],
    is_padded: bool,
    is_in_depth: bool,
) -> None:
    check_rows(types, columns, depth, splits, is_padded, is_in_depth)


@pytest.mark.parametrize("types", OF_ROWS[1:3], ids="-".join)
def test_tiles_of_more_than_one_panel(types: tuple[str, str, str, str]) -> None:
    check_rows(types, 520, 128, (1, 130, *(1,) * 17), False, False)


# -- groups of the depth --------------------------------------------------------


@EVERY_SPLIT
@pytest.mark.parametrize("types", OF_DEPTH, ids="-".join)
@pytest.mark.parametrize(("rows", "columns"), [(136, 264), (64, 512)], ids=str)
def test_each_group_of_the_depth_has_its_own_result(
    types: tuple[str, str, str, str], rows: int, columns: int, splits: tuple[int, ...]
) -> None:
    sums, a_type, b_type, out_type = types
    padded_ends, tiles = tiles_of(splits)
    depth, groups, group_of_block = len(tiles) * BLOCK, len(splits), blocks_of(splits)
    a, b = Operand.random(rows, depth, a_type), Operand.random(columns, depth, b_type)

    used = len(group_of_block)
    a_stride, b_stride = 0, 0
    if sums in ("kFast", "kSplit"):
        a_scales, b_scales = (scales_like(groups)[group_of_block] for _ in range(2))
        of_a, of_b = (expanded(scales[None], 1, BLOCK) for scales in (a_scales, b_scales))
    else:
        a_stride, b_stride = round_up(rows, 4), round_up(columns, 4)
        a_scales, b_scales = scales_like(len(tiles), a_stride), scales_like(len(tiles), b_stride)
        of_a = expanded(a_scales[:used, :rows], BLOCK, 1).T
        of_b = expanded(b_scales[:used, :columns], BLOCK, 1).T
    left = a.values[:, : used * BLOCK] * of_a
    right = b.values[:, : used * BLOCK] * of_b

    out = torch.empty(groups, rows, columns, dtype=OUT[out_type])
    gemm = Struct(
        (
            *(out, a_scales, b_scales, padded_ends, None),
            *(int32(n) for n in (groups, rows, columns, 0, 0, 0)),
            *(int32(n) for n in (a_stride, b_stride, 0, 0)),
        )
    )
    with emulated(written=(out,)):
        kernel("kDepth", *types)(
            Launch((3,), (384,), SHARED_BYTES), a.map(ROWS), b.map(COLUMNS), gemm
        )
    begin = 0
    for group, end in enumerate(padded_ends.tolist()):
        here, there = left[:, begin:end], right[:, begin:end]
        check(out[group], here @ there.T, here.abs() @ there.abs().T)
        begin = end
