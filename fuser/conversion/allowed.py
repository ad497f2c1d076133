"""What a forward may do while torch.fx traces it: what a graph holds, and nothing else.

A graph has the operations of one call on its inputs. All else that code does is lost in later
calls, as a counter or a context is, or stays as it was, as a random number. So it is refused.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from fuser.torch_private import WITHOUT_EFFECT, Call, frames, module_of, told_of_calls


class Untraceable(Exception):
    """A forward has no graph that holds for all its calls; the message says why."""


LIBRARIES = ("torch", "fuser")
"""Whose functions are known as a whole, and not by what their code does."""

TRUSTED = ("transformers.utils", "transformers.modeling_layers")
"""Modules whose decorators of forwards stay around that of a converted class."""

CALLED_FREELY = (
    *("torch.fx", "torch.overrides", *WITHOUT_EFFECT),
    *("torch.nn.modules.container", "fuser.conversion"),
)
"""Modules of which a forward may call all functions."""

OF_MODULES = (
    *("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "forward"),
    *("__torch_function__", "children", "named_children", "modules", "named_modules", "parameters"),
    *("named_parameters", "buffers", "named_buffers"),
)
"""Functions of torch's modules that change nothing."""

# Functions that are not Python's and change nothing: by name, of containers, and of values.
BUILTINS = frozenset(
    (
        *("len", "getattr", "isinstance", "issubclass", "callable", "min", "max", "abs", "sum"),
        *("round", "divmod", "pow", "iter", "next", "any", "all", "sorted", "format", "repr"),
    )
)
OF_CONTAINERS = ("get", "items", "keys", "values", "index", "count", "copy")
VALUES = (str, int, float, bool, bytes, tuple, complex, torch.Size)

# Objects of which nothing can be noted, and methods that make a number of a tensor.
UNSEEN = (threading.local, ContextVar, weakref.ReferenceType)
_T = torch.Tensor
OF_NUMBERS = frozenset(
    (
        *(_T.item, _T.tolist, _T.numpy, _T.__float__, _T.__int__),
        *(_T.__bool__, _T.__index__, _T.__complex__),
    )
)

DOES = {
    "WITH_EXCEPT_START": "has a with statement",
    "SETUP_WITH": "has a with statement",
    "PUSH_EXC_INFO": "catches errors",
    "SETUP_FINALLY": "catches errors",
    "STORE_ATTR": "sets attributes",
    "DELETE_ATTR": "sets attributes",
    "STORE_GLOBAL": "sets globals",
    "DELETE_GLOBAL": "sets globals",
    "STORE_SUBSCR": "writes into a tensor or a container",
    "STORE_SLICE": "writes into a tensor or a container",
    "DELETE_SUBSCR": "writes into a tensor or a container",
    "IMPORT_NAME": "imports a module",
    "IMPORT_FROM": "imports a module",
}
"""By operations of Python, what code does that no graph holds."""


@contextlib.contextmanager
def only_tensors() -> Iterator[None]:
    """A context in which code outside of :data:`LIBRARIES` may only compute with tensors.

    What else it calls is refused before it runs.
    """
    with _NoValues(), told_of_calls(_see):
        yield


def _see(call: Call) -> None:
    """Raise for a call that no graph holds."""
    is_of_others = not is_of_library(call.modules)
    if call.function is not None:
        if is_of_others and not _may_be_called(call.function):
            raise Untraceable(f"its forward calls {_name_of(call.function)}")
    elif is_of_others:
        does = _does(call.code) or _reads_of_others(call)
        if does is not None:
            name = call.code.co_name
            raise Untraceable(f"its forward {does}" + f", in {name}" * (name != "forward"))
    elif not is_of_library(itertools.islice(call.modules, 1, None)):
        module, code = next(call.modules), call.code
        is_known = module.startswith(CALLED_FREELY) or code.co_name in OF_MODULES
        if not is_known and code not in _overridable()[1]:
            raise Untraceable(f"its forward calls {code.co_name} of {module}")


