"""Two processes that run the cases of a test file together, over gloo, and return their results."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANKS = 2

Case = Callable[[int], Any]


def _run(rank: int, folder: str, cases: Callable[[], Mapping[str, Case]], count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=60),
    )
    results: dict[str, Any] = {}
    for name, case in cases().items():
        torch.manual_seed(0)
        try:
            results[name] = case(rank)
        except Exception as error:  # the test of this case fails, with the error
            results[name] = (f"{type(error).__name__}: {error}", traceback.format_exc())
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def results_of(
    cases: Callable[[], Mapping[str, Case]], folder: Path, count: int = RANKS
) -> dict[str, list[Any]]:
    """By case, what each rank returned: tensors in containers, or error and traceback.

    ``cases`` is a function at the top level of a test file.
    """
    if not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    torch.multiprocessing.spawn(_run, (str(folder), cases, count), nprocs=count)
    found = [torch.load(folder / f"rank{rank}.pt") for rank in range(count)]
    return {name: [of_rank[name] for of_rank in found] for name in found[0]}


def part(tensor: torch.Tensor, rank: int, dim: int, count: int = RANKS) -> torch.Tensor:
    """The part of ``tensor`` on a rank, contiguous."""
    return tensor.chunk(count, dim)[rank].contiguous()
