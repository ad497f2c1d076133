"""Bases of classes in the reference: public ones, in place of those that are internal."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

MODULES = (
    "fuser",
    "fuser.recipe",
    "fuser.modules",
    "fuser.moe",
    "fuser.distributed",
    "fuser.inspection",
    "fuser.plan",
    "fuser.cuda",
)


def public_bases(bases: list[type]) -> list[type]:
    """The bases that users can import, each internal one replaced by its own."""
    public = {
        value
        for module in map(importlib.import_module, MODULES)
        for name in module.__all__
        if isinstance(value := getattr(module, name), type)
    }

    def of(base: type) -> Iterator[type]:
        if base in public or base.__module__.partition(".")[0] != "fuser":
            yield base
        else:
            for below in base.__bases__:
                yield from of(below)

    found = list(dict.fromkeys(one for base in bases for one in of(base)))
    below = {base for one in found for base in one.__mro__[1:]}
    return [one for one in found if one not in below] or found


def _process(app: Any, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    if all(isinstance(base, type) for base in bases):
        bases[:] = public_bases(bases)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-bases", _process)
    return {"parallel_read_safe": True}
