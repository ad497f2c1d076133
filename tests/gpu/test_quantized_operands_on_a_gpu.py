"""Quantized weights, inputs and residuals where no recipe is active compute as their values."""

from __future__ import annotations

from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from test_quantized_operands import (
    BF16,
    FP64,
    MODELS,
    ROWS,
    STACKED,
    WIDTH,
    assert_computes_as_its_values,
    values_of,
)

import fuser
from fuser.precision.quantizer_for import make_quantizer


@pytest.mark.parametrize("recipe", formats.RECIPES.values(), ids=formats.RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_compute_as_their_values(name: str, recipe: Any) -> None:
    with fuser.quantized_model_init(recipe=recipe()):
        model = MODELS[name].make().cuda()
    x = oracles.random_tensor((ROWS, WIDTH), BF16, 1).cuda()
    for _ in range(3):  # the last may be a repeated recording
        assert_computes_as_its_values(name, model, x.clone().requires_grad_())
    with torch.no_grad():
        tensors = [x, *map(values_of, model.parameters())]
        plain, exact = (
            {"y": MODELS[name].formula(*(tensor.to(dtype) for tensor in tensors))}
            for dtype in (BF16, FP64)
        )
        oracles.assert_no_worse_than_torch(oracles.Draw({"y": model(x)}, plain, exact))


@pytest.mark.parametrize("recipe", formats.STATELESS.values(), ids=formats.STATELESS)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantized_input_computes_as_its_values(name: str, recipe: Any) -> None:
    x = make_quantizer(recipe(), "input")(oracles.random_tensor((ROWS, WIDTH), BF16, 1).cuda())
    model = MODELS[name].make().cuda()
    assert_computes_as_its_values(name, model, x.detach().requires_grad_())


@pytest.mark.parametrize("recipe", STACKED.values(), ids=STACKED)
def test_each_expert_of_a_stack_has_its_values(recipe: Any) -> None:
    with fuser.quantized_model_init(recipe=recipe()):
        op = fuser.GroupedLinear(
            5, WIDTH, WIDTH, single_grouped_weight=True, dtype=BF16, device="cuda"
        )
    whole = op.weight.detach().dequantize()
    for expert, values in zip(op.weight.detach(), whole, strict=True):
        assert torch.equal(expert.dequantize(), values)
