"""Delayed scaling over several ranks: one reduction of amaxes a step, without deadlocks."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import astuple, dataclass
from typing import Any

import oracles
import pytest
import torch
import torch.distributed as dist
from ranks import RANKS, results_of

import fuser
from fuser.recipe import DelayedScaling

MAXIMA = {"forward": 448.0, "backward": 57344.0}


@dataclass(frozen=True)
class Training:
    """Whether amaxes are reduced, over a group of its own, with an autocast around all steps."""

    reduce_amax: bool
    has_group: bool = False
    is_outer: bool = False


TRAININGS = {
    "reduced in each step": Training(True, has_group=True),
    "reduced in one autocast": Training(True, has_group=True, is_outer=True),
    "not reduced": Training(False),
}


def train(reduce_amax: bool, has_group: bool, is_outer: bool, rank: int) -> dict[str, Any]:
    """Two steps on this rank's data: the state, and the amaxes that it saw.

    With an autocast around each step, or where ``is_outer`` around all.
    """
    first, last = (fuser.Linear(32, 32) for _ in range(2))
    model = oracles.randomize(fuser.Sequential(first, fuser.GELU(), last))
    group = dist.new_group(list(range(RANKS))) if has_group else None
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=reduce_amax)
    x = oracles.random_tensor((16, 32), torch.float32, 10 + rank) * (1 + rank)
    dy = oracles.random_tensor((16, 32), torch.float32, 20 + rank) * (1 + rank)

    def autocast(is_entered: bool) -> Any:
        context = fuser.autocast(recipe=recipe, amax_reduction_group=group)
        return context if is_entered else contextlib.nullcontext()

    with autocast(is_outer):
        for _ in range(2):
            with autocast(not is_outer):
                y = model(x)
            y.backward(dy)
            # Evaluation on one rank alone reduces nothing, and does not wait.
            with torch.no_grad(), autocast(not is_outer):
                if rank == 0:
                    model(x)
    states = {name: value for name, value in model.state_dict().items() if "_extra_state" in name}
    return {"states": states, "amax": x.abs().max()}


def cases() -> dict[str, Any]:
    return {
        name: functools.partial(train, *astuple(training)) for name, training in TRAININGS.items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank has after each training."""
    found = results_of(cases, tmp_path_factory.mktemp("ranks"))
    for each in (one for ranks in found.values() for one in ranks):
        assert isinstance(each, dict), each[1]
    return found


def scales(state: torch.Tensor) -> torch.Tensor:
    """The forward's scales in an extra state: n, length, n scales, history."""
    return state[2 : 2 + int(state[0])]


@pytest.mark.parametrize("training", ["reduced in each step", "reduced in one autocast"])
def test_every_rank_has_the_scales_of_the_largest_amax(
    results: dict[str, list[dict[str, Any]]], training: str
) -> None:
    first, second = results[training]
    linears = [name for name, state in first["states"].items() if state.numel()]
    assert len(linears) == 2
    for name in linears:
        assert torch.equal(scales(first["states"][name]), scales(second["states"][name])), name
    largest = max(first["amax"], second["amax"])
    assert scales(first["states"][linears[0]])[0] == 448 / largest


def test_without_reduction_every_rank_has_its_own_scales(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    first, second = results["not reduced"]
    for result in (first, second):
        state = next(state for state in result["states"].values() if state.numel())
        assert scales(state)[0] == 448 / result["amax"]
    assert first["amax"] != second["amax"]


class Group(str):
    """A name in place of a process group, with weak references."""


def test_every_amax_is_reduced_over_the_group_of_its_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer, inner = Group("outer"), Group("inner")
    others = {outer: 4.0, inner: 2.0}  # how much larger the other ranks' amaxes are

    def all_reduce(amaxes: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MAX
        amaxes.mul_(others[group])

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: RANKS)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    recipe = DelayedScaling(amax_history_len=4)
    first, second = (oracles.randomize(fuser.BasicLinear(32, 32)) for _ in range(2))
    x = torch.full((32, 32), 8.0, requires_grad=True)
    with fuser.autocast(recipe=recipe, amax_reduction_group=outer):
        h = first(x)
        h.retain_grad()
        with fuser.autocast(recipe=recipe, amax_reduction_group=inner):
            y = second(h)
    y.backward(torch.full((32, 32), 16.0))
    assert h.grad is not None
    amax = {first: (8.0, h.grad.abs().max()), second: (h.detach().abs().max(), 16.0)}
    for op, group in ((first, outer), (second, inner)):
        for (mode, largest), seen in zip(MAXIMA.items(), amax[op], strict=True):
            scale = float(op._delayed[mode].scale[0])
            assert scale == pytest.approx(largest / float(seen * others[group])), (group, mode)
