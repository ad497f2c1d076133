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
from said import holds, said

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
        RuntimeError,
        match=said(
            "graphs-cannot-captured-forward",
            None,
            holds("in forward (", "test_graphed_callables.py"),
        ),
    ):
        fuser.make_graphed_callables(model, (sample(),))
    x = sample()
    assert torch.equal(model(x), model(x))  # nothing is left of the attempt
    fuser.make_graphed_callables(model.inner, (sample(),))
    assert torch.isfinite(model(x)).all()


def test_hooks_and_memory_of_the_host_are_refused() -> None:
    model = gelu()
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=said("graphs-hooks-does-not")):
        fuser.make_graphed_callables(model, (sample(),))
    handle.remove()
    with pytest.raises(
        ValueError, match=said("graphs-holds-tensor-shape", None, None, None, "cpu")
    ):
        fuser.make_graphed_callables(model, (torch.randn(SHAPE, dtype=BF16),))
    with pytest.raises(ValueError, match=said("graphed-other-shapes-need")):
        fuser.make_graphed_callables(model, (sample(),))(sample()[:1])


def test_an_older_graph_that_is_garbage_does_not_break_a_capture() -> None:
    for _ in range(3):
        model = gelu()
        fuser.make_graphed_callables(model, (sample(requires_grad=True),))
        model.cycle = model  # freed by the garbage collector only
        model(sample(requires_grad=True)).sum().backward()


# -- what a capture leaves, and what is followed after it ---------------------------


def layers() -> torch.nn.Module:
    like: dict[str, Any] = {"params_dtype": BF16, "device": "cuda"}
    return torch.nn.Sequential(
        fuser.modules.LayerNormLinear(128, 256, **like), fuser.modules.Linear(256, 128, **like)
    )


def contents(model: torch.nn.Module) -> list[torch.Tensor]:
    values = [value.clone().cpu() for value in model.state_dict().values()]
    return [*values, torch.get_rng_state(), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("make", [gelu, layers])
@pytest.mark.parametrize("before", range(4))
def test_a_capture_leaves_no_trace_and_scales_move_as_without_a_graph(
    make: Callable[[], torch.nn.Module], before: int
) -> None:
    recipe = RECIPES["delayed"]
    model = make()
    steps(model, recipe, [sample() for _ in range(before)])
    other = copy.deepcopy(model)
    given = sample(requires_grad=True)
    expected = contents(model)
    fuser.make_graphed_callables(model, (given,), recipe=recipe)
    assert_equal(contents(model), expected)
    inputs = [sample() * 4.0**i for i in range(4)]
    assert_equal(steps(model, recipe, inputs), steps(other, recipe, inputs))
    assert_equal(contents(model)[:-2], contents(other)[:-2])


class Failing(torch.nn.Module):
    """Fails while a graph is captured."""

    def __init__(self, side: str) -> None:
        super().__init__()
        self.inner, self.norm, self.side = gelu(), torch.nn.BatchNorm1d(128, device="cuda"), side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.inner(x).float())
        if y.requires_grad:
            y.register_hook(lambda grad: self.fail("backward"))
        self.fail("forward")
        return y

    def fail(self, side: str) -> None:
        if side == self.side and torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt(side)


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_a_capture_that_fails_leaves_no_trace(side: str) -> None:
    recipe = RECIPES["delayed"]
    model = Failing(side)
    steps(model, recipe, [sample() for _ in range(2)])
    other = copy.deepcopy(model)
    given = sample(requires_grad=True)
    expected = contents(model)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        fuser.make_graphed_callables(model, (given,), recipe=recipe)
    torch.cuda.synchronize()
    assert_equal(contents(model), expected)
    inputs = [sample() for _ in range(2)]
    assert_equal(steps(model, recipe, inputs), steps(other, recipe, inputs))
    model.side = ""
    fuser.make_graphed_callables(model, (given,), recipe=recipe)
    assert_equal(steps(model, recipe, inputs), steps(other, recipe, inputs))


