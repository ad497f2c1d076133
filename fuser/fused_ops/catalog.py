"""Catalog of the built-in fusions; of two with equal cost and window, the first wins.

A wing puts its fusions in by :func:`register`, in modules that the package imports.
"""

from fuser.fused_ops.add_norm import (
    BackwardAddLayerNorm,
    BackwardAddRMSNorm,
    ForwardAddLayerNorm,
    ForwardAddRMSNorm,
)
from fuser.fused_ops.linear_fusions import (
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from fuser.fused_ops.pointwise_fusions import BackwardActivationBias, PointwiseChain
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


def register(fusion: type[FusedOperation]) -> type[FusedOperation]:
    """Put a fusion first, before those that are here already."""
    global FUSIONS
    FUSIONS = (fusion, *FUSIONS)
    return fusion
