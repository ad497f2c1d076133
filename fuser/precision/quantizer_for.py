"""Quantizers of a recipe for the input, the weight and the output gradient of a linear."""

from __future__ import annotations

import functools

from fuser.errors import InputError
from fuser.formats import NumberFormat, hybrid_format, unquantized_format
from fuser.recipe import CustomRecipe, DelayedScaling, QuantizerRole, Recipe, fp8_dtype
from fuser.tensors import Quantizer
from fuser.tensors.quantizer import quantizer_class


def make_quantizer(
    recipe: Recipe, role: str, *, module_type: str = "linear", name: str = ""
) -> Quantizer:
    """The quantizer of ``recipe`` for an ``"input"``, ``"weight"`` or ``"grad_output"``.

    ``module_type`` and ``name`` are those of the op, for the factory of a custom recipe. Raises
    InputError if the recipe is custom and its factory returns no quantizer, or if it is
    DelayedScaling, whose quantizers belong to the state of an op.
    """
    if not isinstance(recipe, CustomRecipe):
        return _make_quantizer(recipe, role)
    # Not cached: the factory may return another quantizer for every op.
    assert recipe.qfactory is not None  # checked by the recipe
    quantizer = recipe.qfactory(QuantizerRole(module_type, role, name))
    if not isinstance(quantizer, Quantizer):
        raise InputError(
            f"{recipe} gives {quantizer!r} for the role {role!r}; it is no Quantizer."
            " Return one of fuser.recipe from qfactory."
        )
    # A copy: later changes to the factory's quantizer have no effect.
    return quantizer.with_usage(rowwise=quantizer.rowwise, columnwise=quantizer.columnwise)


@functools.lru_cache(maxsize=1024)
def _make_quantizer(recipe: Recipe, role: str) -> Quantizer:
    cls = quantizer_class(recipe)
    if cls is None:
        raise InputError(
            f"{recipe} names no quantizer for the role {role!r}. Return one from qfactory."
        )
    return cls.of_recipe(recipe, role)


def role_format(recipe: Recipe, role: str) -> NumberFormat:
    """The format of tensors with this role under ``recipe``, which is not custom."""
    if isinstance(recipe, DelayedScaling):
        form = NumberFormat("FP8", fp8_dtype(recipe.fp8_format, role))
        return hybrid_format(form, unquantized_format()) if recipe.keeps_columns(role) else form
    return _make_quantizer(recipe, role).format
