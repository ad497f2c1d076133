"""The table of messages, messages.tsv: a stable code for each sentence of the library.

A row is a code, the kind of a message, the modules that have it, and its text with an ellipsis for
each value. Tests and cures name a message by its code, so that one row changes when a sentence is
reworded. ``make sentences`` writes the table from the sources.
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent / "messages.tsv"


class Message(NamedTuple):
    """A row of the table."""

    code: str
    kind: str
    modules: tuple[str, ...]
    text: str


@functools.cache
def messages() -> dict[str, Message]:
    """The rows by their codes."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(rows)
        return {row[0]: Message(row[0], row[1], tuple(row[2].split()), row[3]) for row in rows}


def code_of(kind: str, text: str) -> str | None:
    """The code of a message; None if the table does not have it."""
    return _codes().get((kind, text))


@functools.cache
def _codes() -> dict[tuple[str, str], str]:
    return {(row.kind, row.text): row.code for row in messages().values()}
