"""Window patterns: the sequences of basic ops that a fusion matches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fuser.errors import InputTypeError
from fuser.op import COMPUTE_METHODS


class Optional:
    """Zero or one op that matches ``element``; bound to None if absent."""

    def __init__(self, element: object) -> None:
        self.element = element


class OneOf:
    """One op of any of the given types."""

    def __init__(self, *types: type) -> None:
        self.types = types


class Many:
    """One or more ops that match ``element``; bound to a tuple."""

    def __init__(self, element: object) -> None:
        self.element = element


class Having:
    """One op with a method ``name`` that tells what the op computes.

    A subclass that overrides how the op computes must override the method as well.
    """

    def __init__(self, name: str) -> None:
        self.name = name


def check_window(name: str, window: Any) -> None:
    """Refuse a window of the fusion ``name`` that is not a valid pattern.

    Raises InputTypeError if it is not a tuple of op classes and patterns of this module.
    """
    is_fit = isinstance(window, (tuple, list))
    if not is_fit or not all(_is_element(element) for element in window):
        raise InputTypeError(
            f"{name}.window is {window!r}; it is a tuple of op classes, such as (fuser.GELU,), or "
            "of fuser.plan.Optional, OneOf and Many of them."
        )


def _is_element(element: object) -> bool:
    if isinstance(element, (Optional, Many)):
        return _is_element(element.element)
    if isinstance(element, Having):
        return True
    types = element.types if isinstance(element, OneOf) else (element,)
    return all(isinstance(cls, type) for cls in types)


@dataclass(frozen=True)
class Match:
    """One match of a pattern: the end of the window, and the ops bound to each element."""

    stop: int
    bound: tuple[object, ...]


def matches(
    pattern: Sequence[object], ops: Sequence[object], at: int, bound: tuple[object, ...] = ()
) -> Iterator[Match]:
    """Every match of ``pattern`` in ``ops`` that begins at ``at``, after what is ``bound``."""
    if not pattern:
        yield Match(at, bound)
        return
    element, *rest = pattern
    if isinstance(element, Optional):
        yield from matches((element.element, *rest), ops, at, bound)
        yield from matches(rest, ops, at, (*bound, None))
        return
    if isinstance(element, Many):
        stop = at
        while stop < len(ops) and _is(ops[stop], element.element):
            stop += 1
        for end in range(stop, at, -1):
            yield from matches(rest, ops, end, (*bound, tuple(ops[at:end])))
        return
    if at < len(ops) and _is(ops[at], element):
        yield from matches(rest, ops, at + 1, (*bound, ops[at]))


def _is(op: object, element: Any) -> bool:
    if isinstance(element, Having):
        return _tells(type(op), element.name)
    if isinstance(element, OneOf):
        return any(_computes_like(type(op), cls) for cls in element.types)
    return _computes_like(type(op), element)


def _computes_like(actual: type, expected: type) -> bool:
    """Whether it is the class, or a subclass that overrides no method of what it computes."""
    return actual is expected or (
        expected in actual.__mro__
        and all(
            getattr(actual, name, None) is getattr(expected, name, None) for name in COMPUTE_METHODS
        )
    )


def _tells(cls: type, method: str) -> bool:
    """Whether ``method`` of ``cls`` is as new as what it tells of."""
    if not callable(getattr(cls, method, None)):
        return False
    owner = _owner(cls, method)
    return all(owner <= _owner(cls, name) for name in COMPUTE_METHODS if hasattr(cls, name))


def _owner(cls: type, name: str) -> int:
    """The place of the class that defines ``name``, counted from ``cls`` upwards."""
    return next(place for place, base in enumerate(cls.__mro__) if name in vars(base))
