"""Saved inputs: what calls may keep for backward, and the ops that compute an input again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from fuser.op import METHODS, BasicOperation
from fuser.specs import PlanKey


class Limit(NamedTuple):
    """What calls may keep for backward."""

    memory_budget: float | None = 1
    """None: everything. 0: pipelines keep their inputs alone."""
    keep_weight_copies: bool = True
    """Whether forward keeps the copies of quantized weights that backward reads."""
    lossy_activation_inputs: bool = False
    """Whether activations keep their inputs rounded to FP8."""


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

    def __exit__(self, *exception: Any) -> None:
        budget.limit = budget.outer.pop()


def limit_here() -> tuple[float | None, bool, bool]:
    """The limit in effect, for code that Dynamo traces: it compares the thread's at each call."""
    memory_budget, keep_weight_copies, lossy_activation_inputs = budget.limit
    return memory_budget, keep_weight_copies, lossy_activation_inputs


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
