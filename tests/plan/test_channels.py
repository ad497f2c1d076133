"""Channels and extra outputs: how long they live, who may read them, what a caller gets."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from said import said

import fuser

N = 8


class Echo(fuser.BasicOperation):
    """``y = x + extra``, with x as an extra output."""

    num_extra_inputs = num_extra_outputs = 1

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **rest: Any
    ) -> Any:
        return input_ + basic_op_extra_inputs[0][0], [(input_,)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ((grad_extra,),) = basic_op_grad_extra_outputs
        return grad_output + grad_extra, [()], [(grad_output,)]


def test_an_op_that_reads_its_own_channel_is_refused_before_anything_runs() -> None:
    op = Echo()
    op.set_extra_output_channel(0, "own")
    op.set_extra_input_channel(0, "own")
    with pytest.raises(
        fuser.InputError, match=said("graph-read-before-produced", "'own'", "op 0 (Echo)")
    ):
        fuser.Sequential(op)(torch.ones(2, N))


@pytest.mark.parametrize("fusions", [fuser.FUSIONS, ()], ids=["fused", "unfused"])
def test_a_channel_carries_its_tensor_to_the_last_of_its_readers(fusions: Any) -> None:
    make = fuser.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    adds = [fuser.AddExtraInput().set_extra_input_channel(0, "x") for _ in range(3)]
    model = fuser.Sequential(make, fuser.GELU(), *adds, fusions=fusions)
    x = oracles.random_tensor((3, N), torch.float32, 1).requires_grad_()
    torch.testing.assert_close(model(x), oracles.gelu(x) + 3 * x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), oracles.gelu(x) + 3 * x)


def test_each_output_of_a_call_has_a_gradient_of_its_own_though_two_are_one_tensor() -> None:
    x = torch.ones(2, N, requires_grad=True)
    y, extra = fuser.Sequential(fuser.GELU(), fuser.MakeExtraOutput())(x)
    assert y is not extra
    (of_y,) = torch.autograd.grad(y.sum(), y, retain_graph=True)
    assert torch.equal(of_y, torch.ones_like(y))
    assert torch.autograd.grad(y.sum(), extra, allow_unused=True) == (None,)


class Ranked(fuser.BasicOperation):
    """``y = x``, with the order of the first column's values as an extra output of int64."""

    num_extra_outputs = 1

    def extra_output_specs(self, spec: Any, extras: Any) -> tuple[fuser.TensorSpec, ...]:
        return (fuser.TensorSpec(spec.shape[:1], torch.int64),)

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **_: Any) -> Any:
        return input_, [(input_[:, 0].argsort(),)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        return grad_output, [()], [()]


class Taken(fuser.BasicOperation):
    """``y = x[indices]``."""

    num_extra_inputs = 1
    wanted: tuple[bool, ...] = ()

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Any:
        ((indices,),) = basic_op_extra_inputs
        (ctx,) = basic_op_ctxs
        self.wanted = ctx.extra_inputs_require_grad
        ctx.save_for_backward(indices)
        return input_[indices], [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **_: Any) -> Any:
        (indices,) = basic_op_ctxs[0].saved_tensors
        return torch.zeros_like(grad_output).index_add(0, indices, grad_output), [()], [(None,)]


@pytest.mark.parametrize("is_returned", [False, True])
@pytest.mark.parametrize("between", [fuser.GELU, torch.nn.GELU], ids=["one", "in pieces"])
def test_integers_go_through_a_channel_without_a_gradient(between: Any, is_returned: bool) -> None:
    taken = Taken().set_extra_input_channel(0, "order")
    model = fuser.Sequential(
        Ranked().set_extra_output_channel(0, "order", output_to_caller=is_returned),
        between(*([] if between is fuser.GELU else ["tanh"])),
        taken,
    )
    x = oracles.random_tensor((5, N), torch.float32, 1).requires_grad_()
    model.plan(x)
    y, *order = oracles.as_tuple(model(x))
    expected = oracles.gelu(x)[x[:, 0].argsort()]
    torch.testing.assert_close(y, expected)
    assert taken.wanted == (False,)
    assert [t.requires_grad for t in order] == [False] * is_returned
    weights = oracles.random_tensor((5, N), torch.float32, 2)
    (found,) = torch.autograd.grad((y * weights).sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad((expected * weights).sum(), x)[0])
    if is_returned:
        assert torch.equal(order[0], x[:, 0].argsort())


def test_backward_gets_no_gradient_of_integers() -> None:
    given: list[Any] = []

    class Counted(Ranked):
        num_extra_outputs = 2

        def extra_output_specs(self, spec: Any, extras: Any) -> tuple[fuser.TensorSpec, ...]:
            return (fuser.TensorSpec(spec.shape[:1], torch.int64), spec)

        def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **_: Any) -> Any:
            return input_, [(input_[:, 0].argsort(), input_ * 2)]

        def fuser_backward(
            self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
        ) -> Any:
            given.extend(basic_op_grad_extra_outputs[0])
            return grad_output, [()], [()]

    counted = Counted().set_extra_output_channel(0, "order", output_to_caller=False)
    model = fuser.Sequential(counted, fuser.GELU(), Taken().set_extra_input_channel(0, "order"))
    x = oracles.random_tensor((5, N), torch.float32, 1).requires_grad_()
    y, _ = model(x)
    y.sum().backward()
    assert given[0] is None
    assert torch.equal(given[1], torch.zeros_like(x))


def test_a_caller_may_write_into_an_extra_output_that_an_op_has_reshaped() -> None:
    class Flat(fuser.BasicOperation):
        num_extra_outputs = 1

        def extra_output_specs(self, spec: Any, extras: Any) -> tuple[fuser.TensorSpec, ...]:
            return (fuser.TensorSpec((spec.shape[0] * spec.shape[1],), spec.dtype),)

        def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **_: Any) -> Any:
            return input_ * 3, [((input_ * 2).view(-1),)]

        def fuser_backward(
            self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
        ) -> Any:
            ((grad_extra,),) = basic_op_grad_extra_outputs
            return grad_output * 3 + 2 * grad_extra.view(grad_output.shape), [()], [()]

    x = torch.ones(2, N, requires_grad=True)
    y, extra = fuser.Sequential(Flat())(x)
    extra.mul_(5)
    (y.sum() + extra.sum()).backward()
    assert torch.equal(x.grad, torch.full((2, N), 13.0))
