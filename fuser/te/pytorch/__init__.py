"""The names of ``transformer_engine.pytorch``, for :func:`fuser.te.install`."""

from fuser.formats import DType
from fuser.precision.availability import (
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from fuser.precision.contexts import autocast, quantized_model_init
from fuser.recipe import QuantizerRole
from fuser.te import functions
from fuser.te.functions import *  # noqa: F403
from fuser.te.pytorch import padding, permutation, tensors, transformer, userbuffers
from fuser.te.pytorch.attention import DotProductAttention
from fuser.te.pytorch.cpu_offload import get_cpu_offload_context
from fuser.te.pytorch.cross_entropy import parallel_cross_entropy
from fuser.te.pytorch.distributed import CudaRNGStatesTracker
from fuser.te.pytorch.graph import make_graphed_callables
from fuser.te.pytorch.layers import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from fuser.te.pytorch.padding import *  # noqa: F403
from fuser.te.pytorch.permutation import *  # noqa: F403
from fuser.te.pytorch.rope import RotaryPositionEmbedding
from fuser.te.pytorch.tensors import *  # noqa: F403
from fuser.te.pytorch.transformer import *  # noqa: F403
from fuser.te.pytorch.userbuffers import *  # noqa: F403

__all__ = [
    *functions.__all__,
    *padding.__all__,
    *permutation.__all__,
    *tensors.__all__,
    *transformer.__all__,
    *userbuffers.__all__,
    "CudaRNGStatesTracker",
    "DType",
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "QuantizerRole",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "autocast",
    "get_cpu_offload_context",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "parallel_cross_entropy",
    "quantized_model_init",
]
