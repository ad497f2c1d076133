"""Arguments by position, in the order of Transformer Engine's signatures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["also_by_position"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def also_by_position(names: str) -> Callable[[_Function], _Function]:
    """Decorate a method: a call may also give ``names`` by position, after those of its signature.

    They are its keyword arguments, or options, in the order in which Transformer Engine has them.
    """
    further = tuple(names.split())

    def decorated(method: _Function) -> _Function:
        parameters = inspect.signature(method).parameters.values()
        count = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            if len(args) <= count or len(args) > count + len(further):  # Python refuses the latter
                return method(*args, **options)
            more = dict(zip(further, args[count:], strict=False))
            return method(*args[:count], **more, **options)

        call.further_positions = further  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorated
