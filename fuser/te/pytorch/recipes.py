"""``transformer_engine.common.recipe``: a recipe that takes what programs pass to Transformer
Engine's, whose class ignores arguments that it does not know."""

from __future__ import annotations

from typing import Any

from fuser import recipe

__all__ = ["DelayedScaling"]

IGNORED = ("device", "interval", "params_dtype")
"""Arguments that programs pass to DelayedScaling and that are no fields of it."""


class _CountsRecipes(type):
    """A recipe of ``fuser.recipe`` counts as an instance of the class here."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is DelayedScaling:
            return isinstance(instance, recipe.DelayedScaling)
        return type.__instancecheck__(cls, instance)


class DelayedScaling(recipe.DelayedScaling, metaclass=_CountsRecipes):
    """:class:`fuser.recipe.DelayedScaling`, which ignores the arguments in ``IGNORED``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        for name in IGNORED:
            options.pop(name, None)
        super().__init__(*args, **options)
