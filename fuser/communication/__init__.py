"""Process groups, collectives along dim 0, and the gathering of quantized tensors."""

from fuser.communication.agreement import Agreement as Agreement
from fuser.communication.collectives import Pending as Pending
from fuser.communication.collectives import finished as finished
from fuser.communication.collectives import start_all_gather as start_all_gather
from fuser.communication.collectives import start_all_reduce as start_all_reduce
from fuser.communication.collectives import start_all_to_all as start_all_to_all
from fuser.communication.collectives import start_reduce_scatter as start_reduce_scatter
from fuser.communication.groups import GroupArgument as GroupArgument
from fuser.communication.groups import GroupRef as GroupRef
from fuser.communication.groups import PlannedGroup as PlannedGroup
from fuser.communication.groups import WeakGroup as WeakGroup
from fuser.communication.groups import check_divides as check_divides
from fuser.communication.groups import check_shard as check_shard
from fuser.communication.groups import divided as divided
from fuser.communication.groups import group_number as group_number
from fuser.communication.groups import group_size as group_size
from fuser.communication.groups import group_with_number as group_with_number
from fuser.communication.groups import is_distributed as is_distributed
from fuser.communication.groups import is_initialized as is_initialized
from fuser.communication.groups import may_cross_hosts as may_cross_hosts
from fuser.communication.groups import rank_in as rank_in
from fuser.communication.groups import ranks_of as ranks_of
from fuser.communication.groups import resolved as resolved
from fuser.communication.quantized_gather import can_gather as can_gather
from fuser.communication.quantized_gather import makes_columns as makes_columns
from fuser.communication.quantized_gather import start_quantized_gather as start_quantized_gather
