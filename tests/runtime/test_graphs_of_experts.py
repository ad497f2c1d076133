"""Passes over experts with a quantized parameter each, as on a Hopper GPU, are graphs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from address_graphs import on_cpu_graphs
from one_launch_experts import in_one_launch
from test_call_counts import BF16, EXPERTS, RECIPES, H, T, experts, hopper_that_computes_nothing

import fuser

__all__ = ["hopper_that_computes_nothing"]  # the fixture

STEPS = 10


@pytest.mark.parametrize("count", EXPERTS)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_forward_and_backward_of_quantized_experts_are_graphs(
    recipe: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_launch(monkeypatch)
    with fuser.quantized_model_init(recipe=RECIPES[recipe]):
        model = experts(count)
    x = torch.randn(T, H, dtype=BF16, requires_grad=True)
    sizes, scales = torch.full((count,), T // count), torch.rand(T, dtype=BF16)
    dy = torch.randn(T, H, dtype=BF16)
    under: Any = fuser.autocast(recipe=RECIPES[recipe])
    with on_cpu_graphs():
        for _ in range(STEPS):
            model.zero_grad(set_to_none=True)
            x.grad = None
            with under:
                y = model(x, sizes, scales, sizes)
            y.backward(dy)
            del y
        with under:
            notes = model.plan(x, sizes, scales, sizes).replays
    assert [note.side for note in notes] == ["forward", "backward"]
    for note in notes:
        counts = re.match(r"a CUDA graph in (\d+) of (\d+) repetitions", note.text)
        assert counts, note.text
        assert int(counts[1]) >= int(counts[2]) - 3, note.text
