"""Rows of the arguments of methods of containers, pipelines, plans and reports."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import oracles
import torch
from argument_checks import BF16, E4M3, FP32, leaves, refuses, saved_by
from argument_rows import Of, sets
from oracles import random_tensor
from rows_of_pipelines import AddsOne
from torch.testing import assert_close

import fuser
from fuser.plan.saved_inputs import budget

X = random_tensor((4, 6), FP32, 1)
SEQUENTIAL = "fuser.Sequential"
PIPELINE = "fuser.OperationFuser"
METHODS = (
    f"{PIPELINE}.outputs_like",
    "fuser.FusionPlan.draw",
    "fuser.FusionPlan.steps",
    "fuser.ModelPlan.baseline",
    "fuser.ModelPlan.draw",
    "fuser.ModelPlan.with_adamw",
    "fuser.PlanKey.window",
)
"""Methods of which all arguments have rows."""


def scales(*factors: float) -> list[fuser.ConstantScale]:
    return [fuser.ConstantScale(factor) for factor in factors]


def two_pipelines() -> fuser.Sequential:
    """Two scales, a module of torch, and two scales."""
    return fuser.Sequential(*scales(2.0, 3.0), torch.nn.Identity(), *scales(5.0, 7.0))


# -- properties that are set after a call -------------------------------------------------


@sets(f"{SEQUENTIAL}.fusions", fusions=Of((AddsOne,), instead=fuser.FUSIONS))
def _fusions_that_are_set_after_a_call(given: dict[str, Any]) -> None:
    model = two_pipelines()
    assert_close(model(X), 210 * X)
    model.fusions = given["fusions"]
    assert model.fusions == (AddsOne,)
    for _ in range(2):
        assert_close(model(X), 35 * (6 * X + 1) + 1)


@sets(f"{SEQUENTIAL}.memory_budget", memory_budget=Of(0, instead=None))
def _a_budget_that_is_set_after_a_call(given: dict[str, Any]) -> None:
    model = fuser.Sequential(fuser.Linear(6, 8), fuser.GELU(), fuser.Linear(8, 6))
    assert len(saved_by(lambda: model(*leaves([X])))) > 1
    model.memory_budget = given["memory_budget"]
    for _ in range(2):
        kept = saved_by(lambda: model(*leaves([X])))
        assert [t.shape for t in kept if len(t) == len(X)] == [X.shape]


# -- modules of a container, after a call -------------------------------------------------


@sets(f"{SEQUENTIAL}.insert", index=Of(2, instead=4), idx=Of(2, instead=4))
def _the_place_of_a_module(given: dict[str, Any]) -> None:
    model = two_pipelines()
    assert_close(model(X), 210 * X)
    assert model.insert(module=fuser.GELU(), **given) is model
    assert_close(model(X), 35 * oracles.gelu(6 * X))
    refuses(lambda: model.insert(module=fuser.GELU(), index=0, idx=0), "index and idx")


@sets(f"{SEQUENTIAL}.insert", module=Of("GELU", instead="SiLU"))
def _the_module_that_is_inserted(given: dict[str, Any]) -> None:
    model = two_pipelines()
    assert_close(model(X), 210 * X)
    model.insert(0, module=getattr(fuser, given["module"])())
    assert_close(model(X), 210 * oracles.gelu(X))


@sets(f"{SEQUENTIAL}.pop", key=Of(1, instead=0), idx=Of(1, instead=0))
def _the_module_that_is_removed(given: dict[str, Any]) -> None:
    model = two_pipelines()
    assert_close(model(X), 210 * X)
    second = model[1]
    assert model.pop(**given) is second
    assert_close(model(X), 70 * X)


@sets(
    f"{SEQUENTIAL}.extend",
    sequential=Of((11.0, 13.0), instead=(11.0,)),
    modules=Of((11.0, 13.0), instead=(11.0,)),
)
def _modules_that_are_appended(given: dict[str, Any]) -> None:
    model = two_pipelines()
    assert_close(model(X), 210 * X)
    model.extend(**{name: scales(*factors) for name, factors in given.items()})
    assert_close(model(X), 210 * 143 * X)


# -- keyword arguments of ops -------------------------------------------------------------


class Factor(fuser.BasicOperation):
    """``factor * x``, with a factor of each call."""

    def op_forward(
        self, ctx: Any, input_: torch.Tensor, *, factor: float = 1.0, **quantizers: Any
    ) -> torch.Tensor:
        ctx.factor = factor
        return factor * input_

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return ctx.factor * grad_output, ()


def _is_scaled(run: Any, factor: float) -> None:
    (x,) = leaves([X])
    y = run(x)
    assert_close(y, factor * X)
    y.backward(torch.ones_like(X))
    assert_close(x.grad, torch.full_like(X, factor))


@sets(f"{SEQUENTIAL}.forward", op_kwargs=Of("of a call", instead="none"))
def _keywords_of_each_call(given: dict[str, Any]) -> None:
    """Of ops in two pipelines and in a nested container, by op and by index."""
    nested = fuser.Sequential(Factor())
    model = fuser.Sequential(Factor(), torch.nn.Identity(), *scales(2.0), Factor(), nested)
    for factor in (3.0, 3.0, 3.0, 5.0):
        kwargs = {
            0: {"factor": factor},
            model[3]: {"factor": factor + 1},
            nested[0]: {"factor": factor + 2},
        }
        own = kwargs if given["op_kwargs"] == "of a call" else None
        _is_scaled(
            lambda x, own=own: model(x, op_kwargs=own), 2 * factor * (factor + 1) * (factor + 2)
        )
        _is_scaled(model, 2.0)


@sets("fuser.FusedOperation.forward", basic_op_kwargs=Of(4.0, instead=1.0))
def _keywords_of_the_ops_of_a_fused_op(given: dict[str, Any]) -> None:
    op = fuser.FusedOperation([*scales(2.0), Factor()])
    for _ in range(3):
        kwargs = [{}, {"factor": given["basic_op_kwargs"]}]
        _is_scaled(lambda x, kwargs=kwargs: op(x, basic_op_kwargs=kwargs), 8.0)
        _is_scaled(op, 2.0)


# -- plans --------------------------------------------------------------------------------


def _linears(*, is_cut: bool = True) -> list[torch.nn.Module]:
    between = [torch.nn.Identity()] if is_cut else []
    first = (fuser.Linear(6, 8, dtype=BF16), fuser.GELU())
    return [*first, *between, fuser.Linear(8, 6, dtype=BF16)]


def _has_no_backward(plan: fuser.FusionPlan) -> None:
    assert plan.forward
    assert plan.backward == plan.unfused_backward == ()


@sets(f"{SEQUENTIAL}.plan", training=False)
def _a_plan_of_two_pipelines_without_backward(given: dict[str, Any]) -> None:
    model, x = fuser.Sequential(*_linears()), X.bfloat16()
    assert {op for step in model.plan(x).backward for op in step.ops} == {0, 1, 2, 3, 4}
    plan = model.plan(x, **given)
    _has_no_backward(plan)
    with torch.no_grad():
        own = fuser.Sequential(*_linears())
        own(x)
    assert plan.forward[0] == own.plans[0].forward[0]


@sets(f"{SEQUENTIAL}.plan", device="a100")
def _a_plan_of_two_pipelines_for_a_gpu(given: dict[str, Any]) -> None:
    model = fuser.Sequential(*_linears())
    _is_for_an_a100(model.plan, given)
    refuses(lambda: model.plan(X.bfloat16(), device="a1000"), "a1000")


def _is_for_an_a100(plan_of: Any, given: dict[str, Any]) -> None:
    """Its memory has three fifths of the bandwidth of an H100's."""
    x = torch.empty(2**16, 6, dtype=BF16, device="meta")
    plan, other = plan_of(x, **given), plan_of(x, device="h100")
    assert "sm_80" in str(plan)
    for side in ("forward", "backward"):
        steps = zip(plan.steps(side, fused=False), other.steps(side, fused=False), strict=True)
        for step, of_h100 in steps:
            launches = 5.0 * len(step.kernel.split(", "))
            there, here = step.microseconds - launches, of_h100.microseconds - launches
            assert there > 1.4 * here > 0.0


