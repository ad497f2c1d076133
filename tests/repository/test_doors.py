"""Doors: a wing's object answers in place of the default, and no other object does."""

from __future__ import annotations

import pytest

from fuser.doors import Door
from fuser.errors import InputTypeError


class Answers:
    def number(self) -> int:
        return 1


class Others(Answers):
    def number(self) -> int:
        return 2


def test_a_wing_answers_in_place_of_the_default() -> None:
    door = Door(Answers())
    assert door.guest.number() == 1
    door.open(Others())
    assert door.guest.number() == 2


def test_an_object_of_another_class_is_refused_when_it_comes() -> None:
    door = Door(Answers())
    with pytest.raises(InputTypeError, match="a door of Answers takes an object of it, got 3"):
        door.open(3)
    assert door.guest is door.default
