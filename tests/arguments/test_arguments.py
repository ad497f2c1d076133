"""What the value of each argument of a public function or constructor changes.

test_every_argument.py says which arguments have no row.
"""

from __future__ import annotations

import arguments_listed  # noqa: F401  imported for its rows
import pytest
from argument_rows import ROWS, Row

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: f"{row.path}-{row.argument}")
def test_an_argument_changes_what_it_says(row: Row) -> None:
    row.holds()


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: f"{row.path}-{row.argument}")
def test_the_row_of_an_argument_fails_without_it(row: Row) -> None:
    assert row.is_noticed(), f"{row.check.__name__} passes with {dict(row.control)} too."
