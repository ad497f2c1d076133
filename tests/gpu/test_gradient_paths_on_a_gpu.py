"""Gradients of pipelines on a GPU: plain tensors, where torch has them, in the forward's dtypes."""

from __future__ import annotations

import functools
from typing import Any

import every_format as formats
import models
import oracles
import pytest
import torch

import fuser
from fuser.plan import cuts
from fuser.plan.cuts import NODE_MICROSECONDS
from fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

ROWS, WIDTH = 256, 128
BF16 = torch.bfloat16


def random(seed: int, dtype: torch.dtype, columns: int = WIDTH) -> torch.Tensor:
    return oracles.random_tensor((ROWS, columns), dtype, seed).cuda()


def hook(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)


def linears(count: int, width: int, dtype: torch.dtype) -> fuser.Sequential:
    torch.manual_seed(0)
    like: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    pairs = [(fuser.Linear(width, width, **like), fuser.GELU()) for _ in range(count)]
    return fuser.Sequential(*(op for pair in pairs for op in pair))


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling(), MXFP8BlockScaling()])
@pytest.mark.parametrize("way", ["launched", "cut", "graphed"])
def test_the_gradient_of_an_input_is_plain(
    way: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "FIRST_BYTES", 1)
    monkeypatch.setattr(cuts, "BUCKET_BYTES", 1)
    model = fuser.Sequential(fuser.Quantize(True, True), *linears(2, WIDTH, BF16))
    if way == "cut":
        hook(model)
    if way == "graphed":
        sample = random(0, BF16).requires_grad_()
        fuser.make_graphed_callables(model, (sample,), recipe=recipe)
    for step in range(4):
        x = random(step, BF16).requires_grad_()
        gradients: list[Any] = []
        with fuser.autocast(recipe=recipe):
            y = model(x)
        x.register_hook(lambda gradient, seen=gradients: seen.append(type(gradient)))
        y.backward(random(10 + step, BF16))
        assert gradients == [torch.Tensor]
        assert type(x.grad) is torch.Tensor
        assert x.grad.any()


@pytest.mark.parametrize("is_cut", [False, True])
def test_parameters_that_a_loss_does_not_reach_get_no_gradient(
    is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "FIRST_BYTES", 1)
    monkeypatch.setattr(cuts, "BUCKET_BYTES", 1)
    first, gelu, second, _ = linears(2, WIDTH, torch.float32)
    model = fuser.Sequential(first, gelu, fuser.MakeExtraOutput(), second)
    if is_cut:
        hook(model)
    for step in range(5):
        model.zero_grad()
        x = random(step, torch.float32).requires_grad_()
        _, extra = model(x)
        extra.square().sum().backward()
        z = x.detach().double().requires_grad_()
        weight, bias = (p.detach().double().requires_grad_() for p in first.parameters())
        truth = torch.nn.functional.linear(z, weight, bias)
        torch.nn.functional.gelu(truth, approximate="tanh").square().sum().backward()
        for found, exact in zip((x, *first.parameters()), (z, weight, bias), strict=True):
            torch.testing.assert_close(found.grad.double(), exact.grad, rtol=1e-4, atol=1e-3)
        assert all(parameter.grad is None for parameter in second.parameters())


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_backward_inside_autocast_has_the_precision_of_its_forward(
    is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "FIRST_BYTES", 1)
    monkeypatch.setattr(cuts, "BUCKET_BYTES", 1)
    model = linears(3, WIDTH, torch.float32)
    if is_cut:
        hook(model)
    dy = random(1, torch.float32)
    x = random(0, torch.float32).requires_grad_()
    exact = [p.detach().double().requires_grad_() for p in model.parameters()]
    z = x.detach().double().requires_grad_()
    y = z
    for weight, bias in zip(exact[::2], exact[1::2], strict=True):
        linear = torch.nn.functional.linear(y, weight, bias)
        y = torch.nn.functional.gelu(linear, approximate="tanh")
    y.backward(dy.double())
    for step in range(8):  # outside and inside in turn
        model.zero_grad()
        x.grad = None
        found = model(x)
        with torch.autocast("cuda", BF16, enabled=step % 2 == 1):
            found.backward(dy)
        for leaf, truth in zip((x, *model.parameters()), (z, *exact), strict=True):
            error = (leaf.grad.double() - truth.grad).norm() / truth.grad.norm()
            assert error < 1e-4, step


@pytest.mark.parametrize("width", [512, 1024, 2048])
def test_nodes_of_hooks_take_longer_than_they_cost(width: int) -> None:
    model = linears(16, width, BF16)
    hook(model)
    plan = model.plan(random(0, BF16, width))
    assert len(plan.nodes) >= 3
    for node in plan.nodes[1:-1]:  # the last has 1 MiB, and the first what is left
        steps = [step for step in plan.backward if step.ops[0] in node.ops]
        assert sum(step.microseconds for step in steps) >= 0.9 * NODE_MICROSECONDS


# -- some of the gradients ----------------------------------------------------------------


def experts() -> fuser.Sequential:
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    return fuser.Sequential(
        fuser.GroupedLinear(4, 256, 512, bias=False, **like),
        fuser.SwiGLU(),
        fuser.GroupedLinear(4, 256, 256, bias=False, **like),
    )


BLOCKS = {
    "gelu": lambda: models.mlp(256, 512, dtype=torch.bfloat16, device="cuda"),
    "swiglu": lambda: models.residual_block(256, 512, dtype=torch.bfloat16, device="cuda"),
    "experts": experts,
}


@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("recipe_name", ["none", *formats.STATELESS])
@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_in_parts_have_the_bits_of_one_backward(
    name: str, budget: int, recipe_name: str, override: Any
) -> None:
    """Of the input first, which keeps what those of the parameters need, as schedules ask."""
    recipe = None
    if recipe_name != "none":
        recipe = formats.deterministic(formats.STATELESS[recipe_name], backward_override=override)
    model = BLOCKS[name]()
    splits = [torch.tensor([128, 0, 200, 184], device="cuda")] * 2 if name == "experts" else []
    weights: list[torch.Tensor] = list(model.parameters())
    x = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda")
    with fuser.activation_memory_budget(budget):
        for _ in range(4):  # launched, recorded, repeated
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x, *splits)
            grad = functools.partial(torch.autograd.grad, y, grad_outputs=dy, retain_graph=True)
            inputs = [x, *weights]
            parts = [*grad([x]), *grad(weights)]
            others = [*grad(weights), *grad([x])]
            whole = grad(inputs)
            for gradient, other in zip(parts, whole, strict=True):
                assert torch.equal(gradient, other)
            for gradient, other in zip([others[-1], *others[:-1]], whole, strict=True):
                assert torch.equal(gradient, other)
            for tensor, other in zip(inputs, whole, strict=True):
                (alone,) = grad([tensor])
                assert torch.equal(alone, other)
