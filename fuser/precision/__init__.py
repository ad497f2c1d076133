"""Precision: recipes in effect, quantizers, delayed scaling, activation checkpointing."""

from fuser.precision.availability import is_fp8_available as is_fp8_available
from fuser.precision.availability import (
    is_fp8_block_scaling_available as is_fp8_block_scaling_available,
)
from fuser.precision.availability import is_mxfp8_available as is_mxfp8_available
from fuser.precision.availability import is_nvfp4_available as is_nvfp4_available
from fuser.precision.contexts import autocast as autocast
from fuser.precision.contexts import default_recipe as default_recipe
from fuser.precision.contexts import quantized_model_init as quantized_model_init
