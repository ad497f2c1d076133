"""Workflows of CI: their commands are targets that work, and their matrices miss no test."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import release
import stages
from paths import ROOT, TESTS
from rooms import ROOMS

yaml = pytest.importorskip("yaml")

WORKFLOWS = ROOT / ".github" / "workflows"
# Values that only the host of the repository knows.
CONTEXT = {
    "vars.TORCH_CPU_INDEX": "",
    "vars.TORCH_NIGHTLY_INDEX": "https://nightly.invalid",
    "github.ref": "refs/heads/main",
    "github.ref_name": "v1.2.3",
    "github.event_name == 'pull_request'": "false",
    "github.server_url": "https://host.invalid",
    "github.repository": "owner/name",
}
# The environment of these tests takes the place of those that targets set up.
ENVIRONMENTS = (
    "VENV",
    "FLOORS_VENV",
    "CUDA_VENV",
    "INTEGRATIONS_VENV",
    "MEGATRON_VENV",
    "BUILD_VENV",
)
# Without conftest.py, which imports torch: its seconds would be most of what a target takes.
SMALL = (
    "tests/repository/test_samples.py::test_of_two_columns_each_value_occurs_as_often_as_others"
    " --noconftest"
)
# What of each target runs here in seconds: its variables, and the line that it prints if it works.
# `make wheel` asks the package index: test_distribution.py has its parts.
SHORT = {
    "test-stage": ({"FOLDERS": SMALL}, r"^1 passed, 0 failed"),
    "test-floors": ({"FLOORS_TESTS": SMALL}, r"^1 passed"),
    "test-cuda-build": ({"CUDA_BUILD_TESTS": SMALL}, r"^1 passed"),
    "test-integrations": ({"INTEGRATIONS_TESTS": SMALL}, r"^1 passed"),
    "test-megatron": ({"MEGATRON_TESTS": SMALL}, r"^1 passed"),
    "release-notes": ({}, r"^### Added$"),
}
# Run in another way, by the test that is named.
ELSEWHERE = {
    "wing-out": "test_the_library_without_a_wing_trains_the_same",
    "docs": "test_the_site_has_every_document",
    "wheel": "test_the_wheel_has_every_file_of_the_library_and_no_other",
    "release-check": "test_the_release_of_this_repository_lacks_at_most_its_url",
}


@dataclass(frozen=True)
class Command:
    """A line that a workflow runs, with the values of one row of its matrix."""

    workflow: str
    job: str
    line: str
    environment: Mapping[str, str]
    python: str

    @property
    def words(self) -> list[str]:
        """Of ``make lint`` these are ``make`` and ``lint``."""
        return shlex.split(self.line)

    @property
    def target(self) -> str:
        (target,) = (word for word in self.words[1:] if "=" not in word)
        return target

    @property
    def variables(self) -> dict[str, str]:
        """What the line and the environment give to variables of the Makefile."""
        pairs = (word.partition("=") for word in self.words[1:] if "=" in word)
        return {**self.environment, **{name: value for name, _, value in pairs}}


def filled(text: str, matrix: Mapping[str, str]) -> str:
    """A text with the values of its ``${{ }}``; one without a value is an error."""
    values = {**CONTEXT, **{f"matrix.{name}": value for name, value in matrix.items()}}
    return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: values[match[1]], text)


@functools.cache
def workflows() -> dict[str, Any]:
    """The contents of each workflow, by the name of its file."""
    return {path.name: yaml.safe_load(path.read_text()) for path in sorted(WORKFLOWS.iterdir())}


def jobs() -> Iterator[tuple[str, str, Any]]:
    """Each job, with the name of its workflow's file and its own."""
    for file, workflow in workflows().items():
        for name, job in workflow["jobs"].items():
            yield file, name, job


def matrix_of(job: Any) -> dict[str, list[str]]:
    """The values of a job's matrix; none if it has no matrix."""
    values: dict[str, list[str]] = job.get("strategy", {}).get("matrix", {})
    return values


@functools.cache
def commands() -> tuple[Command, ...]:
    """What all jobs run, for each row of their matrices."""
    result = []
    for file, name, job in jobs():
        matrix = matrix_of(job)
        for row in itertools.product(*matrix.values()):
            values = dict(zip(matrix, row, strict=True))
            python = ""
            for step in job["steps"]:
                python = filled(step.get("with", {}).get("python-version", python), values)
                settings = {**workflows()[file].get("env", {}), **step.get("env", {})}
                environment = {key: filled(text, values) for key, text in settings.items()}
                for line in step.get("run", "").splitlines():
                    result.append(Command(file, name, filled(line, values), environment, python))
    return tuple(result)


