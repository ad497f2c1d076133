"""Compiled layers of experts on a GPU: the bits of launched steps, and CUDA graphs of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from test_compiled import BF16, CURRENT, DELAYED, MXFP8, assert_equal, graphs, step, under, whole
from test_compiled_experts import Experts, G, K, Layer, T
from torch._dynamo.utils import counters

import fuser
from fuser import recipe as recipes
from fuser.cuda import launch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is emulated"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
        reason="groups are one product on Hopper and Blackwell",
    ),
]
RECIPES = [None, CURRENT, recipes.Float8BlockScaling(), MXFP8]
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def layer_and_tokens(kind: str = "ops", capacity: int | None = None) -> tuple[Layer, torch.Tensor]:
    torch._dynamo.reset()
    counters.clear()
    layer = Layer(kind, capacity).to("cuda", BF16)
    return layer, torch.randn(T, K, dtype=BF16, device="cuda")


@pytest.mark.parametrize("kind", ["ops", "probs of rows"])
@pytest.mark.parametrize("recipe", [*RECIPES, DELAYED], ids=str)
def test_a_compiled_layer_has_the_bits_of_a_launched_one(recipe: Any, kind: str) -> None:
    (layer, x), (other, _) = layer_and_tokens(kind), layer_and_tokens(kind)
    compiled = whole(layer)
    for number in range(1, 5):
        with under(recipe):
            found = step(compiled, layer, x * number)
        with under(recipe):
            assert_equal(found, step(other, other, x * number))
    assert graphs() == 1


@EVERY_RECIPE
def test_inductor_captures_experts_and_replays_them_with_other_sizes(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model = Experts(dtype=BF16).to("cuda")
    x, scales = torch.randn(T, K, dtype=BF16, device="cuda"), torch.rand(T, device="cuda")
    sizes = torch.tensor([20, 0, 33, 20], device="cuda")
    compiled = whole(model, "inductor", mode="reduce-overhead")
    launched: list[Any] = []
    runs = launch.backend.run

    def noted(kernel: Any, *args: Any) -> None:
        launched.append(kernel)
        runs(kernel, *args)

    monkeypatch.setattr(launch.backend, "run", noted)
    for number in range(8):
        each = sizes.roll(number)
        torch.compiler.cudagraph_mark_step_begin()
        with under(recipe):
            launched.clear()
            found = step(functools.partial(compiled, sizes=each), model, x, scales)
            found = [None if t is None else t.clone() for t in found]
            assert number < 5 or not launched  # a replay launches none of fuser's kernels
            assert_equal(found, step(functools.partial(model, sizes=each), model, x, scales))


def test_in_fp32_the_host_reads_sizes_and_no_cuda_graph_contains_them() -> None:
    torch._dynamo.reset()
    model = Experts(dtype=torch.float32).to("cuda")
    x, scales = torch.randn(T, K, device="cuda"), torch.rand(T, device="cuda")
    sizes = torch.tensor([20, 0, 33, 20], device="cuda")
    narrow = Experts(dtype=BF16).to("cuda")  # of the same structure, whose sizes are not read
    step(functools.partial(whole(narrow), sizes=sizes), narrow, x.to(BF16), scales)
    compiled = whole(model, "inductor", mode="reduce-overhead")
    for number in range(5):
        each = sizes.roll(number)
        torch.compiler.cudagraph_mark_step_begin()
        found = step(functools.partial(compiled, sizes=each), model, x, scales)
        found = [None if t is None else t.clone() for t in found]
        assert_equal(found, step(functools.partial(model, sizes=each), model, x, scales))
    assert isinstance(model.experts[0], fuser.GroupedLinear)
    assert len(sizes) == G
