"""Graphed callables on a GPU: the bits of launched steps, for every recipe, and their refusals."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import every_format as formats
import models
import pytest
import torch

import fuser
from fuser import recipe as recipes

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

BF16 = torch.bfloat16
LIKE: dict[str, Any] = {"device": "cuda", "dtype": BF16}
SHAPE = (96, 128)
RECIPES: dict[str, Any] = {
    "none": None,
    "delayed": recipes.DelayedScaling(amax_history_len=3),
    **{name: formats.deterministic(recipe) for name, recipe in formats.STATELESS.items()},
}


def under(recipe: Any) -> Any:
    return contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe)


def gelu() -> torch.nn.Module:
    return models.mlp(128, 256, randomized=False, **LIKE)


def swiglu() -> torch.nn.Module:
    return models.residual_block(128, 256, randomized=False, **LIKE)


def sample(**options: Any) -> torch.Tensor:
    return torch.randn(SHAPE, **LIKE, **options)


def steps(model: torch.nn.Module, recipe: Any, inputs: list[torch.Tensor]) -> list[Any]:
    """Outputs, gradients and weights of training steps with an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for x in inputs:
        x = x.clone().requires_grad_()
        with under(recipe):
            y = model(x)
        (y * y).mean().backward()
        found += [y.detach().clone(), x.grad.clone()]
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def assert_equal(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("make", [gelu, swiglu])
def test_graphed_steps_have_the_bits_of_launched_ones(
    make: Callable[[], torch.nn.Module], recipe: Any
) -> None:
    model = make()
    other = copy.deepcopy(model)
    inputs = [sample() * 2.0**i for i in range(8)]
    graphed = fuser.make_graphed_callables(model, (sample(requires_grad=True),), recipe=recipe)
    assert graphed is model
    assert_equal(steps(graphed, recipe, inputs), steps(other, recipe, inputs))


@pytest.mark.parametrize("name", ["none", "current", "delayed"])
def test_several_modules_are_graphed_in_the_order_in_which_they_run(name: str) -> None:
    blocks = [swiglu() for _ in range(3)]
    others = copy.deepcopy(blocks)
    args = tuple((sample(requires_grad=True),) for _ in blocks)
    recipe = RECIPES[name]
    with under(recipe):  # its recipe is the default
        fuser.make_graphed_callables(tuple(blocks), args)
    inputs = [sample() for _ in range(5)]
    found = steps(torch.nn.Sequential(*blocks), recipe, inputs)
    assert_equal(found, steps(torch.nn.Sequential(*others), recipe, inputs))


def test_delayed_scaling_is_unchanged_by_the_capture_and_its_steps_end_by_themselves() -> None:
    recipe = RECIPES["delayed"]
    model = gelu()
    inputs = [sample() * 2.0**i for i in range(6)]
    steps(model, recipe, inputs[:3])
    before = copy.deepcopy(model.state_dict())
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(requires_grad=True),), recipe=recipe)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    with fuser.autocast(recipe=recipe):  # one step around two microbatches
        for x in inputs[3:5]:
            (model(x) * 1).sum().backward()
            (other(x) * 1).sum().backward()
    assert_equal(*([v.cpu() for v in m.state_dict().values()] for m in (model, other)))
    with torch.no_grad():
        model(inputs[5])  # outside every autocast: under that of the capture


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_accumulated_over_microbatches(set_to_none: bool) -> None:
    model = gelu()
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(requires_grad=True),))
    for _ in range(3):
        kept = sample(requires_grad=True)  # a leaf of two microbatches
        same = kept.detach().clone().requires_grad_()
        for x, y in ((kept, same), (sample(), None), (kept, same)):
            model(x).square().mean().backward()
            other(x.detach() if y is None else y).square().mean().backward()
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
        assert_equal([kept.grad], [same.grad])
        for one in (model, other):
            one.zero_grad(set_to_none=set_to_none)


def test_extra_inputs_and_outputs_are_part_of_a_graph() -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput(), fuser.RMSNorm(128, **LIKE), fuser.AddExtraInput()
    )
    other = copy.deepcopy(model)
    args = (sample(requires_grad=True), sample(requires_grad=True))
    fuser.make_graphed_callables(model, args)
    for _ in range(4):
        found = []
        for run in (model, other):
            torch.manual_seed(0)
            x, extra = sample(requires_grad=True), sample(requires_grad=True)
            y, made = run(x, extra)
            (y.sum() + (made * made).sum()).backward()
            grads = [x.grad.clone(), extra.grad.clone()]
            found.append([y.detach().clone(), made.detach().clone(), *grads])
        assert_equal(*found)


def test_a_replay_draws_a_new_dropout_mask() -> None:
    model = fuser.Sequential(fuser.Linear(128, 128, **LIKE), fuser.Dropout(0.5))
    fuser.make_graphed_callables(model, (sample(),))
    x = sample()
    made = [model(x).detach().clone() for _ in range(3)]
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(made[1], made[2])
    model.eval()
    assert torch.equal(model(x), model(x))


class Reading(torch.nn.Module):
    """A module that decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gelu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * 2 if y.sum().item() > 0 else y


def test_a_module_that_waits_for_the_gpu_is_refused_before_the_capture() -> None:
    model = Reading()
    with pytest.raises(
        RuntimeError, match=r"waits for the GPU, in forward \(.*test_graphed_callables.py"
    ):
        fuser.make_graphed_callables(model, (sample(),))
    x = sample()
    assert torch.equal(model(x), model(x))  # nothing is left of the attempt
    fuser.make_graphed_callables(model.inner, (sample(),))
    assert torch.isfinite(model(x)).all()


def test_hooks_and_memory_of_the_host_are_refused() -> None:
    model = gelu()
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="has hooks"):
        fuser.make_graphed_callables(model, (sample(),))
    handle.remove()
    with pytest.raises(ValueError, match="on cpu; a CUDA graph reads memory of the GPU"):
        fuser.make_graphed_callables(model, (torch.randn(SHAPE, dtype=BF16),))
    with pytest.raises(ValueError, match="Other shapes need a capture"):
        fuser.make_graphed_callables(model, (sample(),))(sample()[:1])


def test_an_older_graph_that_is_garbage_does_not_break_a_capture() -> None:
    for _ in range(3):
        model = gelu()
        fuser.make_graphed_callables(model, (sample(requires_grad=True),))
        model.cycle = model  # freed by the garbage collector only
        model(sample(requires_grad=True)).sum().backward()
