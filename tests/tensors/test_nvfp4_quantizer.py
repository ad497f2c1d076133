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
from said import holds, said

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
        nvfp4_use_4over6=False,
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
        (
            {"row_scaled_nvfp4": True, "with_2d_quantization": True},
            said("nvfp4-row-scaled-2d"),
        ),
        ({"nvfp4_use_4over6": True, "with_rht": True}, said("nvfp4-use-block-chooses", "with_rht")),
        (
            {"nvfp4_use_4over6": True, "stochastic_rounding": True},
            said("nvfp4-use-block-chooses", "stochastic_rounding"),
        ),
        ({"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 255}, said("nvfp4-e4m3-max-takes", 255)),
        ({"nvfp4_e4m3_max": 256}, said("nvfp4-e4m3-max-takes", 256, False)),
        ({"nvfp4_4over6_err_mode": "L1"}, said("nvfp4-4over6-err-mode", "'L1'", "'MAE' or 'MSE'")),
        ({"fp4_dtype": DType.kFloat8E4M3}, said("quantizers-fp4-elements-k", holds("kFloat8E4M3"))),
    ],
)
def test_arguments_of_what_is_not_here_are_refused_on(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(fuser.InputError, match=words):
        fuser.NVFP4Quantizer(**arguments)


# -- one fp32 scale for each row -------------------------------------------------------

ROW_SCALED = fuser.NVFP4Quantizer(row_scaled_nvfp4=True)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("dtype", oracles.DTYPES)
def test_row_scaled_bytes_follow_from_the_amax_of_each_row_of_a_copy(
    dtype: torch.dtype, hadamard: bool
) -> None:
    x = oracles.random_tensor((48, 64), dtype, 1) * torch.logspace(-6, 4, 48)[:, None].to(dtype)
    x[5] = 0.0
    made = fuser.NVFP4Quantizer(row_scaled_nvfp4=True, with_rht=hadamard)(x)
    rows = x.float().numpy()
    columns = np.ascontiguousarray(rows.T)
    columns = ref.hadamard(columns, MASKS[True]) if hadamard else columns
    for values, name in ((rows, "rowwise"), (columns, "columnwise")):
        amax = np.abs(values).max(1)
        data, scale, _ = ref.nvfp4_copy(values, amax=amax[:, None])
        assert np.array_equal(getattr(made, f"_{name}_data").numpy(), data)
        assert np.array_equal(getattr(made, f"_{name}_scale_inv").numpy(), scale)
        assert np.array_equal(getattr(made, f"_amax_{name}").numpy(), amax)


def test_row_scaled_values_of_each_row_are_those_of_the_row_alone() -> None:
    x = oracles.random_tensor((32, 64), torch.float32, 1) * torch.logspace(-8, 8, 32)[:, None]
    made = ROW_SCALED.with_usage(rowwise=True, columnwise=False)(x)
    one = fuser.NVFP4Quantizer(columnwise=False)
    alone = torch.cat([one(row[None]).dequantize() for row in x])
    assert torch.equal(made.dequantize(), alone)
    assert not torch.equal(one(x).dequantize(), alone)  # the small rows are lost in one scale
    columns = ROW_SCALED.with_usage(rowwise=False, columnwise=True)(x.t().contiguous())
    assert torch.equal(columns.dequantize(), made.dequantize().t())


def test_row_scaled_tensors_of_any_shape_are_cut_written_saved_and_pickled() -> None:
    x = oracles.random_tensor((3, 17, 40), torch.bfloat16, 1)
    made = ROW_SCALED(x)
    assert made._amax_rowwise.shape == (64,)
    assert made._amax_columnwise.shape == (48,)
    rows = x.view(51, 40)
    expected = torch.cat([ROW_SCALED(row[None]).dequantize() for row in rows]).view(x.shape)
    assert torch.equal(made.dequantize(), expected)
    assert torch.equal(made[1].dequantize(), expected[1])
    assert torch.equal(ROW_SCALED(x[:, :0]).dequantize(), x[:, :0])
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other._quantizer == ROW_SCALED
        assert torch.equal(other.dequantize(), expected)
    made.mul_(2)
    assert torch.equal(made.dequantize(), ROW_SCALED(2 * expected).dequantize())
    assert "row_scaled_nvfp4=True" in repr(made)


def test_row_scaled_tensors_exchange_no_bytes_with_those_of_one_scale() -> None:
    x = oracles.random_tensor((32, 32), torch.float32, 1)
    plain, row_scaled = fuser.NVFP4Quantizer()(x), ROW_SCALED(2 * x)
    expected = fuser.NVFP4Quantizer()(row_scaled.dequantize()).dequantize()
    plain.copy_(row_scaled)
    assert torch.equal(plain.dequantize(), expected)
    assert fuser.NVFP4Quantizer() != ROW_SCALED
    assert ROW_SCALED.format != fuser.NVFP4Quantizer().format


def test_ranks_reduce_the_amaxes_of_the_columns_of_row_scaled_rows() -> None:
    x = oracles.random_tensor((64, 32), torch.float32, 1)
    whole = ROW_SCALED(x)
    parts = [ROW_SCALED.with_amaxes(ROW_SCALED.amaxes_of(x))(part) for part in x.chunk(2)]
    columns = torch.cat([part._columnwise_data for part in parts], 1)
    assert torch.equal(columns, whole._columnwise_data)
    assert torch.equal(parts[0]._amax_columnwise, whole._amax_columnwise)
    assert torch.equal(torch.cat([p._rowwise_data for p in parts]), whole._rowwise_data)
    assert ROW_SCALED.with_usage(rowwise=True, columnwise=False).amaxes_of(x) is None


# -- four over six ----------------------------------------------------------------------


def _tried(x: np.ndarray, amax: Any, e4m3_max: float, largest: float, rows: int) -> Any:
    """Codes, bytes of scales and values in fp64 of blocks whose largest value is at ``largest``."""
    encode = np.where(
        amax == 0, np.float32(1), ref.quotient(6.0 * e4m3_max, np.maximum(amax, 1e-30))
    )
    at_6 = ref.product(ref.quotient(ref.block_amax(x, rows, 16), 6.0), encode)
    scale = ref.E4M3.encode(np.minimum(ref.product(at_6, 6.0 / largest), np.float32(448)))
    decoded = ref.product(ref.E4M3.decode(scale), ref.quotient(1, encode))
    with np.errstate(divide="ignore"):
        factor = np.minimum(ref.quotient(1, decoded), np.float32(ref.FLT_MAX))
    codes = ref.E2M1.encode(ref.product(x, ref.spread(factor, rows, 16, x.shape)))
    wide = ref.spread(ref.E4M3.decode(scale), rows, 16, x.shape).astype(np.float64)
    values = ref.E2M1.decode(codes).astype(np.float64) * wide * amax / (6.0 * e4m3_max)
    return codes, scale, values


def _four_over_six(x: np.ndarray, amax: Any, e4m3_max: float, mode: str, rows: int) -> Any:
    """Data and scales; the errors are summed in fp64, and no two of them may be close."""
    power = 2 if mode == "MSE" else 1
    tried = [_tried(x, amax, e4m3_max, largest, rows) for largest in (6.0, 4.0)]
    of_six, of_four = (
        (np.abs(values - x) ** power).reshape(-1, rows, x.shape[1] // 16, 16).sum((1, 3))
        for _, _, values in tried
    )
    assert (np.abs(of_six - of_four)[of_six != of_four] > 1e-6 * of_six[of_six != of_four]).all()
    is_four = of_four < of_six
    assert 0 < is_four.mean() < 0.9
    wide = is_four.repeat(rows, 0).repeat(16, 1)
    codes = np.where(wide, tried[1][0], tried[0][0])
    scale = np.where(is_four, tried[1][1], tried[0][1]).repeat(rows, 0)
    return ref.packed(codes), ref.padded(scale, 128, 4)


@pytest.mark.parametrize(("square", "row_scaled"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("mode", ["MAE", "MSE"])
def test_four_over_six_keeps_of_each_block_the_scale_of_less_error(
    mode: Any, e4m3_max: Any, square: bool, row_scaled: bool
) -> None:
    quantizer = fuser.NVFP4Quantizer(
        nvfp4_use_4over6=True,
        nvfp4_4over6_err_mode=mode,
        nvfp4_e4m3_max=e4m3_max,
        with_2d_quantization=square,
        row_scaled_nvfp4=row_scaled,
    )
    x = oracles.random_tensor((64, 96), torch.float32, 3)
    # Whole square blocks of 1, 2, 3 and 4 have less error at 4, most random ones at 6.
    x[:32, :48] = torch.randint(1, 5, (32, 48), generator=torch.Generator().manual_seed(1))
    x[3] = 0.0
    made = quantizer(x)
    for name, values in (("rowwise", x), ("columnwise", x.t())):
        matrix = np.ascontiguousarray(values.numpy())
        amax = np.abs(matrix).max(1) if row_scaled else np.array([np.abs(matrix).max()])
        of_rows = amax[:, None] if row_scaled else amax
        data, scale = _four_over_six(matrix, of_rows, e4m3_max, mode, 16 if square else 1)
        assert np.array_equal(getattr(made, f"_{name}_data").numpy(), data)
        assert np.array_equal(getattr(made, f"_{name}_scale_inv").numpy(), scale)
        assert np.array_equal(getattr(made, f"_amax_{name}").numpy(), amax)
        # What is stored says what it is: codes times scales times amax / (6 * largest scale).
        codes = ref.E2M1.decode(ref.unpacked(data)).astype(np.float64)
        blocks = ref.E4M3.decode(scale[: len(matrix), : matrix.shape[1] // 16])
        exact = codes * blocks.astype(np.float64).repeat(16, 1) * of_rows / (6.0 * e4m3_max)
        found = made.with_usage(name).dequantize()
        found = found if name == "rowwise" else found.t()
        np.testing.assert_allclose(found.numpy(), exact, rtol=1e-6)


def test_four_over_six_has_less_error_than_six_alone() -> None:
    x = oracles.random_tensor((256, 256), torch.float32, 1)
    options: dict[str, Any] = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}
    chosen = fuser.NVFP4Quantizer(**options, nvfp4_4over6_err_mode="MSE")(x).dequantize()
    six = fuser.NVFP4Quantizer()(x).dequantize()
    assert (chosen - x).square().sum() < 0.9 * (six - x).square().sum()
    # A block of 4s and 3s is exact at 4, whose neighbours are 3 and 6: at 6 there is no 4.5.
    block = torch.tensor([4.0, 3.0, 2.0, 1.0] * 4).repeat(16, 1)
    assert torch.equal(fuser.NVFP4Quantizer(**options)(block).dequantize(), block)
    assert not torch.equal(fuser.NVFP4Quantizer()(block).dequantize(), block)


def test_four_over_six_tensors_are_written_pickled_and_compared_by_their_options() -> None:
    x = oracles.random_tensor((48, 32), torch.bfloat16, 1)
    options: dict[str, Any] = {"nvfp4_use_4over6": True}
    quantizer = fuser.NVFP4Quantizer(**options, nvfp4_e4m3_max=256)
    made = quantizer(x)
    expected = made.dequantize()
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other._quantizer == quantizer
        assert torch.equal(other.dequantize(), expected)
    assert torch.equal(made[16:32].dequantize(), expected[16:32])
    wide = fuser.NVFP4Quantizer(**options)(x)
    wide.copy_(made)  # bytes under another largest scale
    assert torch.equal(wide.dequantize(), fuser.NVFP4Quantizer(**options)(expected).dequantize())
    others = [{}, options, {**options, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"}]
    for changed in others:
        assert fuser.NVFP4Quantizer(**changed) != quantizer
    made.copy_(2 * x)
    assert torch.equal(made.dequantize(), quantizer(2 * x).dequantize())
