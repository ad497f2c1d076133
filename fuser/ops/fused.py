"""The fused ops, as in ``te.ops.fused``."""

from fuser.fused_ops import *  # noqa: F403
