"""What a graph depends on in its module, and whether that is as it was at the capture."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fuser.basic_ops.main_grad import accumulation
from fuser.op import BasicOperation, FusibleOperation, modules_and_ops
from fuser.precision.delayed_scaling import DelayedScales
from fuser.runtime.known_parameters import tensor_guard
from fuser.tensors import QuantizedTensor
from fuser.torch_private import hooks_of
from fuser.wrapper_tensor import WrapperTensor

Module = torch.nn.Module


class Captured:
    """The modules, parameters, buffers and attributes of ops that a graph was captured with.

    A graph reads and writes memory, whatever its module has there later: :meth:`is_unchanged` is
    asked before every replay.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        walked = list(modules_and_ops(module))
        self._paths = [path for path, _ in walked]
        self._modules = [submodule for _, submodule in walked]
        self._training = [submodule.training for submodule in self._modules]
        ops = [(path, op) for path, op in walked if isinstance(op, FusibleOperation)]
        self._attributes = [(path, op, _attributes_of(op)) for path, op in ops]
        self._accumulating = list(_accumulating(walked))
        self._facts = {name: _facts_of(tensor) for name, tensor in self._named_tensors()}
        self._overwrites = self._overwriting()
        # What is_unchanged reads.
        self._tables = [t for m in self._modules for t in (m._modules, m._parameters, m._buffers)]
        self._hooks = [hooks for submodule in self._modules[1:] for hooks in hooks_of(submodule)]
        self._parents = [submodule._modules for submodule in self._modules if submodule._modules]
        self._modes = [m.__dict__ for m in self._modules if not isinstance(m, FusibleOperation)]
        self._ops = [op.__dict__ for _, op in ops]
        tables = [submodule._parameters for submodule in module.modules()]
        slots = {id(tensor): (table, name) for table in tables for name, tensor in table.items()}
        self._slots = [slots[id(parameter)] for parameter in module.parameters()]
        holders = [table for m in module.modules() for table in (m._parameters, m._buffers)]
        self._holders = [table for table in holders if table]
        self._note()

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the module, in the order of its ``parameters()``."""
        return [p for table, name in self._slots if (p := table[name]) is not None]

    # -- in few calls ---------------------------------------------------------

    def is_unchanged(self) -> bool:
        """Whether a replay computes with the module as it is now.

        Maybe also False if something was changed and changed back.
        """
        tensors = self._tensors()
        return (
            self._structure() == self._known_structure
            and [attributes.get("_changes") for attributes in self._ops] == self._known_changes
            and len(tensors) == len(self._addresses)
            and self._has_same_layouts(*tensors)
            and list(map(_address, tensors)) == self._addresses
            and self._overwriting() == self._overwrites
        )

    def is_in_place(self) -> bool:
        """Whether parameters and buffers are where the forward has read them."""
        return list(map(_address, self._tensors())) == self._addresses

    def _note(self) -> None:
        """Note what :meth:`is_unchanged` compares."""
        self._known_structure = self._structure()
        self._known_changes = [attributes.get("_changes") for attributes in self._ops]
        tensors = self._tensors()
        self._addresses = list(map(_address, tensors))
        self._has_same_layouts = tensor_guard(tensors)

    def _structure(self) -> tuple[list[object], ...]:
        """Numbers of parameters, of buffers and of hooks; submodules; modes of torch's modules.

        The mode of an op is one of its attributes. Hooks of the whole module run beside its graph.
        """
        return (
            list(map(len, self._tables)),
            list(map(len, self._hooks)),
            list(map(list, map(dict.values, self._parents))),
            [attributes["training"] for attributes in self._modes],
        )

    def _tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers, and each ``main_grad`` that is added to; the parts of quantized."""
        tensors = [t for table in self._holders for t in table.values() if t is not None]
        if self._accumulating:
            tensors += [tensor for _, tensor in self._main_grads()]
        for tensor in [t for t in tensors if isinstance(t, WrapperTensor)]:
            tensors += tensor._memory()
        return tensors

    def _main_grads(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, op, name in self._accumulating:
            main_grad = getattr(op._parameters[name], "main_grad", None)
            if main_grad is not None:
                yield f"{path}.{name}.main_grad".strip("."), main_grad

    def _overwriting(self) -> list[bool]:
        """Whether each weight's ``main_grad`` is cleared before a gradient is added."""
        return [accumulation(op._parameters[name])[1][0] for _, op, name in self._accumulating]

    # -- with names -----------------------------------------------------------

    def change(self) -> str | None:
        """What has changed since the capture, as a part of a sentence; None if nothing has."""
        paths, modules = zip(*modules_and_ops(self._module), strict=True)
        if [*paths] != self._paths or not all(map(operator.is_, modules, self._modules)):
            return "a module in it was added, removed or replaced"
        for path, module, training in zip(paths, modules, self._training, strict=True):
            if module.training is not training:
                return f"{path!r} has training={module.training}"
        if self._known_structure[1] != self._structure()[1]:
            return "hooks of modules in it were added or removed"
        for path, op, values in self._attributes:
            present = _attributes_of(op)
            for name in {**values, **present}:
                if not _is_equal(values.get(name, _ABSENT), present.get(name, _ABSENT)):
                    return f"the attribute {name!r} of {path or 'it'!r} was set"
        present_facts = {name: _facts_of(tensor) for name, tensor in self._named_tensors()}
        for name in {**self._facts, **present_facts}:
            before, now = self._facts.get(name), present_facts.get(name)
            if before != now:
                return _tensor_change(name, before, now)
        if self._overwriting() != self._overwrites:
            return "overwrite_main_grad of a weight was set"
        self._note()
        return None

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, module in self._module.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        yield f"{path}.{name}".strip("."), tensor
        yield from self._main_grads()


def accumulating_weights(module: Module) -> list[torch.Tensor]:
    """The weights of a module whose gradients a backward adds to their ``main_grad``."""
    return [op._parameters[name] for _, op, name in _accumulating(modules_and_ops(module))]


def _accumulating(
    walked: Iterable[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, Any, str]]:
    """The path of each op that accumulates into ``main_grad``, the op, and the name of a weight."""
    for path, op in walked:
        if isinstance(op, BasicOperation) and op.accumulates_into_main_grad:
            for name in list(op._parameters)[: op.main_grad_count]:
                weight = op._parameters[name]
                if weight is not None and weight.requires_grad and weight.is_leaf:
                    yield path, op, name


# -- tensors --------------------------------------------------------------------


class _TensorFacts(NamedTuple):
    """What a graph depends on in a tensor, besides its values."""

    type: str
    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    addresses: tuple[int, ...]


def _facts_of(tensor: torch.Tensor) -> _TensorFacts:
    parts = tensor._memory() if isinstance(tensor, WrapperTensor) else [tensor]
    layout = (tuple(tensor.shape), tensor.stride(), tuple(map(_address, parts)))
    return _TensorFacts(type(tensor).__name__, tensor.dtype, tensor.requires_grad, *layout)


def _tensor_change(name: str, before: _TensorFacts | None, now: _TensorFacts | None) -> str:
    if before is None or now is None:
        return f"{name!r} was {'removed' if now is None else 'added'}"
    for field, was, has in zip(_TensorFacts._fields, before, now, strict=True):
        if was != has and field != "addresses":
            return f"the {field} of {name!r} was {was} and is {has}"
    return f"{name!r} is in other memory"


def _address(tensor: torch.Tensor) -> int:
    """The address of the values; 0 of a wrapper, whose parts have one each."""
    return 0 if isinstance(tensor, WrapperTensor) else tensor.data_ptr()


# -- attributes of ops ----------------------------------------------------------

_ABSENT = object()
# Compared by themselves; and the forward of a graphed op, which is that of its graph.
_NOT_COMPARED = (
    "_changes",
    "_structure",
    "_delayed",
    "_parameters",
    "_buffers",
    "_modules",
    "forward",
)


def _attributes_of(op: FusibleOperation) -> dict[str, object]:
    """The attributes of an op, without caches."""
    return {n: value for n, value in op.__getstate__().items() if n not in _NOT_COMPARED}


def _is_equal(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or type(one) is not type(other):
        return False
    try:
        return bool(one == other)
    except RuntimeError:  # tensors in a list
        return False


# -- states of delayed scaling --------------------------------------------------


class CapturedStates:
    """The states of delayed scaling that a forward or a backward was captured with.

    An op may have another state later, as after a load, or its state other memory. It then
    continues in the memory that the graph reads and writes.
    """

    def __init__(self, module: Module, states: Sequence[DelayedScales]) -> None:
        slots = {
            state: (op, mode)
            for _, op in modules_and_ops(module)
            if isinstance(op, BasicOperation)
            for mode, state in op._delayed.items()
        }
        self._states = [state for state in states if state in slots]
        self._slots = [slots[state] for state in self._states]
        self._memory = [state.memory() for state in self._states]
        # States of ops that are no submodules are always these.
        self._others = [state for state in states if state not in slots]

    def current(self) -> list[DelayedScales] | None:
        """The states of the ops, which are in the memory of the graph.

        None if one of them cannot be: a quantized parameter is written with the scales of its op.
        """
        states = [op._delayed.get(mode) for op, mode in self._slots]
        for place, (state, memory) in enumerate(zip(states, self._memory, strict=True)):
            if state is None or not state.is_in(memory):
                moved = self._moved(place)
                if moved is None:
                    return None
                self._states[place] = moved
        return self._states + self._others

    def _moved(self, place: int) -> DelayedScales | None:
        """The state of an op, after it was moved into the memory of the graph."""
        op, mode = self._slots[place]
        memory, before = self._memory[place], self._states[place]
        if any(isinstance(p, QuantizedTensor) for p in op._parameters.values()):
            return None
        state, dtypes, device = op._delayed_state(mode, memory.recipe)
        state.prepare(memory.recipe, dtypes, device)
        if state is not before:
            before.leave(memory)
        state.move_into(memory)
        return state
