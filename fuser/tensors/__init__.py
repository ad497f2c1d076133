"""Quantizers and quantized tensors."""

from fuser.tensors import dispatch as dispatch
from fuser.tensors import gathering as gathering
from fuser.tensors import loading as loading
from fuser.tensors.base import Operand as Operand
from fuser.tensors.base import QuantizedTensor as QuantizedTensor
from fuser.tensors.block_scaling import Float8BlockQuantizer as Float8BlockQuantizer
from fuser.tensors.block_scaling import Float8BlockwiseQTensor as Float8BlockwiseQTensor
from fuser.tensors.fp8 import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
from fuser.tensors.fp8 import Float8Quantizer as Float8Quantizer
from fuser.tensors.fp8 import Float8Tensor as Float8Tensor
from fuser.tensors.group_formats import Float8GroupsTensor as Float8GroupsTensor
from fuser.tensors.group_formats import groups_quantizer as groups_quantizer
from fuser.tensors.group_formats import quantizes_groups as quantizes_groups
from fuser.tensors.grouped import GroupedTensor as GroupedTensor
from fuser.tensors.hybrid import HybridQuantizedTensor as HybridQuantizedTensor
from fuser.tensors.hybrid import HybridQuantizer as HybridQuantizer
from fuser.tensors.identity import IdentityQuantizer as IdentityQuantizer
from fuser.tensors.identity import IdentityTensor as IdentityTensor
from fuser.tensors.mxfp8 import MXFP8Quantizer as MXFP8Quantizer
from fuser.tensors.mxfp8 import MXFP8Tensor as MXFP8Tensor
from fuser.tensors.nvfp4 import NVFP4Quantizer as NVFP4Quantizer
from fuser.tensors.nvfp4 import NVFP4Tensor as NVFP4Tensor
from fuser.tensors.quantizer import Quantizer as Quantizer
from fuser.tensors.rowwise_scaling import Float8RowwiseQuantizer as Float8RowwiseQuantizer
from fuser.tensors.rowwise_scaling import Float8RowwiseTensor as Float8RowwiseTensor
from fuser.tensors.stacks import stack_quantizer as stack_quantizer
