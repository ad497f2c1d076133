"""Cases that run on several ranks: processes with gloo on a CPU, started once for all cases."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

SECONDS = 60
"""After this time a rank that waits for another fails."""

Case = Callable[[], None]
NOT_RUN = "Not run: an earlier case failed, and ranks may be in different places."


def run_cases(module: str, names: Sequence[str], ranks: int, folder: Path) -> dict[str, str]:
    """Run cases of ``module``, a mapping ``CASES`` of names to functions, on every rank.

    Returns the errors of the ranks by case; empty for a case without one.
    """
    arguments = (module, tuple(names), ranks, str(folder))
    torch.multiprocessing.spawn(_run_on_rank, arguments, nprocs=ranks)
    found = [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
    return {
        name: "\n".join(f"Rank {rank}: {e[name]}" for rank, e in enumerate(found) if e[name])
        for name in names
    }


def _run_on_rank(rank: int, module: str, names: Sequence[str], ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".* is emulated")
    cases: dict[str, Case] = importlib.import_module(module).CASES
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    errors = dict.fromkeys(names, "")
    failed = False
    for name in names:
        if failed:
            errors[name] = NOT_RUN
            continue
        try:
            torch.manual_seed(0)
            cases[name]()
            dist.barrier()
        except Exception:
            errors[name], failed = traceback.format_exc(), True
    torch.save(errors, f"{folder}/rank{rank}.pt")
    if not failed:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
