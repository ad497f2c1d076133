"""Recipes on the GPU: recomputations in autograd's threads, delayed scaling's steps and weights."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import models
import oracles
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fuser
from fuser.recipe import DelayedScaling, Float8CurrentScaling
from fuser.reference import fp8_scaling as reference

DELAYED = DelayedScaling(amax_history_len=4)
RECIPES = {
    "current": Float8CurrentScaling(),
    "high precision": Float8CurrentScaling(backward_override="high_precision"),
    "delayed": DELAYED,
}


mlp = partial(models.mlp, 64, 128, device="cuda", dtype=torch.bfloat16)


def tensor(seed: int, scale: float = 1.0) -> torch.Tensor:
    return oracles.random_tensor((32, 64), torch.bfloat16, seed).to("cuda") * scale


def results(model: fuser.Sequential, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    grads = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    states = [v for k, v in model.state_dict().items() if k.endswith("_extra_state")]
    return [y.detach(), x.grad, *grads, *states]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recomputation_on_the_gpu_runs_under_the_conditions_of_its_forward(
    recipe: Any, use_reentrant: bool
) -> None:
    def train(is_checkpointed: bool) -> list[Any]:
        model, found = mlp(), []

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(model(x))

        for k, scale in enumerate((1.0, 30.0, 0.1)):
            x = tensor(k, scale).requires_grad_()
            with fuser.autocast(recipe=recipe):
                options = {"use_reentrant": use_reentrant}
                y = checkpoint(function, x, **options) if is_checkpointed else function(x)
            with torch.no_grad():
                model(tensor(9))
            y.sum().backward()
            found += results(model, x, y)
        return found

    assert all(map(torch.equal, train(True), train(False)))


def test_a_forward_in_a_hook_on_the_gpu_runs_under_no_recipe() -> None:
    model, found = mlp(), []
    # Autograd calls hooks without recording, and inference fuses otherwise than training.
    with torch.no_grad():
        expected = model(tensor(2))
    x = tensor(1).requires_grad_()
    x.register_hook(lambda grad: found.append(model(tensor(2)).detach()))
    with fuser.autocast(recipe=DELAYED):
        y = model(x)
    y.sum().backward()
    assert torch.equal(found[0], expected)


def test_one_autocast_around_the_loop_has_the_bits_of_one_around_each_step() -> None:
    def train(around: Any, each: Any) -> list[Any]:
        model, found = mlp(), []
        with around():
            for k, scale in enumerate((1.0, 30.0, 0.1, 3.0)):
                x = tensor(k, scale).requires_grad_()
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error" if k > 1 else "default")
                try:
                    with each():
                        y = model(x)
                    y.backward(torch.ones_like(y))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                found += results(model, x, y)
        return found

    def autocast() -> Any:
        return fuser.autocast(recipe=DELAYED)

    none = contextlib.nullcontext
    assert all(map(torch.equal, train(autocast, none), train(none, autocast)))


def test_a_delayed_weight_has_the_references_bytes_and_is_never_cut_off() -> None:
    with fuser.quantized_model_init(recipe=DELAYED):
        op = fuser.BasicLinear(64, 64, device="cuda", dtype=torch.bfloat16)
    state = op._delayed["forward"]
    for k, scale in enumerate((0.01, 1.0, 1e4, 0.1)):
        values = oracles.random_tensor((64, 64), torch.bfloat16, k).to("cuda") * scale
        amax = values.float().abs().max()
        with torch.no_grad():
            op.weight.copy_(values)
        used = torch.minimum(state.scale[1:2], 448 / amax)
        row, column, scale_inv, _ = reference.quantize_delayed(
            values, used, fuser.DType.kFloat8E4M3
        )
        assert torch.equal(op.weight._data, row)
        assert torch.equal(op.weight._transpose, column)
        torch.testing.assert_close(op.weight._scale_inv, scale_inv, rtol=1e-6, atol=0)
        assert state.amax_history[0, 1] >= amax
        with fuser.autocast(recipe=DELAYED):
            y = op(tensor(k).requires_grad_())
        y.sum().backward()
