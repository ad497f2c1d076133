"""Process groups: their checks, and the sizes of shards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from fuser.errors import FuserWarning, InputError, StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GroupArgument: TypeAlias = "dist.ProcessGroup | DeviceMesh | PlannedGroup | None"
"""What an op takes as its process group: a mesh has one dimension, and None is all ranks."""
Group: TypeAlias = "dist.ProcessGroup"
"""A process group of torch."""


class GroupRef:
    """The process group of an op. A copy of the op has the same one; it cannot be pickled."""

    def __init__(self, group: GroupArgument) -> None:
        self.group = group

    def __copy__(self) -> GroupRef:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> GroupRef:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if self.group is None:
            return GroupRef, (None,)
        raise StateError(
            "An op with a process group cannot be pickled: the group belongs to this process. Save "
            "model.state_dict(), and make the model again with the groups of the new processes."
        )


@dataclass(frozen=True)
class PlannedGroup:
    """A group of ``size`` ranks that need not exist: ops with it are planned, and cannot be called.

    This process counts as its first rank.
    """

    size: int


class WeakGroup:
    """A process group that a forward used, for its backward, which does not keep it alive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ref = weakref.ref(group)

    def __call__(self, op: str | Callable[[], str]) -> dist.ProcessGroup:
        """The group, for the backward of ``op``: its name, or a function that returns it.

        Raises
        ------
        StateError
            If the group has been destroyed since.
        """
        group = self._ref()
        if group is not None and is_initialized():
            with contextlib.suppress(StateError):
                return resolved("", group)
        name = op if isinstance(op, str) else op()
        raise StateError(
            f"The backward of {name} communicates over the process group of its forward, which has "
            "been destroyed since."
            " Run the backward before destroy_process_group()."
        )


@functools.cache
def are_ranks_debugged() -> bool:
    """Whether torch's ``TORCH_DISTRIBUTED_DEBUG`` asks for checks of communication."""
    return os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() in ("INFO", "DETAIL")


def is_initialized() -> bool:
    """Whether torch has process groups in this process."""
    return dist.is_available() and dist.is_initialized()


