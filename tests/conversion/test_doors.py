"""The recipe of a conversion is in effect whoever calls: the model, a part of it, or a library."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convert import CURRENT, HIDDEN, GatedMLP, data
from torch import nn
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes

MXFP8 = recipes.MXFP8BlockScaling()
DELAYED = recipes.DelayedScaling(amax_history_len=2)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedMLP() for _ in range(2))
        self.mixer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        y: torch.Tensor = self.mixer(x)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(HIDDEN, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


def made() -> Any:
    torch.manual_seed(0)
    return Model()


def converted(recipe: Any = CURRENT) -> Any:
    model = made()
    fuser.convert(model, recipe=recipe, keep=())
    return model


def layer_by_layer(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.body.layers:
        x = x + layer(x)
    y: torch.Tensor = model.head(model.body.mixer(x))
    return y


def with_a_forward_on_top(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As TRL does, whose forward calls the body and computes the loss in parts."""
    model.forward = lambda x: model.head(model.body(x))
    y: torch.Tensor = model(x)
    return y


def with_a_wrapped_forward(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As accelerate does."""
    own = model.forward
    model.forward = functools.wraps(own)(lambda *args: own(*args).float())
    y: torch.Tensor = model(x)
    return y


DOORS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "the body": lambda model, x: model.head(model.body(x)),
    "layer by layer": layer_by_layer,
    "a forward on top": with_a_forward_on_top,
    "a wrapped forward": with_a_wrapped_forward,
    "checkpoints": lambda model, x: model.head(checkpoint(model.body, x, use_reentrant=False)),
    "reentrant checkpoints": lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=True)),
    "a copy": lambda model, x: layer_by_layer(copy.deepcopy(model), x),
    "a pickle": lambda model, x: layer_by_layer(pickle.loads(pickle.dumps(model)), x),
}


def step(call: Callable[..., torch.Tensor], model: Any) -> list[torch.Tensor]:
    x = data().requires_grad_()
    y = call(model, x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def plain_call(model: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return y


@pytest.mark.parametrize("recipe", [CURRENT, MXFP8, DELAYED], ids=["current", "mxfp8", "delayed"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_every_door_computes_what_the_model_does(door: str, recipe: Any) -> None:
    expected, found = step(plain_call, converted(recipe)), step(DOORS[door], converted(recipe))
    plain = step(plain_call, made())
    for one, other, unquantized in zip(found, expected, plain, strict=True):
        assert torch.equal(one, other)
        assert not torch.allclose(one, unquantized, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_first", [True, False], ids=["convert first", "forward first"])
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_model_with_a_forward_of_its_own_can_be_converted(is_first: bool) -> None:
    model = made()
    if not is_first:
        model.forward = functools.partial(type(model).forward, model)
    fuser.convert(model, recipe=CURRENT, keep=())
    if is_first:
        model.forward = functools.partial(type(model).forward, model)
    for one, other in zip(step(plain_call, model), step(plain_call, converted()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("outer", [None, MXFP8], ids=["off", "mxfp8"])
@pytest.mark.parametrize("door", ["the model", "the body", "layer by layer"])
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_an_autocast_around_the_call_wins(door: str, outer: Any) -> None:
    model, x = converted(), data()
    call = DOORS.get(door, plain_call)
    with fuser.autocast(enabled=outer is not None, recipe=outer):
        found = call(model, x)
    expected = plain_call(made() if outer is None else converted(outer), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(call(model, x), plain_call(converted(), x))  # and not afterwards


@pytest.mark.parametrize("is_outer", [True, False], ids=["around the graph", "in the graph"])
@pytest.mark.parametrize("outer", [None, MXFP8], ids=["off", "mxfp8"])
@pytest.mark.parametrize("door", ["the model", "layer by layer"])
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_so_it_does_in_compiled_calls(door: str, outer: Any, is_outer: bool) -> None:
    torch._dynamo.reset()
    model, x = converted(), data()
    call = DOORS.get(door, plain_call)
    autocast = functools.partial(fuser.autocast, enabled=outer is not None, recipe=outer)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with autocast():
            return call(model, x)

    def alone(x: torch.Tensor) -> torch.Tensor:
        return call(model, x)

    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    compiled = torch.compile(alone, **options)
    first = compiled(x)
    if is_outer:
        with autocast():
            found = compiled(x)
    else:
        found = torch.compile(inside, **options)(x)
    assert torch.equal(first, alone(x))
    with autocast():
        assert torch.equal(found, alone(x))
    assert not torch.equal(found, first)
    assert torch.equal(compiled(x), first)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_model_that_was_compiled_can_be_converted() -> None:
    torch._dynamo.reset()
    model, x = made(), data()
    compiled: Any = torch.compile(model, backend="aot_eager")
    before = compiled(x)
    fuser.convert(compiled, recipe=CURRENT, keep=())
    found = compiled(x)
    assert torch.equal(found, plain_call(converted(), x))
    assert not torch.allclose(found, before, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_each_part_under_delayed_scaling_has_the_scales_of_the_whole() -> None:
    """A step that ends with each part has the numbers of one that ends with the model."""
    whole, parts = converted(DELAYED), converted(DELAYED)
    for seed in range(3):
        x = (seed + 1) * data()
        assert torch.equal(layer_by_layer(parts, x), plain_call(whole, x))


def test_without_a_recipe_nothing_is_quantized() -> None:
    model = made()
    fuser.convert(model)
    x = data()
    torch.testing.assert_close(layer_by_layer(model, x), plain_call(made(), x))


class Scaled(nn.Module):
    """Between its chains something else runs, and the sum has a factor."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.up, self.mid, self.down = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.alpha = alpha

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        h = self.down(torch.relu(self.up(x)))
        h = torch.add(h, x, alpha=self.alpha)
        y: torch.Tensor = torch.add(x, self.down(torch.relu(self.mid(h))), alpha=self.alpha)
        return y


@pytest.mark.parametrize("alpha", [1.0, 2.0, -0.5])
def test_the_factor_of_a_sum_counts(alpha: float) -> None:
    torch.manual_seed(0)
    model, plain = Scaled(alpha), Scaled(alpha)
    plain.load_state_dict(model.state_dict())
    fuser.convert(model, linears="all")
    torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-5)


def test_an_argument_that_is_given_twice_is_the_error_of_the_own_forward() -> None:
    model = converted()
    for module in (model.body.mixer, model.body.layers[0]):
        with pytest.raises(TypeError, match="multiple values"):
            module(data(), **{"input" if module is model.body.mixer else "x": data()})
