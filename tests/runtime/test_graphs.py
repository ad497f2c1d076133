"""Graphed callables without a GPU: what is refused before a capture, and steps that are held.

Captures and replays are in test_graph_replays.py and test_graph_captures.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_kernels import on_kernels
from said import said

import fuser
from fuser import recipe as recipes
from fuser.op import BasicOperation, modules_and_ops
from fuser.precision.delayed_scaling import holding_steps, noting_uses
from fuser.runtime.graphs import _check_module

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")


def linear() -> fuser.Sequential:
    return fuser.Sequential(fuser.Linear(8, 8))


@pytest.mark.parametrize(
    ("modules", "args", "sentence"),
    [
        (
            torch.relu,
            (torch.ones(2, 8),),
            said("graphs-graphed-callables-modules", "builtin_function_or_method"),
        ),
        ((linear(), linear()), ((torch.ones(2, 8),),), said("graphs-graphed-modules-tuples", 2, 1)),
        ((linear(),), torch.ones(2, 8), said("graphs-graphed-modules-tuples", 1, "no")),
        (linear(), 3, said("graphs-sample-arguments-tuple", 0, "int")),
        (linear(), (torch.ones(2, 8), 0.5), said("graphs-sample-argument-takes", 1, 0, "float")),
    ],
)
def test_arguments_that_do_not_fit_are_refused(modules: Any, args: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        fuser.make_graphed_callables(modules, args)


def test_one_tensor_with_a_gradient_twice_is_refused() -> None:
    model, x = linear(), torch.ones(2, 8, requires_grad=True)
    with pytest.raises(ValueError, match=said("graphs-sample-tensor-requires", 0, 1, 0)):
        fuser.make_graphed_callables(model, (x, x))


def test_one_module_twice_is_refused() -> None:
    model = linear()
    with pytest.raises(ValueError, match=said("graphs-graphed-callables-twice")):
        fuser.make_graphed_callables((model, model), ((torch.ones(2, 8),),) * 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_refusal_says_so_and_the_module_still_runs() -> None:
    model, x = linear(), torch.ones(2, 8)
    expected = model(x)
    with pytest.raises(RuntimeError, match=said("graphs-needs-torch-sees")):
        fuser.make_graphed_callables(model, (x,))
    assert torch.equal(model(x), expected)


def test_an_op_that_leaves_gradients_to_a_later_call_is_refused() -> None:
    options = {"device": "cpu", "delay_wgrad_compute": True}
    model = fuser.Sequential(fuser.GELU(), fuser.GroupedLinear(2, 8, 8, **options))
    with pytest.raises(
        fuser.StateError, match=said("graphs-delay-wgrad-compute", None, None, "'1'")
    ):
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


def test_a_walk_finds_the_present_parameters_of_a_layer() -> None:
    model = torch.nn.Sequential(fuser.modules.Linear(8, 8), torch.nn.Tanh())
    layer = model[0]
    model(torch.ones(2, 8))
    layer.weight = torch.nn.Parameter(torch.zeros(8, 8))
    del layer._parameters["bias"]
    layer.register_parameter("bias", torch.nn.Parameter(torch.ones(8)))
    ops = [op for _, op in modules_and_ops(model) if isinstance(op, BasicOperation)]
    found = [p for op in ops for p in op._parameters.values() if p is not None]
    assert [id(p) for p in found] == [id(layer.weight), id(layer.bias)]
