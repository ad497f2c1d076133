"""The fusions that ship, in the order in which ties between equal windows are decided."""

from fuser.fused_ops import (
    BackwardActivationBias,
    BackwardAddLayerNorm,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardAddLayerNorm,
    ForwardAddRMSNorm,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    PointwiseChain,
)
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
