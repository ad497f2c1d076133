"""Quantizers of two formats, and of none: values, views, writes, pickles, products, refusals."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from said import holds, said

import fuser
from fuser import recipe as recipes
from fuser import tensors
from fuser.tensors import Quantizer

F32, BF16 = torch.float32, torch.bfloat16
IDENTITY = tensors.IdentityQuantizer()
PARTS: dict[str, Quantizer] = {
    **formats.QUANTIZERS,
    "identity": IDENTITY,
    "row-scaled": tensors.NVFP4Quantizer(row_scaled_nvfp4=True),
    "hadamard": tensors.NVFP4Quantizer(with_rht=True),
}
PARTS.pop("delayed", None)
every_part = pytest.mark.parametrize("part", PARTS)
BOTH = pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])


def hybrid(row: str, column: str, source: Any = "original") -> tensors.HybridQuantizer:
    return tensors.HybridQuantizer(
        rowwise_quantizer=PARTS[row], columnwise_quantizer=PARTS[column], columnwise_source=source
    )


def copies(quantizer: Quantizer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of each copy, made alone."""
    found: dict[str, torch.Tensor] = {}
    for usage in ("rowwise", "columnwise"):
        alone = quantizer.with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
        found[usage] = alone(x).dequantize()
    return found


# -- state and bytes of both parts --------------------------------------------------------


def with_states() -> tuple[tensors.HybridQuantizer, list[torch.Tensor]]:
    """A quantizer of two formats with scales of earlier steps; the scales and the amaxes."""
    states = [torch.full((1,), value) for value in (2.0, 0.0, 4.0, 0.0)]
    parts = [tensors.Float8Quantizer(*states[i : i + 2]) for i in (0, 2)]
    return tensors.HybridQuantizer(
        rowwise_quantizer=parts[0], columnwise_quantizer=parts[1]
    ), states


def test_a_quantizer_of_two_formats_has_the_states_of_both() -> None:
    quantizer, states = with_states()
    found = {tensor.data_ptr() for tensor in quantizer.state_tensors() if tensor is not None}
    assert found == {state.data_ptr() for state in states}


def test_later_writes_record_an_amax_in_neither_part() -> None:
    quantizer, states = with_states()
    x = oracles.random_tensor((32, 32), F32, 1)
    made = quantizer(x)
    assert [states[1], states[3]] == [x.abs().max()] * 2
    made.copy_(100 * x)
    made.quantize_(100 * x)
    assert [states[1], states[3]] == [x.abs().max()] * 2


# -- identity ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.float64])
def test_identity_keeps_every_bit_and_shares_memory(dtype: torch.dtype) -> None:
    x = oracles.random_tensor((3, 5, 7), dtype, 1)
    made = IDENTITY(x)
    assert isinstance(made, fuser.IdentityTensor)
    assert torch.equal(made.dequantize(), x)
    assert torch.equal(made.with_usage("columnwise").dequantize(), x)
    assert made._rowwise_data.data_ptr() == x.data_ptr()
    made.dequantize().zero_()
    assert torch.equal(made.dequantize(), x)
    assert x.any()


def test_identity_rounds_to_its_dtype_alone() -> None:
    x = oracles.random_tensor((4, 8), F32, 1)
    made = tensors.IdentityQuantizer(dtype=BF16)(x)
    assert made.dtype is F32
    assert torch.equal(made.dequantize(), x.bfloat16().float())
    with pytest.raises(
        fuser.InputError, match=said("identity-quantizer-dtype-takes", "torch.int32")
    ):
        tensors.IdentityQuantizer(dtype=torch.int32)


def test_identity_tensors_are_cut_written_saved_and_differentiated() -> None:
    x = oracles.random_tensor((6, 8), F32, 1)
    made = IDENTITY(x.clone())
    assert torch.equal(made[2:4].dequantize(), x[2:4])
    made[2:4].zero_()
    expected = x.clone()
    expected[2:4] = 0
    assert torch.equal(made.dequantize(), expected)
    assert torch.equal(made.with_usage("columnwise").dequantize(), expected)
    made.add_(1)
    assert torch.equal(made.dequantize(), expected + 1)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for other in (torch.load(file), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other.dequantize(), expected + 1)
    x.requires_grad_()
    IDENTITY(x).dequantize().backward(torch.ones_like(x))
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_recipe_of_identity_has_the_bits_of_no_recipe() -> None:
    model = fuser.Sequential(
        fuser.RMSNorm(32), fuser.Linear(32, 48), fuser.GELU(), fuser.Linear(48, 16)
    )
    oracles.randomize(model)
    recipe = recipes.CustomRecipe(qfactory=lambda role: IDENTITY)
    results = []
    for is_on in (False, True):
        x = oracles.leaf(oracles.random_tensor((24, 32), F32, 1))
        with fuser.autocast(enabled=is_on, recipe=recipe):
            y = model(x)
        y.backward(oracles.random_tensor((24, 16), F32, 2))
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, *results))


