"""Ops under the import paths of te.ops."""

from fuser.basic_ops import *  # noqa: F403
from fuser.basic_ops import __all__ as _basic_ops  # type: ignore[attr-defined]
from fuser.ops import basic, fused, fuser, linear, op, sequential
from fuser.ops.fuser import (
    OperationFuser,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from fuser.ops.linear import Linear
from fuser.ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from fuser.ops.sequential import Sequential

__all__ = [
    *_basic_ops,
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "Linear",
    "OperationContext",
    "OperationFuser",
    "Sequential",
    "basic",
    "fused",
    "fuser",
    "linear",
    "op",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "sequential",
]
