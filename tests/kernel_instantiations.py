"""Every kernel that the launchers may ask for; the compile check compiles just these.

A launcher module names them in one of two ways: a :class:`fuser.cuda.launch.Kernel` that stands in
the module, or a function ``instantiations()`` that returns the kernels which it makes on demand.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

import fuser.cuda
from fuser.cuda.launch import Kernel


@functools.cache
def instantiations() -> dict[str, tuple[str, ...]]:
    """The symbols that launchers may ask for, sorted, by the name of the ``.cu``."""
    found: dict[str, set[str]] = {}
    for launcher in pkgutil.iter_modules(fuser.cuda.__path__):
        for kernel in kernels_of(importlib.import_module(f"fuser.cuda.{launcher.name}")):
            found.setdefault(kernel.module, set()).add(kernel.symbol)
    return {name: tuple(sorted(symbols)) for name, symbols in sorted(found.items())}


def kernels_of(launcher: ModuleType) -> set[Kernel]:
    """The kernels that one launcher module names."""
    kernels = {value for value in vars(launcher).values() if isinstance(value, Kernel)}
    if hasattr(launcher, "instantiations"):
        kernels |= set(launcher.instantiations())
    return kernels
