"""Recorded passes that communicate: bits and collectives of the plan's own code, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import device_type, results_of, selected
from recorded_ranks_cases import cases

NAMES = tuple(cases())
OF_MLPS = [name for name in NAMES if name.startswith("mlp ")]
OF_COUNTED = [name for name in NAMES if name.startswith("counted ")]
OF_SHARDS = [name for name in NAMES if name.startswith("shards ")]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    test = test_replays_of_a_parallel_mlp_have_the_bits_and_collectives_of_the_plans_own_code
    left_out = {*OF_MLPS} - {*selected(request, test.__name__, OF_MLPS)}
    names = tuple(name for name in NAMES if name not in left_out)
    return results_of(cases, tmp_path_factory.mktemp("ranks"), names=names)


def checked(results: dict[str, list[Any]], name: str) -> list[dict[str, Any]]:
    for each in results[name]:
        assert isinstance(each, dict), each[1]
    return results[name]


def check(results: dict[str, list[Any]], name: str, *, least: int) -> None:
    for each in checked(results, name):
        assert each["same"], name
        assert each["sent"], name
        assert each["count"], name
        assert each["plays"] >= least, (name, each)


@pytest.mark.parametrize("case", OF_MLPS)
def test_replays_of_a_parallel_mlp_have_the_bits_and_collectives_of_the_plans_own_code(
    results: dict[str, list[Any]], case: str
) -> None:
    """Also where one rank replays and the other one records, or after the group has changed.

    Launches between collectives are graphs, if there are enough: under current scaling.
    """
    is_plain = case.endswith("plain]")
    check(results, case, least=4 if is_plain else 1)
    if is_plain and "current" in case and device_type() == "cpu":  # addresses come back at once
        assert all(each["hits"] for each in results[case]), results[case]


@pytest.mark.parametrize("case", OF_SHARDS)
def test_replays_of_gathered_weights_have_the_bits_and_copies_of_the_plans_own_code(
    results: dict[str, list[Any]], case: str
) -> None:
    """Forwards and backwards are replayed: forwards alone would be six.

    So are quantizations of shards, from the third step on.
    """
    check(results, case, least=7)
    for each in results[case]:
        assert (each["repeats"] >= 5) == (", gathered," in case), each


@pytest.mark.parametrize("has_shards", [False, True])
def test_replays_under_two_amax_groups_in_turn_have_the_scales_of_each(
    results: dict[str, list[Any]], has_shards: bool
) -> None:
    """All ranks, and each rank alone."""
    for each in checked(results, f"amax groups {has_shards}"):
        assert each["same"]
        assert each["plays"] >= 4
        for found, expected in each["scales"]:
            assert found == pytest.approx(expected)


def test_replays_of_ops_that_communicate_have_the_bits_of_the_plans_own_code(
    results: dict[str, list[Any]],
) -> None:
    check(results, "ops", least=4)


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
def test_replays_of_experts_with_a_capacity_have_the_bits_of_the_plans_own_code(
    results: dict[str, list[Any]], recipe: str
) -> None:
    check(results, f"experts {recipe}", least=4 if recipe == "none" else 0)
    is_played = recipe == "none" and device_type() == "cpu"
    assert not is_played or all(each["hits"] for each in results["experts none"])


def test_experts_without_a_capacity_are_replayed(results: dict[str, list[Any]]) -> None:
    check(results, "experts without a capacity", least=4)


@pytest.mark.parametrize("case", OF_COUNTED)
def test_replays_of_experts_whose_rows_are_counted_have_the_bits_of_exact_exchanges(
    results: dict[str, list[Any]], case: str
) -> None:
    """Experts get other rows in each step; where ``block`` is too many rows, none is played."""
    # Without kernels, the amaxes of bytes that are sent are read from rows of each expert.
    has_kernels = device_type() != "cpu" or not ("current" in case or "delayed" in case)
    for each in checked(results, case):
        assert each["same"], case
        is_played = has_kernels and any(n in case for n in ("equal", "one host", "a capacity"))
        assert bool(each["plays"]) == is_played, (case, each)


def test_a_replay_says_that_its_group_has_been_destroyed(results: dict[str, list[Any]]) -> None:
    for each in checked(results, "destroyed"):
        assert each["backward"].startswith("The backward of BasicLinear communicates over")
        assert "has been destroyed" in each["forward"]


def test_ranks_that_differ_from_a_replay_all_raise_on_a_cpu(
    results: dict[str, list[Any]],
) -> None:
    if "differ" not in NAMES:
        pytest.skip("on GPUs ranks that differ wait for each other")
    first, second = checked(results, "differ")
    assert first == second
    assert "BasicLinear(128, 128) communicates, and its ranks differ" in first["error"]
