"""Generated code: Python source that is written and compiled at run time; tracebacks show it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

_numbers = itertools.count()
_living: Counter[str] = Counter()
"""How many functions there are of each file's name."""


class SourceCode:
    """Python source under construction: its lines, and the objects that they refer to.

    >>> src = SourceCode(twice=lambda x: 2 * x)
    >>> with src.block("def run(x):"):
    ...     src.add(f"return twice(x) + {src.bind('offset', 1)}")
    >>> src.functions("example")["run"](3)
    7
    """

    def __init__(self, **names: Any) -> None:
        self.names = names
        self._lines: list[str] = []
        self._indent = ""

    def add(self, *lines: str) -> None:
        """Add lines to the open block."""
        self._lines += [self._indent + line if line else "" for line in lines]

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Put the lines that are added inside into a block under ``head``, such as ``"try:"``."""
        self.add(head)
        outer, self._indent = self._indent, self._indent + "    "
        yield
        self._indent = outer

    def bind(self, name: str, value: object) -> str:
        """Bind ``name`` to ``value`` in the source; returns ``name``."""
        self.names[name] = value
        return name

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def functions(self, stem: str) -> dict[str, Callable[..., Any]]:
        """The functions that the source defines, by name; see :func:`compiled`."""
        return compiled(str(self), stem, self.names)


def compiled(source: str, stem: str, globals_: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions that ``source`` defines, by name; their only globals are ``globals_``.

    Tracebacks show their lines under the name ``<fuser stem n>``, as long as
    the functions live. Equal sources have one name: equal blocks are compiled once.
    """
    code = _code(source, stem)
    filename = code.co_filename
    known = set(globals_)
    exec(code, globals_)
    # Popped, because a function in its own globals is a reference cycle.
    functions = {
        name: globals_.pop(name) for name in set(globals_) - known if name != "__builtins__"
    }
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    for function in functions.values():
        _living[filename] += 1
        weakref.finalize(function, _forget, filename)
    return functions


@functools.lru_cache(maxsize=256)
def _code(source: str, stem: str) -> CodeType:
    return compile(source, f"<fuser {stem} {next(_numbers)}>", "exec")


def _forget(filename: str) -> None:
    """One function of a file has gone; with the last of them tracebacks lose its lines."""
    _living[filename] -= 1
    if _living[filename] <= 0:
        del _living[filename]
        linecache.cache.pop(filename, None)
