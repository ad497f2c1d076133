"""The list of mutants fits the sources, and the script that plants them says what it found."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from mutants import AREAS, Mutant, place, run
from paths import ROOT
from scripts import refusal_by

MUTANTS = [(area, mutant) for area, mutants in AREAS.items() for mutant in mutants]
FILES = sorted({mutant.file for _, mutant in MUTANTS if mutant.file.endswith(".py")})


@functools.cache
def function_of(mutant: Mutant, text: str) -> str:
    """The text of the function in which the mutant is planted, with the mistake in it."""
    mutated = mutant.applied(text)
    assert mutated != text, mutant.mistake
    more = len(mutated) - len(text)
    is_python = mutant.file.endswith(".py")
    parts = [
        mutated[start : end + more]
        for start, end in place.source_of(text, is_python).scopes[mutant.where].ranges
        if mutated[:start] == text[:start] and mutated[end + more :] == text[end:]
    ]
    assert len(parts) == 1, f"{mutant.mistake}: it is not planted in {mutant.where} alone"
    return parts[0]


@pytest.mark.parametrize("area", AREAS)
def test_every_mutant_has_its_one_place_in_the_source_and_compiles(area: str) -> None:
    for mutant in AREAS[area]:
        function = function_of(mutant, (ROOT / "fuser" / mutant.file).read_text())
        if mutant.file.endswith(".py"):
            ast.parse(f"if True:\n{function}" if function[0] == " " else function)


@pytest.mark.parametrize("area", AREAS)
def test_every_mutant_names_tests_that_there_are(area: str) -> None:
    for mutant in AREAS[area]:
        for test in mutant.files:
            path, _, name = test.partition("::")
            assert re.search(rf"^def {name or 'test_.*'}\(", (ROOT / path).read_text(), re.M), test


def test_the_name_of_a_test_file_occurs_once() -> None:
    """A mutant has its tests by their files' names, and pytest imports one file of a name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_mutant_is_listed_twice() -> None:
    mistakes = [mutant.mistake for _, mutant in MUTANTS]
    changes = [(mutant.file, mutant.where, mutant.old, mutant.new) for _, mutant in MUTANTS]
    assert len(set(mistakes)) == len(set(changes)) == len(MUTANTS) >= 70


def renamed(text: str, parts: Iterable[tuple[int, int, set[str]]]) -> str:
    """The text with other names in some parts of it."""
    written, at = [], 0
    for start, end, names in sorted(parts):
        tokens = place.python_tokens(text, 0, start, end)
        for token, is_plain in zip(tokens, place.plain_names(tokens), strict=True):
            if is_plain and token.text in names:
                written += [text[at : token.end], "_of_now"]
                at = token.end
    return "".join([*written, text[at:]])


@pytest.mark.parametrize("folder", sorted({file.rpartition("/")[0] for file in FILES}))
def test_a_mutant_is_planted_where_all_local_variables_have_other_names(folder: str) -> None:
    for file in (file for file in FILES if file.rpartition("/")[0] == folder):
        text = (ROOT / "fuser" / file).read_text()
        scopes = place.source_of(text, is_python=True).scopes
        of_functions = {part for name in scopes for part in name.split(".")}
        mutants = [mutant for _, mutant in MUTANTS if mutant.file == file]
        parts = []
        for nodes in {tuple(scopes[mutant.where].nodes) for mutant in mutants}:
            # Functions in one function share its variables.
            whole = min((name for name in scopes if tuple(scopes[name].nodes) == nodes), key=len)
            names = scopes[whole].bound - of_functions
            parts += [(start, end, names) for start, end in scopes[whole].ranges]
        now = renamed(text, parts)
        for mutant in mutants:
            function = function_of(mutant, text)
            names = scopes[mutant.where].bound - of_functions
            expected = renamed(function, [(0, len(function), names)])
            assert function_of(mutant, now) == expected, mutant.mistake


# -- places -----------------------------------------------------------------------

FUNCTION = """
LIMIT = 8

class Sums:
    most = LIMIT

    def of(self, rows, weights, scale=1.0):
        total = sum(rows)
        for row in rows:
            if row > self.most and weights[row]:
                total += weights[row]  # heavy
                self.seen.append(row)
        return f"{total * scale:.2f} of {LIMIT!r}"
"""


