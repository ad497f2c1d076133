"""Casts of the torch reference to E4M3, E5M2 and E2M1: every 16-bit number, ties, saturation."""

from __future__ import annotations

import number_formats as ref
import numpy as np
import pytest
import torch
from format_cases import (
    E4M3,
    E5M2,
    FLOAT8,
    FLT_MAX,
    INF,
    NAN,
    NUMPY,
    Random,
    as_bytes,
    fp32_of,
    same,
)

from fuser.formats import DType
from fuser.reference import fp8_scaling, nvfp4


def every_sixteen_bit_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def around_midpoints(fmt: ref.SmallFloat) -> torch.Tensor:
    """Every midpoint between two neighbours, the fp32 below it, the one above, both signs."""
    middle = torch.from_numpy((fmt.values[:-1] + fmt.values[1:]) / 2).float()
    below = torch.nextafter(middle, torch.tensor(0.0))
    above = torch.nextafter(middle, torch.tensor(INF))
    x = torch.cat((below, middle, above))
    return torch.cat((x, -x))


@FLOAT8
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 149.33333])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
def test_every_sixteen_bit_number_casts_to_the_nearest_byte(
    dtype: DType, scale: float, source: torch.dtype
) -> None:
    x = every_sixteen_bit_number(source)
    factor = torch.tensor([scale])
    expected = NUMPY[dtype].encode(ref.product(fp32_of(x), factor.numpy()))
    assert same(fp8_scaling.cast(x, factor, dtype), expected)


@FLOAT8
def test_a_midpoint_casts_to_the_even_byte_and_its_neighbours_to_theirs(dtype: DType) -> None:
    x = around_midpoints(NUMPY[dtype])
    codes = fp8_scaling.cast(x, torch.ones(1), dtype)
    assert same(codes, NUMPY[dtype].encode(x.numpy()))
    below, middle, above = codes[: len(x) // 2].view(3, -1).int()
    assert torch.equal(above - below, torch.ones_like(below))
    assert not (middle & 1).any()


@FLOAT8
def test_a_cast_saturates_and_every_nan_becomes_one_byte(dtype: DType) -> None:
    x = torch.tensor([INF, -INF, FLT_MAX, -FLT_MAX, dtype.max * 1.0625, NAN, -NAN, 0.0, -0.0])
    largest = {E4M3: "7e", E5M2: "7b"}[dtype]
    negative = {E4M3: "fe", E5M2: "fb"}[dtype]
    expected = f"{largest}{negative}{largest}{negative}{largest}7f7f0080"
    assert same(fp8_scaling.cast(x, torch.ones(1), dtype), as_bytes(expected))


@FLOAT8
def test_every_finite_byte_decodes_to_its_value_and_casts_back(dtype: DType) -> None:
    fmt = NUMPY[dtype]
    codes = np.arange(256, dtype=np.uint8)
    finite = (codes & 0x7F) < len(fmt.values)
    data = torch.from_numpy(codes)
    values = fp8_scaling.dequantize(data, torch.ones(1), dtype, torch.float32)
    assert same(values[finite], fmt.decode(codes[finite]).astype(np.float32))
    assert torch.equal(fp8_scaling.cast(values, torch.ones(1), dtype)[finite], data[finite])
    rest = values[~finite]
    infinities = 2 if dtype is E5M2 else 0
    assert int(rest.isinf().sum()) == infinities
    assert int(rest.isnan().sum()) == len(rest) - infinities


def test_a_scale_broadcasts() -> None:
    x = Random(6, 10, seed=1).tensor()
    scale = torch.tensor([1.0, 2.0, 4.0, 8.0, 0.5, 3.0]).unsqueeze(1)
    expected = ref.E4M3.encode(ref.product(x.numpy(), scale.numpy()))
    assert same(fp8_scaling.cast(x, scale, E4M3), expected)


def test_e2m1_casts_every_bf16_number_and_every_midpoint_to_the_nearest_code() -> None:
    x = torch.cat((every_sixteen_bit_number(torch.bfloat16).float(), around_midpoints(ref.E2M1)))
    assert same(nvfp4.cast_e2m1_(x.clone()), ref.E2M1.encode(x.numpy()))


def test_e2m1_ties_go_to_even_signs_stay_and_nan_is_six() -> None:
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, INF, 0.0, -0.0, -0.25, -5.0, -INF, NAN, -NAN]
    expected = "00 02 02 04 04 06 06 07 07 00 08 08 0e 0f 07 07"
    assert same(nvfp4.cast_e2m1_(torch.tensor(x)), as_bytes(expected))
