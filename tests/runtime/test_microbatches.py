"""Weights that are quantized for the first microbatch and kept for those that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import recipe as recipes
from fuser.tensors import MXFP8Quantizer

RECIPES = list(formats.STATELESS.values())
N = 64
every_recipe = pytest.mark.parametrize("make", RECIPES)


def linear() -> fuser.BasicLinear:
    """One whose rows and columns differ in size by random powers of two, so that copies differ."""
    op = fuser.BasicLinear(N, N, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for shape in ((N, 1), (1, N)):
            powers = torch.randint(-6, 7, shape, generator=generator).float()
            op.weight.mul_(torch.exp2(powers))
    return op


def step(
    op: fuser.BasicLinear,
    recipe: Any,
    is_first: bool | None,
    around: Callable[..., Any] = lambda forward, x: forward(x),
) -> list[torch.Tensor]:
    """Output and gradient of the input of one microbatch."""
    x = oracles.random_tensor((32, N), torch.bfloat16, 1).requires_grad_()
    with fuser.autocast(recipe=recipe):
        y = around(lambda x: op(x, is_first_microbatch=is_first), x)
    (dx,) = torch.autograd.grad(y, x, oracles.random_tensor((32, N), torch.bfloat16, 2))
    return [y.detach(), dx]


def exact(make: Any) -> Any:
    """A recipe without random rounding, which would differ from call to call."""
    if make is recipes.NVFP4BlockScaling:
        return make(disable_stochastic_rounding=True)
    return make()


@every_recipe
def test_a_weight_kept_by_an_evaluation_serves_training_as_one_quantized_for_it(make: Any) -> None:
    op, recipe = linear(), exact(make)
    expected = step(op, recipe, None)
    with torch.no_grad(), fuser.autocast(recipe=recipe):
        op(oracles.random_tensor((32, N), torch.bfloat16, 1), is_first_microbatch=True)
    for is_first in (False, False):
        assert all(map(torch.equal, step(op, recipe, is_first), expected))


class Counted(MXFP8Quantizer):
    """MXFP8 of a weight; counts how often it is quantized."""

    count = 0

    def with_usage(self, *, rowwise: bool, columnwise: bool) -> Any:
        return Counted(rowwise=rowwise, columnwise=columnwise)

    def buffers_of(self, rows: Any) -> Any:
        Counted.count += 1
        return super().buffers_of(rows)


def test_a_recomputation_of_the_first_microbatch_takes_the_weight_that_it_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counted, "count", 0)
    recipe = recipes.CustomRecipe(
        qfactory=lambda role: Counted() if role == "weight" else MXFP8Quantizer()
    )
    op = linear()
    expected = step(op, recipe, None)
    Counted.count = 0

    def checkpointed(forward: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(forward, x, use_reentrant=False)
        return y

    for is_first in (True, False):
        assert all(map(torch.equal, step(op, recipe, is_first, checkpointed), expected))
    assert Counted.count == 1


@pytest.mark.parametrize("is_held", [False, True])
def test_a_weight_that_was_replaced_over_the_same_memory_is_quantized_anew(is_held: bool) -> None:
    """Also while somebody, such as an optimizer, holds the weight from before."""
    op, recipe = linear(), recipes.MXFP8BlockScaling()
    before = step(op, recipe, True)
    version, memory = op.weight._version, op.weight.data
    held = op.weight if is_held else None
    op.weight = torch.nn.Parameter(memory)
    with torch.no_grad():
        for _ in range(version - op.weight._version):
            op.weight.mul_(-2)
    assert op.weight._version == version
    after = step(op, recipe, False)
    del held
    assert all(
        torch.equal(new, (-2) ** version * old) for new, old in zip(after, before, strict=True)
    )
