"""What a recipe means for the input, the weight and the output gradient of a linear: quantizers."""

from __future__ import annotations

import functools

from fuser.errors import InputError
from fuser.formats import NumberFormat
from fuser.recipe import CustomRecipe, DelayedScaling, QuantizerRole, Recipe, fp8_dtype
from fuser.tensors import Quantizer
from fuser.tensors.quantizer import quantizer_class


def make_quantizer(
    recipe: Recipe, role: str, *, module_type: str = "linear", name: str = ""
) -> Quantizer:
    """The quantizer that ``recipe`` means for an ``"input"``, ``"weight"`` or ``"grad_output"``.

    ``module_type`` and ``name`` are those of the op, for the factory of a custom recipe.

    Raises
    ------
    InputError
        If the recipe is custom and its factory gives none, or is DelayedScaling, whose quantizers
        belong to the state of an op.
    """
    if not isinstance(recipe, CustomRecipe):
        return _make_quantizer(recipe, role)
    # Not cached: the factory may give every op a quantizer of its own.
    assert recipe.qfactory is not None  # the recipe has looked
    quantizer = recipe.qfactory(QuantizerRole(module_type, role, name))
    if not isinstance(quantizer, Quantizer):
        raise InputError(f"{recipe} gives {quantizer!r} for the role {role!r}; it is no Quantizer.")
    # The factory's own may change later; what it is now counts.
    return quantizer.with_usage(rowwise=quantizer.rowwise, columnwise=quantizer.columnwise)


@functools.lru_cache(maxsize=1024)
def _make_quantizer(recipe: Recipe, role: str) -> Quantizer:
    cls = quantizer_class(recipe)
    if cls is None:
        raise InputError(f"{recipe} names no quantizer for the role {role!r}.")
    return cls.of_recipe(recipe, role)


def role_format(recipe: Recipe, role: str) -> NumberFormat:
    """The format that ``recipe``, which is not custom, means for such a role."""
    if isinstance(recipe, DelayedScaling):
        return NumberFormat("FP8", fp8_dtype(recipe.fp8_format, role))
    return _make_quantizer(recipe, role).format
