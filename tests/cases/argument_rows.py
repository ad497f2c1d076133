"""Rows that set one argument of a public function, class or method, and say what it changes.

A row is a function of the arguments to pass. It computes with them and asserts what the value of
the row must change, against plain torch or a formula in fp64::

    @sets("fuser.RMSNorm", eps=0.5)
    def values_of_the_norm(given):
        op, x = fuser.RMSNorm(8, **given), torch.randn(4, 8)
        assert_close(op(x), x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.5))

The same function must fail with the argument's default, else it says nothing of the argument; where
there is no default, with another value: ``Of(0.5, instead=0.0)``. The path of a method, or of a
property that may be set, is that of its class and its name, ``fuser.Sequential.plan``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from fuser import FuserError

Check = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Of:
    """The value of an argument without a default, and another one, with which the check fails."""

    value: Any
    instead: Any


@dataclass(frozen=True)
class Row:
    """An argument, a value that is not its default, and the check of what it changes.

    Parameters
    ----------
    path
        The function or class, as users import it, or the method of a class.
    argument, value
        What the check gets.
    check
        Passes with the value, and fails with ``control``.
    control
        What to pass instead: nothing, so that the default holds, or another value.
    """

    path: str
    argument: str
    value: Any
    check: Check
    control: Mapping[str, Any]

    def holds(self) -> None:
        """What the value must change is so."""
        self.check({self.argument: self.value})

    def is_noticed(self) -> bool:
        """Whether the check fails where the argument has another value."""
        try:
            self.check(dict(self.control))
        except (Exception, pytest.fail.Exception):  # the latter of pytest.raises
            return True
        return False


ROWS: dict[tuple[str, str], Row] = {}
IGNORED: dict[tuple[str, str], str] = {}
"""Arguments that are accepted and change nothing, with the reason."""
ELSEWHERE: dict[tuple[str, str], str] = {}
"""Arguments of methods that another test sets: its file and its name, as pytest takes them."""


def sets(path: str, /, **values: Any) -> Callable[[Check], Check]:
    """Decorate the check of some arguments of ``path``, each of which is set alone."""

    def registered(check: Check) -> Check:
        for argument, value in values.items():
            assert (path, argument) not in ROWS, f"{path}({argument}=) has a row."
            is_of = isinstance(value, Of)
            control = {argument: value.instead} if is_of else {}
            taken = value.value if is_of else value
            ROWS[path, argument] = Row(path, argument, taken, check, control)
        return check

    return registered


def ignores(path: str, reason: str, *arguments: str) -> None:
    """Arguments of ``path`` that another library has and that change nothing here."""
    for argument in arguments:
        assert (path, argument) not in IGNORED, f"{path}({argument}=) is listed."
        IGNORED[path, argument] = reason


def set_in(test: str, path: str, *arguments: str) -> None:
    """Arguments of the method ``path`` that ``test`` sets, in a source that names them."""
    for argument in arguments:
        assert (path, argument) not in ELSEWHERE, f"{path}({argument}=) is listed."
        ELSEWHERE[path, argument] = test


def found(path: str) -> Any:
    """The object that users import as ``path``, or the method of a class."""
    owner, _, name = path.rpartition(".")
    is_class = owner.rpartition(".")[2][0].isupper()
    return getattr(found(owner) if is_class else importlib.import_module(owner), name)


def public(modules: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Path and object of each public function and class; one that has several names has its first.

    Classes that share a constructor are one: their first has its arguments.
    """
    seen: set[Any] = set()
    for module in modules:
        for name in sorted(importlib.import_module(module).__all__):
            value = getattr(importlib.import_module(module), name)
            if not callable(value) or isinstance(value, ModuleType) or not _is_called(value):
                continue
            # A named tuple has the ``__init__`` of every object, and a ``__new__`` of its own.
            is_class = inspect.isclass(value)
            key = (value.__init__, value.__new__) if is_class else value
            if key not in seen:
                seen.add(key)
                yield f"{module}.{name}", value


def methods(modules: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Path and object of each method and settable property of the library's own public classes.

    Those without a name of one underscore that have options. A method that classes share has the
    path of the class that defines it, or of the first if that is not public.
    """
    paths: dict[type, str] = {}
    for module in modules:
        for name in sorted(importlib.import_module(module).__all__):
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value) and not name.startswith("_"):
                paths.setdefault(value, f"{module}.{name}")
    seen: set[Any] = set()
    for cls, path in paths.items():
        for owner in cls.__mro__:
            for name, value in vars(owner).items():
                function = _called(value)
                is_reached = inspect.getattr_static(cls, name) is value
                if name.startswith("_") or not is_reached or function is None or function in seen:
                    continue
                if function.__module__.startswith("fuser") and options_of(value):
                    seen.add(function)
                    yield f"{paths.get(owner, path)}.{name}", value


def _called(value: Any) -> Any:
    """The function of a method, or the setter of a property; None of anything else."""
    if isinstance(value, property):
        return value.fset
    value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return value if inspect.isfunction(value) else None


def options_of(method: Any) -> dict[str, inspect.Parameter]:
    """The arguments of a method that have a default or are keywords; the value of a setter."""
    named = arguments_of(_called(method))
    if isinstance(method, property):
        return named
    return {
        name: p for name, p in named.items() if p.default is not p.empty or p.kind is p.KEYWORD_ONLY
    }


def _is_called(value: Any) -> bool:
    """Whether users call it with arguments: no enumeration, exception or type of values."""
    if inspect.isclass(value):
        return not issubclass(value, (Enum, BaseException))
    return inspect.isfunction(value) or isinstance(value, functools.partial)


def arguments_of(value: Any) -> dict[str, inspect.Parameter]:
    """The arguments that a signature names, without ``self`` and those of ``**options``."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(_called(value) or value).parameters
    named = {name: p for name, p in parameters.items() if p.kind not in variable}
    return {name: p for name, p in named.items() if name != "self"}


def refuses(make: Callable[[], object], *words: str) -> None:
    """``make()`` raises an error of the library, whose sentence has each of ``words``."""
    sentence = None
    try:
        make()
    except FuserError as error:
        sentence = str(error)
    assert sentence is not None, f"No error has {', '.join(words)}."
    assert all(word in sentence for word in words), sentence
