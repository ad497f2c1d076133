"""Which recipe is in force: autocast."""

from __future__ import annotations

import contextlib
import warnings
from contextvars import ContextVar, Token
from typing import Any

from fuser.recipe import DelayedScaling, Recipe

_active_recipe: ContextVar[Recipe | None] = ContextVar("fuser_recipe", default=None)
current_recipe = _active_recipe.get
"""The recipe of the innermost :class:`autocast`, or None outside one."""


class autocast(contextlib.ContextDecorator):
    """Run pipelines under ``recipe``: a context, or a decorator; nests and re-enters.

    The recipe is part of every plan's key. This version computes in high
    precision under every recipe, and warns so.

    Parameters
    ----------
    enabled
        Off where False, also inside another autocast.
    calibrating
        Accepted for compatibility.
    recipe
        ``DelayedScaling()`` if None.
    amax_reduction_group
        Process group over which amaxes are reduced.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any | None = None,
    ) -> None:
        self.calibrating = calibrating
        self.amax_reduction_group = amax_reduction_group
        self.recipe = (recipe or DelayedScaling()) if enabled else None
        self._tokens: list[Token[Recipe | None]] = []

    def __enter__(self) -> None:
        if self.recipe is not None:
            warnings.warn(
                "This version of fuser has no quantized kernels: pipelines under "
                f"{type(self.recipe).__name__} are planned for it and computed in high precision.",
                stacklevel=2,
            )
        self._tokens.append(_active_recipe.set(self.recipe))

    def __exit__(self, *exc_info: object) -> None:
        _active_recipe.reset(self._tokens.pop())
