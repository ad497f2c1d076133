"""Experts whose quantized weights are one parameter, on a GPU: kernels, steps and captures."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from sharded_models import RECIPES

import fuser

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

EXPERTS, K, N, ROWS = 5, 256, 384, 700
SIZES = ([128, 0, 301, 7, 200], [0, 0, 0, 650, 50], [140, 140, 140, 140, 140])
STACKED = [name for name in RECIPES if name not in ("rowwise", "delayed", "nvfp4 4over6")]
BF16 = torch.bfloat16
on_one_launch = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="each group has its own product here",
)


def layer(recipe: Any, *, is_one: bool) -> fuser.Sequential:
    """Experts whose weights are quantized from the same values, as one parameter or separate."""
    options: dict[str, Any] = {"device": "cuda", "dtype": BF16, "bias": False}
    with fuser.quantized_model_init(recipe=recipe):
        made = fuser.Sequential(
            fuser.GroupedLinear(EXPERTS, K, 2 * N, single_grouped_weight=is_one, **options),
            fuser.ScaledSwiGLU(),
            fuser.GroupedLinear(EXPERTS, N, K, single_grouped_weight=is_one, **options),
        )
    with torch.no_grad():
        for place, op in enumerate((made[0], made[2])):
            shape = (EXPERTS, op.out_features, op.in_features)
            values = oracles.random_tensor(shape, BF16, place).cuda() / 16
            targets = [op.weight] if is_one else [getattr(op, f"weight{g}") for g in range(EXPERTS)]
            for target, value in zip(targets, [values] if is_one else values, strict=True):
                target.copy_(value)
    return made


def arguments(seed: int) -> tuple[torch.Tensor, ...]:
    x = oracles.random_tensor((ROWS, K), BF16, seed).cuda().requires_grad_()
    scales = oracles.random_tensor((ROWS,), BF16, seed + 1).cuda().requires_grad_()
    splits = torch.tensor(SIZES[seed % len(SIZES)], device="cuda")
    return x, splits, scales, splits


def steps(model: Any, recipe: Any) -> list[torch.Tensor]:
    """Outputs and gradients of three steps, and the weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for seed in range(3):
        given = arguments(seed)
        with fuser.autocast(recipe=recipe):
            y = model(*given)
        y.float().square().mean().backward()
        of_weights = [parameter.grad.flatten() for parameter in model.parameters()]
        # A replay overwrites the memory of the outputs and gradients of the last one.
        kept = (y.detach(), given[0].grad, given[2].grad)
        found += [*(each.clone() for each in kept), torch.cat(of_weights)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, torch.cat([each.detach().float().flatten() for each in model.parameters()])]


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [3 * N, 2 * N + 128])
@pytest.mark.parametrize("name", STACKED)
def test_a_stack_has_the_bytes_of_the_cpu(name: str, rows: int) -> None:
    with fuser.quantized_model_init(recipe=RECIPES[name]()):
        op = fuser.GroupedLinear(2, K, N, single_grouped_weight=True, device="cpu")
    x = oracles.random_tensor((rows, K), BF16, 3) * torch.arange(1, rows + 1)[:, None]
    quantizer = op.weight._quantizer.with_usage(rowwise=True, columnwise=True)
    found, expected = quantizer(x.cuda()), quantizer(x)
    for buffer, own in expected.buffers().items():
        assert torch.equal(getattr(found, buffer).cpu(), own), buffer


@on_one_launch
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("name", STACKED)
def test_steps_have_the_bits_of_separate_weights(name: str, override: str | None) -> None:
    recipe = RECIPES[name](**({"backward_override": override} if override else {}))
    stacked, separate = (layer(recipe, is_one=is_one) for is_one in (True, False))
    assert_equal(steps(stacked, recipe), steps(separate, recipe))


@on_one_launch
@pytest.mark.parametrize("name", STACKED)
def test_graphed_steps_have_the_bits_of_launched_ones(name: str) -> None:
    recipe = RECIPES[name]()
    graphed, launched = (layer(recipe, is_one=True) for _ in range(2))
    graphed = fuser.make_graphed_callables(graphed, arguments(0), recipe=recipe)
    assert_equal(steps(graphed, recipe), steps(launched, recipe))
