"""The NVFP4 quantizer's arguments: what they change, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import number_formats as ref
import numpy as np
import oracles
import pytest
import torch

import fuser
from fuser import DType, gemm
from fuser import recipe as recipes

MASKS = {True: 0xD7E8, False: 0}


@pytest.mark.parametrize("random_signs", MASKS)
@pytest.mark.parametrize("dtype", oracles.DTYPES)
def test_a_transformed_copy_has_the_bytes_of_the_rounded_transform(
    random_signs: bool, dtype: torch.dtype
) -> None:
    """In fp32 and rounded to bf16, whatever the dtype that comes in."""
    x = oracles.random_tensor((64, 48), dtype, 1)
    quantizer = fuser.NVFP4Quantizer(with_rht=True, with_random_sign_mask=random_signs)
    made = quantizer(x)
    turned = np.ascontiguousarray(x.float().numpy().T)
    data, scale, amax = ref.nvfp4_copy(ref.hadamard(turned, MASKS[random_signs]))
    assert np.array_equal(made._columnwise_data.numpy(), data)
    assert np.array_equal(made._columnwise_scale_inv.numpy(), scale)
    assert np.array_equal(made._amax_columnwise.numpy(), amax)
    # The rowwise copy is not transformed.
    plain = fuser.NVFP4Quantizer()(x)
    assert torch.equal(made._rowwise_data, plain._rowwise_data)
    assert torch.equal(made._amax_rowwise, plain._amax_rowwise)
    error = made.with_usage("columnwise").dequantize().float() - x.float()
    assert error.norm() < 0.15 * x.float().norm()


def test_bytes_under_other_signs_are_not_exchanged() -> None:
    x = oracles.random_tensor((32, 32), torch.float32, 1)
    one, other = (
        fuser.NVFP4Quantizer(with_rht=True, with_random_sign_mask=signs)(x) for signs in MASKS
    )
    expected = other.dequantize()
    one.copy_(other)
    back = one.with_usage("columnwise").dequantize()
    assert (back - expected).norm() < 0.3 * expected.norm()


def test_a_recipe_reaches_the_sign_mask_by_a_factory() -> None:
    made = fuser.NVFP4Quantizer(with_rht=True, with_random_sign_mask=False)
    recipe = recipes.CustomRecipe(qfactory=lambda role: made)
    op = oracles.randomize(fuser.BasicLinear(32, 32))
    x = oracles.random_tensor((32, 32), torch.float32, 1)
    dy = oracles.random_tensor((32, 32), torch.float32, 2)
    with fuser.autocast(recipe=recipe):
        op(x).backward(dy)
    of_dy, of_x = made(dy), made(x)
    expected = of_dy.transformed_columns(torch.float32).T @ of_x.transformed_columns(torch.float32)
    assert torch.equal(op.weight.grad, expected)


@pytest.mark.parametrize("signs", [True, False])
def test_a_transform_of_both_operands_cancels(signs: bool) -> None:
    made = fuser.NVFP4Quantizer(with_rht=True, with_random_sign_mask=signs)
    dy, x = (made(oracles.random_tensor((40, 32), torch.float32, seed)) for seed in (1, 2))
    product = gemm.quantized_wgrad(dy, x, torch.float32, is_split=False)
    a, b = (t.with_usage("columnwise").dequantize_padded(torch.float32).double() for t in (dy, x))
    torch.testing.assert_close(product.double(), a.T @ b, atol=1e-4, rtol=1e-5)


def test_a_transform_of_one_operand_is_inverted() -> None:
    dy = fuser.NVFP4Quantizer(with_rht=True)(oracles.random_tensor((32, 32), torch.float32, 1))
    for other in (
        fuser.NVFP4Quantizer(),
        fuser.NVFP4Quantizer(with_rht=True, with_random_sign_mask=False),
    ):
        x = other(oracles.random_tensor((32, 32), torch.float32, 2))
        product = gemm.quantized_wgrad(dy, x, torch.float32, is_split=False)
        a, b = (t.with_usage("columnwise").dequantize() for t in (dy, x))
        assert torch.equal(product, a.T @ b)


def test_arguments_of_what_is_not_here_are_accepted_off() -> None:
    quantizer = fuser.NVFP4Quantizer(
        DType.kFloat4E2M1,
        with_rht=True,
        with_post_rht_amax=True,
        row_scaled_activation=False,
        nvfp4_4over6=False,
    )
    assert quantizer == fuser.NVFP4Quantizer(with_rht=True)
    assert hash(quantizer) == hash(fuser.NVFP4Quantizer(with_rht=True))
    assert quantizer.fp4_dtype is DType.kFloat4E2M1
    row = quantizer.with_usage(rowwise=True, columnwise=False)
    assert row == fuser.NVFP4Quantizer(with_rht=True, columnwise=False)
    for other in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
        assert other == quantizer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"row_scaled_activation": True}, "row_scaled_activation=True; .* one fp32 scale"),
        ({"nvfp4_4over6": True}, "nvfp4_4over6=True; .* never to 4"),
        ({"fp4_dtype": DType.kFloat8E4M3}, "fp4_dtype .*kFloat8E4M3.*kFloat4E2M1"),
    ],
)
def test_arguments_of_what_is_not_here_are_refused_on(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(fuser.InputError, match=words):
        fuser.NVFP4Quantizer(**arguments)
