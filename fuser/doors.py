"""The doors of the core: questions that the core asks, and a wing may answer in its place.

A class here is a door: its methods are what the core asks, and what they do here is the answer
without a wing. The core calls ``NAME.guest.method(...)`` and knows no wing. A wing subclasses the
class, and opens the door with an object of it as soon as it is imported::

    NAME.open(MyAnswers())

A product also adds members to classes of the core, and is loaded when one of them is first used.
``tests/rooms.py`` says which files are the core, a wing or a product.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any, Generic, TypeVar

from fuser.errors import InputTypeError

Answers = TypeVar("Answers")


class Door(Generic[Answers]):
    """A door: who answers the questions of one class.

    Parameters
    ----------
    default
        Answers while no wing has opened the door.
    product
        A module that opens the door, loaded at the first question; without it the default answers.
    """

    def __init__(self, default: Answers, product: str | None = None) -> None:
        self.default = default
        self.product = product
        if product is None:
            self.guest = default

    @functools.cached_property
    def guest(self) -> Answers:
        """Who answers."""
        if self.product is not None:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(self.product)
        guest: Answers = vars(self).get("guest", self.default)
        return guest

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


class OfProduct:
    """A member that a module of a product defines, which is loaded when it is first used."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, instance: object, owner: type) -> Any:
        setattr(self.owner, self.name, vars(importlib.import_module(self.module))[self.name])
        return getattr(owner if instance is None else instance, self.name)


class View:
    """What a program sees of a quantizer."""

    def of(self, value: Any, before: Any) -> Any:
        """The object for a quantizer; ``before`` is the one of this place before, or None."""
        return value


VIEW = Door(View(), product="fuser.te.quantizers")
