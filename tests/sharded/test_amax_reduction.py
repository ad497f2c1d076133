"""Delayed scaling over several ranks: one reduction of amaxes a step, without deadlocks."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import oracles
import pytest
import torch
import torch.distributed as dist
from ranks import RANKS, results_of

import fuser
from fuser.errors import FuserError
from fuser.precision.amax_reduction import reduction_over
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


# The amax of the input of each op that a rank runs in a step; that of the gradient is 2 to 16 times
# as large. None: the rank does not run the op.
SCHEDULE = (
    ((1.0, 10.0, None, None), (2.0, None, 1000.0, None)),
    ((3.0, None, None, 5.0), (2.0, 0.5, None, None)),
    ((None, None, 2000.0, None), (4.0, 20.0, None, 50.0)),
    ((1.0, None, None, None), (1.0, None, None, None)),
)
RECIPE = DelayedScaling(amax_history_len=8)


def linears(count: int) -> list[fuser.BasicLinear]:
    ops = [fuser.BasicLinear(32, 32, dtype=torch.float32) for _ in range(count)]
    for number, op in enumerate(ops):
        torch.nn.init.constant_(op.weight, 2.0 ** -(number + 1))
    return ops


def step(
    ops: list[fuser.BasicLinear],
    amaxes: tuple[float | None, ...],
    *,
    order: int = 1,
    **options: Any,
) -> None:
    """One training step of the ops that have an amax."""
    runs = [(n, amax) for n, amax in enumerate(amaxes) if amax is not None]
    loss = torch.zeros(())
    with fuser.autocast(**{"recipe": RECIPE, **options}):
        for n, amax in runs[::order]:
            y = ops[n](torch.full((16, 32), amax, requires_grad=True))
            loss = loss + (y * amax * 2.0 ** (n + 1)).sum()
    loss.backward()


def scales_of(op: fuser.BasicLinear) -> dict[str, list[float]]:
    return {mode: state.scale.tolist() for mode, state in op._delayed.items()}


def other_ops(rank: int) -> Any:
    """The scales of every op after each step of the schedule."""
    ops, seen = linears(4), []
    for ranks in SCHEDULE:
        step(ops, ranks[rank])
        seen.append([scales_of(op) for op in ops])
    return seen


def other_order(rank: int) -> Any:
    ops = linears(2)
    for _ in range(2):
        step(ops, (1.0, 100.0), order=(1, -1)[rank])
    return [scales_of(op) for op in ops]


def loaded_and_not_used(rank: int) -> Any:
    """The input's scale of an op, after steps without it on all ranks and on one."""
    seen = []
    for loads in ((0, 1), (0,)):
        ops = linears(2)
        step(ops, (4.0, 4.0))
        saved = copy.deepcopy(ops[1].state_dict())
        step(ops, (4.0, 2.0))
        if rank in loads:
            ops[1].load_state_dict(saved)
        for amaxes in ((8.0, None), ((8.0, None), (8.0, 32.0))[rank], (8.0, None)):
            step(ops, amaxes)
            seen.append(scales_of(ops[1])["forward"][0])
    return seen


def error_of(call: Callable[..., Any]) -> str:
    try:
        call()
    except FuserError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def other_ops_made(rank: int) -> Any:
    """Rank 1 makes one op more, before the others; then it frees that op."""
    others = [fuser.BasicLinear(16, 32)] if rank else []
    ops = linears(2)
    errors = [error_of(lambda: step(ops, ((1.0, None), (None, 1.0))[rank]))]
    others.clear()
    errors.append(error_of(lambda: step(ops, ((2.0, None), (None, 4.0))[rank])))
    return errors, [scales_of(op) for op in ops]


def ops_of_other_sizes(rank: int) -> Any:
    """The last op that both ranks run has another size on each; one has made an op before."""
    last = fuser.BasicLinear(32, 32 + 32 * rank, dtype=torch.float32)
    errors = [error_of(lambda: step([last], (1.0,)))]
    first = linears(1) if rank == 0 else []
    last = fuser.BasicLinear(32, 32 + 32 * rank, dtype=torch.float32)
    errors.append(error_of(lambda: step([last], (1.0,))))
    del first
    return errors


