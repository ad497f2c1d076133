"""Doors: a wing's object answers in place of the default, and no other object does."""

from __future__ import annotations

import oracles
import pytest
import torch
from said import said

import fuser
from fuser.doors import PARAMETERS, Door, ParameterSource
from fuser.errors import InputTypeError, StateError
from fuser.recipe import DelayedScaling


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


class Named(Answers):
    def name(self) -> str:
        return "two"


def test_each_of_several_wings_answers_its_questions_and_the_last_one_first() -> None:
    class Next(Answers):
        def number(self) -> int:
            return 10 + super().number()

    door = Door(Answers())
    for guest in (Others(), Named(), Next()):
        door.open(guest)
    assert (door.guest.number(), door.guest.name()) == (12, "two")


def test_an_object_of_another_class_is_refused_when_it_comes() -> None:
    door = Door(Answers())
    with pytest.raises(InputTypeError, match="a door of Answers takes an object of it, got 3"):
        door.open(3)
    assert door.guest is door.default


def test_without_a_wing_a_linear_of_several_ranks_is_refused() -> None:
    sentence = said("doors-parallel-linear-over", "row", 2)
    with pytest.raises(StateError, match=sentence):
        ParameterSource().parallelism("row", 2, has_shards=False)


def test_without_a_wing_a_linear_trains_under_delayed_scaling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def losses() -> list[torch.Tensor]:
        model = oracles.randomize(fuser.BasicLinear(32, 32))
        x = oracles.random_tensor((32, 32), torch.float32, 1)
        results = []
        for is_first in (True, False):
            with fuser.autocast(recipe=DelayedScaling(amax_history_len=2)):
                y = model(x, is_first_microbatch=is_first)
            results.append(y.square().mean())
            results[-1].backward()
        return [*results, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = losses()
    monkeypatch.setattr(PARAMETERS, "guest", PARAMETERS.default)
    assert all(map(torch.equal, losses(), expected))
