"""The ops of this process that exist, numbered in the order in which they were made."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

# Basic ops: their class is in a later package.
_ops: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def note_op(op: Any) -> int:
    """Add a new op, and return its number."""
    number = next(_numbers)
    _ops[number] = op
    return number


def forget_op(number: int) -> None:
    """Remove an op from the list: the copy of a pipeline for a graph belongs to no model."""
    _ops.pop(number, None)


def numbered_op(number: int) -> Any | None:
    """The op with this number; None if it no longer exists."""
    return _ops.get(number)


def existing_ops() -> list[Any]:
    """The ops in the order of their numbers."""
    return list(_ops.values())
