"""Linear, as in ``te.ops.linear``."""

from fuser.fused_ops import Linear

__all__ = ["Linear"]
