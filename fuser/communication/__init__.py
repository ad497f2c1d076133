"""Process groups, collectives along dim 0, and the gathering of quantized tensors."""

from fuser.communication.agreement import Agreement
from fuser.communication.collectives import (
    Pending,
    finished,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from fuser.communication.groups import (
    GroupArgument,
    GroupRef,
    PlannedGroup,
    WeakGroup,
    check_divides,
    check_shard,
    divided,
    group_number,
    group_size,
    group_with_number,
    is_distributed,
    is_initialized,
    may_cross_hosts,
    rank_in,
    ranks_of,
    resolved,
)
from fuser.communication.quantized_gather import (
    can_gather,
    makes_columns,
    start_quantized_gather,
)

__all__ = [
    "Agreement",
    "GroupArgument",
    "GroupRef",
    "Pending",
    "PlannedGroup",
    "WeakGroup",
    "can_gather",
    "check_divides",
    "check_shard",
    "divided",
    "finished",
    "group_number",
    "group_size",
    "group_with_number",
    "is_distributed",
    "is_initialized",
    "makes_columns",
    "may_cross_hosts",
    "rank_in",
    "ranks_of",
    "resolved",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_quantized_gather",
    "start_reduce_scatter",
]
