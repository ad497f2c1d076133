"""Basic ops of the user, alone and between those of the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_cases import DRAWS, FEATURES, FP32, Opaque, fused_or_not, leaves, run, tensor_of
from oracles import (
    Draw,
    assert_no_worse_than_torch,
    leaf,
    params_of,
    random_tensor,
    randomize,
    run_formula,
    run_module,
)

import fuser
import fuser.runtime.pipeline


class LearnedScale(fuser.BasicOperation):
    """``y = x * scale`` with one learned factor a column, as a user writes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(size))
        self.contexts: list[bool] = []

    def op_forward(
        self,
        ctx: Any,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        self.contexts.append(ctx.requires_grad)
        if ctx.requires_grad:
            ctx.save_for_backward(input_, self.scale)
            ctx.rows = input_.shape[0]
        return input_ * self.scale

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        assert ctx.rows == x.shape[0]
        return grad_output * scale, [(grad_output * x).sum(0)]


def _learned_scale_oracle(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


def test_a_custom_basic_op_runs_alone() -> None:
    op, draws = LearnedScale(FEATURES), []
    randomize(op)
    for seed in DRAWS:
        x = random_tensor((4, FEATURES), FP32, seed)
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
        fuser.Linear(FEATURES, 8),
        LearnedScale(8),
        fuser.GELU(),
        fuser.Linear(8, FEATURES),
        fusions=fusions,
    )
    randomize(model)

    def formula(x: torch.Tensor, w1: Any, b1: Any, scale: Any, w2: Any, b2: Any) -> torch.Tensor:
        hidden = torch.nn.functional.gelu((x @ w1.T + b1) * scale, approximate="tanh")
        y: torch.Tensor = hidden @ w2.T + b2
        return y

    draws = []
    for seed in DRAWS:
        x = random_tensor((4, FEATURES), FP32, seed)
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
        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            dx, grads = super().op_backward(ctx, grad_output)
            return dx, as_row(grads)

    ops = [fuser.Bias(FEATURES), Doubling(FEATURES)]
    expected = run(
        fuser.Sequential(fuser.Bias(FEATURES), LearnedScale(FEATURES)), [tensor_of(FP32)]
    )
    actual = run(fuser.Sequential(*ops), [tensor_of(FP32)])
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_custom_op_without_parameters_may_return_none_for_their_gradients() -> None:
    class Negated(Opaque):
        def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> torch.Tensor:
            return -input_

        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            return -grad_output, None

    x = tensor_of(FP32)
    y = fuser.Sequential(fuser.GELU(), Negated(), fuser.ConstantScale(2.0))(x)
    y.sum().backward()
    exact = leaf(x, torch.float64)
    truth = -2 * torch.nn.functional.gelu(exact, approximate="tanh")
    truth.sum().backward()
    torch.testing.assert_close(y, truth.float())
    torch.testing.assert_close(x.grad, exact.grad.float())


def test_a_custom_op_that_drops_the_gradient_on_the_way_is_named() -> None:
    class Dropping(Opaque):
        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            return None, ()

    y = fuser.Sequential(fuser.GELU(), Dropping(), fuser.ConstantScale(2.0))(tensor_of(FP32))
    with pytest.raises(RuntimeError, match=r"Dropping|GELU"):
        y.sum().backward()


class ProductAndSum(fuser.BasicOperation):
    """``y = x * a * b``, with ``x + a`` and ``x - b`` as extra outputs."""

    num_extra_inputs = 2
    num_extra_outputs = 2

    def fuser_forward(
        self,
        basic_op_ctxs: Any,
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: Any,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Any,
    ) -> Any:
        (ctx,) = basic_op_ctxs
        ((a, b),) = basic_op_extra_inputs
        if ctx.requires_grad:
            ctx.save_for_backward(input_, a, b)
        return input_ * a * b, [(input_ + a, input_ - b)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
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
        model = fuser.Sequential(
            fuser.Linear(FEATURES, FEATURES), model, fuser.Linear(FEATURES, FEATURES, bias=False)
        )
        randomize(model)
    draws = []
    for seed in DRAWS:
        x, a, b = (random_tensor((4, FEATURES), FP32, 10 * seed + k) for k in range(3))
        tensors = {"x": x, **params_of(model), "extra 0": a, "extra 1": b}
        plain, exact = (
            run_formula(_product_and_sum_oracle, tensors, d) for d in (FP32, torch.double)
        )
        draws.append(Draw(run_module(model, leaf(x), leaves([a, b])), plain, exact))
    assert_no_worse_than_torch(*draws)


def test_an_extra_output_that_was_not_used_has_a_zero_gradient() -> None:
    x, a, b = (leaf(random_tensor((4, FEATURES), FP32, k)) for k in range(3))
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
    model.plan(tensor_of(FP32))
    assert op.calls == []
    model(tensor_of(FP32))
    model(tensor_of(FP32, grad=False))
    assert op.calls == ["first", True, False]
