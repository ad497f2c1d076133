"""Every recipe and number format of the library, found from its classes.

A test of a rule that holds for all formats takes its parameters from here, so that a format that
is added is tested by it. The names are those of recipes: ``current``, ``rowwise``, ``mxfp8``.
"""

from __future__ import annotations

from typing import Any

from fuser import tensors
from fuser.recipe import NAMES, NVFP4BlockScaling, Recipe, name_of
from fuser.tensors import Quantizer

RECIPES = NAMES
# Those whose quantizers keep nothing between steps, which are those that take an override.
STATELESS = {name: cls for name, cls in RECIPES.items() if cls.accepts_backward_override}

QUANTIZER_CLASSES: tuple[type[Quantizer], ...] = tuple(
    cls
    for cls in vars(tensors).values()
    if isinstance(cls, type) and issubclass(cls, Quantizer) and cls is not Quantizer
)
# As they are by default; of delayed scaling there is none without a state.
QUANTIZERS: dict[str, Any] = {
    name_of(cls.recipe_class): cls() for cls in QUANTIZER_CLASSES if cls.recipe_class is not None
}


def deterministic(recipe: type[Recipe], **options: Any) -> Recipe:
    """The recipe without rounding at random."""
    if issubclass(recipe, NVFP4BlockScaling):
        return recipe(disable_stochastic_rounding=True, **options)
    return recipe(**options)
