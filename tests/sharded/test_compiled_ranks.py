"""Models that communicate inside torch.compile: graphs, and the bits of launched steps."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_ranks_cases import cases
from ranks import results_of, selected

READS = "experts without capacity"
"""Its host reads how many rows other ranks send."""


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    names = selected(request, "test_compiled_steps_have_the_bits_of_launched_ones", cases())
    names += selected(request, "test_graphs_are_whole_unless_the_host_reads", cases())
    folder = tmp_path_factory.mktemp("ranks")
    return results_of(cases, folder, names=tuple(dict.fromkeys(names)))


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", cases())
def test_compiled_steps_have_the_bits_of_launched_ones(
    results: dict[str, list[Any]], name: str
) -> None:
    for each in results[name]:
        assert isinstance(each, dict), each[1]
        assert each["same"]


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", cases())
def test_graphs_are_whole_unless_the_host_reads(results: dict[str, list[Any]], name: str) -> None:
    for each in results[name]:
        assert isinstance(each, dict), each[1]
        if name.startswith(READS):
            (reason,) = (reason for reason in each["breaks"] if "MoeDispatch" in reason)
            assert "MoeDispatch reads on the host how many rows other ranks send" in reason
        else:  # the input of the first block requires a gradient, as that of the others does
            assert (each["graphs"], each["breaks"]) == (1, [])
