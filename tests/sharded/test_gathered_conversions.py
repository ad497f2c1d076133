"""Converted models whose weights ``fully_shard`` gathers quantized, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from gathered_conversions_cases import PAIRS, cases
from ranks import results_of, selected

NAMES = tuple(cases())
TRAININGS = [f"{name}-{how}" for name, how in PAIRS]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    test = test_it_trains_to_the_bit_as_with_weights_that_are_gathered_unquantized
    left_out = {*TRAININGS} - {*selected(request, test.__name__, TRAININGS)}
    names = tuple(name for name in NAMES if name.replace(", ", "-") not in left_out)
    return results_of(cases, tmp_path_factory.mktemp("ranks"), names=names)


def checked(results: dict[str, list[Any]], name: str) -> list[dict[str, Any]]:
    for each in results[name]:
        assert isinstance(each, dict), each[1]
    return results[name]


@pytest.mark.sampled(most=12)
@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_it_trains_to_the_bit_as_with_weights_that_are_gathered_unquantized(
    results: dict[str, list[Any]], name: str, how: str
) -> None:
    """And nothing of weights that are read as one stays in memory between passes."""
    for each in checked(results, f"{name}, {how}"):
        assert all(each["same"]), each
        assert each["keys"]
        assert each["memory"] == 0
        if how == "plain":  # no pass gathers what it does not read
            assert each["copies"] <= {"rowwise", "columnwise"}
        # Keys and values of the first layer, the second's with queries, and gate and up.
        assert each["joined"] == (6 if how == "copied" else 3, 0)
        assert each["plays"][0] >= 0.5 * each["plays"][1]


def test_weights_that_are_given_apart_have_scales_of_their_own(
    results: dict[str, list[Any]],
) -> None:
    for each in checked(results, "given apart"):
        assert each["error"] < 0.1


def test_weights_that_cannot_be_gathered_as_one_are_refused(
    results: dict[str, list[Any]],
) -> None:
    for each in checked(results, "refused"):
        assert "0.mlp.gate_proj.weight, 0.mlp.up_proj.weight are read as one" in each["apart"]
        assert "leaves 1.gate_proj.weight, 1.up_proj.weight unquantized" in each["rows"]
        assert "converted linear" in each["none"]
        assert "gathered quantized under Float8CurrentScaling() already" in each["twice"]
        assert "2 ranks cut blocks of rows" in each["cut"]
