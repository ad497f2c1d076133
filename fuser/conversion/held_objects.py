"""Objects that modules hold, such as a config: what forwards read of them, and what it was."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from fuser.conversion.allowed import TRUSTED, Untraceable, is_asked_by_forward

NEVER_MATTER = ("_experts_implementation",)
"""What transformers reads to choose among implementations of equal values."""

DEEPEST = 8
OTHERS = (
    *(torch.nn.Module, torch.Tensor, type, tuple, enum.Enum, functools.partial),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
"""Objects of which nothing is noted: if a module holds another one, that counts."""

UNREADABLE = (torch.Generator, numpy.ndarray, weakref.ReferenceType)

LIBRARIES = ("torch", "builtins", "numpy")
"""Whose objects hold what is theirs."""

CALLED = (types.FunctionType, staticmethod, classmethod, property)
CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")
"""What few forwards read themselves: of others, the call around the forward does."""
_ABSENT = object()

SPECIAL = ("__call__", "__contains__", "__iter__", "__len__", "__bool__", "__eq__", "__hash__")


@dataclass(frozen=True)
class Read:
    """A value that a forward has read from an object; AttributeError if there was none.

    ``path`` is that of the module that holds the object, from the owner of the forward. ``steps``
    from there have whether each is an item, and its name. They begin at the Python module
    ``source`` if that has a name: it is a global.
    """

    path: str
    steps: tuple[tuple[bool, Any], ...]
    value: Any
    source: str = ""

    def is_as_before(self, module: torch.nn.Module | None) -> bool:
        """Whether the same is read now; ``module`` is the one at the path."""
        value: Any = sys.modules.get(self.source) if self.source else module
        for is_item, name in self.steps:
            try:
                value = value[name] if is_item else getattr(value, name)
            except (AttributeError, LookupError, TypeError):
                value = AttributeError
        return type(value) is type(self.value) and bool(value == self.value)

    @property
    def text(self) -> str:
        """The value in a sentence."""
        steps = "".join(f"[{n!r}]" if is_item else f".{n}" for is_item, n in self.steps)[1:]
        return f"{steps} of {self.source or self.path or 'it'}"


Steps = tuple[tuple[bool, Any], ...]


class Reads:
    """What forwards of bare modules have read while :func:`recorded_reads` was entered."""

    def __init__(self) -> None:
        self._of_modules: dict[int, dict[Steps, Any]] = {}

    def note(self, module: torch.nn.Module, steps: Steps, value: object) -> None:
        """Note what the forward of ``module`` has read by ``steps``."""
        if steps[-1][1] not in NEVER_MATTER:
            self._of_modules.setdefault(id(module), {})[steps] = value

    def inside(self, owner: torch.nn.Module, paths: Collection[str]) -> tuple[Read, ...]:
        """What ``owner`` and the modules in it have read, those at ``paths`` also of globals."""
        reads: list[Read] = []
        for path, module in owner.named_modules():
            noted = self._of_modules.get(id(module), {})
            reads += (Read(path, steps, value) for steps, value in noted.items())
        for path in dict.fromkeys(paths):
            reads += _named_in_code(owner.get_submodule(path), path)
        return tuple(reads)


_reads: ContextVar[Reads | None] = ContextVar("reads", default=None)


@contextlib.contextmanager
def recorded_reads() -> Iterator[Reads]:
    """A context in which the forwards of bare modules note what they read of objects."""
    token = _reads.set(Reads())
    try:
        yield _reads.get()  # type: ignore[misc]
    finally:
        _reads.reset(token)


def _named_in_code(module: torch.nn.Module, path: str) -> Iterator[Read]:
    """The plain globals and attributes of its class that the forward of a module may read.

    That is what its code names, and that of the functions and methods of Python that are named.
    """
    cls: Any = getattr(type(module), "_class_before_fuser", type(module))
    functions: list[Any] = [cls.forward]
    names: dict[str, None] = {}
    sources: dict[str, Any] = {}
    seen: set[types.CodeType] = set()
    values: dict[tuple[str, Steps], Any] = {}
    while functions:
        for function in map(_unbound, functions):
            if type(function) is not types.FunctionType or function.__code__ in seen:
                continue
            seen.add(function.__code__)
            functions = [*functions, *_inside(function)]
            source = function.__globals__.get("__name__", "")
            if source.split(".")[0] not in LIBRARIES and not source.startswith(TRUSTED):
                sources[source] = sys.modules.get(source)
                names |= dict.fromkeys(_names_in(function.__code__))
        of_class = [name for name in names if name not in module.__dict__]
        values = dict(_values_named(cls, of_class, ""))
        for source, holder in sources.items():
            values |= _values_named(holder, names, source)
        for name, value in module.__dict__.items():
            if isinstance(value, type) and name in names:
                values |= _values_named(value, names, "", name)
        held_functions = (module.__dict__.get(name) for name in names)
        bases = (base.__dict__.get(name) for base in cls.__mro__ for name in names)
        called = [*values.values(), *held_functions, *functions, *bases]
        functions = [f for f in map(_unbound, called) if _is_new(f, seen)]
    for (source, steps), value in values.items():
        if _is_data(value) or isinstance(value, enum.Enum):
            yield Read(path, steps, copy.deepcopy(value), source)


def _unbound(function: Any) -> Any:
    """The function of a method or a property."""
    if isinstance(function, property):
        return function.fget
    is_bound = isinstance(function, (staticmethod, classmethod, types.MethodType))
    return function.__func__ if is_bound else function


def _inside(function: types.FunctionType) -> list[Any]:
    """What a decorator has put another function around."""
    cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]
    return [getattr(function, "__wrapped__", None), *(cell.cell_contents for cell in cells)]


def _is_new(function: Any, seen: set[types.CodeType]) -> bool:
    is_library = str(getattr(function, "__module__", "")).split(".")[0] in LIBRARIES
    return type(function) is types.FunctionType and not is_library and function.__code__ not in seen


def _names_in(code: types.CodeType) -> list[str]:
    inner = (_names_in(const) for const in code.co_consts if type(const) is types.CodeType)
    texts = (const for const in code.co_consts if isinstance(const, str) and const.isidentifier())
    names = (name for name in (*code.co_names, *texts) if not name.startswith("__"))
    return list(dict.fromkeys([*names, *itertools.chain.from_iterable(inner)]))


def _values_named(
    holder: Any, names: Iterable[str], source: str, *above: str
) -> Iterator[tuple[tuple[str, Steps], Any]]:
    """What an object has by these names, and what that has by them, as long as it is no library's.

    With each, the Python module and the steps to it.
    """
    for name in names:
        value = inspect.getattr_static(holder, name, _ABSENT)
        module = str(getattr(value, "__module__", None) or getattr(value, "__name__", ""))
        if value is _ABSENT or module.split(".")[0] in LIBRARIES or name in CHECKPOINTING:
            continue
        if _is_data(value) or isinstance(value, (enum.Enum, *CALLED)):
            yield (source, tuple((False, step) for step in (*above, name))), value
        elif len(above) < 3 and not isinstance(value, (torch.Tensor, types.BuiltinFunctionType)):
            yield from _values_named(value, names, source, *above, name)


def tensors_of(module: torch.nn.Module) -> list[str]:
    """The names of a module's own tensors besides parameters, whose values may change."""
    plain = (name for name, value in module.__dict__.items() if isinstance(value, torch.Tensor))
    return [*module._buffers, *plain]


