"""Layers: common layers made of ops."""

from fuser.modules.grouped_linear import GroupedLinear
from fuser.modules.layers import LayerNormLinear, LayerNormMLP, Linear

__all__ = ["GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear"]


def __dir__() -> list[str]:
    return __all__
