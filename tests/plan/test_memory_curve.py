"""The memory curve of a plan: what each budget keeps, what it computes again, and its time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch

import fuser
from fuser import recipe as recipes
from fuser.plan.memory import BudgetCost
from fuser.tensors import QuantizedTensor

T, H, F = 128, 128, 256
SIDES = ("forward", "backward")
BF16 = torch.bfloat16
RECIPES: dict[str, Any] = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "rowwise": recipes.Float8RowwiseScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "dequantized": recipes.Float8CurrentScaling(backward_override="dequantized"),
    "high precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
}
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

KEPT = ", keep_weight_copies=True"


def swiglu() -> fuser.Sequential:
    return fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        fuser.RMSNorm(H),
        fuser.Linear(H, 2 * F, bias=False),
        fuser.SwiGLU(),
        fuser.Linear(F, H, bias=False),
        fuser.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def between_modules() -> fuser.Sequential:
    """Two pipelines, and a module between them that keeps nothing."""
    first = (fuser.LayerNorm(H), fuser.Linear(H, F), fuser.GELU())
    last = (fuser.Linear(F, F), fuser.SiLU(), fuser.Linear(F, H))
    return fuser.Sequential(*first, torch.nn.Identity(), *last)


MODELS: dict[str, Callable[[], fuser.Sequential]] = {
    "swiglu": swiglu,
    "gelu": lambda: fuser.Sequential(fuser.Linear(H, F), fuser.GELU(), fuser.Linear(F, H)),
    "between modules": between_modules,
    "caching": lambda: fuser.Sequential(
        fuser.Linear(H, F), fuser.GELU(cache_quantized_input=True), fuser.Linear(F, H)
    ),
}


def under(recipe: Any) -> Any:
    return contextlib.nullcontext() if recipe is None else fuser.autocast(recipe=recipe)


def leaf(rows: int = T) -> torch.Tensor:
    return oracles.leaf(oracles.random_tensor((rows, H), BF16, 1))


def saved_bytes(model: fuser.Sequential, x: torch.Tensor) -> int:
    """The memory of the tensors that a forward saves, without parameters and single scales."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_quantized = isinstance(tensor, QuantizedTensor)
        for buffer in tensor.buffers().values() if is_quantized else [tensor]:
            if buffer is not None and buffer.numel() > 4:
                storage = buffer.untyped_storage()
                if storage.data_ptr() not in own:
                    sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(sizes.values())


