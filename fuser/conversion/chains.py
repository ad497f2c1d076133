"""Chains of linears, norms and activations in the graph of a forward."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from fuser.conversion.held_objects import tensors_of
from fuser.conversion.leaves import (
    activation_like,
    activation_part,
    is_identity,
    linear_part,
    norm_part,
)
from fuser.conversion.modules import (
    attributes_of,
    bare,
    hooks_of,
    original_class,
    prefixes,
    written_attributes,
)
from fuser.conversion.parts import (
    AddPart,
    ForkPart,
    Function,
    LinearPart,
    ModulePart,
    NormPart,
    Part,
)

ADDITIONS = (operator.add, torch.add, "add")
PRODUCTS = (operator.mul, torch.mul, "mul")
HALVES = (torch.chunk, "chunk")
ELEMENTWISE = {
    *(F.silu, F.gelu, F.relu, torch.relu, torch.sigmoid, F.sigmoid, torch.tanh, F.tanh, torch.exp),
    *(torch.erf, torch.pow, torch.square, operator.mul, operator.add, operator.sub, operator.neg),
    *(operator.truediv, operator.pow, torch.mul, torch.add, torch.sub, torch.div, torch.neg),
    *("relu", "sigmoid", "tanh", "exp", "erf", "pow", "square", "mul", "add", "sub", "div", "neg"),
}
"""What an activation may be written with. Others may change dtype, shape or gradients as well."""


@dataclass
class Link:
    """A part, and the node whose value it computes."""

    node: fx.Node
    part: Part


@dataclass
class FoundChain:
    """A chain in a graph: its links from the input to the output, and all nodes that it replaces.

    ``inputs`` are the nodes that it reads: the main input, and one for each ``AddPart(None)``.
    """

    inputs: list[fx.Node]
    links: list[Link]
    nodes: set[fx.Node]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(link.part for link in self.links)

    @property
    def is_worthwhile(self) -> bool:
        """Whether a pipeline has anything to fuse: two linears, or one and something else."""
        linears = sum(isinstance(part, LinearPart) for part in self.parts)
        return linears > 0 and linears + sum(not isinstance(p, LinearPart) for p in self.parts) > 1


class Chains:
    """Finds the chains in a graph of ``owner``'s forward, with norms or without."""

    def __init__(self, owner: torch.nn.Module, *, takes_norms: bool = True) -> None:
        self._owner = owner
        self._takes_norms = takes_norms

    def ending_at(self, node: fx.Node) -> FoundChain | None:
        """The longest chain whose output is ``node``, and of whose values nothing else is read."""
        stops: set[fx.Node] = set()
        while True:
            chain = self._chain(node, stops)
            if chain is None:
                return None
            inner = chain.nodes - {node}
            read = {n for n in inner if not set(n.users) <= chain.nodes}
            if not read:
                return chain
            stops |= read

    def replaced(self, chain: FoundChain) -> tuple[tuple[str, type], ...]:
        """The modules that the chain replaces, also those around its own: paths and classes."""
        kept = {part.name for part in chain.parts if isinstance(part, ModulePart)}
        paths = dict.fromkeys(
            prefix
            for node in sorted(chain.nodes, key=lambda n: n.name)
            if node.op == "call_module" and node.target not in kept
            for prefix in prefixes(str(node.target))
        )
        return tuple((path, original_class(self._owner.get_submodule(path))) for path in paths)

    def stop(self, nodes: Sequence[fx.Node]) -> str | None:
        """What the last linear of a forward reads and no chain computes, in words; None if nothing.

        None also if each part is known, and they are put together in another way.
        """
        linears = [node for node in nodes if self._linear(node) is not None]
        return None if len(linears) < 2 else self._stop_at(linears[-1].args[0])

    def _stop_at(self, node: Any) -> str | None:
        if not isinstance(node, fx.Node) or node.op in ("placeholder", "get_attr"):
            return None
        if self._linear(node) is not None:
            return None
        base, inner = self._base(node)
        function = self._function(node, base)
        if inner and (is_identity(function) or activation_like(function) is not None):
            return self._stop_at(base)
        is_known = node.target in (*PRODUCTS, *ADDITIONS, *HALVES, operator.getitem)
        if is_known and len(inner) < 2:
            stops = map(self._stop_at, node.all_input_nodes)
            return next((stop for stop in stops if stop is not None), None)
        if node.op == "call_module":
            module = self._owner.get_submodule(str(node.target))
            name = f"{node.target} ({original_class(module).__name__})"
            if (hooks := hooks_of(module)) is not None:
                return f"{name} has {hooks}"
            is_norm = norm_part(module, str(node.target)) is not None
            return None if is_norm else f"{name} is not an activation of fuser"
        called = [n for n in node.graph.nodes if n in (inner or {node})]
        names = list(dict.fromkeys(map(name_of, called)))
        if len(names) == 1:
            return f"its forward calls {names[0]}, which is not an activation of fuser"
        return f"its forward calls {' and '.join(names)}, together no activation of fuser"

    # -- following a node's inputs ------------------------------------------------

    def _chain(self, node: fx.Node, stops: Collection[fx.Node]) -> FoundChain | None:
        if node in stops:
            return None
        if node.op == "call_module":
            return self._module(node, stops)
        if node.op not in ("call_function", "call_method"):
            return None
        if node.target in ADDITIONS and len(node.all_input_nodes) == 2 and not node.kwargs:
            return self._sum(node, stops)
        return self._activation(node, stops)

    def _below(self, node: fx.Node, stops: Collection[fx.Node]) -> FoundChain:
        """The chain up to ``node``: one without links if it starts there."""
        return self._chain(node, stops) or FoundChain([node], [], set())

    def _module(self, node: fx.Node, stops: Collection[fx.Node]) -> FoundChain | None:
        module = self._called(node)
        if module is None or not isinstance(node.args[0], fx.Node):
            return None
        part = self._part(module, str(node.target))
        if part is None:
            return self._activation(node, stops)
        chain = self._below(node.args[0], stops)
        chain.links.append(Link(node, part))
        chain.nodes.add(node)
        return chain

    def _part(self, module: torch.nn.Module, path: str) -> Part | None:
        if isinstance(module, torch.nn.Dropout) and module.p:
            return None if module.inplace else ModulePart(path)
        part: LinearPart | NormPart | None = linear_part(module, path)
        return norm_part(module, path) if part is None and self._takes_norms else part

    def _sum(self, node: fx.Node, stops: Collection[fx.Node]) -> FoundChain | None:
        """A residual connection; the sum with another input if it is none."""
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        if len(operands) != 2:
            return None
        chains = [self._below(operand, stops) for operand in operands]
        for chain, other in zip(chains, reversed(operands), strict=True):
            places = {link.node: i for i, link in enumerate(chain.links, 1)}
            place = 0 if other is chain.inputs[0] else places.get(other)
            if place is None or not chain.links:
                continue
            channel = f"residual {node.name}"
            chain.links.insert(place, Link(other, ForkPart(channel)))
            chain.links.append(Link(node, AddPart(channel)))
            chain.nodes.add(node)
            return chain
        chain = max(chains, key=lambda chain: len(chain.links))
        other = operands[1 - chains.index(chain)]
        if other in chain.nodes:
            return None
        chain.links.append(Link(node, AddPart(None)))
        chain.inputs.append(other)
        chain.nodes.add(node)
        return chain

    def _activation(self, node: fx.Node, stops: Collection[fx.Node]) -> FoundChain | None:
        """An activation of one value, or the product of one with another half."""
        base, inner = self._base(node)
        if inner:
            return self._plain_activation(node, base, inner, stops)
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        if node.target not in PRODUCTS or len(operands) != 2 or node.kwargs:
            return None
        one, two = operands
        return self._gate(node, one, two, stops) or self._gate(node, two, one, stops)

    def _gate(
        self, node: fx.Node, activation: fx.Node, up: fx.Node, stops: Collection[fx.Node]
    ) -> FoundChain | None:
        """The chain of a product, if it is that of an activation and ``up``."""
        gate, inner = self._base(activation)
        known = activation_like(self._function(activation, gate)) if inner else None
        part = None if known is None else activation_part(known, is_gated=True)
        if part is None:
            return None
        nodes = {node, gate, up, *inner}
        packed, linears = self._packed(gate, up), [self._linear(n) for n in (gate, up)]
        link = None
        if packed is not None:
            source = packed
            nodes.update(n for n in gate.all_input_nodes if n is not packed)
        elif gate.args == up.args and None not in linears:
            (source,) = gate.all_input_nodes
            link = self._joined(gate, [linear for linear in linears if linear is not None])
        if (packed is None and link is None) or not nodes.isdisjoint(stops):
            return None
        chain = self._below(source, stops)
        chain.links += [Link(node, part)] if link is None else [link, Link(node, part)]
        chain.nodes |= nodes
        return chain

    def _plain_activation(
        self, node: fx.Node, base: fx.Node, inner: set[fx.Node], stops: Collection[fx.Node]
    ) -> FoundChain | None:
        function = self._function(node, base)
        is_nothing = is_identity(function)
        known = None if is_nothing else activation_like(function)
        part = None if known is None else activation_part(known, is_gated=False)
        if (part is None and not is_nothing) or not inner.isdisjoint(stops):
            return None
        chain = self._below(base, stops)
        if part is not None:
            chain.links.append(Link(node, part))
        elif not chain.links:
            return None
        chain.nodes |= inner
        return chain

    # -- facts about nodes --------------------------------------------------------

    def _linear(self, node: fx.Node) -> LinearPart | None:
        """The linear that a node calls; None if it is anything else."""
        module = self._called(node)
        return None if module is None else linear_part(module, str(node.target))

    def _called(self, node: fx.Node) -> torch.nn.Module | None:
        """The module without hooks that a node calls with one argument; None if it is other."""
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        module = self._owner.get_submodule(str(node.target))
        return None if hooks_of(module) else module

    def _joined(self, node: fx.Node, linears: list[LinearPart]) -> Link | None:
        """Linears with one input as one."""
        first, second = linears
        if first.is_transposed or second.is_transposed or first.has_bias != second.has_bias:
            return None
        if first.shape != second.shape or first.names == second.names:
            return None
        rows, columns = first.shape
        part = LinearPart(first.names + second.names, (2 * rows, columns), first.has_bias)
        return Link(node, part)

    def _packed(self, gate: fx.Node, up: fx.Node) -> fx.Node | None:
        """The node of which ``gate`` is the first half and ``up`` the second; None if it is not."""
        sources: list[tuple[fx.Node, Any]] = []
        for number, half in enumerate((gate, up)):
            if half.op != "call_function" or half.target is not operator.getitem:
                return None
            halves, index = half.args
            if not isinstance(halves, fx.Node) or halves.target not in HALVES or index != number:
                return None
            names = ("input", "chunks", "dim")
            arguments: dict[str, Any] = dict(zip(names, halves.args, strict=False))
            arguments |= halves.kwargs
            if (arguments.get("chunks"), arguments.get("dim")) != (2, -1):
                return None
            sources.append((halves, arguments["input"]))
        (one, source), (two, _) = sources
        # Of an odd number of values chunk makes a first half that is larger.
        linear = self._linear(source)
        return source if one is two and linear is not None and linear.shape[0] % 2 == 0 else None

    def _base(self, node: fx.Node) -> tuple[fx.Node, set[fx.Node]]:
        """The one node of which ``node`` is a function of one value, and the nodes between."""
        if node.op == "call_module":
            module = self._called(node)
            if module is None or (isinstance(module, torch.nn.Dropout) and module.p):
                return node, set()
            if any(True for _ in module.parameters()) or any(map(tensors_of, module.modules())):
                return node, set()  # it has a state
        elif node.target not in ELEMENTWISE or any(
            argument is True
            for argument in (*node.args, *node.kwargs.values())  # inplace
        ):
            return node, set()
        bases: set[fx.Node] = set()
        nodes = {node}
        for operand in node.all_input_nodes:
            base, inner = self._base(operand)
            bases.add(base)
            nodes |= inner
        if len(bases) != 1:
            return node, set()
        return bases.pop(), nodes

    def _function(self, node: fx.Node, base: fx.Node) -> Function:
        """``node`` as a function of ``base``."""

        def value(n: fx.Node, x: torch.Tensor) -> Any:
            if n is base:
                return x
            args: Any = fx.map_arg(n.args, lambda a: value(a, x))
            kwargs = fx.map_arg(n.kwargs, lambda a: value(a, x))
            if n.op == "call_module":
                return _in_both_modes(self._owner.get_submodule(str(n.target)), *args)
            if n.op == "call_method":
                return getattr(args[0], str(n.target))(*args[1:], **kwargs)
            assert callable(n.target)
            return n.target(*args, **kwargs)

        return lambda x: value(node, x)


def name_of(node: fx.Node) -> str:
    """The module, function or method that a node calls."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "call_method":
        return f"the method {node.target} of a tensor"
    return getattr(node.target, "__name__", str(node.target))


def _in_both_modes(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a module returns in evaluation.

    Raises
    ------
    ValueError
        If it returns something else in training, keeps anything, or writes into its input.
    """
    with torch.random.fork_rng(devices=[]):
        tried = [bare(module).train(is_training) for is_training in (False, True)]
        before = [attributes_of(m) for copy in tried for m in copy.modules()]
        version = x._version
        results: list[torch.Tensor] = [copy(x) for copy in tried]
    is_changed = [attributes_of(m) for copy in tried for m in copy.modules()] != before
    if is_changed or any(map(written_attributes, tried)):
        raise ValueError("it keeps something")
    if x._version != version or not torch.equal(results[0], results[1]):
        raise ValueError("it writes into its input, or its mode decides")
    return results[0]
