"""Every fusion: fires, refuses with a reason, equals the unfused ops; and fusions of the user."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from oracles import (
    ACTIVATIONS,
    DTYPES,
    Case,
    Draw,
    assert_no_worse_than_torch,
    bias,
    layernorm,
    leaf,
    linear,
    outputs_of,
    params_of,
    random_tensor,
    randomize,
    rmsnorm,
    run_formula,
    run_module,
    torch_layernorm,
    torch_rmsnorm,
    worst_error,
)
from torch.utils.flop_counter import FlopCounterMode

import fuser
import fuser.runtime.pipeline

DRAWS = range(8)
FEATURES = 6
# A fused half adds or multiplies at another place than the unfused one, which
# moves at most four roundings of the largest value.
MOVED_ROUNDINGS = 4


# -- pipelines that a fusion takes -------------------------------------------------


def _linear(outputs: int = FEATURES) -> Case:
    return Case(
        "BasicLinear",
        lambda dtype: fuser.BasicLinear(FEATURES, outputs, dtype=dtype),
        linear,
        (FEATURES,),
    )


def _bias(size: int = FEATURES) -> Case:
    return Case("Bias", lambda dtype: fuser.Bias(size, dtype=dtype), bias, (size,))


ADD = Case("AddExtraInput", lambda dtype: fuser.AddExtraInput(), lambda x, e: x + e, (), "same")
MAKE = Case(
    "MakeExtraOutput", lambda dtype: fuser.MakeExtraOutput(), lambda x: (x.clone(), x.clone()), ()
)
SCALE = Case("ConstantScale", lambda dtype: fuser.ConstantScale(-1.5), lambda x: x * -1.5, ())
RMSNORM = Case(
    "RMSNorm",
    lambda dtype: fuser.RMSNorm(FEATURES, dtype=dtype),
    rmsnorm(),
    (FEATURES,),
    native=torch_rmsnorm((FEATURES,)),
)
LAYERNORM = Case(
    "LayerNorm",
    lambda dtype: fuser.LayerNorm(FEATURES, dtype=dtype),
    layernorm(),
    (FEATURES,),
    native=torch_layernorm((FEATURES,)),
)


@dataclass(frozen=True)
class Window:
    """A pipeline in which ``fusion`` takes the ops ``ops`` on ``side``, as ``kernels``."""

    fusion: str
    side: str
    cases: tuple[Case, ...]
    kernels: str
    features: int = FEATURES

    def __str__(self) -> str:
        return f"{self.fusion}-{'-'.join(c.name for c in self.cases)}"

    @property
    def ops(self) -> tuple[int, ...]:
        return tuple(range(len(self.cases)))

    @property
    def gradient_may_jump(self) -> bool:
        """Whether the last bit of a GEMM's 16-bit output decides on which side of a kink it is."""
        return self.cases[0].name == "BasicLinear" and any(c.has_kink for c in self.cases)

    def model(
        self, dtype: torch.dtype = torch.float32, fusions: Any = fuser.FUSIONS
    ) -> fuser.Sequential:
        model = fuser.Sequential(*[c.make(dtype) for c in self.cases], fusions=fusions)
        randomize(model)
        return model

    def inputs(self, dtype: torch.dtype, seed: int, leading: Any = (5,)) -> list[torch.Tensor]:
        """The main input, and the extra ones, all in the shape of the main line there."""
        x = random_tensor((*leading, self.features), dtype, seed)
        inputs = [x]
        features = self.features
        for number, c in enumerate(self.cases):
            if c.name == "BasicLinear":
                features = c.make(dtype).out_features
            if c.extra == "same":
                inputs.append(random_tensor((*leading, features), dtype, 30 + seed + number))
        return inputs

    def formula(self, model: fuser.Sequential, *, plain: bool = False) -> Callable[..., Any]:
        """The pipeline's formula, or what plain torch runs, over x, parameters, extra inputs."""
        counts = [len(list(op.parameters())) for op in model]

        def run(x: torch.Tensor, *tensors: torch.Tensor) -> Any:
            params, extras = iter(tensors[: sum(counts)]), iter(tensors[sum(counts) :])
            returned = []
            for c, count in zip(self.cases, counts, strict=True):
                own = [*itertools.islice(params, count)]
                own += [next(extras)] if c.extra else []
                x = (c.plain if plain else c.formula)(x, *own)
                if isinstance(x, tuple):
                    x, made = x
                    returned.append(made)
            return (x, *returned)

        return run


WINDOWS = [
    *[
        Window(
            "ForwardLinearBiasActivation",
            "forward",
            (_linear(c.shape[0]), _bias(c.shape[0]), c),
            "addmm, ",
        )
        for c in ACTIVATIONS
    ],
    Window("ForwardLinearBiasActivation", "forward", (_linear(5), _bias(5)), "addmm"),
    Window("ForwardLinearBiasAdd", "forward", (_linear(5), ADD), "addmm"),
    Window("ForwardLinearBiasAdd", "forward", (_linear(5), _bias(5), ADD), "addmm, add_"),
    Window("ForwardLinearScaleAdd", "forward", (_linear(5), SCALE, ADD), "addmm"),
    Window("ForwardAddRMSNorm", "forward", (ADD, RMSNORM), "add, rmsnorm"),
    Window("ForwardAddRMSNorm", "forward", (ADD, MAKE, RMSNORM), "add, rmsnorm"),
    Window("ForwardAddLayerNorm", "forward", (ADD, LAYERNORM), "add, layernorm"),
    Window("ForwardAddLayerNorm", "forward", (ADD, MAKE, LAYERNORM), "add, layernorm"),
    Window("BackwardLinearAdd", "backward", (MAKE, _linear(5)), "wgrad mm, dgrad addmm"),
    Window("BackwardLinearScale", "backward", (_linear(5), SCALE), "dgrad mm, wgrad mm"),
    *[
        Window(
            "BackwardActivationBias",
            "backward",
            (_bias(c.shape[0]), c),
            "_backward, sum",
            c.shape[0],
        )
        for c in ACTIVATIONS
    ],
    Window("BackwardAddRMSNorm", "backward", (MAKE, RMSNORM), "rmsnorm_backward, add_"),
    Window("BackwardAddLayerNorm", "backward", (MAKE, LAYERNORM), "layernorm_backward, add_"),
]

