"""Models that communicate inside torch.compile: graphs, and the bits of launched steps."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_ranks_cases import cases, names
from ranks import results_of

RESULTS = ["{}, {}".format(*each) for each in names()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results_of(cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", RESULTS)
def test_compiled_steps_have_the_bits_of_launched_ones(
    results: dict[str, list[Any]], name: str
) -> None:
    for each in results[name]:
        assert isinstance(each, dict), each[1]
        assert each["same"]


@pytest.mark.parametrize("name", [name for name in RESULTS if "without capacity" not in name])
def test_there_are_no_breaks(results: dict[str, list[Any]], name: str) -> None:
    for each in results[name]:
        assert isinstance(each, dict), each[1]
        # The input of the first block requires a gradient, as that of the others does.
        assert (each["graphs"], each["breaks"]) == (1, [])


def test_numbers_of_rows_that_the_host_reads_end_the_graph(
    results: dict[str, list[Any]],
) -> None:
    for each in results["experts without capacity, none"]:
        assert isinstance(each, dict), each[1]
        (reason,) = (reason for reason in each["breaks"] if "MoeDispatch" in reason)
        assert "MoeDispatch reads on the host how many rows other ranks send" in reason
