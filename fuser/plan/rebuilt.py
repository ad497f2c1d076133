"""Rebuilt tensors: inputs that backward computes again from what is kept in any case.

Inside of :class:`activation_memory_budget`.

A linear's weight gradient reads its input. If the ops before it can compute that again, to the last
bit, from tensors that they keep for their own backward, the plan keeps nothing for it: a norm keeps
its input, so the normalized rows need not be kept, and an activation keeps the output of the linear
before it. Nothing else is kept in their place, so every such input that can be rebuilt is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fuser.errors import InputError
from fuser.op import METHODS, BasicOperation
from fuser.specs import PlanKey


class _Budget(threading.local):
    value: float | None = None


budget = _Budget()
"""That of the calls of this thread; None if they keep everything."""


class activation_memory_budget:
    """Context whose calls keep less for backward, which computes the rest again.

    With a budget of 1, pipelines do not keep the inputs of linears that an activation, a norm or a
    dropout before them can compute again, bit for bit, from what these keep for themselves; nor
    quantized weights, which backward quantizes again. Backward then moves more bytes. Calls in a
    checkpoint of torch keep everything, and so does a pipeline with fusions of a user.

    Named after ``activation_memory_budget`` of torch's partitioner.

    Parameters
    ----------
    memory_budget
        1, or None for calls that keep everything, as they do outside of this context.

    Raises
    ------
    InputError
        If it is another number: products are not computed again.
    """

    def __init__(self, memory_budget: float | None) -> None:
        if memory_budget is not None and (isinstance(memory_budget, bool) or memory_budget != 1):
            raise InputError(
                f"activation_memory_budget got {memory_budget!r}; it is 1, to compute again what "
                "needs no product, or None, to keep everything. For less memory use "
                "torch.utils.checkpoint."
            )
        self.memory_budget = memory_budget

    def __enter__(self) -> None:
        self._outer, budget.value = budget.value, self.memory_budget

    def __exit__(self, *exception: Any) -> None:
        budget.value = self._outer


def with_rebuilt_tensors(ops: Sequence[BasicOperation], key: PlanKey) -> PlanKey:
    """``key`` with what backward computes again, in place of what forward would keep.

    Fusions of users read what they save: with one of them in use, nothing is rebuilt.
    """
    if any(fusion.is_external for fusion in key.fusions):
        return key
    keys = list(key.ops)
    for i, op in enumerate(ops):
        narrowed = key.window(i, i + 1)
        if not _is_own(op):
            continue
        path = rebuilding(ops, key, i) if op.takes_rebuilt_input(narrowed) else ()
        if path:
            keys[i] = replace(keys[i], keeps_input=False)
            if not ops[path[0]].saves_input:
                keys[path[0]] = replace(keys[path[0]], keeps_source=True)
        if op.quantizes_weight_again(narrowed):
            keys[i] = replace(keys[i], keeps_weight=False)
    return replace(key, ops=tuple(keys))


def rebuilding(ops: Sequence[BasicOperation], key: PlanKey, reader: int) -> range:
    """The ops that compute the main input of op ``reader`` again, in their order.

    The first of them keeps its own input: for its own backward or, if no op does that, in place of
    copies of its rows. Empty if the input cannot be rebuilt.
    """
    first = reader
    for i in reversed(range(reader)):
        if not (key.ops[i].requires_grad and ops[i].rebuilds_output and _is_own(ops[i])):
            break
        if ops[i].saves_input:
            return range(i, reader)
        if ops[i].copies_input:
            first = i
    return range(first, reader)


def _is_own(op: BasicOperation) -> bool:
    """Whether this library's code alone runs in the op's passes."""
    return not op.is_external and op.__dict__.keys().isdisjoint(METHODS)
