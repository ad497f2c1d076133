"""Experts without rows, and rows without an expert, where unwritten memory is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import every_format as formats
import pytest
import torch
from one_launch_experts import one_by_one
from oracles import random_tensor

import fuser
from fuser.gemm import grouped

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

G, IN, OUT, ROWS = 4, 32, 128, 96
BF16, FP32 = torch.bfloat16, torch.float32
SPLITS = {
    "the first and the last": (0, 63, 33, 0),
    "between, and a tail": (33, 0, 0, 40),
    "all": (0, 0, 0, 0),
}
RECIPES: dict[str, Any] = {
    "none": None,
    **{name: formats.deterministic(recipe) for name, recipe in formats.RECIPES.items()},
}
WAYS = ("as planned", "one by one", "at once")
LAYOUTS: dict[str, dict[str, Any]] = {
    "separate": {},
    "one weight": {"single_grouped_weight": True},
    "scaled bias": {"scale_bias": True},
    "no bias": {"bias": False},
}
# Of the largest value: the steps of 4 bits, of 8, and of 32.
BOUNDS = {"nvfp4": 0.5, "none": 1e-5}


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """torch fills what ``torch.empty`` returns."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    patch.undo()


def run_as(way: str, patch: pytest.MonkeyPatch) -> None:
    if way != "as planned":
        one_by_one(patch)
    if way == "at once":
        patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: dtype is BF16)


def with_nan(x: torch.Tensor, count: int) -> torch.Tensor:
    x = x.clone()
    x[count:] = float("nan")
    return x


def each(model: Any, kind: str, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What each expert has of a kind, in values by the names of parameters."""
    names = [kind] if kind in values else [f"{kind}{g}" for g in range(G)]
    found = [values[name] for name in names if name in values]
    return list(found[0]) if names == [kind] else found


def step(
    model: Any, splits: tuple[int, ...], recipe: Any, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The output and all gradients; rows after the last group are NaN in the inputs."""
    count = sum(splits)
    x = with_nan(random_tensor((ROWS, IN), dtype, 1), count).requires_grad_()
    scales = with_nan(random_tensor((ROWS,), FP32, 2).abs(), count).requires_grad_()
    extras = [torch.tensor(splits), *([scales] if model.scale_bias else [])]
    model.zero_grad()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, *extras)
    y.backward(with_nan(random_tensor(y.shape, dtype, 3), count))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {"y": y.detach(), "x": x.grad, **grads}
    return {**found, **({"scales": scales.grad} if model.scale_bias else {})}


