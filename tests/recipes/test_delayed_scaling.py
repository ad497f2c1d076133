"""Delayed scaling over many steps: other recipes, loaded states, one autocast around all."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from test_recomputation import equal, followed, grads, mlp, run, states, tensor
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.precision import delayed_scaling
from fuser.precision.contexts import AutocastState
from fuser.recipe import DelayedScaling, Format, MXFP8BlockScaling

HYBRID = DelayedScaling(amax_history_len=4)
E4M3 = dataclasses.replace(HYBRID, fp8_format=Format.E4M3)
MODES = ("forward", "backward")


def state(model: Any, mode: str = "forward") -> Any:
    """The state of the first linear in ``model``."""
    return next(m for m in model.modules() if isinstance(m, fuser.BasicLinear))._delayed[mode]


def linear() -> fuser.Sequential:
    return oracles.randomize(fuser.Sequential(fuser.BasicLinear(32, 32)))


def step(model: Any, recipe: Any, scale: float = 1.0, seed: int = 1) -> dict[str, torch.Tensor]:
    """One step with inputs and gradients ``scale`` times as large; what it made."""
    x = (tensor(seed) * scale).requires_grad_()
    dy = tensor(seed + 100) * scale
    y = run(model, recipe, x)
    y.backward(dy)
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": grads(model)[0], "x": x.detach(), "dy": dy}


def amaxes(model: Any, *scales: float, recipe: Any = HYBRID) -> None:
    """Steps whose inputs and gradients have exactly these amaxes."""
    for scale in scales:
        x = torch.full((32, 32), scale, requires_grad=True)
        run(model, recipe, x).backward(torch.full((32, 32), scale))
    grads(model)


def errors(found: dict[str, torch.Tensor], weight: torch.Tensor) -> list[float]:
    """Relative errors of output and gradients against the unquantized linear."""
    exact = {
        "y": found["x"] @ weight.T,
        "dx": found["dy"] @ weight,
        "dw": found["dy"].T @ found["x"],
    }
    return [float((found[k] - e).norm() / e.norm()) for k, e in exact.items()]


# -- another recipe --------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"fp8_format": Format.E4M3}),
        ({"fp8_format": Format.E4M3}, {}),
        ({"margin": 0}, {"margin": 3}),
        ({"margin": 3}, {"margin": 0, "fp8_format": Format.E4M3}),
    ],
)
def test_another_format_or_margin_has_the_scales_it_would_have_had_all_along(
    first: dict[str, Any], second: dict[str, Any], length: int
) -> None:
    """The amaxes of a history do not depend on either, so neither do the scales that follow."""
    before, after = (
        DelayedScaling(amax_history_len=length, **changes) for changes in (first, second)
    )
    changed, constant = linear(), linear()
    for k, scale in enumerate((100.0, 3000.0, 500.0, 700.0)):
        step(changed, before, scale, k)
        step(constant, after, scale, k)
    for k in range(4, 6):
        found, expected = (step(model, after, 600.0, k) for model in (changed, constant))
        assert all(torch.equal(found[name], expected[name]) for name in found), k
        assert equal(states(changed), states(constant))


def test_a_state_that_has_seen_no_tensor_keeps_its_scale_of_one() -> None:
    model = linear()
    run(model, HYBRID, tensor(1).requires_grad_())  # no backward yet
    step(model, E4M3)
    assert float(state(model, "backward")._quantizers[0].scale) != 1.0  # of the step that ended
    fresh = linear()
    run(fresh, HYBRID, tensor(1).requires_grad_())
    run(fresh, E4M3, tensor(1).requires_grad_())
    assert torch.equal(state(fresh, "backward").scale, torch.ones(1))


def test_a_checkpoint_of_another_format_saturates_nothing() -> None:
    """A state does not say what format its scales were for."""
    trained = linear()
    for k in range(4):
        step(trained, HYBRID, 20.0, k)
    resumed = linear()
    resumed.load_state_dict(trained.state_dict())
    found = step(resumed, E4M3, 20.0, 1)
    assert max(errors(found, resumed[0].weight.detach())) < 0.1


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_resumed_training_has_the_bits_of_one_that_went_on(length: int, algorithm: str) -> None:
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=1)
    model = linear()
    for k, scale in enumerate((8.0, 32.0, 2.0, 4.0, 1.0)):  # the largest has just left a history
        step(model, recipe, scale, k)
        resumed = linear()
        resumed.load_state_dict(copy.deepcopy(model.state_dict()))
        found, expected = step(resumed, recipe, 3.0, 9), step(copy.deepcopy(model), recipe, 3.0, 9)
        assert all(torch.equal(found[name], expected[name]) for name in found), k
        resumed.load_state_dict(copy.deepcopy(model.state_dict()))
        with fuser.autocast(recipe=recipe):
            resumed(tensor(9).requires_grad_())
            # Not those of a copy, which is made as a loaded one is.
            assert torch.equal(state(resumed).scale, state(model).scale), k


def test_the_largest_amax_counts_at_once_where_the_algorithm_becomes_the_maximum() -> None:
    newest = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    model = linear()
    amaxes(model, 64.0, 2.0, recipe=newest)
    assert float(state(model).scale[0]) == 448 / 2
    with fuser.autocast(recipe=HYBRID):
        model(tensor(1).requires_grad_())
        assert float(state(model).scale[0]) == 448 / 64


@pytest.mark.parametrize("amax", [float("inf"), float("nan")])
def test_an_amax_that_is_no_number_changes_no_scale(amax: float) -> None:
    model = linear()
    amaxes(model, 64.0, amax)
    assert float(state(model).scale[0]) == 448 / 64
    with fuser.autocast(recipe=dataclasses.replace(HYBRID, margin=1)):
        model(tensor(1).requires_grad_())
        assert float(state(model).scale[0]) == 448 / 64 / 2


@pytest.mark.parametrize("kind", ["plain", "checkpointed"])
def test_a_backward_after_another_format_began_has_the_scale_of_its_own(kind: str) -> None:
    """A forward under one recipe, a step under another, then the backward of the first."""
    model, twin = linear(), linear()
    for one in (model, twin):
        step(one, HYBRID, 50.0, 1)
        step(one, HYBRID, 50.0, 1)
    x, dy = (tensor(1) * 50).requires_grad_(), tensor(101) * 50
    with fuser.autocast(recipe=HYBRID):
        y = model(x) if kind == "plain" else checkpoint(model, x, use_reentrant=False)
    step(model, dataclasses.replace(E4M3, margin=2), 50.0, 2)
    y.backward(dy)
    expected = step(twin, HYBRID, 50.0, 1)
    assert torch.equal(x.grad, expected["dx"])
    assert torch.equal(grads(model)[0], expected["dw"])


def test_two_recipes_of_one_op_in_one_autocast_are_each_recomputed_with_their_scales() -> None:
    other = dataclasses.replace(HYBRID, margin=3, amax_history_len=2)

    def train(is_checkpointed: bool) -> list[Any]:
        model, found = linear(), []

        def call(x: torch.Tensor) -> Any:
            return checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)

        for k in range(3):
            x = (tensor(k) * 50).requires_grad_()
            with fuser.autocast(recipe=HYBRID):
                h = call(x) / 100
                with fuser.autocast(recipe=other):
                    y = call(h)
                y = call(y)
            step(model, HYBRID, 3.0, k)
            y.sum().backward()
            found += [y.detach(), x.grad, *grads(model)]
        return found

    assert equal(train(True), train(False))


def test_evaluation_under_another_format_changes_nothing_and_saturates_nothing() -> None:
    model = fuser.Sequential(fuser.Quantize())
    far = dataclasses.replace(HYBRID, margin=-4)  # 16 times the scale
    amaxes(model, 64.0, recipe=far)
    before = states(model)
    x = torch.full((32, 32), 64.0)
    with torch.no_grad():
        y = run(model, HYBRID, x)
    assert torch.equal(y.dequantize(), x)
    assert equal(states(model), before)


# -- another length of the history ---------------------------------------------------------


def test_a_shorter_history_keeps_the_newest_amaxes() -> None:
    for length in (1, 2, 3, 5):
        model = linear()
        amaxes(model, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, recipe=DelayedScaling(amax_history_len=8))
        shorter = DelayedScaling(amax_history_len=length)
        amaxes(model, 0.5, recipe=shorter)
        largest = 32.0 if length > 1 else 0.5
        for mode, largest_fp8 in zip(MODES, (448, 57344), strict=True):
            assert float(state(model, mode).scale[0]) == largest_fp8 / largest
            kept = [*(2.0**k for k in range(6)), 0.5][-(length - 1) :] if length > 1 else []
            assert state(model, mode).amax_history[:, 0].tolist() == [0.0, *kept]


def test_a_longer_history_keeps_the_order() -> None:
    model = linear()
    amaxes(model, 1.0, 2.0, 8.0, recipe=DelayedScaling(amax_history_len=3))
    longer = DelayedScaling(amax_history_len=6)
    amaxes(model, 4.0, recipe=longer)
    for mode in MODES:
        assert state(model, mode).amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0, 8.0, 4.0]
    found = []
    for _ in range(6):
        amaxes(model, 1.0, recipe=longer)
        found.append(448 / float(state(model).scale[0]))
    assert found == [8.0, 8.0, 8.0, 8.0, 4.0, 1.0]


# -- one autocast around everything ------------------------------------------------------------

Loop = Callable[[fuser.Sequential, Any, Any], list[torch.Tensor]]


def plain_loop(model: fuser.Sequential, per_step: Any, forward: Any) -> list[torch.Tensor]:
    found = []
    for k, scale in enumerate((1.0, 30.0, 0.1, 3.0, 0.01, 0.02)):
        x = (tensor(k) * scale).requires_grad_()
        with per_step():
            y = forward(model, x)
        (y * 1e-3).sum().backward()
        found += [y.detach(), x.grad, *grads(model), *states(model)]
    return found


def accumulating_loop(model: fuser.Sequential, per_step: Any, forward: Any) -> list[torch.Tensor]:
    found = []
    for k in range(3):
        for microbatch in range(3):
            x = (tensor(10 * k + microbatch) * 3.0**microbatch).requires_grad_()
            with per_step():
                y = forward(model, x)
            y.sum().backward()
        found += [*grads(model), *states(model)]
    return found


def evaluating_loop(model: fuser.Sequential, per_step: Any, forward: Any) -> list[torch.Tensor]:
    found = []
    for k in range(4):
        for evaluates in (torch.no_grad, torch.inference_mode):
            with evaluates(), per_step():
                found.append(model(tensor(50) * 3.0**k))
        x = (tensor(k) * 3.0**k).requires_grad_()
        with per_step():
            y = forward(model, x)
        with torch.no_grad(), per_step():
            model(tensor(60))  # the scales may be those of this step or the next
        y.sum().backward()
        found += [x.grad, *grads(model), *states(model)]
    return found


def disabled_inside_loop(model: fuser.Sequential, per_step: Any, forward: Any) -> list[Any]:
    head, found = mlp(), []
    for k in range(4):
        x = (tensor(k) * 3.0**k).requires_grad_()
        with per_step():
            y = forward(model, x)
            with fuser.autocast(enabled=False):
                y = head(y)
            with fuser.autocast(recipe=MXFP8BlockScaling()):
                y = head(y)
        y.sum().backward()
        found += [x.grad, *grads(model), *grads(head), *states(model)]
    return found


FORWARDS = {
    "plain": lambda model, x: followed(model)(x),
    "checkpointed": lambda model, x: checkpoint(followed(model), x, use_reentrant=False),
    "reentrant": lambda model, x: checkpoint(followed(model), x, use_reentrant=True),
}


@pytest.mark.sampled
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
@pytest.mark.parametrize(
    "loop", [plain_loop, accumulating_loop, evaluating_loop, disabled_inside_loop]
)
def test_one_autocast_around_the_loop_has_the_bits_of_one_around_each_step(
    loop: Loop, forward: Any
) -> None:
    """And a checkpointed forward those of one that is not."""
    recipe = dataclasses.replace(HYBRID, amax_history_len=2)

    def per_step() -> Any:
        return fuser.autocast(recipe=recipe)

    expected = loop(mlp(), per_step, FORWARDS["plain"])
    assert equal(loop(mlp(), per_step, forward), expected)
    with fuser.autocast(recipe=recipe):
        assert equal(loop(mlp(), contextlib.nullcontext, forward), expected)
    with fuser.autocast(enabled=False):
        assert equal(loop(mlp(), per_step, forward), expected)


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_a_step_ends_with_a_backward_of_its_own_and_not_with_one_of_the_step_before(
    forward: Any,
) -> None:
    """One autocast around a schedule that has two forwards under way, as pipeline parallelism."""
    inputs = [tensor(k) * 3.0**k for k in range(5)]

    def schedule(model: fuser.Sequential, first: Any, second: Any, third: Any) -> list[Any]:
        xs = [x.clone().requires_grad_() for x in inputs]
        ys: list[torch.Tensor] = []
        found: list[Any] = []

        def run_backward(k: int) -> None:
            ys[k].sum().backward()
            found.extend([xs[k].grad, *grads(model)])

        with first():
            ys += [forward(model, xs[0]), forward(model, xs[1])]
        run_backward(0)  # ends the first step
        with second():
            ys.append(forward(model, xs[2]))
            run_backward(1)  # of the first step, which is over
            ys.append(forward(model, xs[3]))
        run_backward(2)  # ends the second
        with third():
            ys.append(forward(model, xs[4]))
            run_backward(3)
        run_backward(4)
        return [*found, *(y.detach() for y in ys), *states(model)]

    each = [lambda: fuser.autocast(recipe=HYBRID)] * 3
    expected = schedule(mlp(), *each)
    with fuser.autocast(recipe=HYBRID):
        found = schedule(mlp(), *[contextlib.nullcontext] * 3)
    assert equal(found, expected)


def test_a_failed_forward_or_backward_inside_the_loop_ends_no_step() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError("on purpose")

    model = mlp()
    with fuser.autocast(recipe=HYBRID):
        model(tensor(1).requires_grad_()).sum().backward()
        before = state(model).scale.clone()
        y = Failing.apply(model(tensor(2).requires_grad_()))
        with pytest.raises(RuntimeError, match="on purpose"):
            y.sum().backward()
        with pytest.raises(fuser.InputError):
            model(torch.zeros(3, 5))
        assert torch.equal(state(model).scale, before)
        model(100 * tensor(1).requires_grad_()).sum().backward()
        assert not torch.equal(state(model).scale, before)


def test_a_state_goes_with_its_op_to_another_device() -> None:
    model = linear()
    step(model, HYBRID)
    model.to("meta")
    x = torch.empty(32, 32, device="meta", requires_grad=True)
    y = run(model, HYBRID, x)
    y.backward(torch.empty_like(y))
    for mode in MODES:
        assert state(model, mode).scale.is_meta, mode
        assert state(model, mode).amax_history.is_meta, mode


# -- amaxes of one step -----------------------------------------------------------------------


@pytest.mark.parametrize("scales", [(8.0, 2.0), (2.0, 8.0), (2.0, 8.0, 4.0)])
def test_the_amax_of_a_step_is_the_largest_of_all_its_calls(scales: tuple[float, ...]) -> None:
    model = linear()
    with fuser.autocast(recipe=HYBRID):
        outputs = [model(torch.full((32, 32), scale, requires_grad=True)) for scale in scales]
    gradients = [torch.full((32, 32), scale) for scale in scales]
    torch.autograd.backward(outputs, gradients)
    assert float(state(model).scale[0]) == 448 / 8
    assert float(state(model, "backward").scale[0]) == 57344 / 8
    assert state(model).amax_history[-1, 0] == 8.0


def test_a_recomputation_records_no_amax() -> None:
    """Also where it computes with other values than its forward, and the step is not over."""
    model, scales = linear(), iter((2.0, 16.0))
    x = torch.ones(32, 32, requires_grad=True)
    with fuser.autocast(recipe=HYBRID):
        y = checkpoint(lambda x: model(x * next(scales)), x, use_reentrant=False)
        y.sum().backward()
    assert next(scales, None) is None, "nothing was recomputed"
    assert state(model).amax_history[-1, 0] == 2.0
    assert float(state(model).scale[0]) == 448 / 2


def test_states_of_several_recipes_that_end_in_one_step_follow_each_its_own() -> None:
    recipes = [HYBRID, dataclasses.replace(HYBRID, margin=3)]
    recipes.append(dataclasses.replace(HYBRID, amax_compute_algo="most_recent"))
    models = [linear() for _ in recipes]
    for scale in (8.0, 2.0):
        with fuser.autocast(recipe=HYBRID):
            for model, recipe in zip(models, recipes, strict=True):
                with fuser.autocast(recipe=recipe):
                    model(torch.full((32, 32), scale, requires_grad=True))
    assert [float(state(model).scale[0]) for model in models] == [448 / 8, 448 / 64, 448 / 2]


def test_a_state_that_was_made_in_inference_mode_trains() -> None:
    used, fresh = linear(), linear()
    with torch.inference_mode(), fuser.autocast(recipe=HYBRID):
        used(tensor(1))
    found, expected = (step(model, HYBRID) for model in (used, fresh))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert equal(states(used), states(fresh))


# -- a checkpoint that is loaded in the middle of a step -----------------------------------------


@pytest.mark.parametrize("forward", [FORWARDS["plain"], FORWARDS["checkpointed"]])
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("is_outer", [True, False])
def test_loading_state_between_forward_and_backward_leaves_both_as_they_are(
    is_outer: bool, has_state: bool, forward: Any
) -> None:
    """Gradients are those of the forward; the state is that of the checkpoint."""
    model, other = mlp(), mlp()
    for k in range(2):
        step(model, HYBRID, 3.0, k)
        if has_state:
            step(other, HYBRID, 40.0, k)
    weights = {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    loaded = copy.deepcopy({**other.state_dict(), **weights})

    def train(between: Callable[[], Any]) -> list[torch.Tensor]:
        x = (tensor(1) * 5).requires_grad_()
        context = fuser.autocast(recipe=HYBRID)
        with context if is_outer else contextlib.nullcontext():
            with contextlib.nullcontext() if is_outer else context:
                y = forward(model, x)
            between()
            y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, *grads(model)]

    start = copy.deepcopy(model.state_dict())
    expected = train(lambda: None)
    model.load_state_dict(start)
    found = train(lambda: model.load_state_dict(loaded))
    assert equal(found, expected)
    if has_state:
        assert equal(states(model), [v for k, v in loaded.items() if k.endswith("_extra_state")])
    fresh = mlp()
    fresh.load_state_dict(loaded)
    again, wanted = (step(one, HYBRID, 2.0) for one in (model, fresh))
    assert all(torch.equal(again[name], wanted[name]) for name in again)


def test_a_forward_after_loading_counts_for_the_loaded_state_alone() -> None:
    model = mlp()
    step(model, HYBRID, 3.0)
    loaded = copy.deepcopy(model.state_dict())
    twin = mlp()
    twin.load_state_dict(loaded)
    with fuser.autocast(recipe=HYBRID):
        old = model(100 * tensor(3).requires_grad_())
        model.load_state_dict(loaded)
        new = model(tensor(4).requires_grad_())
    with fuser.autocast(recipe=HYBRID):
        expected = twin(tensor(4).requires_grad_())
    expected.sum().backward()
    old.sum().backward(torch.tensor(1000.0))
    grads(model)
    new.sum().backward()
    assert torch.equal(new, expected)
    assert equal(states(model), states(twin))
    assert equal(grads(model), grads(twin))


@pytest.mark.parametrize(
    ("group", "over", "of_all", "of_some"),
    [
        ((0, 1), None, True, True),
        ((0, 1), (0, 1), True, True),
        ((0, 1), (0, 1, 2, 3), True, True),
        ((0, 1), (0,), False, False),
        ((0, 1), (0, 2), False, False),
        ((0, 1, 2), (0, 1), False, True),
        ((0,), (0, 1), True, False),
        ((0,), None, True, False),
    ],
)
def test_ranks_share_scales_if_their_amaxes_are_reduced_together(
    group: tuple[int, ...],
    over: tuple[int, ...] | None,
    of_all: bool,
    of_some: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks of a group, or two of them, where amaxes are reduced over others."""
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", list)
    monkeypatch.setattr(delayed_scaling, "is_initialized", lambda: True)
    for recipe in (DelayedScaling(), DelayedScaling(reduce_amax=False), MXFP8BlockScaling()):
        is_reduced = isinstance(recipe, DelayedScaling) and recipe.reduce_amax
        state: Any = AutocastState(recipe, None, over)
        monkeypatch.setattr(delayed_scaling, "current_state", lambda state=state: state)
        assert delayed_scaling.reduces_amaxes_over(group) is (of_all and is_reduced)
        assert delayed_scaling.mixes_amaxes_of(group) is (of_some and is_reduced)
