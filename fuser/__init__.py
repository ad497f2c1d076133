"""fuser: pipelines of basic operations, planned on a graph and run fused."""

import sys as _sys

from fuser import draw as _draw  # noqa: F401 - registers the renderers of plans
from fuser import modules, recipe
from fuser.availability import (
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from fuser.basic_ops import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    AddExtraInput,
    BasicLinear,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    Dropout,
    Identity,
    L2Normalization,
    LayerNorm,
    MakeExtraOutput,
    Quantize,
    ReGLU,
    ReLU,
    Reshape,
    RMSNorm,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from fuser.catalog import FUSIONS
from fuser.errors import FuserError, InputError, InputTypeError, StateError
from fuser.formats import DType
from fuser.fused_ops import Linear
from fuser.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from fuser.pipeline import (
    OperationFuser,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from fuser.plan import FusionPlan, Refusal, Step
from fuser.plan_key import PlanKey
from fuser.precision import autocast, quantized_model_init
from fuser.sequential import Sequential
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    NVFP4Tensor,
    QuantizedTensor,
    Quantizer,
)
from fuser.tensors import compatibility as _compatibility  # noqa: F401 - adds methods to tensors
from fuser.version import __version__

# A script written for te.ops finds the same names under ``fuser.ops``.
ops = _sys.modules[__name__]
_sys.modules[__name__ + ".ops"] = ops

__all__ = [
    "Activation",
    "AddExtraInput",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "DType",
    "Dropout",
    "FUSIONS",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "FusedOperation",
    "FuserError",
    "FusibleOperation",
    "FusionPlan",
    "GEGLU",
    "GELU",
    "GLU",
    "Identity",
    "InputError",
    "InputTypeError",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MakeExtraOutput",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "OperationContext",
    "OperationFuser",
    "PlanKey",
    "QGEGLU",
    "QGELU",
    "Quantize",
    "QuantizedTensor",
    "Quantizer",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Refusal",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "StateError",
    "Step",
    "SwiGLU",
    "__version__",
    "autocast",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "modules",
    "ops",
    "quantized_model_init",
    "recipe",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
