"""Shapes that no block divides, on a GPU: the CPU's bytes, and what linears make of them."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from quantize_cases import assert_same
from test_padding import EVERY_FORMAT, RECIPES, block

import fuser
from fuser.chain import Stage
from fuser.functional import pointwise

FORMATS = {name: q for name, q in EVERY_FORMAT.items() if name != "delayed"}
SHAPES = ((5, 40), (33, 64), (64, 33), (2, 3, 50), (7,), (1, 1), (1000, 1030), (0, 40))


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quantizer", FORMATS.values(), ids=FORMATS)
def test_every_call_has_the_bytes_and_the_values_of_the_cpu(
    quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Launched, recorded and repeated."""
    x = oracles.random_tensor(shape, dtype, 1)
    expected = quantizer(x)
    for _ in range(5):
        made = quantizer(x.cuda())
        for name, buffer in expected.buffers().items():
            assert_same(made.buffers()[name], buffer, name)
        for which in ("rowwise", "columnwise"):
            found, values = (t.with_usage(which).dequantize() for t in (made, expected))
            assert_same(found, values, which)


@pytest.mark.parametrize("shape", [(5, 80), (33, 130), (300, 2 * 517)], ids=str)
@pytest.mark.parametrize("quantizer", FORMATS.values(), ids=FORMATS)
def test_values_that_are_not_in_memory_are_padded_too(
    quantizer: Any, shape: tuple[int, ...]
) -> None:
    x = oracles.random_tensor(shape, torch.bfloat16, 1).cuda()
    plain = pointwise.chain((Stage("swiglu"),), x).tensor()
    expected = quantizer(plain)
    for _ in range(5):
        made = quantizer(pointwise.chain((Stage("swiglu"),), x))
        for name, buffer in expected.buffers().items():
            assert_same(made.buffers()[name], buffer, name)


@pytest.mark.parametrize("rows", [1, 5, 33, 100])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_pipeline_of_odd_shapes_trains_as_on_the_cpu(recipe: Any, rows: int) -> None:
    """Within what a value may do that rounds to the neighbour on one of them."""
    found = []
    for device in ("cpu", "cuda"):
        model = block().to(device)
        x = oracles.random_tensor((rows, 40), torch.float32, 1).to(device).requires_grad_()
        for _ in range(3):
            torch.manual_seed(7)
            x.grad = None
            model.zero_grad(set_to_none=True)
            with fuser.autocast(recipe=recipe):
                y = model(x)
            y.backward(oracles.random_tensor((rows, 7), torch.float32, 2).to(device))
        grads = {name: p.grad for name, p in model.named_parameters()}
        found.append({"y": y.detach().dequantize(), "dx": x.grad, **grads})
    for name, value in found[0].items():
        error = (found[1][name].cpu() - value).norm()
        assert error <= 0.1 * value.norm(), name
