"""Matrix products of linear layers: unquantized with PyTorch, and native quantized GEMMs."""

from fuser.gemm.matmul import (
    architecture,
    dgrad,
    linear,
    linear_add,
    linear_gelu,
    quantized_dgrad,
    quantized_linear,
    quantized_wgrad,
    quantized_wgrad_accumulate,
    scaled_linear,
    wgrad,
    wgrad_accumulate,
)
from fuser.gemm.native import NativeGemm, native_gemm

__all__ = [
    "NativeGemm",
    "architecture",
    "dgrad",
    "linear",
    "linear_add",
    "linear_gelu",
    "native_gemm",
    "quantized_dgrad",
    "quantized_linear",
    "quantized_wgrad",
    "quantized_wgrad_accumulate",
    "scaled_linear",
    "wgrad",
    "wgrad_accumulate",
]
