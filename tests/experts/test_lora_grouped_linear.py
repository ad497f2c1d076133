"""LoRAGroupedLinear against a loop over experts in plain torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_launch_experts import in_one_launch, one_by_one
from oracles import Draw, assert_no_worse_than_torch, leaf, random_tensor
from pipeline_kernels import on_kernels
from said import holds, said

import fuser
from fuser import recipe as recipes
from fuser.precision.quantizer_for import make_quantizer

pytestmark = pytest.mark.sampled(most=12)

G, IN, OUT, RANK, ROWS = 4, 32, 128, 4, 96
FP32, BF16 = torch.float32, torch.bfloat16
SPLITS = {
    "even": (24, 24, 24, 24),
    "first and last empty": (0, 40, 33, 0),
    "all empty": (0, 0, 0, 0),
    "one row each": (1, 1, 1, 1),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "separate": {},
    "one weight": {"single_grouped_weight": True},
    "one of each": {"single_grouped_weight": True, "single_grouped_bias": True},
}
MODES: dict[str, dict[str, Any]] = {
    "no bias": {"bias": False},
    "bias": {},
    "scaled bias": {"scale_bias": True},
}
SOME = SPLITS["first and last empty"]
KINDS = ("weight", "bias", "lora_A", "lora_B")


def lora(dtype: torch.dtype = FP32, groups: int = G, **kwargs: Any) -> fuser.LoRAGroupedLinear:
    """With random values in B and the biases, so that neither is without effect."""
    model = fuser.LoRAGroupedLinear(
        groups, IN, OUT, rank=RANK, alpha=2.0 * RANK, dtype=dtype, device="cpu", **kwargs
    )
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if not name.startswith("weight"):
                parameter.copy_(random_tensor(parameter.shape, parameter.dtype, seed))
    return model


def each(model: Any, kind: str, attribute: str = "data") -> list[Any]:
    """What each expert has of a kind: weight, bias, adapter, or its gradient."""
    parameters = dict(model.named_parameters())
    if kind in parameters:
        found = getattr(parameters[kind], attribute)
        return [None] * model.num_groups if found is None else list(found)
    names = [f"{kind}{g}" for g in range(model.num_groups)]
    return [getattr(parameters[name], attribute) for name in names if name in parameters]


def rows(dtype: torch.dtype = FP32, seed: int = 1) -> torch.Tensor:
    return random_tensor((ROWS, IN), dtype, seed)


def poisoned(x: torch.Tensor, count: int) -> torch.Tensor:
    """``x`` with NaN and infinities in the rows from ``count``."""
    x = x.clone()
    x[count::2], x[count + 1 :: 2] = float("nan"), float("inf")
    return x


def step(
    model: Any,
    x: torch.Tensor,
    splits: tuple[int, ...],
    recipe: Any = None,
    call: Any = None,
    scales: Any = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The output and the gradients, those of adapters of each expert."""
    torch.manual_seed(seed)
    extras = [torch.tensor(splits)] + ([leaf(scales)] if scales is not None else [])
    x, count = leaf(x), sum(splits)
    model.zero_grad(set_to_none=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = (call or model)(x, *extras)
    y.backward(poisoned(random_tensor(y.shape, BF16, 99).to(y.dtype), count))
    found = {"y": y.detach(), "x": x.grad}
    if scales is not None:
        found["scales"] = extras[1].grad
    of_experts = {
        f"{kind}{g}": grad
        for kind in KINDS
        for g, grad in enumerate(each(model, kind, "grad"))
        if grad is not None
    }
    return found | of_experts


def formula(
    model: Any,
    x: torch.Tensor,
    splits: tuple[int, ...],
    dtype: torch.dtype,
    *,
    scales: Any = None,
    mask: Any = 1.0,
    product: Callable[..., torch.Tensor] = lambda x, weight: x @ weight.T,
) -> dict[str, Any]:
    """:func:`step` of a loop in plain torch in ``dtype``; ``product`` is that with a weight."""
    x, scales = leaf(x, dtype), None if scales is None else leaf(scales, dtype)
    dy = random_tensor((ROWS, OUT), BF16, 99).to(dtype)
    adapters = {
        f"{kind}{g}": leaf(part, dtype)
        for kind in KINDS[2:]
        for g, part in enumerate(each(model, kind))
    }
    weights, biases = each(model, "weight"), each(model, "bias")
    parts, start = [], 0
    for g, size in enumerate(splits):
        of = slice(start, start + size)
        start += size
        y = product(x[of], values_of(weights[g]).to(dtype))
        if biases:
            y = y + biases[g].to(dtype) * (1 if scales is None else scales[of, None])
        dropped = x[of] * (mask[of] if isinstance(mask, torch.Tensor) else mask)
        a, b = adapters[f"lora_A{g}"], adapters[f"lora_B{g}"]
        parts.append(y + model.alpha / model.rank * (dropped @ a.T @ b.T))
    y = torch.cat([*parts, torch.zeros(ROWS - start, OUT, dtype=dtype)])
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad}
    if scales is not None:
        found["scales"] = scales.grad if scales.grad is not None else torch.zeros_like(scales)
    return found | {
        name: torch.zeros_like(leaf_) if leaf_.grad is None else leaf_.grad
        for name, leaf_ in adapters.items()
    }


