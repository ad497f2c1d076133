"""Shapes that no block divides: quantized as if zeros followed, under every recipe."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import re
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_kernels import on_kernels
from said import said

import fuser
from fuser import recipe as recipes
from fuser.formats import DType, mxfp8_scale_shape, padded_shape
from fuser.functional.lazy import matrix_of
from fuser.gemm import matmul as gemm
from fuser.gemm import native as native_gemm
from fuser.plan.plan import Note
from fuser.reference import mxfp8 as reference
from fuser.tensors import quantizer as quantizer_module
from fuser.tensors.quantizer import whole_blocks

pytestmark = pytest.mark.sampled(most=12)

OVERRIDES = (None, "high_precision", "dequantized")
RECIPES: dict[str, Any] = {
    **{
        f"{name}-{override}": make(backward_override=override)
        for override in OVERRIDES
        for name, make in formats.STATELESS.items()
    },
    "mxfp8-2d": recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    "delayed": recipes.DelayedScaling(),
}
# The largest relative error of a row's rounding, for each operand of a product.
ROUNDING = {"NVFP4BlockScaling": 2**-2}
MULTIPLE = {"MXFP8BlockScaling": 32, "NVFP4BlockScaling": 16}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)

QUANTIZERS: dict[str, Any] = {
    "mxfp8": fuser.MXFP8Quantizer(),
    "mxfp8-2d": fuser.MXFP8Quantizer(DType.kFloat8E5M2, with_2d_quantization=True),
    "nvfp4": fuser.NVFP4Quantizer(),
    "nvfp4-2d": fuser.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4-hadamard": fuser.NVFP4Quantizer(with_rht=True),
    "nvfp4-stochastic": fuser.NVFP4Quantizer(with_rht=True, stochastic_rounding=True, seed=3),
}
EVERY_FORMAT: dict[str, Any] = {
    **formats.QUANTIZERS,
    "delayed": fuser.Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1)),
    "block-1d": fuser.Float8BlockQuantizer(block_scaling_dim=1),
    "block-2d": fuser.Float8BlockQuantizer(),
    **QUANTIZERS,
}
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
every_format = pytest.mark.parametrize("quantizer", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
random_shapes = settings(max_examples=12, deadline=None, derandomize=True, database=None)
COPIES = ("rowwise", "columnwise")


def filled_up(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """``x`` as a matrix, with zeros after it up to multiples."""
    x = x.detach()
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    rows, columns = padded_shape(m, k, multiple)
    return F.pad(x.reshape(m, k), (0, columns - k, 0, rows - m))


# -- tensors ------------------------------------------------------------------


@every_quantizer
@pytest.mark.parametrize("shape", [(5, 40), (33, 64), (64, 33), (2, 3, 50), (7,), (1, 16), (1, 1)])
@pytest.mark.parametrize("dtype", oracles.DTYPES)
def test_a_tensor_of_any_shape_has_the_bytes_of_one_that_zeros_fill_up(
    quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = oracles.random_tensor(shape, dtype, 1)
    tensor, whole = quantizer(x), quantizer(filled_up(x, quantizer.format.multiple))
    assert (tensor.shape, tensor.dtype) == (x.shape, dtype)
    for name, buffer in whole.buffers().items():
        assert torch.equal(tensor.buffers()[name], buffer), name
    m, k = math.prod(shape[:-1]), shape[-1]
    for which in COPIES:
        values = whole.with_usage(which).dequantize()[:m, :k].reshape(shape)
        assert torch.equal(tensor.with_usage(which).dequantize(), values)
        assert tensor.with_usage(which).dequantize().is_contiguous()


@every_format
@pytest.mark.parametrize("shape", [(0, 64), (0, 5), (5, 0), (2, 0, 33), (0,), (2, 3, 0)])
def test_an_empty_tensor_of_any_shape_is_quantized_to_an_empty_one(
    quantizer: Any, shape: tuple[int, ...]
) -> None:
    tensor = quantizer(torch.empty(shape))
    assert tensor.shape == shape
    for which in COPIES:
        assert tensor.with_usage(which).dequantize().shape == shape


@every_format
@pytest.mark.parametrize("shape", [(1, 64), (1, 5), (64,), (5,), (130, 1), (1, 130)])
def test_one_row_and_one_dimension_are_quantized_like_any(
    quantizer: Any, shape: tuple[int, ...]
) -> None:
    x = oracles.random_tensor(shape, torch.float32, 1)
    tensor = quantizer(x)
    step = 2**-1 if "FP4" in quantizer.format.name or "E5M2" in str(quantizer.format) else 2**-3
    for which in COPIES:
        assert (tensor.with_usage(which).dequantize() - x).norm() <= step * x.norm()


@every_format
def test_kernels_take_empty_tensors_one_row_and_one_dimension(quantizer: Any) -> None:
    for shape in ((0, 64), (5, 0), (2, 0, 33), (0,), (2, 3, 0), (1, 5), (5,), (130, 1), (1, 1)):
        x = oracles.random_tensor(shape, torch.bfloat16, 1)
        expected = quantizer(x)
        with on_kernels():
            for _ in range(2):
                made = quantizer(x)
                back = made.dequantize()
        for name, buffer in expected.buffers().items():
            assert torch.equal(made.buffers()[name], buffer), (shape, name)
        assert torch.equal(back, expected.dequantize()), shape


def test_a_scalar_is_refused_with_its_shape() -> None:
    with pytest.raises(fuser.InputError, match=said("quantizer-tensor-shape-dtype")):
        fuser.MXFP8Quantizer()(torch.tensor(1.0))


def test_a_tensor_of_whole_blocks_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("padded")

    monkeypatch.setattr(F, "pad", refuse)
    for made in QUANTIZERS.values():
        tensor = made(torch.randn(64, 96))
        assert tensor.dequantize().untyped_storage().nbytes() == 64 * 96 * 4
        with pytest.raises(AssertionError):
            made(torch.randn(64, 97))


@every_quantizer
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_the_values_that_share_its_scale(
    quantizer: Any, bad: float
) -> None:
    x = oracles.random_tensor((40, 50), torch.float32, 1)
    x[39, 49] = bad
    tensor, whole = quantizer(x), quantizer(filled_up(x, quantizer.format.multiple))
    for which in COPIES:
        found = tensor.with_usage(which).dequantize()
        expected = whole.with_usage(which).dequantize()[:40, :50]
        assert torch.equal(found.isfinite(), expected.isfinite())
        if quantizer.format.name == "MXFP8":
            assert torch.isfinite(found[:32, :32]).all()


# -- as a parameter and as a file ---------------------------------------------------


@every_quantizer
def test_views_of_rows_read_and_write_the_values_of_an_odd_tensor(quantizer: Any) -> None:
    tensor = quantizer(oracles.random_tensor((45, 50), torch.float32, 1))
    for start, stop in ((0, 45), (32, 45), (32, 40), (3, 7), (44, 45)):
        part = tensor[start:stop]
        for which in (w for w in COPIES if part._has(w)):
            values = tensor.with_usage(which).dequantize()
            assert torch.equal(part.with_usage(which).dequantize(), values[start:stop])
            assert torch.equal(part.compact().with_usage(which).dequantize(), values[start:stop])
        part.zero_()
        assert not tensor.dequantize()[start:stop].any()
        assert (
            not tensor.with_usage("columnwise").dequantize()[start:stop].any() or quantizer.with_rht
        )


def test_a_write_through_a_view_of_the_last_block_clears_its_padding() -> None:
    x = oracles.random_tensor((45, 50), torch.float32, 1)
    x[40, 7] = math.nan
    tensor = fuser.MXFP8Quantizer()(x)
    tensor[32:].copy_(torch.ones(13, 50))
    assert tensor.with_usage("columnwise").dequantize().isfinite().all()
    assert tensor.with_usage("columnwise").dequantize_padded(torch.float32).isfinite().all()
    dy = fuser.MXFP8Quantizer()(torch.ones(45, 3))
    found = gemm.quantized_wgrad(dy, tensor, torch.float32, is_split=True)
    assert found.isfinite().all()


RECIPES_WITH_PADDING = {n: r for n, r in RECIPES.items() if type(r).__name__ in MULTIPLE}


@pytest.mark.parametrize("recipe", RECIPES_WITH_PADDING.values(), ids=RECIPES_WITH_PADDING)
def test_a_quantized_parameter_of_an_odd_shape_trains_and_is_saved(recipe: Any) -> None:
    with fuser.quantized_model_init(recipe=recipe):
        model = fuser.Sequential(fuser.Linear(40, 50), fuser.GELU(), fuser.Linear(50, 33))
    x = oracles.random_tensor((5, 40), torch.float32, 1)

    def run(model: torch.nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad(set_to_none=True)
        with fuser.autocast(recipe=recipe):
            y = model(x)
        y.sum().backward()
        return [y, *(p.grad for p in model.parameters())]

    torch.optim.SGD(model.parameters(), lr=0.1).step() if run(model) else None
    expected = run(model)
    assert all(p.grad.shape == p.shape for p in model.parameters())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with fuser.quantized_model_init(recipe=recipe):
        loaded = fuser.Sequential(fuser.Linear(40, 50), fuser.GELU(), fuser.Linear(50, 33))
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (loaded, copy.deepcopy(model)):
        assert all(map(torch.equal, run(other), expected))


# -- linears --------------------------------------------------------------------------


def one_linear(
    recipe: Any, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> dict[str, Any]:
    op = fuser.BasicLinear(weight.shape[1], weight.shape[0])
    op.weight.data = weight
    x = oracles.leaf(x)
    torch.manual_seed(7)  # of stochastic rounding
    with fuser.autocast(recipe=recipe):
        y = op(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": op.weight.grad}


shapes = st.tuples(
    st.lists(st.integers(1, 7), min_size=1, max_size=2).map(tuple),
    st.integers(1, 70),
    st.integers(1, 70),
)


@every_recipe
@random_shapes
@given(shape=shapes)
def test_a_linear_of_any_shape_gives_what_zeros_around_its_operands_give(
    recipe: Any, shape: tuple[tuple[int, ...], int, int]
) -> None:
    lead, k, n = shape
    x = oracles.random_tensor((*lead, k), torch.float32, 1)
    weight = oracles.random_tensor((n, k), torch.float32, 2)
    dy = oracles.random_tensor((*lead, n), torch.float32, 3)
    found = one_linear(recipe, x, weight, dy)
    multiple = MULTIPLE.get(type(recipe).__name__, 16)
    whole = one_linear(recipe, *(filled_up(t, multiple) for t in (x, weight, dy)))
    m = math.prod(lead)
    sizes = {"y": (m, n), "dx": (m, k), "dw": (n, k)}
    for name, (rows, columns) in sizes.items():
        expected = whole[name][:rows, :columns].reshape(found[name].shape)
        # The same products of the same bytes; a GEMM of another size may add in another order.
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-4, msg=name)


@every_recipe
@random_shapes
@given(shape=shapes)
def test_a_linear_of_any_shape_is_within_its_formats_error(
    recipe: Any, shape: tuple[tuple[int, ...], int, int]
) -> None:
    lead, k, n = shape
    x = oracles.random_tensor((*lead, k), torch.float32, 1)
    weight = oracles.random_tensor((n, k), torch.float32, 2)
    dy = oracles.random_tensor((*lead, n), torch.float32, 3)
    found = one_linear(recipe, x, weight, dy)
    rows, grads = x.flatten(0, -2), dy.flatten(0, -2)
    step = ROUNDING.get(type(recipe).__name__, 2**-4)
    if type(recipe) is recipes.NVFP4BlockScaling and recipe.quantizes_backward:
        step *= 2  # stochastic rounding errs by a whole step
    if type(recipe) in (recipes.Float8CurrentScaling, recipes.DelayedScaling):
        step *= 2  # gradients are E5M2
    if type(recipe) is recipes.DelayedScaling:
        step *= 2  # and its first scale is 1
    for name, (a, b) in {
        "y": (x, weight.T),
        "dx": (dy, weight),
        "dw": (grads.T, rows),
    }.items():
        error = (found[name] - a @ b).norm()
        assert error <= 2 * step * (a.abs() @ b.abs()).norm(), name


def block(**options: Any) -> fuser.Sequential:
    """Norms and activations that hand on what is quantized, forward and backward."""
    ops = (fuser.LayerNorm(40), fuser.Linear(40, 66), fuser.SwiGLU(), fuser.Linear(33, 50))
    more = (fuser.GELU(), fuser.RMSNorm(50), fuser.Linear(50, 7, bias=False), fuser.Quantize())
    return oracles.randomize(fuser.Sequential(*ops, *more, **options))


@every_recipe
def test_a_pipeline_of_odd_shapes_gives_what_its_ops_give_alone(recipe: Any) -> None:
    def run(model: fuser.Sequential) -> dict[str, Any]:
        torch.manual_seed(7)
        x = oracles.leaf(oracles.random_tensor((3, 5, 40), torch.float32, 1))
        with fuser.autocast(recipe=recipe):
            y = model(x)
        assert isinstance(y, fuser.QuantizedTensor)
        assert y.shape == (3, 5, 7)
        y.backward(oracles.random_tensor((3, 5, 7), torch.float32, 2))
        grads = {name: p.grad for name, p in model.named_parameters()}
        return {"y": y.detach().dequantize(), "dx": x.grad, **grads}

    fused, unfused = run(block()), run(block(fusions=()))
    for name, value in unfused.items():
        assert torch.equal(fused[name], value), name


@every_recipe
def test_one_pipeline_takes_shapes_in_turn_without_planning_again(recipe: Any) -> None:
    model = oracles.randomize(fuser.Sequential(fuser.Linear(64, 32), fuser.GELU()))
    full = oracles.random_tensor((64, 64), torch.float32, 1)
    with torch.no_grad(), fuser.autocast(recipe=recipe):
        expected = model(full)
        for rows in (64, 5, 1, 33, 0, 64):
            y = model(full[:rows])
            assert y.shape == (rows, 32)
            if type(recipe) in (recipes.MXFP8BlockScaling, recipes.Float8BlockScaling):
                # Rows are quantized by themselves.
                torch.testing.assert_close(y, expected[:rows], rtol=1e-5, atol=1e-5)
    assert len(model.plans) == 1


def test_operands_in_blocks_of_two_sizes_are_multiplied() -> None:
    formats = {
        "input": fuser.NVFP4Quantizer(with_rht=True),
        "weight": fuser.MXFP8Quantizer(),
        "grad_output": fuser.MXFP8Quantizer(),
    }
    recipe = recipes.CustomRecipe(qfactory=formats.__getitem__)
    x, weight, dy = (
        oracles.random_tensor(shape, torch.float32, 1) for shape in ((5, 40), (7, 40), (5, 7))
    )
    found = one_linear(recipe, x, weight, dy)
    assert (found["dw"] - dy.T @ x).norm() < 0.2 * (dy.T @ x).norm()


# -- what a plan says -------------------------------------------------------------------


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The matrices that are padded, before and after."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def noted(x: Any, multiple: int) -> Any:
        whole = whole_blocks(x, multiple)
        if whole is not x:
            seen.append((matrix_of(x), tuple(whole.shape)))
        return whole

    monkeypatch.setattr(quantizer_module, "whole_blocks", noted)
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "place"),
    [*((name, "torch") for name in RECIPES), *((n, "kernels") for n in RECIPES_WITH_PADDING)],
)
@pytest.mark.parametrize("rows", [5, 32, 33])
def test_a_plan_has_a_note_for_each_tensor_that_is_padded(
    name: str, rows: int, place: str, padded: list[Any]
) -> None:
    recipe, model = RECIPES[name], block()
    x = oracles.leaf(oracles.random_tensor((rows, 40), torch.float32, 1))
    with on_kernels() if place == "kernels" else contextlib.nullcontext():
        with fuser.autocast(recipe=recipe):
            notes = model.plan(x).padding
            y = model(x)
        y.backward(torch.ones(rows, 7))
    form = re.compile(r"pads the .* of shape \((\d+), (\d+)\) to (\d+) x (\d+) for \w+: .* more\.")
    found = [form.fullmatch(note.text) for note in notes]
    assert all(found)
    numbers = [tuple(map(int, match.groups())) for match in found if match is not None]
    assert sorted(numbers) == sorted((*before, *after) for before, after in padded)
    # Of the widths 40, 66, 33, 50 and 7.
    assert bool(numbers) == (type(recipe).__name__ in MULTIPLE)


def test_padding_costs_a_copy_and_the_longer_result() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 64))
    x = torch.empty(5, 64)
    with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
        plan, whole = (model.plan(t, training=False) for t in (x, torch.empty(32, 64)))
    # Written and read: 32 x 64 of fp32; 27 rows of 64 bytes and 2 scales.
    more = 2 * 32 * 64 * 4 + 2 * 27 * (64 + 2)
    text = f"pads the input of shape (5, 64) to 32 x 64 for MXFP8: {more / 1000:.1f} kB more."
    assert plan.padding == (Note((0,), text, side="forward"),)
    assert f"\ntensors that are padded to whole blocks\n  forward  BasicLinear over 0 {text}" in (
        str(plan)
    )
    assert json.loads(json.dumps(plan.to_dict()))["padding"][0]["text"] == text
    # A plan is kept for all shapes.
    assert whole.padding == ()
    assert model.plans == (whole,)


def test_values_that_a_kernel_would_quantize_as_it_makes_them_are_written_first() -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.BasicLinear(64, 64))
    x = torch.empty(5, 64)
    with on_kernels(), fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
        (note,) = model.plan(x, training=False).padding
    more = 2 * 32 * 64 * 4 + 2 * 27 * (64 + 2) + 2 * 5 * 64 * 4
    assert note.ops == (0,)
    assert note.text.endswith(f"{more / 1000:.1f} kB more.")


def test_plans_of_several_pipelines_have_the_notes_of_each() -> None:
    model = fuser.Sequential(fuser.BasicLinear(64, 32), torch.nn.Tanh(), fuser.BasicLinear(32, 32))
    with fuser.autocast(recipe=recipes.NVFP4BlockScaling()):
        plan = model.plan(torch.empty(5, 64), training=False)
    assert [note.ops for note in plan.padding] == [(0,), (1,)]


# -- a chip that multiplies the padded bytes -------------------------------------------


def test_a_native_product_of_padded_bytes_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(a: Any, b: Any, dtype: torch.dtype, is_split: bool, bias: Any) -> torch.Tensor:
        values = []
        for operand in (a, b):
            rows, inner = operand.data.shape
            assert rows % 32 == 0
            assert inner % 32 == 0
            shape = mxfp8_scale_shape(rows, inner, columnwise=False)
            assert operand.scale_inv.shape == shape
            element = operand.format.element
            values.append(
                reference.dequantize(
                    operand.data, operand.scale_inv, element, dtype, columnwise=False
                )
            )
        return values[0] @ values[1].T

    row = native_gemm.NativeGemm("MXFP8 mm", (("MXFP8", "MXFP8"),), (9,), (0, 0), multiply)
    quantizer = fuser.MXFP8Quantizer()
    x, weight = (
        quantizer(oracles.random_tensor(shape, torch.float32, 1)) for shape in ((2, 5, 40), (7, 40))
    )
    emulated = gemm.quantized_linear(x, weight, torch.float32, is_split=True)
    monkeypatch.setattr(gemm, "native_gemm", lambda *formats: row)
    found = gemm.quantized_linear(x, weight, torch.float32, is_split=True)
    assert found.shape == (2, 5, 7)
    torch.testing.assert_close(found, emulated)


def test_a_native_product_of_columnwise_copies_is_cut_to_the_columns_of_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chip is handed NVFP4's columnwise copies turned: ``[K, M / 2]``, both sizes padded."""

    def multiply(a: Any, b: Any, dtype: torch.dtype, is_split: bool, bias: Any) -> torch.Tensor:
        rows, columns = (torch.arange(len(operand.data), dtype=dtype) for operand in (a, b))
        return 1000 * rows[:, None] + columns

    row = native_gemm.NativeGemm("NVFP4 mm", (("NVFP4", "NVFP4"),), (9,), (0, 0), multiply)
    monkeypatch.setattr(gemm, "native_gemm", lambda *formats: row)
    quantizer = fuser.NVFP4Quantizer()
    x, weight, dy = (quantizer(torch.ones(shape)) for shape in ((10, 40), (7, 40), (10, 7)))
    dx = gemm.quantized_dgrad(dy, weight, torch.float32, is_split=True)
    dw = gemm.quantized_wgrad(dy, x, torch.float32, is_split=True)
    assert (dx.shape, float(dx[-1, -1])) == ((10, 40), 9039)
    assert (dw.shape, float(dw[-1, -1])) == ((7, 40), 6039)


def test_the_emulated_weight_gradient_is_the_product_of_the_transformed_copies() -> None:
    """Of which the rows that pad the last block are a part."""
    quantizer = fuser.NVFP4Quantizer(with_rht=True)
    x, dy = (
        quantizer(oracles.random_tensor(shape, torch.float32, 1)) for shape in ((21, 40), (21, 7))
    )
    plain = fuser.NVFP4Quantizer()  # which undoes no transform
    transformed = []
    for tensor in (dy, x):
        twin = fuser.NVFP4Tensor(
            tensor.buffers(), tensor.shape, tensor.dtype, tensor.device, plain
        ).with_usage("columnwise")
        transformed.append(twin.dequantize_padded(torch.float32))
    expected = (transformed[0].T @ transformed[1])[:7, :40]
    found = gemm.quantized_wgrad(dy, x, torch.float32, is_split=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    main_grad = torch.ones(7, 40)
    gemm.quantized_wgrad_accumulate(main_grad, dy, x, torch.float32, is_split=True)
    torch.testing.assert_close(main_grad, expected + 1, rtol=1e-4, atol=1e-4)
