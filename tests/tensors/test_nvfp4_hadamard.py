"""NVFP4's random Hadamard transform in the torch reference."""

from __future__ import annotations

import number_formats as ref
import numpy as np
import pytest
import torch
from format_cases import SIGN_MASK, WIDE, Random, all_same, deterministic, fp32_of, identical, same
from hypothesis import given, settings
from hypothesis import strategies as st

from fuser import formats
from fuser.reference import nvfp4

NEGATIVE = (3, 5, 6, 7, 8, 9, 10, 12, 14, 15)


@pytest.mark.parametrize("random_signs", [True, False])
def test_the_hadamard_transform_is_orthonormal_and_its_inverse_undoes_it_exactly(
    random_signs: bool,
) -> None:
    identity = torch.eye(16)
    # Row i is the image of unit vector i.
    matrix = nvfp4.hadamard_transform(identity, random_signs)
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25))
    assert torch.equal(matrix @ matrix.T, identity)
    assert torch.equal(nvfp4.inverse_hadamard_transform(matrix, random_signs), identity)
    assert torch.equal(nvfp4.inverse_hadamard_transform(identity, random_signs), matrix.T)
    # Sums of 16 of these, in quarters, have the 8 bits of bf16.
    x = torch.from_numpy(np.random.default_rng(17).integers(-9, 9, (5, 48))).to(torch.bfloat16)
    y = nvfp4.hadamard_transform(x, random_signs)
    assert y.dtype == torch.float32
    assert torch.equal(nvfp4.inverse_hadamard_transform(y, random_signs), x.float())
    assert torch.equal(y.square().sum(-1), x.float().square().sum(-1))


@pytest.mark.parametrize("random_signs", [True, False])
def test_the_hadamard_transform_has_the_signs_of_its_mask_and_mixes_groups_of_16_only(
    random_signs: bool,
) -> None:
    matrix = nvfp4.hadamard_transform(torch.eye(16), random_signs).T
    signs = [-1.0 if random_signs and i in NEGATIVE else 1.0 for i in range(16)]
    assert [i for i in range(16) if formats.HADAMARD_SIGNS >> i & 1] == list(NEGATIVE)
    sylvester = [[(-1.0) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)]
    assert torch.equal(matrix, torch.tensor(sylvester) * torch.tensor(signs))
    x = torch.zeros(2, 48)
    x[1, 20] = 4.0
    y = nvfp4.hadamard_transform(x, random_signs)
    assert torch.equal(y[1, 16:32], matrix[:, 4] * 4)
    assert int(y.count_nonzero()) == 16


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 100))
@settings(max_examples=20, **deterministic)
def test_the_hadamard_transform_adds_in_its_documented_order_and_rounds_to_bf16(
    seed: int, exponent: int
) -> None:
    x = Random(7, 64, exponent=exponent, seed=seed).tensor()
    found = nvfp4.hadamard_transform(x)
    assert same(found, ref.hadamard(x.numpy(), SIGN_MASK))
    assert torch.equal(found.bfloat16().float(), found)
    exact = (x.double().view(-1, 16) @ nvfp4.hadamard_transform(torch.eye(16)).double()).view(7, 64)
    size = x.double().abs().view(-1, 16).sum(-1).max() * 2.0**-23
    rounding = exact.abs() * 2.0**-8 + 2.0**-134
    assert ((found.double() - exact).abs() <= size + rounding).all()


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("random_signs", [True, False])
def test_transformed_bytes_are_those_of_a_matrix_product(
    dtype: torch.dtype, random_signs: bool
) -> None:
    """Written from the formulas, with the sums in another order."""
    x = Random(512, 256, dtype, spread=1, seed=23).tensor()
    got = nvfp4.quantize(x, hadamard=True, random_signs=random_signs)
    turned = np.ascontiguousarray(fp32_of(x).T)
    col = ref.nvfp4_copy(ref.hadamard_by_matrix(turned, SIGN_MASK if random_signs else 0))
    row = ref.nvfp4_copy(fp32_of(x))
    assert all_same(got[:2], row[:2])
    assert same(got[4], col[1])
    assert np.array_equal(got[5].numpy(), col[2])
    # Sums of 16-bit elements of like magnitudes are exact in fp32, in any order; of fp32 elements
    # they are not, and a sum that lies beside the middle of two bf16 numbers may go either way.
    differ = np.count_nonzero(ref.unpacked(got[3].numpy()) != ref.unpacked(col[0]))
    assert differ <= (2e-4 * x.numel() if dtype is torch.float32 else 0)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_the_columnwise_copy_under_hadamard_is_that_of_the_tensor_transformed_along_m(
    dtype: torch.dtype,
) -> None:
    x = torch.from_numpy(np.random.default_rng(18).integers(-9, 9, (64, 48))).to(dtype)
    plain, mixed = nvfp4.quantize(x), nvfp4.quantize(x, hadamard=True)
    for a, b in zip(plain[:3], mixed[:3], strict=True):
        assert identical(a, b)
    transformed = nvfp4.quantize(nvfp4.hadamard_transform(x.T), columnwise=False)
    for a, b in zip(transformed[:3], mixed[3:], strict=True):
        assert identical(a, b)
    assert not identical(plain[3], mixed[3])


def test_an_outlier_does_less_harm_to_its_block_under_hadamard() -> None:
    x = Random(16, 64, spread=0, seed=19).tensor()
    x[3] *= 40
    errors = []
    for hadamard in (False, True):
        *_, col, scale, amax = nvfp4.quantize(x, hadamard=hadamard)
        back = nvfp4.dequantize(col, scale, amax, torch.float32, columnwise=True)
        if hadamard:
            back = nvfp4.inverse_hadamard_transform(back.T).T
        # The outlier's own error is that of its size; the others' is what it does to them.
        others = [i for i in range(16) if i != 3]
        errors.append(((back - x)[others] == -x[others]).float().mean().item())
    assert errors[1] < errors[0] / 4  # the share of elements that were lost altogether
