"""Samples of combinations: of three columns each pair of values occurs, of two each value."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence


def sample(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """The indices of a sample of some rows, the same in each process.

    Each row that is taken has the most pairs of values that no row has yet; of several the one
    whose values were taken least often, then the first.
    """
    cells = [list(enumerate(row)) for row in rows]
    columns: dict[int, set[Hashable]] = {}
    for column, value in itertools.chain(*cells):
        columns.setdefault(column, set()).add(value)
    varied = {column for column, values in columns.items() if len(values) > 1}
    together = 2 if len(varied) > 2 else 1
    of_rows = [list(itertools.combinations(row, min(together, len(row)))) for row in cells]
    holders: dict[tuple[tuple[int, Hashable], ...], list[int]] = {}
    for index, combinations in enumerate(of_rows):
        for combination in combinations:
            holders.setdefault(combination, []).append(index)
    gains = [len(combinations) for combinations in of_rows]
    taken: list[int] = []
    used: Counter[tuple[int, Hashable]] = Counter()
    while any(gains):
        best = max(gains)
        index = min(
            (i for i, gain in enumerate(gains) if gain == best),
            key=lambda i: (sum(used[cell] for cell in cells[i]), i),
        )
        taken.append(index)
        used.update(cells[index])
        for combination in of_rows[index]:
            for holder in holders.pop(combination, ()):
                gains[holder] -= 1
    return sorted(taken)
