"""Training on several ranks: weights that are gathered quantized."""

from fuser.distributed.gather_quantized import gather_quantized

__all__ = ["gather_quantized"]
