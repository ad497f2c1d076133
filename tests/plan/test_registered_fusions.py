"""Functions that a user registers and that replace ops ahead of the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_cases import (
    FEATURES,
    FP32,
    ScaleTwice,
    ScaleTwiceBackward,
    assert_only_roundings_moved,
    fused_steps,
    run,
    scales,
    tensor_of,
)
from oracles import (
    run_formula,
)
from said import said

import fuser
import fuser.runtime.pipeline


@pytest.fixture(autouse=True)
def nothing_ran_yet() -> None:
    ScaleTwice.ran.clear()


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
    model, x = scales(ScaleTwice, ScaleTwiceBackward, count=3), tensor_of(FP32)
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
    model(tensor_of(FP32))
    model(tensor_of(FP32))
    assert order == ["first", "second", "third"]


class Doubled(fuser.FusedOperation):
    """``x + x`` for a copy of x on a channel, which is added again; the channel is not needed."""

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: torch.Tensor, *, basic_op_extra_inputs: Any, **kwargs: Any
    ) -> Any:
        assert basic_op_extra_inputs == [(), (None,)]  # what it makes itself
        return 2 * input_, [(input_ if self.needs_channel else None,), ()]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
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

    expected = run(model(), [tensor_of(FP32)])
    REGISTER[side](function)
    split = model()
    actual = run(split, [tensor_of(FP32)])
    assert set(actual) == set(expected)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])
    for half in ("forward", "backward") if side == "joint" else (side,):
        plan = split.plan(tensor_of(FP32))
        assert any(step.ops == (1, 2) and step.fusion for step in plan.steps(half))


@pytest.mark.usefixtures("registry")
def test_registering_after_a_call_takes_effect_at_the_next() -> None:
    model, x = scales(), tensor_of(FP32)
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
    def careless(ops: list[Any], *, recipe: Any) -> Any:
        return cover(ops)

    before = fuser.runtime.pipeline._registered
    REGISTER[side](careless)
    model, x = (
        fuser.Sequential(fuser.ConstantScale(2.0), fuser.GELU(), fuser.ReLU()),
        tensor_of(FP32),
    )
    with pytest.raises(
        RuntimeError,
        match=said("registered-returned-ops-do", "careless", "ConstantScale, GELU, ReLU"),
    ):
        model(x)
    fuser.runtime.pipeline._registered = before
    model(x)


class ExtraAndLinearBackward(fuser.FusedOperation):
    """``dx = dy @ weight + d_extra``, for ops that a registered function names."""

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
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
    model = fuser.Sequential(
        fuser.MakeExtraOutput(), fuser.BasicLinear(FEATURES, FEATURES), fuser.GELU()
    )
    fuser.runtime.pipeline._registered, kept = (
        fuser.runtime.pipeline.RegisteredFusions(),
        fuser.runtime.pipeline._registered,
    )
    x = tensor_of(FP32, grad=wants_input_grad)
    expected = run(fuser.Sequential(*model, fusions=()), [x])
    fuser.runtime.pipeline._registered = kept
    assert_only_roundings_moved(run(model, [x]), expected)