def planted(text: str, old: str, new: str, where: str = "Sums.of") -> str:
    """What the lines that changed are after a mistake, without their common indentation."""
    before, after = text.splitlines(), place.planted(text, True, where, old, new).splitlines()
    ast.parse("\n".join(after))
    while before and after and before[0] == after[0]:
        before, after = before[1:], after[1:]
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return textwrap.dedent("\n".join(after))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("sum(rows)", "max(rows)", "total = max(rows)"),
        ("sum ( rows, # all\n)", "max(rows)", "total = max(rows)"),
        ("row>self.most and", "not", "if not weights[row]:"),
        ("f'{total*scale:.2f} of {LIMIT!r}'", "total", "return total"),
        ("total * scale", "total", 'return f"{total:.2f} of {LIMIT!r}"'),
    ],
)
def test_lines_comments_spaces_and_quotes_of_a_place_make_no_difference(
    old: str, new: str, line: str
) -> None:
    assert planted(FUNCTION, old, new) == line


def test_statements_are_planted_at_the_indentation_of_their_place() -> None:
    assert planted(FUNCTION, "self.seen.append(row)", "if row:\n    self.seen.append(row)") == (
        "if row:\n    self.seen.append(row)"
    )
    old = "        self.seen.append(row)\nreturn f'{total * scale:.2f} of {LIMIT!r}'"
    new = "        pass\n    self.seen.append(row)\nreturn total"
    assert planted(FUNCTION, old, new) == ("        pass\n    self.seen.append(row)\nreturn total")
    assert planted(FUNCTION, "self.seen.append(row)", "") == ""


def test_a_place_is_found_after_a_formatter_and_a_comment_came_to_it() -> None:
    text = FUNCTION.replace(
        "total = sum(rows)",
        "total = (\n    # of all rows\n    sum(\n        rows,\n    )\n)",
    )
    assert planted(text, "total = sum(rows)", "total = max(rows)") == "total = max(rows)"
    assert planted(text, "total = sum", "total = 2 * sum") == "total = 2 * sum( rows )"
    assert planted(text, "sum(rows)", "max(rows)") == "total = ( max(rows) )"
    text = FUNCTION.replace("total += weights[row]", "total += weights[\n  # its own\n  row\n]")
    assert planted(text, "total += weights[row]", "total += 1") == "total += 1  # heavy"


def test_local_variables_of_other_names_are_found_and_have_them_in_the_mistake() -> None:
    text = FUNCTION.replace("total", "result").replace("rows", "row_numbers").replace("row ", "r ")
    text = text.replace("[row]", "[r]").replace("(row)", "(r)")
    assert planted(text, "total = sum(rows)", "total = len(rows)") == "result = len(row_numbers)"
    old, new = "total += weights[row]\nself.seen.append(row)", "self.seen.append(total)"
    assert planted(text, old, new) == "self.seen.append(result)"
    # A name that is no local variable is what it was, and one name is not two.
    for old in ("self.most2", "total = total(rows)", "rows += weights[rows]"):
        with pytest.raises(LookupError, match=f"{re.escape(repr(old))} 0 times in Sums.of"):
            planted(text, old, "1")
    # Attributes and keywords of calls have no other names.
    text = "def f(x, size):\n    return g(x.size, size=size)\n"
    now = text.replace(", size)", ", n)").replace("=size", "=n")
    assert planted(now, "x.size, size=size", "size, size=x.size", "f") == "return g(n, size=x.size)"


def test_a_name_that_is_gone_and_not_in_the_replaced_text_makes_a_mutant_stale() -> None:
    text = FUNCTION.replace("scale", "factor")
    with pytest.raises(LookupError, match=r"^has no scale in Sums.of any more"):
        planted(text, "total = sum(rows)", "total = sum(rows) * scale")
    assert planted(text, "total = sum(rows)", "total = [r for r in rows if r < LIMIT]")
    assert planted(text, "sum(rows)", "max(map(lambda r: -r, rows))")


@pytest.mark.parametrize(
    ("old", "where", "said"),
    [
        ("weights[row]", "Sums.of", "has 'weights[row]' 2 times in Sums.of; it is to be once."),
        ("row", "Sums.of", "has 'row' 5 times in Sums.of; it is to be once."),
        ("sum(rows)", "Sums", "has 'sum(rows)' 0 times in Sums; it is to be once."),
        ("sum(rows)", "", "has 'sum(rows)' 0 times outside of functions; it is to be once."),
        ("sum(rows)", "Sums.in", "has no Sums.in; it was renamed or is gone."),
    ],
)
def test_a_place_that_is_not_one_is_a_sentence(old: str, where: str, said: str) -> None:
    with pytest.raises(LookupError) as refusal:
        planted(FUNCTION, old, "x", where)
    assert refusal.value.args == (said,)


