"""Catalog of the built-in fusions; of two with equal cost and window, the first wins.

A wing puts its fusions in by :func:`register`, in modules that the package imports.
"""

from typing import TYPE_CHECKING

from fuser.fused_ops.add_norm import BackwardAddLayerNorm as BackwardAddLayerNorm
from fuser.fused_ops.add_norm import BackwardAddRMSNorm as BackwardAddRMSNorm
from fuser.fused_ops.add_norm import ForwardAddLayerNorm as ForwardAddLayerNorm
from fuser.fused_ops.add_norm import ForwardAddRMSNorm as ForwardAddRMSNorm
from fuser.fused_ops.linear_fusions import BackwardLinearAdd as BackwardLinearAdd
from fuser.fused_ops.linear_fusions import BackwardLinearScale as BackwardLinearScale
from fuser.fused_ops.linear_fusions import (
    ForwardLinearBiasActivation as ForwardLinearBiasActivation,
)
from fuser.fused_ops.linear_fusions import ForwardLinearBiasAdd as ForwardLinearBiasAdd
from fuser.fused_ops.linear_fusions import ForwardLinearScaleAdd as ForwardLinearScaleAdd
from fuser.fused_ops.pointwise_fusions import BackwardActivationBias as BackwardActivationBias
from fuser.fused_ops.pointwise_fusions import PointwiseChain as PointwiseChain
from fuser.op import FusedOperation

FUSIONS: tuple[type[FusedOperation], ...] = (
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    ForwardAddRMSNorm,
    ForwardAddLayerNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardAddLayerNorm,
    PointwiseChain,
)
if not TYPE_CHECKING:  # for the package; a wing puts its own there
    __all__ = [fusion.__name__ for fusion in FUSIONS]


def register(fusion: type[FusedOperation]) -> type[FusedOperation]:
    """Put a fusion first, before those that are here already."""
    global FUSIONS
    FUSIONS = (fusion, *FUSIONS)
    return fusion
