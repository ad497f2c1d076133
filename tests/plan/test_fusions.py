"""Every fusion: it fires, is named, equals the unfused ops, and makes wanted gradients alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fusion_cases import (
    DRAWS,
    FEATURES,
    WINDOWS,
    Window,
    assert_only_roundings_moved,
    every_dtype,
    every_window,
    fused_or_not,
    fused_steps,
    leaves,
    put_on_grid,
    run,
)
from oracles import (
    Draw,
    assert_no_worse_than_torch,
    outputs_of,
    params_of,
    random_tensor,
    randomize,
    run_formula,
)
from said import sentence
from torch.utils.flop_counter import FlopCounterMode

import fuser
import fuser.runtime.pipeline
from fuser.errors import InputError
from fuser.recipe import Float8CurrentScaling, MXFP8BlockScaling

# -- fires, equals, is named -------------------------------------------------------------


@pytest.mark.sampled
@every_window
@every_dtype
def test_a_fusion_fires_over_its_window(window: Window, dtype: torch.dtype) -> None:
    model, inputs = window.model(dtype), leaves(window.inputs(dtype, 1))
    plan = model.plan(*inputs)
    other = "backward" if window.side == "forward" else "forward"
    steps = fused_steps(plan, window.fusion)
    assert steps[window.side] == [window.ops]
    assert steps[other] == []
    model(*inputs)
    assert model.plans == (plan,)


def test_every_fusion_that_ships_is_tested_here() -> None:
    # Chains are kernels, and have their tests in test_kernels_in_pipelines.py.
    # GroupedMLP and DispatchedExperts take integers too, and have theirs in test_grouped_mlp.py and
    # test_dispatched_experts.py.
    elsewhere = {"PointwiseChain", "GroupedMLP", "DispatchedExperts"}
    shipped = {f.__name__ for f in fuser.FUSIONS} - elsewhere
    assert {window.fusion for window in WINDOWS} == shipped
    assert all(
        f.side == window.side
        for window in WINDOWS
        for f in fuser.FUSIONS
        if f.__name__ == window.fusion
    )


@pytest.mark.sampled
@every_window
@every_dtype
def test_is_as_exact_as_torch_and_as_the_unfused_ops(window: Window, dtype: torch.dtype) -> None:
    fused, unfused = window.model(dtype), window.model(dtype, fusions=())
    put_on_grid([*fused.parameters(), *unfused.parameters()])
    against_torch, against_unfused = [], []
    for seed in DRAWS:
        inputs = window.inputs(dtype, seed)
        put_on_grid(inputs)
        names = [f"extra {k}" for k in range(len(inputs) - 1)]
        tensors = {"x": inputs[0], **params_of(fused), **dict(zip(names, inputs[1:], strict=True))}
        exact = run_formula(window.formula(fused), tensors, torch.float64)
        plain = run_formula(window.formula(fused, plain=True), tensors, dtype)
        ours, alone = run(fused, leaves(inputs)), run(unfused, leaves(inputs))
        against_torch.append(Draw(ours, plain, exact))
        against_unfused.append(Draw(ours, alone, exact))
        if dtype == torch.float32:
            assert_only_roundings_moved(ours, alone)
    for draws in (against_torch, against_unfused):
        if dtype != torch.float32 and window.gradient_may_jump:
            draws = [outputs_of(draw) for draw in draws]
        assert_no_worse_than_torch(*draws)
    assert not any(step.fusion for plan in unfused.plans for step in plan.forward + plan.backward)


@every_window
def test_is_interchangeable_with_its_unfused_half(window: Window) -> None:
    (fusion,) = [f for f in fuser.FUSIONS if f.__name__ == window.fusion]
    only_this, unfused = window.model(fusions=(fusion,)), window.model(fusions=())
    inputs = window.inputs(torch.float32, 1)
    ours, alone = run(only_this, leaves(inputs)), run(unfused, leaves(inputs))
    assert fused_steps(only_this.plans[0], window.fusion)[window.side] == [window.ops]
    assert_only_roundings_moved(ours, alone)


@every_window
def test_the_plans_text_names_it_its_ops_and_its_kernels(window: Window) -> None:
    plan = window.model().plan(*leaves(window.inputs(torch.float32, 1)))
    (step,) = [s for s in plan.steps(window.side) if s.fusion == window.fusion]
    assert window.kernels in step.kernel
    lines = [line for line in str(plan).splitlines() if window.fusion in line]
    assert len(lines) == 1
    assert lines[0].split()[0] == f"0-{len(window.cases) - 1}"
    assert step.kernel in lines[0]
    assert plan.to_dict()[window.side][0]["fusion"] == window.fusion
    assert window.fusion in plan.to_dot()


@every_window
def test_is_modelled_to_cost_no_more_than_the_ops_alone(window: Window) -> None:
    plan = window.model().plan(*leaves(window.inputs(torch.float32, 1)))
    for quantity in ("bytes_per_token", "microseconds"):
        fused, plain = (
            sum(getattr(step, quantity) for step in plan.steps(window.side, fused=fused))
            for fused in (True, False)
        )
        assert 0 < fused <= plain * (1 + 1e-12)  # sums of floats in another order


@pytest.mark.sampled
@every_window
@pytest.mark.parametrize("leading", [(0,), (1,), (), (2, 3), (2, 0)], ids=str)
def test_holds_for_empty_single_and_many_dimensional_batches(
    window: Window, leading: tuple[int, ...]
) -> None:
    inputs = window.inputs(torch.float32, 1, leading)
    ours = run(window.model(), leaves(inputs))
    alone = run(window.model(fusions=()), leaves(inputs))
    assert all(ours[name].shape == alone[name].shape for name in alone)
    assert_only_roundings_moved(ours, alone)
    if 0 in leading:
        assert not any(t.any() for name, t in ours.items() if "gradient" in name)


@every_window
def test_holds_for_non_contiguous_inputs(window: Window) -> None:
    inputs = [t.t().contiguous().t() for t in window.inputs(torch.float32, 1)]
    strided = [t.repeat_interleave(2, 0)[::2] for t in inputs]
    alone = run(window.model(fusions=()), leaves(inputs))
    for given in (inputs, strided):
        assert not given[0].is_contiguous()
        assert_only_roundings_moved(
            run(window.model(), [t.detach().requires_grad_() for t in given]), alone
        )


@every_window
def test_a_fusion_never_changes_the_callers_tensors(window: Window) -> None:
    model, inputs = window.model(), leaves(window.inputs(torch.float32, 1))
    held = [*inputs, *model.parameters()]
    before = [t.detach().clone() for t in held]
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [random_tensor(y.shape, y.dtype, 5) for y in outputs]
    given = [g.clone() for g in gradients]
    kept = [y.detach().clone() for y in outputs]
    torch.autograd.backward(outputs, gradients)
    with torch.no_grad():
        model(*inputs)
    for was, now in zip([*before, *given, *kept], [*held, *gradients, *outputs], strict=True):
        assert torch.equal(was, now)


def test_an_activation_after_a_linear_is_the_same_with_and_without_gradients() -> None:
    for activation in (fuser.GELU(), fuser.GELU("none"), fuser.ReLU()):
        model = randomize(fuser.Sequential(fuser.Linear(32, 32), activation))
        x = random_tensor((8, 32), torch.float32, 1)
        expected = model(x)
        with torch.no_grad():
            assert torch.equal(model(x), expected)


def test_no_gemm_has_the_erf_gelu_as_its_epilogue() -> None:
    """cuBLASLt's epilogue is the tanh form."""
    x = torch.ones(4, 8)
    for form, kernels in (("tanh", ["addmm+gelu"]), ("none", ["addmm", "gelu_erf"])):
        ops = (fuser.BasicLinear(8, 8), fuser.Bias(8), fuser.GELU(form))
        key = fuser.OperationFuser(ops).plan(x, training=False).key
        on_cuda = dataclasses.replace(key, device="cuda")
        rows = fuser.fused_ops.ForwardLinearBiasActivation.kernels(
            *ops, side="forward", key=on_cuda
        )
        assert [name for name, _ in rows] == kernels


