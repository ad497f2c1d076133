"""Cases that run on several ranks, which start once for all of them: gloo on a CPU, NCCL on GPUs.

Ranks on a CPU are forked from one process, which has imported what :mod:`imports_of_ranks` does;
each would take four seconds for it alone. ``FUSER_TEST_BACKEND=nccl pytest tests/sharded`` runs the
cases on GPUs, a rank on each; these ranks are new processes, as fork and CUDA do not go together.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import gc
import hashlib
import importlib
import multiprocessing.forkserver
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import other_sums  # noqa: F401  ranks add as the tests' process does
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from needs import skip_without_ports

RANKS = 2
BACKEND = os.environ.get("FUSER_TEST_BACKEND", "gloo")
SECONDS = 180
"""After this time a rank that waits for another fails; machines may be busy."""
NOT_RUN = "Not run: an earlier case failed, and ranks may be in different places."

Case = Callable[..., Any]


@dataclass(frozen=True)
class Failure:
    """The error of a case on a rank."""

    kind: str
    text: str


def device_type() -> str:
    """The type of device of the tensors of cases."""
    return "cuda" if BACKEND == "nccl" else "cpu"


def part(tensor: torch.Tensor, rank: int, dim: int, count: int = RANKS) -> torch.Tensor:
    """The part of ``tensor`` on a rank, contiguous."""
    return tensor.chunk(count, dim)[rank].contiguous()


def results_of(
    cases: Callable[[], Mapping[str, Case]],
    folder: Path,
    count: int = RANKS,
    backend: str = BACKEND,
    names: tuple[str, ...] | None = None,
) -> dict[str, list[Any]]:
    """By case, what each rank returned: tensors in containers, on the CPU, or error and traceback.

    ``cases`` is a function at the top level of a module; a case gets its rank. ``names`` are those
    that run; None for all.
    """
    found = _run(cases.__module__, cases.__qualname__, names, count, folder, backend)
    return {
        name: [(one.kind, one.text) if isinstance(one, Failure) else one for one in each]
        for name, each in found.items()
    }


def selected(request: pytest.FixtureRequest, test: str, cases: Iterable[str]) -> tuple[str, ...]:
    """The cases, parameters of a test of the file that asks, that this run has."""
    items = [item for item in request.session.items if item.path == request.path]
    names = {item.name for item in items}
    for item in items:
        # A long case is in no name.
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            names |= {f"{item.originalname}[{value}]" for value in item.callspec.params.values()}
    return tuple(case for case in cases if f"{test}[{case}]" in names)


def run_cases(module: str, names: Sequence[str], ranks: int, folder: Path) -> dict[str, str]:
    """Run cases of ``module``, a mapping ``CASES`` of names to functions, on every rank.

    Returns the errors of the ranks by case; empty for a case without one.
    """
    found = _run(module, "CASES", tuple(names), ranks, folder)
    return {
        name: "\n".join(
            f"Rank {rank}: {one.text}" for rank, one in enumerate(each) if isinstance(one, Failure)
        )
        for name, each in found.items()
    }


def _run(
    module: str,
    attribute: str,
    names: tuple[str, ...] | None,
    count: int,
    folder: Path,
    backend: str = BACKEND,
) -> dict[str, list[Any]]:
    """By case, the result or the failure of each rank; of processes that start once in a run."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _started(module, attribute, names, count, folder, backend)
    # Workers that share out the tests of a file share its ranks. A worker's folder is in the run's.
    digest = hashlib.sha256(repr((module, attribute, names, count, backend)).encode()).hexdigest()
    kept = folder.parents[1] / f"ranks-{digest[:16]}.pt"
    with kept.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not kept.exists():
            torch.save(_started(module, attribute, names, count, folder, backend), kept)
        results: dict[str, list[Any]] = torch.load(kept, weights_only=False)
        return results


def are_forked() -> bool:
    """Whether ranks are forked here; a process that has looked for GPUs may not be."""
    return sys.platform == "linux" and not torch.cuda.is_available()


