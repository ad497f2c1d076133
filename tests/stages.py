"""The stages of ``make test``: what a change is told first, and the two jobs that follow it.

    python tests/stages.py                       # first, then plain and machines side by side
    python tests/stages.py --stage first         # one of them: CI has a job for each
    python tests/stages.py --folders tests/plan  # the linters, and some folders

``first`` has what fails for most changes that fail: linters, types, rules of the repository, counts
of calls, sentences, documents. If it fails, nothing else runs. ``plain`` has the tests that need
torch alone; ``machines`` those that start processes: ranks, compilers, the emulator, scripts, the
site and the archives. Side by side, ``machines``, which takes longer and whose tests wait for what
they start, has as many workers as there are cores, at least two, and ``plain`` half as many: with
five workers on two cores ``machines`` took an eighth more CPU than with three. Each line that a job
prints has its name; the log of each is kept until the end, where the failures and the seconds of
each stage are.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"

LINTERS = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
# Rules, texts and counts: seconds each, and most of what fails.
FIRST = (
    "tests/arguments/test_every_argument.py",
    "tests/docs/test_documents.py",
    "tests/docs/test_messages.py",
    "tests/repository",
    "tests/runtime/test_call_counts.py",
)
# Of those folders: what starts make, mypy, pytest or a build.
NOT_FIRST = (
    "tests/repository/test_affected.py",
    "tests/repository/test_distribution.py",
    "tests/repository/test_other_machines.py",
    "tests/repository/test_samples.py",
    "tests/repository/test_typed_script.py",
    "tests/repository/test_workflows.py",
)
# Folders of which every test starts something, and modules with which a test of another does.
OF_MACHINES = ("tests/docs", "tests/kernels", "tests/repository", "tests/sharded")
STARTING = frozenset({"emulator", "needs", "nvrtc", "ranks", "subprocess"})
# Those have targets of their own.
ELSEWHERE = ("tests/gpu", "tests/integrations")
STAGES = ("first", "plain", "machines")

PASSED, NO_TESTS = 0, 5
"""Exit statuses of pytest."""
OUTCOME = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


@functools.cache
def files() -> tuple[str, ...]:
    """The test files that ``make test`` runs, as paths from the repository's root."""
    paths = (path.relative_to(ROOT).as_posix() for path in sorted(TESTS.rglob("test_*.py")))
    return tuple(path for path in paths if not path.startswith(tuple(f"{f}/" for f in ELSEWHERE)))