every_window = pytest.mark.parametrize("window", WINDOWS, ids=str)
every_dtype = pytest.mark.parametrize(
    "dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def fused_steps(plan: fuser.FusionPlan, fusion: str) -> dict[str, list[tuple[int, ...]]]:
    """Where ``fusion`` runs, by side."""
    return {
        side: [step.ops for step in plan.steps(side) if step.fusion == fusion]
        for side in ("forward", "backward")
    }


def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [leaf(t) for t in tensors]


def run(
    model: torch.nn.Module, inputs: list[torch.Tensor], autocast: torch.dtype | None = None
) -> dict[str, Any]:
    return run_module(model, inputs[0], inputs[1:], autocast)


def assert_only_roundings_moved(fused: dict[str, Any], unfused: dict[str, Any]) -> None:
    assert set(fused) == set(unfused)
    for name, expected in unfused.items():
        assert (fused[name] is None) == (expected is None), name
        if expected is not None and expected.numel():
            allowed = (
                MOVED_ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
            )
            assert worst_error(fused[name], expected) <= allowed, name


# -- fires, equals, is named -------------------------------------------------------


@every_window
@every_dtype
def test_fires_where_its_window_stands(window: Window, dtype: torch.dtype) -> None:
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
    shipped = {f.__name__ for f in fuser.FUSIONS} - {"PointwiseChain"}
    assert {window.fusion for window in WINDOWS} == shipped
    assert all(
        f.side == window.side
        for window in WINDOWS
        for f in fuser.FUSIONS
        if f.__name__ == window.fusion
    )


@every_window
@every_dtype
def test_equals_fp64_as_well_as_torch_and_the_unfused_ops_do(
    window: Window, dtype: torch.dtype
) -> None:
    fused, unfused = window.model(dtype), window.model(dtype, fusions=())
    against_torch, against_unfused = [], []
    for seed in DRAWS:
        inputs = window.inputs(dtype, seed)
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
            draws = map(outputs_of, draws)
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
def test_never_changes_the_callers_tensors(window: Window) -> None:
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
    for activation in (fuser.GELU(), fuser.ReLU()):
        model = randomize(fuser.Sequential(fuser.Linear(32, 32), activation))
        x = random_tensor((8, 32), torch.float32, 1)
        expected = model(x)
        with torch.no_grad():
            assert torch.equal(model(x), expected)


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
        return (dx.double() - truth).square().mean().sqrt().item()

    once = error(truth.to(dtype))
    # fp32 moves a few sums over the middle between two numbers.
    assert error(run(fused, leaves(inputs))["gradient of x"]) <= 1.01 * once
    assert error(run(unfused, leaves(inputs))["gradient of x"]) > 1.1 * once


# -- gradients that nobody asked for -----------------------------------------------


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
fused_or_not = pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])


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
def test_nothing_is_saved_where_no_backward_can_come(window: Window, fusions: Any) -> None:
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


# -- refusals ----------------------------------------------------------------------


class Opaque(fuser.BasicOperation):
    """The identity, without a word to the planner about its output."""

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_.clone()

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


def refusal(plan: fuser.FusionPlan, fusion: str, ops: tuple[int, ...]) -> str:
    """Why ``fusion`` does not run ``ops``; fails unless there is exactly one reason."""
    (reason,) = [r.reason for r in plan.refusals if (r.fusion, r.ops) == (fusion, ops)]
    return reason


FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Refused:
    """A pipeline that matches ``fusion`` over ``ops`` by type, and the values it must name."""

    fusion: str
    ops: tuple[int, ...]
    make: Callable[[], list[torch.nn.Module]]
    inputs: Callable[[], list[torch.Tensor]]
    named: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.fusion}-{'-'.join(type(op).__name__ for op in self.make())}"


def _tensor(dtype: torch.dtype, grad: bool = True, features: int = FEATURES) -> torch.Tensor:
    return random_tensor((4, features), dtype, 1).requires_grad_(grad)


def _frozen(op: torch.nn.Module) -> torch.nn.Module:
    return op.requires_grad_(False)


