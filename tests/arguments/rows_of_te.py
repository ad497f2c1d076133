"""Rows of the arguments of Transformer Engine's layers and functions, by subject."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import rows_of_te_attention
import rows_of_te_experts
import rows_of_te_functions
import rows_of_te_layers
import rows_of_te_optimizers
from argument_rows import refuses, sets

import fuser
from fuser.te.pytorch import recipes

MODULES = (
    "fuser.te",
    "fuser.te.pytorch",
    *(
        f"fuser.te.pytorch.{name}"
        for name in (
            *(
                "attention",
                "cpu_offload",
                "cross_entropy",
                "custom_recipes",
                "distributed",
                "graph",
            ),
            *("layers", "master_weights", "operations", "optimizers", "padding", "permutation"),
            *("recipes", "rope", "router", "state", "tensors", "transformer", "userbuffers"),
        )
    ),
)
"""The modules of which the import paths of Transformer Engine have names."""
METHODS = (
    *rows_of_te_attention.METHODS,
    *rows_of_te_experts.METHODS,
    *rows_of_te_functions.METHODS,
    *rows_of_te_layers.METHODS,
    *rows_of_te_optimizers.METHODS,
)
OPTIONS: dict[str, tuple[str, ...]] = {
    **rows_of_te_attention.OPTIONS,
    **rows_of_te_functions.OPTIONS,
    **rows_of_te_layers.OPTIONS,
}
RESULTS = {
    "fuser.te.pytorch.layers.TransformerEngineBaseModule": (
        "the base of layers, of which programs ask isinstance"
    ),
}


_FLAGS = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")


@sets(
    "fuser.te.pytorch.recipes.DelayedScaling",
    margin=3,
    fp8_format=fuser.recipe.Format.E4M3,
    amax_history_len=2,
    amax_compute_algo="most_recent",
    reduce_amax=False,
)
@sets("fuser.te.pytorch.recipes.NVFP4BlockScaling", **dict.fromkeys(_FLAGS, True))
def _reaches_the_recipe_of_fuser(given: dict[str, Any]) -> None:
    cls: Any = recipes.NVFP4BlockScaling if given.keys() <= {*_FLAGS} else recipes.DelayedScaling
    own, unset = getattr(fuser.recipe, cls.__name__)(**given), cls()
    assert all(getattr(cls(**given), f.name) == getattr(own, f.name) for f in fields(own))
    assert cls(**given) != unset


@sets("fuser.te.pytorch.recipes.DelayedScaling", scaling_factor_compute_algo=abs)
def _scales_have_one_formula(given: dict[str, Any]) -> None:
    refuses(lambda: recipes.DelayedScaling(**given), "scaling_factor_compute_algo")


@sets("fuser.te.pytorch.recipes.NVFP4BlockScaling", fp4_format="E5M2", fp8_format="E5M2")
def _elements_of_nvfp4(given: dict[str, Any]) -> None:
    refuses(lambda: recipes.NVFP4BlockScaling(**given), "_format 'E5M2'")
