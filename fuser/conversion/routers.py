"""Linears whose output chooses: a router that is rounded sends tokens to other experts."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fuser.conversion.modules import OWN_FORWARD, bare, hooks_of, joint, original_class, prefixes
from fuser.conversion.trace import parameters_of, same_random_numbers

CHOICES = frozenset(
    [
        "argmax",
        "argmin",
        "argsort",
        "gumbel_softmax",
        "kthvalue",
        "msort",
        "multinomial",
        "sort",
        "topk",
    ]
)
"""The functions and methods whose results are indices of their input, or read by its order."""

EXTREMES = frozenset(["max", "min"])
"""The same of a dimension, where the index is read and not the value alone."""

MOST_GUESSES = 64
"""Branches on values in a forward that is followed; a loop on one may have no end."""

MOST_LAYERS = 3
"""Linears of a child that chooses; one with more is a model whose output is ranked."""

NAMED = re.compile(r"router|gating|gate_network", re.IGNORECASE)
"""In the name of a linear, or in the class of the module that has it."""
CLASSES = re.compile(r"Router|Gating|(MoE|TopK|Expert)\w*Gate", re.IGNORECASE)
# A gate is a router beside experts, and the half of a gated activation elsewhere.
GATES, EXPERTS = ("gate", "wg"), "expert"


def routers(model: torch.nn.Module, linears: Collection[str]) -> list[str]:
    """Those of the ``linears`` of a model, given by their paths, that choose.

    By what is done with the output, as far as torch.fx can follow the forward of the module that
    calls them: it is ranked (:data:`CHOICES`), also after a softmax or a second layer that only the
    choice reads. Else by the name of the linear and the class that has it.
    """
    choosing: set[str] = set()
    known: dict[object, frozenset[str]] = {}
    inside: dict[str, list[str]] = {}
    """By the path of a module, its linears, by their paths from there."""
    for path in linears:
        for above in ["", *prefixes(path)[:-1]]:
            inside.setdefault(above, []).append(path.removeprefix(above).strip("."))
    for owner, paths in inside.items():
        module = model.get_submodule(owner)
        children = [name for name in paths if "." not in name]
        choosing.update(joint(owner, name) for name in children if _is_named(module, name))
        if hooks_of(module) == OWN_FORWARD:
            continue
        kind = _kind(module)
        if kind not in known:
            known[kind] = frozenset(_by_use(module, paths))
        choosing.update(joint(owner, name) for name in known[kind])
    return [path for path in linears if path in choosing]


def _kind(module: torch.nn.Module) -> object:
    """What is alike in the layers of a model: classes of children, and what the forward may ask."""
    children = tuple((path, original_class(m)) for path, m in module.named_modules())
    plain = tuple((n, v) for n, v in module.__dict__.items() if isinstance(v, (bool, int, str)))
    return children, plain


def _is_named(owner: torch.nn.Module, name: str) -> bool:
    if NAMED.search(name) or CLASSES.search(original_class(owner).__name__):
        return True
    beside = [*owner._modules, *owner._parameters]
    return name in GATES and any(EXPERTS in other.lower() for other in beside)


class _FollowedValue(fx.Proxy):
    """A value that a forward is followed by; where a number is wanted, it is 2."""

    def __len__(self) -> int:
        self.tracer.guesses += 1  # type: ignore[attr-defined]
        return 2

    __index__ = __int__ = __len__


class _Follower(fx.Tracer):
    """Follows a forward as far as it goes; children that hold ``paths`` are calls.

    A branch on a value goes as ``answer`` says, and a loop over values has two rounds: what is read
    of whom is wanted, and no value.
    """

    proxy_buffer_attributes = True  # or a forward that counts its calls would count this one

    def __init__(self, paths: Sequence[str], answer: bool) -> None:
        super().__init__()
        self._paths = paths
        self._answer = answer
        self.guesses = 0

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        prefix = f"{module_qualified_name}."
        is_torchs = type(m).__module__.startswith("torch.nn.")
        return is_torchs or any(f"{path}.".startswith(prefix) for path in self._paths)

    def call_module(self, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            return super().call_module(m, forward, args, kwargs)
        # A child that cannot be followed is a call as well.
        return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _FollowedValue(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.guesses += 1
        return self._answer if self.guesses <= MOST_GUESSES else super().to_bool(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        self.guesses += 1
        return iter([obj[0], obj[1]])  # type: ignore[index]

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        required = [
            p.name
            for p in parameters_of(self.root)
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in required]
        return lambda root, *given: type(root).forward(root, *given), [self.root, *inputs]


def _by_use(module: torch.nn.Module, paths: Sequence[str]) -> Iterator[str]:
    """Those of a module's linears whose output its forward ranks."""
    for answer in (False, True):
        tracer, is_whole = _Follower(paths, answer), False
        # A forward that needs a value is followed as far as it goes.
        with contextlib.suppress(Exception), same_random_numbers():
            tracer.trace(bare(module))
            is_whole = not tracer.guesses
        graph: fx.Graph | None = getattr(tracer, "graph", None)
        if graph is not None:
            yield from _ranked(graph, paths, is_whole)
        if not tracer.guesses:
            return


def _ranked(graph: fx.Graph, paths: Sequence[str], is_whole: bool) -> Iterator[str]:
    """The linears whose output is ranked in a graph, of a whole forward or of a part."""
    leading: set[fx.Node] = {node for node in graph.nodes if _chooses(node)}
    waiting = [(node, False) for node in leading]
    while waiting:
        node, is_behind = waiting.pop()
        for source in node.all_input_nodes:
            if source in leading or source.op in ("placeholder", "get_attr"):
                continue
            # What a choice alone reads belongs to it. The rest of a forward that was followed in
            # part may read it too.
            if is_behind and not (is_whole and leading.issuperset(source.users)):
                continue
            linears = _called(source, paths)
            if len(linears) > MOST_LAYERS:
                continue
            yield from linears
            leading.add(source)
            waiting.append((source, is_behind or bool(linears)))


def _chooses(node: fx.Node) -> bool:
    if node.op not in ("call_method", "call_function"):
        return False
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in CHOICES or (name in EXTREMES and any(map(_reads_indices, node.users)))


def _reads_indices(user: fx.Node) -> bool:
    """Whether the indices of an extreme are read by a node, or returned with it."""
    is_index = user.target in (operator.getitem, getattr) and user.args[1] in (1, "indices")
    return is_index and bool(user.users)


def _called(node: fx.Node, paths: Sequence[str]) -> list[str]:
    """The linears in what a node calls."""
    if node.op != "call_module":
        return []
    called = str(node.target)
    return [path for path in paths if path == called or path.startswith(f"{called}.")]
