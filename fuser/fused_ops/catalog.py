"""Catalog of the built-in fusions; of two with equal cost and window, the first wins.

A wing puts its fusions in by :func:`register`, in modules that the package imports.
"""

from fuser.fused_ops.backward_activation_bias import BackwardActivationBias
from fuser.fused_ops.backward_add_norm import BackwardAddLayerNorm, BackwardAddRMSNorm
from fuser.fused_ops.backward_linear_add import BackwardLinearAdd
from fuser.fused_ops.backward_linear_scale import BackwardLinearScale
from fuser.fused_ops.forward_add_norm import ForwardAddLayerNorm, ForwardAddRMSNorm
from fuser.fused_ops.forward_linear_bias_activation import ForwardLinearBiasActivation
from fuser.fused_ops.forward_linear_bias_add import ForwardLinearBiasAdd
from fuser.fused_ops.forward_linear_scale_add import ForwardLinearScaleAdd
from fuser.fused_ops.pointwise_chain import PointwiseChain
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
