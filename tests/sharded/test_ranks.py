"""Cases on several ranks: results come back by case, and the errors of ranks are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import NOT_RUN, results_of, run_cases


def sum_of_ranks(rank: int) -> Any:
    x = torch.tensor([1.0 + rank])
    dist.all_reduce(x)
    return {"sum": x}


def fails_on_all(rank: int) -> None:
    raise ValueError(f"of rank {rank}")


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("of one")


def cases() -> dict[str, Any]:
    return {
        "first": sum_of_ranks,
        "all": fails_on_all,
        "second": sum_of_ranks,
        "one": fails_on_one,
        "third": sum_of_ranks,
    }


CASES = {
    "passes": lambda: sum_of_ranks(dist.get_rank()),
    "fails": lambda: fails_on_one(dist.get_rank()),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results_of(cases, tmp_path_factory.mktemp("ranks"))


def test_results_of_all_ranks_are_returned_on_the_cpu(results: dict[str, list[Any]]) -> None:
    for each in results["first"]:
        assert torch.equal(each["sum"], torch.tensor([3.0]))


def test_cases_go_on_after_an_error_of_all_ranks(results: dict[str, list[Any]]) -> None:
    for rank, (error, text) in enumerate(results["all"]):
        assert error == f"ValueError: of rank {rank}"
        assert "fails_on_all" in text
    assert [each["sum"].item() for each in results["second"]] == [3, 3]


def test_no_case_runs_after_an_error_of_one_rank(results: dict[str, list[Any]]) -> None:
    assert results["one"][0] is None
    assert results["one"][1][0] == "ValueError: of one"
    assert [text for _, text in results["third"]] == [NOT_RUN, NOT_RUN]


def test_errors_are_returned_by_case_with_their_ranks(tmp_path: Path) -> None:
    errors = run_cases("test_ranks", ("passes", "fails"), 2, tmp_path)
    assert errors["passes"] == ""
    assert errors["fails"].startswith("Rank 1: Traceback")
    assert "Rank 0" not in errors["fails"]
