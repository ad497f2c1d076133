"""A forward that a program computes again in a backward of its own: quantized, or a warning."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import pytest
import torch
from said import said
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.precision import recomputation

CURRENT = recipes.Float8CurrentScaling()
MXFP8 = recipes.MXFP8BlockScaling()
SENTENCE = said("recomputation-pipeline-runs-backward", "RMSNorm, BasicLinear")


@pytest.fixture(autouse=True)
def _not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "_has_warned", False)


class ByHand(torch.autograd.Function):
    """As Megatron-LM's ``tensor_parallel.checkpoint``."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: torch.Tensor = function(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grads)
        return None, x.grad


def made() -> fuser.Sequential:
    torch.manual_seed(0)
    return fuser.Sequential(fuser.RMSNorm(64), fuser.BasicLinear(64, 64))


def steps(function: Any, *, inside: Any = None, around: Any = CURRENT, count: int = 2) -> list[str]:
    """The warnings of some steps."""

    def called(x: torch.Tensor) -> torch.Tensor:
        with inside or contextlib.nullcontext():
            y: torch.Tensor = function(x)
        return y

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".* is emulated")
        for _ in range(count):
            x = torch.randn(16, 64).requires_grad_()
            with fuser.autocast(enabled=around is not None, recipe=around):
                y = ByHand.apply(called, x)
            y.sum().backward()
    return [str(one.message) for one in found]


def test_a_recomputation_without_the_recipe_of_its_forward_warns_once() -> None:
    (sentence,) = steps(made(), count=3)
    assert re.search(SENTENCE, sentence)


@pytest.mark.parametrize(
    ("inside", "around"),
    [
        (fuser.autocast(recipe=CURRENT), None),
        (fuser.autocast(recipe=CURRENT), CURRENT),
        (fuser.autocast(enabled=False), CURRENT),
        (None, None),
    ],
    ids=["a recipe inside", "the recipe again", "off inside", "no recipe"],
)
def test_one_that_says_what_it_wants_does_not(inside: Any, around: Any) -> None:
    assert not steps(made(), inside=inside, around=around)


def test_a_converted_module_has_its_recipe_there() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
    fuser.convert(model, recipe=CURRENT, keep=())
    assert not steps(model, around=None)
    assert not steps(model)
    grads = []
    x = torch.randn(16, 64)
    for call in (model, lambda x: ByHand.apply(model, x)):
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_torch_has_the_recipe_and_does_not_warn(use_reentrant: bool) -> None:
    model, x = made(), torch.randn(16, 64).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* is emulated")
        with fuser.autocast(recipe=CURRENT):
            y = checkpoint(model, x, use_reentrant=use_reentrant)
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "conditions",
    [contextlib.nullcontext(), fuser.autocast(enabled=False), fuser.autocast(recipe=MXFP8)],
    ids=["no autocast", "off", "another recipe"],
)
def test_a_checkpoint_of_torch_has_its_own_conditions_after_forwards_under_others(
    conditions: Any, use_reentrant: bool
) -> None:
    model, x = made(), torch.randn(32, 64)

    def gradient(*, has_others: bool) -> torch.Tensor | None:
        leaf = x.clone().requires_grad_()
        with conditions:
            y = checkpoint(model, leaf, use_reentrant=use_reentrant) if has_others else model(leaf)
        if has_others:
            with fuser.autocast(recipe=CURRENT):
                model(x)
        y.square().sum().backward()
        return leaf.grad

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* is emulated")
        assert torch.equal(gradient(has_others=True), gradient(has_others=False))
