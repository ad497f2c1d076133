"""Recorded passes as graphs that are found by addresses: bits, and what ends a graph."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from address_graphs import CpuCapturer, on_cpu_graphs
from pipeline_kernels import on_kernels
from test_recorded import BF16, MODELS, PAIRS, RECIPES, under

import fuser
from fuser.cuda import pass_graphs
from fuser.cuda.pass_graphs import PassGraphs

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

STEPS = 10


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with on_kernels():
        yield


@pytest.fixture
def capturer() -> Iterator[CpuCapturer]:
    with on_cpu_graphs() as found:
        yield found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[PassGraphs]:
    """The graphs of all sequences of the test."""
    found: list[PassGraphs] = []
    init = PassGraphs.__init__

    def noted(self: PassGraphs, device: int) -> None:
        init(self, device)
        found.append(self)

    monkeypatch.setattr(PassGraphs, "__init__", noted)
    return found


class Steps:
    """Steps of a model whose input is always in the same memory."""

    def __init__(self, model: torch.nn.Module, shape: Any, recipe: Any) -> None:
        self.model, self.recipe = model, recipe
        self.x = torch.zeros(shape, dtype=BF16, requires_grad=True)
        self.dy: torch.Tensor | None = None

    def run(self, number: int) -> list[list[float]]:
        """Output and gradients as lists: nothing keeps the memory of a step."""
        made = torch.Generator().manual_seed(number)
        self.x.data.copy_(torch.randn(self.x.shape, generator=made))
        torch.manual_seed(number)
        with under(self.recipe):
            y = self.model(self.x)
        if self.dy is None:
            self.dy = torch.zeros_like(y)
        self.dy.copy_(torch.randn(y.shape, generator=made))
        y.backward(self.dy)
        tensors = [y.detach(), self.x.grad, *(p.grad for p in self.model.parameters())]
        found = [[] if t is None else t.double().flatten().tolist() for t in tensors]
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None
        return found


def without_graphs(model: torch.nn.Module, shape: Any, recipe: Any, count: int) -> list[Any]:
    fuser.graph_passes(False)
    try:
        steps = Steps(model, shape, recipe)
        return [steps.run(i) for i in range(count)]
    finally:
        fuser.graph_passes(True)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "recipe_name"), PAIRS)
def test_replayed_steps_have_the_bits_of_played_ones(
    name: str, recipe_name: str, capturer: CpuCapturer, graphs: list[PassGraphs]
) -> None:
    (make, shape), recipe = MODELS[name], RECIPES[recipe_name]
    model = make()
    expected = without_graphs(copy.deepcopy(model), shape, recipe, STEPS)
    assert not capturer.captures
    graphs.clear()
    steps = Steps(model, shape, recipe)
    for i in range(STEPS):
        assert steps.run(i) == expected[i], i
    print([(g.calls, g.hits, g.count, g.refusal) for g in graphs], capturer.captures)
