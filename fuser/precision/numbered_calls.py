"""Calls of ops in compiled graphs, by numbers that the graphs read and hand on.

A graph recomputes a pipeline, or runs its backward, without a trace in Python of the forward that
it belongs to. Under delayed scaling both depend on that forward: on its scales, its amax step and
the states of its gradients. So an op with quantizers has a tensor with a number that names it and
its next call. A graph reads it as an input, and gives it to the forward, to the backward and to a
recomputation. The forward stores another tensor in the op.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fuser.errors import StateError
from fuser.precision.contexts import AutocastState
from fuser.precision.delayed_scaling import DelayedScales
from fuser.precision.op_numbers import numbered_op
from fuser.torch_private import dispatch_modes, graph_task, outside_fake_mode

# Forwards that wait for a backward, and backwards that a retained graph may repeat.
MOST_CALLS = 65536
# Of a process: the number of a call is its rank among all calls, times this, plus that of its op.
MOST_OPS = 1 << 28


class ForwardCall(NamedTuple):
    """What a forward's recomputation and its backward need besides tensors."""

    state: AutocastState
    gradients: Sequence[weakref.ref[DelayedScales]]
    """The states of the gradients that its backward quantizes."""


Number: TypeAlias = int
"""That of an op and of a call of it."""

_call_numbers = itertools.count(step=MOST_OPS)
_calls: dict[Number, ForwardCall] = {}


def number_call(op: Any) -> None:
    """Store the tensor for the next call in an op."""
    number = next(_call_numbers) + op._number
    new = functools.partial(torch.full, (1,), number, dtype=torch.int64, device="cpu")
    if dispatch_modes() or torch.is_inference_mode_enabled():
        with outside_fake_mode(), torch.inference_mode(False):
            tensor = new()
    else:
        tensor = new()
    # Without the setter of modules: it changes nothing on which a recorded pass depends.
    op.__dict__["_next_call"] = tensor


def numbers_in(tensors: Iterable[torch.Tensor]) -> list[Number]:
    """The numbers in the tensors that a graph has read from ops."""
    return [int(tensor.item()) for tensor in tensors]


def ops_of(numbers: Sequence[Number]) -> list[Any]:
    """The ops with these numbers. Raises StateError if one no longer exists."""
    ops = [numbered_op(number % MOST_OPS) for number in numbers]
    if None in ops:
        raise StateError(
            "A compiled graph runs an op that no longer exists. Keep the model as long as graphs "
            "of it have backwards to run."
        )
    return ops


def is_recomputation(op: Any, number: Number) -> bool:
    """Whether the forward with this number has run, and a backward runs it again."""
    return graph_task() != -1 and op._next_call.item() != number


def note_forward(numbers: Sequence[Number], ops: Sequence[Any], call: ForwardCall | None) -> None:
    """After a forward: store what its backward needs, if it has one, and number the next call."""
    for op, number in zip(ops, numbers, strict=True):
        if call is not None:
            _calls[number] = call
        number_call(op)
    while len(_calls) > MOST_CALLS:
        _calls.pop(next(iter(_calls)), None)


def forward_call(number: Number) -> ForwardCall:
    """The forward with this number. Raises StateError if it is not known."""
    call = _calls.get(number)
    if call is None:
        raise StateError(
            f"A compiled graph runs the backward of a forward under delayed scaling that is not "
            f"known: it ran in another process, or {MOST_CALLS} forwards ago."
            " Run each backward soon after its forward, in its process."
        )
    return call
