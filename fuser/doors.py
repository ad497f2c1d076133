"""The doors of the core: questions that the core asks, and a wing may answer in its place.

A class here is a door: its methods are what the core asks, and what they do here is the answer
without a wing. The core calls ``NAME.guest.method(...)`` and knows no wing. A wing subclasses the
class, and opens the door with an object of it as soon as it is imported::

    NAME.open(MyAnswers())

Fusions of wings have a door of their own, ``register`` in ``fused_ops/catalog.py``.

``tests/rooms.py`` says which files are the core, a wing or a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from fuser.errors import InputTypeError

Answers = TypeVar("Answers")


class Door(Generic[Answers]):
    """A door: who answers the questions of one class.

    Parameters
    ----------
    default
        Answers while no wing has opened the door.
    """

    def __init__(self, default: Answers) -> None:
        self.default = default
        self.guest = default

    def open(self, guest: Answers) -> None:
        """Let ``guest`` answer from now on.

        Raises
        ------
        InputTypeError
            If it is not an object of the door's class.
        """
        kind = type(self.default)
        if not isinstance(guest, kind):
            raise InputTypeError(f"a door of {kind.__name__} takes an object of it, got {guest!r}.")
        self.guest = guest


class Observer:
    """What a plan that is shown says of one call, besides what holds for every call."""

    def notes(self, graph: Any, plan: Any, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Fields of ``plan`` that depend on the tensors of a call; ``graph`` is that call's."""
        return {}


OBSERVER = Door(Observer())
