"""A converted forward: its chains run as pipelines, its other steps as they are."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fuser.conversion.chains import ADDITIONS, Chains, FoundChain
from fuser.conversion.parts import Chain, hooks_of, slots_of
from fuser.conversion.trace import OTHER_KEYWORDS, parameters_of, traced
from fuser.errors import StateError
from fuser.precision.contexts import autocast
from fuser.sequential import Sequential
from fuser.torch_private import has_global_hooks

REQUIRED = "no default"
"""The default of an input that every call gives."""

# What a step between chains may call: it has no effect but its result.
FUNCTIONS = (operator.getitem, *ADDITIONS, operator.mul)


@dataclass(frozen=True)
class Ref:
    """The value of an input or a step, by its number."""

    index: int


@dataclass(frozen=True)
class Step:
    """A step of a converted forward.

    Parameters
    ----------
    target
        A chain; else the path of a module, or a function.
    args, keywords
        Of the call, with :class:`Ref` for values.
    takes_others
        Whether the call also gets the keyword arguments that the forward does not name.
    """

    target: Any
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()
    takes_others: bool = False


@dataclass(frozen=True)
class Unit:
    """A forward with chains.

    Parameters
    ----------
    inputs
        Names of its parameters, and their defaults.
    steps, output
        What it runs, and what it returns.
    is_quantized
        False to run unquantized, also inside of autocast.
    """

    inputs: tuple[tuple[str, Any], ...]
    steps: tuple[Step, ...]
    output: Any
    is_quantized: bool = True

    @property
    def chains(self) -> list[Chain]:
        """The chains, in the order in which they run."""
        return [step.target for step in self.steps if isinstance(step.target, Chain)]

    @property
    def is_one_chain(self) -> bool:
        """Whether it is a chain from its only input to its output."""
        return len(self.steps) == 1 == len(self.inputs) and self.output == Ref(1)

    def as_torch(self) -> Unit:
        """The unit with torch's order of rounding in 16 bits."""
        steps = (
            replace(step, target=step.target.as_torch()) if isinstance(step.target, Chain) else step
            for step in self.steps
        )
        return replace(self, steps=tuple(steps))

    def refusal(self, owner: torch.nn.Module) -> str | None:
        """Why the owner's own forward has to run; None if it has not."""
        if getattr(owner, "_is_replica", False):
            return "replicas of torch.nn.DataParallel share a pipeline"
        if has_global_hooks():
            return "there are hooks for the calls of every module"
        for step in self.steps:
            if isinstance(step.target, Chain):
                refusal = step.target.refusal(owner)
                if refusal is not None:
                    return refusal
        return None

    @property
    def linears(self) -> list[str]:
        """The paths of all linears in chains."""
        return [name for chain in self.chains for name in chain.linears]

    @property
    def text(self) -> str:
        """The unit in a report."""
        return "; ".join(chain.text for chain in self.chains)


class Known(NamedTuple):
    """A module that a unit does not call: where it is, and its class."""

    held: dict[str, Any]
    name: str
    module: torch.nn.Module
    cls: type


