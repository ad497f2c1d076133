"""Hooks of ops: whether an op must be called as a module.

torch runs hooks in a module's ``__call__``. A pipeline does not use ``__call__``, so it must
leave out ops that have hooks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


class ModuleCalls:
    """Tracks events that may change how an op must be called; one object, ``module_calls``.

    ``version`` is replaced by a new object after each event: a hook was registered on an op, or
    its class or a method was set. A container need not check its ops again while the version is
    the same object.
    """

    __slots__ = ("version",)  # read at every call

    def __init__(self) -> None:
        self.change()

    def change(self) -> None:
        """Set a new version."""
        self.version = object()


module_calls = ModuleCalls()


def noting(name: str) -> Any:
    """torch's method ``name``, which registers a hook, followed by a new version."""
    method = getattr(torch.nn.Module, name)

    @functools.wraps(method)
    def register(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = method(self, *args, **kwargs)
        module_calls.change()
        self._describe()  # type: ignore[operator]
        return handle

    return register
