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
EVERY_SPLIT = pytest.mark.parametrize(
    "splits", [(0, 1, 128, 200), (130, 0), (0, 0)], ids=["many", "two", "none"]
)


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

    def zeroed(self, rows: torch.Tensor) -> Operand:
        """With zeros in rows."""
        self.codes[rows] = 0
        self.values[rows] = 0
        return self

    def map(self, box_rows: int) -> Struct:
        backend: Any = launching.backend
        return Struct(backend.tensor_map(self.codes, box_rows))


@dataclass(frozen=True)
class Case:
    """Groups, and what the launch needs of them."""

    splits: tuple[int, ...]

    @property
    def ends(self) -> torch.Tensor:
        return torch.tensor(self.splits).cumsum(0).int()

    @property
    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        return grouped.group_tiles(self.ends, tile_count(sum(self.splits), len(self.splits)))

    def blocks(self) -> torch.Tensor:
        """The group of each block of 128 of the padded groups."""
        sizes = torch.tensor([round_up(size, BLOCK) // BLOCK for size in self.splits])
        return torch.arange(len(self.splits)).repeat_interleave(sizes)


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


@EVERY_SPLIT
@pytest.mark.parametrize("types", OF_ROWS, ids="-".join)
@pytest.mark.parametrize(("columns", "depth"), [(264, 200), (128, 640)], ids=str)
@pytest.mark.parametrize("is_padded", [False, True], ids=["rows", "padded"])
def test_each_group_of_rows_has_its_own_b(
    types: tuple[str, str, str, str],
    columns: int,
    depth: int,
    splits: tuple[int, ...],
    is_padded: bool,
) -> None:
    sums, a_type, b_type, out_type = types
    case = Case(splits)
    padded_ends, tiles = case.tiles
    group_of_tile = case.blocks()
    rows, groups = len(tiles) * ROWS, len(splits)
    if not rows:
        pytest.skip("a matrix without rows has no map")
    inside = torch.arange(rows) % ROWS
    is_row = inside < tiles[:, 2].repeat_interleave(ROWS)
    a = Operand.random(rows, depth, a_type).zeroed(~is_row)
    step, blocks = round_up(columns, BLOCK), -(-depth // BLOCK)
    b = Operand.random(groups * step, depth, b_type)
    b_rows = torch.arange(groups * step) % step < columns
    b.zeroed(~b_rows)

    # Scales as the kernel reads them, and one for each element.
    used = len(group_of_tile)
    a_stride, b_stride, b_lines = 0, 0, 0
    if sums in ("kFast", "kSplit"):
        own = scales_like(groups)
        a_scales = torch.full((len(tiles),), float("nan"))
        a_scales[:used] = own[group_of_tile]
        b_scales, b_stride = scales_like(groups), 1
        of_a = expanded(a_scales.nan_to_num()[:, None], ROWS, depth)
        of_b = expanded(b_scales[:, None], step, depth)
    else:
        a_scales, a_stride = scales_like(blocks, rows), rows
        of_a = expanded(a_scales, BLOCK, 1)[:depth].T
        if sums == "kBlocks1d":
            b_scales, b_stride = scales_like(blocks, groups * step), groups * step
            of_b = expanded(b_scales, BLOCK, 1)[:depth].T
        else:
            b_lines, b_stride = groups * step // BLOCK, blocks
            b_scales = scales_like(b_lines, blocks)
            of_b = expanded(b_scales, BLOCK, BLOCK)[:, :depth]

    out_rows = rows if is_padded else sum(splits)
    out = torch.full((out_rows, columns), 7.0, dtype=OUT[out_type])
    left = a.values * of_a
    right = (b.values * of_b).view(groups, step, depth)[:, :columns]
    expected = torch.full((out_rows, columns), 7.0, dtype=torch.float64)
    magnitude = torch.zeros_like(expected)
    for tile, group in enumerate(group_of_tile):
        first, count = (tile * ROWS, ROWS) if is_padded else tiles[tile, 1:3].tolist()
        here = left[tile * ROWS :][:count]
        expected[first : first + count] = here @ right[group].T
        magnitude[first : first + count] = here.abs() @ right[group].abs().T

    gemm = Struct(
        (
            *(out, a_scales, b_scales, padded_ends, tiles),
            *(int32(n) for n in (groups, 0, columns, depth, step, 0)),
            *(int32(n) for n in (a_stride, b_stride, b_lines, is_padded)),
        )
    )
    with emulated():
        kernel("kRows", *types)(
            Launch((3,), (384,), SHARED_BYTES), a.map(ROWS), b.map(COLUMNS), gemm
        )
    check(out, expected, magnitude)


# -- groups of the depth --------------------------------------------------------


@EVERY_SPLIT
@pytest.mark.parametrize("types", OF_DEPTH, ids="-".join)
@pytest.mark.parametrize(("rows", "columns"), [(136, 264), (64, 512)], ids=str)
def test_each_group_of_the_depth_has_its_own_result(
    types: tuple[str, str, str, str], rows: int, columns: int, splits: tuple[int, ...]
) -> None:
    sums, a_type, b_type, out_type = types
    case = Case(splits)
    padded_ends, tiles = case.tiles
    group_of_block = case.blocks()
    depth, groups = len(tiles) * BLOCK, len(splits)
    if not depth:
        pytest.skip("a matrix without columns has no map")
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
