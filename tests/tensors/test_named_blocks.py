"""Blocks of every format whose bytes are written out here, quantized by the torch reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from format_cases import E4M3, E5M2, INF, NAN, TINY, WIDE, all_same, as_bytes, same

from fuser.formats import DType
from fuser.reference import block_scaling, fp8_scaling, mxfp8, nvfp4


@dataclass(frozen=True)
class Block:
    """A block's first values and the value of all others; the bytes of both; its scale."""

    name: str
    values: tuple[float, ...]
    others: float
    data: str
    other_data: str
    scale: float

    def row(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.full((1, width), self.others, dtype=torch.float64)
        x[0, : len(self.values)] = torch.tensor(self.values, dtype=torch.float64)
        assert torch.equal(x.to(dtype).double().nan_to_num(), x.nan_to_num())
        return x.to(dtype)

    def bytes(self, width: int) -> np.ndarray:
        return as_bytes(self.data + self.other_data * (width - len(self.values)))[None]


def blocks(dtype: tuple[torch.dtype, ...], *cases: Block) -> Any:
    return [
        pytest.param(case, d, id=f"{case.name}-{str(d).removeprefix('torch.')}")
        for case in cases
        for d in dtype
    ]


# Blocks of E4M3 under one fp32 scale, the same by tensor and by 128.
SUBNORMALS_E4M3 = Block(
    "smallest subnormal",
    (448, 2**-9, 2**-10, 1.5 * 2**-10, -(2**-9), 1.5 * 2**-9, 7 * 2**-9, 2**-6),
    2**-11,
    "7e 01 00 01 81 02 07 08",
    "00",
    1.0,
)
TIES_E4M3 = Block(
    "ties",
    (448, 17, 19, 21, 23, 25, 27, 29, 31, -17, -19),
    1.0625,
    "7e 58 5a 5a 5c 5c 5e 5e 60 d8 da",
    "38",
    1.0,
)
FP8_BLOCKS_E4M3 = (
    Block("all NaN", (), NAN, "", "7f", 1.0),
    Block("one NaN", (NAN, 1, -2, 0.5, 500), 3, "7f 38 c0 30 7e", "44", 1.0),
    Block("inf", (INF, -INF, 1, -2), 0.5, "7e fe 38 c0", "30", 1.0),
    Block("all zero", (), 0.0, "", "00", 1.0),
    SUBNORMALS_E4M3,
    Block("exact maximum", (1.75, -1.75, 0.875), 1.75 / 16, "7e fe 76", "5e", 2.0**-8),
    TIES_E4M3,
    Block("one outlier", (448 * 1024, 1024, 1, 2, 3, -1), 0.25, "7e 38 00 01 02 80", "00", 1024.0),
    Block("negative zero", (448, 0.0), -0.0, "7e 00", "80", 1.0),
    Block("all negative zero", (), -0.0, "", "80", 1.0),
)


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        *FP8_BLOCKS_E4M3,
        # The scale is FLT_MAX, and its inverse the subnormal 2^-128.
        Block("smallest input", (TINY, -TINY), 0.0, "10 90", "00", 2.0**-128),
        Block("no power of two", (3, -3, 1.5), 0.0, "7e fe 76", "00", 3 / 448),
    ),
)
def test_bytes_of_named_blocks_in_e4m3_with_current_scaling(
    block: Block, dtype: torch.dtype
) -> None:
    row, col, scale_inv = fp8_scaling.quantize_current(block.row(32, dtype), E4M3)
    assert same(row, block.bytes(32))
    assert same(col, block.bytes(32).T)
    assert same(scale_inv, np.array([block.scale], np.float32))


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        Block("all NaN", (), NAN, "", "7f", 1.0),
        Block("one NaN", (NAN, 1, -2, 0.5, 65536), 3, "7f 3c c0 38 7b", "42", 1.0),
        Block("inf", (INF, -INF, 1, -2), 0.5, "7b fb 3c c0", "38", 1.0),
        Block("all zero", (), 0.0, "", "00", 1.0),
        Block(
            "smallest subnormal",
            (57344, 2**-16, 2**-17, 1.5 * 2**-17, -(2**-16), 1.5 * 2**-16, 3 * 2**-16, 2**-14),
            2**-18,
            "7b 01 00 01 81 02 03 04",
            "00",
            1.0,
        ),
        Block("exact maximum", (1.75, -1.75, 0.875), 1.75 / 16, "7b fb 77", "6b", 2.0**-15),
        Block("ties", (57344, 9, 11, 13, 15, -9, -11), 1.125, "7b 48 4a 4a 4c c8 ca", "3c", 1.0),
        Block(
            "one outlier",
            (57344 * 1024, 1024, 2**-7, 2**-6, 3 * 2**-7, -(2**-7)),
            2**-9,
            "7b 3c 00 01 02 80",
            "00",
            1024.0,
        ),
        Block("negative zero", (57344, 0.0), -0.0, "7b 00", "80", 1.0),
        Block("all negative zero", (), -0.0, "", "80", 1.0),
        Block("smallest input", (TINY, -TINY), 0.0, "28 a8", "00", 2.0**-128),
    ),
)
def test_bytes_of_named_blocks_in_e5m2_with_current_scaling(
    block: Block, dtype: torch.dtype
) -> None:
    row, col, scale_inv = fp8_scaling.quantize_current(block.row(32, dtype), E5M2)
    assert same(row, block.bytes(32))
    assert same(col, block.bytes(32).T)
    assert same(scale_inv, np.array([block.scale], np.float32))


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        *FP8_BLOCKS_E4M3,
        Block("smallest input", (TINY, -TINY), 0.0, "08 88", "00", 2.0**-127),
        Block("no power of two", (3, -3, 1.5), 0.0, "7c fc 74", "00", 2.0**-7),
    ),
)
def test_bytes_of_named_blocks_of_128(block: Block, dtype: torch.dtype) -> None:
    x, expected = block.row(128, dtype), block.bytes(128)
    scale = np.array([[block.scale, 0, 0, 0]], np.float32)
    row, row_scale, _, _ = block_scaling.quantize(x, E4M3, block_dim=1)
    assert all_same((row, row_scale), (expected, scale))
    _, _, col, col_scale = block_scaling.quantize(x.T, E4M3, block_dim=1)
    assert all_same((col, col_scale), (expected, scale))
    both = block_scaling.quantize(x, E4M3, block_dim=2)
    assert all_same(both, (expected, scale, expected.T, scale))


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        Block("all NaN", (), NAN, "", "7f", 0xFF),
        Block("one NaN", (NAN, 1, -2), 3, "7f 7f 7f", "7f", 0xFF),
        # The multiplier is the subnormal 2^-127.
        Block(
            "inf", (INF, -INF, 1, -2, 2.0**127, -(2.0**127)), 0.5, "7e fe 00 80 38 b8", "00", 0xFE
        ),
        Block("all zero", (), 0.0, "", "00", 0),
        replace(SUBNORMALS_E4M3, scale=127),
        Block("smallest input", (TINY, -TINY), 0.0, "08 88", "00", 0),
        Block("exact maximum", (448, -448, 224), 28, "7e fe 76", "5e", 127),
        Block("past the maximum", (450, 448, -450), 28, "76 76 f6", "56", 128),
        replace(TIES_E4M3, scale=127),
        Block("one outlier", (2**20, 2, 4, 8, 12, -4, 4096), 1, "78 00 00 01 02 80 38", "00", 139),
        Block("negative zero", (448, 0.0), -0.0, "7e 00", "80", 127),
        Block("all negative zero", (), -0.0, "", "80", 0),
    ),
)
def test_bytes_of_named_mxfp8_blocks(block: Block, dtype: torch.dtype) -> None:
    check_mxfp8_block(block, dtype, E4M3)


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        Block("all NaN", (), NAN, "", "7f", 0xFF),
        Block("inf", (INF, -INF, 2.0**127), 0.5, "7b fb 3c", "00", 0xFE),
        Block("all zero", (), 0.0, "", "00", 0),
        Block("exact maximum", (57344, -57344, 9, 11), 1.125, "7b fb 48 4a", "3c", 127),
        Block("past the maximum", (57600, 57344), -9, "77 77", "c4", 128),
    ),
)
def test_bytes_of_named_mxfp8_blocks_in_e5m2(block: Block, dtype: torch.dtype) -> None:
    check_mxfp8_block(block, dtype, E5M2)