def _is_below(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _imports(path: Path) -> frozenset[str]:
    """The modules that a file imports, by the first part of their names."""
    text = path.read_text(encoding="utf-8")
    return frozenset(re.findall(r"^\s*(?:import|from) (\w+)", text, re.M))


@functools.cache
def starting() -> frozenset[str]:
    """The modules with which a test starts something: helpers of tests that import such too."""
    helpers = {path.stem: _imports(path) for path in (TESTS / "cases").glob("*.py")}
    found = set(STARTING)
    while more := {name for name, used in helpers.items() if used & found} - found:
        found |= more
    return frozenset(found)


@functools.cache
def stage_of(path: str) -> str:
    """The stage that has a test file."""
    if _is_below(path, FIRST) and path not in NOT_FIRST:
        return "first"
    is_of_machines = _is_below(path, OF_MACHINES) or _imports(ROOT / path) & starting()
    return "machines" if is_of_machines else "plain"


def files_of(stage: str) -> list[str]:
    """The test files of a stage."""
    return [path for path in files() if stage_of(path) == stage]


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def workers_side_by_side() -> dict[str, str]:
    """The numbers of workers of the two jobs that share the cores."""
    return {"plain": str(max(1, cores() // 2)), "machines": str(max(2, cores()))}


@dataclass
class Command:
    """A program that runs beside others; its lines are printed as they come, with its name."""

    name: str
    words: Sequence[str]
    environment: dict[str, str]
    log: Path
    status: int = -1
    seconds: float = 0.0

    def run(self, started: list[subprocess.Popen[str]]) -> None:
        """Run it to its end; ``started`` gets the process, so that another thread can end it."""
        begin = time.perf_counter()
        process = subprocess.Popen(
            self.words,
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        with self.log.open("w", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                print(f"{self.name:>8} | {line.rstrip()}", flush=True)
        self.status = process.wait()
        self.seconds = time.perf_counter() - begin

    @property
    def is_good(self) -> bool:
        return self.status == PASSED

    def outcomes(self) -> Counter[str]:
        """How many tests passed, failed and were skipped, by pytest's last line."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        counts: Counter[str] = Counter()
        for line in reversed(lines):
            if re.search(r"\bin \d[\d.:s hm()]*", line) and OUTCOME.search(line):
                for count, outcome in OUTCOME.findall(line):
                    counts["failed" if outcome.startswith("error") else outcome] += int(count)
                break
        return counts


class Runner:
    """Runs commands side by side, and says at the end what each took and whether it failed.

    Parameters
    ----------
    logs
        A folder for what each command prints.
    options
        Further options of pytest.
    """

    def __init__(self, logs: Path, options: Sequence[str]) -> None:
        self.logs = logs
        self.options = options
        self.done: list[Command] = []

    def linters(self) -> list[Command]:
        """A command for each linter, of the environment that runs this script."""
        folder = Path(sys.executable).parent
        return [
            self._command(" ".join(words[:2]), [str(folder / words[0]), *words[1:]])
            for words in LINTERS
        ]

    def tests(self, name: str, places: Sequence[str], workers: str = "auto") -> Command:
        """A command that runs tests; by default on as many workers as there are cores."""
        words = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "worksteal"]
        return self._command(name, [*words, *self.options, *places])

    def _command(self, name: str, words: Sequence[str]) -> Command:
        log = self.logs / f"{name.replace(' ', '-')}.log"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # Some hundred processes would compile each module that they import, and each test file.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # Clones on one machine share what mypy knows: it compares files by their contents.
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        environment.setdefault("MYPY_CACHE_DIR", str(Path(base, "fuser-mypy")))
        return Command(name, words, environment, log)

    def side_by_side(self, commands: Sequence[Command]) -> bool:
        """Run commands at the same time; whether all succeed."""
        started: list[subprocess.Popen[str]] = []
        threads = [threading.Thread(target=c.run, args=(started,), daemon=True) for c in commands]
        with _ending(started):
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # an interrupt is seen between two of them
        self.done += commands
        return all(command.is_good for command in commands)

    def summary(self) -> int:
        """Print what failed and what each command took; returns the exit status."""
        counts: Counter[str] = Counter()
        for command in self.done:
            if not command.is_good:
                print(f"\n{command.name} failed, with exit status {command.status}:")
                print("\n".join(_end(command.log)))
            counts += command.outcomes()
        print()
        for command in self.done:
            print(f"{command.name:>12} {'passed' if command.is_good else 'FAILED':6} ", end="")
            print(f"{command.seconds:6.0f} s")
        if counts:
            named = (f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))
            print(", ".join(named))
        return 0 if all(command.is_good for command in self.done) else 1


def _end(log: Path) -> list[str]:
    """The failures that pytest lists, or the last lines of another program."""
    lines = log.read_text(encoding="utf-8").splitlines()
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return named or lines[-40:]


@contextlib.contextmanager
def _ending(started: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """End processes, with all that they started, when the block is left early."""

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stopped)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


def run(runner: Runner, stage: str | None, folders: Sequence[str]) -> int:
    """Run a stage, some folders, or everything; returns the exit status."""
    if folders:
        lints = [] if stage else runner.linters()
        if not lints or runner.side_by_side(lints):
            runner.side_by_side([runner.tests("folders", folders)])
        return runner.summary()
    if stage in (None, "first"):
        first = [*runner.linters(), runner.tests("first", files_of("first"))]
        if not runner.side_by_side(first) and stage is None:
            print("\nThe first stage failed: the other tests did not run.")
            return runner.summary()
    jobs = [name for name in STAGES[1:] if stage in (None, name)]
    workers = workers_side_by_side() if len(jobs) > 1 else {}
    runner.side_by_side(
        [runner.tests(name, files_of(name), workers.get(name, "auto")) for name in jobs]
    )
    return runner.summary()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", choices=STAGES, help="this one alone")
    parser.add_argument(
        "--folders", nargs="*", default=[], metavar="PATH", help="these tests; no stages"
    )
    parser.add_argument("--list", action="store_true", help="print the files of each stage")
    parser.add_argument("--full", action="store_true", help="all parameters of sampled tests")
    options, of_pytest = parser.parse_known_args(arguments)
    if options.list:
        for stage in STAGES:
            if options.stage in (None, stage):
                print(f"{stage}: {' '.join(files_of(stage))}")
        return 0
    logs = Path(tempfile.mkdtemp(prefix="fuser-tests-"))
    try:
        given = [*(["--full"] if options.full else []), *of_pytest]
        return run(Runner(logs, given), options.stage, options.folders)
    finally:
        shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
