"""Basic operations."""

import typing as _typing

from fuser.basic_ops.activation import *  # noqa: F403 - the names of its __all__
from fuser.basic_ops.basic_linear import BasicLinear as BasicLinear
from fuser.basic_ops.collectives import AllGather as AllGather
from fuser.basic_ops.collectives import AllReduce as AllReduce
from fuser.basic_ops.collectives import ReduceScatter as ReduceScatter
from fuser.basic_ops.grouped_linear import GroupedLinear as GroupedLinear
from fuser.basic_ops.lora_linear import LoRAGroupedLinear as LoRAGroupedLinear
from fuser.basic_ops.lora_linear import LoRALinear as LoRALinear
from fuser.basic_ops.moe import MoeCombine as MoeCombine
from fuser.basic_ops.moe import MoeDispatch as MoeDispatch
from fuser.basic_ops.normalization import AdaptiveLayerNorm as AdaptiveLayerNorm
from fuser.basic_ops.normalization import L2Normalization as L2Normalization
from fuser.basic_ops.normalization import LayerNorm as LayerNorm
from fuser.basic_ops.normalization import RMSNorm as RMSNorm
from fuser.basic_ops.pointwise_ops import AddExtraInput as AddExtraInput
from fuser.basic_ops.pointwise_ops import Bias as Bias
from fuser.basic_ops.pointwise_ops import ConstantScale as ConstantScale
from fuser.basic_ops.pointwise_ops import Dropout as Dropout
from fuser.basic_ops.quantize import Quantize as Quantize
from fuser.basic_ops.views import Identity as Identity
from fuser.basic_ops.views import MakeExtraOutput as MakeExtraOutput
from fuser.basic_ops.views import Reshape as Reshape

if not _typing.TYPE_CHECKING:  # type checkers read the imports
    from fuser.errors import public_names as _public_names

    __all__ = _public_names(vars())