@every_window
def test_under_autocast_equals_the_unfused_ops_within_the_rule(window: Window) -> None:
    fused, unfused = window.model(), window.model(fusions=())
    draws = []
    for seed in DRAWS:
        inputs = window.inputs(torch.float32, seed)
        names = [f"extra {k}" for k in range(len(inputs) - 1)]
        tensors = {"x": inputs[0], **params_of(fused), **dict(zip(names, inputs[1:], strict=True))}
        exact = run_formula(window.formula(fused), tensors, torch.float64)
        ours, alone = (run(m, leaves(inputs), torch.bfloat16) for m in (fused, unfused))
        draw = Draw(ours, alone, exact, arithmetic=torch.bfloat16)
        draws.append(outputs_of(draw) if window.gradient_may_jump else draw)
    assert_no_worse_than_torch(*draws)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "window", [w for w in WINDOWS if w.fusion.startswith("BackwardAdd")], ids=str
)
def test_a_norms_gradient_and_another_are_added_before_they_are_rounded(
    window: Window, dtype: torch.dtype
) -> None:
    """The error of one rounding; the ops alone round the norm's gradient too, and have more."""
    fused, unfused = window.model(dtype), window.model(dtype, fusions=())
    inputs = window.inputs(dtype, 1, leading=(1024,))
    tensors = {"x": inputs[0], **params_of(fused)}
    truth = run_formula(window.formula(fused), tensors, torch.float64)["gradient of x"]

    def error(dx: torch.Tensor) -> float:
        return float((dx.double() - truth).square().mean().sqrt())

    once = error(truth.to(dtype))
    # fp32 moves a few sums over the middle between two numbers.
    assert error(run(fused, leaves(inputs))["gradient of x"]) <= 1.01 * once
    assert error(run(unfused, leaves(inputs))["gradient of x"]) > 1.1 * once


