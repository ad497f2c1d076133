"""Copies of quantized weights by the number of rows: kept for few, quantized again for many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuser
from fuser import recipe as recipes
from fuser.errors import StateError
from fuser.plan.devices import H200
from fuser.plan.saved_inputs import MANY_ROWS, MANY_ROWS_OF_A_GROUP
from fuser.report.text import format_bytes
from fuser.runtime import compiled as operations

H, F = 256, 384
RECIPES: dict[str, Any] = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "128-block": recipes.Float8BlockScaling(),
    "MXFP8": recipes.MXFP8BlockScaling(),
}
CURRENT = RECIPES["current"]
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")


def block() -> fuser.Sequential:
    torch.manual_seed(0)
    like: Any = {"bias": False, "device": "cpu"}
    return fuser.Sequential(
        fuser.RMSNorm(H, device="cpu"), fuser.Linear(H, H, **like), fuser.GELU()
    )


def experts(groups: int, device: str) -> fuser.Sequential:
    torch.manual_seed(0)
    options: Any = {"bias": False, "device": device, "dtype": torch.bfloat16}
    options["single_grouped_weight"] = True
    return fuser.Sequential(
        fuser.GroupedLinear(groups, H, 2 * F, **options),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(groups, F, H, **options),
    )


def plan_of_experts(groups: int, rows: int, recipe: Any = CURRENT) -> fuser.FusionPlan:
    like: Any = {"device": "meta", "dtype": torch.bfloat16}
    model = experts(groups, "meta")
    sizes = torch.full((groups,), rows // groups, device="meta")
    x, scales = torch.empty(rows, H, **like, requires_grad=True), torch.empty(rows, **like)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        return model.plan(x, sizes, scales, sizes, device="h200")


def leaf(*shape: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, H, generator=generator)
    return x.to(device).requires_grad_()


def are_kept(plan: fuser.FusionPlan) -> list[bool]:
    """Of each weight, whether the plan keeps its copy."""
    return [not kept.is_rebuilt for kept in plan.kept if kept.name == "weight"]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_few_rows_keep_the_copies_and_many_do_not(recipe: Any) -> None:
    model = block()
    with fuser.autocast(recipe=recipe):
        for shape, expected in (
            ((MANY_ROWS - 32,), True),
            ((MANY_ROWS,), False),
            ((2, MANY_ROWS // 2), False),
            ((2, MANY_ROWS // 2 - 32), True),
        ):
            assert are_kept(model.plan(leaf(*shape, device="meta"))) == [expected]
            assert are_kept(fuser.plan(model, leaf(*shape)).plans[""]) == [expected]
        x = leaf(MANY_ROWS, device="meta")
        for limit in (True, False):
            with fuser.activation_memory_budget(1, keep_weight_copies=limit):
                assert are_kept(model.plan(x)) == [limit]
                assert are_kept(model.plan(leaf(32, device="meta"))) == [limit]
        with fuser.activation_memory_budget(None):
            assert are_kept(model.plan(x)) == [True]
    assert are_kept(model.plan(x)) == []


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gradients_of_many_rows_are_those_with_copies(recipe: Any, is_compiled: bool) -> None:
    results = []
    for limit in (None, True):
        model, x = block(), leaf(MANY_ROWS)
        call: Any = torch.compile(model, backend="aot_eager") if is_compiled else model
        with fuser.activation_memory_budget(1, keep_weight_copies=limit):
            for _ in range(3):  # recorded, and repeated
                with fuser.autocast(recipe=recipe):
                    y = call(x)
                y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


def kept_in_graphs() -> list[list[bool]]:
    """Of every plan of compiled graphs that was made since: the weights' copies that it keeps."""
    runners = [runner for each in operations._passes.values() for runner in each.runners()]
    return [are_kept(runner.plan.plan) for runner in runners if runner._plan is not None]


def test_a_graph_of_fixed_sizes_goes_by_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, expected in ((MANY_ROWS, False), (MANY_ROWS - 64, True)):
        torch._dynamo.reset()
        monkeypatch.setattr(operations, "_passes", {})
        with fuser.autocast(recipe=CURRENT):
            y = torch.compile(block(), dynamic=False, fullgraph=True, backend="aot_eager")(
                leaf(rows)
            )
        y.sum().backward()
        assert kept_in_graphs() == [[expected]]


def test_a_graph_for_any_number_of_rows_keeps_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_passes", {})
    torch._dynamo.reset()
    counts = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = torch.compile(block(), fullgraph=True, backend=counts)
    for rows in (MANY_ROWS - 64, 64, MANY_ROWS + 64):
        x = leaf(rows)
        torch._dynamo.mark_dynamic(x, 0)
        with fuser.autocast(recipe=CURRENT):
            model(x).sum().backward()
    assert counts.frame_count == 1
    assert kept_in_graphs() == [[True]]


def test_rows_are_counted_for_each_weight_of_groups() -> None:
    groups = 4
    for rows, expected in (
        (groups * MANY_ROWS_OF_A_GROUP - 128, [True, True]),
        (groups * MANY_ROWS_OF_A_GROUP, [False, False]),
    ):
        assert are_kept(plan_of_experts(groups, rows)) == expected
        for limit in (True, False):
            with fuser.activation_memory_budget(1, keep_weight_copies=limit):
                assert are_kept(plan_of_experts(groups, rows)) == [limit, limit]


def test_one_group_is_a_linear() -> None:
    assert are_kept(plan_of_experts(1, MANY_ROWS - 128)) == [True, True]
    assert are_kept(plan_of_experts(1, MANY_ROWS)) == [False, False]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_experts_of_many_rows_keep_no_more_than_in_bf16(recipe: Any) -> None:
    rows = 4 * MANY_ROWS_OF_A_GROUP
    of_tokens = [plan_of_experts(4, rows, each).kept_bytes_per_token for each in (recipe, None)]
    assert of_tokens[0] <= of_tokens[1]
    assert sum(kept.nbytes for kept in plan_of_experts(4, rows, recipe).kept) == 0


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_gradients_of_many_rows_of_experts_are_those_with_copies(recipe: Any) -> None:
    groups = 2
    rows, results = groups * MANY_ROWS_OF_A_GROUP, []
    sizes = torch.tensor([rows // 4, rows - rows // 4])
    for limit in (None, True):
        model, x = experts(groups, "cpu"), leaf(rows).detach().bfloat16().requires_grad_()
        scales = torch.ones(rows, dtype=torch.bfloat16, requires_grad=True)
        with fuser.activation_memory_budget(1, keep_weight_copies=limit):
            for _ in range(3):
                with fuser.autocast(recipe=recipe):
                    y = model(x, sizes, scales, sizes)
                y.float().square().sum().backward()
        (pipeline,) = [segment.pipeline for segment in model._current_segments().parts]
        assert [are_kept(plan) for plan in pipeline.plans] == [[limit is True] * 2]
        results.append([y, x.grad, scales.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_a_plan_says_what_it_costs_to_quantize_weights_again() -> None:
    rows, values = 4 * MANY_ROWS_OF_A_GROUP, 4 * 2 * F * H
    plan = plan_of_experts(4, rows)
    first, _ = (kept for kept in plan.kept if kept.name == "weight")
    assert first.moved_again == pytest.approx((2 + 1) * values, rel=1e-3)
    text = f"weight quantized again, which moves {format_bytes(first.moved_again)}"
    assert text in str(plan)
    times = {
        cost.keep_weight_copies: cost.microseconds
        for cost in plan.memory
        if cost.memory_budget == 1 and not cost.lossy_activation_inputs
    }
    # Forward writes a copy less; backward reads the values and writes that copy.
    assert times[False] - times[True] == pytest.approx(1.5 * 2 * values / H200.bandwidth * 1e6, 0.1)


def test_a_weight_that_is_written_before_backward_is_refused_with_many_rows() -> None:
    model = block()
    with fuser.autocast(recipe=CURRENT):
        y = model(leaf(MANY_ROWS))
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises((StateError, RuntimeError), match=r"modified|changed|written"):
        y.sum().backward()
    with fuser.autocast(recipe=CURRENT):
        model(leaf(MANY_ROWS)).sum().backward()


def test_the_reason_of_a_kept_copy_names_the_rows() -> None:
    with fuser.autocast(recipe=CURRENT):
        text = str(block().plan(leaf(32)))
    assert f"fewer than {MANY_ROWS} rows, keep_weight_copies=True, or a checkpoint" in text


def test_calls_of_few_and_of_many_rows_have_a_plan_each() -> None:
    model = block()
    with fuser.autocast(recipe=CURRENT):
        for rows in (MANY_ROWS, 64, MANY_ROWS):
            model(leaf(rows)).sum().backward()
    (pipeline,) = [segment.pipeline for segment in model._current_segments().parts]
    assert sorted(are_kept(plan) for plan in pipeline.plans) == [[False], [True]]
