"""Transformer Engine's names: those that scripts of te.ops expect, and its import paths.

No other part of fuser uses them.
"""

from fuser.te import functions, quantizers
from fuser.te.functions import *  # noqa: F403
from fuser.te.import_paths import install, missing
from fuser.te.quantizers import *  # noqa: F403
from fuser.tensors import Float8BlockwiseQTensor as Float8BlockwiseQTensorStorage
from fuser.tensors import Float8Tensor as Float8TensorStorage
from fuser.tensors import MXFP8Tensor as MXFP8TensorStorage
from fuser.tensors import NVFP4Tensor as NVFP4TensorStorage
from fuser.tensors import QuantizedTensor as QuantizedTensorStorage

__all__ = [
    *functions.__all__,
    *quantizers.__all__,
    "Float8BlockwiseQTensorStorage",
    "Float8TensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
    "QuantizedTensorStorage",
    "install",
    "missing",
]
