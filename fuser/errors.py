"""Errors and warnings of fuser: each message is a sentence with the values concerned.

And the sentences about arguments that a function does not take, and about names that a module does
not have, which name what to write instead.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, ParamSpec

P = ParamSpec("P")


class FuserError(Exception):
    """Base of every error that fuser raises itself."""


class InputError(FuserError, ValueError):
    """An argument or tensor has a value, shape, dtype or device that cannot be used."""


class InputIndexError(InputError, IndexError):
    """An index is out of range, or a key is unknown."""


class InputTypeError(FuserError, TypeError):
    """An argument has the wrong type."""


class StateError(FuserError, RuntimeError):
    """A call is not possible at this time, or in this state of the object."""


class KernelUnavailable(StateError):
    """A kernel is not available on this machine; PyTorch can compute the same."""


class FuserWarning(UserWarning):
    """Category of the warnings of fuser, but for deprecated names."""


class EmulationWarning(FuserWarning):
    """Category of the warning that the products of a recipe are emulated on a device."""


# -- names that a module does not have ---------------------------------------------------

_PLACES = ("", ".modules", ".moe", ".recipe", ".distributed", ".testing")
"""The modules below fuser in which a name may be that another one does not have."""


def explains_names(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module: its error says where the name is, or which one is close."""

    def missing(name: str) -> NoReturn:
        here = sys.modules[module]
        sentence = f"module {module!r} has no attribute {name!r}"
        if name.startswith("__"):  # Python's own question, as of every import
            raise AttributeError(sentence, name=name, obj=here)
        places = [place for place in _PLACES if name in _names_of(f"fuser{place}")]
        if instead := _other_names("instead_of", name):
            sentence += f": {instead}."
        elif places:
            sentence += f": it is fuser{places[0]}.{name}."
        elif (close := close_name(name, _names_of(module))) is not None:
            sentence += f". Did you mean {module}.{close}?"
        raise AttributeError(sentence, name=name, obj=here)

    return missing


def _other_names(function: str, *names: str) -> str:
    """What a function of ``fuser.te.names`` says about these names; empty if they are unknown."""
    try:
        known = importlib.import_module("fuser.te.names")
    except ModuleNotFoundError as error:
        if not "fuser.te.names".startswith(str(error.name)):
            raise
        return ""  # that product may be deleted
    sentence: str = getattr(known, function)(*names)
    return sentence


def _names_of(module: str) -> list[str]:
    """The public names of a module that is imported."""
    names: list[str] = getattr(sys.modules.get(module), "__all__", [])
    return names


def public_names(namespace: Mapping[str, object], *others: str) -> list[str]:
    """The ``__all__`` of a package: what it imports without an underscore, and ``others``.

    Of modules only those in ``others``.
    """
    is_public = {n for n, v in namespace.items() if n[0] != "_" and not isinstance(v, ModuleType)}
    return sorted(is_public | set(others))


# An ``__init__`` file computes nothing: it imports these as its ``__getattr__``.
missing_attribute = explains_names("fuser")
missing_layer = explains_names("fuser.modules")


# -- arguments that a function does not take ---------------------------------------------

_HINTS = {
    ("autocast", "dtype"): "torch.autocast(device, dtype=...) chooses a dtype, and the two nest.",
    ("", "elementwise_affine"): "A gain that is frozen, weight.requires_grad_(False), remains 1.",
    ("", "recipe"): "Enter its context around the call: with fuser.autocast(recipe=...).",
}
"""What to write instead of an argument of another library, by name and argument; "" is any name."""


def close_name(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` for which ``name`` may be a slip, also in upper and lower case."""
    by_lower = {known.lower(): known for known in names}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.75)
    return by_lower[matches[0]] if matches else None


def hint_of(name: str, argument: str) -> str:
    """What to write instead of an argument that ``name`` does not take; empty if unknown."""
    hint = _HINTS.get((name, argument)) or _HINTS.get(("", argument), "")
    return f"{hint} {_other_names('hint_of', name, argument)}".strip()


def explains_arguments(
    init: Callable[P, None], done: Callable[[Any], None] | None = None
) -> Callable[P, None]:
    """Decorator of an ``__init__``: a call with wrong arguments raises a sentence about them.

    Only a call that fails costs more than one without this. ``done`` is called with the object when
    its class's ``__init__`` is over.
    """

    @functools.wraps(init)
    def explained(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            init(*args, **kwargs)
            if done is not None and type(args[0]).__init__ is explained:
                done(args[0])
        except TypeError:
            cls = type(args[0])
            is_own = cls.__init__ is explained
            name = cls.__name__ if is_own else init.__qualname__.partition(".")[0]
            sentence = _wrong_arguments(name, init, args[1:], kwargs)
            if sentence is None:  # the arguments are right, and the body raised
                raise
            raise InputTypeError(sentence) from None

    return explained


def refuse_unknown(
    name: str, function: Callable[..., object], unknown: Mapping[str, object]
) -> NoReturn:
    """Refuse the keyword arguments that ``function`` takes for this alone."""
    raise InputTypeError(_unknown(name, _names(function), next(iter(unknown))))


def _names(function: Callable[..., object]) -> tuple[list[str], list[str]]:
    """The arguments of a call that may go by place, and those that go by name alone."""
    signature = inspect.signature(function)
    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    by_place, by_name = ([p.name for p in parameters if p.kind is kind] for kind in kinds)
    return by_place, by_name


def _unknown(name: str, names: tuple[list[str], list[str]], argument: str) -> str:
    taken = [*names[0], *names[1]]
    close = close_name(argument, taken)
    hint = hint_of(name, argument) or (f"Did you mean {close}?" if close else "")
    takes = ", ".join(taken) or "none"
    return f"{name} takes no argument {argument!r}; it takes {takes}. {hint}".rstrip()


def _wrong_arguments(
    name: str,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> str | None:
    """A sentence about the arguments of a call of a method; None if the method takes them."""
    by_place, by_name = names = _names(function)
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for argument in kwargs:
        if argument not in (*by_place, *by_name) and not takes_any_name:
            return _unknown(name, names, argument)
    surplus = () if takes_any else args[len(by_place) :]
    if surplus:
        free = [key for key in by_name if key not in kwargs]
        takes = f"{len(by_place)} ({', '.join(by_place)})" if by_place else "none"
        noun = "argument" if len(args) == 1 else "arguments"
        sentence = f"{name} got {len(args)} {noun} without a name, and takes {takes}"
        if len(surplus) > len(free):
            return f"{sentence}. By name it takes {', '.join(by_name) or 'none'}."
        values = [f"{value!r:.40}" for value in args]
        named = map("=".join, zip(free, values[len(by_place) :], strict=False))
        call = ", ".join([*values[: len(by_place)], *named])
        return f"{sentence}; give others by name: {name}({call})."
    placed = by_place[: len(args)]
    for argument in placed:
        if argument in kwargs:
            return f"{name} got {argument} twice, by its place and as {argument}=."
    missing = [
        key
        for key in (*by_place, *by_name)
        if parameters[key].default is inspect.Parameter.empty and key not in (*placed, *kwargs)
    ]
    takes = ", ".join((*by_place, *by_name))
    return f"{name} got no {' and no '.join(missing)}; it takes {takes}." if missing else None
