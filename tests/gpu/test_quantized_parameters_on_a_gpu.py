"""Recorded passes over quantized parameters on a GPU, experts too, against no recordings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_recorded_microbatches import noted
from test_recorded_quantized_parameters import (
    CHANGES,
    CURRENT,
    MODELS,
    PLAYED,
    RECIPES,
    ROWS,
    WARM,
    assert_same,
    stepped,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")


def on_gpu(name: str, recipe: Any) -> torch.nn.Module:
    return MODELS[name](recipe).to("cuda")


@pytest.mark.parametrize("recipe", PLAYED)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_replayed_with_the_bits_of_the_plans_own_code_on_a_gpu(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, recipe) == ("one weight", "delayed"):
        pytest.skip("One quantized parameter for all groups has no delayed scaling.")
    played = noted(monkeypatch, "_played")
    assert_same(lambda made_under: on_gpu(name, made_under), RECIPES[recipe], ["", stepped] * 8)
    is_rounded_at_random = recipe == "nvfp4"
    assert len(played) >= (4 if is_rounded_at_random else 8), "forward, and backward, of most steps"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recipe", ["current", "block", "delayed"])
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_changed_parameter_is_read_as_without_recordings_on_a_gpu(
    name: str, recipe: str, change: str
) -> None:
    changed = CHANGES[change]
    script = [*WARM, changed, *WARM, changed, "", "", stepped, ""]
    assert_same(lambda made_under: on_gpu(name, made_under), RECIPES[recipe], script)


@pytest.mark.parametrize("name", MODELS)
def test_two_layouts_in_turn_are_both_played_on_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = noted(monkeypatch, "_played")
    assert_same(lambda made_under: on_gpu(name, made_under), CURRENT, [ROWS, 32] * 6)
    assert len({id(which) for which in played}) == 4
