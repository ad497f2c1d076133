"""FP8 in blocks of 128: each launcher against its reference, wherever kernels run."""

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
    block_format,
    buffers,
    special,
)

from fuser.cuda import block_scaling
from fuser.formats import DType, fp8_block_scale_shape
from fuser.reference import block_scaling as reference

# Two blocks, so that one without anything special stands beside one with it.
EVERY_INPUT = pytest.mark.parametrize("case", [*ODD, *EMPTY, *special(132, 24)], ids=str)
EVERY_COPY = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)
EVERY_DIM = pytest.mark.parametrize("block_dim", [1, 2])


def check_quantize(
    place: Place,
    case: Input,
    dtype: DType,
    copies: tuple[bool, bool],
    *,
    block_dim: int,
    pow2: bool = True,
    eps: float = 0.0,
) -> None:
    x, values = case.on(place), case.values()
    m, k = case.m, case.k
    shift = int(case.layout in ("shifted", "odd rows"))
    row = row_scale_inv = col = col_scale_inv = None
    if copies[0]:
        shape = fp8_block_scale_shape(m, k, False, block_dim)
        row, row_scale_inv = place.empty((m, k), shift=shift), place.empty(shape, torch.float32)
    if copies[1]:
        shape = fp8_block_scale_shape(m, k, True, block_dim)
        col, col_scale_inv = place.empty((k, m), shift=shift), place.empty(shape, torch.float32)
    outputs = (row, row_scale_inv, col, col_scale_inv)
    with place.launching(*outputs):
        block_scaling.quantize(
            block_format(dtype, block_dim),
            x,
            buffers(row=row, row_scale_inv=row_scale_inv, col=col, col_scale_inv=col_scale_inv),
            pow2=pow2,
            eps=eps,
        )
    expected = reference.quantize(
        values,
        dtype,
        block_dim=block_dim,
        rowwise=copies[0],
        columnwise=copies[1],
        pow2=pow2,
        eps=eps,
    )
    names = ("row", "row_scale_inv", "col", "col_scale_inv")
    for name, got, wanted in zip(names, outputs, expected, strict=True):
        assert_same(got, wanted, name)


def check_dequantize(
    place: Place, case: Input, dtype: DType, out_dtype: torch.dtype, *, block_dim: int, col: bool
) -> None:
    """Of a copy of ``case``; at odd offsets where the input is."""
    copy = reference.quantize(
        case.values(), dtype, block_dim=block_dim, rowwise=not col, columnwise=col, pow2=False
    )
    data, scale_inv = copy[2:] if col else copy[:2]
    assert data is not None
    assert scale_inv is not None
    shift = int(case.layout in ("shifted", "odd rows"))
    there = place.empty(data.shape, shift=shift).copy_(data)
    out = place.empty((case.m, case.k), out_dtype, shift)
    with place.launching(out):
        block_scaling.dequantize(
            there,
            scale_inv.to(place.device),
            dtype,
            out_dtype,
            block_dim=block_dim,
            columnwise=col,
            out=out,
        )
    expected = reference.dequantize(
        data, scale_inv, dtype, out_dtype, block_dim=block_dim, columnwise=col
    )
    assert_same(out, expected, "out")
