"""Layers: common layers made of ops."""

import typing as _typing

from fuser.errors import explains_names as _explains_names
from fuser.modules.grouped_linear import GroupedLinear
from fuser.modules.layers import LayerNormLinear, LayerNormMLP, Linear

__all__ = ["GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear"]
__dir__ = __all__.copy  # dir() shows public names alone

if not _typing.TYPE_CHECKING:  # a type checker would accept every name of this module
    __getattr__ = _explains_names(__name__)