def values_of(tensor: Any) -> torch.Tensor:
    values: torch.Tensor = tensor.detach()
    return values.dequantize() if isinstance(tensor, fuser.QuantizedTensor) else values


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def close(found: dict[str, Any], expected: dict[str, Any], bound: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm()
        assert error <= bound * value.double().norm(), (name, error, value.norm())


# -- values ------------------------------------------------------------------------


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_output_and_gradients_are_those_of_a_loop_over_experts(
    dtype: torch.dtype, mode: Any, layout: Any, splits: tuple[int, ...]
) -> None:
    """Rows after the last group have NaN and infinities in them, which reach nothing."""
    model = lora(dtype, **mode, **layout)
    draws = []
    for seed in range(3):
        x, scales = rows(dtype, seed), None
        if model.scale_bias:
            scales = random_tensor((ROWS,), dtype, seed + 10)
        found = step(model, poisoned(x, sum(splits)), splits, scales=scales)
        again = step(model, poisoned(x, sum(splits)), splits, scales=scales)
        assert equal(found, again)
        plain = formula(model, x, splits, dtype, scales=scales)
        draws.append(Draw(found, plain, formula(model, x, splits, torch.float64, scales=scales)))
    assert_no_worse_than_torch(*draws)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_number_of_experts(layout: Any, groups: int) -> None:
    model, splits = lora(groups=groups, **layout), (20, 0, 40)[-groups:]
    close(step(model, rows(), splits), formula(model, rows(), splits, torch.float64))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_all_experts_in_one_launch_are_the_same(
    layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of a product over all experts at once are as exact as torch's."""
    in_one_launch(monkeypatch)
    model = lora(BF16, **layout)
    found = step(model, rows(BF16), SOME)
    exact = formula(model, rows(), SOME, torch.float64)
    assert_no_worse_than_torch(Draw(found, formula(model, rows(BF16), SOME, BF16), exact))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("way", ["loop", "one launch"])
def test_dropout_is_of_the_adapters_input_alone(
    way: str, is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = FP32
    if way == "one launch":
        in_one_launch(monkeypatch)
        dtype = BF16
    model = lora(dtype, dropout=0.5).train(is_training)
    found = step(model, rows(dtype), SOME)
    torch.manual_seed(0)
    mask = fuser.Dropout(0.5).train(is_training)(torch.ones(ROWS, IN))
    assert bool((mask == 0).any()) is is_training
    exact = formula(model, rows(dtype), SOME, torch.float64, mask=mask.double())
    close(found, exact, {FP32: 1e-5, BF16: 0.02}[dtype])


@pytest.mark.parametrize("shape", [(ROWS, IN), (2, ROWS // 2, IN)])
def test_leading_dimensions_are_rows(shape: tuple[int, ...]) -> None:
    model = lora(dropout=0.2)
    found = step(model, rows(), SOME)
    torch.manual_seed(0)
    x = leaf(rows().view(shape))
    y = model(x, torch.tensor(SOME))
    assert y.shape == (*shape[:-1], OUT)
    assert torch.equal(y.view(ROWS, OUT), found["y"])
    y.view(ROWS, OUT)[: sum(SOME)].backward(random_tensor((ROWS, OUT), BF16, 99)[: sum(SOME)])
    assert torch.equal(x.grad.view(ROWS, IN), found["x"])


def test_adapters_of_another_dtype_keep_theirs() -> None:
    model = lora(BF16, adapter_dtype=FP32)
    found = step(model, rows(BF16), SOME)
    assert {name: grad.dtype for name, grad in found.items() if "lora" not in name} == {
        "y": BF16,
        "x": BF16,
    }
    assert {grad.dtype for name, grad in found.items() if "lora" in name} == {FP32}
    close(found, formula(model, rows(BF16), SOME, torch.float64), 0.01)
    adapters = {name: grad for name, grad in found.items() if "lora" in name}
    exact = formula(model, rows(BF16), SOME, torch.float64)
    close(adapters, {name: exact[name] for name in adapters})


def test_under_torchs_autocast_all_products_are_in_its_dtype() -> None:
    model, twin = lora(), lora(BF16)
    with torch.autocast("cpu", BF16):
        y = model(rows(), torch.tensor(SOME))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(y, twin(rows().bfloat16(), torch.tensor(SOME)))


# -- what is trained ---------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_only_the_adapters_are_trained_and_of_them_those_that_are_not_frozen(layout: Any) -> None:
    model = lora(**layout)
    expected = step(model, rows(), SOME)
    assert {name[:6] for name in expected if name not in ("y", "x")} == {"lora_A", "lora_B"}
    for name in ("lora_A", "lora_B"):
        chosen = [n for n in dict(model.named_parameters()) if n.startswith(name)][-1:]
        for one in chosen:
            getattr(model, one).requires_grad_(False)
        gone = [chosen[0]] if chosen[0] in expected else [f"{name}{g}" for g in range(G)]
        for one in gone:
            del expected[one]
        assert equal(step(model, rows(), SOME), expected)
    model.requires_grad_(False)
    assert not model(rows(), torch.tensor(SOME)).requires_grad
    x = leaf(rows())
    model(x, torch.tensor(SOME)).backward(random_tensor((ROWS, OUT), BF16, 99).float())
    assert torch.equal(x.grad, expected["x"])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_bias_may_be_trained_too(layout: Any) -> None:
    model = lora(**layout)
    expected = step(model, rows(), SOME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("bias") or "lora" in name)
    found, start = step(model, rows(), SOME), 0
    dy = random_tensor((ROWS, OUT), BF16, 99).float()
    for g, size in enumerate(SOME):
        torch.testing.assert_close(found.pop(f"bias{g}"), dy[start : start + size].sum(0))
        start += size
    assert equal(found, expected)


@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("layout", ["separate", "one weight"])
def test_every_set_of_leaves_gets_its_gradients(layout: str, recipe: Any) -> None:
    model = lora(**LAYOUTS[layout])
    kinds = ("bias", "lora_A", "lora_B")

    def grads(wanted: dict[str, bool]) -> dict[str, Any]:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(wanted[k] for k in kinds if name.startswith(k)))
        model.zero_grad(set_to_none=True)
        x = rows().requires_grad_(wanted["x"])
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, torch.tensor(SOME))
        y.backward(random_tensor(y.shape, BF16, 99).to(y.dtype))
        return {"x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}

    names = ("x", *kinds)
    full = grads(dict.fromkeys(names, True))
    for flags in itertools.product((False, True), repeat=len(names)):
        wanted = dict(zip(names, flags, strict=True))
        if not any(flags):
            continue
        for name, grad in grads(wanted).items():
            if any(wanted[kind] for kind in names if name.startswith(kind)):
                assert torch.equal(grad, full[name]), (name, wanted)
            else:
                assert grad is None, (name, wanted)


@pytest.mark.parametrize("name", ["lora_B2", "weight1"])
def test_what_the_gradient_of_the_input_reads_is_watched_if_adapters_are_frozen(name: str) -> None:
    model = copy.deepcopy(lora()).requires_grad_(False)
    y = model(leaf(rows()), torch.tensor(SOME))
    with torch.no_grad():
        getattr(model, name).add_(1)
    with pytest.raises(RuntimeError, match=r"changed in|modified by an inplace"):
        y.sum().backward()


def test_a_fresh_op_computes_what_a_grouped_linear_does_and_reset_adapters_starts_again() -> None:
    model = fuser.LoRAGroupedLinear(G, IN, OUT, rank=RANK, device="cpu")
    linear = fuser.GroupedLinear(G, IN, OUT, device="cpu")
    linear.load_state_dict(
        {name: value for name, value in model.state_dict().items() if "lora" not in name}
    )
    assert torch.equal(model(rows(), torch.tensor(SOME)), linear(rows(), torch.tensor(SOME)))
    bound = 1 / IN**0.5  # of a Kaiming-uniform with a = sqrt(5)
    for a, b in zip(each(model, "lora_A"), each(model, "lora_B"), strict=True):
        assert 0.7 * bound < a.abs().max() <= bound
        assert not b.any()
    for adapter in (each(model, "lora_A"), each(model, "lora_B")):
        adapter[1].fill_(1.0)
    before = [weight.clone() for weight in each(model, "weight")]
    model.reset_adapters()
    assert all(map(torch.equal, each(model, "weight"), before))
    assert not any(b.any() for b in each(model, "lora_B"))
    assert each(model, "lora_A")[1].unique().numel() > RANK


def test_a_weight_that_requires_a_gradient_is_refused_and_the_next_call_works() -> None:
    model = lora()
    expected = step(model, rows(), SOME)
    model.weight2.requires_grad_(True)
    with pytest.raises(
        fuser.InputError,
        match=said("lora-adapters-requires-gradient-trains", None, "weight2", "weight2"),
    ):
        model(rows(), torch.tensor(SOME))
    model.weight2.requires_grad_(False)
    assert equal(step(model, rows(), SOME), expected)


@pytest.mark.parametrize("name", ["lora_A1", "lora_B2", "weight1"])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_parameter_that_changes_before_the_backward_is_noticed(
    name: str, is_copied: bool
) -> None:
    """Also if the parts of one buffer have version counters of their own, as in a copy."""
    model = copy.deepcopy(lora()) if is_copied else lora()
    y = model(leaf(rows()), torch.tensor(SOME))
    with torch.no_grad():
        getattr(model, name).add_(1)
    with pytest.raises(
        (fuser.StateError, RuntimeError), match=r"changed in|modified by an inplace"
    ):
        y.sum().backward()


# -- recipes -----------------------------------------------------------------------

RECIPES = {
    "current": recipes.Float8CurrentScaling,
    "blocks": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "rowwise": recipes.Float8RowwiseScaling,
}
OVERRIDES = [None, "dequantized", "high_precision"]


def quantized_product(recipe: Any, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """``x @ weight.T`` of one expert: quantized, dequantized, and multiplied by plain torch."""

    def copies(tensor: torch.Tensor, role: str) -> list[torch.Tensor]:
        made = make_quantizer(recipe, role)(tensor.detach().to(dtype))
        return [
            made.with_usage(usage).dequantize().to(tensor.dtype)
            for usage in ("rowwise", "columnwise")
        ]

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.weight = weight
            if not len(x):
                return x @ weight.T
            return copies(x, "input")[0] @ copies(weight, "weight")[0].T

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
            (dy,), (of_forward, of_backward) = grads, copies(ctx.weight, "weight")
            if not len(dy):
                return dy @ ctx.weight, None
            if recipe.backward_override is None:
                return copies(dy, "grad_output")[0] @ of_backward, None
            is_exact = recipe.backward_override == "high_precision"
            return dy @ (ctx.weight if is_exact else of_forward), None

    return Product.apply


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("override", OVERRIDES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_quantizes_the_weights_products_and_not_the_adapters(
    name: str, override: Any, layout: Any
) -> None:
    recipe = RECIPES[name](backward_override=override)
    model = lora(**layout)
    product = quantized_product(recipe, FP32)
    for seed in range(2):
        x = rows(seed=seed)
        found = step(model, poisoned(x, sum(SOME)), SOME, recipe)
        exact = formula(model, x, SOME, torch.float64, product=product)
        close(found, exact)
        plain = formula(model, x, SOME, torch.float64)
        for of in ("y", "x"):  # the rule of the recipe matters
            is_plain = of == "x" and override == "high_precision"
            error = (found[of].double() - plain[of]).norm() / plain[of].norm()
            assert bool(error < 1e-5) is is_plain


INSIDE = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "blocks": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp8 dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4 dequantized": recipes.NVFP4BlockScaling(
        backward_override="dequantized", disable_stochastic_rounding=True
    ),
    "rowwise dequantized": recipes.Float8RowwiseScaling(backward_override="dequantized"),
}
CASES = [
    (name, layout)
    for name, layout in itertools.product(INSIDE, ("separate", "one weight"))
    if layout == "separate" or name.split()[0] not in ("delayed", "rowwise")
]


def memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    return tensor._memory() if isinstance(tensor, fuser.QuantizedTensor) else [tensor]


@pytest.mark.parametrize("way", ["together", "one by one"])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_quantized_weights_are_held_once_and_so_between_forward_and_backward(
    name: str, layout: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "one by one":
        one_by_one(monkeypatch)
    recipe = INSIDE[name]
    with fuser.quantized_model_init(recipe=recipe):
        model = lora(**LAYOUTS[layout])
    weights: list[Any] = [p for n, p in model.named_parameters() if n.startswith("weight")]
    assert all(isinstance(weight, fuser.QuantizedTensor) for weight in weights)
    assert not any(weight.requires_grad for weight in weights)

    def copies() -> list[bool]:
        usages = ("rowwise", "columnwise")
        return [any(weight._has(usage) for weight in weights) for usage in usages]

    has_two = name == "mxfp8"
    assert copies() == [True, has_two]
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x, splits = leaf(rows()), torch.tensor(SOME)
    with fuser.autocast(recipe=recipe), torch.autograd.graph.saved_tensors_hooks(keep, keep):
        y = model(x, splits)
    assert copies() == [True, has_two]
    own = {part.untyped_storage().data_ptr() for p in model.parameters() for part in memory(p)}
    others = [b for t in saved for b in memory(t) if b.untyped_storage().data_ptr() not in own]
    # The input and hidden of the adapters, and the places of the groups.
    assert {b.dtype for b in others} <= {FP32, torch.int32, torch.int64}
    floats = [b for b in others if b.dtype is FP32]
    assert sum(b.numel() for b in floats) <= ROWS * (IN + RANK)
    y.sum().backward()
    assert copies() == [True, has_two]


@pytest.mark.parametrize("way", ["together", "one by one"])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_from_quantized_weights_have_the_bits_of_a_grouped_linear(
    name: str, layout: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has two copies of its weights; B is zero."""
    if way == "one by one":
        one_by_one(monkeypatch)
    recipe = INSIDE[name]
    with fuser.quantized_model_init(recipe=recipe):
        linear = fuser.GroupedLinear(G, IN, OUT, device="cpu", **LAYOUTS[layout])
    for again in range(2):
        twin = copy.deepcopy(linear).requires_grad_(False)
        model = fuser.LoRAGroupedLinear.from_linear(copy.deepcopy(linear), rank=RANK)
        found, expected = (step(each_, rows(seed=again), SOME, recipe) for each_ in (model, twin))
        assert all(torch.equal(found[key], expected[key]) for key in ("y", "x"))
    if recipe.backward_override is None and name != "delayed":
        product = quantized_product(recipe, FP32)
        exact = formula(model, rows(seed=again), SOME, torch.float64, product=product)
        # The weights are of these values already, which stay as they are when quantized again.
        if name != "mxfp8":
            close({"y": found["y"]}, {"y": exact["y"]})


# -- in a pipeline -----------------------------------------------------------------


def layer(recipe: Any = None, dropout: float = 0.1, **options: Any) -> fuser.Sequential:
    """A mixture of experts in one pipeline, with adapters in both of its linears."""
    options = {"rank": RANK, "dropout": dropout, "bias": False, "device": "cpu", **options}
    with fuser.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        up = fuser.LoRAGroupedLinear(G, IN, 2 * OUT, **options)
        down = fuser.LoRAGroupedLinear(G, OUT, 128, **options)
    for op in (up, down):
        for name, parameter in op.named_parameters():
            if name.startswith("lora_B"):
                torch.nn.init.normal_(parameter, std=0.1)
    dispatch = fuser.MoeDispatch(G)
    for index, channel in enumerate(("split sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    return fuser.Sequential(
        dispatch,
        up.set_extra_input_channel(0, "split sizes"),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        down.set_extra_input_channel(0, "split sizes"),
        fuser.MoeCombine().set_extra_input_channel(0, "rows"),
    )


INDICES = torch.arange(2 * ROWS).view(ROWS, 2) % (G - 1)  # the last expert gets no token


def of_layer(
    model: Any, x: torch.Tensor, recipe: Any = None, call: Any = None, seed: int = 0
) -> dict[str, Any]:
    torch.manual_seed(seed)
    x = leaf(x)
    probs = leaf(random_tensor((ROWS, 2), FP32, 5).abs().to(x.dtype))
    model.zero_grad(set_to_none=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = (call or model)(x, INDICES, probs)
    y.backward(random_tensor(y.shape, BF16, 98).to(y.dtype))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, "probs": probs.grad, **grads}


def test_a_layer_of_experts_is_a_loop_over_tokens_and_their_experts() -> None:
    model = layer(dropout=0.0)
    found = of_layer(model, rows())
    x, probs = leaf(rows(), torch.float64), leaf(random_tensor((ROWS, 2), FP32, 5).abs())
    params = {name: leaf(value, torch.float64) for name, value in model.named_parameters()}

    def linear(x: torch.Tensor, place: int, g: int) -> torch.Tensor:
        w, a, b = (params[f"{place}.{kind}{g}"] for kind in ("weight", "lora_A", "lora_B"))
        return x @ w.T + x @ a.T @ b.T  # alpha is the rank

    outputs = []
    for t in range(ROWS):
        y = torch.zeros(128, dtype=torch.float64)
        for k in range(2):
            g = int(INDICES[t, k])
            gate, value = linear(x[t], 1, g).chunk(2)
            y = y + probs[t, k] * linear(torch.nn.functional.silu(gate) * value, 3, g)
        outputs.append(y)
    y = torch.stack(outputs)
    y.backward(random_tensor(y.shape, BF16, 98).double())
    expected = {"y": y.detach(), "x": x.grad, "probs": probs.grad}
    assert set(found) == {*expected, *(name for name in params if "lora" in name)}
    for name, grad in found.items():
        exact = expected.get(name)
        if exact is None:
            exact = params[name].grad
        if exact is None:
            assert not grad.any()  # of the expert without tokens
        else:
            torch.testing.assert_close(grad.double(), exact.double(), rtol=1e-4, atol=1e-4)


IN_A_LAYER = {
    "no recipe": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp8 dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
}


@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize("layout", ["separate", "one weight"])
@pytest.mark.parametrize("name", IN_A_LAYER)
def test_compiled_and_checkpointed_steps_have_the_bits_of_eager_ones(
    name: str, layout: str, is_quantized: bool
) -> None:
    recipe = IN_A_LAYER[name]
    if is_quantized and (recipe is None or (name == "delayed" and layout != "separate")):
        pytest.skip("has no such parameters")
    model = layer(recipe if is_quantized else None, **LAYOUTS[layout])
    torch._dynamo.reset()
    twins = [copy.deepcopy(model) for _ in range(3)]
    calls: list[Callable[..., Any]] = [
        torch.compile(twins[0], fullgraph=True, backend="aot_eager"),
        lambda *args: torch.utils.checkpoint.checkpoint(twins[1], *args, use_reentrant=False),
        lambda *args: fuser.checkpoint(twins[2], *args),
    ]
    for k in range(3):
        expected = of_layer(model, rows(seed=k), recipe, seed=k)
        for twin, call in zip(twins, calls, strict=True):
            found = of_layer(twin, rows(seed=k), recipe, call, seed=k)
            assert equal(found, expected)


@pytest.mark.parametrize("name", IN_A_LAYER)
def test_every_memory_budget_gives_the_same_bits(name: str) -> None:
    model, found = layer(), []
    for budget in (None, 1, 0):
        with fuser.activation_memory_budget(budget):
            found.append(of_layer(copy.deepcopy(model), rows(), IN_A_LAYER[name]))
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=["none", "current"])
def test_on_kernels_a_layer_of_experts_is_the_same(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if backward computes the inputs of adapters again; all experts are one launch."""
    model, found = layer(dtype=BF16), []
    expected = of_layer(copy.deepcopy(model), rows(BF16), recipe)
    if recipe is None:
        in_one_launch(monkeypatch)
    with on_kernels():
        for budget in (None, 0):
            with fuser.activation_memory_budget(budget):
                found.append(of_layer(copy.deepcopy(model), rows(BF16), recipe))
    assert equal(*found)
    for name, value in expected.items():
        error = (found[0][name].float() - value.float()).abs().max()
        assert error <= 0.05 * value.float().abs().max(), name


def test_an_input_that_the_ops_before_compute_again_is_not_kept() -> None:
    plan = layer(dtype=BF16).plan(leaf(rows(BF16)), INDICES, torch.ones(ROWS, 2))
    kept = {(k.ops, k.name): k.rebuilt_by for k in plan.kept}
    assert kept[(3,), "input"] == (2,)
    assert kept[(3,), "statistics"] == ()


def test_the_plan_says_which_products_add() -> None:
    def kernels(model: Any, recipe: Any = None) -> tuple[str, str]:
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            plan = fuser.Sequential(model).plan(leaf(rows()), torch.tensor(SOME))
        # A frozen weight has a dgrad alone.
        assert plan.forward[0].flops_per_token == 2 * IN * OUT == plan.backward[0].flops_per_token
        return plan.forward[0].kernel, plan.backward[0].kernel

    forward, backward = kernels(lora(bias=False))
    assert forward == "4 x mm, 4 x mm, 4 x addmm"
    of_adapters = "4 x dgrad mm, 4 x wgrad mm, 4 x wgrad mm, 4 x dgrad addmm"
    assert backward == f"4 x dgrad mm, {of_adapters}"
    forward, backward = kernels(lora(dropout=0.5))
    assert forward == "4 x mm, grouped add, dropout, 4 x mm, 4 x addmm"
    assert backward.endswith("4 x dgrad mm, dropout_backward, add")
    forward, backward = kernels(lora(bias=False), recipes.Float8CurrentScaling())
    assert forward.endswith("grouped mm of 4 (emulated), grouped mm of 4, grouped mm of 4, add")
    assert backward.endswith("grouped wgrad mm of 4, grouped dgrad mm of 4, add")


def test_a_plan_for_a_gpu_says_when_sizes_are_read_and_has_plain_torch_beside_it() -> None:
    inputs = leaf(rows(BF16)), INDICES, torch.ones(ROWS, 2)
    text = " ".join(str(layer(dtype=BF16).plan(*inputs, device="h200")).split())
    assert "split sizes are not read on the host" in text
    assert "torch eager" in text
    plan = layer(dtype=BF16, adapter_dtype=FP32).plan(*inputs, device="h200")
    text = " ".join(str(plan).split())
    assert "one after the other; split sizes are read on the host" in text


def test_buffers_of_the_caller_get_the_output_and_the_gradient() -> None:
    model = lora()
    expected = step(model, rows(), SOME)
    output, grad_input = torch.full((ROWS, OUT), 7.0), torch.full((ROWS, IN), 7.0)
    x = leaf(rows())
    kwargs = {0: {"output": output, "grad_input": grad_input}}
    y = fuser.Sequential(model)(x, torch.tensor(SOME), op_kwargs=kwargs)
    y.backward(random_tensor(y.shape, BF16, 99).float())
    assert torch.equal(output, expected["y"])
    assert torch.equal(grad_input, expected["x"])


# -- other linears and states ------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_grouped_linear_gives_its_parameters_and_channels_without_a_copy(
    mode: Any, layout: Any
) -> None:
    linear = fuser.GroupedLinear(G, IN, OUT, device="cpu", **mode, **layout)
    model = fuser.LoRAGroupedLinear.from_linear(linear, rank=RANK, alpha=3, dropout=0.1)
    for name, parameter in linear.named_parameters():
        assert getattr(model, name) is parameter
        assert not parameter.requires_grad
    assert (model.scale, model.dropout_probability) == (3 / RANK, 0.1)
    assert not any(p.is_meta for p in model.parameters())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(name.startswith("lora_") for name in trained)
    assert len(trained) == (2 if layout else 2 * G)
    extras = [torch.tensor(SOME)] + ([torch.rand(ROWS)] if linear.scale_bias else [])
    assert torch.equal(model.eval()(rows(), *extras), linear(rows(), *extras))


def test_adapters_for_the_experts_of_a_layer_read_the_same_channels() -> None:
    plain = layer()
    ops = [
        fuser.LoRAGroupedLinear.from_linear(as_grouped(op), rank=RANK)
        if isinstance(op, fuser.LoRAGroupedLinear)
        else op
        for op in plain
    ]
    model = fuser.Sequential(*ops)
    for op in (plain[1], plain[3]):
        op.reset_adapters()
    assert torch.equal(of_layer(model, rows())["y"], of_layer(plain, rows())["y"])


def as_grouped(op: fuser.LoRAGroupedLinear) -> fuser.GroupedLinear:
    """The same experts without adapters, with the same channel."""
    sizes = op.num_groups, op.in_features, op.out_features
    linear = fuser.GroupedLinear(*sizes, bias=False, device="cpu")
    linear.load_state_dict(op.state_dict(), strict=False)
    return linear.set_extra_input_channel(0, "split sizes")


@pytest.mark.parametrize("layout", ["separate", "one weight"])
def test_states_and_pickles_and_loads(layout: str) -> None:
    model, other = lora(**LAYOUTS[layout]), lora(**LAYOUTS[layout])
    other.reset_parameters()
    expected = step(model, rows(), SOME)
    assert not equal(step(other, rows(), SOME), expected)
    other.load_state_dict(model.state_dict())
    assert equal(step(other, rows(), SOME), expected)
    assert equal(step(copy.deepcopy(model), rows(), SOME), expected)
    names = [name for name in model.state_dict() if name != "_extra_state"]
    assert names == list(model.plain_state_dict()) == list(model.parameter_names)
    on_meta = fuser.LoRAGroupedLinear(
        G, IN, OUT, rank=RANK, alpha=2 * RANK, device="meta", **LAYOUTS[layout]
    )
    assert on_meta(rows(), torch.tensor(SOME)).shape == (ROWS, OUT)
    assert all(p.requires_grad is n.startswith("lora") for n, p in on_meta.named_parameters())
    on_meta.load_state_dict(model.state_dict(), assign=True)
    assert equal(step(on_meta, rows(), SOME), expected)


@pytest.mark.parametrize("layout", ["separate", "one weight"])
def test_a_merged_op_is_a_grouped_linear_with_the_merged_weight(layout: str) -> None:
    model = lora(dropout=0.3, **LAYOUTS[layout])
    before, first = copy.deepcopy(model), step(model, rows(), SOME)
    merged = model.merged_weight()
    assert not any(one.requires_grad for one in merged)
    kinds = [each(model, kind) for kind in ("weight", "lora_A", "lora_B")]
    for one, (w, a, b) in zip(merged, zip(*kinds, strict=True), strict=True):
        exact = w.double() + model.scale * (b.double() @ a.double())
        torch.testing.assert_close(one.double(), exact, rtol=1e-6, atol=1e-6)
    model.merge()
    linear = fuser.GroupedLinear(G, IN, OUT, device="cpu", **LAYOUTS[layout])
    linear.load_state_dict(model.state_dict())
    assert all(map(torch.equal, each(linear, "weight"), merged))
    linear.requires_grad_(False)
    for _ in range(3):
        assert equal(step(model, rows(), SOME), step(linear, rows(), SOME))
    text = str(fuser.Sequential(model).plan(leaf(rows()), torch.tensor(SOME)))
    assert "addmm" not in text
    with pytest.raises(RuntimeError, match=r"unmerge\(\) first"):
        model.load_state_dict(before.state_dict())
    model.unmerge()
    model.load_state_dict(before.state_dict())
    assert equal(step(model, rows(), SOME), first)
    with fuser.quantized_model_init(recipe=recipes.Float8CurrentScaling()):
        quantized = lora()
    with pytest.raises(
        fuser.StateError,
        match=said("lora-adapters-whose-steps-what", "LoRAGroupedLinear(4, 32, 128)"),
    ):
        quantized.merge()


# -- refusals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (
            {"rank": 0},
            fuser.InputError,
            said("parameters-positive", "LoRAGroupedLinear", "rank", 0),
        ),
        ({"rank": 2.5}, fuser.InputTypeError, said("routing-takes-int", None, "rank")),
        (
            {"rank": 2, "num_groups": 0},
            fuser.InputError,
            said("parameters-positive", None, "num_groups", 0),
        ),
        (
            {"rank": 2, "dropout": 1.5},
            fuser.InputError,
            said("lora-adapters-dropout-between-0", None, 1.5),
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
        fuser.LoRAGroupedLinear(
            **{"num_groups": 2, "in_features": 8, "out_features": 8, **arguments}
        )


def test_what_is_no_grouped_linear_is_refused_and_stays_as_it_is() -> None:
    layer_ = fuser.modules.GroupedLinear(2, 4, 4)
    others: list[Any] = [torch.nn.Linear(4, 4), fuser.Linear(4, 4), layer_, lora()]
    for linear in others:
        trained = [p.requires_grad for p in linear.parameters()]
        with pytest.raises(
            fuser.InputError,
            match=said(
                "lora-grouped-linear-takes-fuser-op", None, holds(f".{type(linear).__name__}")
            ),
        ):
            fuser.LoRAGroupedLinear.from_linear(linear, rank=2)
        assert [p.requires_grad for p in linear.parameters()] == trained
    linear = fuser.GroupedLinear(2, 4, 4)
    with pytest.raises(fuser.InputError, match=said("parameters-positive", None, "rank", 0)):
        fuser.LoRAGroupedLinear.from_linear(linear, rank=0)
    assert linear.weight0.requires_grad


def test_wrong_calls_are_sentences_and_the_next_call_works() -> None:
    model = lora()
    expected = step(model, rows(), SOME)
    for x, splits, sentence in (
        (rows(), [ROWS, 1, 0, 0], said("grouped-sum-more-rows", 97, 96)),
        (
            rows(),
            [1, 2, 3],
            said("grouped-linear-split-each-groups", "LoRAGroupedLinear(4, 32, 128)", (3,)),
        ),
        (rows()[:, 1:], SOME, said("grouped-linear-shape-last-dimension", None, (96, 31), 32)),
    ):
        with pytest.raises(fuser.InputError, match=sentence):
            model(x, torch.tensor(splits))
    held, model.lora_A1 = model.lora_A1, torch.nn.Parameter(torch.ones(RANK + 1, IN))
    with pytest.raises(
        fuser.InputError, match=said("grouped-parameters-shape", None, "lora_A1", (5, 32), (4, 32))
    ):
        model(rows(), torch.tensor(SOME))
    model.lora_A1 = held
    assert equal(step(model, rows(), SOME), expected)
