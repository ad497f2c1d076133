"""Layers on top of the ops."""

from fuser.modules.layers import LayerNormLinear, LayerNormMLP, Linear

__all__ = ["LayerNormLinear", "LayerNormMLP", "Linear"]
