"""Fused operations: each class runs a window of basic ops together."""

from fuser.fused_ops.backward_activation_bias import BackwardActivationBias
from fuser.fused_ops.backward_add_norm import BackwardAddLayerNorm, BackwardAddRMSNorm
from fuser.fused_ops.backward_linear_add import BackwardLinearAdd
from fuser.fused_ops.backward_linear_scale import BackwardLinearScale
from fuser.fused_ops.dispatched_experts import DispatchedExperts
from fuser.fused_ops.forward_add_norm import ForwardAddLayerNorm, ForwardAddRMSNorm
from fuser.fused_ops.forward_linear_bias_activation import ForwardLinearBiasActivation
from fuser.fused_ops.forward_linear_bias_add import ForwardLinearBiasAdd
from fuser.fused_ops.forward_linear_scale_add import ForwardLinearScaleAdd
from fuser.fused_ops.grouped_mlp import GroupedMLP
from fuser.fused_ops.linear import Linear
from fuser.fused_ops.pointwise_chain import PointwiseChain

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
