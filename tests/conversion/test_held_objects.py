"""Values that a forward reads from objects, such as a config: a later change counts."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convert import data, pipelines_run
from torch import nn
from torch.nn import functional as F

import fuser
from fuser.conversion import held_objects
from fuser.conversion.modules import bare


@dataclasses.dataclass
class Config:
    alpha: float = 1.702
    unread: float = 1.0

    def twice(self) -> float:
        return 2 * self.alpha


@dataclasses.dataclass
class Slots:
    __slots__ = ("alpha",)
    alpha: float


class Property:
    def __init__(self) -> None:
        self._alpha = 1.702

    @property
    def alpha(self) -> float:
        return self._alpha


class OfClass:
    alpha = 1.702


class Attributes(dict[str, float]):
    __getattr__ = dict.__getitem__


class Called(Config):
    """Its values are those of a call, and of its length."""

    def __call__(self) -> float:
        return self.alpha

    def __len__(self) -> int:
        return int(1000 * self.alpha)


class FeedForward(nn.Module):
    """The slope of its activation is what ``read`` finds in an object."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.held, self.read = held, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        y: torch.Tensor = self.down(h * torch.sigmoid(self.read(self.held) * h))
        return y


def set_alpha(held: Any) -> None:
    held.alpha = 0.5


def by_attribute(held: Any) -> Any:
    return held.alpha


def by_item(held: Any) -> Any:
    return held["alpha"]


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (Config, by_attribute, set_alpha),
    "method": (Config, lambda held: held.twice() / 2, set_alpha),
    "slot": (lambda: Slots(1.702), by_attribute, set_alpha),
    "property": (Property, by_attribute, lambda held: setattr(held, "_alpha", 0.5)),
    "attribute of the class": (type("Own", (OfClass,), {}), by_attribute, set_alpha),
    "attribute of an attribute": (
        lambda: types.SimpleNamespace(inner=Config()),
        lambda held: held.inner.alpha,
        lambda held: set_alpha(held.inner),
    ),
    "item": (lambda: {"alpha": 1.702}, by_item, lambda held: held.update(alpha=0.5)),
    "item of an item": (
        lambda: [{"alpha": 1.702}],
        lambda held: held[0]["alpha"],
        lambda held: held[0].update(alpha=0.5),
    ),
    "attribute of an item": (
        lambda: (Config(),),
        lambda held: held[0].alpha,
        lambda held: set_alpha(held[0]),
    ),
    "dict with attributes": (
        lambda: Attributes(alpha=1.702),
        by_attribute,
        lambda held: held.update(alpha=0.5),
    ),
    "call": (Called, lambda held: held(), set_alpha),
    "length": (Called, lambda held: len(held) / 1000, set_alpha),
    "an object of torch beside": (
        lambda: types.SimpleNamespace(alpha=1.702, dtype=torch.float32),
        lambda held: held.alpha if held.dtype is torch.float32 else 0.0,
        set_alpha,
    ),
    "equal value of another type": (
        lambda: types.SimpleNamespace(alpha=1),
        lambda held: 0.5 if held.alpha is True else 1.702,
        lambda held: setattr(held, "alpha", True),
    ),
    "attribute that is missing": (
        types.SimpleNamespace,
        lambda held: getattr(held, "alpha", 1.702),
        set_alpha,
    ),
}


def pair(name: str) -> tuple[Any, Any]:
    """A model that is converted, and its plain twin with the same object."""
    make, read, _ = CASES[name]
    torch.manual_seed(0)
    model = FeedForward(make(), read)
    plain = FeedForward(model.held, read)
    plain.load_state_dict(model.state_dict())
    assert len(fuser.convert(model).converted) == 1
    return model, plain


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_what_an_object_says_now_is_computed_with(name: str, is_compiled: bool) -> None:
    if is_compiled and name == "attribute that is missing":
        pytest.skip("Dynamo has no guard that a missing attribute stays missing")
    torch._dynamo.reset()
    model, plain = pair(name)
    assert pipelines_run(model, data()) == 1
    if is_compiled:
        model.compile(backend="eager")
    before = model(data())
    torch.testing.assert_close(before, plain(data()), rtol=1e-5, atol=1e-5)
    CASES[name][2](model.held)
    assert not torch.allclose(plain(data()), before, atol=1e-3)
    torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-5)


def test_what_no_forward_reads_may_change() -> None:
    model, _ = pair("attribute")
    model.held.unread = 3.0
    assert pipelines_run(model, data()) == 1


def test_the_choice_among_implementations_of_transformers_may_change() -> None:
    def read(held: Any) -> Any:
        assert held._experts_implementation
        return held.alpha

    held = types.SimpleNamespace(alpha=1.702, _experts_implementation="eager")
    model = FeedForward(held, read)
    fuser.convert(model)
    model.held._experts_implementation = "grouped_mm"
    assert pipelines_run(model, data()) == 1
    model.held.alpha = 0.5
    assert pipelines_run(model, data()) == 0


def read_of(module: nn.Module) -> Any:
    """What a forward of a copy reads."""
    held: Any = bare(module).held
    return held.alpha


