"""Checks of your own ops and fusions: gradients, recipes, fused against unfused."""

from fuser.op.parameters import allow_float64
from fuser.testing.check import BACKWARD_OVERRIDES, RECIPES, check

__all__ = ["BACKWARD_OVERRIDES", "RECIPES", "allow_float64", "check"]
__dir__ = __all__.copy  # dir() shows public names alone
