"""Agreement of ranks: they compare recipe, input and options before an op communicates."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from fuser.communication.groups import are_ranks_debugged
from fuser.cuda.launch import call_each_time, recording
from fuser.errors import InputError


class Agreement:
    """The comparisons that the ranks of an op have made: one for each op, group and recipe.

    They are not copied and not pickled with the op, which then compares again.
    """

    def __init__(self) -> None:
        self._compared: set[Hashable] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return Agreement, ()

    def check(
        self,
        op: str,
        group: dist.ProcessGroup,
        recipe: Any,
        input_: torch.Tensor,
        *others: Any,
        compares_rows: bool = True,
    ) -> None:
        """Compare recipe, shape and dtype of the input, and ``others``, over ranks.

        If not ``compares_rows``, only the last dimension of the shape. Ranks compare at every call
        on a CPU. On a GPU, which a comparison waits for, they compare at the first call with a
        recipe, and at every call if ``TORCH_DISTRIBUTED_DEBUG`` is set.

        Raises
        ------
        InputError
            On every rank, if two of them differ.
        """
        # A custom recipe's functions are other objects on each rank, and may be at each step.
        is_custom = recipe is not None and recipe.custom()
        described = type(recipe).__name__ if is_custom else recipe
        key = (op, id(group), described)
        compares_every_call = input_.device.type == "cpu" or are_ranks_debugged()
        is_compared = key in self._compared and not compares_every_call
        if is_compared or input_.is_meta or recording.is_dry:
            return
        shape: Any = tuple(input_.shape) if compares_rows else f"[..., {input_.shape[-1]}]"
        dtype = str(input_.dtype).removeprefix("torch.")
        mine = (f"recipe {described}", f"input {shape} in {dtype}", *map(str, others))
        call_each_time(_compare, op, mine, group, input_.device)
        self._compared.add(key)


def _compare(op: str, mine: tuple[str, ...], group: dist.ProcessGroup, device: Any) -> None:
    """Raise on every rank if two of them differ."""
    if not _is_same(mine, group, device):
        descriptions: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(descriptions, mine, group=group)
        raise InputError(
            f"{op} communicates, and its ranks differ: {_differences(descriptions)}."
            " Give every rank the same."
        )


def _is_same(mine: tuple[str, ...], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks have the same; each of them gets the same answer."""
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    # The largest and the smallest, of which a rank cannot have both if ranks differ.
    ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    return ends.tolist() == [number, -number]


def _differences(descriptions: list[tuple[str, ...]]) -> str:
    """The parts that differ, of each rank, as text."""
    parts = [part for part in zip_longest(*descriptions, fillvalue="") if len(set(part)) > 1]
    return "; ".join(
        f"rank {rank} has {', '.join(filter(None, parts_of_rank))}"
        for rank, parts_of_rank in enumerate(zip(*parts, strict=True))
    )
