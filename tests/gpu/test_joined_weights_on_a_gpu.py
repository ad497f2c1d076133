"""Weights that a converted model uses as one, on a GPU: one memory, and no copy at a call."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from test_shared_input import QKV, Projections, _step
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import fuser
from fuser import recipe as recipes
from fuser.conversion.modules import child_of
from fuser.runtime.joined_weights import memory_of

WIDTH, HIDDEN = 256, 512
RECIPES = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
}


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        like: Any = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, **like) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def memory(module: nn.Module, names: tuple[str, ...]) -> torch.Tensor | None:
    return memory_of([child_of(module, name).weight for name in names])


def test_weights_on_a_gpu_are_moved_into_one_memory_and_keep_their_values() -> None:
    for module, names in ((FeedForward(), ("gate", "up")), (Projections().cuda(), QKV)):
        values = copy.deepcopy(module.state_dict())
        fuser.convert(module, linears="all", keep=())
        assert memory(module, names) is not None
        assert all(torch.equal(v, values[name]) for name, v in module.state_dict().items())
        saved = io.BytesIO()
        torch.save(module.state_dict(), saved)
        saved.seek(0)
        module.load_state_dict(torch.load(saved))
        assert memory(module, names) is not None
        module.cpu()
        module.cuda()
        assert memory(module, names) is not None
        assert all(torch.equal(v, values[name]) for name, v in module.state_dict().items())


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_call_copies_no_weight_and_trains_as_one_that_does(
    recipe: Any, is_compiled: bool
) -> None:
    torch.manual_seed(0)
    module = FeedForward()
    apart = copy.deepcopy(module)
    x = torch.randn(128, WIDTH, device="cuda", dtype=torch.bfloat16)
    results = []
    for each in (module, apart):
        fuser.convert(each, recipe=recipe, keep=())
        if each is apart:
            each.up.weight.data = each.up.weight.data.clone()
            assert memory(each, ("gate", "up")) is None
        call = torch.compile(each) if is_compiled else each
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(4):
            y = call(x)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call(x).float().square().mean().backward()
        copies = [e.name for e in seen.events() if "CatArray" in e.name]
        assert bool(copies) == (each is apart), copies
        results.append([y, *each.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_shared_products_on_a_gpu_have_the_gradients_of_three(recipe: Any) -> None:
    module = Projections().cuda().bfloat16()
    plain = copy.deepcopy(module).float()
    fuser.convert(module, recipe=recipe, linears="all", keep=())
    expected = _step(plain)
    for call in (module, torch.compile(module, fullgraph=True)):
        for _ in range(4):
            results = _step(call)
        for one, other in zip(results, expected, strict=True):
            error = (one.float() - other).norm() / other.norm()
            assert error < (0.02 if recipe is None else 0.15)
