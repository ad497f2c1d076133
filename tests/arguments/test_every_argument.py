"""Every argument of a public function, constructor or method has a row that sets it.

An argument that was added without one fails here, with what to write.
"""

from __future__ import annotations

import ast
import re

import argument_rows
import pytest
from argument_rows import ELSEWHERE, IGNORED, ROWS, arguments_of, options_of
from arguments_listed import METHODS, MODULES, OPTIONS, RESULTS
from paths import ROOT

PUBLIC = dict(argument_rows.public(MODULES))
PUBLIC |= {path: argument_rows.found(path) for path in METHODS}
OF_METHODS = {
    path: value
    for path, value in argument_rows.methods(MODULES)
    if value not in [PUBLIC[each] for each in METHODS]
}
"""Methods of which the options alone have rows."""


@pytest.mark.parametrize("path", sorted(PUBLIC))
def test_every_argument_has_a_row_or_is_listed_as_ignored(path: str) -> None:
    if path in RESULTS:
        return
    names = [*arguments_of(PUBLIC[path]), *OPTIONS.get(path, ())]
    missing = [name for name in names if (path, name) not in ROWS.keys() | IGNORED.keys()]
    assert not missing, (
        f"{path}: no row sets {', '.join(missing)}. Write one in tests/arguments "
        "(tests/cases/argument_rows.py says how), or list it as accepted and ignored."
    )


@pytest.mark.parametrize("path", sorted(OF_METHODS))
def test_every_option_of_a_method_has_a_row_or_a_test_elsewhere(path: str) -> None:
    known = ROWS.keys() | IGNORED.keys() | ELSEWHERE.keys()
    missing = [name for name in options_of(OF_METHODS[path]) if (path, name) not in known]
    assert not missing, (
        f"{path}: no row sets {', '.join(missing)}. Write one in tests/arguments "
        "(tests/cases/argument_rows.py says how), or list a test that sets it by set_in."
    )


@pytest.mark.parametrize(("path", "argument"), sorted(ELSEWHERE))
def test_a_test_elsewhere_names_the_argument(path: str, argument: str) -> None:
    file, _, name = ELSEWHERE[path, argument].partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    functions = [
        ast.get_source_segment(source, node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(functions) == 1, f"{file} has no test {name}."
    assert re.search(rf"\b{argument}\b", functions[0]), f"{name} does not name {argument}."


def test_rows_and_lists_name_arguments_that_there_are() -> None:
    for path, argument in ROWS.keys() | IGNORED.keys() | ELSEWHERE.keys():
        value = (PUBLIC | OF_METHODS).get(path)
        assert value is not None, f"{path} is no public function or class, or has a first name."
        known = {*arguments_of(value), *OPTIONS.get(path, ())}
        assert argument in known, f"{path} has no argument {argument}."
    assert not ROWS.keys() & IGNORED.keys()
    assert not ELSEWHERE.keys() & (ROWS.keys() | IGNORED.keys())
    assert RESULTS.keys() <= PUBLIC.keys()
    assert OPTIONS.keys() <= PUBLIC.keys()
