"""A compiled converted model computes what its modules compute now, as a plain compiled one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_convert import HIDDEN, WIDTH, data
from torch import nn
from torch.nn import functional as F

import fuser
from fuser.conversion.converted import set_conversion


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(HIDDEN) + 0.5), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = x.pow(2).mean(-1, keepdim=True)
        y: torch.Tensor = self.weight * (x * torch.rsqrt(squares + self.variance_epsilon))
        return y


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.down, self.act, self.drop = nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Dropout(0.0)
        self.rate = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.down(self.act(self.gate(x)) * self.up(x)))
        y: torch.Tensor = F.dropout(h, p=self.rate, training=self.training)
        return y


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


def halved(self: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = 0.5 * self.weight * x
    return y


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "nothing": lambda layer, patch: None,
    "eps": lambda layer, patch: setattr(layer.norm, "variance_epsilon", 0.5),
    "a forward of an activation": lambda layer, patch: setattr(
        layer.mlp.act, "forward", lambda x: 2 * x
    ),
    "a forward of a linear": lambda layer, patch: setattr(
        layer.mlp.down, "forward", lambda x: x[..., :HIDDEN]
    ),
    "p of a dropout": lambda layer, patch: setattr(layer.mlp.drop, "p", 0.5),
    "p of the function": lambda layer, patch: setattr(layer.mlp, "rate", 0.5),
    "the forward of a class": lambda layer, patch: patch.setattr(Norm, "forward", halved),
    "the activation": lambda layer, patch: setattr(layer.mlp, "act", nn.Tanh()),
}


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def seeded(call: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    y: torch.Tensor = call(x)
    return y


def layers() -> tuple[Any, torch.Tensor]:
    """A model of one layer, the same at each call, and its input."""
    torch.manual_seed(0)
    return nn.Sequential(Layer()), data().detach()


@functools.cache
def plain_outputs(change: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the model that is not converted: before a change, and of a graph made after it."""
    plain, x = layers()
    before = seeded(plain, x)
    with pytest.MonkeyPatch.context() as patch:
        for layer in plain:
            CHANGES[change](layer, patch)
        return before, seeded(torch.compile(plain, backend="eager"), x)


@pytest.mark.sampled
@pytest.mark.parametrize("when", ["before compile", "after a compiled call"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_counts(change: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, expected = plain_outputs(change)
    model, x = layers()
    assert fuser.convert(model).converted
    compiled = torch.compile(model, backend="eager")
    if when == "after a compiled call":
        torch.testing.assert_close(seeded(compiled, x), before, rtol=1e-5, atol=1e-5)
    for layer in model:
        CHANGES[change](layer, monkeypatch)
    for call in (compiled, compiled, model):
        torch.testing.assert_close(seeded(call, x), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(expected, before, atol=1e-4) == (change == "nothing")


def test_a_module_given_to_torch_compile_runs_its_pipelines_outside_of_graphs() -> None:
    torch.manual_seed(0)
    layer, x = Layer(), data()
    fuser.convert(layer, keep=())
    with fuser.autocast(recipe=fuser.recipe.Float8CurrentScaling()):
        expected = layer(x)
        compiled = torch.compile(layer, backend="eager")
        assert torch.equal(layer(x), expected)
        compiled(x)
        for each in (layer, copy.deepcopy(layer), copy.deepcopy(compiled)):
            assert torch.equal(each(x), expected)


def test_a_graph_without_a_recipe_is_none_of_the_same_module_with_one() -> None:
    """Of another module too, if its objects are where those of the first were."""
    model, x = MLP(), torch.randn(8, HIDDEN)
    fuser.convert(model, keep=())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain = compiled(x)
    set_conversion(model, None, fuser.recipe.Float8CurrentScaling())
    quantized = compiled(x)
    torch.testing.assert_close(quantized, model(x), rtol=1e-5, atol=1e-5)
    assert (quantized - plain).norm() > 0.01 * plain.norm()
