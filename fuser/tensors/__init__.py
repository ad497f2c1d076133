"""Quantizers and quantized tensors."""

from fuser.tensors import dispatch, gathering, loading
from fuser.tensors.base import Operand, QuantizedTensor
from fuser.tensors.block_scaling import Float8BlockQuantizer, Float8BlockwiseQTensor
from fuser.tensors.fp8 import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from fuser.tensors.group_formats import Float8GroupsTensor, groups_quantizer, quantizes_groups
from fuser.tensors.grouped import GroupedTensor
from fuser.tensors.hybrid import HybridQuantizedTensor, HybridQuantizer
from fuser.tensors.identity import IdentityQuantizer, IdentityTensor
from fuser.tensors.mxfp8 import MXFP8Quantizer, MXFP8Tensor
from fuser.tensors.nvfp4 import NVFP4Quantizer, NVFP4Tensor
from fuser.tensors.quantizer import Quantizer
from fuser.tensors.rowwise_scaling import Float8RowwiseQuantizer, Float8RowwiseTensor
from fuser.tensors.stacks import stack_quantizer

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer",
    "Float8GroupsTensor",
    "Float8Quantizer",
    "Float8RowwiseQuantizer",
    "Float8RowwiseTensor",
    "Float8Tensor",
    "GroupedTensor",
    "HybridQuantizedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "Operand",
    "QuantizedTensor",
    "Quantizer",
    "dispatch",
    "gathering",
    "groups_quantizer",
    "loading",
    "quantizes_groups",
    "stack_quantizer",
]
