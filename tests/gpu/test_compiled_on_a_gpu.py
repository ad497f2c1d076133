"""Compiled pipelines on a GPU: whole graphs of kernels, with the bits of eager steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_compiled import (
    BF16,
    CURRENT,
    DELAYED,
    DELAYED_RUNS,
    MXFP8,
    Blocks,
    Dropping,
    Run,
    assert_equal,
    graphs,
    states_of,
    step,
    under,
    whole,
)

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


@pytest.mark.parametrize(("run", "make"), DELAYED_RUNS.values(), ids=DELAYED_RUNS)
def test_steps_under_delayed_scaling_have_the_bits_and_states_of_eager_ones_on_a_gpu(
    run: Run, make: Callable[[], torch.nn.Module]
) -> None:
    torch._dynamo.reset()
    model = make().to("cuda", BF16)
    other = copy.deepcopy(model)
    compiled = whole(other)
    x = torch.randn(128, 64, dtype=BF16, device="cuda")
    for number in range(1, 6):
        assert_equal(run(compiled, other, x * number), run(model, model, x * number))
        assert_equal(states_of(other), states_of(model))


def test_delayed_scaling_is_right_under_reduce_overhead_over_twenty_steps() -> None:
    model, x = model_and_input()
    other = copy.deepcopy(model)
    compiled = whole(other, "inductor", mode="reduce-overhead")
    for _ in range(20):
        x = x * 1.1
        torch.compiler.cudagraph_mark_step_begin()
        with under(DELAYED):
            found = [None if t is None else t.clone() for t in step(compiled, other, x)]
        with under(DELAYED):
            assert_equal(found, step(model, model, x))
        assert_equal(states_of(other), states_of(model))


@pytest.mark.parametrize("in_checkpoints", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_dropout_differs_between_replays_and_not_in_recomputations(
    mode: str, in_checkpoints: bool
) -> None:
    torch._dynamo.reset()
    model = Dropping(in_checkpoints).to("cuda", BF16)
    for linear in (model.parts[0][0], model.parts[1][0]):  # the identity, without gradients
        for name, parameter in linear.named_parameters():
            parameter.data.zero_()
            if name.endswith("weight"):
                parameter.data.fill_diagonal_(1.0)
    compiled = whole(model, "inductor", mode=mode)
    x = torch.full((128, 64), 1.0, dtype=BF16, device="cuda").requires_grad_()
    outputs = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        # Where the output is zero the gradient is, too.
        assert torch.equal(y == 0, dx == 0)
        outputs.append(y.detach().clone())
    assert all(not torch.equal(outputs[-1], y) for y in outputs[:-1])


@pytest.mark.parametrize("recipe", [None, CURRENT, MXFP8], ids=str)
def test_ten_numbers_of_tokens_are_few_graphs_on_a_gpu(recipe: Any) -> None:
    model, _ = model_and_input()
    compiled = whole(model, "inductor")
    before = graphs()
    for count in (64, 32, 96, 48, 7, 100, 33, 160, 80, 1):
        x = torch.randn(count, 64, dtype=BF16, device="cuda")
        with under(recipe):
            assert_equal(step(compiled, model, x), step(model, model, x))
    # One of them for one token; under a recipe, one more for rows that are padded.
    assert graphs() - before <= 3 + (recipe is not None)