def check_mxfp8_block(block: Block, dtype: torch.dtype, fmt: DType) -> None:
    """The block as the first row and, turned, as the first column of a tensor of ones."""
    exponent = {E4M3: 127 - 8, E5M2: 127 - 15}[fmt]
    x = torch.ones(32, 32, dtype=dtype)
    x[0] = block.row(32, dtype)
    data = np.full((32, 32), 0x78, np.uint8)  # a one times 2^8 or 2^15
    data[0] = block.bytes(32)
    scale = np.zeros((128, 4), np.uint8)
    scale[:32, 0] = exponent
    scale[0, 0] = int(block.scale)
    row, row_scale, _, _ = mxfp8.quantize(x, fmt)
    assert all_same((row, row_scale), (data, scale))
    _, _, col, col_scale = mxfp8.quantize(x.T, fmt)
    assert all_same((col, col_scale), (data.T, scale.T))


# 16 elements are 8 bytes, so blocks are written out in full; ``scale`` is the E4M3 byte.
NVFP4_BLOCKS = {
    "all NaN": ([NAN] * 16, "77" * 8, 0x7F, NAN),
    "one NaN": ([1, NAN, *[-2] * 14], "77" * 8, 0x7F, NAN),
    "inf": ([1, INF, *[-2] * 14], "77" * 8, 0x7F, INF),
    "all zero": ([0.0] * 16, "00" * 8, 0x00, 0.0),
    "negative zero": ([-0.0] * 16, "88" * 8, 0x00, 0.0),
    # The block's scale rounds to 3 * 2^-9, and the factor of its elements is held at FLT_MAX.
    "smallest input": ([TINY, -TINY, *[0.0] * 14], "80" + "00" * 7, 0x03, TINY),
    "smallest subnormal": (
        [6, 0.5, 0.251953125, 0.25, -0.5, -0.25, *[0.125] * 10],
        "17 01 89 00 00 00 00 00",
        0x7E,
        6.0,
    ),
    "exact maximum": (
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
        "10 32 54 76 98 ba dc fe",
        0x7E,
        6.0,
    ),
    "ties": (
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5],
        "07 22 44 66 8f aa cc ee",
        0x7E,
        6.0,
    ),
    # 1024 is one step of the block, so ones vanish.
    "one outlier": (
        [6144, 1, 256, 258, 512, -768, 1024, 3072, *[-1] * 8],
        "07 10 a1 52 88 88 88 88",
        0x7E,
        6144.0,
    ),
}


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", NVFP4_BLOCKS)
def test_bytes_of_named_nvfp4_blocks(name: str, dtype: torch.dtype) -> None:
    values, data, scale_byte, amax = NVFP4_BLOCKS[name]
    x = torch.tensor([values] * 16, dtype=torch.float64).to(dtype)
    assert torch.equal(x.double().nan_to_num(), torch.tensor([values] * 16).double().nan_to_num())
    packed = as_bytes(data)[None].repeat(16, axis=0)
    scale = np.zeros((128, 4), np.uint8)
    scale[:16, 0] = scale_byte
    row, row_scale, amax_row, *_ = nvfp4.quantize(x)
    assert all_same((row, row_scale), (packed, scale))
    *_, col, col_scale, amax_col = nvfp4.quantize(x.T)
    assert all_same((col, col_scale), (packed, scale))
    row, row_scale, amax_2d, *_ = nvfp4.quantize(x, two_dimensional=True)
    assert all_same((row, row_scale), (packed, scale))
    for got in (amax_row, amax_col, amax_2d):
        assert got.dtype == torch.float32
        assert np.array_equal(got.numpy(), np.array([amax]), equal_nan=True)


def test_a_quiet_nvfp4_block_beside_a_loud_one_rounds_its_scale_and_saturates() -> None:
    # 1 wants the scale 448 / 6144 = 0.0729, gets 0.0703 (0x19), and 1 / 0.0703 of it is past 6.
    x = torch.tensor([[6144.0] * 16 + [1.0] * 16] * 16)
    row, row_scale, *_ = nvfp4.quantize(x)
    scale = np.zeros((128, 4), np.uint8)
    scale[:16] = [0x7E, 0x19, 0, 0]
    assert all_same((row, row_scale), (np.full((16, 16), 0x77, np.uint8), scale))
