"""LoRALinear: values, what it keeps, quantized weights, merging, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import DTYPES, Draw, assert_no_worse_than_torch, leaf, random_tensor
from pipeline_kernels import on_kernels
from said import said

import fuser
from fuser import recipe as recipes

IN, OUT, RANK = 32, 64, 4
FP32, BF16 = torch.float32, torch.bfloat16
DERIVED = [
    recipes.DelayedScaling(),
    recipes.Float8CurrentScaling(),
    recipes.Float8BlockScaling(),
]
ONE_COPY = [
    *DERIVED,
    recipes.MXFP8BlockScaling(backward_override="dequantized"),
    recipes.NVFP4BlockScaling(backward_override="dequantized"),
    recipes.Float8RowwiseScaling(backward_override="dequantized"),
]
RECIPES = [*ONE_COPY, recipes.MXFP8BlockScaling()]


def lora(dtype: torch.dtype = FP32, **kwargs: Any) -> fuser.LoRALinear:
    """With random values in B and the bias, so that neither is without effect."""
    model = fuser.LoRALinear(IN, OUT, rank=RANK, alpha=2.0 * RANK, dtype=dtype, **kwargs)
    with torch.no_grad():
        for seed, name in enumerate(("bias", "lora_A", "lora_B")):
            parameter = getattr(model, name)
            if parameter is not None:
                parameter.copy_(random_tensor(parameter.shape, parameter.dtype, seed))
    return model


def rows(dtype: torch.dtype = FP32, seed: int = 1) -> torch.Tensor:
    return random_tensor((3, 32, IN), dtype, seed)


def step(
    model: torch.nn.Module, x: torch.Tensor, recipe: Any = None, call: Any = None, seed: int = 0
) -> dict[str, Any]:
    """The output and the gradients of the input and of trained parameters, by name."""
    torch.manual_seed(seed)
    x = leaf(x)
    model.zero_grad(set_to_none=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = (call or model)(x)
    y.backward(random_tensor(y.shape, BF16, 99).to(y.dtype))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}


def formula(model: fuser.LoRALinear, x: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """:func:`step` of plain torch in ``dtype``."""
    x, a, b = (leaf(tensor, dtype) for tensor in (x, model.lora_A, model.lora_B))
    y = x @ model.weight.detach().to(dtype).T
    y = y if model.bias is None else y + model.bias.to(dtype)
    y = y + model.alpha / model.rank * (x @ a.T @ b.T)
    y.backward(random_tensor(y.shape, BF16, 99).to(dtype))
    return {"y": y.detach(), "x": x.grad, "lora_A": a.grad, "lora_B": b.grad}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# -- values ------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_are_those_of_the_formula(dtype: torch.dtype, has_bias: bool) -> None:
    draws = []
    for seed in range(4):
        model, x = lora(dtype, bias=has_bias), rows(dtype, seed)
        found = step(model, x)
        for again in range(3):  # a later call is recorded
            assert equal(step(model, x), found), again
        exact = formula(model, x, torch.float64)
        # The two products of the formula round once each, and the sum here alone.
        draws.append(Draw(found, formula(model, x, dtype), exact))
    assert_no_worse_than_torch(*draws)


def test_only_the_adapters_are_trained() -> None:
    model = lora()
    assert list(step(model, rows())) == ["y", "x", "lora_A", "lora_B"]
    assert model.weight.grad is None
    y = model(rows())
    y.sum().backward()
    assert model.lora_A.grad is not None


@pytest.mark.parametrize("name", ["lora_A", "lora_B"])
def test_an_adapter_may_be_frozen_too(name: str) -> None:
    model = lora()
    expected = step(model, rows())
    getattr(model, name).requires_grad_(False)
    del expected[name]
    assert equal(step(model, rows()), expected)


@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=str)
def test_every_set_of_leaves_gets_its_gradients(recipe: Any) -> None:
    model, x = lora(), rows()
    names = ["bias", "lora_A", "lora_B"]
    for name in names:
        getattr(model, name).requires_grad_(True)
    expected = step(model, x, recipe)
    for wanted in itertools.product((False, True), repeat=4):
        if not any(wanted):
            continue
        for name, is_wanted in zip(names, wanted[1:], strict=True):
            getattr(model, name).requires_grad_(is_wanted)
        model.zero_grad(set_to_none=True)
        leaf_x = x.clone().requires_grad_(wanted[0])
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(leaf_x)
        y.backward(random_tensor(y.shape, BF16, 99).to(y.dtype))
        for name, tensor in {"x": leaf_x, **dict(model.named_parameters())}.items():
            if not tensor.requires_grad:
                assert tensor.grad is None, (name, wanted)
            else:
                assert torch.equal(tensor.grad, expected[name]), (name, wanted)


@pytest.mark.parametrize("has_bias", [True, False])
def test_in_fp32_a_recipe_adds_the_bias_after_the_product(has_bias: bool) -> None:
    model, recipe = lora(bias=has_bias), recipes.Float8CurrentScaling()
    with torch.no_grad():
        model.lora_B.zero_()
    linear = fuser.BasicLinear(IN, OUT)
    linear.load_state_dict({"weight": model.weight})
    with fuser.autocast(recipe=recipe), torch.no_grad():
        found, product = model(rows()), linear(rows())
    assert torch.equal(found, product if model.bias is None else product + model.bias)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_seed_is_drawn_only_for_what_is_dropped(dropout: float) -> None:
    model, draws = lora(dropout=dropout), dropout > 0
    for is_merged in (False, True):
        if is_merged:
            model.merge()
        before = torch.get_rng_state()
        model(rows())
        assert torch.equal(torch.get_rng_state(), before) is not (draws and not is_merged)


def test_a_fresh_op_computes_what_a_linear_does() -> None:
    model = fuser.LoRALinear(IN, OUT, rank=RANK)
    linear = fuser.Linear(IN, OUT)
    linear.load_state_dict({"weight": model.weight, "bias": model.bias})
    assert torch.equal(model(rows()), linear(rows()))
    assert not model.lora_B.any()
    bound = 1 / math.sqrt(IN)  # of a Kaiming-uniform with a = sqrt(5)
    assert 0.8 * bound < model.lora_A.abs().max() <= bound
    model.lora_B.data.fill_(1.0)
    before = model.weight.clone(), model.lora_A.clone()
    model.reset_adapters()
    assert torch.equal(model.weight, before[0])
    assert not model.lora_B.any()
    assert not torch.equal(model.lora_A, before[1])


def test_alpha_over_rank_is_the_scale_and_one_without_alpha() -> None:
    assert (lora().scale, fuser.LoRALinear(IN, OUT, rank=3).scale) == (2.0, 1.0)


@pytest.mark.parametrize("is_training", [True, False])
def test_dropout_is_of_the_adapters_input_alone(is_training: bool) -> None:
    model, p = lora(dropout=0.5).train(is_training), 0.5
    found = step(model, rows())
    torch.manual_seed(0)
    dropped = fuser.Dropout(p).train(is_training)
    mask = dropped(torch.ones_like(rows()))
    assert bool((mask == 0).any()) is is_training
    x, a, b = (leaf(t, torch.float64) for t in (rows(), model.lora_A, model.lora_B))
    y = x @ model.weight.double().T + model.bias + model.scale * ((x * mask) @ a.T @ b.T)
    y.backward(random_tensor(y.shape, BF16, 99).double())
    exact = {"y": y.detach(), "x": x.grad, "lora_A": a.grad, "lora_B": b.grad}
    for name, value in exact.items():
        assert value is not None
        torch.testing.assert_close(found[name], value.float(), rtol=1e-5, atol=1e-4)


def test_adapters_of_another_dtype_keep_theirs() -> None:
    model = fuser.LoRALinear(IN, OUT, rank=RANK, alpha=5 * RANK, dtype=BF16, adapter_dtype=FP32)
    torch.nn.init.normal_(model.lora_B)
    found = step(model, rows(BF16))
    assert {k: v.dtype for k, v in found.items()} == {
        "y": BF16,
        "x": BF16,
        "lora_A": FP32,
        "lora_B": FP32,
    }
    assert_no_worse_than_torch(
        Draw(
            found,
            {k: v.to(found[k].dtype) for k, v in formula(model, rows(BF16), BF16).items()},
            formula(model, rows(BF16), torch.float64),
            BF16,
        )
    )


def test_under_torchs_autocast_all_products_are_in_its_dtype() -> None:
    model = lora()
    with torch.autocast("cpu", BF16):
        y = model(rows())
    assert y.dtype is BF16
    twin = lora(BF16)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(y, twin(rows().bfloat16()))


# -- recipes -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recipe_quantizes_the_weights_product_and_not_the_adapters(recipe: Any) -> None:
    recipe = without_rounding_at_random(recipe)
    model = lora()
    base = fuser.Linear(IN, OUT)
    base.load_state_dict({"weight": model.weight, "bias": model.bias})
    base.weight.requires_grad_(False)
    of_base, plain = step(base, rows(), recipe), step(model, rows())
    found = step(model, rows(), recipe)
    for name in ("lora_A", "lora_B"):
        assert torch.equal(found[name], plain[name])
    without = step(base, rows())
    for name in ("y", "x"):
        expected = of_base[name] + plain[name] - without[name]
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found[name], plain[name], rtol=1e-4, atol=1e-4)


def without_rounding_at_random(recipe: Any) -> Any:
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return recipes.NVFP4BlockScaling(
            backward_override=recipe.backward_override, disable_stochastic_rounding=True
        )
    return recipe


@pytest.mark.parametrize("recipe", ONE_COPY, ids=str)
def test_a_quantized_weight_is_held_once_and_so_between_forward_and_backward(recipe: Any) -> None:
    with fuser.quantized_model_init(recipe=recipe):
        model = lora()
    weight: Any = model.weight
    assert isinstance(weight, fuser.QuantizedTensor)
    assert not weight.requires_grad

    def copies() -> list[bool]:
        return [weight._has(usage) for usage in ("rowwise", "columnwise")]

    x = leaf(rows())
    assert copies() == [True, False]
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with fuser.autocast(recipe=recipe), torch.autograd.graph.saved_tensors_hooks(keep, keep):
        y = model(x)
    assert copies() == [True, False]
    own = {buffer.untyped_storage().data_ptr() for p in model.parameters() for buffer in memory(p)}
    others = [b for t in saved for b in memory(t) if b.untyped_storage().data_ptr() not in own]
    # The input and hidden of the adapters, in the dtype of the adapters, and no bytes.
    assert {b.dtype for b in others} <= {FP32}
    assert sum(b.numel() for b in others) <= x.numel() + x.numel() // IN * RANK
    y.sum().backward()
    assert copies() == [True, False]


def memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    return tensor._memory() if isinstance(tensor, fuser.QuantizedTensor) else [tensor]


@pytest.mark.parametrize("recipe", DERIVED, ids=str)
def test_dgrad_from_one_copy_has_the_bits_of_a_linear_with_two(recipe: Any) -> None:
    with fuser.quantized_model_init(recipe=recipe):
        linear = fuser.BasicLinear(IN, OUT)
        model = fuser.LoRALinear(IN, OUT, rank=RANK, bias=False)
    model.load_state_dict(linear.state_dict(), strict=False)
    linear.weight.requires_grad_(False)
    found, expected = step(model, rows(), recipe), step(linear, rows(), recipe)
    assert all(torch.equal(found[name], expected[name]) for name in ("y", "x"))


@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=str)
def test_compiled_and_checkpointed_steps_have_the_bits_of_eager_ones(
    recipe: Any, is_quantized: bool
) -> None:
    if recipe is None and is_quantized:
        recipe = recipes.Float8CurrentScaling()  # of the weight; the step is without one
        with fuser.quantized_model_init(recipe=recipe):
            model = block()
        recipe = None
        # A graph dequantizes a weight and then turns it. An eager product turns it first, so its
        # operand has other strides.
        of_graph = with_plain_weights(model)
    else:
        recipe = recipe and without_rounding_at_random(recipe)
        with fuser.quantized_model_init(enabled=is_quantized, recipe=recipe):
            model = block()
        of_graph = copy.deepcopy(model)
    torch._dynamo.reset()
    twins = [copy.deepcopy(model) for _ in range(3)]
    compiled = torch.compile(twins[0], fullgraph=True, backend="aot_eager")
    calls: list[Callable[[Any], Any]] = [
        compiled,
        lambda x: torch.utils.checkpoint.checkpoint(twins[1], x, use_reentrant=False),
        lambda x: fuser.checkpoint(twins[2], x),
    ]
    for k in range(3):
        x = random_tensor((32, IN), FP32, k)
        expected = [step(eager, x, recipe, seed=k) for eager in (of_graph, model)]
        for twin, call, like in zip(twins, calls, (0, 1, 1), strict=True):
            assert equal(step(twin, x, recipe, call, seed=k), expected[like])


def with_plain_weights(model: fuser.Sequential) -> fuser.Sequential:
    """A copy whose frozen weights are plain tensors of the same values."""
    plain = copy.deepcopy(model)
    for op in (plain[1], plain[3]):
        op.weight = torch.nn.Parameter(op.weight.detach().dequantize(), requires_grad=False)
    return plain


def block(dropout: float = 0.1) -> fuser.Sequential:
    layers = fuser.Sequential(
        fuser.RMSNorm(IN),
        fuser.LoRALinear(IN, 2 * OUT, rank=RANK, dropout=dropout, bias=False),
        fuser.SwiGLU(),
        fuser.LoRALinear(OUT, IN, rank=RANK),
    )
    for op in (layers[1], layers[3]):
        torch.nn.init.normal_(op.lora_B)
    return layers


@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=str)
def test_every_memory_budget_gives_the_same_bits(recipe: Any) -> None:
    recipe = recipe and without_rounding_at_random(recipe)
    model = block()
    found = []
    for budget in (None, 1, 0):
        with fuser.activation_memory_budget(budget):
            found.append(step(copy.deepcopy(model), rows(), recipe))
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


def test_an_input_that_the_ops_before_compute_again_is_not_kept() -> None:
    plan = block().plan(leaf(rows()))
    kept = {(k.ops, k.name): (k.bytes_per_token, k.rebuilt_by) for k in plan.kept}
    assert kept[(1,), "input"] == (0, (0,))
    assert kept[(3,), "input"] == (0, (2,))
    assert kept[(1,), "statistics"] == (4 * RANK, ())


@pytest.mark.parametrize(
    "recipe", [None, recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()]
)
def test_on_kernels_an_activation_before_it_is_computed_again(recipe: Any) -> None:
    model = fuser.Sequential(
        fuser.Linear(IN, OUT, dtype=BF16),
        fuser.SiLU(),
        fuser.LoRALinear(OUT, IN, rank=RANK, dropout=0.2, dtype=BF16),
    )
    torch.nn.init.normal_(model[2].lora_B)
    with fuser.activation_memory_budget(None):
        expected = step(copy.deepcopy(model), rows(BF16), recipe)
    with on_kernels():
        with fuser.activation_memory_budget(None):
            kept = step(copy.deepcopy(model), rows(BF16), recipe)
        found = step(copy.deepcopy(model), rows(BF16), recipe)
    assert equal(found, kept)
    for name, value in expected.items():
        error = (found[name].float() - value.float()).abs().max()
        assert error <= 0.05 * value.float().abs().max(), name


def test_the_plan_says_that_the_products_are_added_in_the_gemms() -> None:
    plan = fuser.Sequential(lora()).plan(leaf(rows()))
    assert plan.forward[0].kernel == "addmm, mm, addmm"
    # A frozen weight has a dgrad alone.
    assert plan.forward[0].flops_per_token == 2 * IN * OUT == plan.backward[0].flops_per_token
    assert plan.backward[0].kernel == "dgrad mm, wgrad mm, wgrad mm, dgrad mm, dgrad addmm"
    with fuser.autocast(recipe=recipes.Float8CurrentScaling()):
        plan = fuser.Sequential(lora(BF16)).plan(leaf(rows(BF16)))
    assert plan.forward[0].kernel.endswith(", mm (emulated), mm, addmm")
    assert "dgrad mm (emulated), add" in plan.backward[0].kernel


@pytest.mark.parametrize("is_merged", [True, False])
def test_a_plan_for_a_gpu_has_plain_torch_with_as_many_products_beside_it(is_merged: bool) -> None:
    wide = fuser.LoRALinear(4096, 4096, rank=8, dtype=BF16)
    if is_merged:
        wide.merge()
    x = torch.empty(32, 4096, dtype=BF16, requires_grad=True)
    for model in (fuser.Sequential(wide), fuser.Sequential(wide, fuser.Bias(4096))):
        plan = model.plan(x, device="h200")
        assert [baseline.name for baseline in plan.baselines] == ["torch eager", "torch.compile"]


# -- other linears and states ------------------------------------------------------


@pytest.mark.parametrize("make", [torch.nn.Linear, fuser.Linear, fuser.modules.Linear])
def test_a_linear_gives_its_parameters_without_a_copy(make: Any) -> None:
    linear = make(IN, OUT)
    expected = linear(rows())
    model = fuser.LoRALinear.from_linear(linear, rank=RANK, alpha=3, dropout=0.1)
    assert model.weight is linear.weight
    assert model.bias is linear.bias
    assert (model.scale, model.dropout_probability) == (3 / RANK, 0.1)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["lora_A", "lora_B"]
    assert not any(p.is_meta for p in model.parameters())
    assert torch.equal(model(rows()), expected)


def test_a_quantized_weight_of_a_linear_is_held_once_afterwards() -> None:
    recipe = recipes.Float8CurrentScaling()
    with fuser.quantized_model_init(recipe=recipe):
        linear = fuser.Linear(IN, OUT)
    with fuser.autocast(recipe=recipe):
        expected = linear(rows())
    model = fuser.LoRALinear.from_linear(linear, rank=RANK)
    weight: Any = model.weight
    assert not weight._has("columnwise")
    assert torch.equal(step(model, rows(), recipe)["y"], expected)


def test_what_is_no_linear_is_refused_and_stays_as_it_is() -> None:
    norm = fuser.RMSNorm(8)
    with pytest.raises(fuser.InputError, match=said("lora-linear-takes-weight-out", "RMSNorm")):
        fuser.LoRALinear.from_linear(norm, rank=2)
    convolution = torch.nn.Conv1d(4, 4, 3)
    with pytest.raises(fuser.InputError, match=said("lora-linear-takes-weight-out", "Conv1d")):
        fuser.LoRALinear.from_linear(convolution, rank=2)
    with pytest.raises(fuser.InputError, match=said("lora-linear-takes-weight-out", "Identity")):
        fuser.LoRALinear.from_linear(torch.nn.Identity(), rank=2)
    linear = torch.nn.Linear(4, 4)
    with pytest.raises(fuser.InputError, match=said("parameters-positive", None, "rank", 0)):
        fuser.LoRALinear.from_linear(linear, rank=0)
    assert norm.weight.requires_grad
    assert linear.weight.requires_grad


def test_states_have_plain_keys_and_take_those_of_peft() -> None:
    model, other = lora(), lora()
    assert list(model.state_dict()) == ["weight", "bias", "lora_A", "lora_B", "_extra_state"]
    state = model.plain_state_dict()
    assert list(state) == ["weight", "bias", "lora_A.weight", "lora_B.weight"]
    other.reset_parameters()
    assert not torch.equal(other(rows()), model(rows()))
    other.load_state_dict(state)
    assert torch.equal(other(rows()), model(rows()))
    outer = fuser.Sequential(lora())
    outer.load_state_dict({f"0.{key}": value for key, value in state.items()})
    assert torch.equal(outer(rows()), model(rows()))


def test_a_linears_state_gives_the_frozen_parameters() -> None:
    linear, model = torch.nn.Linear(IN, OUT), lora()
    result = model.load_state_dict(linear.state_dict(), strict=False)
    assert result.missing_keys == ["lora_A", "lora_B"]
    assert torch.equal(model.weight, linear.weight)
    with pytest.raises(RuntimeError, match="Missing"):
        model.load_state_dict(linear.state_dict())


def test_an_op_on_meta_is_allocated_at_the_first_forward() -> None:
    model = fuser.LoRALinear(IN, OUT, rank=RANK, device="meta")
    held = list(model.parameters())
    assert model(rows()).shape == (3, 32, OUT)
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert [p.requires_grad for p in held] == [False, False, True, True]
    assert not model.lora_B.any()
    loaded = fuser.LoRALinear(IN, OUT, rank=RANK, alpha=2 * RANK, device="meta")
    source = lora()
    loaded.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(loaded(rows()), source(rows()))


# -- merging -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merged_op_is_a_linear_with_the_merged_weight(dtype: torch.dtype) -> None:
    model = lora(dtype, dropout=0.3)
    exact = model.weight.double() + model.scale * (model.lora_B.double() @ model.lora_A.double())
    merged = model.merged_weight()
    assert not merged.requires_grad
    spacing = torch.finfo(dtype).eps * exact.abs().max()
    assert (merged.double() - exact).abs().max() <= spacing / 2 + 1e-6
    before = model.weight.clone()
    first = step(model, rows(dtype))
    container = fuser.Sequential(model)
    assert "mm, addmm" in str(container.plan(leaf(rows(dtype))))
    model.merge()
    linear = fuser.Linear(IN, OUT, dtype=dtype)
    linear.load_state_dict({"weight": merged, "bias": model.bias})
    linear.weight.requires_grad_(False)
    for _ in range(3):
        found, expected = step(model, rows(dtype)), step(linear, rows(dtype))
        assert torch.equal(found.pop("y"), expected["y"])
        assert torch.equal(found.pop("x"), expected["x"])
        assert not found
    assert "merged" in repr(model)
    assert "mm, addmm" not in str(container.plan(leaf(rows(dtype))))
    model.unmerge()
    assert (model.weight.double() - before.double()).abs().max() <= spacing
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    model.weight.data.copy_(before)
    assert equal(step(model, rows(dtype)), first)


def test_the_plan_of_frozen_adapters_follows_merging() -> None:
    model = lora().requires_grad_(False)
    container = fuser.Sequential(model)
    for _ in range(2):
        assert "mm, addmm" in str(container.plan(rows()))
        model.merge()
        assert "mm, addmm" not in str(container.plan(rows()))
        model.unmerge()


def test_a_compiled_model_follows_merging() -> None:
    torch._dynamo.reset()
    model = lora()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(rows()), model(rows()))
    model.merge()
    assert torch.equal(compiled(rows()), model(rows()))
    assert torch.equal(model(rows()), fuser_linear(model)(rows()))


def fuser_linear(model: fuser.LoRALinear) -> fuser.Linear:
    linear = fuser.Linear(IN, OUT)
    linear.load_state_dict(model.plain_state_dict())
    return linear


def test_the_state_of_a_merged_op_is_that_of_a_linear_and_none_is_loaded_into_it() -> None:
    model = lora()
    state = copy.deepcopy(model.state_dict())
    model.merge()
    assert torch.equal(fuser_linear(model)(rows()), model(rows()))
    before = model.weight.clone()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"unmerge\(\) first"):
            model.load_state_dict(state, strict=strict)
    assert torch.equal(model.weight, before)
    model.unmerge()
    model.load_state_dict(state)
    assert torch.equal(model.weight, state["weight"])


def test_what_cannot_be_merged_is_refused_and_stays_as_it_is() -> None:
    model = lora()
    with pytest.raises(fuser.StateError, match=said("lora-adapters-is", None, "not merged")):
        model.unmerge()
    model.merge()
    assert not model(rows()).requires_grad
    for call in (model.merge, model.merged_weight):
        with pytest.raises(
            fuser.StateError, match=said("lora-adapters-is", None, "merged already")
        ):
            call()
    with fuser.quantized_model_init(recipe=recipes.Float8CurrentScaling()):
        quantized = lora()
    with pytest.raises(fuser.StateError, match=said("lora-adapters-whose-steps-what")):
        quantized.merge()
    expected = quantized.weight.dequantize() + 2 * quantized.lora_B @ quantized.lora_A
    torch.testing.assert_close(quantized.merged_weight(), expected)
    half = lora(torch.float16)
    half.lora_B.data.fill_(60000.0)
    before = half.weight.clone()
    with pytest.raises(fuser.StateError, match=said("lora-adapters-finite-nothing-check")):
        half.merge()
    assert torch.equal(half.weight, before)
    assert not half.is_merged


# -- refusals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"rank": 0}, fuser.InputError, said("parameters-positive", None, "rank", 0)),
        ({"rank": 2.5}, fuser.InputTypeError, said("routing-takes-int", None, "rank")),
        (
            {"rank": 2, "dropout": 1.5},
            fuser.InputError,
            said("lora-adapters-dropout-between-0", None, 1.5),
        ),
        (
            {"rank": 2, "dtype": torch.int8},
            fuser.InputError,
            said("parameters-float32-float16-bfloat16"),
        ),
        (
            {"rank": 2, "adapter_dtype": torch.int8},
            fuser.InputError,
            said("parameters-float32-float16-bfloat16"),
        ),
    ],
)
def test_wrong_arguments_are_sentences(arguments: Any, error: Any, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        fuser.LoRALinear(8, 8, **arguments)


def test_a_weight_that_requires_a_gradient_is_refused_and_the_next_call_works() -> None:
    model = lora()
    expected = step(model, rows())
    model.requires_grad_(True)
    with pytest.raises(
        fuser.InputError, match=said("lora-adapters-requires-gradient-trains", None, None, "weight")
    ):
        model(rows())
    model.weight.requires_grad_(False)
    found = step(model, rows())
    torch.testing.assert_close(
        found.pop("bias"), random_tensor((3, 32, OUT), BF16, 99).float().sum((0, 1))
    )
    assert equal(found, expected)


def test_features_are_not_sharded_and_an_adapter_of_another_shape_is_refused() -> None:
    model = lora()
    with pytest.raises(fuser.InputError, match=said("lora-linear-not-parallel-rank", "column")):
        model.shard("column")
    assert model(rows()).shape == (3, 32, OUT)
    model.lora_A = torch.nn.Parameter(torch.ones(RANK + 1, IN))
    with pytest.raises(
        fuser.InputError, match=said("grouped-parameters-shape", None, "lora_A", (5, 32))
    ):
        model(rows())
