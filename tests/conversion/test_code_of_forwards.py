"""What the code of a traced forward does around its steps, and names: contexts and globals."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convert import HIDDEN, data, pipelines_run
from torch import nn
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.conversion.converted import runner_of

SCALE = 1.5
SETTINGS = types.ModuleType("settings_of_a_test")
SETTINGS.SCALE = 1.5


class Settings:
    SCALE = 1.5


HELD = types.SimpleNamespace(SCALE=1.5)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Scaled(nn.Module):
    """A linear, an activation and a linear, whose result is scaled in one of these ways."""

    factor = 1.5
    shadowed = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.shadowed = 1.5

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(torch.relu(self.a(x)))
        return y


class ByGlobal(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(x) * SCALE


class ByFunction(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.middle(x))


class ByInnerFunction(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda y: y * SCALE)(self.middle(x))


class ByModule(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.middle(x) * SETTINGS.SCALE
        return y


class ByClass(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(x) * Settings.SCALE


class ByObject(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.middle(x) * HELD.SCALE
        return y


class ByAttributeOfItsClass(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(x) * self.factor


class ByMethod(Scaled):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.middle(x))


class ByProperty(Scaled):
    @property
    def scale(self) -> float:
        return SCALE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(x) * self.scale


class Branching(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(x) if SCALE == 1.5 else self.b(self.a(x))


HERE = sys.modules[__name__]
GLOBALS: dict[type[Scaled], tuple[Any, str]] = {
    ByGlobal: (HERE, "SCALE"),
    ByFunction: (HERE, "SCALE"),
    ByInnerFunction: (HERE, "SCALE"),
    ByModule: (SETTINGS, "SCALE"),
    ByClass: (Settings, "SCALE"),
    ByObject: (HELD, "SCALE"),
    ByAttributeOfItsClass: (ByAttributeOfItsClass, "factor"),
    ByMethod: (HERE, "SCALE"),
    ByProperty: (HERE, "SCALE"),
    Branching: (HERE, "SCALE"),
}


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("cls", GLOBALS, ids=lambda cls: cls.__name__)
def test_what_the_code_names_counts_as_it_is_now(
    cls: type[Scaled], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, plain, x = cls(), cls(), data()
    plain.load_state_dict(model.state_dict())
    assert len(fuser.convert(model).converted) == 1
    assert pipelines_run(model, x) == 1
    if is_compiled:
        model.compile(backend="eager", fullgraph=True)
    before = model(x)
    torch.testing.assert_close(before, plain(x), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(*GLOBALS[cls], 2.5)
    assert not torch.allclose(plain(x), before, atol=1e-3)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)


class Shadowed(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(x) * self.shadowed


def test_an_attribute_of_a_class_that_the_object_has_too_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Shadowed(), data()
    fuser.convert(model)
    assert pipelines_run(model, x) == 1
    monkeypatch.setattr(Scaled, "shadowed", 3.0)
    assert pipelines_run(model, x) == 1


def test_the_global_that_was_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ByGlobal()
    fuser.convert(model)
    unit = runner_of(model).unit
    assert unit.refusal(model) is None
    monkeypatch.setattr(HERE, "SCALE", 2.5)
    assert unit.refusal(model) == f"SCALE of {__name__} was changed"


class InContext(nn.Module):
    """Two linears, the second in a context, and a third after it."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.context = context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        with self.context():
            z: torch.Tensor = self.b(y)
        return z


class ByDecorator(InContext):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        @fuser.autocast(enabled=False)
        def last(y: torch.Tensor) -> torch.Tensor:
            z: torch.Tensor = self.b(y)
            return z

        return last(torch.relu(self.a(x)))


class InCheckpoint(InContext):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.b, torch.relu(self.a(x)), use_reentrant=False)
        return y


CONTEXTS: dict[str, Callable[[], nn.Module]] = {
    "no quantization": lambda: InContext(lambda: fuser.autocast(enabled=False)),
    "saved on a CPU": lambda: InContext(torch.autograd.graph.save_on_cpu),
    "none": lambda: InContext(contextlib.nullcontext),
    "decorator": lambda: ByDecorator(contextlib.nullcontext),
    "checkpoint": lambda: InCheckpoint(contextlib.nullcontext),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_forward_with_a_context_around_a_step_stays(name: str) -> None:
    model = nn.Sequential(CONTEXTS[name]())
    report = fuser.convert(model, recipe="current", keep=())
    assert [row.path for row in report.converted] == ["0.a", "0.b"]
    traced = fuser.convert(CONTEXTS[name]())
    assert not traced.converted


class Outer(nn.Module):
    """Quantized layers, and a chain after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(fuser.ops.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(recipe=fuser.recipe.Float8CurrentScaling()):
            for layer in self.layers:
                x = layer(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y


def test_the_recipe_around_layers_is_not_lost() -> None:
    torch.manual_seed(0)
    model, x = Outer(), data()
    expected = model(x)
    fuser.convert(model, linears="all", keep=())
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


class Unquantized(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(enabled=False):
            return super().forward(input)


def test_a_linear_that_enters_a_context_stays() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Unquantized(HIDDEN, HIDDEN)), data()
    expected = model(x)
    assert not fuser.convert(model, recipe="current", keep=()).converted
    assert torch.equal(model(x), expected)
