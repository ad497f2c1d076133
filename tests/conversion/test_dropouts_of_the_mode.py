"""A dropout that is a function of the module's mode, as OPT, BLOOM and Starcoder2 write it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from test_convert import HIDDEN, WIDTH, data, pipelines_run
from torch import nn
from torch.nn import functional as F

import fuser


class FeedForward(nn.Module):
    """The output is dropped, and added to the input."""

    def __init__(self, p: float, between: float | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.p, self.between = p, between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if self.between is not None:
            h = F.dropout(h, p=self.between, training=self.training)
        y: torch.Tensor = x + F.dropout(self.down(h), p=self.p, training=self.training)
        return y


class Always(FeedForward):
    """Drops in evaluation too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.5)


class Otherwise(FeedForward):
    """Computes something else in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y if self.training else x - y


def pair(make: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(make(), make())
    return model, copy.deepcopy(model)


def run(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: FeedForward(0.3),
        lambda: FeedForward(0.0),
        lambda: FeedForward(0.3, between=0.2),
        lambda: FeedForward(0.0, between=0.0),
    ],
    ids=["0.3", "0", "0.3 and 0.2", "0 and 0"],
)
def test_the_values_are_those_of_the_module_in_each_mode(make: Any, is_training: bool) -> None:
    model, plain = pair(make)
    assert fuser.convert(model).converted
    assert pipelines_run(model, data()) > 0
    copies = (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    for each in copies:
        each.train(is_training)
        plain.train(is_training)
        for one, other in zip(run(each, data()), run(plain, data()), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_dropout_of_zero_is_no_step_between() -> None:
    (row,) = fuser.convert(FeedForward(0.0)).converted
    assert row.text == "LayerNorm, up, GELU, down, residual"


def test_a_probability_that_changes_counts() -> None:
    for first, second in ((0.0, 0.5), (0.5, 0.0), (0.5, 0.25)):
        model, plain = pair(lambda first=first: FeedForward(first))
        fuser.convert(model)
        run(model, data())
        for each in (model, plain):
            for block in each:
                block.p = second
        for one, other in zip(run(model, data()), run(plain, data()), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_compiled_calls_follow_the_mode() -> None:
    torch._dynamo.reset()
    model, plain = pair(lambda: FeedForward(0.4))
    fuser.convert(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for is_training in (True, False, True):
        model.train(is_training)
        plain.train(is_training)
        y = call(data())
        assert torch.allclose(y, plain(data()), atol=1e-5) != is_training


@pytest.mark.parametrize("make", [lambda: Always(0.0), lambda: Otherwise(0.0)])
def test_another_use_of_the_mode_is_left(make: Any) -> None:
    model, plain = pair(make)
    fuser.convert(model)
    for is_training in (True, False):
        model.train(is_training)
        plain.train(is_training)
        for one, other in zip(run(model, data()), run(plain, data()), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
