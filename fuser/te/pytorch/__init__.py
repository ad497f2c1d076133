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
from fuser.te.functions import (
    checkpoint,
    deinterleave_glu_tensor,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    interleave_glu_tensor,
    is_bf16_available,
)
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
from fuser.te.pytorch.padding import Fp8Padding, Fp8Unpadding
from fuser.te.pytorch.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from fuser.te.pytorch.rope import RotaryPositionEmbedding
from fuser.te.pytorch.tensors import *  # noqa: F403
from fuser.te.pytorch.tensors import __all__ as _tensors
from fuser.te.pytorch.transformer import MultiheadAttention, TransformerLayer
from fuser.te.pytorch.userbuffers import UserBufferQuantizationMode, destroy_ub, initialize_ub

__all__ = [
    *_tensors,
    "CudaRNGStatesTracker",
    "DType",
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "QuantizerRole",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "UserBufferQuantizationMode",
    "autocast",
    "checkpoint",
    "deinterleave_glu_tensor",
    "destroy_ub",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "get_default_recipe",
    "initialize_ub",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "parallel_cross_entropy",
    "quantized_model_init",
]
