"""Fused operations: each class runs a window of basic ops together."""

import typing as _typing

from fuser.fused_ops.catalog import *  # noqa: F403 - the fusions of the core
from fuser.fused_ops.dispatched_experts import DispatchedExperts as DispatchedExperts
from fuser.fused_ops.grouped_mlp import GroupedMLP as GroupedMLP
from fuser.fused_ops.linear import Linear as Linear

if not _typing.TYPE_CHECKING:  # type checkers read the imports
    from fuser.errors import public_names as _public_names

    __all__ = _public_names(vars())
