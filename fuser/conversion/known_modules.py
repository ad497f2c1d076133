"""Modules as they were when they were last looked at, and how to see in few calls that they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch

from fuser.conversion.held_objects import is_plain
from fuser.conversion.modules import BOOKKEEPING, original_class
from fuser.runtime.known_parameters import tensor_guard
from fuser.torch_private import hooks_of

Attributes = dict[str, Any]

INTERNALS = frozenset(torch.nn.Module().__dict__)


class _Noted(NamedTuple):
    """What modules consist of."""

    modules: list[weakref.ref[torch.nn.Module]]
    """One that dies takes the note with it: else its parameters would live until the next call."""
    classes: list[type]
    originals: list[Any]
    """The classes before they were converted."""
    forwards: list[object]
    attributes: list[Attributes]
    copies: list[Attributes]
    places: list[tuple[Attributes, str]]
    objects: list[object]
    """The attributes that are no numbers or strings: one that is equal is another."""
    hooks: list[dict[int, Any]]
    """Those of all modules but the first one: without any."""
    contents: list[dict[str, Any]]
    """The buffers and children of each module."""
    ids: list[int]
    held: list[object]
    """The buffers, and references to children: no other object has their ids."""
    parameters: list[dict[str, torch.Tensor | None]]
    kinds: list[type]
    names: list[str]
    """Of all ``contents`` and ``parameters``."""
    have_same_layout: Callable[..., bool]
    # No reference to a parameter, which torch would then refuse to swap.


class KnownModules:
    """Whether modules consist of the same objects as when they were noted.

    Compared are classes, forwards, attributes, children, hooks and buffers, and of parameters
    name, class, dtype, device, sizes, strides and ``requires_grad``: about 1 us a module.
    """

    def __init__(self) -> None:
        self._noted: _Noted | None = None

    def note(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note the modules as they are. The first one may have hooks, and the others have none."""
        noted = list(modules)
        forget = weakref.WeakMethod(self._forget)

        def died(_: object) -> None:
            if (method := forget()) is not None:
                method()

        attributes = [module.__dict__ for module in noted]
        places = [
            (own, name)
            for own in attributes
            for name, value in own.items()
            if not (name in INTERNALS or name.startswith(BOOKKEEPING) or is_plain(value))
        ]
        contents = [own[name] for own in attributes for name in ("_buffers", "_modules")]
        values = list(_values(contents))
        parameters = [own["_parameters"] for own in attributes]
        originals: list[Any] = [original_class(module) for module in noted]
        self._noted = _Noted(
            modules=[weakref.ref(module, died) for module in noted],
            classes=list(map(type, noted)),
            originals=originals,
            forwards=[cls.forward for cls in originals],
            attributes=attributes,
            copies=[{**own} for own in attributes],
            places=places,
            objects=[own[name] for own, name in places],
            hooks=[hooks for module in noted[1:] for hooks in hooks_of(module)],
            contents=contents,
            ids=list(map(id, values)),
            held=[
                weakref.ref(value, died) if isinstance(value, torch.nn.Module) else value
                for value in values
            ],
            parameters=parameters,
            kinds=list(map(type, _values(parameters))),
            names=list(chain(*contents, *parameters)),
            have_same_layout=tensor_guard(_tensors(parameters)),
        )

    def are_as_noted(self, owner: torch.nn.Module) -> bool:
        """Whether they are; ``owner`` is the first one."""
        noted = self._noted
        if noted is None or noted.modules[0]() is not owner:
            return False
        return (
            not any(noted.hooks)
            and all(map(is_, [own.get(name) for own, name in noted.places], noted.objects))
            and noted.attributes == noted.copies
            and [type(module()) for module in noted.modules] == noted.classes
            and [cls.forward for cls in noted.originals] == noted.forwards
            and list(map(id, _values(noted.contents))) == noted.ids
            and list(map(type, _values(noted.parameters))) == noted.kinds
            and list(chain(*noted.contents, *noted.parameters)) == noted.names
            and noted.have_same_layout(*_tensors(noted.parameters))
        )

    def _forget(self) -> None:
        self._noted = None


def _values(contents: list[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, contents))


def _tensors(parameters: list[dict[str, torch.Tensor | None]]) -> list[torch.Tensor]:
    return [p for own in parameters for p in own.values() if p is not None]
