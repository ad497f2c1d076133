"""Scripts run in the process of a test: what they print, and how they refuse their options."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence

import pytest

Main = Callable[[Sequence[str]], int | None]


class Terminal(io.StringIO):
    """A file that says of itself that it is a terminal."""

    def isatty(self) -> bool:
        return True


def printed_by(main: Main, arguments: Sequence[str]) -> str:
    """What a script prints on stdout; it must succeed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(arguments) == 0
    return printed.getvalue()


def refusal_by(main: Main, arguments: Sequence[str]) -> str:
    """The last line on stderr of a script that refuses its options with exit status 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return said.getvalue().splitlines()[-1]