@pytest.mark.parametrize("name", ["none", "current", "delayed"])
def test_replays_add_weight_gradients_to_main_grad(name: str) -> None:
    recipe = RECIPES[name]
    found = []
    for is_graphed in (True, False):
        torch.manual_seed(1)
        op = fuser.BasicLinear(128, 128, **LIKE, accumulate_into_main_grad=True)
        model = fuser.Sequential(op, fuser.GELU())
        weight: Any = op.weight
        weight.main_grad = torch.ones(128, 128, device="cuda")
        if is_graphed:
            fuser.make_graphed_callables(model, (sample(requires_grad=True),), recipe=recipe)
            assert torch.equal(weight.main_grad, torch.ones(128, 128, device="cuda"))
        torch.manual_seed(2)
        for _ in range(3):
            with under(recipe):
                y = model(sample(requires_grad=True))
            y.square().mean().backward()
            found.append(weight.main_grad.clone())
        assert weight.grad is None
    for graphed, launched in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(graphed, launched, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], found[1])


def test_main_grad_gets_the_fp32_sum_of_the_products() -> None:
    op = fuser.BasicLinear(128, 128, **LIKE, accumulate_into_main_grad=True)
    model = fuser.Sequential(op)
    weight: Any = op.weight
    weight.main_grad = torch.zeros(128, 128, device="cuda")
    fuser.make_graphed_callables(model, (sample(requires_grad=True),))
    expected = torch.zeros(128, 128, dtype=torch.float64, device="cuda")
    for _ in range(3):
        x, grad = sample(), sample()
        model(x.clone().requires_grad_()).backward(grad)
        expected += grad.double().T @ x.double()
    error = (weight.main_grad.double() - expected).norm() / expected.norm()
    assert error < 1e-5  # a sum that is rounded to bf16 has 2e-3


def test_replays_use_the_scales_of_a_loaded_checkpoint() -> None:
    recipe = RECIPES["delayed"]
    model = gelu()
    steps(model, recipe, [sample(), sample()])
    saved = copy.deepcopy(model.state_dict())
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(requires_grad=True),), recipe=recipe)
    inputs = [64 * sample(), sample(), 8 * sample()]
    for each in (model, other):
        steps(each, recipe, inputs[:2])
        each.load_state_dict(saved)
    assert_equal(steps(model, recipe, inputs), steps(other, recipe, inputs))
    assert_equal(contents(model)[:-2], contents(other)[:-2])


def test_a_copy_computes_with_its_own_parameters() -> None:
    model = gelu()
    fuser.make_graphed_callables(model, (sample(requires_grad=True),))
    twin, plain = copy.deepcopy(model), gelu()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    plain.load_state_dict(twin.state_dict())
    inputs = [sample() for _ in range(3)]
    assert_equal(steps(twin, None, inputs), steps(plain, None, inputs))
    fuser.make_graphed_callables(twin, (sample(requires_grad=True),))
    assert_equal(steps(twin, None, inputs), steps(plain, None, inputs))


def torch_mlp() -> Any:
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(128, 256), torch.nn.GELU(), linear(256, 128)).to("cuda", BF16)


def replaced(model: Any) -> None:
    model[0].weight = torch.nn.Parameter(2 * model[0].weight.detach())


def data_set(model: Any) -> None:
    model[0].weight.data = 2 * model[0].weight.data


def assigned(model: Any) -> None:
    values = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def frozen(model: Any) -> None:
    model[2].weight.requires_grad_(False)


def activation_replaced(model: Any) -> None:
    model[1] = torch.nn.ReLU()


@pytest.mark.parametrize("change", [replaced, data_set, assigned, frozen, activation_replaced])
def test_a_changed_module_runs_without_its_graph(change: Callable[[Any], None]) -> None:
    model = torch_mlp()
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(requires_grad=True),))
    x = sample()
    for each in (model, other):
        change(each)
    found = []
    with pytest.warns(fuser.FuserWarning, match=said("graphed-runs-because-since")):
        y = model(x.clone().requires_grad_())
    for output, each in ((y, model), (other(x.clone().requires_grad_()), other)):
        output.square().mean().backward()
        grads = [p.grad.clone() for p in each.parameters() if p.grad is not None]
        found.append([output.detach().clone(), *grads])
    assert_equal(*found)


def test_an_attribute_of_an_op_that_was_set_is_followed() -> None:
    model = fuser.Sequential(fuser.ConstantScale(2.0), fuser.Linear(128, 128, **LIKE))
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(requires_grad=True),))
    x = sample()
    assert torch.equal(model(x), other(x))
    model[0].scale = other[0].scale = 5.0
    with pytest.warns(
        fuser.FuserWarning,
        match=said(
            "graphed-runs-because-since", None, holds("the attribute 'scale' of '0' was set")
        ),
    ):
        assert torch.equal(model(x), other(x))


