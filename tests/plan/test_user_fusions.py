"""Fusions of the user: they fire, refuse, match by type, and return the tensors that they must."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from fusion_cases import (
    FEATURES,
    FP32,
    ScaleTwice,
    ScaleTwiceBackward,
    assert_only_roundings_moved,
    fused_steps,
    refusal,
    run,
    scales,
    tensor_of,
)
from oracles import (
    randomize,
)
from said import holds, said

import fuser
import fuser.runtime.pipeline

# -- fusions of the user -----------------------------------------------------------------


class ScaleTwiceJointly(ScaleTwice):
    side = "joint"


@pytest.fixture(autouse=True)
def nothing_ran_yet() -> None:
    ScaleTwice.ran.clear()


@pytest.mark.parametrize(
    ("fusion", "sides"),
    [
        (ScaleTwice, ["forward"]),
        (ScaleTwiceBackward, ["backward"]),
        (ScaleTwiceJointly, ["forward", "backward"]),
    ],
)
def test_a_users_fusion_fires_on_its_side(fusion: Any, sides: list[str]) -> None:
    model, x = scales(fusion), tensor_of(FP32)
    results = run(model, [x])
    steps = fused_steps(model.plans[0], fusion.__name__)
    assert [side for side in ("forward", "backward") if steps[side] == [(0, 1)]] == sides
    assert [side for side, _ in ScaleTwice.ran] == sides
    assert torch.equal(results["output 0"], 4 * x)
    assert_only_roundings_moved(results, run(fuser.Sequential(*model, fusions=()), [x]))


def test_a_joint_fusion_is_run_as_one_instance_on_both_sides() -> None:
    model = scales(ScaleTwiceJointly)
    run(model, [tensor_of(FP32)])
    (_, forward), (_, back) = ScaleTwice.ran
    assert forward is back
    assert list(forward.basic_ops) == list(model)


def test_a_joint_fusion_also_runs_where_no_gradient_is_wanted() -> None:
    model, x = scales(ScaleTwiceJointly), tensor_of(FP32)
    with torch.no_grad():
        assert torch.equal(model(x), 4 * x)
    assert [side for side, _ in ScaleTwice.ran] == ["forward"]
    assert model.plans[0].backward == ()


def test_joint_windows_that_overlap_are_taken_by_both_sides_alike() -> None:
    model = scales(ScaleTwiceJointly, count=5)
    plan = model.plan(tensor_of(FP32))
    steps = fused_steps(plan, "ScaleTwiceJointly")
    assert len(steps["forward"]) == 2
    assert sorted(steps["forward"]) == sorted(steps["backward"])
    # Those left out are named, with the reason.
    refused = {r.ops for r in plan.refusals if r.fusion == "ScaleTwiceJointly"}
    assert refused == {(i, i + 1) for i in range(4)} - set(steps["forward"])


def test_a_joint_window_that_costs_more_than_it_saves_is_refused_with_a_sentence() -> None:
    class Costly(ScaleTwiceJointly):
        @classmethod
        def kernels(cls, *ops: Any, side: Any, key: Any) -> Any:
            return (*[("setup", 0)] * 100, ("scale", 2))

    plan = scales(Costly).plan(tensor_of(FP32))
    assert fused_steps(plan, "Costly") == {"forward": [], "backward": []}
    assert refusal(plan, "Costly", (0, 1)).endswith(".")


def test_a_joint_window_before_the_first_gradient_is_not_charged_for_a_backward() -> None:
    class DearBackward(ScaleTwiceJointly):
        @classmethod
        def kernels(cls, *ops: Any, side: Any, key: Any) -> Any:
            setup = 100 if side == "backward" else 0
            return (*[("setup", 0)] * setup, ("scale", 2))

    # Nothing before the bias needs a gradient, so the joint window's backward never runs.
    model = fuser.Sequential(*scales(), fuser.Bias(FEATURES), fusions=(DearBackward,))
    plan = model.plan(tensor_of(FP32, grad=False))
    assert fused_steps(plan, "DearBackward") == {"forward": [(0, 1)], "backward": []}


class Refusing(ScaleTwice):
    @classmethod
    def refuses(cls, first: Any, second: Any, *, key: Any) -> str:
        return f"the scales are {first.scale} and {second.scale}."


class Broken(ScaleTwice):
    @classmethod
    def refuses(cls, first: Any, second: Any, *, key: Any) -> str:
        raise ZeroDivisionError("no way to tell")


class BrokenKernels(ScaleTwice):
    @classmethod
    def kernels(cls, *ops: Any, side: Any, key: Any) -> Any:
        raise KeyError("scale")


class Uncovering(ScaleTwice):
    @classmethod
    def kernels(cls, *ops: Any, side: Any, key: Any) -> Any:
        return (("scale", 1),)


def test_a_users_refusal_is_in_the_plan() -> None:
    plan = scales(Refusing).plan(tensor_of(FP32))
    assert refusal(plan, "Refusing", (0, 1)) == "the scales are 2.0 and 2.0."
    assert "Refusing over 0-1: the scales are 2.0 and 2.0." in str(plan)


@pytest.mark.parametrize(
    ("fusion", "words"),
    [
        (Broken, "ZeroDivisionError: no way to tell"),
        (BrokenKernels, "KeyError: 'scale'"),
    ],
)
def test_a_fusion_that_raises_is_named_with_its_exception_and_the_ops_run_unfused(
    fusion: Any, words: str
) -> None:
    model, x = scales(fusion), tensor_of(FP32)
    with pytest.warns(
        UserWarning,
        match=said("planner-used-asked-about", fusion.__name__, None, *words.split(": ")),
    ):
        plan = model.plan(x)
    assert words in refusal(plan, fusion.__name__, (0, 1))
    assert fusion.__name__ in refusal(plan, fusion.__name__, (0, 1))
    with pytest.warns(UserWarning, match=said("planner-used-asked-about", fusion.__name__)):
        assert torch.equal(scales(fusion)(x), 4 * x)
    assert ScaleTwice.ran == []


def test_a_fusion_whose_kernels_do_not_cover_its_window_is_refused() -> None:
    model, x = scales(Uncovering), tensor_of(FP32)
    assert "do not cover the 2 ops" in refusal(model.plan(x), "Uncovering", (0, 1))
    assert torch.equal(model(x), 4 * x)


class DoubledBias(fuser.Bias):
    """Adds the bias twice, so it is not the op that fusions were written for."""

    def op_forward(
        self,
        ctx: Any,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
    ) -> torch.Tensor:
        return input_ + 2 * self.bias

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output, (2 * grad_output.sum(0),)


class NamedBias(fuser.Bias):
    """A bias that computes like any other."""


def test_a_subclass_that_overrides_the_computation_is_not_matched() -> None:
    x = tensor_of(FP32)
    model = fuser.Sequential(
        fuser.BasicLinear(FEATURES, FEATURES), DoubledBias(FEATURES), fuser.GELU()
    )
    randomize(model)
    plan = model.plan(x)
    assert all(step.fusion is None for step in plan.forward + plan.backward)
    weight, doubled = (p.detach() for p in model.parameters())
    expected = torch.nn.functional.gelu(x @ weight.T + 2 * doubled, approximate="tanh")
    assert torch.allclose(model(x), expected)


def test_a_subclass_that_computes_alike_is_matched() -> None:
    model = fuser.Sequential(fuser.BasicLinear(FEATURES, FEATURES), NamedBias(FEATURES))
    assert model.plan(tensor_of(FP32)).forward[0].fusion == "ForwardLinearBiasActivation"


def test_window_patterns_take_optional_alternative_and_repeated_ops() -> None:
    from fuser.plan.window import Many, OneOf, Optional

    bound: list[tuple[Any, ...]] = []

    class Pattern(fuser.FusedOperation):
        window = (Many(fuser.ConstantScale), Optional(fuser.Bias), OneOf(fuser.GELU, fuser.ReLU))
        side = "forward"
        fuser_forward: Any = None  # only planned
        fuser_backward: Any = None

        @classmethod
        def refuses(cls, *ops: Any, key: Any) -> str:
            bound.append(ops)
            assert len(key.ops) == sum(
                len(o) if isinstance(o, tuple) else o is not None for o in ops
            )
            return "only looking."

    ops = [fuser.ConstantScale(1.0), fuser.ConstantScale(1.0), fuser.Bias(FEATURES), fuser.ReLU()]
    fuser.Sequential(*ops, fusions=(Pattern,)).plan(tensor_of(FP32), training=False)
    assert bound == [((ops[0], ops[1]), ops[2], ops[3]), ((ops[1],), ops[2], ops[3])]
    bound.clear()
    ops = [fuser.ConstantScale(1.0), fuser.GELU(), fuser.SiLU()]
    fuser.Sequential(*ops, fusions=(Pattern,)).plan(tensor_of(FP32), training=False)
    assert bound == [((ops[0],), None, ops[1])]


# -- fused ops that return the wrong number of tensors -----------------------------------


def wrong(result: Any, on: str, *window: type) -> type[fuser.FusedOperation]:
    """A fused op over ``window`` whose ``on`` half returns ``result`` for its rows."""

    class Wrong(fuser.FusedOperation):
        side: ClassVar[Any] = on

        def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **unused: Any) -> Any:
            return input_, result(input_)

        def fuser_backward(
            self, basic_op_ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
        ) -> Any:
            return grad_output, *result(grad_output)

    Wrong.window = window
    return Wrong


@pytest.mark.parametrize(
    ("ops", "result", "words"),
    [
        (
            [fuser.MakeExtraOutput, fuser.ConstantScale],
            lambda t: [(), ()],
            said("codegen-replaces-ops-returned", "Wrong", 0, 1, "[1, 0] extra outputs", [0, 0]),
        ),
        (
            [fuser.MakeExtraOutput, fuser.ConstantScale],
            lambda t: [],
            said("codegen-replaces-ops-returned", "Wrong", 0, 1, "[1, 0] extra outputs", [0, 0]),
        ),
        (
            [fuser.MakeExtraOutput, fuser.ConstantScale],
            lambda t: [(t, t), ()],
            said("codegen-replaces-ops-returned", "Wrong", 0, 1, "[1, 0] extra outputs", [2, 0]),
        ),
        (
            [fuser.MakeExtraOutput, fuser.ConstantScale],
            lambda t: [(), (t,)],
            said("codegen-replaces-ops-returned", "Wrong", 0, 1, "[1, 0] extra outputs", [0, 1]),
        ),
        (
            [fuser.ConstantScale, fuser.ConstantScale],
            lambda t: [(t,), ()],
            said("codegen-replaces-ops-returned", "Wrong", 0, 1, "[0, 0] extra outputs", [1, 0]),
        ),
    ],
    ids=["too-few", "no-rows", "too-many", "of-the-wrong-op", "of-ops-that-have-none"],
)
def test_a_wrong_number_of_extra_outputs_is_a_sentence(ops: Any, result: Any, words: str) -> None:
    made = [op(2.0) if op is fuser.ConstantScale else op() for op in ops]
    model = fuser.Sequential(*made, fusions=(wrong(result, "forward", *ops),))
    for x in (tensor_of(FP32), tensor_of(FP32, grad=False)):
        with pytest.raises(RuntimeError, match=words):
            model(x)
    fuser.Sequential(*made)(tensor_of(FP32))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            lambda g: ([(), ()], [(), (g,)]),
            said("diagnose-op-parameters-gradients", None, None, None, 0),
        ),
        (
            lambda g: ([(g, g), ()], [(), (g,)]),
            said("diagnose-op-parameters-gradients", None, None, None, 2),
        ),
        (
            lambda g: ([(g[0],), ()], [(), ()]),
            said("codegen-replaces-ops-returned", "Wrong", 0, 1, holds("extra inputs"), [0, 0]),
        ),
        (
            lambda g: ([(g[0],), ()], [(), (g, g)]),
            said("codegen-replaces-ops-returned", "Wrong", 0, 1, holds("extra inputs"), [0, 2]),
        ),
    ],
    ids=["no-params", "many-params", "no-extras", "many-extras"],
)
def test_a_wrong_number_of_gradients_is_a_sentence(result: Any, words: str) -> None:
    ops = [fuser.Bias(FEATURES), fuser.AddExtraInput()]
    fusion = wrong(result, "backward", fuser.Bias, fuser.AddExtraInput)
    x, extra = tensor_of(FP32), tensor_of(FP32)
    y = fuser.Sequential(*ops, fusions=(fusion,))(x, extra)
    with pytest.raises(RuntimeError, match=words):
        y.sum().backward()
    assert x.grad is extra.grad is ops[0].bias.grad is None
    fuser.Sequential(*ops)(x, extra).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


class WithoutSide(fuser.FusedOperation):
    window = (fuser.GELU,)


class WithoutWindow(fuser.FusedOperation):
    side = "forward"


class OfNames(fuser.FusedOperation):
    side = "forward"
    window = ("GELU",)


class OnNoSide(fuser.FusedOperation):
    side = "sideways"  # type: ignore[assignment]
    window = (fuser.GELU,)


@pytest.mark.parametrize(
    ("fusions", "words"),
    [
        (5, said("pipeline-sequence-fused-operation", 5)),
        (fuser.GELU(), said("pipeline-sequence-fused-operation", holds("GELU"))),
        (torch.nn.Sequential(), said("pipeline-sequence-fused-operation", holds("Sequential"))),
        ([3], said("pipeline-sequence-fused-operation", 3)),
        ([fuser.GELU], said("pipeline-sequence-fused-operation", holds("GELU"))),
        ([WithoutSide], r"WithoutSide has side '?"),
        ([WithoutWindow], "WithoutWindow has side 'forward' and window"),
        ([OfNames], r"OfNames.window is \('GELU',\); it is a tuple of op classes"),
        ([OnNoSide], "OnNoSide.side is 'sideways'"),
    ],
    ids=str,
)
def test_what_is_no_sequence_of_fusions_is_refused(fusions: Any, words: str) -> None:
    with pytest.raises((fuser.InputError, fuser.InputTypeError), match=words):
        fuser.Sequential(fuser.GELU(), fusions=fusions)(torch.ones(2, 8))
