"""The doors of the core: questions that the core asks, and a wing may answer in its place.

A class here is a door: its methods are what the core asks, and what they do here is the answer
without a wing. The core calls ``NAME.guest.method(...)`` and knows no wing. A wing subclasses the
class, and opens the door with an object of it as soon as it is imported::

    NAME.open(MyAnswers())

Fusions of wings have a door of their own, ``register`` in ``fused_ops/catalog.py``.

``tests/rooms.py`` says which files are the core, a wing or a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, TypeVar

import torch

from fuser.errors import InputTypeError, StateError

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


class ParameterSource:
    """Where the parameters of ops and the amaxes of their scales come from: from this process."""

    def amaxes(self, states: Mapping[Any, Any]) -> Mapping[Any, torch.Tensor | None] | None:
        """The states of delayed scaling whose step ends, with the amaxes that it recorded.

        ``states`` are those that recorded in this process, with their process groups. None for an
        amax, or for all: those in the states.
        """
        return None

    def parallelism(self, mode: Literal["column", "row"], ranks: int, has_shards: bool) -> Any:
        """How a linear is spread over ``ranks`` ranks: two or more.

        Raises
        ------
        StateError
            As long as nothing spreads linears.
        """
        raise StateError(
            f"A {mode} parallel linear over {ranks} ranks needs fuser.distributed, which was not "
            "imported."
        )

    def local_parts(
        self, ops: Sequence[Any], places: Any, parameters: Sequence[torch.Tensor]
    ) -> AbstractContextManager[None] | None:
        """The context in which a call reads other tensors in the ``places`` of ``parameters``.

        None if it reads the parameters of ``ops`` as they are.
        """
        return None

    def are_gathered(self, ops: Sequence[Any], places: Any) -> bool:
        """Whether a call gets other parameters, which were gathered from those in ``places``."""
        return False

    def memory_of(self, parameters: Sequence[torch.Tensor], before: Any) -> Any:
        """The memory of parameters that is freed between passes; None if nothing frees it.

        ``before``, an earlier result, if it is the same memory.
        """
        return None

    def initialise(
        self, op: Any, name: str, fill: Callable[[torch.Tensor], Any], quantizer: Any
    ) -> None:
        """Initialise the ``DTensor`` parameter ``name`` of ``op``; None does not quantize it."""
        fill(getattr(op, name))


PARAMETERS = Door(ParameterSource())
