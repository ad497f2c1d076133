"""Quantized tensors between ops: the consumer chooses the format, the producer quantizes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import every_format as formats
import oracles
import pytest
import torch

import fuser
from fuser import recipe as recipes
from fuser.precision.quantizer_for import make_quantizer
from fuser.tensors import MXFP8Quantizer, QuantizedTensor

FORMATS = {name: formats.deterministic(cls) for name, cls in formats.RECIPES.items()}
every_recipe = pytest.mark.parametrize("recipe", FORMATS.values(), ids=FORMATS)
OVERRIDABLE = {name: recipe for name, recipe in FORMATS.items() if name != "delayed"}


class Spy(fuser.BasicOperation):
    """The identity; asks its neighbours for MXFP8 and remembers what came."""

    def get_input_quantizer(self) -> Any:
        return MXFP8Quantizer(columnwise=False)

    def get_grad_output_quantizer(self) -> Any:
        return MXFP8Quantizer(rowwise=False)

    def op_forward(self, ctx: Any, input_: torch.Tensor, **quantizers: Any) -> torch.Tensor:
        self.input = input_
        return input_ if type(input_) is torch.Tensor else input_.dequantize()

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        self.grad_output = grad_output
        plain = type(grad_output) is torch.Tensor
        return (grad_output if plain else grad_output.dequantize()), ()


EMITTERS: dict[str, Callable[[], fuser.FusibleOperation]] = {
    "BasicLinear": lambda: fuser.BasicLinear(64, 64),
    "Linear": lambda: fuser.Linear(64, 64),
    "Bias": lambda: fuser.Bias(64),
    "frozen Bias": lambda: fuser.Bias(64).requires_grad_(False),
    "frozen RMSNorm": lambda: fuser.RMSNorm(64).requires_grad_(False),
    "RMSNorm": lambda: fuser.RMSNorm(64),
    "LayerNorm": lambda: fuser.LayerNorm(64),
    "L2Normalization": fuser.L2Normalization,
    "GELU": fuser.GELU,
    "SwiGLU": fuser.SwiGLU,
    "ScaledSReLU": fuser.ScaledSReLU,
    "ConstantScale": lambda: fuser.ConstantScale(0.3),
    "Dropout": lambda: fuser.Dropout(0.5),
    "Dropout in eval": lambda: fuser.Dropout(0.5).eval(),
    "AddExtraInput": fuser.AddExtraInput,
}


def extras_of(name: str, rows: int) -> tuple[torch.Tensor, ...]:
    shapes = {"ScaledSReLU": (rows,), "AddExtraInput": (rows, 64)}
    if name not in shapes:
        return ()
    return (oracles.random_tensor(shapes[name], torch.float32, 3),)


@pytest.mark.parametrize("name", EMITTERS)
def test_an_op_writes_the_formats_that_its_neighbours_ask_for(name: str) -> None:
    """Under a recipe a custom op gets its input and its gradient quantized by the op beside it."""
    op = oracles.randomize(EMITTERS[name]())
    width = 128 if name == "SwiGLU" else 64
    before, after = Spy(), Spy()
    model = fuser.Sequential(before, op, after)
    found = []
    for recipe in (recipes.MXFP8BlockScaling(), None):
        torch.manual_seed(0)
        x = oracles.random_tensor((32, width), torch.float32, 1).requires_grad_()
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, *extras_of(name, 32))
        y.backward(oracles.random_tensor(y.shape, torch.float32, 2))
        found.append((after.input, before.grad_output))
    (value, grad), (plain_value, plain_grad) = found
    if "Linear" in name:  # its own GEMMs are quantized as well
        assert isinstance(value, fuser.MXFP8Tensor)
        assert isinstance(grad, fuser.MXFP8Tensor)
        return
    expected = MXFP8Quantizer(columnwise=False)(plain_value)
    assert torch.equal(value._rowwise_data, expected._rowwise_data)
    assert torch.equal(value._rowwise_scale_inv, expected._rowwise_scale_inv)
    assert value._columnwise_data is None
    expected = MXFP8Quantizer(rowwise=False)(plain_grad)
    assert torch.equal(grad._columnwise_data, expected._columnwise_data)
    assert torch.equal(grad._columnwise_scale_inv, expected._columnwise_scale_inv)
    assert grad._rowwise_data is None


@pytest.mark.parametrize("name", EMITTERS)
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_a_gradient_arrives_as_the_plan_says(
    name: str, fusions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 128 if name == "SwiGLU" else 64
    ops = (fuser.BasicLinear(64, width), EMITTERS[name](), fuser.BasicLinear(64, 64))
    check_gradient_arrives_as_planned(ops, extras_of(name, 64), fusions, monkeypatch)


@pytest.mark.parametrize("norm", [fuser.RMSNorm, fuser.LayerNorm])
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_the_gradient_of_a_norm_and_of_a_residual_arrives_as_the_plan_says(
    norm: Any, fusions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = (fuser.BasicLinear(64, 64), fuser.MakeExtraOutput(), norm(64), fuser.BasicLinear(64, 64))
    check_gradient_arrives_as_planned(ops, (), fusions, monkeypatch)


def check_gradient_arrives_as_planned(
    ops: Any, extras: Any, fusions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first of ``ops``, a linear."""
    found: list[torch.Tensor] = []
    backward = fuser.BasicLinear.op_backward

    def noted(op: Any, ctx: Any, grad_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(grad_output)
        return backward(op, ctx, grad_output, *args, **kwargs)

    monkeypatch.setattr(fuser.BasicLinear, "op_backward", noted)
    model = oracles.randomize(fuser.Sequential(*ops, fusions=fusions))
    with fuser.autocast(recipe=FORMATS["mxfp8"]):
        outputs = model(oracles.random_tensor((64, 64), torch.float32, 1), *extras)
    sum(y.sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
    promised = model.plans[0].key.ops[0].grad_output
    assert promised is not None
    arrived = found[-1]
    assert isinstance(arrived, QuantizedTensor)
    assert arrived.format == promised.format
    copies = (arrived._has("rowwise"), arrived._has("columnwise"))
    assert copies == (promised.rowwise, promised.columnwise)


def results(
    model: torch.nn.Module, recipe: Any, x: torch.Tensor, *extras: torch.Tensor
) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extras)
    y.backward(oracles.random_tensor(y.shape, torch.float32, 2))
    return {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


ADJACENT: dict[str, Callable[[], list[fuser.FusibleOperation]]] = {
    "linear, linear": lambda: [fuser.Linear(64, 64), fuser.Linear(64, 64)],
    "linear without bias, linear": lambda: [
        fuser.Linear(64, 64, bias=False),
        fuser.Linear(64, 64, bias=False),
    ],
    "linear, quantize": lambda: [fuser.Linear(64, 64), fuser.Quantize(backward=True)],
    "quantize both ways, linear": lambda: [fuser.Quantize(backward=True), fuser.Linear(64, 64)],
    "quantize, quantize": lambda: [fuser.Quantize(), fuser.Quantize(True, True), fuser.GELU()],
    "linear, quantize, linear": lambda: [
        fuser.Linear(64, 64),
        fuser.Quantize(backward=True),
        fuser.Linear(64, 64),
    ],
    "linear, reshape, linear": lambda: [
        fuser.Linear(64, 64),
        fuser.Reshape((-1, 32)),
        fuser.Linear(32, 64),
    ],
    "quantize, norm": lambda: [fuser.Quantize(), fuser.RMSNorm(64), fuser.Quantize()],
}


@pytest.mark.sampled
@every_recipe
@pytest.mark.parametrize("name", ADJACENT)
def test_adjacent_ops_work_under_every_recipe(name: str, recipe: Any) -> None:
    ops = oracles.randomize(fuser.Sequential(*ADJACENT[name]()))
    x = oracles.random_tensor((96, 64), torch.float32, 1)
    found = results(ops, recipe, x)
    plain = results(ops, None, x)
    for key, value in plain.items():
        error = (torch.Tensor.float(found[key]) - value).norm() / value.norm()
        assert error < 0.5, key  # the worst is two rounds of NVFP4
    assert any(not torch.equal(found[key], plain[key]) for key in plain)


@every_recipe
def test_a_linear_gives_the_same_bits_from_operands_that_the_producer_or_itself_quantized(
    recipe: Any,
) -> None:
    """By a norm, and by the linear itself after an Identity."""
    norm, linear = fuser.RMSNorm(64), fuser.Linear(64, 96)
    emitted = oracles.randomize(fuser.Sequential(norm, linear, fuser.GELU()))
    apart = fuser.Sequential(norm, fuser.Identity(), linear, fuser.Identity(), fuser.GELU())
    x = oracles.random_tensor((96, 64), torch.float32, 1)
    first, second = (results(copy.deepcopy(model), recipe, x) for model in (emitted, apart))
    assert all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


def test_a_gradient_has_the_same_bits_in_one_pipeline_and_across_two() -> None:
    """Quantized from the dtype that it has between them, though the op after computes in fp32."""
    first = oracles.randomize(fuser.BasicLinear(64, 64, dtype=torch.bfloat16))
    second = oracles.randomize(fuser.BasicLinear(64, 64))
    found = []
    for model in (fuser.Sequential(first, second), torch.nn.Sequential(first, second)):
        x = oracles.random_tensor((96, 64), torch.bfloat16, 1).requires_grad_()
        with fuser.autocast(recipe=recipes.Float8CurrentScaling()):
            y = model(x)
        model.zero_grad()
        y.backward(oracles.random_tensor(y.shape, y.dtype, 2))
        found.append([y.detach(), x.grad, first.weight.grad, second.weight.grad])
    assert all(map(torch.equal, *found))


def test_a_plan_names_the_format_that_each_step_writes() -> None:
    model = fuser.Sequential(fuser.RMSNorm(64), fuser.Linear(64, 64, bias=False), fuser.GELU())
    x = torch.empty(32, 64, requires_grad=True)

    def emitted(recipe: Any, training: bool = True) -> tuple[list[str | None], ...]:
        with fuser.autocast(recipe=recipe):
            data = model.plan(x, training=training).to_dict()
        return tuple([step["emits"] for step in data[side]] for side in ("forward", "backward"))

    both = "MXFP8 E4M3 rowwise+columnwise"
    with fuser.activation_memory_budget(None):
        assert emitted(FORMATS["mxfp8"]) == ([both, None, None], [both, None, None])
    rowwise = ["MXFP8 E4M3 rowwise", None, None]
    assert emitted(FORMATS["mxfp8"]) == (rowwise, [both, None, None])
    assert emitted(FORMATS["mxfp8"], training=False)[0] == ["MXFP8 E4M3 rowwise", None, None]
    kept = recipes.MXFP8BlockScaling(backward_override="dequantized")
    assert emitted(kept) == (["MXFP8 E4M3 rowwise", None, None], [None] * 3)
    original = recipes.MXFP8BlockScaling(backward_override="high_precision")
    assert emitted(original) == ([None] * 3, [None] * 3)
    model[1].weight.requires_grad_(False)
    assert emitted(FORMATS["mxfp8"])[0][0] == "MXFP8 E4M3 rowwise"
    assert emitted(FORMATS["mxfp8"])[1][0] == "MXFP8 E4M3 rowwise"
    with fuser.autocast(recipe=FORMATS["mxfp8"]):
        plan = model.plan(x)
    assert "emits" in str(plan)
    assert "MXFP8 E4M3" in plan.to_dot()
    # 64 bytes of E4M3, two scales, twice nothing: the weight is frozen.
    assert plan.activation_bytes == (256.0, 66.0, 256.0, 256.0)


@pytest.mark.parametrize("recipe", OVERRIDABLE.values(), ids=OVERRIDABLE)
@pytest.mark.parametrize("between", ["nothing", "Identity", "Reshape", "Reshape of columns"])
def test_high_precision_reaches_through_a_quantize(recipe: Any, between: str) -> None:
    """dW is that of the unquantized input, bit for bit, though the forward read quantized bytes."""
    override = type(recipe)(backward_override="high_precision")
    width = 64
    linear = oracles.randomize(fuser.BasicLinear(width, 64))
    x = oracles.random_tensor((96, 64), torch.float32, 1)
    ops: dict[str, list[Any]] = {
        "nothing": [],
        "Identity": [fuser.Identity()],
        "Reshape": [fuser.Reshape((2, 48, 64)), fuser.Reshape((96, 64))],
        "Reshape of columns": [fuser.Reshape((192, 32)), fuser.Reshape((96, 64))],
    }
    model = fuser.Sequential(fuser.Quantize(), *ops[between], linear)
    found = results(model, override, x)
    rows = x.reshape(-1, width)
    dy = oracles.random_tensor((len(rows), 64), torch.float32, 2)
    weight_grad = next(value for name, value in found.items() if "weight" in name)
    assert torch.equal(weight_grad, dy.T @ rows)
    assert torch.equal(found["dx"], (dy @ linear.weight.detach()).reshape(x.shape))
    quantized = make_quantizer(override, "input")(x)
    assert not torch.equal(quantized.dequantize(), x)


def test_an_input_with_one_copy_only_is_completed_for_training() -> None:
    """A caller's rowwise-only tensor: forward takes its bytes, wgrad what its values make."""
    recipe = recipes.MXFP8BlockScaling()
    linear = oracles.randomize(fuser.BasicLinear(64, 32))
    x = MXFP8Quantizer(columnwise=False)(oracles.random_tensor((32, 64), torch.float32, 1))
    with fuser.autocast(recipe=recipe):
        y = linear(x)
    dy = oracles.random_tensor((32, 32), torch.float32, 2)
    y.backward(dy)
    weight = make_quantizer(recipe, "weight")(linear.weight.detach())
    assert torch.equal(y.detach(), x.dequantize() @ weight.with_usage("rowwise").dequantize().T)
    columns = MXFP8Quantizer(rowwise=False)(x.dequantize()).dequantize()
    quantized_dy = make_quantizer(recipe, "grad_output")(dy).with_usage("columnwise").dequantize()
    assert torch.equal(linear.weight.grad, quantized_dy.T @ columns)


@pytest.mark.parametrize("recipe", [None, FORMATS["mxfp8"]], ids=["plain", "mxfp8"])
@pytest.mark.parametrize("make", [fuser.GELU, fuser.SwiGLU, fuser.SReLU])
def test_a_cached_input_is_saved_in_e4m3(make: Any, recipe: Any) -> None:
    """Forward is unchanged, backward is that of the rounded input, a byte an element is saved."""
    exact, cached = make(), make(cache_quantized_input=True)
    x = oracles.random_tensor((32, 128), torch.float32, 1)
    expected, found = (results(fuser.Sequential(op), recipe, x) for op in (exact, cached))
    rounded = fuser.Float8CurrentScalingQuantizer()(x).dequantize()
    assert torch.equal(found["y"], expected["y"])
    assert torch.equal(found["dx"], results(fuser.Sequential(exact), recipe, rounded)["dx"])
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cached(x.requires_grad_())
    (kept,) = saved
    assert isinstance(kept, fuser.Float8Tensor)
    assert kept._transpose is None
    plan = fuser.Sequential(cached).plan(x)
    assert plan.forward[0].kernel.startswith("quantize, ")


# -- weights kept across microbatches ---------------------------------------------------


class CountingFactory:
    """Quantizers of MXFP8 that count how often a weight is quantized."""

    def __init__(self) -> None:
        self.weights = 0

    def __call__(self, role: str) -> Any:
        return CountingQuantizer(self) if role == "weight" else MXFP8Quantizer()


class CountingQuantizer(MXFP8Quantizer):
    def __init__(self, factory: CountingFactory, **usage: bool) -> None:
        super().__init__(**usage)
        object.__setattr__(self, "factory", factory)

    def with_usage(self, *, rowwise: bool, columnwise: bool) -> Any:
        return CountingQuantizer(self.factory, rowwise=rowwise, columnwise=columnwise)

    def __call__(self, tensor: Any) -> QuantizedTensor:
        self.factory.weights += 1
        return super().__call__(tensor)


def test_a_weight_is_quantized_once_for_all_microbatches() -> None:
    factory = CountingFactory()
    recipe = recipes.CustomRecipe(qfactory=factory)
    model = oracles.randomize(fuser.Sequential(fuser.Linear(64, 64), fuser.GELU()))
    x = oracles.random_tensor((32, 64), torch.float32, 1)

    def step(is_first: bool | None) -> torch.Tensor:
        with fuser.autocast(recipe=recipe):
            y: torch.Tensor = model(x, op_kwargs={0: {"is_first_microbatch": is_first}})
        y.sum().backward()
        return y.detach()

    outputs = [step(is_first) for is_first in (True, False, False)]
    assert factory.weights == 1
    assert all(torch.equal(outputs[0], y) for y in outputs)
    step(None)
    assert factory.weights == 2
    with torch.no_grad():
        model[0].weight.mul_(2)
    changed = step(False)  # the caller forgot: the weight is another one now
    assert factory.weights == 3
    assert not torch.equal(changed, outputs[0])
    assert torch.equal(changed, step(None))


@pytest.mark.parametrize("is_custom", [False, True], ids=["mxfp8", "custom"])
def test_an_operand_has_the_copies_that_the_gradients_in_demand_read(
    is_custom: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan keeps the quantizers of a recipe; it asks a factory for new ones at each call."""
    made: dict[str, tuple[bool, bool]] = {}
    roles = {(96, 32): "input", (64, 32): "weight", (96, 64): "grad_output"}
    buffers_of = MXFP8Quantizer.buffers_of

    def recording(self: Any, rows: Any) -> Any:
        made[roles[tuple(rows.shape)]] = (self.rowwise, self.columnwise)
        return buffers_of(self, rows)

    monkeypatch.setattr(MXFP8Quantizer, "buffers_of", recording)

    def copies(
        override: str | None, x_wants: bool, weight_wants: bool, before: Any = ()
    ) -> dict[str, Any]:
        made.clear()
        op = fuser.Sequential(*before, fuser.BasicLinear(32, 64))
        op[-1].weight.requires_grad_(weight_wants)
        x = torch.randn(96, 32, requires_grad=x_wants)
        recipe: Any = recipes.MXFP8BlockScaling(backward_override=override)
        if is_custom:
            factory = lambda role: MXFP8Quantizer()  # noqa: E731
            recipe = recipes.CustomRecipe(factory, backward_override=override)
        with fuser.autocast(recipe=recipe):
            y = op(x)
        if y.requires_grad:
            y.sum().backward()
        return dict(made)

    for x_wants in (False, True):
        for weight_wants in (False, True):
            expected = {"input": (True, weight_wants), "weight": (True, x_wants)}
            if x_wants or weight_wants:
                expected["grad_output"] = (x_wants, weight_wants)
            assert copies(None, x_wants, weight_wants) == expected
            alone = {"input": (True, False), "weight": (True, False)}
            assert copies("dequantized", x_wants, weight_wants) == alone
            # Also where a Quantize makes the operand.
            assert copies(None, x_wants, weight_wants, [fuser.Quantize()]) == expected
            assert copies("dequantized", x_wants, weight_wants, [fuser.Quantize()]) == alone


def test_a_kept_weight_is_neither_copied_nor_saved() -> None:
    op = fuser.BasicLinear(64, 64)
    with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
        op(torch.zeros(32, 64), is_first_microbatch=True)
    assert op._kept_weight is not None
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert other._kept_weight is None
    assert set(op.state_dict()) == {"weight", "_extra_state"}


# -- what a recipe takes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: recipes.DelayedScaling(fp8_format=recipes.Format.E5M2), ("E5M2", "E4M3")),
        (lambda: recipes.Float8CurrentScaling(fp8_format=recipes.Format.E5M2), ("E5M2", "HYBRID")),
        (lambda: recipes.MXFP8BlockScaling(fp8_format=recipes.Format.E2M1), ("E2M1", "E4M3")),
        (lambda: recipes.Float8BlockScaling(x_block_scaling_dim=3), ("x_block", "3", "1 or 2")),
        (lambda: recipes.Float8BlockScaling(x_block_scaling_dim=2), ("(2, 2, 1)", "at most one")),
        (lambda: recipes.DelayedScaling(amax_compute_algo="mean"), ("'mean'", "most_recent")),
    ],
)
def test_a_recipe_refuses_what_it_cannot_do(make: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(fuser.InputError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("recipe", OVERRIDABLE.values(), ids=OVERRIDABLE)
@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
def test_a_quantized_weight_has_the_copies_that_its_backward_reads(
    recipe: Any, override: str | None
) -> None:
    with fuser.quantized_model_init(recipe=dataclasses.replace(recipe, backward_override=override)):
        linear = fuser.BasicLinear(64, 64)
    usage = linear.weight._usage()
    assert (usage.rowwise, usage.columnwise) == (True, override is None)
    x = oracles.random_tensor((32, 64), torch.float32, 1).requires_grad_()
    with fuser.autocast(recipe=recipe):  # the override is gone, and the weight still works
        linear(x).sum().backward()
    exact = linear.weight.dequantize().sum(0)
    assert ((x.grad - exact).norm() / exact.norm() / 32**0.5) < 0.3
