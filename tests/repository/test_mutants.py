"""The list of mutants fits the sources, and the script that plants them says what it found."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from mutants import AREAS, Mutant, run
from paths import ROOT
from scripts import refusal_by

MUTANTS = [(area, mutant) for area, mutants in AREAS.items() for mutant in mutants]


@pytest.mark.parametrize("area", AREAS)
def test_every_mutant_has_its_one_place_in_the_source_and_compiles(area: str) -> None:
    for mutant in AREAS[area]:
        text = (ROOT / "fuser" / mutant.file).read_text()
        mutated = mutant.applied(text)
        assert mutated != text, mutant.mistake
        if mutant.file.endswith(".py"):
            ast.parse(mutated)


@pytest.mark.parametrize("area", AREAS)
def test_every_mutant_names_tests_that_there_are(area: str) -> None:
    for mutant in AREAS[area]:
        for test in mutant.files:
            path, _, name = test.partition("::")
            assert re.search(rf"^def {name or 'test_.*'}\(", (ROOT / path).read_text(), re.M), test


def test_no_mutant_is_listed_twice() -> None:
    mistakes = [mutant.mistake for _, mutant in MUTANTS]
    changes = [(mutant.file, mutant.old, mutant.new) for _, mutant in MUTANTS]
    assert len(set(mistakes)) == len(set(changes)) == len(MUTANTS) >= 70


# -- the script -------------------------------------------------------------------

ADD = "def add(a, b):\n    return a + b\n"
TEST = """
import pytest
from fuser.sums import add

@pytest.mark.parametrize("b", [0, 2])
def test_add(b):
    assert add(1, b) == 1 + b
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository with one function and its test, in the place of this one."""
    root = tmp_path / "repository"
    for file, text in {"fuser/sums.py": ADD, "tests/test_sums.py": TEST}.items():
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text(text)
    monkeypatch.setattr(run, "ROOT", root)
    return root


def mutant(**changes: Any) -> Mutant:
    defaults = {
        "mistake": "the sum is a difference",
        "file": "sums.py",
        "old": "a + b",
        "new": "a - b",
        "tests": "test_sums.py::test_add",
    }
    return Mutant(**(defaults | changes))


def examine(
    mutants: tuple[Mutant, ...], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """The script's exit status for some mutants, and the report that it wrote."""
    monkeypatch.setattr(run, "AREAS", {"sums": mutants})
    out = repository.parent / "out"
    status = run.main(["--out", str(out)])
    assert (repository / "fuser" / "sums.py").read_text() == ADD, "the checkout was edited"
    return status, (out / "mutants.md").read_text() if out.exists() else ""


def test_each_mutant_is_killed_by_a_named_test_or_survives_or_is_argued_or_is_stale(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutants = (
        mutant(),
        mutant(mistake="the sum is rounded", new="round(a + b)"),
        mutant(mistake="the sum is turned", new="b + a", survives="Sums commute."),
        mutant(mistake="the product is a sum", old="a * b"),
        mutant(mistake="the sum is wherever", old="a"),
        mutant(mistake="the sum is no expression", new="a +"),
    )
    status, written = examine(mutants, repository, monkeypatch)
    printed = capsys.readouterr().out
    assert status == 1
    assert re.search(r"\d/6  killed +\d+\.\d s  sums: the sum is a difference", printed)
    assert "| sums | 6 | 1 | 1 | 1 | 3 |" in printed
    assert "50.0% of those that a test can notice are killed." in printed
    assert "survived: the sum is rounded (sums.py)" in printed
    assert "| the sum is a difference | sums.py | test_sums.py::test_add[2] |" in written
    assert "| the sum is turned | sums.py | **argued** Sums commute. |" in written
    assert "**stale** sums.py has 'a * b' 0 times; it is to be once." in written
    assert re.search(r"\*\*stale\*\* sums.py has 'a' \d times; it is to be once.", written)
    assert "| the sum is no expression | sums.py | **stale** " in written


def test_a_run_in_which_all_are_killed_or_argued_succeeds(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "passes_without", lambda chosen, tree: True)
    status, written = examine((mutant(),), repository, monkeypatch)
    assert status == 0
    assert "100.0%" in written


def test_tests_that_fail_without_a_mistake_are_named_and_nothing_is_planted(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "tests" / "test_sums.py").write_text(TEST + "    assert b\n")
    status, written = examine((mutant(),), repository, monkeypatch)
    assert status == 2
    assert "fails without any mistake: test_sums.py::test_add[0]" in capsys.readouterr().out
    assert not written


def test_a_test_that_does_not_end_has_failed(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "TIMEOUT", 0.01)
    tree = run.Tree(repository.parent / "tree")
    code, printed = tree.test(["tests/test_sums.py"], "")
    assert code == run.FAILED
    assert list(run.failures(printed)) == ["(no end after 0.01 s)"]


def test_only_chooses_by_area_mistake_and_file_and_list_runs_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for pattern, count in ((".", len(MUTANTS)), ("^launch cache$", len(AREAS["launch cache"]))):
        assert run.main(["--list", "--only", pattern]) == 0
        assert capsys.readouterr().out.endswith(f"{count} mutants.\n")
    assert run.main(["--list", "--only", "launch_cache"]) == 0
    assert "cuda/launch_cache.py" in capsys.readouterr().out
    assert run.main(["--list", "--only", "no such thing"]) == 2
    assert "matches 'no such thing'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--jobs", "0"], "--jobs is 0; it must be at least 1."),
        (["--only", "("], "--only '(' is no regular expression"),
    ],
)
def test_a_bad_option_of_the_script_is_a_sentence(options: list[str], said: str) -> None:
    assert said in refusal_by(run.main, options)
