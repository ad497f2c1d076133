"""Source that fuser writes at run time: made into functions, and shown by tracebacks."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

_numbers = itertools.count()


def compiled(source: str, what: str, globals_: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions that ``source`` defines, by name; they see ``globals_`` and nothing else.

    Tracebacks show their lines under the name ``<fuser what n>``, as long as
    the functions live.
    """
    filename = f"<fuser {what} {next(_numbers)}>"
    given = set(globals_)
    exec(compile(source, filename, "exec"), globals_)
    # Popped: a function in its own globals is a reference cycle.
    functions = {
        name: globals_.pop(name) for name in set(globals_) - given if name != "__builtins__"
    }
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    for function in functions.values():
        weakref.finalize(function, linecache.cache.pop, filename, None)
    return functions
