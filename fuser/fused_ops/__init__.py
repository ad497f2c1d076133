"""Fused operations: each class runs a window of basic ops together."""

from fuser.fused_ops.catalog import *  # noqa: F403 - the fusions of the core
from fuser.fused_ops.dispatched_experts import DispatchedExperts as DispatchedExperts
from fuser.fused_ops.grouped_mlp import GroupedMLP as GroupedMLP
from fuser.fused_ops.linear import Linear as Linear
