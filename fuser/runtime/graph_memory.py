"""The memory that graphs of one pool share: what replays overwrite, and gradients that are lent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import TensorWeakRef


class SavedForward:
    """A forward whose graph was replayed: what it has saved for its backward.

    It is in the graphs' memory, so that a later replay may overwrite it.
    """

    __slots__ = ("backward", "forward", "overwritten_by")

    def __init__(self, forward: int, backward: int) -> None:
        self.forward = forward
        self.backward = backward
        self.overwritten_by: str | None = None


class GraphMemory:
    """The memory of the graphs of one pool, each known by its place in the order of captures.

    What a forward saves was in use from its own capture to the capture of its backward: the graphs
    captured between these two do not write there, and all others may.

    torch gives a leaf without a gradient the memory in which a backward has its result. The next
    forward of any graph of the pool may write there too, so before that, gradients that are still
    in use get memory of their own.
    """

    def __init__(self) -> None:
        self._count = 0
        self._saved: list[SavedForward] = []
        self._lent: list[tuple[Callable[[], torch.Tensor | None], int]] = []

    def next_place(self) -> int:
        """The place of the graph that is captured now."""
        self._count += 1
        return self._count

    def replays(self, place: int, name: str) -> None:
        """Note that a graph is replayed, which overwrites what some forwards have saved."""
        saved = self._saved  # each one's places are between the places of the one before it
        while saved and not saved[-1].forward < place < saved[-1].backward:
            saved.pop().overwritten_by = name

    def saves(self, forward: int, backward: int) -> SavedForward:
        """Note that the forward at a place is replayed and saves something for a backward."""
        saved = SavedForward(forward, backward)
        self._saved.append(saved)
        return saved

    def lend(self, leaves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note the leaves to which a backward may give its memory, each with that memory."""
        self._lent += [
            (TensorWeakRef(leaf), memory.data_ptr()) for leaf, memory in leaves if leaf.grad is None
        ]

    def take_back(self) -> None:
        """Move the gradients that are in this memory, of leaves that are still in use."""
        lent, self._lent = self._lent, []
        for leaf_of, address in lent:
            leaf = leaf_of()
            grad = None if leaf is None else leaf.grad
            if leaf is not None and grad is not None and grad.data_ptr() == address:
                leaf.grad = grad.clone()


# By the pools that callers share between captures.
_of_pool: WeakValueDictionary[Any, GraphMemory] = WeakValueDictionary()


def memory_of(pool: Any) -> GraphMemory:
    """The memory of a pool: the same as long as a graph of it is in use."""
    return _of_pool.setdefault(pool, GraphMemory())
