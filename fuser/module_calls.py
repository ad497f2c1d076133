"""Calls of ops as modules: what a container must know before it runs an op in another way.

torch runs hooks in a module's ``__call__``. A pipeline does not call its ops so, and has to leave
out those with hooks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.modules import module as torch_module


class ModuleCalls:
    """What counts for the calls of all ops; there is one, ``module_calls``.

    ``version`` is another object after each event that may change how an op must be called: a hook
    was registered on one, or its class or a method was set. A container that has looked at its ops
    need not look again while the version is the same.
    """

    __slots__ = ("version",)  # read at every call

    def __init__(self) -> None:
        self.change()

    def change(self) -> None:
        """Begin another version."""
        self.version = object()


module_calls = ModuleCalls()


def noting(name: str) -> Any:
    """torch's method of that name, which registers a hook, and begins another version."""
    method = getattr(torch.nn.Module, name)

    @functools.wraps(method)
    def register(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = method(self, *args, **kwargs)
        module_calls.change()
        return handle

    return register


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether torch runs hooks around a call of ``module``, its own ones."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def has_global_hooks() -> bool:
    """Whether torch runs hooks around the call of every module."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )
