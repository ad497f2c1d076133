"""Copies of quantized weights by the number of rows: kept for few, quantized again for many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuser
from fuser import recipe as recipes
from fuser.errors import StateError
from fuser.plan.saved_inputs import MANY_ROWS
from fuser.runtime import compiled as operations

H = 64
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
    like: Any = {"device": "meta", "dtype": torch.bfloat16}
    op = fuser.GroupedLinear(groups, H, H, bias=False, **like)
    model = fuser.Sequential(op)
    for rows, expected in ((groups * MANY_ROWS - 128, [True]), (groups * MANY_ROWS, [False])):
        sizes = torch.full((groups,), rows // groups, device="meta")
        with fuser.autocast(recipe=CURRENT):
            x = torch.empty(rows, H, **like, requires_grad=True)
            plan = model.plan(x, sizes, device="h200")
        assert are_kept(plan) == expected


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
