"""Saved inputs: what calls may keep for backward, and the ops that compute an input again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fuser.op import METHODS, BasicOperation
from fuser.specs import PlanKey
from fuser.torch_private import is_always_at_least

MANY_ROWS = 4096
"""With so many rows for each weight, backward quantizes weights again: at most 2% of a step."""

MANY_ROWS_OF_A_GROUP = 1024
"""The same for each weight of groups, whose copies are most of what experts keep.

With so many rows a step takes 4 to 7% longer, measured on an H200.
"""


class Limit(NamedTuple):
    """What calls may keep for backward."""

    memory_budget: float | None = 1
    """None: everything. 0: pipelines keep their inputs alone."""
    keep_weight_copies: bool | None = None
    """Whether forward keeps the copies of quantized weights that backward reads; None: unless there
    are many rows."""
    lossy_activation_inputs: bool = False
    """Whether activations keep their inputs rounded to FP8."""

    def of_rows(self, x: torch.Tensor, many_rows: int) -> Limit:
        """The limit of a pipeline with this main input, for which these are many rows."""
        if self.keep_weight_copies is not None:
            return self
        return self._replace(keep_weight_copies=x.numel() < many_rows * x.shape[-1])


def many_rows(ops: Sequence[BasicOperation]) -> int:
    """The rows from which on ops quantize their weights again, unless a limit says otherwise."""
    groups = max((op.num_groups for op in ops), default=1)
    return MANY_ROWS if groups == 1 else MANY_ROWS_OF_A_GROUP * groups


class _Budget(threading.local):
    def __init__(self) -> None:
        self.limit = Limit()
        self.outer: list[Limit] = []


budget = _Budget()
"""That of the calls of this thread."""


class MemoryBudget:
    """Context in which the calls of this thread have a limit."""

    limit: Limit

    def __enter__(self) -> None:
        budget.outer.append(budget.limit)
        budget.limit = self.limit

    def __exit__(self, *exception: object) -> None:
        budget.limit = budget.outer.pop()


def limit_here(
    of_container: MemoryBudget | None, x: torch.Tensor, many_rows: int
) -> tuple[float | None, bool, bool]:
    """The limit in effect, for code that Dynamo traces: it compares the thread's at each call.

    ``of_container``: the one that the container has.
    """
    memory_budget, is_kept, is_lossy = budget.limit if of_container is None else of_container.limit
    if is_kept is None:  # a graph for any number of rows keeps them
        is_kept = not is_always_at_least(x.numel(), many_rows * x.shape[-1])
    return memory_budget, is_kept, is_lossy


def rebuilding(ops: Sequence[BasicOperation], key: PlanKey, reader: int) -> range:
    """The ops that compute the main input of op ``reader`` again, in their order.

    The first of them keeps its own input: for its own backward or, if no op does that, in place of
    copies of its rows. Empty if the input cannot be rebuilt.
    """
    first = reader
    for i in reversed(range(reader)):
        if not (key.ops[i].requires_grad and ops[i].rebuilds_output and is_own(ops[i])):
            break
        if ops[i].saves_input:
            return range(i, reader)
        if ops[i].copies_input:
            first = i
    return range(first, reader)


def is_own(op: BasicOperation) -> bool:
    """Whether this library's code alone runs in the op's passes."""
    return not op.is_external and op.__dict__.keys().isdisjoint(METHODS)