def test_reads_are_noted_in_the_innermost_context_alone() -> None:
    module: Any = nn.Module()
    config: Any = Config()
    module.held = config
    steps = ((False, "held"), (False, "alpha"))
    with held_objects.recorded_reads() as outer:
        with held_objects.recorded_reads() as inner:
            assert read_of(module) == config.alpha
        assert [read.steps for read in inner.inside(module, [""])] == [steps]
        assert outer.inside(module, [""]) == ()
        assert read_of(module) == config.alpha
        assert [read.steps for read in outer.inside(module, [""])] == [steps]
    found: Any = bare(module).held
    assert found is config


class Counting(FeedForward):
    """Each call changes the object."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held.calls = 1
        return super().forward(x)


def test_a_forward_that_writes_into_an_object_stays() -> None:
    model = Counting(Config(), by_attribute)
    (row,) = fuser.convert(model).refused
    assert "sets attributes" in row.text
    model.held.calls = 0
    model(data())
    assert model.held.calls == 1


class MaskedNorm(nn.RMSNorm):
    mask: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight * self.mask, self.eps)


class MaskedLinear(nn.Linear):
    mask: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class MaskedSiLU(nn.SiLU):
    mask: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * self.mask


MASKED: list[Callable[[], nn.Module]] = [
    lambda: MaskedNorm(64, eps=1e-5),
    lambda: MaskedLinear(64, 96),
    MaskedSiLU,
]


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("place", range(len(MASKED)), ids=["norm", "linear", "activation"])
def test_a_tensor_of_ones_that_a_norm_a_linear_or_an_activation_reads_may_be_written_to(
    place: int, is_buffer: bool
) -> None:
    model = nn.Sequential(nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))
    masked: Any = MASKED[place]()
    if is_buffer:
        masked.register_buffer("mask", torch.ones(()))
    else:
        masked.mask = torch.ones(())
    model[place] = masked
    plain: Any = copy.deepcopy(model)
    fuser.convert(model, linears="all", norms="all", keep=())
    for value in (1.0, 2.0):
        for one in (model, plain):
            one[place].mask.fill_(value)
        torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-5)


# -- copies of modules that have changed ------------------------------------------------


HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "a list": (lambda t: [t], lambda held: held[0]),
    "a dict in a list": (lambda t: [{"x": t}], lambda held: held[0]["x"]),
    "an object": (lambda t: types.SimpleNamespace(x=t), lambda held: held.x),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_tensor_in_an_object_matters_where_a_forward_reads_it(holder: str) -> None:
    hold, read = HOLDERS[holder]
    unread = FeedForward(hold(torch.ones(2)), lambda held: 1.702)
    assert len(fuser.convert(unread).converted) == 1
    slope = torch.tensor(1.702)
    read_one = FeedForward(hold(slope), read)
    plain = copy.deepcopy(read_one)
    fuser.convert(read_one)
    x = data()
    for factor in (1.0, 2.0):
        for model in (read_one, plain):
            read(model.held).fill_(factor)
        assert torch.equal(read_one(x), plain(x))


class WithNumber(nn.Module):
    """A slope, an activation that is a function, and a child."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.alpha, self.act = 1.702, torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        y: torch.Tensor = self.down(self.act(h * torch.sigmoid(self.alpha * h)))
        return y


class WithFunction(WithNumber):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.act(self.up(x)))
        return y


class WithSlope(WithNumber):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        y: torch.Tensor = self.down(h * torch.sigmoid(self.alpha * h))
        return y


def converted_again(model: nn.Module) -> nn.Module:
    with fuser.converted(model):
        pass
    return model


AGAIN: dict[str, Callable[[Any], Any]] = {
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "another conversion for a time": converted_again,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize(
    ("make", "change"),
    [(WithSlope, {"alpha": 0.5}), (WithFunction, {"act": torch.tanh})],
    ids=["number", "function"],
)
def test_a_copy_of_a_changed_module_has_the_change(
    make: Callable[[], nn.Module], change: dict[str, Any], name: str
) -> None:
    torch.manual_seed(0)
    model = make()
    plain: Any = copy.deepcopy(model)
    assert fuser.convert(model).converted
    for one in (model, plain):
        one.__dict__.update(change)
    twin = AGAIN[name](model)
    torch.testing.assert_close(twin(data()), plain(data()), rtol=1e-5, atol=1e-5)
    fuser.convert(twin)
    torch.testing.assert_close(twin(data()), plain(data()), rtol=1e-5, atol=1e-5)


def test_a_change_while_converted_otherwise_counts_afterwards() -> None:
    model: Any = WithSlope()
    plain: Any = copy.deepcopy(model)
    fuser.convert(model)
    with fuser.converted(model):
        model.alpha = plain.alpha = 0.5
    torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", [torch.tanh, F.relu6], ids=["builtin", "function"])
def test_a_compiled_module_sees_another_function(act: Any) -> None:
    torch._dynamo.reset()
    model: Any = WithFunction()
    plain: Any = copy.deepcopy(model)
    fuser.convert(model)
    model.compile(backend="eager")
    model(data())
    model.act = plain.act = act
    torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-5)
