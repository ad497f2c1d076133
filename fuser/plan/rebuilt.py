"""Rebuilt tensors: inputs that backward computes again from what is kept in any case.

A linear's weight gradient reads its input. If the ops before it can compute that again, to the last
bit, from tensors that they keep for their own backward, the plan keeps nothing for it: a norm keeps
its input, so the normalized rows need not be kept, and an activation keeps the output of the linear
before it. Nothing else is kept in their place, so every such input that can be rebuilt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuser.op import METHODS, BasicOperation
from fuser.specs import PlanKey


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
        if op.takes_rebuilt_input(narrowed) and rebuilding(ops, key, i):
            keys[i] = replace(keys[i], keeps_input=False)
        if op.quantizes_weight_again(narrowed):
            keys[i] = replace(keys[i], keeps_weight=False)
    return replace(key, ops=tuple(keys))


def rebuilding(ops: Sequence[BasicOperation], key: PlanKey, reader: int) -> range:
    """The ops that compute the main input of op ``reader`` again, in their order.

    The first of them keeps its own input. Empty if the input cannot be rebuilt.
    """
    for i in reversed(range(reader)):
        if not (key.ops[i].requires_grad and ops[i].rebuilds_output and _is_own(ops[i])):
            break
        if ops[i].saves_input:
            return range(i, reader)
    return range(reader, reader)


def _is_own(op: BasicOperation) -> bool:
    """Whether this library's code alone runs in the op's passes."""
    return not op.is_external and op.__dict__.keys().isdisjoint(METHODS)
