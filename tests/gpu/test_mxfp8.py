"""The kernels of MXFP8, on a GPU."""

from __future__ import annotations

import mxfp8_cases as cases
import pytest
import torch
from quantize_cases import (
    DTYPES,
    E4M3,
    FLOAT8,
    GPU,
    WHOLE_BLOCKS,
    Input,
    assert_same,
    buffers,
    mxfp8_format,
)
from streams import check_replay, check_two_streams

from fuser.cuda import mxfp8
from fuser.formats import DType, mxfp8_scale_shape
from fuser.reference import mxfp8 as reference

BIG = (
    Input(4096, 1536),
    Input(2080, 3008, torch.float32),
    Input(1120, 4096, torch.float16, "rows"),
)


@cases.EVERY_INPUT
@cases.EVERY_DIM
@FLOAT8
def test_both_copies_are_the_references_bytes_and_scales(
    case: Input, dtype: DType, two_dimensional: bool
) -> None:
    cases.check_quantize(
        GPU, case, dtype, (True, True), two_dimensional=two_dimensional, swizzled=False
    )


@pytest.mark.parametrize("case", [*WHOLE_BLOCKS, *BIG], ids=str)
@cases.EVERY_COPY
@cases.EVERY_DIM
@cases.EVERY_ORDER
def test_either_copy_is_made_alone_with_scales_in_either_order(
    case: Input, copies: tuple[bool, bool], two_dimensional: bool, swizzled: bool
) -> None:
    cases.check_quantize(
        GPU, case, E4M3, copies, two_dimensional=two_dimensional, swizzled=swizzled
    )


@pytest.mark.parametrize(
    "case", [*WHOLE_BLOCKS, *BIG, Input(32, 64, special="nan"), Input(0, 64)], ids=str
)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
@FLOAT8
def test_both_copies_are_dequantized(
    case: Input, dtype: DType, out_dtype: torch.dtype, columnwise: bool
) -> None:
    cases.check_dequantize(GPU, case, dtype, out_dtype, columnwise=columnwise)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
def test_every_exponent_is_dequantized(out_dtype: torch.dtype, columnwise: bool) -> None:
    cases.check_every_scale(GPU, out_dtype, columnwise=columnwise)


# -- streams and sizes --------------------------------------------------------


def quantized(x: torch.Tensor) -> list[torch.Tensor]:
    """Both copies with their scales, and the values of the columnwise one."""
    m, k = x.shape
    row, row_scale = GPU.empty((m, k)), GPU.empty(mxfp8_scale_shape(m, k, False))
    col, col_scale = GPU.empty((m, k)), GPU.empty(mxfp8_scale_shape(m, k, True))
    back = torch.empty_like(x)
    outputs = buffers(row=row, row_scale=row_scale, col=col, col_scale=col_scale)
    mxfp8.quantize(mxfp8_format(E4M3), x, outputs)
    mxfp8.dequantize(col, col_scale, E4M3, x.dtype, columnwise=True, out=back)
    return [row, row_scale, col, col_scale, back]


def test_captured_launches_replay_over_new_values() -> None:
    check_replay(quantized, Input(288, 544))


def test_launches_are_on_torchs_current_stream() -> None:
    check_two_streams(quantized, Input(288, 544))


def test_more_elements_than_an_int_counts() -> None:
    m, k = 2**16 + 128, 2**15
    x = torch.randn(m, 128, device="cuda", dtype=torch.bfloat16).repeat(1, k // 128)
    row, row_scale, col, col_scale, back = quantized(x)
    wanted = reference.quantize(x[-128:], E4M3)
    got = (row[-128:], row_scale[-128:], col[-128:], col_scale[-4:])
    for name, one, other in zip(("row", "row_scale", "col", "col_scale"), got, wanted, strict=True):
        assert_same(one, other, name)
    assert wanted[2] is not None
    assert wanted[3] is not None
    values = reference.dequantize(wanted[2], wanted[3], E4M3, torch.bfloat16, columnwise=True)
    assert_same(back[-128:], values, "back")