def budget_of(cost: BudgetCost) -> fuser.activation_memory_budget:
    return fuser.activation_memory_budget(
        cost.memory_budget,
        keep_weight_copies=cost.keep_weight_copies,
        lossy_activation_inputs=cost.lossy_activation_inputs,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_each_budget_keeps_the_bytes_that_the_plan_states(name: str, recipe: Any) -> None:
    model = MODELS[name]().to(BF16)
    with under(recipe):
        curve = model.plan(leaf()).memory
        for cost in curve.every:
            with budget_of(cost):
                measured = saved_bytes(model, leaf())
            assert abs(cost.nbytes - measured) <= 0.01 * measured, cost
            of_tokens = cost.nbytes - cost.weight_bytes
            assert cost.bytes_per_token * T == pytest.approx(of_tokens)
    assert [str(cost) for cost in curve.every] == [
        "None",
        f"1{KEPT if curve.every[1].weight_bytes else ''}",
        "1, keep_weight_copies=False",
        f"1{KEPT if curve.every[1].weight_bytes else ''}, lossy_activation_inputs=True",
        "0",
    ]


@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("name", ["swiglu", "between modules"])
def test_a_plan_of_a_budget_keeps_what_the_curve_says_of_it(name: str, recipe: str) -> None:
    """By the places of ops in the whole model."""
    model = MODELS[name]().to(BF16)
    with under(RECIPES[recipe]):
        for cost in model.plan(leaf()).memory.every[:4]:
            with budget_of(cost):
                plan = model.plan(leaf())
            assert plan.kept_bytes_per_token == cost.bytes_per_token
            assert sum(kept.nbytes for kept in plan.kept) == cost.weight_bytes
            again = [(kept.name, kept.ops[0]) for kept in plan.kept if kept.is_rebuilt]
            stated = [*(("input", i) for i in cost.inputs), *(("weight", i) for i in cost.weights)]
            assert sorted(again) == sorted(stated)
            assert plan.memory.every == model.plan(leaf()).memory.every


def test_hooks_of_parameters_make_a_pipeline_keep_what_the_plan_then_states() -> None:
    """It is cut into nodes, and none computes again what another one kept."""
    width = 1024
    ops = [
        part for _ in range(2) for part in (fuser.Linear(width, width, bias=False), fuser.GELU())
    ]
    model = fuser.Sequential(*ops, fuser.Linear(width, width, bias=False)).to(BF16)
    x = oracles.leaf(oracles.random_tensor((T, width), BF16, 1))
    free = model.plan(x)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    plan = model.plan(x)
    assert plan.waiting
    assert plan.kept_bytes_per_token > free.kept_bytes_per_token
    measured = saved_bytes(model, x)
    assert plan.kept_bytes_per_token * T == pytest.approx(measured, rel=0.01)
    assert plan.memory.every[1].nbytes == pytest.approx(measured, rel=0.01)


def test_times_are_those_of_the_steps_and_of_a_forward_that_runs_again() -> None:
    model = fuser.Sequential(fuser.Linear(H, F), fuser.GELU(), fuser.Linear(F, H)).to(BF16)
    with fuser.activation_memory_budget(None):
        plan = model.plan(leaf())
    forward, backward = (sum(step.microseconds for step in plan.steps(side)) for side in SIDES)
    everything, default, _, lossy, repeated = plan.memory.every
    assert everything.microseconds == pytest.approx(forward + backward)
    assert repeated.microseconds == pytest.approx(2 * forward + backward)
    # GELU reads its input and writes its output once more, in a launch of its own.
    device = plan.device
    again = plan.nominal_tokens * 2 * F * 2 / device.bandwidth + device.launch
    assert default.microseconds - everything.microseconds == pytest.approx(1e6 * again)
    # Forward writes the rounded input, with a scale of 4 bytes for 128, and backward reads it: of
    # each of the two launches the other side is the unquantized input.
    moved = F * (1 + 4 / 128 + 2)
    rounding = plan.nominal_tokens * 2 * moved / device.bandwidth + 2 * device.launch
    assert lossy.microseconds - default.microseconds == pytest.approx(1e6 * rounding)


def test_a_curve_for_another_device_has_its_times_for_the_planned_rows() -> None:
    model, x = swiglu().to(BF16), leaf()
    plan = model.plan(x, device="h200")
    assert plan.memory.nominal_tokens == plan.memory.tokens == T
    steps = sum(step.microseconds for side in SIDES for step in plan.steps(side))
    assert plan.memory.every[1].microseconds == pytest.approx(steps)
    assert plan.memory.every[1].microseconds < model.plan(x).memory.every[1].microseconds
    kept = [cost.nbytes for cost in plan.memory.every]
    assert kept == [cost.nbytes for cost in model.plan(x).memory.every]


def test_a_curve_is_a_table_of_the_budgets_that_differ() -> None:
    model = swiglu().to(BF16)
    plan = model.plan(leaf())
    assert (
        str(plan.memory)
        == """\
kept for backward of 128 tokens
  budget                           a token  weights       all  step of 8192  again
  None                              2.1 kB      0 B  262.7 kB       51.0 ms  nothing
  1                                 1.3 kB      0 B  164.4 kB       51.8 ms  inputs of 2, 4
  1, lossy_activation_inputs=True    788 B      0 B  100.9 kB       53.1 ms  inputs of 2, 4
  0                                  256 B      0 B   32.8 kB       68.0 ms  forward"""
    )
    with under(RECIPES["current"]):
        curve = model.plan(leaf()).memory
    assert [str(cost) for cost in curve] == [str(cost) for cost in curve.every]
    assert curve.every[2].again == "inputs of 2, 4; weights of 2, 4"
    written = json.loads(json.dumps(plan.to_dict()))["memory"]
    assert [cost["memory_budget"] for cost in written] == [None, 1, 1, 0]
    assert [cost["lossy_activation_inputs"] for cost in written] == [False, False, True, False]
    assert written[1]["inputs"] == [2, 4]


def test_ops_of_later_pipelines_have_their_numbers_in_the_whole() -> None:
    plan = between_modules().to(BF16).plan(leaf())
    assert plan.ops[1] == plan.ops[7] == "BasicLinear"
    assert plan.memory.every[1].inputs == (1, 7)


def test_a_budget_that_changes_nothing_has_the_costs_of_the_one_before_and_no_row() -> None:
    model = fuser.Sequential(fuser.RMSNorm(H), fuser.Linear(H, F, bias=False)).to(BF16)
    _, default, weights, lossy, _ = model.plan(leaf()).memory.every
    assert not weights.keep_weight_copies
    assert lossy.lossy_activation_inputs
    assert lossy.keep_weight_copies
    assert default.nbytes == weights.nbytes == lossy.nbytes
    assert default.microseconds == weights.microseconds == lossy.microseconds
    assert [str(cost) for cost in model.plan(leaf()).memory] == ["None", "1", "0"]


@pytest.mark.parametrize("with_gradients", [False, True])
def test_without_a_backward_there_is_no_curve(with_gradients: bool) -> None:
    model = swiglu().requires_grad_(with_gradients)
    plan = model.plan(torch.empty(T, H), training=not with_gradients)
    assert list(plan.memory) == plan.to_dict()["memory"] == []
    assert str(plan.memory) == "kept for backward: nothing needs a gradient"
    assert all(not kept.memory.every for kept in model.plans)


def test_a_budget_of_zero_keeps_the_extra_inputs_of_the_caller_too() -> None:
    model = fuser.Sequential(fuser.Linear(H, H), fuser.AddExtraInput(), fuser.Linear(H, H))
    x, y = (torch.empty(T, H, requires_grad=True) for _ in range(2))
    *others, repeated = model.plan(x, y).memory.every
    assert repeated.nbytes == 2 * T * H * 4
    assert {cost.nbytes for cost in others} == {2 * T * H * 4}


@pytest.mark.parametrize("reader", [False, True])
def test_a_fused_chain_keeps_its_input_if_an_op_of_it_reads_what_it_gets(reader: bool) -> None:
    ops: list[fuser.FusibleOperation] = [fuser.Bias(64), fuser.ConstantScale(0.5)]
    model = fuser.Sequential(*ops, *([fuser.GELU()] * reader)).bfloat16()
    x = torch.empty(128, 64, dtype=torch.bfloat16, requires_grad=True)
    plan = model.plan(x, device="h200")
    assert len(plan.forward) == 1
    assert plan.kept_bytes_per_token * len(x) == x.nbytes * reader
