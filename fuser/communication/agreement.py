"""Agreement of ranks: an op compares what its ranks do, before it first communicates."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist

from fuser.errors import InputError


class Agreement:
    """What the ranks of an op have compared: once for each group and recipe.

    Not copied and not pickled with the op, which then compares again.
    """

    def __init__(self) -> None:
        self._compared: set[Hashable] = set()

    def __deepcopy__(self, memo: Any) -> Agreement:
        return Agreement()

    def __reduce__(self) -> tuple[Any, ...]:
        return Agreement, ()

    def check(self, op: str, group: Any, recipe: Any, input_: torch.Tensor, *others: Any) -> None:
        """Compare recipe, shape and dtype of the input, and ``others``, over ranks.

        At the first call with a recipe; waits for the device then.

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
        shape, dtype = tuple(input_.shape), str(input_.dtype).removeprefix("torch.")
        mine = ", ".join([f"recipe {described}, input {shape} in {dtype}", *map(str, others)])
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        if len(set(found)) > 1:
            listed = "; ".join(f"rank {rank} has {each}" for rank, each in enumerate(found))
            raise InputError(f"{op} communicates, and its ranks differ: {listed}.")
        self._compared.add(key)
