"""Arguments by position, in the order of Transformer Engine's signatures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from fuser.errors import InputTypeError

__all__ = ["also_by_position"]

_Kind = inspect.Parameter
_Function = TypeVar("_Function", bound=Callable[..., Any])


def also_by_position(names: str) -> Callable[[_Function], _Function]:
    """Decorate a method: a call may also give ``names`` by position, after those of its signature.

    They are its keyword arguments, or options, in the order in which Transformer Engine has them.
    """
    further = names.split()

    def decorated(method: _Function) -> _Function:
        signature = inspect.signature(method)
        own = signature.parameters
        places = [p for p in own.values() if p.kind is _Kind.POSITIONAL_OR_KEYWORD]
        # An option has the default of the function that gets it.
        more = [
            _Kind(
                name,
                _Kind.POSITIONAL_OR_KEYWORD,
                default=own[name].default if name in own else ...,
            )
            for name in further
        ]
        rest = [p for name, p in own.items() if p not in places and name not in further]
        count, most = len(places), len(places) + len(further)

        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            if len(args) <= count:
                return method(*args, **options)
            if len(args) > most:
                taken = ", ".join([*[p.name for p in places[1:]], *further])
                raise InputTypeError(
                    f"{method.__qualname__} got {len(args) - 1} arguments by position, and takes "
                    f"{most - 1}: {taken}. Give others by name."
                )
            given = dict(zip(further, args[count:], strict=False))
            return method(*args[:count], **given, **options)

        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*places, *more, *rest]
        )
        return call  # type: ignore[return-value]

    return decorated