def test_evaluation_and_calls_without_gradients_leave_a_replayed_forward_alone() -> None:
    recipe = RECIPES["delayed"]
    model = gelu()
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(requires_grad=True),), recipe=recipe)
    for scale in (1.0, 8.0):
        x, unseen = scale * sample(), 100 * sample()
        found = []
        for each in (model, other):
            leaf = x.clone().requires_grad_()
            with under(recipe):
                y = each(leaf)
                with torch.no_grad():
                    evaluated = each(unseen).clone()
            y.square().mean().backward()
            grads = [leaf.grad.clone(), *(p.grad.clone() for p in each.parameters())]
            found.append([y.detach().clone(), evaluated, *grads])
            each.zero_grad()
        assert_equal(*found)
    assert_equal(contents(model)[:-2], contents(other)[:-2])


def test_a_backward_without_what_its_forward_saved_is_refused() -> None:
    blocks = [gelu() for _ in range(2)]
    others = copy.deepcopy(blocks)
    fuser.make_graphed_callables(tuple(blocks), tuple((sample(requires_grad=True),) for _ in "ab"))
    first = blocks[0](sample(requires_grad=True))
    blocks[0](sample(requires_grad=True)).sum().backward()
    with pytest.raises(fuser.StateError, match=said("graphed-comes-too-late")):
        first.sum().backward()
    outputs = [block(sample(requires_grad=True)) for block in blocks]
    outputs[0].sum().backward()  # not in the opposite order of the forwards
    with pytest.raises(fuser.StateError, match=said("graphed-comes-too-late")):
        outputs[1].sum().backward()
    inputs = [sample() for _ in range(3)]
    for block in blocks:
        block.zero_grad()
    found = steps(torch.nn.Sequential(*blocks), None, inputs)
    assert_equal(found, steps(torch.nn.Sequential(*others), None, inputs))


def test_gradients_of_autograd_grad_stay_when_the_graph_is_replayed() -> None:
    model = gelu()
    other = copy.deepcopy(model)
    fuser.make_graphed_callables(model, (sample(requires_grad=True),))
    x = sample(requires_grad=True)
    grads = torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()])
    steps(model, None, [sample() for _ in range(3)])
    expected = torch.autograd.grad(other(x).square().mean(), [x, *other.parameters()])
    assert_equal(list(grads), list(expected))


def test_two_graphed_modules_that_share_a_parameter_add_their_gradients() -> None:
    blocks = [torch_mlp() for _ in range(2)]
    blocks[1][2].weight = blocks[0][2].weight
    others = copy.deepcopy(blocks)
    fuser.make_graphed_callables(tuple(blocks), tuple((sample(requires_grad=True),) for _ in "ab"))
    inputs = [sample() for _ in range(3)]
    found = steps(torch.nn.Sequential(*blocks), None, inputs)
    assert_equal(found, steps(torch.nn.Sequential(*others), None, inputs))


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_graph_under_autocast_of_torch_casts_the_present_weights(is_cached: bool) -> None:
    model = torch_mlp().float()
    other = copy.deepcopy(model)
    x = sample().float()
    with torch.autocast("cuda", BF16, cache_enabled=is_cached):
        model(x)
        fuser.make_graphed_callables(model, (x.clone().requires_grad_(),))
        assert torch.is_autocast_cache_enabled() is is_cached
    for _ in range(3):
        found = []
        for each in (model, other):
            with torch.autocast("cuda", BF16):
                y = each(x.clone().requires_grad_())
            y.float().square().mean().backward()
            found.append([y.detach().clone(), *(p.grad.clone() for p in each.parameters())])
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= parameter.grad
            each.zero_grad()
        assert found[0][0].dtype is BF16
        assert_equal(*found)


def test_a_graphed_module_within_another_capture_is_captured_itself() -> None:
    inner = gelu()
    other = copy.deepcopy(inner)
    fuser.make_graphed_callables(inner, (sample(requires_grad=True),))
    outer = torch.nn.Sequential(inner, torch.nn.Tanh())
    fuser.make_graphed_callables(outer, (sample(requires_grad=True),))
    inputs = [sample() for _ in range(3)]
    found = steps(outer, None, inputs)
    assert_equal(found, steps(torch.nn.Sequential(other, torch.nn.Tanh()), None, inputs))
