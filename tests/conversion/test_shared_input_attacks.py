"""Calls around one product of several linears that have to give what the linears give apart."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fuser
from fuser.recipe import Float8CurrentScaling

HIDDEN = 64
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")


class Projections(nn.Module):
    """Queries, keys and values of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, nn.Linear(HIDDEN, HIDDEN))

    def between(self, x: torch.Tensor) -> None:
        """What a subclass does between the first projection and the second."""

    def forward(self, hidden: torch.Tensor) -> Any:
        queries = self.q_proj(hidden)
        self.between(hidden)
        return queries, self.k_proj(hidden), self.v_proj(hidden)


class Calm(Projections):
    """Nothing between them."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)


class Doubling(Projections):
    """Writes to the input in a method."""

    def between(self, x: torch.Tensor) -> None:
        x.mul_(2)


class Rectifying(Projections):
    """Writes to the input by a function, in the text of the forward."""

    def forward(self, hidden: torch.Tensor) -> Any:
        queries = self.q_proj(hidden)
        torch.relu_(hidden)
        return queries, self.k_proj(hidden), self.v_proj(hidden)


def _pair(kind: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    fuser.convert(model, **{"linears": "all", "keep": (), **options})
    return plain, model


def _input(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [Doubling, Rectifying])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_input_that_is_written_to_is_read_again_in_every_mode(
    kind: Any, mode: Any, is_compiled: bool
) -> None:
    plain, model = _pair(kind)
    call: Any = torch.compile(model, backend="aot_eager") if is_compiled else model
    with mode():
        for one, other in zip(call(_input()), plain(_input()), strict=True):
            torch.testing.assert_close(one, other)


def test_a_weight_that_is_written_to_between_projections_is_read_again() -> None:
    class Growing(Projections):
        def grow(self) -> None:
            with torch.no_grad():
                self.k_proj.weight.mul_(2)

        def forward(self, hidden: torch.Tensor) -> Any:
            queries = self.q_proj(hidden)
            self.grow()
            return queries, self.k_proj(hidden), self.v_proj(hidden)

    plain, model = _pair(Growing)
    for one, other in zip(model(_input()), plain(_input()), strict=True):
        torch.testing.assert_close(one, other)


def test_outputs_of_one_row_may_be_written_to() -> None:
    class Scaled(Projections):
        def forward(self, hidden: torch.Tensor) -> Any:
            queries, keys = self.q_proj(hidden), self.k_proj(hidden)
            queries.mul_(0.5)
            return queries, keys, self.v_proj(hidden)

    plain, model = _pair(Scaled)
    for shape in ((1, HIDDEN), (1, 1, HIDDEN), (HIDDEN,)):
        x = _input(1).reshape(shape)
        for one, other in zip(model(x), plain(x), strict=True):
            torch.testing.assert_close(one, other)


def test_a_linear_under_two_names_of_a_forward_is_converted() -> None:
    class Tied(Projections):
        def __init__(self) -> None:
            super().__init__()
            self.v_proj = self.k_proj

    plain, model = _pair(Tied)
    for one, other in zip(model(_input()), plain(_input()), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_gradient_of_the_input_alone_is_never_that_of_weights_written_since(
    rows: int, recipe: Any, is_frozen: bool
) -> None:
    _, model = _pair(Calm, recipe=recipe)
    model.requires_grad_(not is_frozen)
    x = _input(rows).requires_grad_()

    def loss() -> torch.Tensor:
        return torch.stack([part.square().sum() for part in model(x)]).sum()

    (expected,) = torch.autograd.grad(loss(), x)
    before = loss()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    try:
        (grad,) = torch.autograd.grad(before, x)
    except RuntimeError:
        return  # refused, as by torch
    assert torch.equal(grad, expected)


def test_two_threads_leave_no_product_behind() -> None:
    entered = {name: threading.Event() for name in "ab"}
    first_left = threading.Event()

    class Waiting(Projections):
        def between(self, x: torch.Tensor) -> None:
            name = threading.current_thread().name
            if name not in entered:
                return
            entered[name].set()
            (entered["b"] if name == "a" else first_left).wait(10)

    _, model = _pair(Waiting)
    x = _input()

    @torch.no_grad()
    def first() -> None:
        model(x)
        first_left.set()

    @torch.no_grad()
    def second() -> None:
        entered["a"].wait(10)
        model(x + 1)

    threads = [threading.Thread(target=call, name=n) for call, n in ((first, "a"), (second, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        model.q_proj(x)
        model.k_proj.weight.mul_(2)
        linear: Any = model.k_proj
        torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


def test_linears_after_an_early_return_get_no_gradient() -> None:
    class Early(Projections):
        def forward(self, hidden: torch.Tensor) -> Any:
            queries = self.q_proj(hidden)
            if self.training:
                return queries
            return queries, self.k_proj(hidden), self.v_proj(hidden)

    _, model = _pair(Early)
    model(_input()).sum().backward()
    assert [model.get_submodule(n).weight.grad is None for n in ("k_proj", "v_proj")] == [True] * 2


def test_outputs_of_one_product_have_one_backward() -> None:
    """As the documents say."""
    plain, model = _pair(Calm)
    queries, keys, _ = model(_input())
    queries.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        keys.sum().backward()
    model.zero_grad()
    for module in (plain, model):
        torch.autograd.backward([part.sum() for part in module(_input())])
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("names", [("k_proj", "v_proj"), ("q_proj", "v_proj")])
def test_linears_that_change_places_compute_their_own_outputs(names: tuple[str, str]) -> None:
    plain, model = _pair(Calm)
    for module in (plain, model):
        one, other = (getattr(module, name) for name in names)
        setattr(module, names[0], other)
        setattr(module, names[1], one)
    for result, expected in zip(model(_input()), plain(_input()), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
