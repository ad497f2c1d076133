"""Gradients of a pipeline's node arrive where torch's would, in the dtypes of the forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from test_random_pipelines import Blend

import fuser
from fuser.plan import cuts

WIDTH, ROWS = 32, 64
WAYS = ("one node", "cut", "recorded", "recorded and cut")


@pytest.fixture(autouse=True)
def small_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "FIRST_BYTES", 1)
    monkeypatch.setattr(cuts, "BUCKET_BYTES", 1)


@contextlib.contextmanager
def running(way: str, model: torch.nn.Module) -> Iterator[int]:
    """The number of steps after which the model runs in that way."""
    if "cut" in way:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    if "recorded" in way:
        with on_kernels():
            yield 4
    else:
        yield 1


# -- outputs without a gradient ----------------------------------------------------------


def with_extra_outputs() -> fuser.Sequential:
    torch.manual_seed(0)
    linear = functools.partial(fuser.Linear, WIDTH, WIDTH)
    return fuser.Sequential(
        linear(), fuser.MakeExtraOutput(), linear(), fuser.GELU(), fuser.MakeExtraOutput(), linear()
    )


def with_residuals() -> fuser.Sequential:
    """The first extra output is also read by a later op, and the second by the caller alone."""
    model = with_extra_outputs()
    model[1].set_extra_output_channel(0, "residual", output_to_caller=True)
    add = fuser.AddExtraInput().set_extra_input_channel(0, "residual")
    return fuser.Sequential(*model, add, fuser.Linear(WIDTH, WIDTH))


def plain(
    x: torch.Tensor, params: list[torch.Tensor], residual: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    linear = torch.nn.functional.linear
    first = linear(x, *params[:2])
    second = torch.nn.functional.gelu(linear(first, *params[2:4]), approximate="tanh")
    y = linear(second, *params[4:6])
    return (linear(y + first, *params[6:]) if residual else y), first, second


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (1, 2), (0, 1), (0, 1, 2)], ids=str)
def test_parameters_that_a_loss_does_not_reach_get_no_gradient(
    used: tuple[int, ...], residual: bool, way: str
) -> None:
    model = with_residuals() if residual else with_extra_outputs()
    with running(way, model) as steps:
        for step in range(steps):
            model.zero_grad()
            x = oracles.random_tensor((ROWS, WIDTH), torch.float32, step).requires_grad_()
            outputs = model(x)
            sum(outputs[place].square().sum() for place in used).backward()
    exact = [p.detach().double().requires_grad_() for p in model.parameters()]
    z = x.detach().double().requires_grad_()
    outputs = plain(z, exact, residual)
    sum(outputs[place].square().sum() for place in used).backward()
    torch.testing.assert_close(x.grad.double(), z.grad, rtol=1e-4, atol=1e-4)
    for parameter, truth in zip(model.parameters(), exact, strict=True):
        assert (parameter.grad is None) == (truth.grad is None)
        if truth.grad is not None:
            torch.testing.assert_close(parameter.grad.double(), truth.grad, rtol=1e-4, atol=1e-3)


def test_an_extra_input_that_a_loss_does_not_reach_gets_no_gradient() -> None:
    model = fuser.Sequential(
        fuser.AddExtraInput(), fuser.MakeExtraOutput(), fuser.GELU(), fuser.AddExtraInput()
    )
    x, first, second = (torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(3))
    _, extra = model(x, first, second)
    extra.sum().backward()
    assert second.grad is None
    assert torch.equal(x.grad, torch.ones(ROWS, WIDTH))
    assert torch.equal(first.grad, torch.ones(ROWS, WIDTH))


@pytest.mark.parametrize("way", WAYS[:2])
def test_the_op_that_makes_a_needed_extra_output_is_reached(way: str) -> None:
    """A user's op with ``y = x + e / 2`` and an extra output ``x - e``."""
    model = fuser.Sequential(Blend(), fuser.Linear(WIDTH, WIDTH), fuser.Linear(WIDTH, WIDTH))
    with running(way, model):
        x, extra = (torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(2))
        _, difference = model(x, extra)
        difference.sum().backward()
    assert torch.equal(x.grad, torch.ones(ROWS, WIDTH))
    assert torch.equal(extra.grad, -torch.ones(ROWS, WIDTH))
    assert all(parameter.grad is None for parameter in model.parameters())


