"""Layers: common layers made of ops."""

import typing as _typing

from fuser.modules.grouped_linear import GroupedLinear
from fuser.modules.layers import LayerNormLinear, LayerNormMLP, Linear

__all__ = ["GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear"]
__dir__ = __all__.copy  # dir() shows public names alone

if not _typing.TYPE_CHECKING:  # a type checker would accept every name of this module
    from fuser.errors import missing_layer as __getattr__  # noqa: F401
