"""LoRAGroupedLinear on a GPU against a loop over experts in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import leaf, random_tensor, randomize

import fuser
from fuser import recipe as recipes

G, IN, OUT, RANK, SPLITS = 4, 256, 384, 12, (0, 300, 1, 211)
ROWS = sum(SPLITS) + 16
RECIPES = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp8 dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
}


def step(model: Any, x: torch.Tensor, recipe: Any) -> dict[str, Any]:
    x, dy = leaf(x), random_tensor((ROWS, OUT), torch.bfloat16, 9).to(x.device)
    model.zero_grad(set_to_none=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, torch.tensor(SPLITS, device=x.device))
    y.backward(dy)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}


def loop(model: Any, x: torch.Tensor) -> dict[str, Any]:
    """:func:`step` in fp64, without a recipe."""
    x, dy = leaf(x, torch.float64), random_tensor((ROWS, OUT), torch.bfloat16, 9).to(x.device)
    params = {
        name: leaf(p.dequantize() if isinstance(p, fuser.QuantizedTensor) else p, torch.float64)
        for name, p in model.named_parameters()
    }
    parts, start = [], 0
    for g, size in enumerate(SPLITS):
        rows, start = x[start : start + size], start + size
        weight, bias, a, b = (params[f"{k}{g}"] for k in ("weight", "bias", "lora_A", "lora_B"))
        parts.append(rows @ weight.T + bias + model.scale * (rows @ a.T @ b.T))
    y = torch.cat([*parts, x.new_zeros(ROWS - start, OUT)])
    y.backward(dy.double())
    trained = {name: p.grad for name, p in params.items() if "lora" in name}
    return {"y": y.detach(), "x": x.grad, **trained}


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_experts_with_adapters_are_a_loop_over_experts(
    name: str, adapter_dtype: torch.dtype
) -> None:
    recipe = RECIPES[name]
    with fuser.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        model = fuser.LoRAGroupedLinear(
            G, IN, OUT, rank=RANK, dtype=torch.bfloat16, adapter_dtype=adapter_dtype, device="cuda"
        )
    randomize(model)
    x = random_tensor((ROWS, IN), torch.bfloat16, 1).cuda()
    for again in range(3):  # a later call is recorded
        found, exact = step(model, x, recipe), loop(model, x)
        for key, value in exact.items():
            expected = torch.zeros_like(found[key]) if value is None else value
            error = (found[key].double() - expected).norm()
            bound = 0.02 if recipe is None or "lora" in key else 0.1
            assert error <= bound * expected.norm(), (key, again)
