"""Basic operations."""

from fuser.basic_ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from fuser.basic_ops.basic_linear import BasicLinear
from fuser.basic_ops.collectives import AllGather, AllReduce, ReduceScatter
from fuser.basic_ops.grouped_linear import GroupedLinear
from fuser.basic_ops.lora_linear import LoRAGroupedLinear, LoRALinear
from fuser.basic_ops.moe import MoeCombine, MoeDispatch
from fuser.basic_ops.normalization import AdaptiveLayerNorm, L2Normalization, LayerNorm, RMSNorm
from fuser.basic_ops.pointwise_ops import AddExtraInput, Bias, ConstantScale, Dropout
from fuser.basic_ops.quantize import Quantize
from fuser.basic_ops.views import Identity, MakeExtraOutput, Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AdaptiveLayerNorm",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "LoRAGroupedLinear",
    "LoRALinear",
    "MakeExtraOutput",
    "MoeCombine",
    "MoeDispatch",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]
