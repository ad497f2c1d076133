"""Pipelines and registered fusions, as in ``te.ops.fuser``."""

from fuser.runtime.pipeline import (
    OperationFuser,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)

__all__ = [
    "OperationFuser",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
