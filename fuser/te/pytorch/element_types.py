"""``transformer_engine_torch``: the element types of quantized tensors."""

from fuser.formats import DType

__all__ = ["DType"]
