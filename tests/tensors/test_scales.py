"""The scale of an amax in every format: written numbers and the numpy definition."""

from __future__ import annotations

import math
from typing import Any

import number_formats as ref
import numpy as np
import pytest
import torch
from format_cases import FLT_MAX, INF, NAN, bits, deterministic, same
from hypothesis import given, settings
from hypothesis import strategies as st

from fuser.reference import fp8, mxfp8


@pytest.mark.parametrize(
    ("amax", "options", "expected"),
    [
        (448.0, {}, 0x3F800000),  # 1
        (3.0, {}, 0x43155555),  # 149.33333
        (3.0, {"pow2": True}, 0x43000000),  # 128
        (0.0, {}, 0x3F800000),
        (INF, {}, 0x3F800000),
        (NAN, {}, 0x3F800000),
        (FLT_MAX, {}, 0x03E00001),  # 1.75 * 2^-120 (1 + 2^-24): seven eighths of a step above
        (2.0**-149, {}, 0x7F7FFFFF),  # FLT_MAX
        (2.0**-149, {"pow2": True}, 0x7F000000),  # 2^127
        (2.0**-149, {"when_infinite": 65504.0}, 0x477FE000),
        (2.0**-149, {"when_infinite": 65504.0, "pow2": True}, 0x47000000),  # 32768
        (2.0**-149, {"max_fp8": 57344.0, "eps": 1.0}, 0x47600000),
        (0.0, {"eps": 448.0}, 0x3F800000),
        (0.0, {"eps": 1.0}, 0x43E00000),  # 448
        (2.0, {"eps": 1.0}, 0x43600000),  # 224
        (NAN, {"eps": 1.0}, 0x3F800000),
        (INF, {"eps": 1.0}, 0x3F800000),
    ],
)
def test_the_scale_of_an_amax(amax: float, options: dict[str, Any], expected: int) -> None:
    defaults = {"max_fp8": 448.0, "pow2": False, "eps": 0.0, "when_infinite": FLT_MAX}
    scale = fp8.scale_from_amax(torch.tensor([amax]), **{**defaults, **options})
    assert bits(scale) == [expected]


positive_fp32 = st.integers(0, 0x7FC00000) | st.sampled_from(
    [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
)


@given(
    amaxes=st.lists(positive_fp32, min_size=1, max_size=40),
    max_fp8=st.sampled_from([448.0, 57344.0]),
    pow2=st.booleans(),
    eps=st.sampled_from([0.0, 1e-12, 1e-30, 0.3, 1e30]),
    when_infinite=st.sampled_from([FLT_MAX, 65504.0, ref.LARGEST_INPUT["bfloat16"]]),
)
@settings(max_examples=100, **deterministic)
def test_scales_equal_the_numpy_definition_for_any_fp32_amax(
    amaxes: list[int], max_fp8: float, pow2: bool, eps: float, when_infinite: float
) -> None:
    amax = ref.from_bits(np.array([amaxes], np.uint32))
    scale = fp8.scale_from_amax(torch.from_numpy(amax), max_fp8, pow2, eps, when_infinite)
    assert same(scale, ref.scale_from_amax(amax, max_fp8, pow2, eps, when_infinite))


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [
        (0.0, 0),
        (448.0, 127),
        (449.0, 128),
        (896.0, 128),
        (447.0, 127),
        (224.0, 126),
        (1.0, 119),  # 1 / 448 lies between 2^-9 and 2^-8
        (FLT_MAX, 247),
        (INF, 0xFE),
        (NAN, 0xFF),
        (448 * 2.0**-127, 0),  # the product is 0x00400000: 2^-127 itself
        (448 * 2.0**-127 * (1 + 2.0**-18), 1),
        (448 * 2.0**-126, 1),
        (448 * 2.0**-126 * (1 + 2.0**-18), 2),
        (2.0**-149, 0),
    ],
)
def test_the_exponent_of_an_amax(amax: float, exponent: int) -> None:
    assert mxfp8.e8m0_from_amax(torch.tensor([amax]), 1 / 448).tolist() == [exponent]


def test_an_exponent_never_rounds_up_to_that_of_nan() -> None:
    # 57344 * FLT_MAX is no amax, so the product is handed over as it is.
    assert mxfp8.e8m0_from_amax(torch.tensor([FLT_MAX, 2.0**127]), 1.0).tolist() == [0xFE, 0xFE]


@given(
    amaxes=st.lists(positive_fp32, min_size=1, max_size=40),
    max_fp8=st.sampled_from([448.0, 57344.0]),
)
@settings(max_examples=100, **deterministic)
def test_exponents_equal_the_numpy_definition_for_any_fp32_amax(
    amaxes: list[int], max_fp8: float
) -> None:
    amax = ref.from_bits(np.array([amaxes], np.uint32))
    got = mxfp8.e8m0_from_amax(torch.from_numpy(amax), 1 / max_fp8)
    assert same(got, ref.e8m0_from_amax(amax, max_fp8))


def test_every_exponent_has_its_multiplier() -> None:
    e8m0 = torch.arange(256, dtype=torch.uint8)
    multiplier = mxfp8.multiplier(e8m0)
    assert multiplier.dtype == torch.float32
    assert same(multiplier[:255], ref.multiplier(e8m0.numpy())[:255])
    assert math.isnan(multiplier[255])
    assert bits(multiplier[[0, 127, 253, 254]]) == [0x7F000000, 0x3F800000, 0x00800000, 0x00400000]
