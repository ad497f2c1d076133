"""Which recipe is in force: autocast."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fuser.recipe import DelayedScaling, Recipe

_active_recipe: ContextVar[Recipe | None] = ContextVar("fuser_recipe", default=None)
current_recipe = _active_recipe.get
"""The recipe of the innermost :func:`autocast`, or None outside one."""


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any | None = None,
) -> Iterator[None]:
    """Run pipelines under ``recipe``; nests, and is off where ``enabled`` is False.

    The recipe is part of every plan's key. This version computes in high
    precision under every recipe, and says so once in a warning.
    """
    active = (recipe or DelayedScaling()) if enabled else None
    if active is not None:
        warnings.warn(
            f"This version of fuser has no quantized kernels: pipelines under "
            f"{type(active).__name__} are planned for it and computed in high precision.",
            stacklevel=3,
        )
    token = _active_recipe.set(active)
    try:
        yield
    finally:
        _active_recipe.reset(token)
