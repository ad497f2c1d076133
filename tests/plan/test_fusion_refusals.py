"""A fusion that cannot run refuses with a reason that names the values, and the ops run unfused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fusion_cases import (
    BF16,
    FEATURES,
    FP32,
    Opaque,
    Residual,
    assert_only_roundings_moved,
    leaves,
    refusal,
    run,
    tensor_of,
)
from oracles import (
    randomize,
)
from said import said, sentence

import fuser
import fuser.runtime.pipeline
from fuser.communication import PlannedGroup


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


def _frozen(op: torch.nn.Module) -> torch.nn.Module:
    return op.requires_grad_(False)


_TWO_DTYPES = ("torch.bfloat16", "torch.float32")
REFUSED = [
    Refused(
        "ForwardLinearBiasActivation",
        (0, 1),
        lambda: [
            fuser.BasicLinear(FEATURES, FEATURES, dtype=BF16),
            fuser.Bias(FEATURES, dtype=FP32),
        ],
        lambda: [tensor_of(BF16)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearBiasActivation",
        (0, 1, 2),
        lambda: [
            fuser.BasicLinear(FEATURES, FEATURES),
            fuser.Bias(FEATURES, dtype=BF16),
            fuser.GELU(),
        ],
        lambda: [tensor_of(FP32)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearBiasAdd",
        (0, 1),
        lambda: [fuser.BasicLinear(FEATURES, FEATURES, dtype=BF16), fuser.AddExtraInput()],
        lambda: [tensor_of(BF16), tensor_of(FP32)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearBiasAdd",
        (0, 1, 2),
        lambda: [
            fuser.BasicLinear(FEATURES, FEATURES, dtype=BF16),
            fuser.Bias(FEATURES, dtype=FP32),
            fuser.AddExtraInput(),
        ],
        lambda: [tensor_of(BF16), tensor_of(FP32)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearBiasAdd",
        (0, 1, 2),
        lambda: [
            fuser.BasicLinear(FEATURES, FEATURES),
            fuser.Bias(FEATURES),
            fuser.AddExtraInput(),
        ],
        lambda: [tensor_of(FP32), tensor_of(BF16)],
        _TWO_DTYPES,
    ),
    Refused(
        "ForwardLinearScaleAdd",
        (0, 1, 2),
        lambda: [
            fuser.BasicLinear(FEATURES, FEATURES),
            fuser.ConstantScale(2.0),
            fuser.AddExtraInput(),
        ],
        lambda: [tensor_of(FP32), tensor_of(BF16)],
        _TWO_DTYPES,
    ),
    Refused(
        "BackwardLinearAdd",
        (0, 1),
        lambda: [fuser.MakeExtraOutput(), fuser.BasicLinear(FEATURES, FEATURES, dtype=BF16)],
        lambda: [tensor_of(FP32)],
        _TWO_DTYPES,
    ),
    Refused(
        "BackwardLinearAdd",
        (0, 1),
        lambda: [fuser.MakeExtraOutput(), fuser.BasicLinear(FEATURES, FEATURES)],
        lambda: [tensor_of(FP32, grad=False)],
        ("op 1",),
    ),
    Refused(
        "BackwardAddRMSNorm",
        (0, 1),
        lambda: [fuser.MakeExtraOutput(), fuser.RMSNorm(FEATURES)],
        lambda: [tensor_of(FP32, grad=False)],
        ("op 1",),
    ),
    Refused(
        "BackwardAddLayerNorm",
        (0, 1),
        lambda: [fuser.MakeExtraOutput(), fuser.LayerNorm(FEATURES)],
        lambda: [tensor_of(FP32, grad=False)],
        ("op 1",),
    ),
    Refused(
        "BackwardActivationBias",
        (0, 1),
        lambda: [_frozen(fuser.Bias(FEATURES)), fuser.GELU()],
        lambda: [tensor_of(FP32)],
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


def test_an_overlapping_window_that_was_not_chosen_says_so() -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput(), fuser.BasicLinear(FEATURES, FEATURES), fuser.ConstantScale(2.0)
    )
    plan = model.plan(tensor_of(FP32))
    overlapping = {"BackwardLinearAdd": (0, 1), "BackwardLinearScale": (1, 2)}
    (chosen,) = [step.fusion for step in plan.backward if step.fusion]
    (other,) = set(overlapping) - {chosen}
    assert refusal(plan, other, overlapping[other]).startswith("possible, but")


def test_a_dtype_that_autocast_settles_is_not_refused() -> None:
    linear_op, bias_op = (
        fuser.BasicLinear(FEATURES, FEATURES, dtype=BF16),
        fuser.Bias(FEATURES, dtype=FP32),
    )
    model = fuser.Sequential(linear_op, bias_op)
    x = tensor_of(BF16)
    with torch.autocast("cpu", BF16):
        assert model.plan(x).forward[0].fusion == "ForwardLinearBiasActivation"
        assert model(x).dtype == BF16
    assert model.plan(x).forward[0].fusion is None


def test_backward_linear_add_refuses_an_extra_output_that_autocast_leaves_in_fp32() -> None:
    model = fuser.Sequential(fuser.MakeExtraOutput(), fuser.BasicLinear(FEATURES, FEATURES))
    with torch.autocast("cpu", BF16):
        reason = refusal(model.plan(tensor_of(FP32)), "BackwardLinearAdd", (0, 1))
    assert "torch.bfloat16" in reason
    assert "torch.float32" in reason


@pytest.mark.parametrize("last", [fuser.GELU, fuser.AddExtraInput])
def test_a_bias_that_does_not_fit_its_linear_is_refused_and_the_call_names_it(last: Any) -> None:
    # Behind an op that does not tell its output the planner cannot know the sizes.
    model = fuser.Sequential(Opaque(), fuser.BasicLinear(FEATURES, 5), fuser.Bias(1), last())
    inputs = [tensor_of(FP32)] + (
        [tensor_of(FP32, features=5)] if last is fuser.AddExtraInput else []
    )
    fusion = (
        "ForwardLinearBiasAdd" if last is fuser.AddExtraInput else "ForwardLinearBiasActivation"
    )
    reason = refusal(model.plan(*inputs), fusion, (1, 2, 3))
    assert "5 outputs" in reason
    assert "bias 1" in reason
    with pytest.raises(ValueError, match=said("bias-input-shape-last", 1, (4, 5))):
        model(*inputs)


def test_a_channel_inside_a_window_is_refused_by_its_name() -> None:
    model = fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        fuser.ConstantScale(2.0),
        fuser.AddExtraInput().set_extra_input_channel(0, "residual"),
        fusions=(Residual,),
    )
    x = tensor_of(FP32)
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
            fuser.BasicLinear(FEATURES, FEATURES, dtype=BF16),
            fuser.LayerNorm(FEATURES, dtype=FP32),
            fuser.AddExtraInput().set_extra_input_channel(0, "r"),
            fusions=fusions,
        )
        randomize(made)
        return made

    x = tensor_of(BF16)
    unfused = run(model(()), leaves([x]))
    fused = run(model(fuser.FUSIONS), leaves([x]))
    assert unfused["output 0"].dtype == FP32
    assert_only_roundings_moved(fused, unfused)


@pytest.mark.parametrize("mode", [None, "column", "row"])
def test_ranks_add_no_tensor_to_each_of_their_products(mode: Any) -> None:
    group = None if mode is None else PlannedGroup(2)
    linear = fuser.BasicLinear(
        FEATURES, FEATURES, tensor_parallel_mode=mode, tensor_parallel_group=group
    )
    rows, columns = linear.local_in_features, linear.local_out_features
    x, dy = (torch.empty(4, n, requires_grad=True) for n in (rows, columns))
    fused = {
        "forward": fuser.Sequential(linear, fuser.AddExtraInput()).plan(x, dy),
        "backward": fuser.Sequential(fuser.MakeExtraOutput(), linear).plan(x),
    }
    names = {"forward": "ForwardLinearBiasAdd", "backward": "BackwardLinearAdd"}
    for side, plan in fused.items():
        runs = names[side] in [step.fusion for step in getattr(plan, side)]
        reasons = [r.reason for r in plan.refusals if r.fusion == names[side]]
        if mode is None or (side, mode) == ("backward", "row"):  # whose dgrad needs no sum
            assert runs, (side, reasons)
        else:
            assert not runs
            assert reasons == [sentence("linear-epilogues-parallel-over-tensor", mode, 2)]
