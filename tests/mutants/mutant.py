"""A mutant: one small mistake, and the tests that are to notice it."""

from __future__ import annotations

from dataclasses import dataclass


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
        What pytest runs, separated by spaces: files below ``tests/``, or tests in them
        (``test_ops.py::test_x``). They take seconds, and pass without the mistake.
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
        return tuple(f"tests/{test}" for test in self.tests.split())

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
