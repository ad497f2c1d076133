"""Graphed callables without a GPU: what is refused before a capture, and steps that are held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_kernels import on_kernels

import fuser
from fuser import recipe as recipes
from fuser.op import BasicOperation, modules_and_ops
from fuser.precision.contexts import AutocastState, current_recipe
from fuser.precision.delayed_scaling import holding_steps, noting_uses
from fuser.runtime.graphs import _check_module, _Graphed, _Memory, _Spec

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


def test_one_tensor_with_a_gradient_twice_is_refused() -> None:
    model, x = linear(), torch.ones(2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="arguments 0 and 1 of module 0 are one tensor of shape"):
        fuser.make_graphed_callables(model, (x, x))


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


def test_an_op_that_leaves_gradients_to_a_later_call_is_refused() -> None:
    options = {"device": "cpu", "delay_wgrad_compute": True}
    model = fuser.Sequential(fuser.GELU(), fuser.GroupedLinear(2, 8, 8, **options))
    with pytest.raises(fuser.StateError, match="op '1' with delay_wgrad_compute"):
        _check_module(0, model, ())


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


def step_under(recipe: recipes.Recipe, model: torch.nn.Module, x: torch.Tensor) -> None:
    with fuser.autocast(recipe=recipe):
        y = model(x)
    torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))


@pytest.mark.parametrize("steps_before", range(5))
def test_a_context_notes_states_that_one_inside_it_notes_too(
    steps_before: int,
) -> None:
    """The second step of a layout is recorded, and the recording notes states for itself."""
    recipe = recipes.DelayedScaling(amax_history_len=2)
    model = fuser.Sequential(fuser.Linear(32, 32, dtype=torch.bfloat16), fuser.GELU())
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    with on_kernels():
        for _ in range(steps_before):
            step_under(recipe, model, x)
        with noting_uses() as outer, noting_uses() as inner:
            step_under(recipe, model, x)
    assert set(outer) == set(inner) == {model[0].basic_ops[0]._delayed["forward"]}


def hidden_and_open() -> torch.nn.Sequential:
    """A layer, which hides its ops, and a pipeline, whose ops are submodules."""
    layer = fuser.modules.LayerNormLinear(8, 8, params_dtype=torch.float32)
    return torch.nn.Sequential(layer, linear())


def test_ops_of_layers_are_among_the_ops_of_a_model() -> None:
    model = hidden_and_open()
    paths = {path: op for path, op in modules_and_ops(model) if isinstance(op, BasicOperation)}
    assert list(paths) == [
        *("0.ops.0", "0.ops.1.basic_ops.0", "0.ops.1.basic_ops.1"),
        *("1.0.basic_ops.0", "1.0.basic_ops.1"),
    ]
    assert paths["0.ops.1.basic_ops.0"]._parameters["weight"] is model[0].weight


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
    _Graphed(0, context, True, (spec,), (), (), _Memory()).bind(module)
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


class Lending(torch.nn.Module):
    """Two modules of one pool: a replay writes everywhere in the memory of the pool."""

    def __init__(self, memory: _Memory, pool: torch.Tensor, place: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.pool, self.place = pool, place
        spec = _Spec.of(torch.ones(3))
        self.graphed = _Graphed(0, fuser.autocast(False), True, (spec,), (), (), memory)
        self.graphed.bind(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pool.fill_(float("nan"))  # temporary tensors of the graph
        return x

    def backward(self, grad: float, x: torch.Tensor) -> None:
        self.graphed._before_backward(AutocastState(), (x,), x)
        for place, leaf in ((self.place, self.weight), (self.place + 1, x)):
            made = self.pool[place].fill_(grad)
            if leaf.grad is None:
                leaf.grad = made  # as torch does
            else:
                leaf.grad += made


def test_gradients_in_memory_of_the_graphs_are_moved_before_a_replay_overwrites_them() -> None:
    memory, pool = _Memory(), torch.zeros(4, 3)
    modules = [Lending(memory, pool, place) for place in (0, 2)]
    inputs = [torch.ones(3, requires_grad=True) for _ in modules]
    for step in range(3):
        for grad in (1.0, 2.0, 4.0):  # microbatches
            for module, x in zip(modules, inputs, strict=True):
                with torch.no_grad():
                    module(x)
            for module, x in zip(modules[::-1], inputs[::-1], strict=True):
                with torch.no_grad():
                    module.backward(grad, x)
        for leaf in (*(module.weight for module in modules), *inputs):
            assert leaf.grad is not None
            assert leaf.grad.tolist() == [7.0] * 3
            if step:
                leaf.grad.zero_()
            else:
                leaf.grad = None
    assert not memory._lent


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
    one = _Graphed(
        0, fuser.autocast(recipe=recipe), True, (spec,), (forward,), (backward,), _Memory()
    )
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
