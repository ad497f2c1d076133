"""FP8 with one scale a row: each launcher against its reference, wherever kernels run."""

from __future__ import annotations

import pytest
import torch
from quantize_cases import (
    COPIES,
    EMPTY,
    ODD,
    Input,
    Place,
    assert_same,
    buffers,
    rows_format,
    special,
)

from fuser.cuda import rowwise_scaling
from fuser.formats import DType
from fuser.reference import rowwise_scaling as reference

# Two tiles, so that most rows and columns have nothing special.
EVERY_INPUT = pytest.mark.parametrize("case", [*ODD, *EMPTY, *special(132, 24)], ids=str)
EVERY_COPY = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)


def check_quantize(
    place: Place,
    case: Input,
    dtype: DType,
    copies: tuple[bool, bool],
    *,
    pow2: bool = False,
    eps: float = 0.0,
) -> None:
    x, values = case.on(place), case.values()
    m, k = case.m, case.k
    shift = int(case.layout in ("shifted", "odd rows"))
    row = row_scale_inv = row_amax = col = col_scale_inv = col_amax = None
    if copies[0]:
        row, row_scale_inv = place.empty((m, k), shift=shift), place.empty((m,), torch.float32)
        row_amax = torch.zeros(m, device=place.device)
    if copies[1]:
        col, col_scale_inv = place.empty((k, m), shift=shift), place.empty((k,), torch.float32)
        col_amax = torch.zeros(k, device=place.device)
    with place.launching():
        rowwise_scaling.amaxes(x, row_amax=row_amax, col_amax=col_amax)
    outputs = (row, row_scale_inv, col, col_scale_inv)
    with place.launching(*outputs):
        rowwise_scaling.quantize(
            rows_format(dtype),
            x,
            buffers(row=row, row_scale_inv=row_scale_inv, col=col, col_scale_inv=col_scale_inv),
            pow2=pow2,
            eps=eps,
            row_amax=row_amax,
            col_amax=col_amax,
        )
    usages = {"rowwise": copies[0], "columnwise": copies[1]}
    expected = reference.quantize(values, dtype, **usages, pow2=pow2, eps=eps)
    names = ("row", "row_scale_inv", "col", "col_scale_inv")
    for name, got, wanted in zip(names, outputs, expected, strict=True):
        assert_same(got, wanted, name)


def check_dequantize(
    place: Place, case: Input, dtype: DType, out_dtype: torch.dtype, *, col: bool
) -> None:
    """Of a copy of ``case``; at odd offsets where the input is."""
    copy = reference.quantize(case.values(), dtype, rowwise=not col, columnwise=col)
    data, scale_inv = copy[2:] if col else copy[:2]
    assert data is not None
    assert scale_inv is not None
    shift = int(case.layout in ("shifted", "odd rows"))
    there = place.empty(data.shape, shift=shift).copy_(data)
    scales = place.empty(scale_inv.shape, torch.float32, shift).copy_(scale_inv)
    out = place.empty((case.m, case.k), out_dtype, shift)
    with place.launching(out):
        rowwise_scaling.dequantize(there, scales, dtype, out_dtype, columnwise=col, out=out)
    expected = reference.dequantize(data, scale_inv, dtype, out_dtype, columnwise=col)
    assert_same(out, expected, "out")