def ci_commands() -> list[str]:
    """The lines of .ci/run that run something."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    return [line.removeprefix("exec ") for line in lines if re.match(r"(exec )?make ", line)]


def made(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ``make`` does in this repository, with variables of the environment.

    Those of a ``make`` that runs these tests, such as TORCH, are not passed on.
    """
    outer = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "PYTEST_XDIST_WORKER", *makefile_variables()}
    ours = {name: text for name, text in os.environ.items() if name not in outer}
    return subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=ROOT,
        env={**ours, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@functools.cache
def makefile_variables() -> frozenset[str]:
    """The names to which a line of the Makefile gives a value."""
    return frozenset(re.findall(r"^(\w+) [?:]?=", (ROOT / "Makefile").read_text(), re.M))


def settings() -> str:
    """The text of pyproject.toml; Python 3.10 has no parser of TOML."""
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_workflows_were_read() -> None:
    assert set(workflows()) == {"tests.yml", "weekly.yml", "release.yml"}
    assert len(commands()) > 25
    assert {command.workflow for command in commands()} == set(workflows())


def test_every_command_is_a_target_of_the_makefile_with_variables_that_it_has() -> None:
    for command in commands():
        assert command.words[0] == "make", command
        assert set(command.variables) <= makefile_variables(), command
    for line in ci_commands():
        assert made("-n", *shlex.split(line)[1:]).returncode == 0, line


@pytest.mark.parametrize("job", sorted({(command.workflow, command.job) for command in commands()}))
def test_every_target_exists_with_the_values_of_each_row(job: tuple[str, str]) -> None:
    for command in commands():
        if (command.workflow, command.job) == job:
            run = made("-n", *command.words[1:], **command.environment)
            assert run.returncode == 0, (command, run.stderr)
            assert run.stdout.strip(), command


def test_every_target_that_a_workflow_names_is_run_by_a_test() -> None:
    targets = {command.target for command in commands()}
    assert targets == {*SHORT, *ELSEWHERE}
    tests = "".join(path.read_text() for path in TESTS.glob("[dr]*/test_*.py"))
    assert [name for name in ELSEWHERE.values() if f"def {name}(" not in tests] == []


@pytest.mark.parametrize("target", SHORT)
def test_the_commands_of_a_target_work(target: str) -> None:
    if not Path(sys.prefix, "bin", "python").exists():
        pytest.skip(f"{sys.prefix} has no bin/python, which targets run.")
    pytest.importorskip("xdist")
    variables, printed = SHORT[target]
    # As if the environments were newer than the files from which they are made.
    kept = [word for name in ENVIRONMENTS for word in ("-o", f"{sys.prefix}/.ready")]
    given = {**dict.fromkeys(ENVIRONMENTS, sys.prefix), **variables}
    words = [f"{name}={value}" for name, value in given.items()]
    run = made(*kept, target, *words, PYTEST_XDIST_AUTO_NUM_WORKERS="1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(printed, run.stdout, re.M), run.stdout


def test_every_wing_and_product_is_left_out_once() -> None:
    rooms = workflows()["weekly.yml"]["jobs"]["rooms"]
    assert set(matrix_of(rooms)["wing"]) == {room.name for room in ROOMS if room.kind != "core"}


def test_the_library_without_a_wing_trains_the_same() -> None:
    script = [sys.executable, "tests/wing_out.py", "cuts", "--seconds", "0"]
    run = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 trainings of a dense block have the same losses." in run.stdout


def test_the_linters_of_the_target_pass() -> None:
    """Those of Ruff; mypy takes a minute, and test_typed_script.py runs it with its options."""
    pytest.importorskip("ruff")
    lines = made("-n", "-o", ".venv/.ready", "lint").stdout.splitlines()
    assert lines == [f".venv/bin/{' '.join(words)}" for words in stages.LINTERS]
    for line in lines[:2]:
        options = [*line.split()[1:], "--no-cache"]
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *options], cwd=ROOT, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout


def test_nightly_torch_without_its_index_is_refused_with_a_sentence() -> None:
    refused = made("-n", "test", "TORCH=nightly")
    assert refused.returncode != 0
    assert "TORCH=nightly needs TORCH_INDEX=" in refused.stderr
    taken = made("-n", "test", "TORCH=nightly", "TORCH_INDEX=https://nightly.invalid").stdout
    (install,) = (line for line in taken.splitlines() if " pip install " in line)
    assert "--extra-index-url https://nightly.invalid" in install
    assert '"torch>=2.11.dev0"' in install


def test_ci_and_the_workflows_call_the_same_targets() -> None:
    targets = {line.split()[1] for line in ci_commands()}
    targets = targets - {"test"} | {"test-stage"}  # of which `make test` runs all
    everywhere = {command.target for command in commands() if command.workflow == "tests.yml"}
    # The others need another Python or torch; a test of tests/docs builds the site.
    assert everywhere - targets == {"test-floors", "test-cuda-build", "docs"}
    assert targets <= everywhere


def test_the_tests_run_with_every_python_and_torch_that_the_metadata_names() -> None:
    (matrix,) = (matrix_of(job) for _, name, job in jobs() if name == "cpu")
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', settings())
    assert matrix["python"] == versions
    (oldest_python,) = re.findall(r'^requires-python = ">=(.*)"$', settings(), re.M)
    (oldest_torch,) = re.findall(r'"torch>=(.*?)"', settings())
    assert versions[0] == oldest_python
    assert matrix["torch"] == [f"{oldest_torch}.0", "newest"]
    pythons = {command.job: command.python for command in commands()}
    assert pythons["floors"] == oldest_python
    assert set(pythons.values()) - {""} <= set(versions)


@pytest.mark.parametrize("workflow", ["tests.yml", "weekly.yml"])
def test_the_jobs_of_a_workflow_are_the_stages_of_make_test(workflow: str) -> None:
    found = [c for c in commands() if c.workflow == workflow and c.target == "test-stage"]
    rows = Counter((c.python, c.variables.get("TORCH", ""), c.variables["STAGE"]) for c in found)
    assert {stage for _, _, stage in rows} == set(stages.STAGES)
    assert set(rows.values()) == {1}
    for python, torch, stage in rows:
        if stage != "first":
            assert {(python, torch, job) for job in stages.STAGES[1:]} <= rows.keys()


def test_actions_are_pinned_to_commits_each_to_one() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS.iterdir():
        for line in path.read_text().splitlines():
            if "uses:" in line:
                pinned = r" *- uses: ([\w./-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)"
                match = re.fullmatch(pinned, line)
                assert match, line
                pins.setdefault(match[1], set()).add(match[2])
    assert {action: commits for action, commits in pins.items() if len(commits) != 1} == {}
    assert len(pins) >= 4


def test_only_the_job_that_publishes_may_do_more_than_read() -> None:
    for file, workflow in workflows().items():
        assert workflow["permissions"] == {"contents": "read"}, file
    more = {(file, name): job["permissions"] for file, name, job in jobs() if "permissions" in job}
    assert more == {("release.yml", "publish"): {"id-token": "write"}}
    for file, name, job in jobs():
        assert job["timeout-minutes"] <= 120, (file, name)
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, (file, name)


def test_a_value_from_outside_is_in_no_shell_line() -> None:
    """A branch or a tag may be named like a command: such values come by the environment."""
    for file, name, job in jobs():
        for step in job["steps"]:
            assert not re.search(r"\$\{\{ (?!matrix\.)", step.get("run", "")), (file, name)


def test_a_tag_is_checked_before_anything_is_published() -> None:
    release_jobs = workflows()["release.yml"]["jobs"]
    # YAML 1.1 reads the key `on` as a truth value.
    assert workflows()["release.yml"][True] == {"push": {"tags": ["v*"]}}
    lines = [step["run"] for step in release_jobs["build"]["steps"] if "run" in step]
    assert lines == ["make release-check", "make release-notes", "make wheel"]
    assert release_jobs["publish"]["needs"] == "build"
    (check,) = (command for command in commands() if command.target == "release-check")
    assert check.environment["TAG"] == "v1.2.3"
    assert check.environment["REPOSITORY"] == "https://host.invalid/owner/name"


def test_issue_templates_and_the_citation_are_read_as_forms() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.stem != "config":
            assert {"name", "description", "body"} <= form.keys(), path.name
            names = [field["id"] for field in form["body"]]
            assert len(set(names)) == len(names) >= 2, path.name
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    held = release.Release.of(ROOT)
    assert citation["version"] == held.version
    assert str(citation["date-released"]) == held.dates[held.version]
    (author,) = re.findall(r'^authors = \[\{ name = "(.*)" \}\]$', settings(), re.M)
    assert citation["authors"] == [{"name": author}]
    (expression,) = re.findall(r'^license = "(.*)"$', settings(), re.M)
    assert citation["license"] == expression


def test_owners_are_named_for_files_that_there_are() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert rows[0][0] == "*"
    for pattern, *owners in rows:
        assert list(ROOT.glob(pattern.lstrip("/"))), pattern
        assert owners, pattern
        assert all(re.fullmatch(r"@[\w-]+(/[\w-]+)?", owner) for owner in owners), owners


def test_the_page_for_those_who_change_the_repository_is_short_and_true() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    commands_named = re.findall(r"`make ([\w-]+)", text)
    assert len(commands_named) >= 5
    for target in commands_named:
        assert made("-n", target).returncode == 0, target
    for name in re.findall(r"`((?:fuser|tests|docs|benchmarks|examples)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name
