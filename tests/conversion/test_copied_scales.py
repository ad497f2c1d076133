"""Copies of converted models continue with the scales of delayed scaling."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fuser

HIDDEN, WIDTH, EXPERTS = 32, 64, 3
RECIPE = fuser.recipe.DelayedScaling(amax_history_len=4)

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")


class GatedMLP(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        y: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return y


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(EXPERTS):
            rows, choices = torch.where(top_k_index == e)
            gate, up = F.linear(hidden_states[rows], self.gate_up_proj[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[e])
            out.index_add_(0, rows, y * top_k_weights[rows, choices, None])
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, experts = self.router(x).softmax(-1).topk(2, dim=-1)
        y: torch.Tensor = self.experts(x, experts, probs)
        return y


def tied() -> nn.Module:
    model = nn.Sequential(GatedMLP(), GatedMLP())
    model[1].get_submodule("up").weight = model[0].get_submodule("up").weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual and gate": lambda: nn.Sequential(GatedMLP()),
    "partly converted": lambda: nn.Sequential(GatedMLP(), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)),
    "experts": Routed,
    "tied": tied,
}


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "saved": saved_and_loaded,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "average": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


def made(name: str, weights: float = 0.05) -> tuple[Any, torch.Tensor]:
    """A converted model of weights so small that scale 1 leaves few of their bits; its input."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(weights)
    fuser.convert(model, recipe=RECIPE, keep=())
    return model, torch.randn(16, HIDDEN)


def step(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert leaf.grad is not None
    return {"y": y.detach(), "x": leaf.grad, **grads}


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("copied", COPIES)
def test_copies_continue_with_the_scales(copied: str, name: str) -> None:
    model, x = made(name)
    for _ in range(3):
        step(model, x)
    twin = COPIES[copied](model)
    with torch.no_grad():
        assert torch.equal(twin.eval()(x), model.eval()(x))
    model.train(), twin.train()
    for scale in (1, 40, 3):
        expected = step(model, scale * x)
        for key, value in step(twin, scale * x).items():
            assert torch.equal(value, expected[key]), key


def test_a_copy_evaluates_as_exactly_as_its_original() -> None:
    model, x = made("residual and gate")
    plain = copy.deepcopy(model)
    fuser.revert(plain)
    for _ in range(3):
        step(model, x)
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        exact = plain.double()(x.double()) - x.double()
        error = (twin(x) - x - exact).norm() / exact.norm()
    assert error < 0.1


def test_a_copy_has_a_history_of_its_own() -> None:
    model, x = made("residual and gate")
    step(model, x)
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    for _ in range(3):
        step(twin, 1000 * x)
    model.eval(), other.eval()
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("copied", ["deep copy", "pickle"])
def test_a_copy_before_the_first_step_trains_like_its_original(copied: str) -> None:
    model, x = made("residual and gate")
    twin = COPIES[copied](model)
    for _ in range(3):
        expected = step(model, x)
        assert all(torch.equal(v, expected[k]) for k, v in step(twin, x).items())


def test_a_copy_of_a_part_continues_with_its_scales() -> None:
    model, x = made("tied")
    for _ in range(3):
        step(model, x)
    part, twin = model[0].eval(), copy.deepcopy(model[0]).eval()
    with torch.no_grad():
        assert torch.equal(twin(x), part(x))


def test_a_copy_of_a_compiled_model_continues_with_the_scales() -> None:
    model, x = made("residual and gate")
    compiled: Any = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        step(compiled, x)
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        assert torch.equal(twin.eval()(x), model.eval()(x))


def test_a_second_conversion_continues_with_the_scales() -> None:
    """Also that of a copy, and of a model of which one module has changed."""
    model, x = made("tied")
    for _ in range(3):
        step(model, x)
    with torch.no_grad():
        expected = model[0].eval()(x)
        model[1].norm.eps = 0.5
        for each in (model, copy.deepcopy(model)):
            fuser.convert(each, recipe=RECIPE, keep=())
            assert torch.equal(each[0](x), expected)


def test_a_second_conversion_of_one_module_continues_with_the_scales() -> None:
    model, x = made("residual and gate")
    (alone,) = model
    fuser.convert(alone, recipe=RECIPE, keep=())
    for _ in range(3):
        step(alone, x)
    other = copy.deepcopy(alone)
    fuser.convert(alone, recipe=RECIPE, keep=())
    again, expected = step(alone, x), step(other, x)
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    fuser.revert(other)
    fuser.convert(other, recipe=RECIPE, keep=())
    assert not torch.equal(step(other, x)["y"], expected["y"])


@pytest.mark.parametrize("name", MODELS)
def test_what_is_converted_again_evaluates_with_the_scales_of_its_steps(name: str) -> None:
    model, x = made(name)
    for _ in range(3):
        step(model, x)
    x = x / 7  # of which a scale of its own would be another
    with torch.no_grad():
        expected = model.eval()(x)
        fuser.convert(model, recipe=RECIPE, keep=())
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("change", ["eps", "child"])
def test_a_copy_of_a_changed_module_is_made(change: str) -> None:
    """Such a module runs its own forward, and so does its copy."""
    model, x = made("residual and gate")
    step(model, x)
    if change == "eps":
        model[0].norm.eps = 0.5
    else:
        model[0].norm = nn.Sequential(model[0].norm)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
