"""Grouped linears with quantized parameters, against the same with plain parameters."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import oracles
import pytest
import torch
from one_launch_experts import one_by_one
from sharded_models import RECIPES

import fuser
from fuser.cuda.sequence import record
from fuser.formats import GROUP_TILE
from fuser.gemm import grouped
from fuser.precision.contexts import current_parameter_init
from fuser.tensors import Float8CurrentScalingQuantizer, NVFP4Quantizer
from fuser.tensors.grouped import joined

G, K, SIZES = 4, 64, (70, 0, 100, 20)
OVERRIDES = (None, "high_precision", "dequantized")
STATELESS = [name for name in RECIPES if name != "delayed"]
QUANTIZERS = {"current": Float8CurrentScalingQuantizer(), "nvfp4": NVFP4Quantizer()}
"""Of formats with a number for each weight: its scale or its amax."""


@pytest.fixture(params=["one by one", "one launch"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each expert alone, as on older GPUs; or all at once, as on a Hopper GPU."""
    one_by_one(monkeypatch)
    if request.param == "one launch":
        monkeypatch.setattr(grouped, "has_grouped_mm", lambda device, dtype: True)
    found: str = request.param
    return found


def pair(recipe: Any, n: int, **options: Any) -> tuple[Any, Any]:
    """An op with quantized weights, and one with the weights before they were quantized."""
    made = []
    for enabled in (True, False):
        torch.manual_seed(0)
        with fuser.quantized_model_init(enabled=enabled, recipe=recipe):
            made.append(fuser.GroupedLinear(G, K, n, dtype=torch.bfloat16, **options))
    return made[0], made[1]


def run(op: Any, recipe: Any, **options: Any) -> dict[str, torch.Tensor]:
    """A step: the output and all gradients."""
    op.zero_grad()
    x = oracles.random_tensor((sum(SIZES) + 10, K), torch.bfloat16, 1).requires_grad_()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = op(x, torch.tensor(SIZES), **options)
    y.float().square().mean().backward()
    grads = {name: p.grad for name, p in op.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}


def assert_equal(
    found: dict[str, Any], expected: dict[str, Any], without: tuple[str, ...] = ()
) -> None:
    for name, value in expected.items():
        assert name in without or torch.equal(found[name], value), name


@pytest.mark.sampled(most=24)
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("n", [128, 48])
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", STATELESS)
def test_a_step_has_the_bits_of_weights_that_are_quantized_at_each_call(
    name: str, override: str | None, n: int
) -> None:
    recipe = RECIPES[name](**({"backward_override": override} if override else {}))
    quantized, plain = pair(recipe, n)
    assert all(
        isinstance(getattr(quantized, f"weight{g}"), fuser.QuantizedTensor) for g in range(G)
    )
    # A backward in high precision reads the plain weight.
    without = ("dx",) if override == "high_precision" else ()
    assert_equal(run(quantized, recipe), run(plain, recipe), without)