# -- two formats --------------------------------------------------------------------------


@BOTH
@every_part
def test_each_copy_is_the_copy_of_its_own_quantizer(part: str, source: Any) -> None:
    for row, column in ((part, "mxfp8"), ("mxfp8", part), ("identity", part), (part, part)):
        x = oracles.random_tensor((2, 45, 72), BF16, 1)
        found = copies(hybrid(row, column, source), x)
        # MXFP8 pads to 32: so that one block of the other format has the same zeros.
        rows = torch.zeros(96, 96, dtype=BF16)
        rows[:90, :72] = x.view(90, 72)
        expected = copies(PARTS[row], rows)["rowwise"]
        of = rows if source == "original" else expected
        assert torch.equal(found["rowwise"], expected[:90, :72].view(x.shape))
        columns = copies(PARTS[column], of)["columnwise"]
        assert torch.equal(found["columnwise"], columns[:90, :72].view(x.shape))
        both = hybrid(row, column, source)(x)
        for usage, values in found.items():
            assert torch.equal(both.with_usage(usage).dequantize(), values)


def test_a_hybrid_tensor_is_cut_written_moved_saved_and_pickled() -> None:
    quantizer = hybrid("mxfp8", "hadamard", "rowwise_dequantized")
    x = oracles.random_tensor((96, 64), BF16, 1)
    made = quantizer(x)
    expected = copies(quantizer, x)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    others = (torch.load(file), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.clone())
    for other in others:
        assert other._quantizer == quantizer
        for usage, values in expected.items():
            assert torch.equal(other.with_usage(usage).dequantize(), values)
    assert torch.equal(made[32:64].dequantize(), expected["rowwise"][32:64])
    made.mul_(2)
    doubled = copies(quantizer, 2 * expected["rowwise"])
    for usage, values in doubled.items():
        assert torch.equal(made.with_usage(usage).dequantize(), values)
    assert torch.equal(quantizer(x[:0]).dequantize(), x[:0])


def test_a_hybrid_quantizer_is_equal_by_its_contents() -> None:
    one = hybrid("mxfp8", "nvfp4")
    assert one == hybrid("mxfp8", "nvfp4")
    assert hash(one) == hash(hybrid("mxfp8", "nvfp4"))
    assert one.with_usage(rowwise=True, columnwise=False) != one
    others = (hybrid("nvfp4", "mxfp8"), hybrid("mxfp8", "hadamard"), hybrid("mxfp8", "mxfp8"))
    for other in (*others, hybrid("mxfp8", "nvfp4", "rowwise_dequantized")):
        assert other != one
    assert pickle.loads(pickle.dumps(one)) == one
    assert pickle.loads(pickle.dumps(one)).format == one.format
    x, y = (oracles.random_tensor((64, 32), F32, seed) for seed in (1, 2))
    written = one(x)
    written.copy_(hybrid("mxfp8", "hadamard")(y))  # other bytes of the same shape
    wanted = copies(one, hybrid("mxfp8", "hadamard")(y).dequantize())
    for usage, values in wanted.items():
        assert torch.equal(written.with_usage(usage).dequantize(), values)


@BOTH
@pytest.mark.parametrize("kernels", [False, True])
def test_products_read_the_copy_of_each_usage(source: Any, kernels: bool) -> None:
    quantizers = {
        "input": hybrid("mxfp8", "hadamard", source),
        "weight": hybrid("current", "identity", source),
        "grad_output": hybrid("identity", "hadamard"),
    }
    recipe = recipes.CustomRecipe(qfactory=lambda role: quantizers[role.tensor_type])
    op = oracles.randomize(fuser.BasicLinear(64, 32))
    x = oracles.leaf(oracles.random_tensor((48, 64), F32, 1))
    dy = oracles.random_tensor((48, 32), F32, 2)

    def run() -> dict[str, torch.Tensor]:
        op.zero_grad()
        x.grad = None
        with fuser.autocast(recipe=recipe):
            y = op(x)
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, "dw": op.weight.grad}  # type: ignore[dict-item]

    if kernels:
        with on_kernels():
            found = run()
    else:
        found = run()
    of_x, of_w, of_dy = (
        {usage: values.double() for usage, values in copies(quantizer, value.detach()).items()}
        for quantizer, value in zip(quantizers.values(), (x, op.weight, dy), strict=True)
    )
    expected = {
        "y": of_x["rowwise"] @ of_w["rowwise"].T,
        "dx": of_dy["rowwise"] @ of_w["columnwise"],
        "dw": of_dy["columnwise"].T @ of_x["columnwise"],
    }
    for name, exact in expected.items():
        assert (found[name].double() - exact).abs().max() < 1e-5 * exact.abs().max(), name


