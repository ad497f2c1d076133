"""Scripts in tests: what they print, how they refuse options, and runs under torchrun."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from needs import skip_without_ports
from paths import EXAMPLES
from ranks import RANKS, end_with_parent, start_method

Main = Callable[[Sequence[str]], int | None]


class Terminal(io.StringIO):
    """A file that says of itself that it is a terminal."""

    def isatty(self) -> bool:
        return True


def printed_by(main: Main, arguments: Sequence[str]) -> str:
    """What a script prints on stdout; it must succeed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(arguments) == 0
    return printed.getvalue()


def refusal_by(main: Main, arguments: Sequence[str]) -> str:
    """The last line on stderr of a script that refuses its options with exit status 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return said.getvalue().splitlines()[-1]


def torchrun(script: Path | str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A script, or "-m" and a module, on two ranks; it may import the examples."""
    skip_without_ports()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", "2", str(script), *arguments]
    paths = os.pathsep.join([str(EXAMPLES), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def on_ranks(script: Path, arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """A script on two ranks with the variables of torchrun: its exit status, and all it printed.

    They are forked, as those of :mod:`ranks` are; torchrun would import torch and fuser in each. As
    there, a rank that fails ends the others, and the store is not one of theirs.
    """
    skip_without_ports()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    failure: Exception | None = None
    try:
        torch.multiprocessing.start_processes(
            _run_on_rank,
            (variables, str(script), tuple(arguments), str(folder)),
            nprocs=RANKS,
            start_method=start_method(),
        )
    except (
        torch.multiprocessing.ProcessExitedException,
        torch.multiprocessing.ProcessRaisedException,
    ) as error:
        failure = error
    printed = "".join(path.read_text() for path in sorted(folder.glob("rank*.txt")))
    return (0, printed) if failure is None else (1, f"{printed}{failure}")


def _run_on_rank(
    rank: int, variables: dict[str, str], script: str, arguments: tuple[str, ...], folder: str
) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    with Path(folder, f"rank{rank}.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path[:0] = [str(Path(script).parent), str(EXAMPLES)]
    with mock.patch.object(sys, "argv", [script, *arguments]):
        runpy.run_path(script, run_name="__main__")