class WithoutGradient(torch.autograd.Function):
    """The identity, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [fuser.Sequential, torch.nn.Sequential])
def test_no_gradient_of_an_output_gives_none_of_the_inputs(
    kind: type[torch.nn.Sequential], way: str
) -> None:
    ops = [torch.nn, torch.nn] if kind is torch.nn.Sequential else [fuser, fuser]
    model = kind(*(library.Linear(WIDTH, WIDTH) for library in ops))
    with running(way, model) as steps:
        for _ in range(steps):
            x = torch.ones(ROWS, WIDTH, requires_grad=True)
            WithoutGradient.apply(model(x)).sum().backward()
            assert all(leaf.grad is None for leaf in (x, *model.parameters()))


# -- torch's autocast --------------------------------------------------------------------


def gradients(
    model: torch.nn.Module,
    dtype: torch.dtype,
    forward: torch.dtype | None,
    backward: torch.dtype | None,
) -> list[Any]:
    """Gradients of a step whose two passes run in such dtypes of torch's autocast."""
    model.zero_grad()
    x = oracles.random_tensor((ROWS, WIDTH), dtype, 1).requires_grad_()
    with torch.autocast("cpu", forward or torch.bfloat16, enabled=forward is not None):
        y = model(x)
    dy = oracles.random_tensor((ROWS, WIDTH), dtype, 2).to(y.dtype)
    with torch.autocast("cpu", backward or torch.bfloat16, enabled=backward is not None):
        y.backward(dy)
    return [x.grad, *(p.grad for p in model.parameters())]


def linears(library: Any, activation: type[torch.nn.Module]) -> Any:
    torch.manual_seed(0)
    return library.Sequential(
        library.Linear(WIDTH, WIDTH),
        library.Linear(WIDTH, WIDTH),
        activation(),
        library.Linear(WIDTH, WIDTH),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backward", [torch.bfloat16, torch.float16])
def test_a_backward_inside_autocast_has_the_precision_of_its_forward(
    way: str, backward: torch.dtype
) -> None:
    """Torch: "Backward ops run in the same type that autocast chose for corresponding forward
    ops". In float32, outside and inside in turn, against float64 in plain torch."""
    model = linears(fuser, fuser.ReLU)
    exact = linears(torch.nn, torch.nn.ReLU).double()
    with torch.no_grad():
        for parameter, truth in zip(model.parameters(), exact.parameters(), strict=True):
            truth.copy_(parameter)
    truths = gradients(exact, torch.float64, None, None)
    with running(way, model) as steps:
        for step in range(2 * steps):
            found = gradients(model, torch.float32, None, backward if step % 2 else None)
            for gradient, truth in zip(found, truths, strict=True):
                error = (gradient.double() - truth).norm() / truth.norm()
                assert error < 1e-5, step


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("backward", [torch.bfloat16, torch.float16])
def test_a_backward_inside_autocast_has_the_bits_of_one_outside(
    way: str, backward: torch.dtype
) -> None:
    """Of a forward under autocast, as of linears of torch."""
    model = linears(fuser, fuser.ReLU)
    peer = linears(torch.nn, torch.nn.ReLU)
    peer.load_state_dict(dict(zip(peer.state_dict(), model.parameters(), strict=True)))
    expected = gradients(peer, torch.float32, torch.bfloat16, None)
    with running(way, model):
        for inside in (None, backward):
            found = gradients(model, torch.float32, torch.bfloat16, inside)
            for gradient, other in zip(found, expected, strict=True):
                torch.testing.assert_close(gradient, other, rtol=2e-2, atol=2e-2)
        outside = gradients(model, torch.float32, torch.bfloat16, None)
        for gradient, other in zip(found, outside, strict=True):
            assert torch.equal(gradient, other)