def copies_made_later(rank: int) -> Any:
    """Rank 0 alone has a copy: while ranks run the same ops, and when they do not."""
    ops = linears(3)
    copies = copy.deepcopy(ops) if rank == 0 else None
    step(ops, (1.0 + rank, 4.0, None))
    error = error_of(lambda: step(ops, ((1.0, None, 1.0), (1.0, None, None))[rank]))
    del copies
    return error, [scales_of(op) for op in ops[:2]]


def copies_made_earlier(rank: int) -> Any:
    """Rank 0 alone has made other ops before the model: while ranks run the same ops, and not."""
    others = [*linears(2), fuser.BasicLinear(16, 32)] if rank == 0 else None
    ops = linears(3)
    step(ops, (1.0 + rank, 4.0, None))
    step(ops, (1.0 + rank, 4.0, None))
    error = error_of(lambda: step(ops, ((1.0, None, 1.0), (1.0, None, None))[rank]))
    del others
    return error, [scales_of(op) for op in ops[:2]]


def other_recipes(rank: int) -> Any:
    """Ranks that differ in the first step; and ranks that differ in a later one."""
    other = DelayedScaling(amax_history_len=8, margin=rank)
    ops = linears(1)
    errors = [error_of(lambda: step(ops, (1.0,), recipe=other))]
    for recipe in (RECIPE, RECIPE, other, RECIPE):
        errors.append(error_of(lambda recipe=recipe: step(ops, (1.0,), recipe=recipe)))
    return errors, [scales_of(op) for op in ops]


def a_rank_that_takes_no_part(rank: int) -> Any:
    group = dist.new_group(list(range(RANKS)), timeout=datetime.timedelta(seconds=2))
    if rank == 0:
        return error_of(lambda: step(linears(1), (1.0,), amax_reduction_group=group))
    return None


def groups_in_other_orders(rank: int) -> Any:
    """One op over both ranks and one over this rank alone, in two orders; both in one step."""
    limit = datetime.timedelta(seconds=60)  # torch's own for a new group is half an hour
    both = dist.new_group(list(range(RANKS)), timeout=limit)
    alone = [dist.new_group([n]) for n in range(RANKS)][rank]
    again = dist.new_group(list(range(RANKS)), timeout=limit)
    ops = linears(3)
    runs = [(both, ops[0], 1.0 + rank), (alone, ops[1], 3.0 + rank), (again, ops[2], 5.0 + rank)]
    loss = torch.zeros(())
    with fuser.autocast(recipe=RECIPE):
        for group, op, amax in runs[:: (1, -1)[rank]]:
            with fuser.autocast(recipe=RECIPE, amax_reduction_group=group):
                y = op(torch.full((16, 32), amax, requires_grad=True))
                loss = loss + 2 * amax * y.sum()
    loss.backward()
    return [[scales_of(op)[mode][0] for op in ops] for mode in MAXIMA]


def models_that_are_freed(rank: int) -> Any:
    """How many states the ranks reduce after each of three models."""
    group = dist.new_group(list(range(RANKS)))
    counts = []
    for _ in range(3):
        ops = linears(2)
        step(ops, (1.0, 1.0), amax_reduction_group=group)
        counts.append(len(reduction_over(group)._places))
        del ops
    return counts