@pytest.mark.parametrize("rows", [(256,) * 3, (128,) * 3, (384, 128, 200), (256,)], ids=str)
@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_each_tile_of_joined_weights_has_the_number_of_its_weight(
    name: str, rows: tuple[int, ...]
) -> None:
    quantizer = QUANTIZERS[name]
    weights = [quantizer(oracles.random_tensor((n, K), torch.bfloat16, n)) for n in rows]
    number = {"current": "_scale_inv", "nvfp4": "_amax_rowwise"}[name]
    expected = [
        float(getattr(weight, number))
        for weight, n in zip(weights, rows, strict=True)
        for _ in range(-(-n // GROUP_TILE))
    ]
    found = joined(weights, "rowwise")
    assert getattr(found, number).tolist() == expected
    assert getattr(found, number).is_contiguous(), "a number for each tile, to be written to"
    values = torch.split(found.dequantize(), [-(-n // GROUP_TILE) * GROUP_TILE for n in rows])
    for weight, n, own in zip(weights, rows, values, strict=True):
        assert torch.equal(own[:n], weight.dequantize())


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_a_repeated_pass_joins_many_weights_by_as_many_calls_as_few(name: str) -> None:
    lengths = []
    for count in (2, 8):
        weights = [
            QUANTIZERS[name](oracles.random_tensor((256, K), torch.bfloat16, g))
            for g in range(count)
        ]
        buffers = [each for weight in weights for each in weight.buffers().values()]
        made, result, slotted = record(
            buffers, partial(joined, weights, "rowwise"), with_calls=True
        )
        made.result = slotted(list(result.buffers().values()))
        made.drop_names()
        assert made.is_complete
        lengths.append(len(made.actions))
    assert lengths[0] == lengths[1]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("name", RECIPES)
def test_outside_autocast_a_step_equals_one_with_the_dequantized_weights(name: str) -> None:
    quantized, plain = pair(RECIPES[name](), 48)
    with torch.no_grad():
        for g in range(G):
            getattr(plain, f"weight{g}").copy_(getattr(quantized, f"weight{g}").dequantize())
    assert_equal(run(quantized, None), run(plain, None))


@pytest.mark.usefixtures("launches")
def test_weights_of_one_recipe_run_under_another() -> None:
    """With the operands of the other recipe beside them; the products are emulated."""
    quantized, plain = pair(RECIPES["mxfp8"](), 128)
    for name in ("current", "rowwise", "nvfp4"):
        found, expected = (run(op, RECIPES[name]()) for op in (quantized, plain))
        for what in ("y", "dx", "weight0"):
            error = (found[what] - expected[what]).float().norm() / expected[what].float().norm()
            assert error < 0.2, (name, what)


@pytest.mark.usefixtures("launches")
def test_delayed_scaling_records_the_amaxes_of_each_expert() -> None:
    recipe = fuser.recipe.DelayedScaling(amax_history_len=2)
    op, _ = pair(recipe, 48)
    optimizer = torch.optim.SGD(op.parameters(), lr=1.0)
    for _ in range(3):
        run(op, recipe)
        optimizer.step()
    state = op._delayed["forward"]
    for g in range(G):
        weight = getattr(op, f"weight{g}")
        assert weight._quantizer.scale is state.parameter_quantizer(2 * g + 1).scale
        assert float(state.amax_history[:, 2 * g + 1].max()) > 0
    twin = copy.deepcopy(op)
    assert_equal(run(twin, recipe), run(op, recipe))
    own = twin._delayed["forward"]
    assert twin.weight1._quantizer.scale is own.parameter_quantizer(3).scale
    assert own is not state


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4", "rowwise"])
def test_copies_states_and_initial_values(name: str) -> None:
    recipe = RECIPES[name]()
    with fuser.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        op = fuser.GroupedLinear(G, K, 48)
    values = op.weight2.get_high_precision_init_val()
    assert torch.allclose(op.weight2.dequantize(), values, rtol=0.3, atol=0.02)
    expected = run(op.bfloat16(), recipe)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert_equal(run(twin, recipe), expected)
    with fuser.quantized_model_init(recipe=recipe):
        other = fuser.GroupedLinear(G, K, 48, dtype=torch.bfloat16)
    other.load_state_dict(op.state_dict())
    assert_equal(run(other, recipe), expected)


def test_weights_on_meta_are_quantized_when_they_are_initialised() -> None:
    recipe = RECIPES["mxfp8"]()
    for is_explicit in (True, False):
        with fuser.quantized_model_init(recipe=recipe):
            op = fuser.GroupedLinear(G, K, 48, device="meta", dtype=torch.bfloat16)
        parameters = list(op.parameters())
        if is_explicit:
            op.reset_parameters()
        run(op, recipe)
        assert isinstance(op.weight3, fuser.MXFP8Tensor)
        assert all(a is b for a, b in zip(parameters, op.parameters(), strict=True))
    assert current_parameter_init() is None


def test_a_layer_with_an_init_method_has_quantized_weights() -> None:
    with fuser.quantized_model_init(recipe=RECIPES["current"]()):
        layer = fuser.modules.GroupedLinear(G, K, 48, init_method=torch.nn.init.ones_, device="cpu")
    x = torch.ones(4, K, requires_grad=True)
    for weight in (layer.weight0, layer.ops[0].weight3):
        assert isinstance(weight, fuser.Float8Tensor)
        assert torch.equal(weight.dequantize(), torch.ones(48, K))
    with fuser.autocast(recipe=RECIPES["current"]()):
        y = layer(x, [1, 1, 1, 1])
    assert torch.equal(y, torch.full_like(y, K))


def test_a_weight_that_was_changed_between_forward_and_backward_is_an_error() -> None:
    op, _ = pair(RECIPES["mxfp8"](), 48)
    x = oracles.random_tensor((sum(SIZES), K), torch.bfloat16, 1).requires_grad_()
    with fuser.autocast(recipe=RECIPES["mxfp8"]()):
        y = op(x, torch.tensor(SIZES))
    with torch.no_grad():
        op.weight2.mul_(2.0)
    with pytest.raises((RuntimeError, fuser.StateError), match=r"in ?place"):
        y.sum().backward()


def test_microbatches_and_checkpoints_have_the_same_bits() -> None:
    recipe = RECIPES["mxfp8"]()
    op, _ = pair(recipe, 48)
    expected = run(op, recipe)
    model = fuser.Sequential(op)
    for flag in (True, False):
        x = oracles.random_tensor((sum(SIZES) + 10, K), torch.bfloat16, 1).requires_grad_()
        op.zero_grad()
        for use_reentrant in (True, False):
            op.zero_grad()
            x.grad = None
            with fuser.autocast(recipe=recipe):
                y = torch.utils.checkpoint.checkpoint(
                    lambda x, flag=flag: model(
                        x, torch.tensor(SIZES), op_kwargs={0: {"is_first_microbatch": flag}}
                    ),
                    x,
                    use_reentrant=use_reentrant,
                )
            y.float().square().mean().backward()
            assert torch.equal(y, expected["y"])
            assert torch.equal(x.grad, expected["dx"])
            assert torch.equal(op.weight0.grad, expected["weight0"])
