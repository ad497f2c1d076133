"""Precision: recipes in effect, quantizers, delayed scaling, activation checkpointing."""

from fuser.precision.availability import (
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from fuser.precision.contexts import autocast, default_recipe, quantized_model_init

__all__ = [
    "autocast",
    "default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]
