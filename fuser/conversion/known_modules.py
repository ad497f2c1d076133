"""Modules as they were when they were last looked at, and how to see in few calls that they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch

from fuser.conversion.held_objects import is_plain
from fuser.conversion.modules import original_class, own_attributes
from fuser.runtime.known_parameters import tensor_guard
from fuser.torch_private import hooks_of


def _unknown(owner: torch.nn.Module) -> bool:
    return False


class KnownModules:
    """Whether modules consist of the same objects as when they were noted.

    Compared are classes, forwards, attributes, children, hooks and buffers, and of parameters
    name, class, dtype, device, sizes, strides and ``requires_grad``: about 1 us a module.
    """

    are_as_noted: Callable[[torch.nn.Module], bool]
    """Whether they are; the argument is the first one."""
    _held: list[object]

    def __init__(self) -> None:
        self._forget()

    def note(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note the modules as they are. The first one may have hooks, and the others have none."""
        noted = list(modules)
        forget = weakref.WeakMethod(self._forget)

        def died(_: object) -> None:
            if (method := forget()) is not None:
                method()

        # A module that dies takes the note with it: else its parameters would live until the next
        # call. There is no reference to a parameter, which torch would then refuse to swap.
        references = [weakref.ref(module, died) for module in noted]
        classes = list(map(type, noted))
        originals: list[Any] = [original_class(module) for module in noted]
        forwards = [cls.forward for cls in originals]
        attributes = [module.__dict__ for module in noted]
        copies = [{**own} for own in attributes]
        # Of what is no number or string, one that is equal is another.
        places = [
            (module.__dict__, name)
            for module in noted
            for name, value in own_attributes(module)
            if not is_plain(value)
        ]
        objects = [own[name] for own, name in places]
        hooks = [hooks for module in noted[1:] for hooks in hooks_of(module)]
        contents = [own[name] for own in attributes for name in ("_buffers", "_modules")]
        values = list(_values(contents))
        ids = list(map(id, values))
        # No other object has these ids as long as buffers and references to children are held.
        held = [weakref.ref(v, died) if isinstance(v, torch.nn.Module) else v for v in values]
        parameters = [own["_parameters"] for own in attributes]
        kinds = list(map(type, _values(parameters)))
        names = list(chain(*contents, *parameters))
        have_same_layout = tensor_guard(_tensors(parameters))

        def are_as_noted(owner: torch.nn.Module) -> bool:
            return (
                references[0]() is owner
                and not any(hooks)
                and all(map(is_, [own.get(name) for own, name in places], objects))
                and attributes == copies
                and [type(module()) for module in references] == classes
                and [cls.forward for cls in originals] == forwards
                and list(map(id, _values(contents))) == ids
                and list(map(type, _values(parameters))) == kinds
                and list(chain(*contents, *parameters)) == names
                and have_same_layout(*_tensors(parameters))
            )

        self.are_as_noted, self._held = are_as_noted, held

    def _forget(self) -> None:
        self.are_as_noted = _unknown
        self._held = []


def _values(contents: list[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, contents))


def _tensors(parameters: list[dict[str, torch.Tensor | None]]) -> list[torch.Tensor]:
    return [p for own in parameters for p in own.values() if p is not None]