def formula(model: Any, splits: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """:func:`step` of a loop in plain torch, in fp64."""
    x = random_tensor((ROWS, IN), dtype, 1).double().requires_grad_()
    scales = random_tensor((ROWS,), FP32, 2).abs().double().requires_grad_()
    dy = random_tensor((ROWS, OUT), dtype, 3).double()
    values = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    weights, biases = each(model, "weight", values), each(model, "bias", values)
    adapters = [each(model, kind, values) for kind in ("lora_A", "lora_B")]
    parts = []
    for g, part in enumerate(x[: sum(splits)].split(splits)):
        y = part @ weights[g].T
        of = scales[: sum(splits)].split(splits)[g]
        if biases:
            y = y + biases[g] * (of[:, None] if model.scale_bias else 1)
        if adapters[0]:
            y = y + model.scale * part @ adapters[0][g].T @ adapters[1][g].T
        parts.append(y)
    y = torch.cat([*parts, torch.zeros(ROWS - sum(splits), OUT, dtype=torch.float64)])
    y.backward(dy)
    zeros = {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in values.items()}
    found = {"y": y.detach(), "x": x.grad, "scales": scales.grad, **zeros}
    return {n: torch.zeros(ROWS) if v is None else v for n, v in found.items()}


def assert_like(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float
) -> None:
    for name, value in found.items():
        assert value.isfinite().all(), name
        error = (value.double() - expected[name]).abs().max()
        assert error <= bound * expected[name].abs().max(), name
        if name not in ("y", "x", "scales"):
            # To the last bit zero where nothing was summed.
            of_experts = value if value.shape[0] == G else value[None]
            wanted = expected[name] if value.shape[0] == G else expected[name][None]
            for one, other in zip(of_experts, wanted, strict=True):
                assert bool(one.any()) is bool(other.any()), name


def model_of(adapters: bool, layout: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    options = {"dtype": dtype, "device": "cpu", **LAYOUTS[layout]}
    if adapters:
        model: Any = fuser.LoRAGroupedLinear(G, IN, OUT, rank=8, alpha=16, **options)
    else:
        model = fuser.GroupedLinear(G, IN, OUT, **options)
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            p.copy_(random_tensor(p.shape, p.dtype, seed) * 0.3)
    return model


@pytest.mark.sampled(most=14)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
def test_experts_without_rows_get_zeros_and_others_their_own(
    adapters: bool, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as(way, monkeypatch)
    dtypes = (FP32, BF16) if name == "none" else (BF16,)
    for dtype in dtypes:
        bound = BOUNDS.get(name, 0.15) if dtype is FP32 else max(BOUNDS.get(name, 0.15), 0.03)
        for layout in LAYOUTS:
            model = model_of(adapters, layout, dtype)
            for splits in SPLITS.values():
                exact = formula(model, splits, dtype)
                assert_like(step(model, splits, RECIPES[name], dtype), exact, bound)


STORED = [(name, "separate") for name in formats.RECIPES]
STORED += [(name, "one weight") for name in formats.RECIPES if name not in ("delayed", "rowwise")]


@pytest.mark.parametrize(("name", "layout"), STORED)
def test_so_do_experts_whose_weights_are_quantized(name: str, layout: str) -> None:
    with fuser.quantized_model_init(recipe=RECIPES[name]):
        model = model_of(False, layout, BF16)
    assert any(isinstance(p, fuser.QuantizedTensor) for p in model.parameters())
    for splits in SPLITS.values():
        exact = formula_of_values(model, splits)
        assert_like(step(model, splits, RECIPES[name], BF16), exact, BOUNDS.get(name, 0.15))


def formula_of_values(model: Any, splits: tuple[int, ...]) -> dict[str, torch.Tensor]:
    plain = model_of(False, "one weight" if model.single_grouped_weight else "separate", BF16)
    with torch.no_grad():
        for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
            mine.copy_(its.dequantize() if isinstance(its, fuser.QuantizedTensor) else its)
    return formula(plain, splits, BF16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", ["none", "current", "mxfp8"])
def test_gradients_that_add_up_stay_where_an_expert_has_no_rows(
    name: str, delayed: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as(way, monkeypatch)
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": BF16, "device": "cpu", "bias": False}
    model = fuser.GroupedLinear(
        *(G, IN, OUT), accumulate_into_main_grad=True, delay_wgrad_compute=delayed, **options
    )
    splits = SPLITS["between, and a tail"]
    for parameter in model.parameters():
        parameter.main_grad = torch.full(parameter.shape, 2.0)
    for turn in (1, 2):
        step(model, splits, RECIPES[name], BF16)
        if delayed:
            model.backward_dw()
        x = random_tensor((ROWS, IN), BF16, 1).float()[: sum(splits)].split(splits)
        dy = random_tensor((ROWS, OUT), BF16, 3).float()[: sum(splits)].split(splits)
        for g, parameter in enumerate(model.parameters()):
            found = parameter.main_grad
            product = turn * dy[g].T @ x[g]
            limit = 0.15 * float(product.abs().max())
            torch.testing.assert_close(found, 2.0 + product, rtol=0.0, atol=limit)
            assert splits[g] or torch.equal(found, torch.full(found.shape, 2.0))