def groups_given(rank: int) -> Any:
    """The error of each thing in place of a group, and of groups that are destroyed."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    others = dist.new_group([1 - rank]) if rank else (dist.new_group([1]), dist.new_group([0]))[0]
    if rank:
        dist.new_group([0])
    given = {"text": "tp", "list": [0, 1], "mesh of two": mesh, "other ranks": others}
    errors = {
        name: error_of(lambda group=group: fuser.autocast(amax_reduction_group=group))
        for name, group in given.items()
    }
    ops = linears(1)
    errors["mesh"] = error_of(lambda: step(ops, (1.0 + rank,), amax_reduction_group=mesh["tp"]))
    scale = scales_of(ops[0])["forward"][0]
    column = fuser.BasicLinear(
        32,
        32,
        dtype=torch.float32,
        tensor_parallel_mode="column",
        tensor_parallel_group=mesh["tp"],
        sequence_parallel=True,
    )
    parallel: Any = [column]
    options = {"recipe": RECIPE, "amax_reduction_group": mesh["tp"]}
    errors["mesh of an op"] = error_of(lambda: step(parallel, (1.0 + rank,), **options))
    assert scales_of(column)["forward"][0] == 224
    group = dist.new_group(list(range(RANKS)))
    context = fuser.autocast(recipe=RECIPE, amax_reduction_group=group)
    x = torch.ones(16, 32, requires_grad=True)
    with context:
        y = ops[0](x)
    dist.destroy_process_group(group)
    errors["backward"] = error_of(lambda: y.sum().backward())

    def forward() -> None:
        with context:
            ops[0](x)

    errors["forward"] = error_of(forward)
    errors["autocast"] = error_of(lambda: fuser.autocast(amax_reduction_group=group))
    return errors, scale


def cases() -> dict[str, Any]:
    trainings = {
        name: functools.partial(train, *astuple(training)) for name, training in TRAININGS.items()
    }
    others = [
        other_ops,
        other_order,
        loaded_and_not_used,
        other_ops_made,
        ops_of_other_sizes,
        copies_made_later,
        copies_made_earlier,
        other_recipes,
        groups_in_other_orders,
        models_that_are_freed,
        groups_given,
        a_rank_that_takes_no_part,  # its group is of no use after that
    ]
    return {**trainings, **{case.__name__: case for case in others}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank has after each training."""
    found = results_of(cases, tmp_path_factory.mktemp("ranks"))
    for name in TRAININGS:
        for each in found[name]:
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


# -- ranks that do not run the same ops ---------------------------------------------


def expected_scales(until: int) -> Iterator[dict[str, list[float]]]:
    """The scales of each op after the first steps, computed by hand: the maxima of all ranks."""
    for n in range(4):
        seen = [ranks[r][n] for ranks in SCHEDULE[:until] for r in range(RANKS)]
        amax = max((amax for amax in seen if amax is not None), default=None)
        if amax is None:
            yield {}
        else:
            weight = 2.0 ** -(n + 1)
            yield {
                "forward": [448 / amax, 448 / weight],
                "backward": [57344 / (amax * 2.0 ** (n + 1))],
            }


def test_an_op_that_some_ranks_do_not_run_has_the_amaxes_of_those_that_do(
    results: dict[str, list[Any]],
) -> None:
    for seen in results["other_ops"]:
        assert isinstance(seen, list), seen
        for steps, scales_of_ops in enumerate(seen, start=1):
            for n, expected in enumerate(expected_scales(steps)):
                for mode, values in expected.items():
                    got = scales_of_ops[n].get(mode)
                    # Gradients of a new op that only one rank ran are reduced with the next step.
                    is_new = all(
                        ranks[r][n] is None for ranks in SCHEDULE[: steps - 1] for r in (0, 1)
                    )
                    if steps > 1 and is_new and mode == "backward":
                        continue
                    assert got == pytest.approx(values), (steps, n, mode)
    first, second = results["other_ops"]
    assert first[0] == second[0]
    assert first[-1] == second[-1]


def test_a_step_that_does_not_use_a_loaded_state_ends_and_the_state_takes_other_ranks_amaxes(
    results: dict[str, list[Any]],
) -> None:
    for seen in results["loaded_and_not_used"]:
        assert seen == pytest.approx([448 / 4, 448 / 32, 448 / 32] * 2), seen


def test_ranks_that_run_ops_in_another_order_reduce_the_amaxes_of_the_same_op(
    results: dict[str, list[Any]],
) -> None:
    for a, b in results["other_order"]:
        assert a["forward"][0] == 448
        assert b["forward"][0] == pytest.approx(4.48)