def test_classes_and_modules_are_places_without_their_functions() -> None:
    assert planted(FUNCTION, "LIMIT", "9", "Sums") == "most = 9"
    assert planted(FUNCTION, "LIMIT = 8", "LIMIT = 9", "") == "LIMIT = 9"
    text = FUNCTION.replace("    def", "    @cached\n    def")
    assert planted(text, "@cached\ndef", "@len\ndef") == "@len"


KERNEL = """
#include <x.h>
namespace fuser {
constexpr int kWarp = 32;
template <int kRows = 2>
struct Tile {
    int first;
    __device__ explicit Tile(int row) : first(row) {}
    template <typename T>
    __device__ T at(const T* x, int i) const { return x[first + i]; }
};
extern "C" __global__ void __launch_bounds__(256) kernel(float* out, int count) {
    const int i = threadIdx.x;  // a lane
    if (i < count) {
#pragma unroll
        for (int row = 0; row < 4; ++row) { out[i] += row; }
    #pragma unroll 2
        for (;;) {}
    }
}
}
"""


@pytest.mark.parametrize(
    ("where", "old", "new", "then"),
    [
        ("kernel", "if (i<count) {", "{", "    {\n#pragma unroll"),
        ("kernel", "if (i < count) {\n#pragma unroll", "{\n#pragma unroll", "{\n#pragma unroll\n"),
        ("kernel", "const int lane = threadIdx.x;", "const int lane = 0;", "const int i = 0;"),
        ("kernel", "#pragma unroll 2\nfor (;;)", "for (;;)", "for (;;) {}"),
        ("kernel", "sums[i] += row", "sums[i] -= row", "out[i] -= row"),
        ("Tile::at", "x[first + i]", "x[i]", "return x[i];"),
        ("Tile::Tile", "first(row)", "first(0)", ": first(0) {}"),
        ("Tile", "int first;", "long first;", "long first;"),
        ("", "kWarp = 32", "kWarp = 16", "constexpr int kWarp = 16;"),
    ],
)
def test_a_place_in_a_kernel_is_found_by_its_function_and_tokens(
    where: str, old: str, new: str, then: str
) -> None:
    assert then in place.planted(KERNEL, False, where, old, new)


def test_a_place_in_a_kernel_that_is_not_one_is_a_sentence() -> None:
    with pytest.raises(LookupError, match=r"has 'x\.i' 0 times in kernel"):
        place.planted(KERNEL, False, "kernel", "x.i", "x")
    with pytest.raises(LookupError, match="has no lane in kernel any more"):
        place.planted(KERNEL, False, "kernel", "row < 4", "row < lane")


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
    # Neither torch nor plugins: every pytest starts at once.
    monkeypatch.setattr(run, "PRELOADED", ("pytest",))
    monkeypatch.setattr(run, "OF_PLUGINS", ())
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # Not the thousands of kernels that the emulator has compiled on this machine.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


def mutant(**changes: Any) -> Mutant:
    defaults = {
        "mistake": "the sum is a difference",
        "file": "sums.py",
        "where": "add",
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
        mutant(mistake="the sum is the first", new="a", select="no_such_test"),
    )
    status, written = examine(mutants, repository, monkeypatch)
    printed = capsys.readouterr().out
    assert status == 1
    assert re.search(r"\d/7  killed +\d+\.\d s  sums: the sum is a difference", printed)
    assert "| sums | 7 | 1 | 1 | 1 | 4 |" in printed
    assert "50.0% of those that a test can notice are killed." in printed
    assert "survived: the sum is rounded (sums.py)" in printed
    assert "| the sum is a difference | sums.py | test_sums.py::test_add[2] |" in written
    assert "| the sum is turned | sums.py | **argued** Sums commute. |" in written
    assert "**stale** sums.py has 'a * b' 0 times in add; it is to be once." in written
    assert re.search(r"\*\*stale\*\* sums.py has 'a' \d times in add; it is to be once.", written)
    assert "| the sum is no expression | sums.py | **stale** " in written
    assert "**stale** test_sums.py::test_add -k 'no_such_test' has no test |" in written


