"""Layers: common layers made of ops."""

from fuser.modules.layers import LayerNormLinear, LayerNormMLP, Linear

__all__ = ["LayerNormLinear", "LayerNormMLP", "Linear"]
