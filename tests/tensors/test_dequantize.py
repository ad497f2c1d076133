"""Dequantizing every format: one product, one rounding, an error of half a step at most."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import number_formats as ref
import numpy as np
import pytest
import torch
from format_cases import (
    E4M3,
    EVERY_QUANTIZER,
    FLOAT8,
    NAN,
    QUANTIZERS,
    WIDE,
    Outputs,
    Random,
    bits,
    dequantizers,
    deterministic,
    identical,
    randoms,
    same,
)
from hypothesis import given, settings

from fuser.formats import DType
from fuser.reference import block_scaling, fp8_scaling, mxfp8, nvfp4


def units(name: str, out: Outputs, copy: str, shape: tuple[int, int]) -> np.ndarray:
    """What a code of 1 stands for, for each element of ``[M, K]``, in fp32."""
    if "scale_inv" in out:
        return np.broadcast_to(out["scale_inv"].numpy(), shape)
    m, k = shape
    scale = out[f"{copy}_scale"].numpy()
    turned = copy == "col"
    if name.startswith("mxfp8"):
        rows, columns = (32, 1) if turned else (1, 32)
        scale = scale[: m // rows, : k // columns]
        factor = ref.fp32(np.ldexp(1.0, scale.astype(np.int64) - 127))
        return ref.spread(np.where(scale == 255, np.float32(NAN), factor), rows, columns, shape)
    stored = (k, m) if turned else (m, k)
    if name == "block-1d":
        unit = ref.spread(scale.T, 1, 128, stored)
    elif name == "rowwise":
        unit = ref.spread(scale[:, None], 1, stored[1], stored)
    elif name == "block-2d":
        unit = ref.spread(scale, 128, 128, stored)
    else:
        amax = out[f"{copy}_amax"].numpy()
        factor = ref.product(ref.product(ref.E4M3.decode(scale), amax), ref.quotient(1, 2688.0))
        unit = ref.spread(factor, 1, 16, stored)
    return unit.T if turned else unit


@EVERY_QUANTIZER
@given(x=randoms(multiple=32, largest=160, finite=True))
@settings(max_examples=20, **deterministic)
def test_dequantize_multiplies_once_in_fp32_and_rounds_once(name: str, x: Random) -> None:
    t = x.tensor()
    out = QUANTIZERS[name](t)
    for copy, dequantize in dequantizers(name, out).items():
        codes = out[copy].numpy()
        fmt = ref.E5M2 if name == "current-pow2" else ref.E4M3
        if name.startswith("nvfp4"):
            fmt, codes = ref.E2M1, ref.unpacked(codes)
        values = fmt.decode(codes)
        if copy == "col" and not name.startswith("mxfp8"):
            values = values.T
        expected = ref.product(values, units(name, out, copy, (x.m, x.k)))
        got = dequantize(torch.float32)
        assert same(got, expected)
        for dtype in (torch.bfloat16, torch.float16):
            rounded = dequantize(dtype)
            assert rounded.is_contiguous()
            assert torch.equal(rounded, got.to(dtype))


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name != "nvfp4-stochastic"])
@given(x=randoms(multiple=32, largest=160, finite=True))
@settings(max_examples=20, **deterministic)
def test_a_dequantized_value_is_within_half_a_step_of_the_input(name: str, x: Random) -> None:
    t = x.tensor()
    if name == "delayed":
        t = t.clamp(-149, 149)  # which its scale of 3 brings below 448
    out = QUANTIZERS[name](t)
    exact = t.double().numpy()
    for copy, dequantize in dequantizers(name, out).items():
        wanted = exact
        if name == "nvfp4-hadamard" and copy == "col":
            wanted = nvfp4.hadamard_transform(t.float().T).T.double().numpy()
        unit = units(name, out, copy, (x.m, x.k)).astype(np.float64)
        if name.startswith("nvfp4"):
            # A fifth: 5 lies between 4 and 6. The block's scale may be off by half of E4M3's
            # smallest step, and six such steps are what its largest element can miss.
            amax = float(out[f"{copy}_amax"])
            slack = 6 * 2.0**-10 * amax / 2688
            bound = np.maximum(np.abs(wanted) / 5, unit / 4) + slack
        else:
            fmt = ref.E5M2 if name == "current-pow2" else ref.E4M3
            relative = 2.0 ** -(fmt.mantissa_bits + 1)
            bound = np.maximum(np.abs(wanted) * relative, unit * fmt.values[1] / 2)
        error = np.abs(dequantize(torch.float32).double().numpy() - wanted)
        assert (error <= bound * (1 + 2.0**-18)).all()


def maxima_everywhere(tile: int, dtype: DType) -> torch.Tensor:
    """A tensor in which every block of every format holds the format's maximum times 2^n.

    ``n`` differs between tiles of ``tile x tile``.
    """
    rng = np.random.default_rng(14)
    x = rng.uniform(-1, 1, (256, 256))
    i, j = np.indices(x.shape)
    x[(i + j) % 16 == 0] = 1
    tiles = rng.integers(-20, 20, (256 // tile, 256 // tile))
    return torch.from_numpy(np.ldexp(x, ref.spread(tiles, tile, tile, x.shape)) * dtype.max).float()


@pytest.mark.parametrize("out_dtype", WIDE, ids=str)
@FLOAT8
def test_quantizing_what_was_dequantized_gives_the_same_bytes_with_power_of_two_scales(
    dtype: DType, out_dtype: torch.dtype
) -> None:
    x = maxima_everywhere(256, dtype)
    row, _, scale_inv = fp8_scaling.quantize_current(x, dtype, pow2=True)
    again = fp8_scaling.dequantize(row, scale_inv, dtype, out_dtype)
    assert identical(fp8_scaling.quantize_current(again, dtype, pow2=True)[0], row)

    for two_dimensional in (False, True):
        check_round_trip(
            maxima_everywhere(32, dtype),
            partial(mxfp8.quantize, dtype=dtype, two_dimensional=two_dimensional),
            partial(mxfp8.dequantize, dtype=dtype, out_dtype=out_dtype),
        )
    for block_dim in (1, 2):
        check_round_trip(
            maxima_everywhere(128, dtype),
            partial(block_scaling.quantize, dtype=dtype, block_dim=block_dim),
            partial(
                block_scaling.dequantize, dtype=dtype, out_dtype=out_dtype, block_dim=block_dim
            ),
        )


def check_round_trip(
    x: torch.Tensor, quantize: Callable[..., Any], dequantize: Callable[..., torch.Tensor]
) -> None:
    """Each copy, dequantized and quantized again, has the same data and the same scales."""
    first = quantize(x)
    for at, columnwise in ((0, False), (2, True)):
        data, scale = first[at : at + 2]
        again = quantize(dequantize(data, scale, columnwise=columnwise))
        assert identical(again[at], data)
        assert identical(again[at + 1], scale)


@pytest.mark.parametrize("name", ["current-pow2", "mxfp8", "mxfp8-2d"])
@given(x=randoms(multiple=32, largest=128, finite=True))
@settings(max_examples=20, **deterministic)
def test_quantizing_twice_changes_no_value_with_power_of_two_scales(name: str, x: Random) -> None:
    # Bytes may change: a block whose largest byte is half the maximum gets half the scale.
    once = dequantizers(name, QUANTIZERS[name](x.tensor()))
    for copy, dequantize in once.items():
        values = dequantize(torch.float32)
        twice = dequantizers(name, QUANTIZERS[name](values))[copy]
        assert torch.equal(twice(torch.float32), values)


def test_the_least_exponent_dequantizes_by_a_subnormal_and_the_last_to_nan() -> None:
    data = torch.full((32, 32), 0x38, dtype=torch.uint8)  # 1.0
    scale = torch.zeros(128, 4, dtype=torch.uint8)
    scale[:32, 0] = torch.arange(224, 256)
    scale[0, 0], scale[1, 0] = 0, 1
    x = mxfp8.dequantize(data, scale, E4M3, torch.float32, columnwise=False)
    assert bits(x[:4, 0]) == [0x00400000, 0x00800000, 226 << 23, 227 << 23]
    assert bits(x[30, :1]) == [0x7F000000]
    assert x[31].isnan().all()
    column = mxfp8.dequantize(data, scale.T.contiguous(), E4M3, torch.float32, columnwise=True)
    assert same(column, x.T.contiguous().numpy())


@EVERY_QUANTIZER
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
def test_an_empty_tensor_dequantizes_to_an_empty_one(name: str, shape: tuple[int, int]) -> None:
    out = QUANTIZERS[name](torch.empty(shape))
    for dequantize in dequantizers(name, out).values():
        x = dequantize(torch.bfloat16)
        assert tuple(x.shape) == shape
        assert x.dtype == torch.bfloat16


@EVERY_QUANTIZER
def test_a_nan_in_the_input_is_a_nan_in_what_comes_back(name: str) -> None:
    x = Random(64, 64, seed=15).tensor()
    x[5, 40] = NAN
    for dequantize in dequantizers(name, QUANTIZERS[name](x)).values():
        values = dequantize(torch.float32)
        if name == "nvfp4-hadamard" or name == "nvfp4-stochastic":
            assert values.isnan().any()
        else:
            assert values[5, 40].isnan()
        if name.startswith("mxfp8"):
            # The NaN stays in its block.
            assert not values[32:].isnan().any()
            assert not values[:, :32].isnan().any()
