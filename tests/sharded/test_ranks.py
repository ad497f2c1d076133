"""Cases on several ranks: results come back by case, and the errors of ranks are told apart."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import NOT_RUN, are_forked, end_with_parent, results_of, run_cases, start_method

needs_fork = pytest.mark.skipif(
    not are_forked(), reason="ranks are forked on Linux alone, and without a GPU"
)


def sum_of_ranks(rank: int) -> Any:
    x = torch.tensor([1.0 + rank])
    dist.all_reduce(x)
    return {"sum": x}


def fails_on_all(rank: int) -> None:
    raise ValueError(f"of rank {rank}")


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("of one")


def origin(rank: int) -> Any:
    """The parent of a rank, how many threads that has, and whether it has loaded torch."""
    parent = Path(f"/proc/{os.getppid()}")
    libraries = (parent / "maps").read_text()
    return os.getppid(), len(list((parent / "task").iterdir())), "libtorch_cpu" in libraries


def cases() -> dict[str, Any]:
    return {
        **({"origin": origin} if are_forked() else {}),
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


@needs_fork
def test_ranks_are_forked_from_a_process_with_torch_and_one_thread(
    results: dict[str, list[Any]],
) -> None:
    one, other = results["origin"]
    assert one == other
    parent, threads, has_torch = one
    assert parent != os.getpid()
    assert threads == 1  # a fork has the locks of other threads, and none that opens them
    assert has_torch


def waits(folder: str) -> None:
    end_with_parent()
    Path(folder, "new").write_text(str(os.getpid()))
    Path(folder, "new").rename(Path(folder, "pid"))
    time.sleep(600)


def starts_one_that_waits(folder: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=waits, args=(folder,))
    process.start()
    process.join()


@needs_fork
def test_a_rank_ends_when_the_process_that_asked_for_it_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context(start_method())
    process = context.Process(target=starts_one_that_waits, args=(str(tmp_path),))
    process.start()
    try:
        wait_until(lambda: (tmp_path / "pid").exists())
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    rank = int((tmp_path / "pid").read_text())
    try:
        wait_until(lambda: not is_running(rank))
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)


def is_running(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def wait_until(happens: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, f"after {seconds:g} s"
        time.sleep(0.02)
