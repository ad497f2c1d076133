"""Sequential, as in ``te.ops.sequential``."""

from fuser.sequential import Sequential

__all__ = ["Sequential"]
