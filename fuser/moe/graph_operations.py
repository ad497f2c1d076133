"""Routing and permutation as operations of compiled graphs, which contain no kernel launches."""

from __future__ import annotations

from typing import Any

import torch

from fuser.functional import permutation
from fuser.functional.routing import DropPolicy, check_values
from fuser.functional.routing import route as route_now
from fuser.op.graph_operations import define

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _route(
    expert_indices: torch.Tensor,
    probs: torch.Tensor | None,
    num_experts: int,
    capacity: int | None,
    drop_policy: Any,
) -> Routed:
    check_values("permute", expert_indices, num_experts)
    return route_now(expert_indices, probs, num_experts, capacity, drop_policy)


def _fake_route(
    expert_indices: torch.Tensor,
    probs: torch.Tensor | None,
    num_experts: int,
    capacity: int | None,
    drop_policy: DropPolicy,
) -> Routed:
    rows = expert_indices.numel() if capacity is None else capacity
    sizes = ((num_experts,), (rows,), tuple(expert_indices.shape))
    split_sizes, row_map, inverse_map = (
        expert_indices.new_empty(size, dtype=torch.int32) for size in sizes
    )
    return split_sizes, row_map, inverse_map


def _unpermute_backward(
    dout: torch.Tensor,
    y: torch.Tensor | None,
    row_map: torch.Tensor,
    inverse_map: torch.Tensor,
    probs: torch.Tensor,
) -> list[torch.Tensor]:
    dy, dprobs = permutation.unpermute_backward(dout, y, row_map, inverse_map, probs)
    return [dy] if dprobs is None else [dy, dprobs]


def _fake_unpermute_backward(
    dout: torch.Tensor,
    y: torch.Tensor | None,
    row_map: torch.Tensor,
    inverse_map: torch.Tensor,
    probs: torch.Tensor,
) -> list[torch.Tensor]:
    dy = dout.new_empty(row_map.shape[0], dout.shape[1])
    wide = torch.promote_types(probs.dtype, torch.float32)
    return [dy] if y is None else [dy, probs.new_empty(probs.shape, dtype=wide)]


route = define(
    "route(Tensor expert_indices, Tensor? probs, int num_experts, SymInt? capacity, "
    "str drop_policy) -> (Tensor, Tensor, Tensor)",
    _route,
    _fake_route,
)
permute = define(
    "permute(Tensor x, Tensor row_map, Tensor inverse_map) -> Tensor",
    permutation.permute,
    lambda x, row_map, inverse_map: x.new_empty(row_map.shape[0], x.shape[1]),
)
unpermute = define(
    "unpermute(Tensor y, Tensor inverse_map, Tensor? probs) -> Tensor",
    permutation.unpermute,
    lambda y, inverse_map, probs: y.new_empty(inverse_map.shape[0], y.shape[1]),
)
_backward = define(
    "unpermute_backward(Tensor dout, Tensor? y, Tensor row_map, Tensor inverse_map, Tensor probs)"
    " -> Tensor[]",
    _unpermute_backward,
    _fake_unpermute_backward,
)


def unpermute_backward(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As :func:`fuser.functional.permutation.unpermute_backward`."""
    dy, *others = _backward(*args)
    return dy, (others[0] if others else None)
