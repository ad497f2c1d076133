"""Microbatches on a GPU: replays that read and keep quantized weights, against no recordings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_recorded_microbatches import (
    CHANGES,
    EXPERTS,
    MIXED,
    MODELS,
    RECIPES,
    WARM,
    Called,
    F,
    N,
    T,
    assert_same,
    noted,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def on_gpu(make: Callable[[], Called]) -> Callable[[], Called]:
    def made() -> Called:
        called = make()
        called.model.to("cuda")
        return called

    return made


@EVERY_RECIPE
@pytest.mark.parametrize("name", [*MODELS, *EXPERTS])
def test_microbatches_are_replayed_with_the_bits_of_the_plans_own_code_on_a_gpu(
    name: str, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = noted(monkeypatch, "_played")
    script = [*WARM, "step", T, F, F, N, "write", F, F, N, "uncounted", T, F, N]
    assert_same(on_gpu({**MODELS, **EXPERTS}[name]), recipe, script)
    is_looped = name in EXPERTS and recipe is RECIPES["rowwise"]  # it reads the sizes
    assert is_looped or len(played) >= 2 * (len(script) - 13)


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["mlp", "experts"])
def test_a_weight_that_changed_is_read_as_without_recordings_on_a_gpu(
    name: str, change: str, recipe: str
) -> None:
    make = on_gpu({**MODELS, **EXPERTS}[name])
    assert_same(make, RECIPES[recipe], [*WARM, change, F, F, change, T, F, change, N, F, T, F])


@EVERY_RECIPE
@pytest.mark.parametrize("script", MIXED, ids=[str(i) for i in range(len(MIXED))])
def test_mixed_calls_have_the_bits_of_the_plans_own_code_on_a_gpu(
    script: list[Any], recipe: Any
) -> None:
    assert_same(on_gpu(MODELS["mlp"]), recipe, script)
