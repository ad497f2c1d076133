"""MXFP8: each launcher against its reference, wherever kernels run."""

from __future__ import annotations

import pytest
import torch
from quantize_cases import (
    COPIES,
    WHOLE_BLOCKS,
    Input,
    Place,
    assert_same,
    buffers,
    mxfp8_format,
    special,
)

from fuser.cuda import mxfp8
from fuser.formats import DType, mxfp8_scale_shape
from fuser.reference import mxfp8 as reference

EMPTY = (Input(0, 64), Input(64, 0))
# Blocks with and without something special.
EVERY_INPUT = pytest.mark.parametrize("case", [*WHOLE_BLOCKS, *EMPTY, *special(64, 96)], ids=str)
EVERY_COPY = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)
EVERY_DIM = pytest.mark.parametrize("two_dimensional", [False, True], ids=["1d", "2d"])
EVERY_ORDER = pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])


def check_quantize(
    place: Place,
    case: Input,
    dtype: DType,
    copies: tuple[bool, bool],
    *,
    two_dimensional: bool,
    swizzled: bool,
) -> None:
    x = case.on(place)
    m, k = case.m, case.k
    shift = int(case.layout in ("shifted", "odd rows"))
    row = row_scale = col = col_scale = None
    if copies[0]:
        row = place.empty((m, k), shift=shift)
        row_scale = place.empty(mxfp8_scale_shape(m, k, False))
    if copies[1]:
        shape = mxfp8_scale_shape(m, k, True)
        col = place.empty((m, k), shift=shift)
        col_scale = place.empty(shape[::-1] if swizzled else shape)
    outputs = (row, row_scale, col, col_scale)
    with place.launching(*outputs):
        mxfp8.quantize(
            mxfp8_format(dtype, two_dimensional, swizzled),
            x,
            buffers(row=row, row_scale=row_scale, col=col, col_scale=col_scale),
        )
    expected = list(
        reference.quantize(
            case.values(),
            dtype,
            rowwise=copies[0],
            columnwise=copies[1],
            two_dimensional=two_dimensional,
        )
    )
    if swizzled:
        if expected[1] is not None:
            expected[1] = reference.swizzle(expected[1])
        if expected[3] is not None:
            expected[3] = reference.swizzle(expected[3].t().contiguous())
    names = ("row", "row_scale", "col", "col_scale")
    for name, got, wanted in zip(names, outputs, expected, strict=True):
        assert_same(got, wanted, name)


def check_dequantize(
    place: Place, case: Input, dtype: DType, out_dtype: torch.dtype, *, columnwise: bool
) -> None:
    """Of a copy of ``case``; at odd offsets where the input is."""
    copy = reference.quantize(case.values(), dtype, rowwise=not columnwise, columnwise=columnwise)
    data, scale = copy[2:] if columnwise else copy[:2]
    assert data is not None
    assert scale is not None
    check_dequantize_of(place, data, scale, dtype, out_dtype, columnwise, case.layout == "shifted")


def check_every_scale(place: Place, out_dtype: torch.dtype, *, columnwise: bool) -> None:
    """All exponents, with bytes of every kind in their blocks."""
    m, k = (256 * 32, 32) if columnwise else (32, 256 * 32)
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(0, 256, (m, k), dtype=torch.uint8, generator=generator)
    shape = mxfp8_scale_shape(m, k, columnwise)
    exponents = torch.arange(256, dtype=torch.uint8)
    scale = exponents[:, None] if columnwise else exponents
    check_dequantize_of(
        place, data, scale.expand(shape).contiguous(), DType.kFloat8E4M3, out_dtype, columnwise
    )


def check_dequantize_of(
    place: Place,
    data: torch.Tensor,
    scale: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    columnwise: bool,
    shift: int = 0,
) -> None:
    there = place.empty(data.shape, shift=shift).copy_(data)
    out = place.empty(data.shape, out_dtype, shift)
    with place.launching(out):
        mxfp8.dequantize(
            there, scale.to(place.device), dtype, out_dtype, columnwise=columnwise, out=out
        )
    assert_same(
        out, reference.dequantize(data, scale, dtype, out_dtype, columnwise=columnwise), "out"
    )