def is_plain(value: object) -> bool:
    """Whether a value never changes, and equals those with which the same is computed."""
    if type(value) is tuple:
        return all(is_plain(item) for item in value)
    return isinstance(value, (bool, int, float, str))


def held(module: torch.nn.Module, name: str, value: Any) -> Any:
    """An attribute of a module as a bare copy has it: one that notes what is read of it."""
    reads = _reads.get()
    if isinstance(value, torch.nn.Module) and reads is not None:
        return _Unreadable(name)  # it is no child
    if reads is None or is_plain(value):
        return value  # the owner's attributes are compared in any case
    return _noting(value, ((False, name),), functools.partial(reads.note, module))


def noting_children(tried: torch.nn.Module, owner: torch.nn.Module, paths: Iterable[str]) -> None:
    """Let a bare copy of a module note what its forward reads of its children at ``paths``."""
    reads = _reads.get()
    if reads is None:
        return
    for path in paths:
        child = tried.get_submodule(path)
        child.__dict__["_fuser_note"] = functools.partial(reads.note, owner.get_submodule(path))
        cls: Any = type(child)
        child.__class__ = _noting_class(cls)


@functools.cache
def _noting_class(cls: Any) -> Any:
    """A subclass of a module's class whose objects note which plain attributes are read."""

    def get(self: Any, name: str) -> Any:
        value = cls.__getattribute__(self, name)
        is_noted = (value is None or is_plain(value)) and not name.startswith("__")
        if is_noted and is_asked_by_forward():
            if name == "training":
                raise Untraceable("its forward reads the mode of another module")
            cls.__getattribute__(self, "__dict__")["_fuser_note"](((False, name),), value)
        return value

    members = {"__getattribute__": get, "_class_before_fuser": cls, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members)


