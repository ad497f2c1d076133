"""Catalog of the built-in fusions; of two with equal cost and window, the first wins."""

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
from fuser.fused_ops.pointwise_chain import PointwiseChain
from fuser.op import FusedOperation

FUSIONS: tuple[type[FusedOperation], ...] = (
    DispatchedExperts,
    GroupedMLP,
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
