"""A mutant: one small mistake, and the tests that are to notice it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from mutants.place import planted

TESTS = Path(__file__).resolve().parents[1]


@functools.cache
def _paths() -> dict[str, str]:
    """Test files by their names, which differ in all folders: paths from the repository's root."""
    return {path.name: f"tests/{path.relative_to(TESTS)}" for path in TESTS.rglob("test_*.py")}


@dataclass(frozen=True)
class Mutant:
    """A replacement of code in one function of the package.

    Parameters
    ----------
    mistake
        What is wrong with it, in a few words.
    file
        The path below ``fuser/``.
    where
        The function, method or class that has the code: ``Class.method``, ``function.inner``, in
        CUDA ``Struct::method``; nothing for code of the module.
    old, new
        ``old`` occurs exactly once in it, and ``new`` takes its place. Both are compared by tokens:
        line breaks, comments, quotes and trailing commas make no difference. Statements are
        indented from ``old``'s first line on. Local variables that have other names by now are
        found, and ``new`` gets their names, if all that are in ``new`` are in ``old`` too.
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
    where: str
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
        try:
            return planted(text, self.file.endswith(".py"), self.where, self.old, self.new)
        except LookupError as error:
            raise LookupError(f"{self.file} {error.args[0]}") from None
