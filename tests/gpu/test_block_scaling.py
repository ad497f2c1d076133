"""The kernels of FP8 in blocks of 128, on a GPU."""

from __future__ import annotations

from typing import Any

import block_scaling_cases as cases
import pytest
import torch
from quantize_cases import (
    BIG,
    DTYPES,
    E4M3,
    E5M2,
    FLOAT8,
    GPU,
    ODD,
    Input,
    assert_same,
    block_format,
    buffers,
)
from streams import check_replay, check_two_streams

from fuser.cuda import block_scaling
from fuser.formats import DType, fp8_block_scale_shape
from fuser.reference import block_scaling as reference


@cases.EVERY_INPUT
@cases.EVERY_DIM
@FLOAT8
def test_both_copies_are_the_references_bytes_and_scales(
    case: Input, dtype: DType, block_dim: int
) -> None:
    cases.check_quantize(GPU, case, dtype, (True, True), block_dim=block_dim)


@pytest.mark.parametrize("case", [*ODD, *BIG], ids=str)
@cases.EVERY_COPY
@cases.EVERY_DIM
def test_either_copy_is_made_alone(case: Input, copies: tuple[bool, bool], block_dim: int) -> None:
    cases.check_quantize(GPU, case, E5M2, copies, block_dim=block_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{"pow2": False}, {"pow2": False, "eps": 3.0}, {"eps": 1e-40}], ids=str
)
@pytest.mark.parametrize("content", ["", "tiny", "mixed", "huge"])
@cases.EVERY_DIM
def test_scales_of_every_kind(
    dtype: torch.dtype, options: dict[str, Any], content: str, block_dim: int
) -> None:
    case = Input(136, 144, dtype, special=content)
    cases.check_quantize(GPU, case, E5M2, (True, True), block_dim=block_dim, **options)


@pytest.mark.parametrize("case", [*ODD, *BIG, Input(160, 8, special="nan"), Input(0, 5)], ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("col", [False, True], ids=["row", "col"])
@FLOAT8
@cases.EVERY_DIM
def test_both_copies_are_dequantized(
    case: Input, dtype: DType, out_dtype: torch.dtype, block_dim: int, col: bool
) -> None:
    cases.check_dequantize(GPU, case, dtype, out_dtype, block_dim=block_dim, col=col)


# -- streams and sizes --------------------------------------------------------


def quantized(x: torch.Tensor, block_dim: int = 1) -> list[torch.Tensor]:
    """Both copies with their scales, and the values of the columnwise one."""
    m, k = x.shape
    row_shape, col_shape = (fp8_block_scale_shape(m, k, c, block_dim) for c in (False, True))
    row, row_scale_inv = GPU.empty((m, k)), GPU.empty(row_shape, torch.float32)
    col, col_scale_inv = GPU.empty((k, m)), GPU.empty(col_shape, torch.float32)
    back = torch.empty_like(x)
    block_scaling.quantize(
        block_format(E4M3, block_dim),
        x,
        buffers(row=row, row_scale_inv=row_scale_inv, col=col, col_scale_inv=col_scale_inv),
    )
    block_scaling.dequantize(
        col, col_scale_inv, E4M3, x.dtype, block_dim=block_dim, columnwise=True, out=back
    )
    return [row, row_scale_inv, col, col_scale_inv, back]


@cases.EVERY_DIM
def test_captured_launches_replay_over_new_values(block_dim: int) -> None:
    check_replay(lambda x: quantized(x, block_dim), Input(300, 520))


@cases.EVERY_DIM
def test_launches_are_on_torchs_current_stream(block_dim: int) -> None:
    check_two_streams(lambda x: quantized(x, block_dim), Input(300, 520))


def test_more_elements_than_an_int_counts() -> None:
    m, k = 2**16 + 128, 2**15
    x = torch.randn(m, 128, device="cuda", dtype=torch.bfloat16).repeat(1, k // 128)
    row, row_scale_inv, col, col_scale_inv, back = quantized(x)
    wanted = reference.quantize(x[-128:], E4M3, block_dim=1)
    assert_same(row[-128:], wanted[0], "row")
    assert_same(row_scale_inv[:, -128:].contiguous(), wanted[1], "row_scale_inv")
    assert_same(col[:, -128:].contiguous(), wanted[2], "col")
    assert_same(col_scale_inv[-1:], wanted[3], "col_scale_inv")
    values = reference.dequantize(
        wanted[2], wanted[3], E4M3, torch.bfloat16, block_dim=1, columnwise=True
    )
    assert_same(back[-128:], values, "back")