def test_a_plan_shows_both_formats_and_products_are_emulated() -> None:
    recipe = recipes.CustomRecipe(qfactory=lambda role: hybrid("mxfp8", "identity"))
    model = fuser.Sequential(fuser.RMSNorm(64), fuser.BasicLinear(64, 64))
    x = torch.randn(32, 64)
    with on_kernels(), fuser.autocast(recipe=recipe):
        text = str(model.plan(x))
    assert "MXFP8 E4M3 / unquantized rowwise+columnwise" in text
    assert "emulated" in text
    assert "rmsnorm_rows" not in text


def test_a_hybrid_parameter_trains_and_is_saved() -> None:
    quantizer = hybrid("mxfp8", "nvfp4", "rowwise_dequantized")
    recipe = recipes.CustomRecipe(qfactory=lambda role: quantizer if role == "weight" else IDENTITY)
    with fuser.quantized_model_init(recipe=recipe):
        model = oracles.randomize(fuser.BasicLinear(64, 64))
    before = model.weight.dequantize()
    x = oracles.random_tensor((32, 64), F32, 1)
    with fuser.autocast(recipe=recipe):
        model(x).square().sum().backward()
    assert model.weight.grad is not None
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    expected = copies(quantizer, before - 1e-3 * model.weight.grad)
    for usage, values in expected.items():
        assert torch.equal(model.weight.with_usage(usage).dequantize(), values)
    with fuser.quantized_model_init(recipe=recipe):
        other = fuser.BasicLinear(64, 64)
    other.load_state_dict(model.state_dict())
    with fuser.autocast(recipe=recipe):
        assert torch.equal(other(x), model(x))


def test_experts_of_hybrid_tensors_run_alone() -> None:
    recipe = recipes.CustomRecipe(qfactory=lambda role: hybrid("row-scaled", "mxfp8"))
    op = oracles.randomize(fuser.GroupedLinear(2, 32, 32, bias=False))
    x = oracles.leaf(oracles.random_tensor((64, 32), F32, 1))
    with fuser.autocast(recipe=recipe):
        y = op(x, torch.tensor([32, 32]))
    y.sum().backward()
    one = fuser.BasicLinear(32, 32)
    with torch.no_grad():
        one.weight.copy_(op.weight1)
    alone = oracles.leaf(x.detach()[32:])
    with fuser.autocast(recipe=recipe):
        expected = one(alone)
    expected.sum().backward()
    assert torch.equal(y[32:], expected)
    assert torch.equal(x.grad[32:], alone.grad)
    assert torch.equal(op.weight1.grad, one.weight.grad)


# -- the changeable ones, and refusals ---------------------------------------------------


def test_scripts_make_and_change_hybrid_quantizers() -> None:
    made = fuser.HybridQuantizer(
        rowwise_quantizer=fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3),
        columnwise_quantizer=fuser.IdentityQuantizer(),
    )
    assert made == hybrid("mxfp8", "identity")
    x = oracles.random_tensor((32, 32), F32, 1)
    assert torch.equal(made(x).with_usage("columnwise").dequantize(), x)
    made.set_usage(rowwise=False)
    assert not made(x)._has("rowwise")
    other = made.copy()
    other.set_usage(rowwise=True, columnwise=False)
    assert made.get_usages() == {"rowwise": False, "columnwise": True}
    assert fuser.IdentityQuantizer().dtype is None
    into = made.make_empty((32, 32))
    assert torch.equal(made.update_quantized(x, into).dequantize(), x)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"rowwise_quantizer": torch.float8_e4m3fn},
            fuser.InputTypeError,
            said("hybrid-takes-each-copy", "rowwise_quantizer", holds("torch")),
        ),
        (
            {"columnwise_quantizer": hybrid("mxfp8", "nvfp4")},
            fuser.InputError,
            said("hybrid-takes-format-not"),
        ),
        (
            {"columnwise_source": "rows"},
            fuser.InputError,
            said("hybrid-quantizer-columnwise-source", "'rows'"),
        ),
    ],
)
def test_what_a_hybrid_quantizer_cannot_take_is_refused(
    options: dict[str, Any], error: Any, words: str
) -> None:
    parts: dict[str, Any] = {"rowwise_quantizer": IDENTITY, "columnwise_quantizer": IDENTITY}
    for cls in (tensors.HybridQuantizer, fuser.HybridQuantizer):
        with pytest.raises(error, match=words):
            cls(**(parts | options))
    with pytest.raises(fuser.InputTypeError, match=said("tensors-not-made-buffers")):
        fuser.IdentityTensor(shape=(2, 2), rowwise_data=torch.zeros(2, 2))
