"""A mutant: one small mistake, and the tests that are to notice it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


@functools.cache
def _paths() -> dict[str, str]:
    """Test files by their names, which differ in all folders: paths from the repository's root."""
    return {path.name: f"tests/{path.relative_to(TESTS)}" for path in TESTS.rglob("test_*.py")}


@dataclass(frozen=True)
class Mutant:
    """A text replacement in one file of the package.

    Parameters
    ----------
    mistake
        What is wrong with it, in a few words.
    file
        The path below ``fuser/``.
    old, new
        ``old`` occurs exactly once in the file, and ``new`` takes its place.
    tests
        What pytest runs, separated by spaces: files by their names, in any folder of ``tests/``,
        or tests in them (``test_ops.py::test_x``). They take seconds, and pass without the mistake.
    select
        An expression for pytest's ``-k``, where the tests have many parameters.
    survives
        Why no test can notice, for a mistake that changes nothing that can be seen.
    """

    mistake: str
    file: str
    old: str
    new: str
    tests: str
    select: str = ""
    survives: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """The tests as paths from the repository's root."""
        tests = (test.partition("::") for test in self.tests.split())
        return tuple(
            _paths().get(file, f"tests/{file}") + colons + name for file, colons, name in tests
        )

    def applied(self, text: str) -> str:
        """The file's text with the mistake in it.

        Raises
        ------
        LookupError
            If the text has no such place, or more than one: the list is out of date.
        """
        count = text.count(self.old)
        if count != 1:
            raise LookupError(f"{self.file} has {self.old!r} {count} times; it is to be once.")
        return text.replace(self.old, self.new)