def _pipeline() -> fuser.OperationFuser:
    return fuser.OperationFuser(_linears(is_cut=False))


@sets(f"{PIPELINE}.plan", training=False)
def _a_plan_without_backward(given: dict[str, Any]) -> None:
    for device in (None, "h100"):
        _has_no_backward(_pipeline().plan(X.bfloat16(), device=device, **given))


@sets(f"{PIPELINE}.plan", device="a100")
def _a_plan_for_a_gpu(given: dict[str, Any]) -> None:
    _is_for_an_a100(_pipeline().plan, given)


@sets(f"{PIPELINE}.plan_on", training=False)
def _a_plan_with_times_of_torch_without_backward(given: dict[str, Any]) -> None:
    _has_no_backward(_pipeline().plan_on(None, X.bfloat16(), **given))


@sets(f"{PIPELINE}.plan_for_gpu", is_elsewhere=False)
def _a_plan_with_the_libraries_of_this_machine(given: dict[str, Any]) -> None:
    _, plan = _pipeline().plan_for_gpu((9, 0), X.bfloat16(), **given)
    assert not plan.key.is_elsewhere


@sets(f"{PIPELINE}.planned", autocast_dtype=Of(BF16, instead=None))
def _a_plan_under_autocast_of_torch(given: dict[str, Any]) -> None:
    pipeline = fuser.OperationFuser([fuser.BasicLinear(6, 8)])
    pipeline.plan(X)
    run = pipeline.planned(
        X,
        tuple(pipeline.basic_ops[0].parameters()),
        (),
        budget.limit,
        device="cpu",
        arch=(0, 0),
        no_kernels=None,
        **given,
    )
    unknown = None, None  # the layout of the parameters, and their buffers
    (y,) = run.call(X, tuple(pipeline.basic_ops[0].parameters()), (), None, unknown)[:1]
    assert y.dtype is BF16