_TWO_DTYPES = ("torch.bfloat16", "torch.float32")
_N = FEATURES
REFUSED = [
    Refused(
        "ForwardLinearBiasActivation",
        (0, 1),
        lambda: [fuser.BasicLinear(_N, _N, dtype=BF16), fuser.Bias(_N, dtype=FP32)],
        lambda: [_tensor(BF16)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearBiasActivation",
        (0, 1, 2),
        lambda: [fuser.BasicLinear(_N, _N), fuser.Bias(_N, dtype=BF16), fuser.GELU()],
        lambda: [_tensor(FP32)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearBiasAdd",
        (0, 1),
        lambda: [fuser.BasicLinear(_N, _N, dtype=BF16), fuser.AddExtraInput()],
        lambda: [_tensor(BF16), _tensor(FP32)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearBiasAdd",
        (0, 1, 2),
        lambda: [
            fuser.BasicLinear(_N, _N, dtype=BF16),
            fuser.Bias(_N, dtype=FP32),
            fuser.AddExtraInput(),
        ],
        lambda: [_tensor(BF16), _tensor(FP32)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearBiasAdd",
        (0, 1, 2),
        lambda: [fuser.BasicLinear(_N, _N), fuser.Bias(_N), fuser.AddExtraInput()],
        lambda: [_tensor(FP32), _tensor(BF16)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearScaleAdd",
        (0, 1, 2),
        lambda: [fuser.BasicLinear(_N, _N), fuser.ConstantScale(2.0), fuser.AddExtraInput()],
        lambda: [_tensor(FP32), _tensor(BF16)],
        _TWO_DTYPES,
    ),
    Refused(
        "BackwardLinearAdd",
        (0, 1),
        lambda: [fuser.MakeExtraOutput(), fuser.BasicLinear(_N, _N, dtype=BF16)],
        lambda: [_tensor(FP32)],
        _TWO_DTYPES,
    ),
    Refused(
        "BackwardLinearAdd",
        (0, 1),
        lambda: [fuser.MakeExtraOutput(), fuser.BasicLinear(_N, _N)],
        lambda: [_tensor(FP32, grad=False)],
        ("op 1",),
    ),
    Refused(
        "BackwardAddRMSNorm",
        (0, 1),
        lambda: [fuser.MakeExtraOutput(), fuser.RMSNorm(_N)],
        lambda: [_tensor(FP32, grad=False)],
        ("op 1",),
    ),
    Refused(
        "BackwardAddLayerNorm",
        (0, 1),
        lambda: [fuser.MakeExtraOutput(), fuser.LayerNorm(_N)],
        lambda: [_tensor(FP32, grad=False)],
        ("op 1",),
    ),
    Refused(
        "BackwardActivationBias",
        (0, 1),
        lambda: [_frozen(fuser.Bias(_N)), fuser.GELU()],
        lambda: [_tensor(FP32)],
        ("bias needs no gradient",),
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refuses_with_a_reason_that_names_the_values_and_runs_unfused(case: Refused) -> None:
    ops, inputs = case.make(), case.inputs()
    model = fuser.Sequential(*ops)
    unfused = fuser.Sequential(*ops, fusions=())
    plan = model.plan(*inputs)
    reason = refusal(plan, case.fusion, case.ops)
    assert reason.endswith(".")
    for value in case.named:
        assert value in reason
    assert all(step.fusion != case.fusion for step in plan.forward + plan.backward)
    # One line for all windows that are refused alike.
    (line,) = (
        line for line in str(plan).splitlines() if f"{case.fusion} over " in line and reason in line
    )
    assert f"{case.ops[0]}-{case.ops[-1]}" in line.partition(":")[0]
    expected = run(unfused, inputs)
    ours = run(model, inputs)
    assert_only_roundings_moved(ours, expected)
    assert model.plans == (plan,)


def test_of_two_overlapping_windows_the_one_that_was_not_chosen_says_so() -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput(), fuser.BasicLinear(_N, _N), fuser.ConstantScale(2.0)
    )
    plan = model.plan(_tensor(FP32))
    overlapping = {"BackwardLinearAdd": (0, 1), "BackwardLinearScale": (1, 2)}
    (chosen,) = [step.fusion for step in plan.backward if step.fusion]
    (other,) = set(overlapping) - {chosen}
    assert refusal(plan, other, overlapping[other]).startswith("possible, but")


def test_a_dtype_that_autocast_settles_is_not_refused() -> None:
    linear_op, bias_op = fuser.BasicLinear(_N, _N, dtype=BF16), fuser.Bias(_N, dtype=FP32)
    model = fuser.Sequential(linear_op, bias_op)
    x = _tensor(BF16)
    with torch.autocast("cpu", BF16):
        assert model.plan(x).forward[0].fusion == "ForwardLinearBiasActivation"
        assert model(x).dtype == BF16
    assert model.plan(x).forward[0].fusion is None


def test_backward_linear_add_refuses_an_extra_output_that_autocast_leaves_in_fp32() -> None:
    model = fuser.Sequential(fuser.MakeExtraOutput(), fuser.BasicLinear(_N, _N))
    with torch.autocast("cpu", BF16):
        reason = refusal(model.plan(_tensor(FP32)), "BackwardLinearAdd", (0, 1))
    assert "torch.bfloat16" in reason
    assert "torch.float32" in reason


@pytest.mark.parametrize("last", [fuser.GELU, fuser.AddExtraInput])
def test_a_bias_that_does_not_fit_its_linear_is_refused_and_the_call_names_it(last: Any) -> None:
    # Behind an op that does not tell its output the planner cannot know the sizes.
    model = fuser.Sequential(Opaque(), fuser.BasicLinear(_N, 5), fuser.Bias(1), last())
    inputs = [_tensor(FP32)] + ([_tensor(FP32, features=5)] if last is fuser.AddExtraInput else [])
    fusion = (
        "ForwardLinearBiasAdd" if last is fuser.AddExtraInput else "ForwardLinearBiasActivation"
    )
    reason = refusal(model.plan(*inputs), fusion, (1, 2, 3))
    assert "5 outputs" in reason
    assert "bias 1" in reason
    with pytest.raises(ValueError, match=r"Bias\(1\) got an input of shape \(4, 5\)"):
        model(*inputs)


def test_a_channel_inside_a_window_is_refused_by_its_name() -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        fuser.ConstantScale(2.0),
        fuser.AddExtraInput().set_extra_input_channel(0, "residual"),
        fusions=(Residual,),
    )
    x = _tensor(FP32)
    reason = refusal(model.plan(x), "Residual", (0, 1, 2))
    assert "'residual'" in reason
    assert "op 0 (MakeExtraOutput)" in reason
    assert "op 2 (AddExtraInput)" in reason
    assert torch.equal(model(x), 3 * x)


def test_backward_linear_add_takes_a_channels_gradient_of_another_dtype() -> None:
    # The fp32 norm makes the sum, and so the gradient that comes up the channel, fp32.
    def model(fusions: Any) -> fuser.Sequential:
        made = fuser.Sequential(
            fuser.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
            fuser.BasicLinear(_N, _N, dtype=BF16),
            fuser.LayerNorm(_N, dtype=FP32),
            fuser.AddExtraInput().set_extra_input_channel(0, "r"),
            fusions=fusions,
        )
        randomize(made)
        return made

    x = _tensor(BF16)
    unfused = run(model(()), leaves([x]))
    fused = run(model(fuser.FUSIONS), leaves([x]))
    assert unfused["output 0"].dtype == FP32
    assert_only_roundings_moved(fused, unfused)


# -- fusions of the user -----------------------------------------------------------


class Residual(fuser.FusedOperation):
    """``y = scale * x + x``, which no kernel can run while a channel carries x."""

    window = (fuser.MakeExtraOutput, fuser.ConstantScale, fuser.AddExtraInput)
    side = "forward"
    fuser_forward = fuser_backward = None  # only planned


class ScaleTwice(fuser.FusedOperation):
    """``y = b * (a * x)`` in one product; remembers what ran."""

    window = (fuser.ConstantScale, fuser.ConstantScale)
    side = "forward"
    ran: ClassVar[list[Any]] = []

    def product(self) -> float:
        return self.basic_ops[0].scale * self.basic_ops[1].scale

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        ScaleTwice.ran.append(("forward", self))
        return input_ * self.product(), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        ScaleTwice.ran.append(("backward", self))
        return grad_output * self.product(), [(), ()], [(), ()]


class ScaleTwiceBackward(ScaleTwice):
    side = "backward"


class ScaleTwiceJointly(ScaleTwice):
    side = "joint"


@pytest.fixture(autouse=True)
def nothing_ran_yet() -> None:
    ScaleTwice.ran.clear()


def scales(*fusions: type[fuser.FusedOperation], count: int = 2) -> fuser.Sequential:
    return fuser.Sequential(
        *[fuser.ConstantScale(2.0) for _ in range(count)], fusions=fuser.FUSIONS + fusions
    )


@pytest.mark.parametrize(
    ("fusion", "sides"),
    [
        (ScaleTwice, ["forward"]),
        (ScaleTwiceBackward, ["backward"]),
        (ScaleTwiceJointly, ["forward", "backward"]),
    ],
)
def test_a_users_fusion_fires_on_its_side(fusion: Any, sides: list[str]) -> None:
    model, x = scales(fusion), _tensor(FP32)
    results = run(model, [x])
    steps = fused_steps(model.plans[0], fusion.__name__)
    assert [side for side in ("forward", "backward") if steps[side] == [(0, 1)]] == sides
    assert [side for side, _ in ScaleTwice.ran] == sides
    assert torch.equal(results["output 0"], 4 * x)
    assert_only_roundings_moved(results, run(fuser.Sequential(*model, fusions=()), [x]))


def test_a_joint_fusion_is_run_as_one_instance_on_both_sides() -> None:
    model = scales(ScaleTwiceJointly)
    run(model, [_tensor(FP32)])
    (_, forward), (_, back) = ScaleTwice.ran
    assert forward is back
    assert list(forward.basic_ops) == list(model)


def test_a_joint_fusion_also_runs_where_no_gradient_is_wanted() -> None:
    model, x = scales(ScaleTwiceJointly), _tensor(FP32)
    with torch.no_grad():
        assert torch.equal(model(x), 4 * x)
    assert [side for side, _ in ScaleTwice.ran] == ["forward"]
    assert model.plans[0].backward == ()


def test_joint_windows_that_overlap_are_taken_by_both_sides_alike() -> None:
    model = scales(ScaleTwiceJointly, count=5)
    plan = model.plan(_tensor(FP32))
    steps = fused_steps(plan, "ScaleTwiceJointly")
    assert len(steps["forward"]) == 2
    assert sorted(steps["forward"]) == sorted(steps["backward"])
    # Those left out are named, with the reason.
    refused = {r.ops for r in plan.refusals if r.fusion == "ScaleTwiceJointly"}
    assert refused == {(i, i + 1) for i in range(4)} - set(steps["forward"])


def test_a_joint_window_that_costs_more_than_it_saves_is_refused_with_a_sentence() -> None:
    class Costly(ScaleTwiceJointly):
        @classmethod
        def kernels(cls, *ops, side, key):
            return (*[("setup", 0)] * 100, ("scale", 2))

    plan = scales(Costly).plan(_tensor(FP32))
    assert fused_steps(plan, "Costly") == {"forward": [], "backward": []}
    assert refusal(plan, "Costly", (0, 1)).endswith(".")


def test_a_joint_window_before_the_first_gradient_is_not_charged_for_a_backward() -> None:
    class DearBackward(ScaleTwiceJointly):
        @classmethod
        def kernels(cls, *ops, side, key):
            setup = 100 if side == "backward" else 0
            return (*[("setup", 0)] * setup, ("scale", 2))

    # Nothing before the bias needs a gradient, so the joint window's backward never runs.
    model = fuser.Sequential(*scales(), fuser.Bias(_N), fusions=(DearBackward,))
    plan = model.plan(_tensor(FP32, grad=False))
    assert fused_steps(plan, "DearBackward") == {"forward": [(0, 1)], "backward": []}


class Refusing(ScaleTwice):
    @classmethod
    def refuses(cls, first, second, *, key):
        return f"the scales are {first.scale} and {second.scale}."


class Broken(ScaleTwice):
    @classmethod
    def refuses(cls, first, second, *, key):
        raise ZeroDivisionError("no way to tell")


class BrokenKernels(ScaleTwice):
    @classmethod
    def kernels(cls, *ops, side, key):
        raise KeyError("scale")


class Uncovering(ScaleTwice):
    @classmethod
    def kernels(cls, *ops, side, key):
        return (("scale", 1),)


def test_a_users_refusal_is_in_the_plan() -> None:
    plan = scales(Refusing).plan(_tensor(FP32))
    assert refusal(plan, "Refusing", (0, 1)) == "the scales are 2.0 and 2.0."
    assert "Refusing over 0-1: the scales are 2.0 and 2.0." in str(plan)


@pytest.mark.parametrize(
    ("fusion", "said"),
    [
        (Broken, "ZeroDivisionError: no way to tell"),
        (BrokenKernels, "KeyError: 'scale'"),
    ],
)
def test_a_fusion_that_raises_is_named_with_its_exception_and_the_ops_run_unfused(
    fusion: Any, said: str
) -> None:
    model, x = scales(fusion), _tensor(FP32)
    with pytest.warns(UserWarning, match=f"{fusion.__name__}.*{said}"):
        plan = model.plan(x)
    assert said in refusal(plan, fusion.__name__, (0, 1))
    assert fusion.__name__ in refusal(plan, fusion.__name__, (0, 1))
    with pytest.warns(UserWarning, match=fusion.__name__):
        assert torch.equal(scales(fusion)(x), 4 * x)
    assert ScaleTwice.ran == []


def test_a_fusion_whose_kernels_do_not_cover_its_window_is_refused() -> None:
    model, x = scales(Uncovering), _tensor(FP32)
    assert "do not cover the 2 ops" in refusal(model.plan(x), "Uncovering", (0, 1))
    assert torch.equal(model(x), 4 * x)


class DoubledBias(fuser.Bias):
    """Adds the bias twice, so it is not the op that fusions were written for."""

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_ + 2 * self.bias

    def op_backward(self, ctx, grad_output):
        return grad_output, (2 * grad_output.sum(0),)


class NamedBias(fuser.Bias):
    """A bias that computes like any other."""


def test_a_subclass_that_overrides_the_computation_is_not_matched() -> None:
    x = _tensor(FP32)
    model = fuser.Sequential(fuser.BasicLinear(_N, _N), DoubledBias(_N), fuser.GELU())
    randomize(model)
    plan = model.plan(x)
    assert all(step.fusion is None for step in plan.forward + plan.backward)
    weight, doubled = (p.detach() for p in model.parameters())
    expected = torch.nn.functional.gelu(x @ weight.T + 2 * doubled, approximate="tanh")
    assert torch.allclose(model(x), expected)


def test_a_subclass_that_computes_alike_is_matched() -> None:
    model = fuser.Sequential(fuser.BasicLinear(_N, _N), NamedBias(_N))
    assert model.plan(_tensor(FP32)).forward[0].fusion == "ForwardLinearBiasActivation"


def test_window_patterns_take_optional_alternative_and_repeated_ops() -> None:
    from fuser.plan.window import Many, OneOf, Optional

    bound: list[tuple[Any, ...]] = []

    class Pattern(fuser.FusedOperation):
        window = (Many(fuser.ConstantScale), Optional(fuser.Bias), OneOf(fuser.GELU, fuser.ReLU))
        side = "forward"
        fuser_forward = fuser_backward = None  # only planned

        @classmethod
        def refuses(cls, *ops, key):
            bound.append(ops)
            assert len(key.ops) == sum(
                len(o) if isinstance(o, tuple) else o is not None for o in ops
            )
            return "only looking."

    ops = [fuser.ConstantScale(1.0), fuser.ConstantScale(1.0), fuser.Bias(_N), fuser.ReLU()]
    fuser.Sequential(*ops, fusions=(Pattern,)).plan(_tensor(FP32))
    assert bound == [((ops[0], ops[1]), ops[2], ops[3]), ((ops[1],), ops[2], ops[3])]
    bound.clear()
    ops = [fuser.ConstantScale(1.0), fuser.GELU(), fuser.SiLU()]
    fuser.Sequential(*ops, fusions=(Pattern,)).plan(_tensor(FP32))
    assert bound == [((ops[0],), None, ops[1])]


# -- fused ops that return the wrong number of tensors -----------------------------


def wrong(result: Any, on: str, *window: type) -> type[fuser.FusedOperation]:
    """A fused op over ``window`` whose ``on`` half returns ``result`` for its rows."""

    class Wrong(fuser.FusedOperation):
        side = on

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_, result(input_)

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            return grad_output, *result(grad_output)

    Wrong.window = window
    return Wrong


@pytest.mark.parametrize(
    ("ops", "result", "said"),
    [
        (
            [fuser.MakeExtraOutput, fuser.ConstantScale],
            lambda t: [(), ()],
            r"\[1, 0\] extra outputs.*\[0, 0\]",
        ),
        (
            [fuser.MakeExtraOutput, fuser.ConstantScale],
            lambda t: [],
            r"\[1, 0\] extra outputs.*\[0, 0\]",
        ),
        (
            [fuser.MakeExtraOutput, fuser.ConstantScale],
            lambda t: [(t, t), ()],
            r"\[1, 0\] extra outputs.*\[2, 0\]",
        ),
        (
            [fuser.MakeExtraOutput, fuser.ConstantScale],
            lambda t: [(), (t,)],
            r"\[1, 0\] extra outputs.*\[0, 1\]",
        ),
        (
            [fuser.ConstantScale, fuser.ConstantScale],
            lambda t: [(t,), ()],
            r"\[0, 0\] extra outputs.*\[1, 0\]",
        ),
    ],
    ids=["too-few", "no-rows", "too-many", "of-the-wrong-op", "of-ops-that-have-none"],
)
def test_a_wrong_number_of_extra_outputs_is_a_sentence(ops: Any, result: Any, said: str) -> None:
    made = [op(2.0) if op is fuser.ConstantScale else op() for op in ops]
    model = fuser.Sequential(*made, fusions=(wrong(result, "forward", *ops),))
    for x in (_tensor(FP32), _tensor(FP32, grad=False)):
        with pytest.raises(RuntimeError, match=f"Wrong .*{said}"):
            model(x)
    fuser.Sequential(*made)(_tensor(FP32))


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda g: ([(), ()], [(), (g,)]), r"parameters.*0"),
        (lambda g: ([(g, g), ()], [(), (g,)]), r"parameters.*2"),
        (lambda g: ([(g[0],), ()], [(), ()]), r"extra inputs.*\[0, 0\]"),
        (lambda g: ([(g[0],), ()], [(), (g, g)]), r"extra inputs.*\[0, 2\]"),
    ],
    ids=["no-params", "many-params", "no-extras", "many-extras"],
)
def test_a_wrong_number_of_gradients_is_a_sentence(result: Any, said: str) -> None:
    ops = [fuser.Bias(_N), fuser.AddExtraInput()]
    fusion = wrong(result, "backward", fuser.Bias, fuser.AddExtraInput)
    x, extra = _tensor(FP32), _tensor(FP32)
    y = fuser.Sequential(*ops, fusions=(fusion,))(x, extra)
    with pytest.raises(RuntimeError, match=said):
        y.sum().backward()
    assert x.grad is extra.grad is ops[0].bias.grad is None
    fuser.Sequential(*ops)(x, extra).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


# -- registered functions ----------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(
        fuser.runtime.pipeline, "_registered", fuser.runtime.pipeline.RegisteredFusions()
    )


REGISTER = {
    "forward": fuser.register_forward_fusion,
    "backward": fuser.register_backward_fusion,
    "joint": fuser.register_forward_backward_fusion,
}


def pairing(fused: type[fuser.FusedOperation]) -> Callable[..., list[Any]]:
    """A registered function that puts ``fused`` in for the first two scales it finds."""

    def pair_scales(ops: list[Any], *, recipe: Any) -> list[Any]:
        assert recipe is None
        for i in range(len(ops) - 1):
            if all(isinstance(op, fuser.ConstantScale) for op in ops[i : i + 2]):
                return [*ops[:i], fused(ops[i : i + 2]), *ops[i + 2 :]]
        return ops

    return pair_scales


@pytest.mark.parametrize("side", REGISTER)
@pytest.mark.usefixtures("registry")
def test_a_registered_function_puts_its_op_in_ahead_of_the_planner(side: str) -> None:
    class Registered(ScaleTwice):
        window = ()
        side = ""

    REGISTER[side](pairing(Registered))
    # The planner's own fusions would rather take ops 1 and 2.
    model, x = scales(ScaleTwice, ScaleTwiceBackward, count=3), _tensor(FP32)
    results = run(model, [x])
    steps = fused_steps(model.plans[0], "Registered")
    sides = ["forward", "backward"] if side == "joint" else [side]
    assert [s for s in ("forward", "backward") if steps[s] == [(0, 1)]] == sides
    assert torch.equal(results["output 0"], 8 * x)
    assert_only_roundings_moved(results, run_formula(lambda t: t * 8, {"x": x}, FP32))
    ours = [fused for _, fused in ScaleTwice.ran if type(fused) is Registered]
    assert len(ours) == len(sides)
    assert len(set(map(id, ours))) == 1


@pytest.mark.usefixtures("registry")
def test_registered_functions_run_in_order_and_prepend_runs_first() -> None:
    order: list[str] = []

    def noting(name: str) -> Callable[..., list[Any]]:
        def note(ops: list[Any], *, recipe: Any) -> list[Any]:
            order.append(name)
            return ops

        return note

    fuser.register_forward_fusion(noting("second"))
    fuser.register_forward_fusion(noting("third"))
    fuser.register_forward_fusion(noting("first"), prepend=True)
    model = scales()
    model(_tensor(FP32))
    model(_tensor(FP32))
    assert order == ["first", "second", "third"]


class Doubled(fuser.FusedOperation):
    """``x + x`` for a copy of x on a channel, which is added again; the channel is not needed."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **kwargs):
        assert basic_op_extra_inputs == [(), (None,)]  # what it makes itself
        return 2 * input_, [(input_ if self.needs_channel else None,), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        ((later,), ()) = basic_op_grad_extra_outputs
        grad_input = 2 * grad_output if later is None else 2 * grad_output + later
        return grad_input, [(), ()], [(), (None,)]

    needs_channel = False


class DoubledForLater(Doubled):
    """The same where others want the tensor too."""

    needs_channel = True


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("later", ["nobody", "caller", "op"])
@pytest.mark.parametrize("side", ["forward", "backward", "joint"])
def test_a_registered_fusion_may_take_both_ends_of_a_channel(side: str, later: str) -> None:
    def model() -> fuser.Sequential:
        to_caller = later == "caller"
        make = fuser.MakeExtraOutput()
        make.set_extra_output_channel(0, "r", output_to_caller=to_caller)
        adds = [fuser.AddExtraInput().set_extra_input_channel(0, "r") for _ in range(2)]
        tail = [fuser.ConstantScale(3.0), adds[1]] if later == "op" else []
        return fuser.Sequential(fuser.ConstantScale(1.0), make, adds[0], *tail)

    def function(ops: Any, *, recipe: Any) -> Any:
        fusion = Doubled if later == "nobody" else DoubledForLater
        return [ops[0], fusion(ops[1:3]), *ops[3:]]

    expected = run(model(), [_tensor(FP32)])
    REGISTER[side](function)
    split = model()
    actual = run(split, [_tensor(FP32)])
    assert set(actual) == set(expected)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])
    for half in ("forward", "backward") if side == "joint" else (side,):
        plan = split.plan(_tensor(FP32))
        assert any(step.ops == (1, 2) and step.fusion for step in plan.steps(half))


@pytest.mark.usefixtures("registry")
def test_registering_after_a_call_takes_effect_at_the_next() -> None:
    model, x = scales(), _tensor(FP32)
    model(x)
    fuser.register_forward_fusion(pairing(ScaleTwice))
    model(x)
    assert [side for side, _ in ScaleTwice.ran] == ["forward"]
    assert len(model.plans) == 2


@pytest.mark.parametrize("side", REGISTER)
@pytest.mark.parametrize(
    "cover",
    [
        lambda ops: ops[:-1],
        lambda ops: [*ops, ops[0]],
        lambda ops: ops[::-1],
        lambda ops: [ScaleTwice(ops[1:]), ops[0]],
        lambda ops: [],
    ],
    ids=["missing", "repeated", "reversed", "out-of-order", "nothing"],
)
@pytest.mark.usefixtures("registry")
def test_a_registered_function_that_does_not_cover_the_ops_is_named(side: str, cover: Any) -> None:
    def careless(ops: list[Any], *, recipe: Any) -> list[Any]:
        return cover(ops)

    before = fuser.runtime.pipeline._registered
    REGISTER[side](careless)
    model, x = fuser.Sequential(fuser.ConstantScale(2.0), fuser.GELU(), fuser.ReLU()), _tensor(FP32)
    with pytest.raises(RuntimeError, match=r"careless.*ConstantScale, GELU, ReLU"):
        model(x)
    fuser.runtime.pipeline._registered = before
    model(x)


class ExtraAndLinearBackward(fuser.FusedOperation):
    """``dx = dy @ weight + d_extra``, for ops that a registered function names."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (grad_extra,) = basic_op_grad_extra_outputs[0]
        dx, grads = self.basic_ops[1].op_backward(basic_op_ctxs[1], grad_output)
        return None if dx is None else dx + grad_extra, [(), grads], []


@pytest.mark.parametrize("wants_input_grad", [True, False], ids=["x-grad", "no-x-grad"])
@pytest.mark.usefixtures("registry")
def test_a_registered_backward_that_starts_before_the_first_gradient_still_runs(
    wants_input_grad: bool,
) -> None:
    def pair(ops: list[Any], *, recipe: Any) -> list[Any]:
        return [ExtraAndLinearBackward(ops[:2]), *ops[2:]]

    fuser.register_backward_fusion(pair)
    model = fuser.Sequential(fuser.MakeExtraOutput(), fuser.BasicLinear(_N, _N), fuser.GELU())
    fuser.runtime.pipeline._registered, kept = (
        fuser.runtime.pipeline.RegisteredFusions(),
        fuser.runtime.pipeline._registered,
    )
    x = _tensor(FP32, grad=wants_input_grad)
    expected = run(fuser.Sequential(*model, fusions=()), [x])
    fuser.runtime.pipeline._registered = kept
    assert_only_roundings_moved(run(model, [x]), expected)


# -- custom basic ops --------------------------------------------------------------


class LearnedScale(fuser.BasicOperation):
    """``y = x * scale`` with one learned factor a column, as a user writes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(size))
        self.contexts: list[bool] = []

    def op_forward(
        self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer, **kwargs
    ):
        self.contexts.append(ctx.requires_grad)
        if ctx.requires_grad:
            ctx.save_for_backward(input_, self.scale)
            ctx.rows = input_.shape[0]
        return input_ * self.scale

    def op_backward(self, ctx, grad_output):
        x, scale = ctx.saved_tensors
        assert ctx.rows == x.shape[0]
        return grad_output * scale, [(grad_output * x).sum(0)]


def _learned_scale_oracle(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


def test_a_custom_basic_op_runs_alone() -> None:
    op, draws = LearnedScale(_N), []
    randomize(op)
    for seed in DRAWS:
        x = random_tensor((4, _N), FP32, seed)
        tensors = {"x": x, **params_of(op)}
        plain, exact = (
            run_formula(_learned_scale_oracle, tensors, d) for d in (FP32, torch.double)
        )
        draws.append(Draw(run_module(op, leaf(x)), plain, exact))
    assert_no_worse_than_torch(*draws)
    with torch.no_grad():
        op(x)
    assert op.contexts == [True] * len(DRAWS) + [False]


@fused_or_not
def test_a_custom_basic_op_runs_between_built_in_ones(fusions: Any) -> None:
    model = fuser.Sequential(
        fuser.Linear(_N, 8), LearnedScale(8), fuser.GELU(), fuser.Linear(8, _N), fusions=fusions
    )
    randomize(model)

    def formula(x: torch.Tensor, w1: Any, b1: Any, scale: Any, w2: Any, b2: Any) -> torch.Tensor:
        hidden = torch.nn.functional.gelu((x @ w1.T + b1) * scale, approximate="tanh")
        return hidden @ w2.T + b2

    draws = []
    for seed in DRAWS:
        x = random_tensor((4, _N), FP32, seed)
        tensors = {"x": x, **params_of(model)}
        plain, exact = (run_formula(formula, tensors, d) for d in (FP32, torch.double))
        draws.append(Draw(run_module(model, leaf(x)), plain, exact))
    assert_no_worse_than_torch(*draws)
    if fusions:
        assert model.plans[0].forward[0].fusion == "ForwardLinearBiasActivation"


@pytest.mark.parametrize(
    "as_row",
    [list, tuple, iter, lambda grads: (g for g in grads)],
    ids=["list", "tuple", "iterator", "generator"],
)
def test_a_custom_op_may_return_its_gradients_in_any_iterable(as_row: Any) -> None:
    class Doubling(LearnedScale):
        def op_backward(self, ctx, grad_output):
            dx, grads = super().op_backward(ctx, grad_output)
            return dx, as_row(grads)

    ops = [fuser.Bias(_N), Doubling(_N)]
    expected = run(fuser.Sequential(fuser.Bias(_N), LearnedScale(_N)), [_tensor(FP32)])
    actual = run(fuser.Sequential(*ops), [_tensor(FP32)])
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_custom_op_without_parameters_may_return_none_for_their_gradients() -> None:
    class Negated(Opaque):
        def op_backward(self, ctx, grad_output):
            return grad_output, None

    x = _tensor(FP32)
    fuser.Sequential(fuser.GELU(), Negated(), fuser.ConstantScale(2.0))(x).sum().backward()
    assert x.grad is not None


def test_a_custom_op_that_drops_the_gradient_on_the_way_is_named() -> None:
    class Dropping(Opaque):
        def op_backward(self, ctx, grad_output):
            return None, ()

    y = fuser.Sequential(fuser.GELU(), Dropping(), fuser.ConstantScale(2.0))(_tensor(FP32))
    with pytest.raises(RuntimeError, match=r"Dropping|GELU"):
        y.sum().backward()


class ProductAndSum(fuser.BasicOperation):
    """``y = x * a * b``, with ``x + a`` and ``x - b`` as extra outputs."""

    num_extra_inputs = 2
    num_extra_outputs = 2

    def fuser_forward(
        self,
        basic_op_ctxs,
        input_,
        *,
        basic_op_extra_inputs,
        prev_op_grad_output_quantizer,
        next_op_input_quantizer,
        basic_op_kwargs,
    ):
        (ctx,) = basic_op_ctxs
        ((a, b),) = basic_op_extra_inputs
        if ctx.requires_grad:
            ctx.save_for_backward(input_, a, b)
        return input_ * a * b, [(input_ + a, input_ - b)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, a, b = basic_op_ctxs[0].saved_tensors
        ((d_sum, d_difference),) = basic_op_grad_extra_outputs
        dx = grad_output * a * b + d_sum + d_difference
        return dx, [()], [(grad_output * x * b + d_sum, grad_output * x * a - d_difference)]


def _product_and_sum_oracle(x: torch.Tensor, *rest: torch.Tensor) -> Any:
    *weights, a, b = rest
    if weights:
        x = x @ weights[0].T + weights[1]
    y, plus, minus = x * a * b, x + a, x - b
    return (y @ weights[2].T if weights else y), plus, minus


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in-a-pipeline"])
def test_a_custom_basic_op_with_extra_inputs_and_outputs(alone: bool) -> None:
    model: Any = ProductAndSum()
    if not alone:
        model = fuser.Sequential(fuser.Linear(_N, _N), model, fuser.Linear(_N, _N, bias=False))
        randomize(model)
    draws = []
    for seed in DRAWS:
        x, a, b = (random_tensor((4, _N), FP32, 10 * seed + k) for k in range(3))
        tensors = {"x": x, **params_of(model), "extra 0": a, "extra 1": b}
        plain, exact = (
            run_formula(_product_and_sum_oracle, tensors, d) for d in (FP32, torch.double)
        )
        draws.append(Draw(run_module(model, leaf(x), leaves([a, b])), plain, exact))
    assert_no_worse_than_torch(*draws)


def test_an_extra_output_that_was_not_used_has_a_zero_gradient() -> None:
    x, a, b = (leaf(random_tensor((4, _N), FP32, k)) for k in range(3))
    y, _, minus = ProductAndSum()(x, a, b)
    (y.sum() + minus.sum()).backward()
    x64, a64, b64 = (leaf(t, torch.float64) for t in (x, a, b))
    ((x64 * a64 * b64).sum() + (x64 - b64).sum()).backward()
    for ours, exact in ((x, x64), (a, a64), (b, b64)):
        assert torch.allclose(ours.grad, exact.grad.float())


@pytest.mark.parametrize(
    ("extra", "method"), [(0, "op_forward"), (1, "fuser_forward")], ids=["plain", "with-extra"]
)
def test_an_op_without_a_forward_says_which_method_is_missing(extra: int, method: str) -> None:
    class Empty(fuser.BasicOperation):
        num_extra_inputs = extra

    with pytest.raises(RuntimeError, match=f"Empty .*{method}"):
        Empty()(torch.ones(2, 2), *[torch.ones(2, 2)] * extra)


def test_pre_forward_hooks_are_called_once_and_each_time() -> None:
    class Hooked(Opaque):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def pre_first_fuser_forward(self) -> None:
            self.calls.append("first")

        def pre_fuser_forward(self, *, requires_grad: bool) -> None:
            self.calls.append(requires_grad)

    op = Hooked()
    model = fuser.Sequential(fuser.GELU(), op)
    model.plan(_tensor(FP32))
    assert op.calls == []
    model(_tensor(FP32))
    model(_tensor(FP32, grad=False))
    assert op.calls == ["first", True, False]
