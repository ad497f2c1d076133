"""Every argument of a public function or constructor has a row that sets it.

An argument that was added without one fails here, with what to write.
"""

from __future__ import annotations

import argument_rows
import pytest
from argument_rows import IGNORED, ROWS, arguments_of
from arguments_listed import METHODS, MODULES, OPTIONS, RESULTS

PUBLIC = dict(argument_rows.public(MODULES))
PUBLIC |= {path: argument_rows.found(path) for path in METHODS}


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


def test_rows_and_lists_name_arguments_that_there_are() -> None:
    for path, argument in ROWS.keys() | IGNORED.keys():
        value = PUBLIC.get(path)
        assert value is not None, f"{path} is no public function or class, or has a first name."
        known = {*arguments_of(value), *OPTIONS.get(path, ())}
        assert argument in known, f"{path} has no argument {argument}."
    assert not ROWS.keys() & IGNORED.keys()
    assert RESULTS.keys() <= PUBLIC.keys()
    assert OPTIONS.keys() <= PUBLIC.keys()
