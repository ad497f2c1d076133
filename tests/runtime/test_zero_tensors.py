"""Tensors whose memory does not hold their values, on kernels: zeros without memory, lazy signs.

Forward-mode and complex formulas of torch return zero gradients without memory, and views whose
values are negated when they are read. Kernels read memory. The same tensors in memory are the
yardstick, in a model without recordings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pipeline_kernels import on_kernels
from said import said

import fuser
from fuser import recipe as recipes
from fuser.runtime.recorded import RecordedPasses

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16 = torch.bfloat16
LIKE: dict[str, Any] = {"dtype": BF16}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with on_kernels():
        yield


def zeros_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def negated_lazily(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(tensor)


IN_MEMORY = {zeros_without_memory: torch.zeros_like, negated_lazily: torch.neg}
MODELS: dict[str, Callable[[], fuser.Sequential]] = {
    "pointwise": lambda: fuser.Sequential(fuser.GELU(), fuser.Bias(32, **LIKE), fuser.GELU()),
    "norm": lambda: fuser.Sequential(fuser.RMSNorm(32, **LIKE)),
    "linear": lambda: fuser.Sequential(fuser.Linear(32, 32, **LIKE), fuser.GELU()),
    "extra input": lambda: fuser.Sequential(fuser.AddExtraInput(), fuser.RMSNorm(32, **LIKE)),
    "extra output": lambda: fuser.Sequential(fuser.MakeExtraOutput(), fuser.LayerNorm(32, **LIKE)),
    "quantized": lambda: fuser.Sequential(fuser.Quantize(True, True), fuser.Linear(32, 32, **LIKE)),
}
RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
}
CASES = [
    *((name, "none") for name in MODELS if name != "quantized"),
    *((name, recipe) for name in ("linear", "quantized") for recipe in ("delayed", "current")),
]


def run(model: Any, place: str, as_given: Callable[..., torch.Tensor], recipe: Any) -> list[Any]:
    """Results and gradients; the tensor at ``place`` is given by ``as_given``."""
    generator = torch.Generator().manual_seed(0)

    def given(name: str, shape: Any) -> torch.Tensor:
        tensor = torch.randn(shape, generator=generator).to(BF16)
        return as_given(tensor) if name in place else tensor

    x = given("input", (64, 32)).detach().requires_grad_()
    count = sum(isinstance(op, fuser.AddExtraInput) for op in model)
    extras = [given("extra input", (64, 32)).detach().requires_grad_() for _ in range(count)]
    params = list(model.parameters())
    before = [parameter.data for parameter in params]
    for parameter in params if place == "parameters" else ():
        parameter.data = as_given(parameter.data)
    with fuser.autocast(recipe is not None, recipe=recipe):
        results = model(x, *extras)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [given("gradients", y.shape) for y in results])
    found = [*results, x.grad, *(t.grad for t in (*extras, *params))]
    for parameter, data in zip(params, before, strict=True):
        parameter.data, parameter.grad = data, None
    return [tensor if tensor is None else tensor.detach().clone() for tensor in found]


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["input and extra input", "gradients", "parameters"])
@pytest.mark.parametrize("as_given", IN_MEMORY, ids=lambda function: function.__name__)
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_tensor_without_its_values_in_memory_counts_as_one_with_them(
    name: str,
    recipe: str,
    as_given: Callable[..., torch.Tensor],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MODELS[name]()
    for _ in range(3):
        run(model, "", as_given, RECIPES[recipe])  # so that the layout in memory is recorded
    other = copy.deepcopy(model)
    found = run(model, place, as_given, RECIPES[recipe])
    monkeypatch.setattr(RecordedPasses, "find", lambda self, *_: None)
    expected = run(other, place, IN_MEMORY[as_given], RECIPES[recipe])
    for one, exact in zip(found, expected, strict=True):
        assert (one is None) == (exact is None)
        assert one is None or torch.equal(one, exact)


def test_memory_that_was_freed_is_refused_with_a_sentence_in_a_recorded_call() -> None:
    model, x = MODELS["norm"](), torch.randn(64, 32).to(BF16)
    expected = [model(x) for _ in range(4)][-1]
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(fuser.InputTypeError, match=said("arguments-memory-freed-other")):
        model(freed)
    assert torch.equal(model(x), expected)
