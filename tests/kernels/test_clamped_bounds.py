"""The gradient of a clamped unit at its bounds is that of the inside, on every path."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from pipeline_kernels import on_kernels

import fuser

LIMIT, ALPHA, OFFSET = 2.0, 0.5, 1.0


def at_bounds() -> torch.Tensor:
    """Both halves at, inside and outside of their bounds, in all combinations."""
    values = torch.tensor([-LIMIT, LIMIT, 0.5, -3.0, 3.0, -0.5, 0.0, 1.0])
    return torch.cartesian_prod(values, values)[:, [0] * 32 + [1] * 32].contiguous()


def by_formula(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    gate, linear = x.double().chunk(2, dim=-1)
    inner = torch.minimum(gate, torch.tensor(LIMIT, dtype=gate.dtype))
    s = torch.sigmoid(ALPHA * inner)
    slope = torch.where(gate <= LIMIT, s + ALPHA * inner * s * (1 - s), 0.0)
    factor = linear.clamp(-LIMIT, LIMIT) + OFFSET
    d_linear = torch.where(linear.abs() <= LIMIT, inner * s, 0.0)
    return torch.cat((dy * slope * factor, dy * d_linear), dim=-1)


@pytest.mark.parametrize("place", ["reference", "kernels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["ClampedSwiGLU", "ScaledClampedQGeGLU"])
def test_the_gradient_at_a_bound_is_that_of_the_inside(
    op: str, dtype: torch.dtype, place: str
) -> None:
    options: dict[str, Any] = {"limit": LIMIT, "alpha": ALPHA, "glu_linear_offset": OFFSET}
    model = fuser.Sequential(getattr(fuser, op)(**options))
    x = at_bounds().to(dtype).requires_grad_()
    dy = torch.linspace(0.5, 2.0, x.numel() // 2).view(len(x), -1).to(dtype)
    scales = [torch.ones(len(x))] if op.startswith("Scaled") else []
    with on_kernels() if place == "kernels" else contextlib.nullcontext():
        model(x, *scales).backward(dy)
    assert x.grad is not None
    expected = by_formula(x.detach(), dy.double())
    rounding = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(x.grad.double(), expected, rtol=rounding, atol=rounding)
