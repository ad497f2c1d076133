"""Graphed callables without a GPU: what is refused before a capture, and steps that are held."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuser
from fuser import recipe as recipes
from fuser.precision.contexts import AutocastState, current_recipe
from fuser.precision.delayed_scaling import holding_steps, noting_uses
from fuser.runtime.graphs import _Graphed, _Spec

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")


def linear() -> fuser.Sequential:
    return fuser.Sequential(fuser.Linear(8, 8))


@pytest.mark.parametrize(
    ("modules", "args", "sentence"),
    [
        (torch.relu, (torch.ones(2, 8),), "takes modules; got a builtin_function_or_method"),
        ((linear(), linear()), ((torch.ones(2, 8),),), "got 2 modules and 1 tuples"),
        ((linear(),), torch.ones(2, 8), "got 1 modules and no tuples"),
        (linear(), 3, "module 0 are a tuple of tensors; got a int"),
        (linear(), (torch.ones(2, 8), 0.5), "Sample argument 1 of module 0 is a float"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(modules: Any, args: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        fuser.make_graphed_callables(modules, args)


def test_one_module_twice_is_refused() -> None:
    model = linear()
    with pytest.raises(ValueError, match="one module twice"):
        fuser.make_graphed_callables((model, model), ((torch.ones(2, 8),),) * 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_refusal_says_so_and_the_module_still_runs() -> None:
    model, x = linear(), torch.ones(2, 8)
    expected = model(x)
    with pytest.raises(RuntimeError, match="torch sees no CUDA device"):
        fuser.make_graphed_callables(model, (x,))
    assert torch.equal(model(x), expected)


def test_held_steps_do_not_end_and_leave_no_amax_to_the_next_one() -> None:
    recipe = recipes.DelayedScaling()
    model = linear()
    op = model[0].basic_ops[0]
    x = torch.ones(2, 8, requires_grad=True)

    def step() -> None:
        with fuser.autocast(recipe=recipe):
            y = model(x)
        y.sum().backward()

    step()
    states = list(op._delayed.values())
    before = [(state.scale.clone(), state.amax_history[1:].clone()) for state in states]
    with holding_steps() as steps, noting_uses() as used:
        for _ in range(3):
            step()
    assert set(used) == {op._delayed["forward"]}
    assert set(steps) == {op._delayed["backward"]}
    for state, (scale, history) in zip(states, before, strict=True):
        assert torch.equal(state.scale, scale)
        assert torch.equal(state.amax_history[1:], history)
    step()
    assert not torch.equal(states[0].amax_history[1:], before[0][1])


# -- calls ----------------------------------------------------------------------


class Replayed(torch.nn.Module):
    """A module whose forward stands for the replay of a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recipe = current_recipe()
        return 2 * x


def graphed(recipe: Any) -> Replayed:
    module = Replayed()
    context = fuser.autocast(recipe is not None, recipe=recipe)
    spec = _Spec.of(torch.ones(2, 8))
    _Graphed(0, context, True, (spec,), (), ()).bind(module)
    return module


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "was captured with 1 tensors, and got 0"),
        ((torch.ones(1, 8),), r"is torch.float32 \(1, 8\) on cpu; it was captured as"),
        ((torch.ones(2, 8, dtype=torch.float16),), "is torch.float16"),
        ((torch.ones(2, 8, requires_grad=True),), "needs a gradient, and the sample did not"),
        ((1.0,), "is a float; a graph takes tensors"),
    ],
)
def test_a_graphed_module_refuses_other_arguments(args: Any, sentence: str) -> None:
    module = graphed(None)
    with pytest.raises((ValueError, TypeError), match=sentence):
        module(*args)
    assert torch.equal(module(torch.ones(2, 8)), torch.full((2, 8), 2.0))


def test_a_graphed_module_runs_under_its_recipe_and_refuses_another() -> None:
    recipe = recipes.Float8CurrentScaling()
    module, x = graphed(recipe), torch.ones(2, 8)
    module(x)
    assert module.recipe == recipe
    with fuser.autocast(recipe=recipes.Float8CurrentScaling()):  # an equal one
        module(x)
    others = (fuser.autocast(recipe=recipes.DelayedScaling()), fuser.autocast(enabled=False))
    for other in others:
        with other, pytest.raises(RuntimeError, match="a graph cannot change its recipe"):
            module(x)
    with fuser.autocast(recipe=recipe), pytest.raises(RuntimeError, match="under no recipe"):
        graphed(None)(x)


def test_gradients_in_memory_of_the_graph_are_moved_before_it_is_overwritten() -> None:
    module = Replayed()
    module.weight = torch.nn.Parameter(torch.ones(3))
    module.other = torch.nn.Parameter(torch.ones(3))
    one = _Graphed(0, fuser.autocast(enabled=False), True, (), (), ())
    one.bind(module)
    of_graph = torch.full((3,), 5.0)  # what a replay overwrites

    def replay() -> None:
        one._before_backward(AutocastState(), (), of_graph)
        of_graph.fill_(of_graph[0].item() + 1)
        for parameter in (module.weight, module.other):
            if parameter.grad is None:
                parameter.grad = of_graph
            else:
                parameter.grad += of_graph

    own = module.other.grad = torch.zeros(3)
    for _ in range(3):
        replay()
    assert module.weight.grad is not None
    assert module.weight.grad[0] == module.other.grad[0] == 6 + 7 + 8
    assert module.other.grad is own
    module.weight.grad = None
    replay()
    assert module.weight.grad is of_graph


def test_in_another_mode_the_module_itself_runs() -> None:
    module = graphed(recipes.Float8CurrentScaling())
    module.eval()
    assert module(torch.ones(5, 3)).shape == (5, 3)
    assert module.recipe is None


def test_an_output_ends_the_steps_in_its_backward() -> None:
    model = linear()
    recipe = recipes.DelayedScaling()
    with fuser.autocast(recipe=recipe):
        model(torch.ones(2, 8))
        y = model(torch.ones(2, 8, requires_grad=True))
    y.sum().backward()
    op = model[0].basic_ops[0]
    forward, backward = op._delayed["forward"], op._delayed["backward"]
    spec = _Spec.of(torch.ones(2, 8))
    one = _Graphed(0, fuser.autocast(recipe=recipe), True, (spec,), (forward,), (backward,))
    module = Replayed()
    one.bind(module)
    forward.amax_history[0] = 7.0
    backward.amax_history[0] = 3.0
    with fuser.autocast(recipe=recipe):
        y = module(torch.ones(2, 8, requires_grad=False)).requires_grad_()
    assert forward.amax_history[-1].tolist() == [7.0, 7.0]
    assert backward.amax_history[-1].tolist() != [3.0]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: one._before_backward(AutocastState(recipe), (), grad))
    x.sum().backward()
    assert backward.amax_history[-1].tolist() == [3.0]