@every_window
def test_the_kernels_of_a_fusion_finish_each_of_its_ops_once(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the planner counts as launches; another sum is another time, and another cover."""
    counts: list[tuple[str, int, int]] = []
    for fusion in fuser.FUSIONS:

        def counted(cls: Any, *ops: Any, own: Any = fusion.kernels, **where: Any) -> Any:
            kernels = own(*ops, **where)
            finished = sum(count for _, count in kernels)
            counts.append((cls.__name__, finished, len(where["key"].ops)))
            return kernels

        monkeypatch.setattr(fusion, "kernels", classmethod(counted))
    for recipe, device in itertools.product(
        (None, Float8CurrentScaling(), MXFP8BlockScaling()), (None, "h200")
    ):
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            model, inputs = window.model(), leaves(window.inputs(torch.float32, 1))
            model.plan(*inputs, device=device)
    assert window.fusion in {name for name, *_ in counts}
    assert [each for each in counts if each[1] != each[2]] == []


@pytest.mark.parametrize("window", [w for w in WINDOWS if any(c.extra for c in w.cases)], ids=str)
@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_an_extra_input_of_another_shape_is_refused_in_a_call_that_needs_no_new_plan(
    window: Window, fusions: Any
) -> None:
    """Of the same dtype: keys of calls contain no shapes. No shape is broadcast."""
    model, (x, *extras) = window.model(fusions=fusions), window.inputs(torch.float32, 1)
    model(x, *extras)
    main = tuple(extras[0].shape)
    for shape in ((1, main[1]), main[1:], (5, 1), (1, *main)):
        with pytest.raises(InputError) as caught:
            model(x, torch.zeros(shape))
        refusal = sentence("add-extra-input-shape-main-two", shape, main)
        assert str(caught.value).startswith(refusal)
    assert len(model.plans) == 1


# -- gradients that nobody asked for -----------------------------------------------------


def _wanted_sets(count: int) -> Iterator[tuple[bool, ...]]:
    """Each leaf alone wanted, and each alone not wanted."""
    for k in range(count):
        yield tuple(i == k for i in range(count))
        yield tuple(i != k for i in range(count))


@every_window
def test_only_wanted_gradients_are_made_and_they_are_the_same(window: Window) -> None:
    inputs = window.inputs(torch.float32, 1)
    fused, unfused = window.model(), window.model(fusions=())
    count = len(inputs) + len(list(fused.parameters()))
    for wanted in _wanted_sets(count):
        if not any(wanted):
            continue
        results = []
        for model in (fused, unfused):
            for parameter, want in zip(model.parameters(), wanted[len(inputs) :], strict=True):
                parameter.requires_grad_(want)
            given = [
                t.clone().requires_grad_(want)
                for t, want in zip(inputs, wanted[: len(inputs)], strict=True)
            ]
            results.append(run(model, given))
        grads = [t is not None for name, t in results[0].items() if name.startswith("gradient")]
        assert grads == list(wanted)
        assert_only_roundings_moved(*results)


WITH_LINEAR = [w for w in WINDOWS if any(c.name == "BasicLinear" for c in w.cases)]
with_linear = pytest.mark.parametrize("window", WITH_LINEAR, ids=str)


@pytest.mark.sampled
@with_linear
@fused_or_not
@pytest.mark.parametrize("frozen", ["weight", "input", "neither"])
def test_backward_runs_one_gemm_for_each_gradient_that_is_wanted(
    window: Window, fusions: Any, frozen: str
) -> None:
    model, inputs = window.model(fusions=fusions), window.inputs(torch.float32, 1)
    if frozen == "weight":
        model.requires_grad_(False)
    if frozen != "input":
        inputs = leaves(inputs)
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(
            [y for y in outputs if y.requires_grad],
            [torch.ones_like(y) for y in outputs if y.requires_grad],
        )
    (features,) = [op.out_features for op in model if isinstance(op, fuser.BasicLinear)]
    one_gemm = 2 * inputs[0].shape[0] * FEATURES * features
    assert counter.get_total_flops() == one_gemm * (2 if frozen == "neither" else 1)


@every_window
@fused_or_not
def test_nothing_is_saved_if_no_backward_can_follow(window: Window, fusions: Any) -> None:
    model, saved = window.model(fusions=fusions), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    inputs = window.inputs(torch.float32, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.no_grad():
            model(*leaves(inputs))
        model.requires_grad_(False)
        model(*inputs)
        assert saved == []
        model(*leaves(inputs))
    frozen_linear = any(c.name == "BasicLinear" for c in window.cases)
    memory = {t.untyped_storage().data_ptr() for t in saved}
    if frozen_linear:
        # With the weight frozen, only wgrad would have read the linear's input.
        assert inputs[0].untyped_storage().data_ptr() not in memory
