"""CUDA kernels: what a launcher of your own needs."""

from fuser.cuda.arguments import ELEMENTS, Struct, float32, int32, int64
from fuser.cuda.launch import Kernel, Launch, kernels_support, multiprocessors

__all__ = [
    "ELEMENTS",
    "Kernel",
    "Launch",
    "Struct",
    "float32",
    "int32",
    "int64",
    "kernels_support",
    "multiprocessors",
]
