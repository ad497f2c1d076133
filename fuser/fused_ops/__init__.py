"""Fused operations: each class runs a window of basic ops together."""

from fuser.fused_ops.add_norm import (
    BackwardAddLayerNorm,
    BackwardAddRMSNorm,
    ForwardAddLayerNorm,
    ForwardAddRMSNorm,
)
from fuser.fused_ops.dispatched_experts import DispatchedExperts
from fuser.fused_ops.grouped_mlp import GroupedMLP
from fuser.fused_ops.linear import Linear
from fuser.fused_ops.linear_fusions import (
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from fuser.fused_ops.pointwise_fusions import BackwardActivationBias, PointwiseChain

__all__ = [
    "BackwardActivationBias",
    "BackwardAddLayerNorm",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "DispatchedExperts",
    "ForwardAddLayerNorm",
    "ForwardAddRMSNorm",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "GroupedMLP",
    "Linear",
    "PointwiseChain",
]
