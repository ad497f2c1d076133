"""The forward of a module as a torch.fx graph that holds for all its calls."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.nn import functional as F

from fuser.conversion.allowed import Untraceable, is_asked_by_forward, only_tensors
from fuser.conversion.held_objects import noting_children
from fuser.conversion.modules import (
    attributes_of,
    bare,
    forward_of,
    joint,
    written_attributes,
)
from fuser.torch_private import saved_tensor_hooks

AUTOCASTS = ("cpu", "cuda")

OTHER_KEYWORDS = "other_keywords"
"""The input of a graph that stands for everything that a ``**kwargs`` takes."""


MODE = "the mode of the module"
"""The ``training`` of a dropout in a graph, where it is the module's."""


class _Proxy(fx.Proxy):
    """A value of which a graph would record ``x += y`` as ``x = x + y``."""

    def _write(self, other: object) -> Any:
        raise Untraceable("its forward writes into a tensor, as += does")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = _write

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        if is_asked_by_forward():
            raise Untraceable("its forward asks for the class of a value")
        return _Proxy


class _Tracer(fx.Tracer):
    """Traces a call with ``inputs``; submodules are calls, but for those at paths ``opened``."""

    proxy_buffer_attributes = True  # a buffer that the forward writes is no constant of the graph

    def __init__(
        self, tried: torch.nn.Module, opened: Collection[str], inputs: Collection[str]
    ) -> None:
        super().__init__()
        self._opened, self._inputs = opened, inputs
        self._modes = _modes()
        self._containers = {
            id(value): joint(path, name)
            for path, module in tried.named_modules()
            for name, value in module.__dict__.items()
            if type(value) in (list, dict, set) and name not in torch.nn.Module().__dict__
        }

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        # A graph does not have contexts: what they do to a step would be lost.
        if _modes() != self._modes:
            raise Untraceable("its forward changes autocast, or what is recorded for gradients")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if id(a) in self._containers:
            raise Untraceable(f"its forward passes on {self._containers[id(a)]}, which it holds")
        return super().create_arg(a)

    def call_module(
        self,
        m: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if type(m).__call__ is not torch.nn.Module.__call__:
            raise Untraceable(f"{self.path_of_module(m)} has a __call__ of its own")
        return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[[torch.nn.Module], Any], list[Any]]:
        inputs: dict[str, Any] = {
            name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs
        }

        def call(root: Any) -> Any:
            with only_tensors():
                return type(root).forward(root, **inputs)

        return call, [self.root]


def _modes() -> tuple[object, ...]:
    """What contexts change: gradients, hooks of saved tensors, autocast for a CPU and a GPU."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCASTS]
    return torch.is_grad_enabled(), saved_tensor_hooks(True), *autocast


@contextlib.contextmanager
def _all_modes() -> Iterator[None]:
    """Gradients and autocast are on, so that a context that turns them off is noticed."""
    before = [(d, torch.is_autocast_enabled(d)) for d in AUTOCASTS]
    try:
        for device in AUTOCASTS:
            torch.set_autocast_enabled(device, True)
        with torch.enable_grad():
            yield
    finally:
        for device, is_enabled in before:
            torch.set_autocast_enabled(device, is_enabled)


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Refuse, and take back, draws of random numbers, which would be the same at each call."""
    python, numpys, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        drawn = (
            random.getstate() != python,
            pickle.dumps(numpy.random.get_state()) != pickle.dumps(numpys),
            not torch.equal(torch.get_rng_state(), torchs),
        )
        random.setstate(python)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)
    if any(drawn):
        raise Untraceable("its forward draws random numbers")


def parameters_of(module: torch.nn.Module) -> list[inspect.Parameter]:
    """The parameters of a module's forward, without ``self``."""
    return list(inspect.signature(forward_of(module)).parameters.values())[1:]


def traced(module: torch.nn.Module, opened: Collection[torch.nn.Module]) -> fx.Graph:
    """The graph of a module's forward; submodules in ``opened`` are part of it, others are calls.

    Every argument is an input of the graph, and :data:`OTHER_KEYWORDS` one more if there is a
    ``**kwargs``. The module is traced with and without its optional arguments, in training and not;
    all these graphs must be the same, but for a dropout with the mode as its ``training``, which is
    :data:`MODE` in the graph.

    Raises
    ------
    Untraceable
        If torch.fx cannot trace the forward, or its graphs differ.
    """
    parameters = parameters_of(module)
    if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.VAR_KEYWORD) for p in parameters):
        raise Untraceable("its forward takes arguments by their place or by their name alone")
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    defaults = {p.name: p.default for p in named if p.default is not p.empty}
    required = [p.name for p in named if p.name not in defaults]
    everything = [p.name for p in named] + [OTHER_KEYWORDS] * (len(named) < len(parameters))
    paths = {path for path, m in module.named_modules() if m in opened}
    graphs, modes = [], []
    for inputs in (everything, required):
        for is_training in (True, False):
            modes.append(is_training)
            tried = bare(module).train(is_training)
            children = [path for path, _ in tried.named_modules() if path and path not in paths]
            noting_children(tried, module, children)
            before = [attributes_of(m) for m in tried.modules()]
            try:
                with _all_modes(), same_random_numbers():
                    graphs.append(_Tracer(tried, paths, inputs).trace(tried))
            except Untraceable:
                raise
            except Exception as error:
                sentence = str(error).partition("\n")[0] or type(error).__name__
                if "control flow" in sentence:
                    raise Untraceable("its forward has an if or a loop on a tensor") from None
                raise Untraceable(f"torch.fx cannot trace its forward: {sentence:.150}") from None
            if [attributes_of(m) for m in tried.modules()] != before:
                raise Untraceable("its forward sets attributes")
            if written := written_attributes(tried):
                raise Untraceable(f"its forward writes into {' and '.join(written)}")
    if not _are_alike(graphs, defaults):
        for graph, is_training in zip(graphs, modes, strict=True):
            _name_mode(graph, is_training)
        if not _are_alike(graphs, defaults):
            raise Untraceable("its forward depends on its mode, or on which arguments it gets")
    _leave_out_dropouts_of_zero(graphs[0])
    return graphs[0]


def _are_alike(graphs: Sequence[fx.Graph], defaults: Mapping[str, Any]) -> bool:
    first, *others = (_steps(graph, defaults) for graph in graphs)
    return all(other == first for other in others)


def _name_mode(graph: fx.Graph, is_training: bool) -> None:
    """Write :data:`MODE` for the ``training`` of dropouts that have this mode."""
    for node in graph.nodes:
        if node.target is F.dropout and node.kwargs.get("training") is is_training:
            node.kwargs = {**node.kwargs, "training": MODE}


def _leave_out_dropouts_of_zero(graph: fx.Graph) -> None:
    """Read the input of a dropout in place of its output, where it drops nothing in any mode."""
    for node in list(graph.nodes):
        if node.target is F.dropout and node.kwargs.get("p") == 0 and not node.kwargs["inplace"]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _steps(graph: fx.Graph, defaults: Mapping[str, Any]) -> list[Any]:
    """The steps of a graph, to be compared. An optional argument is written as its default."""
    names: dict[Any, str] = {}
    steps: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = repr(defaults.get(node.target, node.target))
            continue
        names[node] = f"step {len(steps)}"
        keywords = {name: v for name, v in node.kwargs.items() if name != OTHER_KEYWORDS}
        arguments: Any = map_aggregate(
            (node.args, keywords), lambda leaf: names.get(leaf) or repr(leaf)
        )
        steps.append((node.op, node.target, repr(arguments)))
    return steps