@sets(f"{PIPELINE}.run", is_placed=True)
def _a_call_whose_conditions_are_those_of_its_forward(given: dict[str, Any]) -> None:
    """A call under a recipe asks whether it repeats a forward, unless its caller has asked."""
    pipeline = fuser.OperationFuser(scales(2.0))
    asked = mock.patch("fuser.runtime.pipeline.state_of_forward", return_value=None)
    with fuser.autocast(recipe=E4M3), asked as state_of_forward:
        assert_close(pipeline.run(X, (), None), 2 * X)
        assert state_of_forward.call_count == 1
        assert_close(pipeline.run(X, (), None, **given), 2 * X)
        assert state_of_forward.call_count == 1


@sets("fuser.FusionPlan.steps", fused=False)
def _steps_of_single_ops(given: dict[str, Any]) -> None:
    plan = _pipeline().plan(X.bfloat16(), device="h100")
    for side, order in (("forward", [0, 1, 2, 3, 4]), ("backward", [4, 3, 2, 1, 0])):
        assert any(step.fusion for step in plan.steps(side))
        steps = plan.steps(side, **given)
        assert [step.fusion for step in steps] == [None] * 5
        assert [op for step in steps for op in step.ops] == order


@sets("fuser.FusionPlan.steps", side=Of("backward", instead="forward"))
def _steps_of_a_side(given: dict[str, Any]) -> None:
    plan = _pipeline().plan(X.bfloat16())
    assert plan.steps(**given)[0].ops[-1] == 4
    assert plan.steps(**given) == plan.backward


@sets("fuser.PlanKey.window", start=Of(1, instead=0), stop=Of(3, instead=4))
def _a_key_of_some_ops(given: dict[str, Any]) -> None:
    key = _pipeline().plan(X.bfloat16()).key
    window = key.window(**{"start": 1, "stop": 3, **given})
    assert window == replace(key, ops=key.ops[1:3])


@sets(f"{PIPELINE}.outputs_like", input=Of((4, 6), instead=(5, 6)))
def _tensors_like_the_outputs(given: dict[str, Any]) -> None:
    x = torch.empty(given["input"], dtype=BF16)
    (y,) = _pipeline().outputs_like(x)
    own = _pipeline()(X.bfloat16())
    assert (y.device.type, y.shape, y.dtype) == ("meta", own.shape, own.dtype)
    assert y.requires_grad


def _model_plan() -> fuser.ModelPlan:
    model = fuser.Sequential(fuser.RMSNorm(6, dtype=BF16), fuser.GELU(), fuser.SiLU())
    return fuser.plan(model, torch.empty(2**16, 6, dtype=BF16), device="h100")


for _path, _plan in (
    ("fuser.FusionPlan.draw", lambda: _pipeline().plan(X.bfloat16())),
    ("fuser.ModelPlan.draw", _model_plan),
):

    @sets(_path, path=Of("plan.html", instead="plan.svg"))
    def _where_a_plan_is_drawn(given: dict[str, Any], plan: Any = _plan) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, given["path"])
            assert plan().draw(path) == path
            assert "<html" in path.read_text(encoding="utf-8")
            refuses(lambda: plan().draw(path.with_suffix(".txt")), "html")


@sets("fuser.ModelPlan.baseline", name=Of("torch eager", instead="torch.compile"))
def _the_time_of_plain_torch(given: dict[str, Any]) -> None:
    plan = _model_plan()
    (pipeline,) = plan.plans.values()
    times = {each.name: each.microseconds for each in pipeline.baselines}
    assert plan.baseline(**given) == times["torch eager"] != times["torch.compile"]