class _NoValues(torch.overrides.TorchFunctionMode):
    """A mode that refuses to read numbers from tensors: a graph would keep those of one call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OF_NUMBERS:
            raise Untraceable("its forward reads the values of a tensor")
        return func(*args, **(kwargs or {}))


def _reads_of_others(call: Call) -> str | None:
    """Whether a function reads an object of which a conversion cannot note what it reads."""
    present, local = call.variables()
    for name in call.code.co_names:
        value = present.get(name)
        is_other_dict = isinstance(value, dict) and type(value) is not dict
        if is_other_dict or isinstance(value, UNSEEN):
            return f"reads {name}, of which changes are not seen"
    for name in call.code.co_freevars:
        if isinstance(local.get(name), (list, dict, set)):
            return f"reads {name} of another function, of which changes are not seen"
    return None


def is_of_library(modules: Iterable[str]) -> bool:
    """Whether code is torch's or fuser's, or Python's own that they call.

    ``modules`` are its module and those of what called it.
    """
    for module in modules:
        root = module.split(".")[0]
        is_pythons = root in sys.stdlib_module_names or root.startswith("namedtuple_")
        if not is_pythons or root == "__main__":
            return root in LIBRARIES or module.startswith(TRUSTED)
    return True


def is_asked_by_forward() -> bool:
    """Whether code outside of :data:`LIBRARIES` runs the function that asks."""
    return not is_of_library(map(module_of, itertools.islice(frames(), 3, None)))


@functools.cache
def _overridable() -> tuple[frozenset[object], frozenset[types.CodeType]]:
    """Functions of torch that a graph records, and the code of those that are Python."""
    functions = torch.overrides.get_testing_overrides()
    codes = (getattr(function, "__code__", None) for function in functions)
    return frozenset(functions), frozenset(code for code in codes if code is not None)


def _may_be_called(called: Any) -> bool:
    """Whether a function that is not Python's has no effect, and depends on its arguments alone."""
    owner = getattr(called, "__self__", None)
    if owner is builtins:
        return called.__name__ in BUILTINS
    if isinstance(owner, (dict, list)):
        return called.__name__ in OF_CONTAINERS
    if isinstance(owner, torch.Tensor):
        return getattr(torch.Tensor, called.__name__, None) in _overridable()[0]
    is_value = isinstance(owner, VALUES) or getattr(called, "__module__", "") == "math"
    return is_value or called in _overridable()[0]


def _name_of(called: Any) -> str:
    owner = getattr(called, "__self__", None)
    module = getattr(called, "__module__", None) or type(owner).__name__
    return f"{called.__name__} of {module}"


@functools.lru_cache(maxsize=1024)
def _does(code: types.CodeType) -> str | None:
    """What the code of a function does that no graph holds; None if nothing."""
    steps = list(dis.get_instructions(code))
    operations = {step.opname for step in steps}
    for operation, does in DOES.items():
        if operation in operations:
            return does
    for step in steps:
        if step.opname == "STORE_DEREF" and step.argval in code.co_freevars:
            return "sets a variable of another function"
        if step.opname == "LOAD_GLOBAL" and step.argval in ("type", "hasattr"):
            return f"calls {step.argval} of a value"
    return _reads_keywords(code, steps) or _compares_a_local(steps)


def enters_contexts(code: types.CodeType) -> bool:
    """Whether a function has a ``with`` statement."""
    return _does(code) == DOES["WITH_EXCEPT_START"]


def _reads_keywords(code: types.CodeType, steps: list[dis.Instruction]) -> str | None:
    """Whether code does more with its ``**kwargs`` than to pass them on, all of them."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[count]
    following = [*steps[1:], None]
    is_read = name in code.co_cellvars or any(
        _loads(step, name) and (after is None or after.opname != "DICT_MERGE")
        for step, after in zip(steps, following, strict=True)
    )
    return f"reads its **{name}" if is_read else None


def _loads(step: dis.Instruction, name: str) -> bool:
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return step.opname.startswith("LOAD_FAST") and name in names


def _compares_a_local(steps: list[dis.Instruction]) -> str | None:
    """What code asks about the identity of a local variable, which a trace answers otherwise."""
    for at, step in enumerate(steps):
        operands: list[dis.Instruction] = []
        if step.opname.endswith("_NONE"):
            operands = steps[at - 1 : at]
        elif step.opname == "IS_OP":
            operands = steps[at - 2 : at]
        if any(operand.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) for operand in operands):
            return "asks whether a variable is None, or another object"
    return None
