"""Recipes under Transformer Engine's import path: defaults of the environment."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from said import said

import fuser
from fuser import recipe
from fuser.te.pytorch import recipes


@pytest.mark.parametrize(
    ("cls", "variable", "value", "field", "expected"),
    [
        (
            "Float8CurrentScaling",
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
            "1",
            "use_power_2_scales",
            True,
        ),
        ("Float8BlockScaling", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", "use_f32_scales", True),
        ("NVFP4BlockScaling", "NVTE_NVFP4_DISABLE_RHT", "1", "disable_rht", True),
        ("NVFP4BlockScaling", "NVTE_NVFP4_DISABLE_RHT", "0", "disable_rht", False),
        (
            "NVFP4BlockScaling",
            "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
            "1",
            "disable_stochastic_rounding",
            True,
        ),
        (
            "NVFP4BlockScaling",
            "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
            "1",
            "disable_2d_quantization",
            True,
        ),
        (
            "NVFP4BlockScaling",
            "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
            "1",
            "row_scaled_activation",
            True,
        ),
        ("NVFP4BlockScaling", "NVTE_NVFP4_4OVER6", "weights", "nvfp4_4over6", "weights"),
        (
            "NVFP4BlockScaling",
            "NVTE_NVFP4_4OVER6_E4M3_USE_256",
            "none",
            "nvfp4_4over6_e4m3_use_256",
            "none",
        ),
        ("NVFP4BlockScaling", "NVTE_NVFP4_4OVER6_ERR_MODE", "mse", "nvfp4_4over6_err_mode", "MSE"),
    ],
)
def test_a_field_that_is_not_given_has_the_default_of_its_variable(
    cls: str, variable: str, value: str, field: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, own = getattr(recipes, cls), getattr(recipe, cls)
    plain = here()
    assert all(getattr(plain, f.name) == getattr(own(), f.name) for f in fields(own))
    monkeypatch.setenv(variable, value)
    assert getattr(here(), field) == expected
    assert getattr(here(**{field: getattr(own(), field)}), field) == getattr(own(), field)
    assert getattr(own(), field) == getattr(plain, field)  # of fuser's own recipe it has no effect


def test_a_value_that_is_given_by_place_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "all")
    made = recipes.NVFP4BlockScaling()
    assert made == recipes.NVFP4BlockScaling(True, nvfp4_4over6="all")
    assert made.fp4_quant_fwd_inp == recipe.QParams()
    with pytest.raises(
        fuser.InputError,
        match=said("recipe-nvfp4block-nvfp4-4over6", None, None, "random_hadamard_transform"),
    ):
        recipes.NVFP4BlockScaling(False)
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "some")
    with pytest.raises(fuser.InputError, match=said("recipe-takes", None, "nvfp4_4over6 'some'")):
        recipes.NVFP4BlockScaling()
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other == made
    assert replace(made, nvfp4_4over6="weights").disable_rht


def test_recipes_of_either_path_count_as_each_other() -> None:
    for name in ("Float8CurrentScaling", "Float8BlockScaling", "NVFP4BlockScaling"):
        here, own = getattr(recipes, name), getattr(recipe, name)
        assert isinstance(own(), here)
        assert isinstance(here(), own)
        assert not isinstance(recipe.MXFP8BlockScaling(), here)
    assert not isinstance(recipe.Float8BlockScaling(), recipes.NVFP4BlockScaling)


def test_a_graph_that_makes_a_recipe_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "all")
    linear, x = fuser.Linear(32, 32), torch.randn(16, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        with fuser.autocast(recipe=recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)):
            y: torch.Tensor = linear(x)
        return y

    expected = run(x)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    own = recipe.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all")
    with fuser.autocast(recipe=own):
        assert torch.equal(linear(x), expected)