def _noting(value: Any, steps: Steps, note: Callable[[Steps, object], None]) -> Any:
    """A value that was read, or a stand-in for it, of which what is read is noted."""
    is_tensor = isinstance(value, torch.Tensor) and len(steps) > 1
    is_random = type(value).__module__.startswith("numpy.random")  # which is imported late
    if is_tensor or is_random or isinstance(value, UNREADABLE):
        return _Unreadable(steps[0][1])
    if _is_data(value):
        note(steps, copy.deepcopy(value))
    elif type(value) in (list, tuple) and len(steps) < DEEPEST:
        items = [_noting(item, (*steps, (True, i)), note) for i, item in enumerate(value)]
        return type(value)(items)
    elif type(value) is dict and len(steps) < DEEPEST:
        return {k: _noting(item, (*steps, (True, k)), note) for k, item in value.items()}
    elif not isinstance(value, OTHERS) and type(value).__module__.split(".")[0] not in LIBRARIES:
        return _stand_in(value, steps, note)
    return value


class _Unreadable:
    """In place of what a module holds and forwards may not read: they would have no graph.

    Such are tensors in objects, arrays, random generators, weak references, and modules that are no
    children: no call would see that their values have changed.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def _refuse(self, *args: object, **keywords: object) -> Any:
        raise RuntimeError(f"it reads values from {self._owner}, which may change")

    __getattr__ = __getitem__ = __torch_function__ = _refuse


def _is_data(value: object) -> bool:
    """Whether a value is compared by what it is, with all that it holds."""
    if type(value) is dict:
        return all(map(_is_data, value)) and all(map(_is_data, value.values()))
    if type(value) in (list, tuple, set):
        return all(map(_is_data, value))  # type: ignore[call-overload]
    return value is None or is_plain(value)


def _stand_in(real: Any, steps: Steps, note: Callable[[Steps, object], None]) -> Any:
    """An object that looks like ``real``, and notes what is read of it."""
    cls: Any = type(real)

    def get(self: Any, name: str) -> Any:
        if name == "get" and isinstance(real, dict):
            return types.MethodType(members[name], self)
        further = (*steps, (False, name))
        try:
            value = getattr(real, name)
        except AttributeError:
            note(further, AttributeError)
            raise
        if name.startswith("__"):
            return value
        if type(value) is types.MethodType and value.__self__ is real:
            return types.MethodType(value.__func__, self)
        return _noting(value, further, note)

    def item(self: Any, key: Any) -> Any:
        return _noting(real[key], (*steps, (True, key)), note)

    def refuse(self: Any, *args: object) -> None:
        raise RuntimeError(f"it writes into a {cls.__name__}")

    def found(self: Any, key: Any) -> bool:
        if key not in real:
            note((*steps, (True, key)), AttributeError)
        return key in real

    members: dict[str, Any] = {"__getattribute__": get, "__setattr__": refuse}
    if hasattr(cls, "__getitem__"):
        members |= {"__getitem__": item, "__setitem__": refuse}
    for name in SPECIAL:
        function = getattr(cls, name, None)
        if type(function) is types.FunctionType:
            members[name] = function
        elif function is not None:
            members[name] = lambda self, *args, f=function: f(real, *args)
    if isinstance(real, dict):
        members["__contains__"] = found
        members["get"] = lambda self, key, other=None: (
            item(self, key) if found(self, key) else other
        )
    return type(cls.__name__, (), members)()