def test_a_run_in_which_all_are_killed_or_argued_succeeds(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, written = examine((mutant(),), repository, monkeypatch)
    assert status == 0
    assert "100.0%" in written


def test_a_test_that_fails_in_a_child_of_the_warm_process_has_a_process_of_its_own(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = "\ndef test_alone():\n    assert sys.argv[0].endswith('__main__.py')\n"
    (repository / "tests" / "test_sums.py").write_text(f"import sys\n{TEST}{alone}")
    status, written = examine((mutant(tests="test_sums.py"),), repository, monkeypatch)
    assert status == 0
    assert "| the sum is a difference | sums.py | test_sums.py::test_add[2] |" in written


def test_a_mutant_that_survives_in_a_child_is_examined_in_a_process_of_its_own(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = TEST.replace("assert ", "assert sys.argv[0] == 'pytest' or ")
    (repository / "tests" / "test_sums.py").write_text(f"import sys\n{passing}")
    assert examine((mutant(),), repository, monkeypatch)[0] == 0


def test_a_resumed_run_leaves_out_what_was_killed_and_has_not_changed(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = repository.parent / "out"
    ran: list[str] = []

    def examined(area: str, mutant: Mutant, tree: run.Tree) -> run.Result:
        if mutant.mistake == "interrupts":
            # The rows of the others come while this one runs.
            end = time.monotonic() + 20.0
            while time.monotonic() < end and len((out / "mutants.csv").read_text().split()) < 4:
                time.sleep(0.01)
            raise KeyboardInterrupt
        ran.append(mutant.mistake)
        return run.Result(area, mutant, mutant.mistake, "test_x", 1.0)

    def mistakes_run(mutants: list[Mutant], *options: str) -> list[str]:
        ran.clear()
        monkeypatch.setattr(run, "AREAS", {"sums": mutants})
        run.main(["--out", str(out), "--jobs", "1", *options])
        return list(ran)

    monkeypatch.setattr(run, "examined", examined)
    mutants = [
        mutant(mistake=status, new=f"a-{number}")
        for number, status in enumerate((run.KILLED, run.SURVIVED, run.ARGUED))
    ]
    with pytest.raises(KeyboardInterrupt):
        mistakes_run([*mutants, mutant(mistake="interrupts", new="b")])
    assert mistakes_run(mutants, "--resume") == [run.SURVIVED]
    assert "| sums | 3 | 1 | 1 | 1 | 0 |" in (out / "mutants.md").read_text()
    assert mistakes_run(mutants, "--resume", "--only", "killed") == []
    changed = [dataclasses.replace(mutants[0], new="a * b"), *mutants[1:]]
    assert mistakes_run(changed, "--resume") == [run.KILLED, run.SURVIVED]
    (repository / "fuser" / "sums.py").write_text(f"{ADD}\n\nLIMIT = 1\n")
    assert len(mistakes_run(changed, "--resume")) == 3
    assert len(mistakes_run(changed)) == 3


def test_mutants_of_tests_that_fail_without_a_mistake_are_stale_and_the_others_examined(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "tests" / "test_sums.py").write_text(TEST + "    assert b\n")
    (repository / "tests" / "test_sums_of_twos.py").write_text(TEST.replace("[0, 2]", "[2]"))
    other = mutant(mistake="the same", tests="test_sums_of_twos.py")
    status, written = examine((mutant(), other), repository, monkeypatch)
    assert status == 1
    assert "**stale** test_sums.py::test_add[0] fails without the mistake" in written
    assert "| the same | sums.py | test_sums_of_twos.py::test_add[2] |" in written


def test_a_test_that_does_not_end_has_failed(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "TIMEOUT", 0.01)
    tree = run.Tree(repository.parent / "tree", run.Known({}, set()))
    code, printed = tree.test(["tests/test_sums.py"], "")
    assert code == run.FAILED
    assert list(run.failures(printed)) == ["(no end after 0.01 s)"]


def test_only_chooses_by_area_mistake_and_file_and_list_runs_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for pattern, count in (
        (".", len(MUTANTS)),
        ("^launch sequences$", len(AREAS["launch sequences"])),
    ):
        assert run.main(["--list", "--only", pattern]) == 0
        assert capsys.readouterr().out.endswith(f"{count} mutants.\n")
    assert run.main(["--list", "--only", "cuda/sequence"]) == 0
    assert "cuda/sequence.py" in capsys.readouterr().out
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
