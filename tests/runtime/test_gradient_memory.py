"""Gradients that one backward returns have memory of their own, so that sums of them are right."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_torch import OnTorch, patched

import fuser
from fuser.cuda import launch
from fuser.runtime import codegen

pytestmark = pytest.mark.sampled(most=12)

Ops = Callable[[], list[Any]]
WIDTH = 32


def add() -> fuser.AddExtraInput:
    return fuser.AddExtraInput()


PIPELINES: dict[str, Ops] = {
    "two sums": lambda: [add(), add()],
    "three sums": lambda: [add(), add(), add()],
    "sum, bias": lambda: [add(), fuser.Bias(WIDTH), fuser.Identity()],
    "sums around an extra output": lambda: [add(), fuser.MakeExtraOutput(), add()],
    "reshape, sum": lambda: [fuser.Bias(WIDTH), fuser.Reshape((8, 8, WIDTH)), add()],
    "sum, reshape, sum": lambda: [add(), fuser.Reshape((8, 8, WIDTH)), add()],
    "dropout of evaluation, sum": lambda: [fuser.Dropout(0.0), add(), fuser.Dropout(0.0)],
    "sum, quantize, sum": lambda: [add(), fuser.Quantize(True, True), add()],
    "sum, norm": lambda: [add(), fuser.RMSNorm(WIDTH), add()],
    "sum, linear": lambda: [add(), add(), fuser.Linear(WIDTH, WIDTH)],
    "linear, sums": lambda: [fuser.Linear(WIDTH, WIDTH), add(), add()],
}


@pytest.fixture(params=["torch", "refused kernels", "recorded"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plans without kernels, plans whose kernels are refused, and recordings of those."""
    if request.param != "torch":
        monkeypatch.setattr(launch, "backend", OnTorch())
    if request.param == "recorded":
        patched(monkeypatch, launch.kernels_support, lambda tensor: False)
    return str(request.param)


@pytest.mark.filterwarnings("ignore:.*torch computes this")
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("is_from_loss", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_gradient_to_which_more_is_added_is_no_part_of_another(
    name: str, is_from_loss: bool, is_cut: bool, where: str
) -> None:
    """As torch's own: each ``.grad`` after two backwards is twice that of one, and none changes
    with another, or with the gradient that the caller gave."""
    model = fuser.Sequential(*PIPELINES[name]())
    if is_cut:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    shape = torch.Size((64, WIDTH))
    extras = []
    for op in model:
        shape = torch.Size((8, 8, WIDTH)) if isinstance(op, fuser.Reshape) else shape
        if isinstance(op, fuser.AddExtraInput):
            extras.append(torch.randn(shape, requires_grad=True))
    leaves = [torch.randn(64, WIDTH, requires_grad=True), *extras, *model.parameters()]
    x = leaves[0]
    for _ in range(4 if where == "recorded" else 1):
        for leaf in leaves:
            leaf.grad = None
        for count in (1, 2):
            y = model(x, *extras)
            outputs = y if isinstance(y, tuple) else (y,)
            grads = [torch.arange(out.numel()).view_as(out) / out.numel() for out in outputs]
            if is_from_loss:
                losses = [(out * grad).sum() for out, grad in zip(outputs, grads, strict=True)]
                torch.autograd.backward(losses)
            else:
                torch.autograd.backward(outputs, grads)
            if count == 1:
                once = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
        assert len(once) == len(leaves)
        places = [
            leaf.grad.untyped_storage().data_ptr() for leaf in leaves if leaf.grad is not None
        ]
        assert len(set(places)) == len(leaves)
        for leaf, grad in zip(leaves, once, strict=True):
            torch.testing.assert_close(leaf.grad, 2 * grad)


def test_what_shares_no_memory_is_not_copied() -> None:
    """Such as the gradients of experts' weights, which are parts of one buffer."""
    parts = torch.arange(24.0).view(4, 6).unbind()
    assert all(map(operator.is_, codegen._separate(parts), parts))
    once = torch.ones(3)
    assert all(each is once for each in codegen._separate((once, None, once)) if each is not None)
    whole = torch.arange(6.0)
    results = codegen._separate((whole, None, whole[2:], whole.view(2, 3)))
    given = (whole, None, whole[2:], whole.view(2, 3))
    tensors = [each for each in results if each is not None]
    assert len({each.untyped_storage().data_ptr() for each in tensors}) == 3
    for each, expected in zip(results, given, strict=True):
        assert (each is None) == (expected is None)
        assert each is None or torch.equal(each, expected)


def test_gradients_of_experts_are_copied_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    separate = codegen._separate

    def noted(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        results = separate(grads)
        copied.append(sum(map(operator.is_not, results, grads)))
        return results

    monkeypatch.setattr(codegen, "_separate", noted)
    model = fuser.Sequential(
        fuser.GroupedLinear(4, WIDTH, 2 * WIDTH, device="cpu"),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(4, WIDTH, WIDTH, device="cpu"),
    )
    x = torch.randn(8, WIDTH, requires_grad=True)
    sizes, scales = torch.tensor([2, 0, 5, 1]), torch.rand(8, requires_grad=True)
    model(x, sizes, scales, sizes).sum().backward()
    assert copied == [0]
