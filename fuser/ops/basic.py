"""The basic ops, as in ``te.ops.basic``."""

from fuser.basic_ops import *  # noqa: F403
