"""Agreement of ranks: they compare recipe, input and options before an op communicates."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from fuser.errors import InputError


class Agreement:
    """The comparisons that the ranks of an op have made: one for each group and recipe.

    They are not copied and not pickled with the op, which then compares again.
    """

    def __init__(self) -> None:
        self._compared: set[Hashable] = set()

    def __deepcopy__(self, memo: Any) -> Agreement:
        return Agreement()

    def __reduce__(self) -> tuple[Any, ...]:
        return Agreement, ()

    def check(
        self,
        op: str,
        group: Any,
        recipe: Any,
        input_: torch.Tensor,
        *others: Any,
        compares_rows: bool = True,
    ) -> None:
        """Compare recipe, shape and dtype of the input, and ``others``, over ranks.

        If not ``compares_rows``, only the last dimension of the shape. Ranks compare at the first
        call with a recipe, which then waits for the device.

        Raises
        ------
        InputError
            On every rank, if two of them differ.
        """
        # A custom recipe's functions are other objects on each rank, and may be at each step.
        is_custom = recipe is not None and recipe.custom()
        described = type(recipe).__name__ if is_custom else recipe
        key = (id(group), described)
        if key in self._compared or input_.is_meta:
            return
        shape: Any = tuple(input_.shape) if compares_rows else f"[..., {input_.shape[-1]}]"
        dtype = str(input_.dtype).removeprefix("torch.")
        mine = (f"recipe {described}", f"input {shape} in {dtype}", *map(str, others))
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        if len(set(found)) > 1:
            raise InputError(f"{op} communicates, and its ranks differ: {_differences(found)}.")
        self._compared.add(key)


def _differences(found: list[tuple[str, ...]]) -> str:
    """The parts that differ, of each rank, as text."""
    parts = [part for part in zip_longest(*found, fillvalue="") if len(set(part)) > 1]
    return "; ".join(
        f"rank {rank} has {', '.join(filter(None, each))}"
        for rank, each in enumerate(zip(*parts, strict=True))
    )
