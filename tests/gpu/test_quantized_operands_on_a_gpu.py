"""Quantized weights, inputs and residuals where no recipe is active: the bits of their values."""

from __future__ import annotations

import contextlib
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from test_quantized_operands import BF16, MODELS, ROWS, STACKED, WIDTH, step

import fuser
from fuser.precision.quantizer_for import make_quantizer


def assert_alike(found: list[list[torch.Tensor]]) -> None:
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", formats.RECIPES.values(), ids=formats.RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_compute_as_their_values(name: str, recipe: Any) -> None:
    with fuser.quantized_model_init(recipe=recipe()):
        model = MODELS[name]().cuda()
    plain = MODELS[name]().cuda()
    with torch.no_grad():
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            own.copy_(other.dequantize() if isinstance(other, fuser.QuantizedTensor) else other)
    x = oracles.random_tensor((ROWS, WIDTH), BF16, 1).cuda()
    found = []
    for m in (model, plain):
        steps = [step(m, x.clone().requires_grad_(), contextlib.nullcontext()) for _ in range(3)]
        found.append(steps[0][:2] + steps[-1][:2])  # the last may be a repeated recording
        with torch.no_grad():
            found[-1].append(m(x))
    assert_alike(found)


@pytest.mark.parametrize("recipe", formats.STATELESS.values(), ids=formats.STATELESS)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantized_input_computes_as_its_values(name: str, recipe: Any) -> None:
    x = make_quantizer(recipe(), "input")(oracles.random_tensor((ROWS, WIDTH), BF16, 1).cuda())
    model = MODELS[name]().cuda()
    found = []
    for given in (x.detach(), x.dequantize()):
        model.zero_grad()
        found.append(step(model, given.requires_grad_(), contextlib.nullcontext()))
    assert_alike(found)


@pytest.mark.parametrize("recipe", STACKED.values(), ids=STACKED)
def test_each_expert_of_a_stack_has_its_values(recipe: Any) -> None:
    with fuser.quantized_model_init(recipe=recipe()):
        op = fuser.GroupedLinear(
            5, WIDTH, WIDTH, single_grouped_weight=True, dtype=BF16, device="cuda"
        )
    whole = op.weight.detach().dequantize()
    for expert, values in zip(op.weight.detach(), whole, strict=True):
        assert torch.equal(expert.dequantize(), values)
