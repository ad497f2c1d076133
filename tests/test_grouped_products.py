"""Quantized grouped linears: all groups at once give what a loop over the groups gives.

On a CPU the loop runs; here both run, with torch's product of groups in bf16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_grouped_linear import (
    BF16,
    FP16,
    LAYOUTS,
    MODES,
    RECIPES,
    SPLITS,
    K,
    N,
    T,
    made,
    poisoned,
    run,
    values,
)
from test_grouped_linear import G as GROUPS

import fuser
from fuser import recipe as recipes
from fuser.gemm import grouped
from fuser.recipe import BACKWARD_OVERRIDES

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")
PADDED = {
    name: make
    for name, make in RECIPES.items()
    if isinstance(
        make(),
        (
            recipes.Float8CurrentScaling,
            recipes.DelayedScaling,
            recipes.Float8BlockScaling,
            recipes.MXFP8BlockScaling,
            recipes.NVFP4BlockScaling,
        ),
    )
}
EVERY_RECIPE = pytest.mark.parametrize("make", PADDED.values(), ids=PADDED)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, narrow products of groups are one call of torch."""

    def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
        return dtype in (FP16, BF16)

    return lambda: monkeypatch.setattr(grouped, "has_grouped_mm", has_grouped_mm)


def both(
    at_once: Callable[[], None], op: fuser.GroupedLinear, recipe: Any, **given: Any
) -> list[dict[str, Any]]:
    """Three steps by the loop, and the same steps at once; with the state after each."""
    found = []
    for is_at_once in (False, True):
        if is_at_once:
            at_once()
        own, steps = copy.deepcopy(op), []
        for _ in range(3):
            results = run(own, recipe=recipe, **given)
            state = {k: v.clone() for k, v in own.state_dict().items() if k not in results}
            steps.append({**{n: t.clone() for n, t in results.items()}, **state})
        found.append(steps)
    return found


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@EVERY_RECIPE
def test_bits_are_those_of_the_loop(
    make: Callable[[], Any], splits: tuple[int, ...], at_once: Callable[[], None]
) -> None:
    count = sum(splits)
    x, dy = (poisoned(values(T, n, seed=seed, dtype=BF16), count) for n, seed in ((K, 1), (N, 2)))
    loop, once = both(at_once, made(BF16), make(), x=x, dy=dy, splits=splits)
    for expected, found in zip(loop, once, strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@EVERY_RECIPE
def test_every_bias_and_layout(
    make: Callable[[], Any],
    mode: dict[str, bool],
    layout: dict[str, bool],
    at_once: Callable[[], None],
) -> None:
    op = made(FP16, **mode, **layout)
    given = {
        "x": values(T, K, seed=1, dtype=FP16),
        "dy": values(T, N, seed=2, dtype=FP16),
        "splits": SPLITS["sum below the rows"],
        "scales": values(T, seed=3, dtype=FP16) if op.scale_bias else None,
    }
    loop, once = both(at_once, op, make(), **given)
    for expected, found in zip(loop, once, strict=True):
        for name, value in expected.items():
            if name in ("db", "dscales"):  # sums in another order
                assert torch.allclose(found[name], value, rtol=0.01, atol=0.01), name
            else:
                assert torch.equal(found[name], value), name


@pytest.mark.parametrize("frozen", ["input", "weights", "one weight"])
@pytest.mark.parametrize("override", [None, *BACKWARD_OVERRIDES])
@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling, recipes.MXFP8BlockScaling])
def test_what_is_frozen_gets_no_gradient(
    recipe: Any, override: str | None, frozen: str, at_once: Callable[[], None]
) -> None:
    at_once()
    op = made(BF16, bias=False)
    x = values(T, K, seed=1, dtype=BF16).requires_grad_(frozen != "input")
    for g in range(GROUPS):
        getattr(op, f"weight{g}").requires_grad_(
            frozen == "input" or (frozen != "weights" and g > 0)
        )
    splits = torch.tensor(SPLITS["even"])
    with fuser.autocast(recipe=recipe(backward_override=override)):
        y = op(x, splits)
    y.sum().backward()
    assert (x.grad is None) == (frozen == "input")
    for g in range(GROUPS):
        weight = getattr(op, f"weight{g}")
        assert (weight.grad is None) == (not weight.requires_grad)


@pytest.mark.parametrize("is_at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("override", [None, *BACKWARD_OVERRIDES])
def test_biases_alone_get_their_gradients(
    override: str | None, is_at_once: bool, at_once: Callable[[], None]
) -> None:
    if is_at_once:
        at_once()
    op, dy = made(BF16), values(T, N, seed=2, dtype=BF16)
    for g in range(GROUPS):
        getattr(op, f"weight{g}").requires_grad_(False)
    splits = SPLITS["first empty"]
    with fuser.autocast(recipe=recipes.MXFP8BlockScaling(backward_override=override)):
        y = op(values(T, K, seed=1, dtype=BF16), torch.tensor(splits))
    y.backward(dy)
    for g, rows in enumerate(dy.float().split(splits)):
        bias = getattr(op, f"bias{g}")
        torch.testing.assert_close(bias.grad.float(), rows.sum(0), rtol=0.01, atol=0.05)


@pytest.mark.parametrize("override", BACKWARD_OVERRIDES)
def test_overrides_save_what_they_say(override: str, at_once: Callable[[], None]) -> None:
    """The operands themselves, or their rowwise copies."""
    at_once()
    op, saved = made(BF16, bias=False, single_grouped_weight=True), []
    x = values(T, K, seed=1, dtype=BF16).requires_grad_()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        fuser.autocast(recipe=recipes.Float8CurrentScaling(backward_override=override)),
    ):
        op(x, torch.tensor(SPLITS["even"]))
    kept = [tensor for tensor in saved if tensor.dtype is BF16]
    assert len(kept) == 2
    for tensor in kept:
        if override == "high_precision":
            assert type(tensor) in (torch.Tensor, torch.nn.Parameter)
            assert tensor.shape in ((T, K), (GROUPS, N, K))
        else:
            assert tensor._has("rowwise")
            assert not tensor._has("columnwise")


def test_other_recipes_run_group_by_group(at_once: Callable[[], None]) -> None:
    at_once()
    op = made(BF16)
    x, dy = values(T, K, seed=1, dtype=BF16), values(T, N, seed=2, dtype=BF16)
    recipe = recipes.Float8RowwiseScaling()
    found = run(op, x, dy, SPLITS["even"], recipe=recipe)
    assert all(t.isfinite().all() for t in found.values())


@pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES)
def test_all_quantizers_are_those_one_by_one(make: Callable[[], Any]) -> None:
    """In training, in evaluation, and of an op that chooses its own."""

    class Chooses(fuser.GroupedLinear):
        def get_quantizer(self, mode: str, index: int, *args: Any) -> Any:
            return fuser.MXFP8Quantizer()

    for cls in (fuser.GroupedLinear, Chooses):
        op = cls(GROUPS, K, N, dtype=BF16, device="cpu")
        with fuser.autocast(recipe=make()):
            for mode in ("forward", "backward"):
                count = op.num_quantizers(mode)
                one_by_one = [op.quantizer_value(mode, index) for index in range(count)]
                assert op.quantizer_values(mode) == one_by_one
                assert len(one_by_one) == count
