"""Compiled pipelines on a GPU: whole graphs of kernels, with the bits of eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_compiled import BF16, CURRENT, MXFP8, Blocks, assert_equal, step, under, whole

from fuser import recipe as recipes

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")
RECIPES = [None, CURRENT, recipes.Float8BlockScaling(), MXFP8]
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def model_and_input() -> tuple[Blocks, torch.Tensor]:
    torch._dynamo.reset()
    return Blocks(2, dtype=BF16).to("cuda"), torch.randn(128, 64, dtype=BF16, device="cuda")


@EVERY_RECIPE
def test_a_compiled_step_has_the_bits_of_an_eager_one_on_a_gpu(recipe: Any) -> None:
    model, x = model_and_input()
    compiled = whole(model)
    for _ in range(4):
        with under(recipe):
            expected = step(model, model, x)
            assert_equal(step(compiled, model, x), expected)
    assert torch.equal(expected[0], model(x)) == (recipe is None)


@EVERY_RECIPE
def test_cuda_graphs_of_inductor_have_the_bits_of_an_eager_step(recipe: Any) -> None:
    model, x = model_and_input()
    compiled = whole(model, "inductor", mode="reduce-overhead")
    for _ in range(5):
        x = x + 0.25
        torch.compiler.cudagraph_mark_step_begin()
        with under(recipe):
            found = [None if t is None else t.clone() for t in step(compiled, model, x)]
            assert_equal(found, step(model, model, x))
