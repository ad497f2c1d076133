"""Mistakes in ops and fusions of others: each error names the op, and has the values in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from said import holds, said

import fuser
from fuser.op import BasicOperation, FusedOperation


class ReturnsTuple(BasicOperation):
    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> Any:
        return (2 * input_,)

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return 2 * grad_output, ()


class NarrowGradient(BasicOperation):
    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> Any:
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output[:, :3], ()


class RowGradient(BasicOperation):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> Any:
        return input_ * self.weight

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output, (grad_output.sum(1),)


class FlatGradient(BasicOperation):
    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> Any:
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output[0], ()


class DropsGradient(BasicOperation):
    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> Any:
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return None, ()


class NoInit(BasicOperation):
    def __init__(self) -> None:
        pass


class NoInitWithParameter(BasicOperation):
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(8))


class SavesNothing(FusedOperation):
    window = (fuser.GELU, fuser.ConstantScale)
    side = "forward"

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
        return torch.nn.functional.gelu(input_, approximate="tanh"), ((), ())


class NoRows(BasicOperation):
    """Returns None in the place of ``rows``, one of its three lists."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, rows: str) -> None:
        super().__init__()
        self.rows = rows
        self.weight = torch.nn.Parameter(torch.ones(8))

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
        return 2 * input_, None if self.rows == "extra outputs" else [(input_.clone(),)]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: torch.Tensor, **_: Any) -> Any:
        params = None if self.rows == "parameters" else [(torch.ones(8),)]
        extras = None if self.rows == "extra inputs" else [(torch.ones(4, 8),)]
        return 2 * grad_output, params, extras


@pytest.mark.parametrize("rows", ["extra outputs", "extra inputs", "parameters"])
@pytest.mark.parametrize("is_channel", [False, True])
def test_none_in_the_place_of_all_rows_is_a_runtime_error(rows: str, is_channel: bool) -> None:
    op, added = NoRows(rows), fuser.AddExtraInput()
    if is_channel:
        op.set_extra_output_channel(0, "channel", output_to_caller=False)
        added.set_extra_input_channel(0, "channel")
    model = fuser.Sequential(fuser.GELU(), op, *([added] if is_channel else []))
    x, extra = torch.ones(4, 8, requires_grad=True), torch.ones(4, 8, requires_grad=True)

    def step() -> None:
        y = model(x, extra)
        (y if is_channel else y[0]).sum().backward()

    for _ in range(2):
        with pytest.raises(RuntimeError, match=said("codegen-place-rows-returns", "NoRows", rows)):
            step()
    op.rows = ""
    step()
    assert torch.equal(extra.grad, torch.ones(4, 8))
    assert torch.equal(op.weight.grad, torch.ones(8))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, requires_grad=True)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("tail", [[], [fuser.GELU()], [fuser.Linear(8, 8)]])
def test_an_op_that_returns_a_tuple_is_named(
    x: torch.Tensor, tail: list[BasicOperation], is_training: bool
) -> None:
    model = fuser.Sequential(ReturnsTuple(), *tail)
    for _ in range(2):
        with pytest.raises(
            fuser.StateError,
            match=said("diagnose-output-tensor", "ReturnsTuple.op_forward", "tuple"),
        ):
            model(x if is_training else x.detach())


@pytest.mark.parametrize("bad", [NarrowGradient, RowGradient])
@pytest.mark.parametrize(
    "head", [[], [fuser.GELU()], [fuser.Linear(8, 8)], [fuser.LayerNorm(8)], [fuser.Bias(8)]]
)
def test_an_op_that_returns_a_gradient_of_the_wrong_shape_is_named(
    x: torch.Tensor, head: list[BasicOperation], bad: type[BasicOperation]
) -> None:
    model = fuser.Sequential(*head, bad())
    wrong: tuple[object, ...] = ((4, 3), "its input", (4, 8))
    if bad is RowGradient:
        wrong = ((4,), "its parameter 0", (8,))
    words = said("diagnose-returned-gradient-shape", holds(f"{bad.__name__})"), *wrong)
    for _ in range(2):  # a failure does not end the checks
        with pytest.raises(fuser.StateError, match=words):
            model(x).sum().backward()


@pytest.mark.parametrize("head", [fuser.GELU(), fuser.Linear(8, 8), fuser.Bias(8)])
def test_an_op_that_returns_no_gradient_for_its_input_is_named(
    x: torch.Tensor, head: BasicOperation
) -> None:
    model = fuser.Sequential(head, DropsGradient(), fuser.GELU())
    place = 1 + isinstance(head, fuser.Linear)
    words = said("diagnose-ops-no-gradient", "DropsGradient", place, place)
    for _ in range(2):
        with pytest.raises(fuser.StateError, match=words):
            model(x).sum().backward()
    first = fuser.Sequential(DropsGradient(), fuser.GELU())
    first(x).sum().backward()  # as torch takes None from the first of its functions
    assert x.grad is None


def test_an_op_that_returns_a_gradient_of_fewer_dimensions_is_named(x: torch.Tensor) -> None:
    words = said(
        "diagnose-returned-gradient-shape", holds("FlatGradient)"), (8,), "its input", (4, 8)
    )
    with pytest.raises(fuser.StateError, match=words):
        fuser.Sequential(FlatGradient(), fuser.GELU())(x).sum().backward()


def test_gradients_of_a_plan_are_checked_once(x: torch.Tensor) -> None:
    model = fuser.Sequential(fuser.GELU(), fuser.Bias(8))
    for _ in range(2):
        model(x).sum().backward()
    (pipeline,) = model._current_segments().pipelines()
    (run,) = pipeline._plans.values()
    assert run.forward is run._forward
    assert run.backward is run._backward


@pytest.mark.parametrize("tail", [[], [fuser.Linear(8, 8)]])
def test_a_fusion_that_saves_nothing_for_an_op_is_named(
    x: torch.Tensor, tail: list[BasicOperation]
) -> None:
    ops = (fuser.GELU(), fuser.ConstantScale(2.0), *tail)
    model = fuser.Sequential(*ops, fusions=(SavesNothing,))
    output = model(x)
    with pytest.raises(
        fuser.StateError,
        match=said(
            "diagnose-failed-ran-saved", 0, "GELU", None, "SavesNothing", "fuser_forward", 0
        ),
    ):
        output.sum().backward()


@pytest.mark.parametrize("cls", [NoInit, NoInitWithParameter])
@pytest.mark.parametrize("is_alone", [True, False])
def test_an_op_without_super_init_is_named(
    x: torch.Tensor, cls: type[BasicOperation], is_alone: bool
) -> None:
    match = rf"{cls.__name__}.__init__ does not call super"
    with pytest.raises(fuser.StateError, match=match):
        (cls() if is_alone else fuser.Sequential(fuser.Linear(8, 8), cls()))(x)
