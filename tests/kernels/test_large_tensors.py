"""Sizes past those that kernels hold in their ints are refused, with the sizes in the sentence.

What is below them, and past 2^31 elements, runs in ``gpu/test_large_inputs.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from quantize_cases import block_format, buffers, fp8_format, mxfp8_format, nvfp4_format
from said import holds, said

from fuser.chain import Stage
from fuser.cuda import (
    block_scaling,
    fp8_scaling,
    mxfp8,
    normalization,
    normalization_backward,
    nvfp4,
    pointwise,
)
from fuser.errors import InputError
from fuser.formats import (
    DType,
    fp8_block_scale_shape,
    mxfp8_scale_shape,
    nvfp4_scale_shape,
)

GELU = (Stage("gelu"),)
E4M3 = DType.kFloat8E4M3


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory: what is refused is refused before anything is read."""
    return torch.empty(shape, dtype=dtype, device="meta")


def in_bytes(*shape: int) -> torch.Tensor:
    """The data of a quantized tensor, or its scales of a byte each."""
    return on_meta(*shape, dtype=torch.uint8)


def in_fp32(*shape: int) -> torch.Tensor:
    """Statistics, or scales."""
    return on_meta(*shape, dtype=torch.float32)


@pytest.mark.parametrize(("rows", "columns"), [(2**31, 1), (1, 2**30)])
def test_chains_refuse_rows_and_columns_that_no_int_holds(rows: int, columns: int) -> None:
    x = on_meta(rows, columns)
    calls: tuple[Callable[[], object], ...] = (
        lambda: pointwise.pointwise(GELU, x, [None], x),
        lambda: pointwise.pointwise(GELU, x, [None], None, in_fp32(1)),
        lambda: pointwise.pointwise_backward(GELU, x, x, [None], x, [None]),
        lambda: pointwise.forward_producer(GELU, x, [None], rows, columns),
        lambda: pointwise.backward_producer(GELU, x, x, [None], rows, columns),
    )
    for call in calls:
        with pytest.raises(
            InputError, match=said("chain-rows-columns-fewer", rows, columns, 2147483648)
        ):
            call()


@pytest.mark.parametrize("shape", [(2**29 + 1, 8), (8, 2**29 + 8)])
def test_norms_refuse_more_than_2_to_the_29_rows_or_columns(shape: tuple[int, int]) -> None:
    x, gamma, rstd = on_meta(*shape), on_meta(shape[1]), in_fp32(shape[0])
    forward = normalization.Forward(x, gamma=gamma)
    backward = normalization_backward.Backward(x, x, gamma, None, None, rstd)
    calls: tuple[Callable[[], object], ...] = (
        lambda: normalization.norm_forward(forward._replace(y=x), eps=0.0),
        lambda: normalization.norm_producer(forward._replace(rstd=rstd), x.dtype),
        lambda: normalization_backward.norm_backward(backward._replace(dx=x)),
        lambda: normalization_backward.norm_backward_producer(backward._replace(means=rstd)),
    )
    for call in calls:
        with pytest.raises(
            InputError,
            match=said(
                "norm-common-shape-rows-columns",
                None,
                536870912,
                None,
                holds(f"({shape[0]}, {shape[1]}"),
            ),
        ):
            call()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((32, 2**31), said("arguments-does-not-int32", 2147483648)),
        ((2**22, 2**24), said("launch-tuple-ints", "grid (4294967296,)")),  # tiles of 128 x 128
    ],
)
def test_quantizers_refuse_columns_and_tiles_that_no_int_holds(
    shape: tuple[int, int], words: str
) -> None:
    m, k = shape
    x, row = on_meta(m, k), in_bytes(m, k)
    mx_scale, nv_scale = mxfp8_scale_shape(m, k, False), nvfp4_scale_shape(m, k, False)
    block_scale = in_fp32(*fp8_block_scale_shape(m, k, False, 1))
    calls: tuple[Callable[[], object], ...] = (
        lambda: mxfp8.quantize(
            mxfp8_format(E4M3), x, buffers(row=row, row_scale=in_bytes(*mx_scale))
        ),
        lambda: nvfp4.quantize(
            nvfp4_format(),
            x,
            buffers(row=in_bytes(m, k // 2), row_scale=in_bytes(*nv_scale)),
            in_fp32(2),
        ),
        lambda: block_scaling.quantize(
            block_format(E4M3, 1), x, buffers(row=row, row_scale_inv=block_scale)
        ),
        lambda: fp8_scaling.quantize(
            fp8_format(),
            x,
            buffers(row=row, col=in_bytes(k, m), scale_inv=in_fp32(1)),
            amax_value=in_fp32(1),
        ),
    )
    for call in calls:
        with pytest.raises(InputError, match=words):
            call()
