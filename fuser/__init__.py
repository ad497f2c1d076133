"""fuser: pipelines of basic operations, planned on a graph and run fused."""

import typing as _typing

from fuser import distributed as distributed
from fuser import modules as modules
from fuser import moe as moe
from fuser import recipe as recipe
from fuser import testing as testing
from fuser.basic_ops import *  # noqa: F403 - the names of its __all__
from fuser.conversion import ConversionReport as ConversionReport
from fuser.conversion import convert as convert
from fuser.conversion import converted as converted
from fuser.conversion import revert as revert
from fuser.cuda.pass_graphs import graph_passes as graph_passes
from fuser.errors import EmulationWarning as EmulationWarning
from fuser.errors import FuserError as FuserError
from fuser.errors import FuserWarning as FuserWarning
from fuser.errors import InputError as InputError
from fuser.errors import InputTypeError as InputTypeError
from fuser.errors import StateError as StateError
from fuser.formats import DType as DType
from fuser.fused_ops import Linear as Linear
from fuser.fused_ops.catalog import FUSIONS as FUSIONS
from fuser.op import BasicOperation as BasicOperation
from fuser.op import FusedOperation as FusedOperation
from fuser.op import FusibleOperation as FusibleOperation
from fuser.op import OperationContext as OperationContext
from fuser.op import plain_keys as plain_keys
from fuser.plan.model import ModelPlan as ModelPlan
from fuser.plan.plan import FusionPlan as FusionPlan
from fuser.plan.plan import Refusal as Refusal
from fuser.plan.plan import Step as Step
from fuser.plan.rebuilt import activation_memory_budget as activation_memory_budget
from fuser.precision.availability import is_fp8_available as is_fp8_available
from fuser.precision.availability import (
    is_fp8_block_scaling_available as is_fp8_block_scaling_available,
)
from fuser.precision.availability import is_mxfp8_available as is_mxfp8_available
from fuser.precision.availability import is_nvfp4_available as is_nvfp4_available
from fuser.precision.contexts import autocast as autocast
from fuser.precision.contexts import quantized_model_init as quantized_model_init
from fuser.recipe import QuantizerRole as QuantizerRole
from fuser.runtime import cut as _cut  # noqa: F401 - cuts pipelines into autograd nodes
from fuser.runtime import notes as _notes  # noqa: F401 - notes of plans on a call's tensors
from fuser.runtime import recorded as _recorded  # noqa: F401 - repeats passes and launches
from fuser.runtime import repeated_forward as _repeated  # noqa: F401 - budgets of memory
from fuser.runtime import traced as _traced  # noqa: F401 - calls in torch.compile
from fuser.runtime.graphs import make_graphed_callables as make_graphed_callables
from fuser.runtime.model_plan import plan as plan
from fuser.runtime.pipeline import OperationFuser as OperationFuser
from fuser.runtime.pipeline import register_backward_fusion as register_backward_fusion
from fuser.runtime.pipeline import (
    register_forward_backward_fusion as register_forward_backward_fusion,
)
from fuser.runtime.pipeline import register_forward_fusion as register_forward_fusion
from fuser.sequential import Sequential as Sequential
from fuser.specs import PlanKey as PlanKey
from fuser.specs import TensorSpec as TensorSpec
from fuser.tensors import Float8BlockwiseQTensor as Float8BlockwiseQTensor
from fuser.tensors import Float8RowwiseQuantizer as Float8RowwiseQuantizer
from fuser.tensors import Float8RowwiseTensor as Float8RowwiseTensor
from fuser.tensors import Float8Tensor as Float8Tensor
from fuser.tensors import GroupedTensor as GroupedTensor
from fuser.tensors import HybridQuantizedTensor as HybridQuantizedTensor
from fuser.tensors import IdentityTensor as IdentityTensor
from fuser.tensors import MXFP8Tensor as MXFP8Tensor
from fuser.tensors import NVFP4Tensor as NVFP4Tensor
from fuser.tensors import QuantizedTensor as QuantizedTensor
from fuser.tensors import Quantizer as Quantizer
from fuser.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from fuser import ops as ops
    from fuser.inspection import inspect as inspect
    from fuser.te import Float8BlockQuantizer as Float8BlockQuantizer
    from fuser.te import Float8BlockwiseQTensorStorage as Float8BlockwiseQTensorStorage
    from fuser.te import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
    from fuser.te import Float8Quantizer as Float8Quantizer
    from fuser.te import Float8TensorStorage as Float8TensorStorage
    from fuser.te import HybridQuantizer as HybridQuantizer
    from fuser.te import IdentityQuantizer as IdentityQuantizer
    from fuser.te import MXFP8Quantizer as MXFP8Quantizer
    from fuser.te import MXFP8TensorStorage as MXFP8TensorStorage
    from fuser.te import NVFP4Quantizer as NVFP4Quantizer
    from fuser.te import NVFP4TensorStorage as NVFP4TensorStorage
    from fuser.te import QuantizedTensorStorage as QuantizedTensorStorage
    from fuser.te import checkpoint as checkpoint
    from fuser.te import deinterleave_glu_tensor as deinterleave_glu_tensor
    from fuser.te import fp8_autocast as fp8_autocast
    from fuser.te import fp8_model_init as fp8_model_init
    from fuser.te import get_default_recipe as get_default_recipe
    from fuser.te import interleave_glu_tensor as interleave_glu_tensor
    from fuser.te import is_bf16_available as is_bf16_available

if not _typing.TYPE_CHECKING:  # a type checker reads the imports, and would accept every name
    from fuser.errors import public_names as _public_names
    from fuser.runtime.products import NAMES as _NAMES
    from fuser.runtime.products import name_of_product as __getattr__  # noqa: F401

    _MODULES = ("distributed", "modules", "moe", "recipe", "testing")
    __all__ = _public_names(vars(), "__version__", *_MODULES, *_NAMES)
    __dir__ = __all__.copy  # dir() shows public names alone
