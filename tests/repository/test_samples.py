"""Samples of parametrised tests: which combinations a run without ``--full`` has."""

from __future__ import annotations

import itertools

import pytest
from paths import TESTS
from samples import sample

pytest_plugins = ["pytester"]


def test_of_three_columns_each_pair_of_values_occurs() -> None:
    rows = list(itertools.product("abcd", range(3), ("x", "y", "z"), (False, True)))
    taken = [rows[i] for i in sample(rows)]
    for columns in itertools.combinations(range(4), 2):
        pairs = [{tuple(row[c] for c in columns) for row in some} for some in (rows, taken)]
        assert pairs[0] == pairs[1]
    assert 12 <= len(taken) <= 18


def test_of_two_columns_each_value_occurs_as_often_as_others() -> None:
    rows = list(itertools.product("abcdef", "xyz"))
    taken = [rows[i] for i in sample(rows)]
    assert sorted(first for first, _ in taken) == list("abcdef")
    assert sorted(second for _, second in taken) == list("xxyyzz")


@pytest.mark.parametrize("columns", [["ab", "ab"], ["abc", "abc"], ["abc", "ab"], ["abcd", "cde"]])
def test_of_two_columns_of_the_same_values_most_rows_have_two_that_differ(
    columns: list[str],
) -> None:
    rows = list(itertools.product(*columns))
    taken = [rows[i] for i in sample(rows)]
    assert len(taken) == max(map(len, columns))
    assert sum(first == second for first, second in taken) <= len(columns[0]) % 2


def test_a_sample_has_no_more_rows_than_asked_for_and_each_value() -> None:
    rows = list(itertools.product("abcde", range(5), "uvwxy", (False, True)))
    assert len(sample(rows)) > 20
    for most in (5, 7, 12):
        taken = [rows[i] for i in sample(rows, most)]
        assert len(taken) == len(set(taken)) == most
        for column in range(4):
            assert {row[column] for row in taken} == {row[column] for row in rows}
    assert len(sample(rows, 3)) == 5
    assert sample(rows, 99) == sample(rows)
    assert len(sample(list(itertools.product("abc", range(9))), 12)) == 9


def test_rows_of_one_column_and_rows_that_are_longer_than_others_are_taken() -> None:
    assert sample([[name] for name in "abc"]) == [0, 1, 2]
    assert sample([["f", "mxfp8"], ["f", "nvfp4"], ["g"], ["h", "nvfp4"]]) == [0, 2, 3]
    assert sample([]) == []


def test_a_run_has_the_sample_unless_all_or_one_is_asked_for(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSER_TEST_FULL", "")  # which --full sets: as before afterwards
    pytester.makeconftest((TESTS / "conftest.py").read_text())
    pytester.makeini(f"[pytest]\nmarkers = sampled\npythonpath = {TESTS / 'cases'} {TESTS}\n")
    pytester.makepyfile(
        "import pytest\n"
        "from fuser.recipe import MXFP8BlockScaling, NVFP4BlockScaling\n"
        "from samples import examples\n"
        "marks = [pytest.mark.parametrize(name, range(3)) for name in 'ab']\n"
        "@pytest.mark.sampled\n@marks[0]\n@marks[1]\ndef test_x(a, b):\n    pass\n"
        "@marks[0]\n@marks[1]\ndef test_y(a, b):\n    pass\n"
        "@marks[0]\n@marks[1]\n@pytest.mark.parametrize('c', range(3))\n"
        "@pytest.mark.sampled(most=5)\ndef test_few(a, b, c):\n    pass\n"
        "@pytest.mark.parametrize('seed', range(9))\n"
        "@pytest.mark.sampled(most=4)\ndef test_seeds(seed):\n    pass\n"
        "@pytest.mark.sampled\n"
        "@pytest.mark.parametrize('case', ['f [x]', 'f [y]', 'g [y]', 'h'])\n"
        "def test_z(case):\n    pass\n"
        "@pytest.mark.sampled\n"
        "@pytest.mark.parametrize('b', 'pq')\n"
        "@pytest.mark.parametrize('a', [None, MXFP8BlockScaling(), NVFP4BlockScaling()])\n"
        "def test_recipes(a, b):\n    pass\n"
        "@pytest.mark.sampled(most=4, are_alike=True)\n"
        "@pytest.mark.parametrize('row', 'abcdefgh')\n"
        "def test_rows(row):\n    pass\n"
        "@pytest.mark.parametrize('number', range(examples(9)))\n"
        "def test_examples(number):\n    pass\n"
    )
    name = "test_a_run_has_the_sample_unless_all_or_one_is_asked_for.py"
    for options, passed in (
        ((), 3 + 9 + 5 + 4 + 3 + 3 + 4 + 3),
        (("--full",), 9 + 9 + 27 + 9 + 4 + 6 + 8 + 9),
        ((f"{name}::test_x",), 9),
        (("-k", "test_x"), 9),
    ):
        run = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
        assert run.parseoutcomes()["passed"] == passed
