"""Training on several ranks: styles of tensor parallelism, sharded parameters, checkpoints."""

from fuser.distributed.gather_quantized import gather_quantized
from fuser.distributed.parallel_styles import Colwise, Replicated, Rowwise
from fuser.distributed.states import distribute_parameters, init_delayed_scaling
from fuser.runtime import local_parts as _local_parts  # noqa: F401 - opens the door

__all__ = [
    "Colwise",
    "Replicated",
    "Rowwise",
    "distribute_parameters",
    "gather_quantized",
    "init_delayed_scaling",
]
__dir__ = __all__.copy  # dir() shows public names alone
