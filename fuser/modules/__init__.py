"""Layers: common layers made of ops."""

from fuser.modules.grouped_linear import GroupedLinear
from fuser.modules.layers import LayerNormLinear, LayerNormMLP, Linear

__all__ = ["GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear"]
__dir__ = __all__.copy  # dir() shows public names alone
