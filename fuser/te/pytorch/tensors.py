"""``transformer_engine.pytorch.tensor``: the classes of quantized tensors and quantizers."""

from fuser.te import quantizers
from fuser.te.quantizers import *  # noqa: F403
from fuser.tensors import (
    Float8BlockwiseQTensor,
    Float8Tensor,
    HybridQuantizedTensor,
    IdentityTensor,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedTensor,
    Quantizer,
)

Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor
Float8TensorStorage = Float8Tensor
HybridQuantizedTensorStorage = HybridQuantizedTensor
IdentityTensorStorage = IdentityTensor
MXFP8TensorStorage = MXFP8Tensor
NVFP4TensorStorage = NVFP4Tensor
QuantizedTensorStorage = QuantizedTensor

__all__ = [
    *quantizers.__all__,
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
]
