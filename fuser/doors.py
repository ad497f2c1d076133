"""The doors of the core: questions that the core asks, and a wing may answer in its place.

A class here is a door: its methods are what the core asks, and what they do here is the answer
without a wing. The core calls ``NAME.guest.method(...)`` and knows no wing. A wing subclasses the
class, and opens the door with an object of it as soon as it is imported::

    NAME.open(MyAnswers())

Fusions of wings have a door of their own, ``register`` in ``fused_ops/catalog.py``.

Several wings may open one door, each for some of its questions: a class leaves the others to
``super()``, and an object has no state.

``tests/rooms.py`` says which files are the core, a wing or a product.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

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
        if self.guest is not self.default:
            guest = type(kind.__name__, (type(guest), type(self.guest)), {})()
        self.guest = guest


class PassRunner:
    """How the passes of a plan run: here as one autograd node, by the plan's own code."""

    def compiled_plan(self, kind: Any, planned: Any, graph: Any, *contents: Any) -> Any:
        """A plan ready to be called, an object of the class ``kind`` or of another one.

        ``graph`` is bound to the plan's key, and ``contents`` are further arguments of the class.
        """
        return kind(planned.plan, *contents, planned.forward, planned.backward)


PASSES = Door(PassRunner())
