"""The stages of ``make test``: each test file has one, and a failure of the first ends the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import stages
from paths import ROOT, TESTS
from stages import Command, Runner

GOOD = "print('3 passed, 1 skipped in 0.10s')"
BAD = "print('FAILED tests/test_x.py::test_y - AssertionError'); " + (
    "print('1 failed, 2 passed in 0.10s'); raise SystemExit(1)"
)


class Given(Runner):
    """Runs short programs in the place of linters and tests, and notes which it ran."""

    def __init__(self, logs: Path, programs: dict[str, str]) -> None:
        super().__init__(logs, ())
        self.programs = programs
        self.workers: dict[str, str] = {}

    def linters(self) -> list[Command]:
        return [self.tests("lint", (), "1")]

    def tests(self, name: str, places: object, workers: str = "auto") -> Command:
        self.workers[name] = workers
        words = [sys.executable, "-c", self.programs.get(name, GOOD)]
        return Command(name, words, dict(os.environ), self.logs / f"{name}.log")


def test_each_test_file_is_in_one_stage_and_none_is_left_out() -> None:
    counts = Counter(path for stage in stages.STAGES for path in stages.files_of(stage))
    every = {path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py")}
    left_out = {path for path in every if path.startswith(stages.ELSEWHERE)}
    assert counts == dict.fromkeys(every - left_out, 1)
    for name in stages.ELSEWHERE:
        assert list((ROOT / name).glob("test_*.py"))


def test_every_place_in_the_lists_of_stages_is_there() -> None:
    for place in (*stages.FIRST, *stages.NOT_FIRST, *stages.OF_MACHINES, *stages.ELSEWHERE):
        assert (ROOT / place).exists(), place


def test_processes_of_a_stage_keep_what_python_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    runner = Runner(tmp_path, ())
    for command in (*runner.linters(), runner.tests("first", ["tests/repository"])):
        assert "PYTHONDONTWRITEBYTECODE" not in command.environment
        assert command.environment["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize(
    ("path", "stage"),
    [
        ("tests/runtime/test_call_counts.py", "first"),
        ("tests/repository/test_prose.py", "first"),
        ("tests/repository/test_workflows.py", "machines"),
        ("tests/te/test_te_ranks.py", "machines"),
        ("tests/sharded/test_ranks.py", "machines"),
        ("tests/kernels/test_cuda_nvfp4.py", "machines"),
        ("tests/plan/test_lossy_inputs.py", "machines"),  # it runs pipelines on kernels
        ("tests/plan/test_planner.py", "machines"),  # it starts a process
        ("tests/plan/test_fusions.py", "plain"),
        ("tests/ops/test_ops.py", "plain"),
    ],
)
def test_files_that_start_processes_are_in_the_stage_of_machines(path: str, stage: str) -> None:
    assert stages.stage_of(path) == stage


@pytest.mark.parametrize(
    ("used", "workers"), [({4}, ("1", "2")), ({4, 9}, ("1", "2")), (set(range(7)), ("3", "7"))]
)
def test_jobs_side_by_side_have_workers_for_the_cores_that_this_process_may_use(
    used: set[int], workers: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.os, "sched_getaffinity", lambda process: used, raising=False)
    runner = Given(tmp_path, {})
    assert stages.run(runner, None, ()) == 0
    assert runner.workers == dict(
        zip(("plain", "machines"), workers, strict=True), first="auto", lint="1"
    )
    assert stages.run(runner, "plain", ()) == 0
    assert runner.workers["plain"] == "auto"  # alone


def test_a_command_of_tests_has_the_workers_that_it_is_given(tmp_path: Path) -> None:
    runner = Runner(tmp_path, ["--full"])
    for given, words in (((), ["-n", "auto"]), (("3",), ["-n", "3"])):
        command = runner.tests("plain", ["tests/plan"], *given)
        assert list(command.words[1:5]) == ["-m", "pytest", *words]
        assert list(command.words[-2:]) == ["--full", "tests/plan"]


def test_clones_share_what_mypy_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MYPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    for command in Runner(tmp_path, ()).linters():
        assert command.environment["MYPY_CACHE_DIR"] == str(tmp_path / "machine" / "fuser-mypy")
    monkeypatch.setenv("MYPY_CACHE_DIR", "another")
    assert Runner(tmp_path, ()).linters()[0].environment["MYPY_CACHE_DIR"] == "another"


def test_a_run_that_succeeds_has_all_stages_and_sums_their_tests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Given(tmp_path, {})
    assert stages.run(runner, None, ()) == 0
    assert [command.name for command in runner.done] == ["lint", "first", "plain", "machines"]
    printed = capsys.readouterr().out
    assert "   plain | 3 passed, 1 skipped in 0.10s" in printed
    assert printed.endswith("12 passed, 0 failed, 4 skipped\n")


@pytest.mark.parametrize("name", ["lint", "first"])
def test_a_failure_of_the_first_stage_ends_the_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Given(tmp_path, {name: BAD})
    assert stages.run(runner, None, ()) == 1
    assert [command.name for command in runner.done] == ["lint", "first"]
    printed = capsys.readouterr().out
    assert "The first stage failed: the other tests did not run." in printed
    assert "FAILED tests/test_x.py::test_y - AssertionError" in printed.partition("exit status")[2]


@pytest.mark.parametrize("name", ["plain", "machines"])
def test_a_job_that_fails_lets_the_other_end_and_fails_the_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Given(tmp_path, {name: BAD})
    assert stages.run(runner, None, ()) == 1
    assert len(runner.done) == 4
    assert capsys.readouterr().out.endswith("11 passed, 1 failed, 3 skipped\n")


def test_one_stage_or_folders_run_alone(tmp_path: Path) -> None:
    for stage, folders, names in (
        ("first", (), ["lint", "first"]),
        ("plain", (), ["plain"]),
        (None, ("tests/plan",), ["lint", "folders"]),
        ("first", ("tests/plan",), ["folders"]),
    ):
        runner = Given(tmp_path, {})
        assert stages.run(runner, stage, folders) == 0
        assert [command.name for command in runner.done] == names


def test_linters_that_fail_end_a_run_of_folders(tmp_path: Path) -> None:
    runner = Given(tmp_path, {"lint": BAD})
    assert stages.run(runner, None, ("tests/plan",)) == 1
    assert [command.name for command in runner.done] == ["lint"]


def test_a_run_that_is_ended_ends_what_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    script = (
        "import stages, sys\nfrom pathlib import Path\nfrom stages import Command, Runner\n"
        f"runner = Runner(Path({str(tmp_path)!r}), ())\n"
        f"words = [sys.executable, '-c', {program!r}]\n"
        f"runner.side_by_side([Command('x', words, {{}}, Path({str(tmp_path / 'log')!r}))])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=TESTS, stderr=subprocess.DEVNULL)
    while not (child.exists() and child.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() != 0
    running = int(child.read_text())
    while Path(f"/proc/{running}").exists():
        status = Path(f"/proc/{running}/stat").read_text().rpartition(")")[2].split()[0]
        if status == "Z":
            break
        time.sleep(0.05)