def test_ranks_that_ran_and_made_different_ops_are_refused_on_every_rank(
    results: dict[str, list[Any]],
) -> None:
    for errors, scales_of_ops in results["other_ops_made"]:
        assert errors[0].startswith("InputError: Delayed scaling reduces amaxes over the ranks [0")
        assert "number 0 of those that quantize is BasicLinear(in_features=32" in errors[0]
        assert "BasicLinear(in_features=16, out_features=32) on rank 1" in errors[0]
        assert errors[1] == "none"
        assert [scales["forward"][0] for scales in scales_of_ops] == [224, 112]


def test_ranks_whose_ops_have_other_sizes_are_refused_on_every_rank(
    results: dict[str, list[Any]],
) -> None:
    for errors in results["ops_of_other_sizes"]:
        for error in errors:
            assert re.match("InputError: Delayed scaling .* which ran different ops", error)
        assert "features=32, out_features=32) on rank 0" in errors[0]
        assert "features=32, out_features=64) on rank 1" in errors[0]


@pytest.mark.parametrize("case", ["copies_made_later", "copies_made_earlier"])
def test_ops_that_one_rank_makes_beside_the_model_change_nothing(
    case: str, results: dict[str, list[Any]]
) -> None:
    first, second = results[case]
    assert first == second
    error, (one, other) = first
    assert (one["forward"][0], other["forward"][0]) == (224, 112)
    number = 3 if case == "copies_made_later" else 2
    assert f"number {number} of those that quantize is BasicLinear(" in error


def test_ranks_with_different_recipes_are_refused_on_every_rank(
    results: dict[str, list[Any]],
) -> None:
    for errors, scales_of_ops in results["other_recipes"]:
        words = "under different recipes: rank 0 has .*; rank 1 has .*margin=1"
        for at in (0, 3):
            assert re.search(words, errors[at]), errors
        assert errors[1:3] == ["none", "none"]
        assert errors[4] == "none"
        assert scales_of_ops[0]["forward"][0] == 448


def test_a_rank_that_waits_for_another_gets_a_sentence(results: dict[str, list[Any]]) -> None:
    error = results["a_rank_that_takes_no_part"][0]
    assert re.match(r"StateError: .* over the ranks \[0, 1\], and not all of them took part", error)


def test_amaxes_are_reduced_over_the_group_of_their_autocast_in_any_order(
    results: dict[str, list[Any]],
) -> None:
    for rank, (forward, backward) in enumerate(results["groups_in_other_orders"]):
        amaxes = (2, 3 + rank, 6)
        assert forward == pytest.approx([MAXIMA["forward"] / amax for amax in amaxes])
        assert backward == pytest.approx([MAXIMA["backward"] / (2 * amax) for amax in amaxes])


def test_states_of_a_model_that_is_freed_are_no_longer_reduced(
    results: dict[str, list[Any]],
) -> None:
    for counts in results["models_that_are_freed"]:
        assert counts == [4, 4, 4]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("text", "InputError: autocast got 'tp' as its process group"),
        ("list", r"InputError: autocast got \[0, 1\] as its process group"),
        ("mesh of two", "InputError: autocast got a device mesh of 2 dimensions"),
        ("other ranks", "InputError: autocast got a process group of which rank . is not a member"),
        ("mesh", "none"),
        ("mesh of an op", "none"),
        ("backward", "StateError: The backward of BasicLinear .*destroyed"),
        ("forward", r"StateError: .*destroyed .*It reduces amaxes of BasicLinear\(in_features=32"),
        ("autocast", "StateError: autocast communicates over a process group that has been destr"),
    ],
)
def test_a_group_is_what_ops_take_as_one(
    results: dict[str, list[Any]], given: str, words: str
) -> None:
    for errors, scale in results["groups_given"]:
        assert re.match(words, errors[given]), errors[given]
        assert scale == 224
