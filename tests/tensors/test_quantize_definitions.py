"""The torch reference of every format has the bytes of its numpy definition on random tensors."""

from __future__ import annotations

import number_formats as ref
import numpy as np
import pytest
import torch
from format_cases import (
    E4M3,
    E5M2,
    NUMPY,
    SIGN_MASK,
    TINY,
    Random,
    all_same,
    bits,
    deterministic,
    fp32_of,
    randoms,
    same,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fuser.formats import DType
from fuser.reference import block_scaling, fp8_scaling, mxfp8, nvfp4, rowwise_scaling


def largest_of(dtype: torch.dtype) -> float:
    return ref.LARGEST_INPUT[str(dtype).removeprefix("torch.")]


@given(
    x=randoms(),
    pow2=st.booleans(),
    fmt=st.sampled_from((E4M3, E5M2)),
    eps=st.sampled_from([0.0, 1e-3]),
)
@settings(max_examples=150, **deterministic)
def test_current_scaling_equals_the_numpy_definition(
    x: Random, pow2: bool, fmt: DType, eps: float
) -> None:
    t = x.tensor()
    got = fp8_scaling.quantize_current(t, fmt, pow2=pow2, eps=eps)
    codes, scale_inv = ref.quantize_current(fp32_of(t), NUMPY[fmt], pow2, eps)
    assert all_same(got, (codes, codes.T, scale_inv))
    assert np.array_equal(fp8_scaling.amax(t).numpy(), [np.abs(fp32_of(t)).max()], equal_nan=True)


@given(x=randoms(largest=40), pow2=st.booleans(), factor=st.sampled_from([0.0, 0.3, 1.0, 7.0]))
@settings(max_examples=20, **deterministic)
def test_a_reduced_amax_replaces_the_tensors_own(x: Random, pow2: bool, factor: float) -> None:
    t = x.tensor()
    amax = fp8_scaling.amax(t) * factor
    got = fp8_scaling.quantize_current(t, E4M3, pow2=pow2, amax_value=amax)
    codes, scale_inv = ref.quantize_current(fp32_of(t), ref.E4M3, pow2, amax=amax.numpy())
    assert all_same(got, (codes, codes.T, scale_inv))


def test_each_copy_of_nvfp4_takes_the_amax_that_was_reduced_for_it() -> None:
    x, amaxes = Random(32, 48, seed=9).tensor(), torch.tensor([100.0, 3000.0])
    both = nvfp4.quantize(x, hadamard=True, amax_value=amaxes)
    for part, amax in ((slice(0, 3), amaxes[:1]), (slice(3, 6), amaxes[1:])):
        alone = nvfp4.quantize(x, hadamard=True, amax_value=amax)
        assert all(map(torch.equal, both[part], alone[part]))
        assert torch.equal(both[part][2], amax)


def test_eps_is_the_least_amax_of_the_tensor_and_of_every_block() -> None:
    x = torch.tensor([[2.0**-18] * 128 + [2.0] * 128])
    row, _, scale_inv = fp8_scaling.quantize_current(x[:, :128], E4M3, eps=0.25, pow2=True)
    assert same(row, np.full((1, 128), 0x02, np.uint8))  # 2^-18 * 2^10
    assert same(scale_inv, np.array([2.0**-10], np.float32))
    row, row_scale, _, _ = block_scaling.quantize(x, E4M3, block_dim=1, eps=0.25)
    assert same(row, np.array([[0x02] * 128 + [0x78] * 128], np.uint8))
    expected = np.zeros((2, 4), np.float32)
    expected[:, 0] = 2.0**-10, 2.0**-7
    assert same(row_scale, expected)


@given(
    x=randoms(largest=300),
    fmt=st.sampled_from((E4M3, E4M3, E5M2)),
    block_dim=st.sampled_from((1, 2)),
    pow2=st.booleans(),
    eps=st.sampled_from([0.0, 0.0, 1e-3]),
)
@settings(max_examples=150, **deterministic)
def test_block_scaling_equals_the_numpy_definition(
    x: Random, fmt: DType, block_dim: int, pow2: bool, eps: float
) -> None:
    t = x.tensor()
    got = block_scaling.quantize(t, fmt, block_dim=block_dim, pow2=pow2, eps=eps)
    largest = largest_of(x.dtype)
    expected = ref.fp8_block_buffers(fp32_of(t), NUMPY[fmt], block_dim, pow2, eps, largest)
    assert all_same(got, expected)


@given(
    x=randoms(largest=300),
    fmt=st.sampled_from((E4M3, E4M3, E5M2)),
    pow2=st.booleans(),
    eps=st.sampled_from([0.0, 0.0, 1e-3]),
)
@settings(max_examples=100, **deterministic)
def test_rowwise_scaling_equals_the_numpy_definition(
    x: Random, fmt: DType, pow2: bool, eps: float
) -> None:
    t = x.tensor()
    got = rowwise_scaling.quantize(t, fmt, pow2=pow2, eps=eps)
    assert all_same(got, ref.fp8_rowwise_buffers(fp32_of(t), NUMPY[fmt], pow2, eps))


@pytest.mark.parametrize(
    ("dtype", "scale_bits"),
    [
        # Half of 2^-128 rounds away; 1 / FLT_MAX and 1 / (the largest bf16) differ.
        (torch.float32, 0x00200000),
        (torch.bfloat16, 0x00202020),
    ],
    ids=str,
)
def test_a_scale_that_overflows_is_the_largest_number_of_the_inputs_dtype(
    dtype: torch.dtype, scale_bits: int
) -> None:
    x = torch.full((1, 1), TINY, dtype=dtype)
    _, row_scale, _, col_scale = block_scaling.quantize(x, E4M3, block_dim=1, pow2=False)
    assert bits(row_scale)[0] == bits(col_scale)[0] == scale_bits


@given(
    x=randoms(multiple=32),
    fmt=st.sampled_from((E4M3, E5M2)),
    two_dimensional=st.booleans(),
)
@settings(max_examples=150, **deterministic)
def test_mxfp8_equals_the_numpy_definition(x: Random, fmt: DType, two_dimensional: bool) -> None:
    t = x.tensor()
    got = mxfp8.quantize(t, fmt, two_dimensional=two_dimensional)
    assert all_same(got, ref.mxfp8_buffers(fp32_of(t), NUMPY[fmt], two_dimensional))


@given(
    x=randoms(multiple=16, largest=96),
    two_dimensional=st.booleans(),
    hadamard=st.booleans(),
    random_signs=st.booleans(),
    factor=st.none() | st.sampled_from([0.0, 1.0, 0.5, 3.0]),
)
@settings(max_examples=150, **deterministic)
def test_nvfp4_equals_the_numpy_definition(
    x: Random, two_dimensional: bool, hadamard: bool, random_signs: bool, factor: float | None
) -> None:
    t = x.tensor()
    values = fp32_of(t)
    amax = None if factor is None else fp8_scaling.amax(t) * factor
    how = {"two_dimensional": two_dimensional, "hadamard": hadamard, "random_signs": random_signs}
    got = nvfp4.quantize(t, **how, amax_value=amax)
    reduced = None if amax is None else amax.numpy()
    turned = np.ascontiguousarray(values.T)
    if hadamard:
        turned = ref.hadamard(turned, SIGN_MASK if random_signs else 0)
    row = ref.nvfp4_copy(values, two_dimensional, reduced)
    col = ref.nvfp4_copy(turned, two_dimensional, reduced)
    for copy, expected in ((got[:3], row), (got[3:], col)):
        assert all_same(copy[:2], expected[:2])
        assert np.array_equal(copy[2].numpy(), expected[2], equal_nan=True)


@given(
    x=randoms(multiple=16, largest=64),
    seed=st.integers(0, 2**63 - 1),
    offset=st.integers(0, 9) | st.integers(0, 2**40),
)
@settings(max_examples=30, **deterministic)
def test_stochastic_nvfp4_equals_the_numpy_definition(x: Random, seed: int, offset: int) -> None:
    t = x.tensor()
    values = fp32_of(t)
    got = nvfp4.quantize(t, stochastic=True, seed=seed, offset=offset)
    turned = np.ascontiguousarray(values.T)
    for stream, (copy, rows) in enumerate(((got[:2], values), (got[3:5], turned))):
        words = ref.random_words(seed, offset, rows.shape, stream)
        assert all_same(copy, ref.nvfp4_copy(rows, words=words)[:2])
