"""Scripts in tests: what they print, how they refuse options, and runs under torchrun."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from needs import skip_without_ports
from paths import EXAMPLES

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
