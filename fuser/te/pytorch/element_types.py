"""``transformer_engine_torch``: the element types of quantized tensors, and layouts of blocks."""

from fuser.formats import DType
from fuser.te.tensors import Float8BlockScaleTensorFormat

__all__ = ["DType", "Float8BlockScaleTensorFormat"]