class Runner:
    """Runs a unit with its owner's present parameters."""

    def __init__(self, unit: Unit, owner: torch.nn.Module) -> None:
        self.unit = unit
        self.names = [name for name, _ in unit.inputs]
        self.pipelines: dict[int, Pipeline] = {
            index: Pipeline(step.target, owner)
            for index, step in enumerate(unit.steps)
            if isinstance(step.target, Chain)
        }

        self._known: list[Known] = []

    def refusal(self, owner: torch.nn.Module) -> str | None:
        """As of the unit; quicker if all modules are those of the last call."""
        for held, name, module, cls in self._known:
            if held.get(name) is not module or type(module) is not cls or hooks_of(module):
                self._known = []
                break
        if self._known and not has_global_hooks():
            for pipeline in self.pipelines.values():
                for part in pipeline.chain.parts:
                    if (refusal := part.refusal(owner)) is not None:
                        return refusal
            return None
        refusal = self.unit.refusal(owner)
        if refusal is None and not torch.compiler.is_compiling():
            self._known = list(self._uncalled(owner))
        return refusal

    def _uncalled(self, owner: torch.nn.Module) -> Iterator[Known]:
        for pipeline in self.pipelines.values():
            for path, _ in pipeline.chain.replaced:
                parent, _, name = path.rpartition(".")
                held = owner.get_submodule(parent)._modules
                yield Known(held, name, held[name], type(held[name]))  # type: ignore[arg-type]

    def bound(self, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """The values of the inputs and all other keywords; None if they are no such call."""
        if len(args) > len(self.names):
            return None
        given = dict(zip(self.names, args, strict=False))
        if any(name in given for name in keywords):
            return None
        others = {k: v for k, v in keywords.items() if k not in self.names}
        given.update({k: v for k, v in keywords.items() if k in self.names})
        values = []
        for name, default in self.unit.inputs:
            if name == OTHER_KEYWORDS:
                continue
            if name not in given and default is REQUIRED:
                return None
            values.append(given.get(name, default))
        if OTHER_KEYWORDS in self.names:
            values.append(None)
        elif others:
            return None
        return values, others

    def run(self, owner: torch.nn.Module, values: list[Any], others: dict[str, Any]) -> Any:
        """The output of the forward."""
        for index, step in enumerate(self.unit.steps):
            args = _filled(step.args, values)
            pipeline = self.pipelines.get(index)
            if pipeline is not None:
                values.append(pipeline(owner, args, self.unit.is_quantized))
                continue
            keywords = {name: _filled(value, values) for name, value in step.keywords}
            if step.takes_others:
                keywords.update(others)
            called = owner.get_submodule(step.target) if type(step.target) is str else step.target
            values.append(called(*args, **keywords))
        return _filled(self.unit.output, values)


class Pipeline:
    """A chain's pipeline, which computes with the present parameters of its owner."""

    def __init__(self, chain: Chain, owner: torch.nn.Module) -> None:
        self.chain = chain
        modules = chain.pipeline_modules(owner)
        self.sequential = Sequential(*modules)
        self.slots = slots_of(modules)
        self.placeholders = [held[name] for held, name in self.slots]

    def __call__(self, owner: torch.nn.Module, inputs: Sequence[Any], is_quantized: bool) -> Any:
        x, *others = self.chain.parts[0].inputs(tuple(inputs))
        for other in others:
            if other.shape[:-1] != x.shape[:-1]:
                raise StateError(
                    f"A converted forward of {type(owner).__name__} adds tensors of shapes "
                    f"{tuple(x.shape)} and {tuple(other.shape)}, and its pipeline does not "
                    "broadcast: leave this module out with fuser.convert(..., filter=)."
                )
        context = contextlib.nullcontext() if is_quantized else autocast(enabled=False)
        try:
            for (held, name), value in zip(self.slots, self.chain.values(owner), strict=True):
                held[name] = value
            with context:
                return self.sequential(x, *others)
        finally:
            # A joined weight would otherwise live, with its graph, until the next call.
            for (held, name), placeholder in zip(self.slots, self.placeholders, strict=True):
                held[name] = placeholder


def unit_of(module: torch.nn.Module, opened: Sequence[torch.nn.Module]) -> Unit | None:
    """The unit of a module's forward; None if it has no chain that is worth it.

    Raises
    ------
    Untraceable
        If the forward has no graph.
    """
    graph = traced(module, opened)
    chains = Chains(module, graph)
    nodes = list(graph.nodes)
    ends: dict[fx.Node, FoundChain] = {}
    taken: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in taken:
            continue
        found = chains.ending_at(node)
        if found is not None and found.is_worthwhile and found.nodes.isdisjoint(taken):
            ends[node] = found
            taken |= found.nodes
    if not ends:
        return None
    defaults = {p.name: p.default for p in parameters_of(module)}
    inputs: list[tuple[str, Any]] = []
    places: dict[Any, Any] = {}
    steps: list[Step] = []

    def with_refs(argument: Any) -> Any:
        return map_aggregate(argument, lambda leaf: places.get(leaf, leaf))

    placeholders = [node for node in nodes if node.op == "placeholder"]
    for node in placeholders:
        default = defaults.get(str(node.target), REQUIRED)
        is_required = default is parameters_of(module)[0].empty
        inputs.append((str(node.target), REQUIRED if is_required else default))
        places[node] = Ref(len(places))
    output: Any = None
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            output = with_refs(node.args[0])
            continue
        if node in ends:
            found = ends[node]
            target: Any = Chain(found.parts, chains.replaced(found))
            step = Step(target, tuple(places[n] for n in found.inputs))
        elif node in taken or (not node.users and node.target is operator.getitem):
            continue
        else:
            if node.op != "call_module" and node.target not in FUNCTIONS:
                return None
            keywords = {k: v for k, v in node.kwargs.items() if k != OTHER_KEYWORDS}
            takes_others = len(keywords) < len(node.kwargs)
            step = Step(
                str(node.target) if node.op == "call_module" else node.target,
                with_refs(node.args),
                tuple((name, with_refs(value)) for name, value in keywords.items()),
                takes_others,
            )
        places[node] = Ref(len(inputs) + len(steps))
        steps.append(step)
    return Unit(tuple(inputs), tuple(steps), output)


def _filled(argument: Any, values: Sequence[Any]) -> Any:
    """An argument with values in place of references."""
    if type(argument) is Ref:
        return values[argument.index]
    if isinstance(argument, (tuple, list)):
        return type(argument)(_filled(a, values) for a in argument)
    if isinstance(argument, dict):
        return {k: _filled(v, values) for k, v in argument.items()}
    return argument