def start_method() -> str:
    """How ranks start here, for contexts of multiprocessing; their parent has imported much."""
    if not are_forked():
        return "spawn"
    multiprocessing.set_forkserver_preload(["imports_of_ranks"])
    # Not every Python gives that process the folders of its imports.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        multiprocessing.forkserver.ensure_running()
    return "forkserver"


def end_with_parent() -> None:
    """End this process when the one that asked for it ends, killed or not."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def wait() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()


def _started(
    module: str,
    attribute: str,
    names: tuple[str, ...] | None,
    count: int,
    folder: Path,
    backend: str,
) -> dict[str, list[Any]]:
    if not dist.is_available() or not dist.is_backend_available(backend):
        pytest.skip(f"torch is built without {backend}")
    if backend == "nccl" and torch.cuda.device_count() < count:
        pytest.skip(f"{count} ranks need {count} GPUs, and there are {torch.cuda.device_count()}")
    skip_without_ports()
    died = ""
    try:
        with mock.patch.dict(os.environ, FUSER_TEST_BACKEND=backend):  # read by the ranks
            torch.multiprocessing.start_processes(
                _run_on_rank,
                (module, attribute, names, count, str(folder)),
                nprocs=count,
                start_method=start_method(),
            )
    except (
        torch.multiprocessing.ProcessExitedException,
        torch.multiprocessing.ProcessRaisedException,
    ) as error:
        died = str(error)
    files = [folder / f"rank{rank}.pt" for rank in range(count)]
    found = [
        torch.load(file, map_location="cpu", weights_only=False) if file.exists() else {}
        for file in files
    ]
    if died and not any(found):
        raise RuntimeError(died)
    every = names or tuple(max(found, key=len))
    missing = Failure("ProcessExitedException", died or NOT_RUN)
    return {name: [of_rank.get(name, missing) for of_rank in found] for name in every}


def _run_on_rank(
    rank: int, module: str, attribute: str, names: tuple[str, ...] | None, count: int, folder: str
) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".* is emulated")
    store = dist.FileStore(f"{folder}/rendezvous", count)
    store.set_timeout(datetime.timedelta(seconds=2 * SECONDS))
    _start(store, rank, count)
    # Modules of cases make tensors when they are imported.
    found = getattr(importlib.import_module(module), attribute)
    cases: Mapping[str, Case] = (
        found
        if isinstance(found, Mapping)
        else {name: functools.partial(case, rank) for name, case in found().items()}
    )
    results: dict[str, Any] = {}
    together = True
    for name in names or cases:
        print(f"Rank {rank}: {name}", file=sys.stderr, flush=True)  # pytest shows it after an error
        results[name] = _result_of(cases[name]) if together else Failure("", NOT_RUN)
        if together:
            if isinstance(results[name], Failure):
                torch.save(results, f"{folder}/rank{rank}.pt")
            together = _ended_alike(store, name, rank, count, results[name])
    torch.save(results, f"{folder}/rank{rank}.pt")
    if together:
        dist.barrier()
        gc.collect()  # NCCL waits for CUDA graphs with its communication before it ends
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _start(store: Any, rank: int, count: int) -> None:
    options: dict[str, Any] = {}
    if BACKEND == "nccl":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    if torch.cuda.is_available():
        torch.set_default_device(device_type())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if BACKEND == "nccl" else BACKEND,  # shards may be offloaded
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=SECONDS),
        **options,
    )


def _result_of(case: Case) -> Any:
    torch.manual_seed(0)
    try:
        return case()
    except (Exception, pytest.fail.Exception) as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


def _ended_alike(store: Any, case: str, rank: int, count: int, result: Any) -> bool:
    """Whether the case ended on all ranks in one way; after another end they would not meet."""
    end = result.kind.partition(":")[0] if isinstance(result, Failure) else "returned"
    store.set(f"{case}/{rank}", end)
    return len({store.get(f"{case}/{other}") for other in range(count)}) == 1
