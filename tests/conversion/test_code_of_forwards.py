"""What the code of a traced forward does around its steps, and names: contexts and globals."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from test_convert import HIDDEN, data, pipelines_run
from torch import nn
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.conversion.converted import runner_of
from fuser.conversion.held_objects import recorded_reads
from fuser.conversion.unit import unit_of

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
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    if is_compiled:
        model.compile(backend="eager", fullgraph=True)
        compiled(x)
    before = model(x)
    torch.testing.assert_close(before, plain(x), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(*GLOBALS[cls], 2.5)
    assert not torch.allclose(plain(x), before, atol=1e-3)
    if is_compiled and torch.allclose(compiled(x), before, atol=1e-3):
        pytest.skip("torch.compile of this torch has no guard on attributes of classes")
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


class Child(nn.Module):
    """A step of other forwards, with what they may read of it."""

    def __init__(self, gain: float = 1.0, layers: int = 2) -> None:
        super().__init__()
        self.gain = gain
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0, **others: Any) -> torch.Tensor:
        y = torch.cumsum(x, 1) * scale
        for layer in self.layers:
            y = torch.softmax(layer(y), -1) * y
        return y + sum(float(value) for value in others.values())


class Owner(nn.Module):
    """A chain, and a child between; subclasses have the forwards."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.child = Child(**options)
        self.register_parameter("gamma", None)

    def chain(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(torch.relu(self.a(x)))
        return y


class Holding(Owner):
    """One that holds objects, and is like no other for it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Any] = {}
        self.weights = numpy.ones(1)


class ReadsItsChild(Owner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(self.child(x)) * self.child.gain


class LoopsOverItsChild(Owner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.child.layers:
            x = torch.relu(layer(x))
        return self.chain(x)


class Scales(Owner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.chain(self.child(x))
        return y if self.gamma is None else y * self.gamma


def is_as_plain(model: nn.Module, plain: nn.Module, *args: Any, **keywords: Any) -> bool:
    torch.manual_seed(1)
    y = model(*args, **keywords)
    torch.manual_seed(1)
    expected = plain(*args, **keywords)
    if isinstance(y, tuple):
        (y, held), (expected, others) = y, expected
        assert held == others
    return torch.allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", [ReadsItsChild, LoopsOverItsChild])
@pytest.mark.parametrize(
    ("one", "other"), [({"gain": 1.0}, {"gain": 2.0}), ({"layers": 1}, {"layers": 3})], ids=str
)
def test_modules_that_differ_in_a_child_compute_with_their_own(
    cls: type[Owner], one: Any, other: Any
) -> None:
    torch.manual_seed(0)
    for first, second in ((one, other), (other, one)):
        plain, x = nn.Sequential(cls(**first), cls(**second)), data()
        model = copy.deepcopy(plain)
        assert fuser.convert(model, keep=()).converted
        assert is_as_plain(model, plain, x)
        assert cls is LoopsOverItsChild or pipelines_run(model, x) == 2


@pytest.mark.parametrize("change", ["gain", "gamma", "forward of torch"])
def test_a_change_of_what_a_forward_reads_counts(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain: Owner = Scales() if change == "gamma" else ReadsItsChild()
    model, x = copy.deepcopy(plain), data()
    assert len(fuser.convert(model).converted) == 1
    assert pipelines_run(model, x) == 1
    for each in (plain, model):
        if change == "gain":
            each.child.gain = 3.0
        elif change == "gamma":
            each.gamma = nn.Parameter(torch.full((HIDDEN,), 3.0))
    if change == "forward of torch":
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * x @ self.weight.t())
    assert is_as_plain(model, plain, x)
    assert pipelines_run(model, x) == 0


class ReadsKeywords(Owner):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        scale: float = kwargs.get("scale", 1.0)
        return self.chain(self.child(x)) * scale


class AsksForKeywords(Owner):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.chain(self.child(x)) * (2.0 if "scale" in kwargs else 1.0)


class DropsKeywords(Owner):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("scale")
        return self.chain(self.child(x, **kwargs))


class PassesKeywords(Owner):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.chain(self.child(x, **kwargs))


class DrawsByPython(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.chain(x if random.random() < 1e-9 else self.child(x))


class DrawsByNumpy(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.chain(x if numpy.random.rand() < 1e-9 else self.child(x))


class DrawsByTorch(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.chain(x if torch.rand(1).item() < 1e-9 else self.child(x))


class PassesItsDict(Holding):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.chain(self.child(x, others_of_it=self.cache.get("none", 0)) + len(self.cache))


class PassesItsList(Holding):
    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        return self.chain(self.child(x)), self.cache


class AsksForNone(Owner):
    def forward(self, x: torch.Tensor, scale: Any = None, other: Any = None) -> torch.Tensor:
        is_one = (scale is None) is not (other is None)
        return self.chain(self.child(x)) * (2.0 if is_one else 1.0)


class AsksForTheClass(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.chain(self.child(x)) * (2.0 if isinstance(x, torch.Tensor) else 1.0)


class AsksForTheMode(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.chain(self.child(x)) * (1.0 if torch.is_autocast_enabled("cpu") else 2.0)


class HasAnotherMode(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.chain(nn.functional.dropout(self.child(x), 0.5, self.child.drop.training))


class SetsAround(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        self.child.gain = 3.0
        y = self.chain(self.child(x))
        self.child.gain = 1.0
        return y


class CallsOneWithACall(Owner):
    class Calling(Child):
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            return 2 * super().__call__(*args, **keywords)

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Calling()

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.chain(self.child(x))


class ReadsAnArray(Holding):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.chain(self.child(x)) * float(self.weights[0])


class CatchesErrors(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        try:
            return self.chain(self.child(x))
        finally:
            COUNTS.append(1)


class Appends(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        COUNTS.append(1)
        return self.chain(self.child(x))


class Prints(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        print("called")
        return self.chain(self.child(x))


class SetsGlobals(Owner):
    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        global LAST
        LAST = x
        return self.chain(self.child(x))


COUNTS: list[int] = []
LAST: Any = None
KEYWORDS: dict[type[Owner], dict[str, Any]] = {
    ReadsKeywords: {"scale": 3.0},
    AsksForKeywords: {"scale": 3.0},
    DropsKeywords: {"scale": 3.0},
    AsksForNone: {"scale": 1.0},
}
SEVERAL: dict[type[Owner], str] = {
    ReadsKeywords: "its forward reads its **kwargs",
    AsksForKeywords: "its forward reads its **kwargs",
    DropsKeywords: "its forward reads its **kwargs",
    DrawsByPython: "its forward calls random",
    DrawsByNumpy: "its forward draws random numbers",
    DrawsByTorch: "its forward calls rand",
    AsksForNone: "its forward asks whether a variable is None",
    AsksForTheClass: "its forward asks for the class of a value",
    AsksForTheMode: "its forward calls is_autocast_enabled",
    HasAnotherMode: "its forward reads the mode of another module",
    PassesItsList: "its forward passes on cache, which it holds",
    SetsAround: "its forward sets attributes",
    CallsOneWithACall: "child has a __call__ of its own",
    ReadsAnArray: "it reads values from weights, which may change",
    CatchesErrors: "its forward catches errors",
    Appends: "its forward calls append of list",
    Prints: "its forward calls print of builtins",
    SetsGlobals: "its forward sets globals",
}


@pytest.mark.parametrize("cls", SEVERAL, ids=lambda cls: cls.__name__)
def test_a_forward_that_does_more_than_a_graph_stays(cls: type[Owner]) -> None:
    torch.manual_seed(0)
    plain, x, keywords = cls(), data(), KEYWORDS.get(cls, {})
    plain.child.drop.eval()
    model, before = copy.deepcopy(plain), (random.getstate(), torch.get_rng_state())
    assert not fuser.convert(model).converted
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    with recorded_reads():
        assert SEVERAL[cls] in str(unit_of(model, []))
    assert is_as_plain(model, plain, x, **keywords)


@pytest.mark.parametrize("cls", [PassesKeywords, PassesItsDict])
def test_a_forward_that_does_no_more_is_converted(cls: type[Owner]) -> None:
    torch.manual_seed(0)
    plain, x = cls(), data()
    model, keywords = copy.deepcopy(plain), {"scale": 3.0} if cls is PassesKeywords else {}
    assert len(fuser.convert(model).converted) == 1
    assert pipelines_run(model, x) == 1
    assert is_as_plain(model, plain, x, **keywords)


class Dropouts(Owner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(torch.relu(self.a(self.child.drop(x))))
        y: torch.Tensor = self.child.drop(h) + self.child.drop(x)
        return y


def test_dropouts_draw_in_the_order_of_the_forward() -> None:
    torch.manual_seed(0)
    plain, x = Dropouts(), data()
    model = copy.deepcopy(plain)
    fuser.convert(model)
    assert is_as_plain(model, plain, x)


class Instrumented(nn.Linear):
    """A linear with the values of torch's, in one of these ways."""

    def __init__(self, way: str) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.way, self.last = way, None

    def forward(self, input: torch.Tensor) -> Any:
        x: Any = input
        if self.way == "scales its gradient":
            x = 0.1 * x + (0.9 * x).detach()
        elif self.way == "keeps its input":
            self.last = x.detach()
        elif self.way == "clamps":
            x = x.clamp(-1e3, 1e3)
        elif self.way == "pools" and x.dim() == 3:
            x = x.mean(1)
        elif self.way == "in fp32":
            return nn.functional.linear(x.float(), self.weight.float(), self.bias.float())
        elif self.way == "frozen":
            return nn.functional.linear(x, self.weight.detach(), self.bias)
        return nn.functional.linear(x, self.weight, self.bias)


WAYS = ["scales its gradient", "keeps its input", "clamps", "pools", "in fp32", "frozen"]


@pytest.mark.parametrize("way", WAYS)
def test_a_linear_that_only_has_the_values_of_one_stays(way: str) -> None:
    model = nn.Sequential(Instrumented(way), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
    report = fuser.convert(model, linears="all", keep=())
    assert [row.text for row in report.converted] == ["ReLU, 2"]


def test_a_linear_of_another_class_with_its_values_is_converted() -> None:
    model = nn.Sequential(Instrumented("as torch's"), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
    assert [row.text for row in fuser.convert(model).converted] == ["0, ReLU, 2"]


class Frozen(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mean = input.mean(-1, keepdim=True).detach()
        rstd = (input.var(-1, correction=0, keepdim=True) + self.eps).rsqrt().detach()
        return (input - mean) * rstd * self.weight + self.bias


def test_a_norm_with_other_gradients_stays() -> None:
    model = nn.Sequential(Frozen(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    assert not fuser.convert(model, norms="all").converted


class Recorder(nn.ReLU):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return super().forward(input)


def test_an_activation_that_keeps_a_list_stays() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Recorder(), nn.Linear(HIDDEN, HIDDEN))
    assert not fuser.convert(model).converted
    model(data())
    assert model[1].seen == [1]