@sets("fuser.ModelPlan.with_adamw", parameters=Of((48, 8), instead=(48,)))
def _a_step_of_an_optimizer(given: dict[str, Any]) -> None:
    """Two moments of each parameter."""
    plan = _model_plan()
    with_step = plan.with_adamw(torch.empty(n, dtype=BF16) for n in given["parameters"])
    assert plan.memory.moments == 0
    assert with_step.memory.moments == 2 * 2 * (48 + 8)


@sets("fuser.ConversionReport.gains", device="a100")
def _gains_on_a_gpu(given: dict[str, Any]) -> None:
    """An A100 has no products of 8 bits, and a third of the rate of others."""
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False))
    report = fuser.convert(model.bfloat16(), recipe=fuser.recipe.Float8CurrentScaling())
    ((_, there),) = report.gains(**given).values()
    ((_, here),) = report.gains().values()
    assert there > 2 * here


# -- layers, which are containers -----------------------------------------------------------

LAYERS: tuple[tuple[str, Callable[[], Any], tuple[Any, ...]], ...] = (
    ("Linear", lambda: fuser.modules.Linear(6, 8, params_dtype=BF16), ()),
    ("LayerNormLinear", lambda: fuser.modules.LayerNormLinear(6, 8, params_dtype=BF16), ()),
    ("LayerNormMLP", lambda: fuser.modules.LayerNormMLP(6, 8, params_dtype=BF16), ()),
    ("GroupedLinear", lambda: fuser.modules.GroupedLinear(2, 6, 8, params_dtype=BF16), ([1, 3],)),
)


def _uses_a_kept_weight(layer: Any, inputs: tuple[Any, ...], kwargs: Any, later: Any) -> None:
    """Every product of a second microbatch has the weight of the first."""
    with fuser.autocast(recipe=E4M3), torch.no_grad():
        y = layer(*inputs, **kwargs)
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(2.0)  # which torch does not count
        for _ in range(3):
            assert torch.equal(layer(*inputs, **later), y)
        assert not torch.equal(layer(*inputs, **kwargs), y)


for _path in ("GroupedLinear", "LayerNormLinear"):
    _chosen = [
        each for each in LAYERS if (each[0] == "GroupedLinear") == (_path == "GroupedLinear")
    ]

    @sets(f"fuser.modules.{_path}.forward", is_first_microbatch=False)
    def _a_later_microbatch(given: dict[str, Any], chosen: Any = _chosen) -> None:
        for _, make, others in chosen:
            first = {"is_first_microbatch": True}
            _uses_a_kept_weight(make(), (X.bfloat16(), *others), first, given)

    @sets(f"fuser.modules.{_path}.plan", training=False)
    def _a_plan_of_a_layer_without_backward(given: dict[str, Any], chosen: Any = _chosen) -> None:
        for _, make, others in chosen:
            assert make().plan(X.bfloat16(), *others).backward
            _has_no_backward(make().plan(X.bfloat16(), *others, **given))

    @sets(f"fuser.modules.{_path}.plan", device="a100")
    def _a_plan_of_a_layer_for_a_gpu(given: dict[str, Any], chosen: Any = _chosen) -> None:
        for _, make, others in chosen:
            assert "sm_80" in str(make().plan(X.bfloat16(), *others, **given))


@sets("fuser.modules.LayerNormLinear.forward", fp8_output=True, fp8_grad=True)
def _a_layer_quantizes_no_output(given: dict[str, Any]) -> None:
    for name, make, _ in LAYERS[:3]:
        (argument,) = given or {"fp8_output": False}
        refuses(partial(make(), X.bfloat16(), **given), f"{name} got .*{argument}=True")


@sets("fuser.modules.GroupedLinear.run", op_kwargs=Of(False, instead=None))
def _keywords_of_the_ops_of_a_layer(given: dict[str, Any]) -> None:
    layer = fuser.modules.Linear(6, 8, params_dtype=BF16)
    x, is_first = X.bfloat16(), given["op_kwargs"]
    with fuser.autocast(recipe=E4M3), torch.no_grad():
        y = layer.run(x, op_kwargs={0: {"is_first_microbatch": True}})
        layer.weight.data.mul_(2.0)
        kwargs = None if is_first is None else {0: {"is_first_microbatch": is_first}}
        assert torch.equal(layer.run(x, op_kwargs=kwargs), y)


@sets("fuser.modules.GroupedLinear.train", mode=False)
def _a_layer_in_evaluation(given: dict[str, Any]) -> None:
    for _, make, others in LAYERS:
        layer = make()
        layer(X.bfloat16(), *others)
        assert layer.train(**given) is layer
        assert not any(module.training for module in (layer, layer.ops, *layer.ops))
        layer.train()
        assert all(module.training for module in (layer, layer.ops, *layer.ops))