def is_distributed(tensor: object) -> bool:
    """Whether it is a ``DTensor``, of which this rank has a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def resolved(op: str, group: GroupArgument) -> dist.ProcessGroup:
    """The process group of ``group``: None is the group of all ranks, a mesh has its own.

    ``op`` is the name of the op in errors.

    Raises
    ------
    StateError
        If torch.distributed is not initialised, the group has been destroyed, or it is a
        :class:`PlannedGroup`.
    InputError
        If ``group`` is no process group, if this rank is not a member of it, or if a mesh has more
        than one dimension.
    """
    if isinstance(group, PlannedGroup):
        raise StateError(
            f"{op} was made for a planned group of {group.size} ranks, over which nothing can be "
            "sent: only its plan can be made."
        )
    if dist.is_available() and not (group is None or _is_group(group)):
        raise InputError(
            f"{op} got {group!r} as its process group; it takes a group of "
            "torch.distributed.new_group, or a device mesh of one dimension."
        )
    if not is_initialized():
        raise StateError(
            f"{op} communicates over a process group, and torch.distributed is not initialised: "
            "call torch.distributed.init_process_group first."
        )
    if group is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    if hasattr(group, "get_group") and hasattr(group, "ndim"):  # a DeviceMesh
        if group.ndim != 1:
            raise InputError(
                f"{op} got a device mesh of {group.ndim} dimensions as its process group; it takes "
                "a mesh of one dimension, such as mesh['tp']."
            )
        group = group.get_group()
    try:
        is_member = isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0
    except ValueError:
        raise StateError(
            f"{op} communicates over a process group that has been destroyed ({group!r})."
            " Make the model again with a new group."
        ) from None
    if not is_member:
        raise InputError(
            f"{op} got a process group of which rank {dist.get_rank()} is not a member "
            f"({group!r}); every rank that makes or calls the op must be in its group."
        )
    return group


_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count()


def group_number(op: str, group: GroupArgument) -> int:
    """A number for the process group of ``op``, which no other group of this process has.

    Raises
    ------
    StateError, InputError
        If :func:`resolved` refuses the group.
    """
    return _numbers.setdefault(resolved(op, group), next(_next_number))


def group_with_number(number: int) -> dist.ProcessGroup:
    """The process group with this :func:`group_number`.

    Raises
    ------
    StateError
        If it has been destroyed since.
    """
    for group, its_number in list(_numbers.items()):
        if its_number == number:
            return resolved("A graph", group)
    raise StateError(
        "A graph communicates over a process group that has been destroyed since."
        " Capture it again, over a group that exists."
    )


def _is_group(group: object) -> bool:
    """Whether this is a device mesh, or what ``new_group`` returns, also outside of the group."""
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        return True
    return isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER


def group_size(op: str, group: GroupArgument) -> int:
    """The number of ranks in ``group``; 1 if it is None and torch.distributed is not initialised.

    In a process that torchrun started, the second case is probably a mistake, and warns once.

    Raises
    ------
    StateError, InputError
        If :func:`resolved` refuses the group.
    """
    if isinstance(group, PlannedGroup):
        return group.size
    if group is None and not is_initialized():
        _warn_of_ranks_without_groups()
        return 1
    return dist.get_world_size(resolved(op, group))


@functools.cache  # so that it warns once, and reads the environment once
def _warn_of_ranks_without_groups() -> None:
    ranks = os.environ.get("WORLD_SIZE", "")  # torchrun sets it
    if ranks.isdecimal() and int(ranks) > 1:
        warnings.warn(
            "An op that communicates was made before torch.distributed was initialised, and "
            f"WORLD_SIZE is {ranks}: every process computes the whole op, and nothing is "
            "communicated. Call torch.distributed.init_process_group before the model is made.",
            FuserWarning,
            stacklevel=3,
        )


def rank_in(op: str, group: GroupArgument) -> int:
    """The rank of this process in ``group``; 0 without process groups."""
    if isinstance(group, PlannedGroup) or (group is None and not is_initialized()):
        return 0
    return dist.get_rank(resolved(op, group))


def may_cross_hosts(op: str, group: GroupArgument) -> bool:
    """Whether ranks of ``group`` may be on several hosts: not if torchrun started all on one."""
    of_host = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if isinstance(group, PlannedGroup) or not all(map(str.isdecimal, of_host)):
        return True
    local_rank, count = map(int, of_host)
    first = dist.get_rank() - local_rank
    return not {*ranks_of(op, group)} <= {*range(first, first + count)}


def ranks_of(op: str, group: GroupArgument) -> list[int]:
    """The ranks of ``group``, as numbers in the group of all ranks.

    Raises
    ------
    StateError, InputError
        If :func:`resolved` refuses the group.
    """
    return list(dist.get_process_group_ranks(resolved(op, group)))


def divided(name: str, size: int, ranks: int) -> int:
    """``size / ranks``, the part of one rank.

    ``what`` names the op and the size in the error.

    Raises
    ------
    InputError
        If the ranks do not divide it.
    """
    if size % ranks:
        raise InputError(
            f"{name} is {size}, and {ranks} ranks do not divide it: every rank holds an equal part."
            " Choose a multiple."
        )
    return size // ranks


def check_shard(op: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor without a dimension of rows, which ranks gather or scatter.

    Raises
    ------
    InputError
    """
    if len(shape) < 2:
        raise InputError(
            f"{op} gathers and scatters rows, dimension 0, and got a tensor of shape "
            f"{tuple(shape)}; it takes two dimensions or more."
        )


def check_divides(op: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The shape of one rank's rows of a tensor of ``shape``.

    Raises
    ------
    InputError
        If the ranks do not divide the rows, or the tensor has fewer than two dimensions.
    """
    check_shard(op, shape)
    if shape[0] % ranks:
        raise InputError(
            f"{op} scatters {shape[0]} rows (dimension 0 of shape {tuple(shape)}) over {ranks} "
            f"ranks, and {shape[0]} is not a multiple of {ranks}."
            " Pad the rows."
        )
    return (shape[0] // ranks, *shape[1:])
