"""``transformer_engine.common.recipe``: recipes that take what programs pass to Transformer
Engine's, whose classes ignore some arguments and take defaults from the environment."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any

from fuser import recipe
from fuser.recipe import made_by_new
from fuser.te.import_paths import ROOT, is_installed
from fuser.te.pytorch.positions import also_by_position

__all__ = ["DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "NVFP4BlockScaling"]

NAME = f"{ROOT}.common.recipe"
"""The module that programs import them from."""
IGNORED = ("device", "interval", "params_dtype")
"""Arguments that programs pass to DelayedScaling and that are no fields of it."""


def _is_one(value: str) -> bool:
    return value == "1"


VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "use_power_2_scales": ("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", _is_one),
    "use_f32_scales": ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", _is_one),
    "disable_rht": ("NVTE_NVFP4_DISABLE_RHT", _is_one),
    "disable_stochastic_rounding": ("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", _is_one),
    "disable_2d_quantization": ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", _is_one),
    "row_scaled_activation": ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", _is_one),
    "nvfp4_4over6": ("NVTE_NVFP4_4OVER6", str),
    "nvfp4_4over6_e4m3_use_256": ("NVTE_NVFP4_4OVER6_E4M3_USE_256", str),
    "nvfp4_4over6_err_mode": ("NVTE_NVFP4_4OVER6_ERR_MODE", str.upper),
}
"""By field of a recipe the variable that has its default, and how it is read.

``backward_override`` has one for every recipe of this library.
"""


class _CountsRecipes(type):
    """A recipe of ``fuser.recipe`` counts as an instance of the class of its name here."""

    def __instancecheck__(cls, instance: Any) -> bool:
        own = vars(recipe).get(cls.__name__)
        if own in cls.__bases__:
            return isinstance(instance, own)
        return type.__instancecheck__(cls, instance)


class _FromEnvironment(metaclass=_CountsRecipes):
    """A recipe whose fields that are not given are those of the environment."""

    @made_by_new
    def __init__(self, *args: Any, **options: Any) -> None:
        base: Any = next(cls for cls in type(self).__mro__ if cls.__module__ == recipe.__name__)
        parameters = inspect.signature(base)
        given = parameters.bind_partial(*args).arguments.keys() | options.keys()
        for name in VARIABLES.keys() & parameters.parameters.keys() - given:
            variable, read = VARIABLES[name]
            if variable in os.environ:
                options[name] = read(os.environ[variable])
        base.__init__(self, *args, **options)


class DelayedScaling(recipe.DelayedScaling, metaclass=_CountsRecipes):
    """:class:`fuser.recipe.DelayedScaling`, which ignores the arguments in ``IGNORED``."""

    @also_by_position(
        "margin fp8_format amax_history_len amax_compute_algo scaling_factor_compute_algo "
        "reduce_amax"
    )
    def __init__(self, **options: Any) -> None:
        for name in IGNORED:
            options.pop(name, None)
        super().__init__(**options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the fields that are not defaults: readers of checkpoints take few classes."""
        plain = recipe.DelayedScaling()
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        }
        return type(self), (), changed


class Float8CurrentScaling(_FromEnvironment, recipe.Float8CurrentScaling):
    """:class:`fuser.recipe.Float8CurrentScaling` with defaults of the environment."""


class Float8BlockScaling(_FromEnvironment, recipe.Float8BlockScaling):
    """:class:`fuser.recipe.Float8BlockScaling` with defaults of the environment."""


class NVFP4BlockScaling(_FromEnvironment, recipe.NVFP4BlockScaling):
    """:class:`fuser.recipe.NVFP4BlockScaling` with defaults of the environment."""

    @made_by_new
    @also_by_position(
        "disable_rht disable_stochastic_rounding disable_2d_quantization fp4_format fp8_format"
    )
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)


def take_name() -> None:
    """Pickles of these recipes name them as programs import them, which their readers know."""
    for name in __all__:
        globals()[name].__module__ = NAME


if is_installed():
    take_name()
