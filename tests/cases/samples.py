"""Samples of combinations: of three columns each pair of values occurs, of two each value.

Of random examples a third.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

Cell = tuple[int, Hashable]
"""A column and a value in it."""
PART_OF_EXAMPLES = 3
_is_asked = {"for all": False}


def ask_for_all_examples(all_of_them: bool) -> None:
    """Whether :func:`examples` leaves out none from now on."""
    _is_asked["for all"] = all_of_them


def examples(count: int) -> int:
    """How many of ``count`` random examples a test takes that takes seconds: a third.

    All of them in a run that takes no samples.
    """
    return count if _is_asked["for all"] else -(-count // PART_OF_EXAMPLES)


def combinations(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which each value of each column occurs; all of them with ``--full``.

    For loops in a test, also in ranks.
    """
    places = list(itertools.product(*(range(len(column)) for column in columns)))
    if not os.environ.get("FUSER_TEST_FULL"):
        places = [places[index] for index in sample(places, 1)]
    return [tuple(c[i] for c, i in zip(columns, row, strict=True)) for row in places]


def sample(rows: Sequence[Sequence[Hashable]], most: int | None = None) -> list[int]:
    """The indices of a sample of some rows, the same in each process.

    Where all pairs of values take more than ``most`` rows, each value occurs, and there are
    ``most`` rows, or as many as the values take.
    """
    cells = [list(enumerate(row)) for row in rows]
    columns: dict[int, set[Hashable]] = {}
    for column, value in itertools.chain(*cells):
        columns.setdefault(column, set()).add(value)
    varied = {column for column, values in columns.items() if len(values) > 1}
    taken = _covering(cells, 2 if len(varied) > 2 else 1, [])
    if most is not None and len(taken) > most:
        of_values = _covering(cells, 1, [])
        taken = _covering(cells, 2, of_values)[: max(most, len(of_values))]
    return sorted(taken)


def _covering(cells: Sequence[Sequence[Cell]], together: int, taken: Sequence[int]) -> list[int]:
    """Rows in which all that one row has of ``together`` values occurs; first those of ``taken``.

    Each further row has the most such combinations that no row has yet; of several rows the one
    whose values were taken least often, then the one with the fewest repeated values, then the
    first. Of two columns of the same dtypes, say, the rows of equal ones would else be the sample,
    and those show least.
    """
    of_rows = [list(itertools.combinations(row, min(together, len(row)))) for row in cells]
    holders: dict[tuple[Cell, ...], list[int]] = {}
    for index, combinations in enumerate(of_rows):
        for combination in combinations:
            holders.setdefault(combination, []).append(index)
    gains = [len(combinations) for combinations in of_rows]
    repeats = list(map(_repeats, cells))
    found: list[int] = []
    used: Counter[Cell] = Counter()

    def take(index: int) -> None:
        found.append(index)
        used.update(cells[index])
        for combination in of_rows[index]:
            for holder in holders.pop(combination, ()):
                gains[holder] -= 1

    for index in taken:
        take(index)
    while any(gains):
        best = max(gains)
        candidates = (i for i, gain in enumerate(gains) if gain == best)
        take(min(candidates, key=lambda i: (sum(used[cell] for cell in cells[i]), repeats[i], i)))
    return found


def _repeats(row: Sequence[Cell]) -> int:
    """How many values of a row it has in another column too; flags do not count."""
    values = [value for _, value in row if value is not None and not isinstance(value, bool)]
    return len(values) - len(set(values))
