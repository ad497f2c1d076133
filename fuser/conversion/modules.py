"""Modules as a conversion sees them: children by path, attributes, hooks, and copies to try."""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fuser import torch_private
from fuser.conversion.held_objects import CHECKPOINTING, held, is_plain

OWN_FORWARD = "a forward of its own"


def original_class(module: torch.nn.Module) -> type:
    """The class of a module before it was converted."""
    cls: type = getattr(type(module), "_class_before_fuser", type(module))
    return cls


def forward_of(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward of a module's class, before it was converted."""
    forward: Callable[..., Any] = original_class(module).forward  # type: ignore[attr-defined]
    return forward


def hooks_of(module: torch.nn.Module) -> str | None:
    """What a call of the module would run beside its class's forward; None if nothing."""
    if "forward" in module.__dict__:
        return OWN_FORWARD
    return "hooks" if any(torch_private.hooks_of(module)) else None


def joint(path: str, name: str) -> str:
    """The path of what has the path ``name`` from the module at ``path``."""
    return f"{path}.{name}".strip(".")


def prefixes(path: str) -> list[str]:
    """A path and the paths of what it is in: ``a.b.c`` gives ``a``, ``a.b`` and ``a.b.c``."""
    names = path.split(".") if path else []
    return [".".join(names[: i + 1]) for i in range(len(names))]


INTERNALS = frozenset(
    (
        *torch.nn.Module().__dict__,
        # What torch, transformers and accelerate set on modules, and no forward computes with.
        *("_compiled_call_impl", "_is_torch_compile"),
        *("_is_hf_initialized", "_is_accelerate_prepared"),
        # How torchtitan fills and shards parameters: its layers differ in the objects.
        *("_param_init", "_sharding_config", "_pos_arg_list", "_parallelized"),
        # A forward that was set on the object: hooks_of looks for it.
        *("forward", "_original_forward"),
    )
)
"""Attributes of modules that do not change what they compute."""

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)

BOOKKEEPING = ("_fuser", "_fsdp", "_is_fsdp", "__composable")
"""How such attributes of fuser and of FSDP2 begin."""


def attributes_of(module: torch.nn.Module) -> tuple[object, ...]:
    """What a module computes with besides its parameters and children: numbers, and objects."""
    own = [(n, v if is_plain(v) else id(v)) for n, v in own_attributes(module)]
    buffers = [(name, id(buffer)) for name, buffer in module._buffers.items()]
    absent = [name for name, parameter in module._parameters.items() if parameter is None]
    return forward_of(module), *own, *buffers, *absent


def plain_attributes(module: torch.nn.Module) -> tuple[tuple[str, object], ...]:
    """Those of a module's attributes that are numbers, texts and functions, by their names."""
    return tuple(
        (n, v) for n, v in own_attributes(module) if is_plain(v) or isinstance(v, FUNCTIONS)
    )


def own_attributes(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """The attributes with which a module may compute, besides parameters, buffers and children."""
    unread = _unread(module)
    return (
        (name, value)
        for name, value in module.__dict__.items()
        if name not in INTERNALS and name not in unread and not name.startswith(BOOKKEEPING)
    )


def _unread(module: torch.nn.Module) -> set[str]:
    """Those of :data:`CHECKPOINTING` that the forward of a module's class does not name."""
    code = getattr(inspect.unwrap(forward_of(module)), "__code__", None)
    return set(CHECKPOINTING).difference(code.co_names if code is not None else ())


CONTENTS = "_fuser_contents"


def bare(
    module: torch.nn.Module, values: Mapping[str, torch.Tensor] | None = None
) -> torch.nn.Module:
    """A copy of a module in evaluation, of its own class and without hooks, to be tried.

    ``values`` has a value for every parameter, by its path; None for the parameters themselves.
    Tensors that are no parameters, and lists, dicts and sets, are copies, into which a forward may
    write; everything else is the module's own.
    """
    cls: Any = original_class(module)
    tried: torch.nn.Module = object.__new__(cls)
    torch.nn.Module.__init__(tried)
    left_out = _unread(module).union(tried.__dict__)
    own = {
        name: held(module, name, _copied(value))
        for name, value in module.__dict__.items()
        if name not in left_out and not name.startswith(BOOKKEEPING)
    }
    tried.__dict__.update(own, training=False)
    tried._buffers.update({name: _copied(b) for name, b in module._buffers.items()})
    tried._parameters.update(module._parameters)
    for name, parameter in module._parameters.items():
        if values is not None and parameter is not None:
            tried._parameters[name] = torch.nn.Parameter(values[name], requires_grad=False)
    for name, child in module._modules.items():
        start = name + "."
        inner = None
        if values is not None:
            inner = {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}
        tried._modules[name] = None if child is None else bare(child, inner)
    tried.__dict__[CONTENTS] = {n: _contents(v) for n, v in (*own.items(), *tried._buffers.items())}
    return tried


def written_attributes(tried: torch.nn.Module) -> list[str]:
    """The names of what a forward of a copy that :func:`bare` has made has written into."""
    return [
        joint(path, name)
        for path, module in tried.named_modules()
        for name, before in module.__dict__[CONTENTS].items()
        if not _are_same(before, _contents(module._buffers.get(name, module.__dict__.get(name))))
    ]


def _copied(value: Any) -> Any:
    if type(value) is torch.Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.copy(value) if type(value) in (list, dict, set) else value


def _contents(value: Any) -> list[object]:
    """What a write into a tensor or a container changes: objects, to be compared by identity."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_inference() else [value._version]
    if type(value) is dict:
        return [*itertools.chain.from_iterable(value.items())]
    return [*value] if type(value) in (list, set) else []


def _are_same(before: list[object], now: list[object]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


def child_of(owner: torch.nn.Module, path: str) -> Any:
    """The submodule at a path; None if there is none."""
    module: Any = owner
    for name in path.split(".") if path else ():
        module = module._modules.get(name)
        if module is None:
            return None
    return module
