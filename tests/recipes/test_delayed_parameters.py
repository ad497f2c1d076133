"""Weights that are quantized under delayed scaling: with which scales, and what they record."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch

import fuser
from fuser.precision.delayed_scaling import DelayedScales
from fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from fuser.reference import fp8_scaling as reference

RECIPE = DelayedScaling(amax_history_len=4)
E4M3 = fuser.DType.kFloat8E4M3


def linear(**options: Any) -> fuser.BasicLinear:
    torch.manual_seed(0)
    with fuser.quantized_model_init(recipe=RECIPE, **options):
        return fuser.BasicLinear(64, 32)


def tensor(seed: int, *shape: int) -> torch.Tensor:
    return oracles.random_tensor(shape or (32, 64), torch.float32, seed)


def forward_state(op: fuser.BasicLinear) -> Any:
    return op._delayed["forward"]


def train_step(op: fuser.BasicLinear, seed: int = 1) -> list[torch.Tensor]:
    """Forward and backward; output and gradients."""
    x = tensor(seed).requires_grad_()
    with fuser.autocast(recipe=RECIPE):
        y = op(x)
    y.backward(tensor(seed + 50, 32, 32))
    grad, op.weight.grad = op.weight.grad, None
    return [y.detach(), x.grad, grad]  # type: ignore[list-item]


def assert_quantized_with(weight: Any, values: torch.Tensor, scale: float) -> None:
    row, column, scale_inv = reference.quantize_delayed(values, torch.tensor([scale]), E4M3)[:3]
    assert torch.equal(weight._data, row)
    assert torch.equal(weight._transpose, column)
    assert torch.equal(weight._scale_inv, scale_inv)


def test_the_initial_weight_has_scale_one_and_its_amax_is_recorded() -> None:
    op: Any = linear(preserve_high_precision_init_val=True)
    initial = op.weight.get_high_precision_init_val()
    torch.manual_seed(0)
    assert torch.equal(initial, fuser.BasicLinear(64, 32).weight)
    assert type(op.weight) is fuser.Float8Tensor
    assert_quantized_with(op.weight, initial, 1.0)
    assert forward_state(op).amax_history[0].tolist() == [0.0, float(initial.abs().max())]


def test_every_write_has_the_scale_of_the_writes_before_its_step() -> None:
    """The recurrence of the formula, over the amaxes of what was written."""
    op = linear()
    seen, scale = [float(forward_state(op).amax_history[0, 1])], 1.0
    for k in range(7):
        train_step(op, k)
        scale = 448 / max(seen[-4:])
        torch.testing.assert_close(float(forward_state(op).scale[1]), scale, rtol=1e-6, atol=0)
        values = tensor(20 + k, 32, 64) / (3 + k)
        with torch.no_grad():
            op.weight.copy_(values)
        seen.append(float(values.abs().max()))
        # What the scale cannot hold has a scale of its own.
        held = min(float(forward_state(op).scale[1]), float(448 / values.abs().max()))
        assert_quantized_with(op.weight, values, held)


def test_a_step_that_writes_no_weight_leaves_its_history_alone() -> None:
    op = linear()
    train_step(op, 1)
    before = forward_state(op).amax_history[:, 1].clone()
    scale = forward_state(op).scale.clone()
    for k in range(3):
        train_step(op, k)
    assert torch.equal(forward_state(op).amax_history[:, 1], before)
    assert forward_state(op).scale[1] == scale[1]


def test_what_is_written_before_another_recipe_counts_under_that() -> None:
    """The state is made for the recipe of the linear, and goes on under that of autocast."""
    torch.manual_seed(0)
    with fuser.quantized_model_init(recipe=DelayedScaling(margin=2)):
        op = fuser.BasicLinear(64, 32)
    amax = float(forward_state(op).amax_history[0, 1])
    train_step(op)
    assert forward_state(op).amax_history.shape == (RECIPE.amax_history_len, 2)
    torch.testing.assert_close(float(forward_state(op).scale[1]), 448 / amax, rtol=1e-6, atol=0)
    values = tensor(1, 32, 64) / 1000
    with torch.no_grad():
        op.weight.copy_(values)
    assert_quantized_with(op.weight, values, float(forward_state(op).scale[1]))
    assert float(forward_state(op).amax_history[0, 1]) == float(values.abs().max())


@pytest.mark.parametrize("write", ["copy_", "data", "load_state_dict", "mul_", "a view"])
def test_a_write_that_the_scale_cannot_hold_is_not_cut_off(write: str) -> None:
    op = linear()
    train_step(op)
    large = tensor(3, 32, 64) * 1e4
    with torch.no_grad():
        if write == "copy_":
            op.weight.copy_(large)
        elif write == "data":
            op.weight.data = large
        elif write == "load_state_dict":
            op.load_state_dict({"weight": large}, strict=False)
        elif write == "mul_":
            large = op.weight.dequantize() * 1e5
            op.weight.mul_(1e5)
        else:
            large[4:] = op.weight.dequantize()[4:]
            op.weight[:4] = large[:4]
    # Half of the last of E4M3's four bits, or of its smallest step.
    step = (large.abs() / 16).clamp(min=float(large.abs().max()) / 448 * 2.0**-10)
    assert ((op.weight.dequantize() - large).abs() <= step).all()


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_a_weight_of_zeros_or_no_numbers_is_written_with_the_scale_of_the_state(
    value: float,
) -> None:
    op = linear()
    train_step(op)
    scale = float(forward_state(op).scale[1])
    values = tensor(1, 32, 64) / 100
    values[0] = value
    with torch.no_grad():
        op.weight.copy_(torch.zeros(32, 64) if value == 0 else values)
    torch.testing.assert_close(op.weight._scale_inv, torch.tensor([1 / scale]))


@pytest.mark.parametrize(
    "make",
    [
        torch.clone,
        lambda w: w.detach().clone(),
        lambda w: w.to(torch.bfloat16),
        copy.deepcopy,
        lambda w: pickle.loads(pickle.dumps(w)),
    ],
)
def test_a_copy_of_a_weight_is_a_value_that_records_nothing(
    make: Callable[[Any], Any],
) -> None:
    """An average of weights, or a master, is written to without a step of the training noticing."""
    op = linear()
    with torch.no_grad():
        other = make(op.weight)
    before = forward_state(op).amax_history.clone()
    with torch.no_grad():
        other.copy_(tensor(1, 32, 64) * 1000)
        other.mul_(2)
    assert torch.equal(forward_state(op).amax_history, before)
    assert float(other.abs().max()) > 1000


def test_a_saved_weight_does_not_carry_the_history() -> None:
    op = linear()
    assert pickle.loads(pickle.dumps(op.weight))._quantizer.amax is None


CONTINUED: dict[str, Callable[[fuser.BasicLinear], fuser.BasicLinear]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda op: pickle.loads(pickle.dumps(op)),
    "to": lambda op: copy.deepcopy(op).to("cpu"),
}


def _reloaded(op: fuser.BasicLinear) -> fuser.BasicLinear:
    other = linear()
    train_step(other, 7)
    other.load_state_dict(copy.deepcopy(op.state_dict()))
    return other


@pytest.mark.parametrize("go_on", [*CONTINUED.values(), _reloaded], ids=[*CONTINUED, "reload"])
def test_a_copied_or_loaded_linear_trains_on_with_the_same_bits(go_on: Any) -> None:
    op = linear()
    optimizer = torch.optim.SGD(op.parameters(), lr=0.1)

    def steps(op: fuser.BasicLinear, count: int) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(op.parameters(), lr=0.1)
        found = []
        for k in range(count):
            x = tensor(k).requires_grad_()
            with fuser.autocast(recipe=RECIPE):
                y = op(x)
            y.square().sum().div(1000).backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [y.detach(), x.grad, *op.weight.buffers().values()]
        return [t.clone() for t in found]

    steps(op, 3)
    assert optimizer.param_groups
    other = go_on(op)
    found, expected = steps(other, 3), steps(op, 3)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(forward_state(other).packed(), forward_state(op).packed())


def test_a_quantized_weight_trains_with_checkpointing_as_without() -> None:
    def train(is_checkpointed: bool) -> list[torch.Tensor]:
        op, found = linear(), []
        optimizer = torch.optim.Adam(op.parameters(), lr=1e-3)
        for k in range(4):
            x = tensor(k).requires_grad_()
            with fuser.autocast(recipe=RECIPE):
                y = (
                    torch.utils.checkpoint.checkpoint(op, x, use_reentrant=False)
                    if is_checkpointed
                    else op(x)
                )
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [y.detach(), x.grad, op.weight.dequantize()]
        return found  # type: ignore[return-value]

    assert all(map(torch.equal, train(True), train(False)))


def test_training_with_a_delayed_weight_learns() -> None:
    op = linear()
    optimizer = torch.optim.Adam(op.parameters(), lr=2e-2)
    target, losses = tensor(9, 32, 64) / 8, []
    for k in range(60):
        x = tensor(k)
        with fuser.autocast(recipe=RECIPE):
            y = op(x)
        loss = (y - x @ target.T).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 20


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), MXFP8BlockScaling()], ids=str)
def test_a_delayed_weight_may_be_used_under_any_recipe(recipe: Any) -> None:
    op = linear()
    train_step(op)
    values = op.weight.dequantize()
    x = tensor(1).requires_grad_()
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = op(x)
    y.sum().backward()
    exact = x.detach() @ values.T
    assert (y - exact).norm() / exact.norm() < 0.05


def test_a_deferred_weight_is_quantized_with_scale_one_at_the_first_forward() -> None:
    with fuser.quantized_model_init(recipe=RECIPE):
        op: Any = fuser.BasicLinear(64, 32, device="meta")
    op(tensor(1))
    assert type(op.weight) is fuser.Float8Tensor
    assert float(op.weight._scale_inv) == 1.0
    assert float(forward_state(op).amax_history[0, 1]) > 0


# -- loaded weights: the scale of their bytes, until an amax is recorded ---------------------------


def trained() -> fuser.BasicLinear:
    """A linear whose weights are small, so that scale 1 would leave few of their bits."""
    op = linear()
    for k in range(3):
        train_step(op, k)
        with torch.no_grad():
            op.weight.copy_(tensor(20 + k, 32, 64) / 3000)
    train_step(op, 3)
    return op


def by_copy(source: fuser.BasicLinear, target: fuser.BasicLinear) -> None:
    with torch.no_grad():
        target.weight.copy_(source.weight)


def by_copy_of_an_alias(source: fuser.BasicLinear, target: fuser.BasicLinear) -> None:
    """As ``torch.distributed.checkpoint`` loads: into the tensors of a state dict."""
    target.state_dict()["weight"].copy_(source.state_dict()["weight"])


def by_load(source: fuser.BasicLinear, target: fuser.BasicLinear) -> None:
    target.load_state_dict(source.state_dict())


def without_state(source: fuser.BasicLinear, target: fuser.BasicLinear) -> None:
    target.load_state_dict({"weight": source.weight.detach()}, strict=False)


def with_an_empty_state(source: fuser.BasicLinear, target: fuser.BasicLinear) -> None:
    state = {**source.state_dict(), "_extra_state": torch.empty(0, dtype=torch.uint8)}
    target.load_state_dict(state)


def by_assignment(source: fuser.BasicLinear, target: fuser.BasicLinear) -> None:
    state = pickle.loads(pickle.dumps(source.state_dict()))
    target.load_state_dict(state, assign=True)


def by_assignment_without_state(source: fuser.BasicLinear, target: fuser.BasicLinear) -> None:
    """The weight, whose quantizer has the scale of the source, shares its memory."""
    target.load_state_dict({"weight": source.weight.detach()}, strict=False, assign=True)


LOADS: dict[str, Callable[[fuser.BasicLinear, fuser.BasicLinear], None]] = {
    load.__name__: load
    for load in (
        by_copy,
        by_copy_of_an_alias,
        by_load,
        without_state,
        with_an_empty_state,
        by_assignment,
        by_assignment_without_state,
    )
}


def fresh_linear() -> fuser.BasicLinear:
    return linear()


def used_linear() -> fuser.BasicLinear:
    """Its state has the amaxes of weights that are larger."""
    op = linear()
    train_step(op, 7)
    return op


def linear_from_meta() -> fuser.BasicLinear:
    with fuser.quantized_model_init(recipe=RECIPE):
        op = fuser.BasicLinear(64, 32, device="meta")
    op.to_empty(device="cpu")
    op.reset_parameters()
    return op


def copied_linear() -> fuser.BasicLinear:
    return copy.deepcopy(linear())


TARGETS = {f.__name__: f for f in (fresh_linear, used_linear, linear_from_meta, copied_linear)}


def bytes_of(op: fuser.BasicLinear) -> tuple[torch.Tensor, ...]:
    weight: Any = op.weight
    return weight._data.clone(), weight._transpose.clone(), weight._scale_inv.clone()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("load", LOADS)
def test_a_write_of_the_same_values_after_a_load_keeps_every_byte(load: str, target: str) -> None:
    """An optimizer whose state is made writes so, with a learning rate of 0."""
    source, op = trained(), TARGETS[target]()
    expected, states = bytes_of(source), source.get_extra_state()
    LOADS[load](source, op)
    with torch.no_grad():
        op.weight.mul_(1.0)
    for got, values in zip(bytes_of(op), expected, strict=True):
        assert torch.equal(got, values)
    assert torch.equal(source.get_extra_state(), states)  # it belongs to another op


@pytest.mark.parametrize("target", ["fresh_linear", "linear_from_meta", "copied_linear"])
@pytest.mark.parametrize(
    "load", [name for name in LOADS if name not in ("by_load", "by_assignment")]
)
def test_without_a_loaded_history_the_first_write_after_a_step_keeps_every_byte(
    load: str, target: str
) -> None:
    source, op = trained(), TARGETS[target]()
    expected = bytes_of(source)
    LOADS[load](source, op)
    for k in range(2):
        train_step(op, k)
    with torch.no_grad():
        op.weight.mul_(1.0)
    for got, values in zip(bytes_of(op), expected, strict=True):
        assert torch.equal(got, values)
    largest = float(op.weight.dequantize().abs().max())
    train_step(op)
    assert float(forward_state(op).scale[1]) == pytest.approx(448 / largest)


def test_a_scale_of_1_that_a_history_gave_stays_whatever_the_bytes_of_the_weight() -> None:
    state = DelayedScales("forward")
    state.prepare(
        DelayedScaling(amax_history_len=3), [fuser.DType.kFloat8E4M3] * 2, torch.device("cpu")
    )
    state.amax_history[1, 1] = 448.0
    for index in range(2):
        state.keep_scale(index, torch.tensor([0.25]))
    assert state.scale.tolist() == [4.0, 1.0]


@pytest.mark.parametrize("load", ["by_load", "by_assignment"])
def test_a_loaded_state_gives_the_scale_from_the_next_forward_on(load: str) -> None:
    source, op = trained(), fresh_linear()
    LOADS[load](source, op)
    for each in (source, op):
        train_step(each)
        with torch.no_grad():
            each.weight.mul_(0.5)
    for got, values in zip(bytes_of(op), bytes_of(source), strict=True):
        assert torch.equal(got, values)
    assert torch.equal(op.get_extra_state(), source.get_extra_state())


def test_a_copy_into_a_clone_leaves_the_state_of_the_op_that_it_was_cloned_from() -> None:
    op, other = trained(), used_linear()
    states = op.get_extra_state()
    clone = op.weight.detach().clone()
    clone.copy_(other.weight.detach())
    expected = clone.dequantize()
    assert torch.equal(clone.mul_(1.0).dequantize(), expected)
    assert torch.equal(op.get_extra_state(), states)


@pytest.mark.parametrize("load", [by_load, by_assignment])
def test_a_load_keeps_the_newest_amaxes_of_the_checkpoint(
    load: Callable[[fuser.BasicLinear, fuser.BasicLinear], None],
) -> None:
    """An optimizer's write records an amax in the step that has not ended."""
    source, target = linear(), linear()
    train_step(source)
    with torch.no_grad():
        source.weight.mul_(0.5)
    newest = forward_state(source).amax_history[0].clone()
    assert newest.any()
    load(source, target)
    assert torch.equal(forward_state(target).amax_history[0], newest)
