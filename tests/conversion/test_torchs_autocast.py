"""Converted modules inside torch's autocast: dtypes are those of the modules' own forwards."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import titan_like
import torch
from torch import nn
from torch.nn import functional as F

import fuser
from fuser import recipe as recipes

BF16 = torch.bfloat16
HIDDEN, WIDTH, ROWS = 64, 96, 32


class Norm(nn.Module):
    """An RMS norm as those of transformers, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.norm = norm() if norm is Norm else nn.LayerNorm(HIDDEN)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(F.gelu(self.up(x)))
        return down


class After(Block):
    """BERT's order."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x + self.inner(x))


class Twice(Block):
    """A norm whose values are added again, and one at the end."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(x)
        return self.norm(x + self.inner(x))


class Between(Block):
    """A norm in the middle, whose values are added again."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(self.inner(x))
        return y + self.inner(y)


class Before(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.inner(self.norm(x))


KINDS = {kind.__name__: kind for kind in (After, Twice, Between, Before)}


def models(kind: type[Block], norm: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model that is converted, and one that is not."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(kind(norm) for _ in range(3)))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    model = copy.deepcopy(plain)
    fuser.convert(model)
    return model, plain


def step(model: Any, x: torch.Tensor, call: Any = None) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", BF16):
        y = (call or model)(leaf)
    y.backward(torch.linspace(-1, 1, HIDDEN, dtype=y.dtype).expand(y.shape))
    assert leaf.grad is not None
    found = [y.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("norm", [nn.LayerNorm, Norm])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_that_no_linear_reads_are_in_fp32(kind: str, norm: type[nn.Module]) -> None:
    model, plain = models(KINDS[kind], norm)
    x = torch.randn(ROWS, HIDDEN)
    exact = copy.deepcopy(plain).double()(x.double()).detach()
    found, expected = step(model, x), step(plain, x)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    # On a CPU torch's layer norm of 16 bits has 16 bits.
    assert found[0].dtype is torch.float32 or (kind, norm) == ("Between", nn.LayerNorm)
    assert error(found[0], exact) < 1.5 * error(expected[0], exact)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))


@pytest.mark.parametrize("kind", ["After", "Twice"])
def test_so_they_are_in_compiled_models(kind: str) -> None:
    model, _ = models(KINDS[kind], nn.LayerNorm)
    x = torch.randn(ROWS, HIDDEN)
    torch._dynamo.reset()
    found = step(model, x, torch.compile(model, backend="aot_eager", fullgraph=True))
    expected = step(model, x)
    assert all(map(torch.equal, found, expected))


def test_linears_are_quantized_as_outside_of_it() -> None:
    model, plain = models(After, nn.LayerNorm)
    x = torch.randn(ROWS, HIDDEN)
    with torch.autocast("cpu", BF16):
        unquantized = model(x)
        with fuser.autocast(recipe=recipes.Float8CurrentScaling()):
            found = model(x)
    assert found.dtype is torch.float32
    assert 1e-3 < error(found, unquantized.double()) < 0.1
    assert error(unquantized, plain(x).double()) < 5e-3


def test_scales_of_delayed_scaling_are_those_of_calls_outside_of_it() -> None:
    model, plain = models(After, nn.LayerNorm)
    with torch.no_grad():
        for part in (model, plain):
            part[1].down.weight.mul_(1e-3)  # which rounds to nothing with a scale of 1
            part[1].down.bias.zero_()
    x = torch.randn(ROWS, HIDDEN)
    with fuser.autocast(recipe=recipes.DelayedScaling()):
        for _ in range(2):
            step(model, x)
        with torch.no_grad():
            for part in (model, plain):
                part.eval()
            x = x / 4
            found = model[1](x)  # the first block stays unquantized
    expected = plain[1](x)
    inner = (expected - plain[1].norm(x)).norm()
    assert (found - expected).norm() < 0.3 * inner


def test_a_norm_that_is_replaced_is_called() -> None:
    model, plain = models(After, nn.LayerNorm)
    x = torch.randn(ROWS, HIDDEN)
    step(model, x)
    for part in (model, plain):
        torch.manual_seed(3)
        for block in part:
            block.norm = nn.LayerNorm(HIDDEN)
            nn.init.normal_(block.norm.weight)
    found, expected = step(model, x), step(plain, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))
    for dtype in (torch.float32, BF16):
        with torch.autocast("cpu", BF16, enabled=dtype is BF16):
            assert titan_like.counted(model, x)[1] == len(model)


def test_norms_that_are_converted_alone_are_those_of_torch() -> None:
    plain = nn.ModuleList([nn.LayerNorm(HIDDEN), Norm()])
    model = copy.deepcopy(plain)
    fuser.convert(model, norms="all")
    for dtype in (torch.float32, BF16):
        x = torch.randn(ROWS, HIDDEN, dtype=dtype)
        with torch.autocast("cpu", BF16):
            for one, other in zip(model, plain, strict=True):
                assert torch.equal(one(x), other(x))
                assert one(x).dtype is other(x).dtype


def test_a_model_is_freed_with_its_last_reference() -> None:
    model, _ = models(After, nn.LayerNorm)
    x = torch.randn(ROWS, HIDDEN)
    step(model, x)
    model(x)
    references = [weakref.ref(each) for each in (*model.parameters(), *model.modules())]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not [each for each in references if each() is not None]
    finally:
        gc.enable()
