"""A converted forward: its chains run as pipelines, its other steps as they are."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.nn import functional as F

from fuser import fused_ops
from fuser.basic_ops import GroupedLinear
from fuser.basic_ops.shared_memory import Versions
from fuser.conversion.allowed import Untraceable
from fuser.conversion.chains import Chains, FoundChain, name_of
from fuser.conversion.held_objects import Read
from fuser.conversion.known_modules import KnownModules
from fuser.conversion.modules import (
    attributes_of,
    child_of,
    forward_of,
    original_class,
    plain_attributes,
    prefixes,
)
from fuser.conversion.parts import Chain, LinearPart, ModulePart, Part, is_gathered
from fuser.conversion.shared_input import SharedProduct
from fuser.conversion.trace import MODE, OTHER_KEYWORDS, parameters_of, traced
from fuser.doors import PASSES
from fuser.errors import StateError
from fuser.op import COMPUTE_DTYPES, BasicOperation, CallResult, autocast_dtype
from fuser.plan.parameter_slots import find_slots
from fuser.plan.saved_inputs import budget
from fuser.precision.contexts import autocast
from fuser.precision.delayed_scaling import DelayedScales
from fuser.precision.recomputation import is_in_checkpoint
from fuser.runtime.joined_weights import joined
from fuser.runtime.segments import basic_ops_of
from fuser.runtime.traced import traced_call
from fuser.sequential import Sequential
from fuser.tensors.joined_gathering import JoinedGathering
from fuser.torch_private import forward_ad_level, has_global_hooks, is_functorch_active

REQUIRED = "no default"
"""The default of an input that every call gives."""

NO_CHAIN = "its forward is not a chain of linears, norms and activations that fuser has"

# What a step between chains may call: it has no effect but its result.
FUNCTIONS = (operator.getitem, operator.add, torch.add, operator.mul)
METHODS = ("add", "size", "reshape", "view", "flatten", "unflatten")


DROPOUTS = (
    *(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d),
    *(torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout),
    *(torch.nn.RReLU, torch.nn.MultiheadAttention),
)
LINEARS_FORWARD = torch.nn.Linear.forward


@dataclass(frozen=True)
class Ref:
    """The value of an input or a step, by its number."""

    index: int


@dataclass(frozen=True)
class Method:
    """The method of a value, as a function of it."""

    name: str

    def __call__(self, value: Any, *args: Any, **keywords: Any) -> Any:
        return getattr(value, self.name)(*args, **keywords)


@dataclass(frozen=True)
class UnitStep:
    """A step of a converted forward: the call of a chain, a module by its path, or a function.

    The function may be a :class:`Method`. Values among the arguments are a :class:`Ref`. A step
    that takes others also gets the keyword arguments that the forward does not name.
    """

    target: Any
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()
    takes_others: bool = False


@dataclass(frozen=True)
class Unit:
    """A forward with chains: names and defaults of its parameters, its steps, and its output."""

    inputs: tuple[tuple[str, Any], ...]
    steps: tuple[UnitStep, ...]
    output: Any
    is_quantized: bool = True
    """False to run unquantized, also inside of autocast."""
    reads: tuple[Read, ...] = ()
    """What the forward has read from objects that the modules hold."""
    change: str | None = None
    """Of a copy of a module that has changed since it was converted: how."""
    is_in_kept: bool = False
    """Whether a module around this one runs its linears, and unquantized."""
    shares_input: bool = False
    """Whether it is one product of several linears, in a forward that is the module's own."""

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

    @property
    def watched(self) -> list[str]:
        """The paths of the modules whose attributes it computes with, the owner's first."""
        owner = () if self.shares_input else ("",)
        return list(dict.fromkeys([*owner, *(p for c in self.chains for p, _ in c.replaced)]))

    def refusal(self, owner: torch.nn.Module) -> str | None:
        """Why the owner's own forward has to run; None if it has not."""
        if self.change is not None:
            return self.change
        if (changed := self.changed_read(owner)) is not None:
            return changed
        if getattr(owner, "_is_replica", False):
            return "replicas of torch.nn.DataParallel share a pipeline"
        if has_global_hooks() and any(chain.replaced for chain in self.chains):
            return "there are hooks for the calls of every module"
        for chain in self.chains:
            if (refusal := chain.refusal(owner)) is not None:
                return refusal
        return None

    def changed_read(self, owner: torch.nn.Module) -> str | None:
        """Why what the forward read from objects is out of date; None if it is not."""
        for read in self.reads:
            if not read.is_as_before(child_of(owner, read.path)):
                return f"{read.text} was changed"
        return None

    @property
    def linears(self) -> list[str]:
        """The paths of all linears in chains."""
        return [name for chain in self.chains for name in chain.linears]

    @property
    def text(self) -> str:
        """The unit in a report."""
        text = "; ".join(chain.text for chain in self.chains)
        return text + ", which read one tensor, as one product" * self.shares_input


class Runner:
    """Runs a unit with its owner's present parameters."""

    def __init__(self, unit: Unit, owner: torch.nn.Module) -> None:
        self.unit = unit
        self.names = [name for name, _ in unit.inputs if name != OTHER_KEYWORDS]
        self.takes_others = len(self.names) < len(unit.inputs)
        self.pipelines: dict[int, ChainPipeline] = {
            index: ChainPipeline(step.target, owner)
            for index, step in enumerate(unit.steps)
            if isinstance(step.target, Chain) and unit.change is None  # else none of them can run
        }
        self._watched = unit.watched
        paths = [path for path in self._watched if path]
        called = [step.target for step in unit.steps if type(step.target) is str]
        # A forward may loop over children: one that was added or removed is another step.
        self._children = [
            (path, _names_of_children(child_of(owner, path)))
            for path in dict.fromkeys(p for c in (*called, *paths) for p in _paths_above(c))
        ]
        kept = [name for pipeline in self.pipelines.values() for name, _ in pipeline.own_modules]
        above = [path for name in kept for path in _paths_above(name)]
        self._looked_at = list(dict.fromkeys(("", *paths, *above, *(p for p, _ in self._children))))
        # What the sums of chains read of the call itself; what steps compute is known too late.
        self._summed = [
            ref.index
            for step in unit.steps
            if isinstance(step.target, Chain) and step.target.has_sums
            for ref in step.args
            if ref.index < len(self.names)
        ]
        first = unit.steps[0].target
        part = first.parts[0] if isinstance(first, Chain) else None
        # Only some parts ask for more than tensors.
        self._first = None if part is None or type(part).takes is Part.takes else part
        self._known = KnownModules()
        self._has_values = False
        self.product: SharedProduct | None = None
        """Of a unit whose linears share their input."""
        if unit.shares_input:
            self.product = SharedProduct(unit.linears, self._of_one_input)
        self.shared: tuple[SharedProduct, str] | None = None
        """Of one of these linears: that of its owner, and its name in it."""
        self._attributes = [
            (path, attributes_of(child_of(owner, path)))
            for path in self._watched
            if original_class(child_of(owner, path)) is not torch.nn.Linear
        ]
        # Dynamo has no addresses of objects, and a graph of its own for each of these values.
        self._plain = [
            (path, forward_of(child := child_of(owner, path)), plain_attributes(child))
            for path, _ in self._attributes
        ]

    @property
    def scales(self) -> list[dict[str, DelayedScales]]:
        """Delayed scaling's states of the ops, by mode, with which a copy continues."""
        return [op._delayed for op in self._ops]

    @scales.setter
    def scales(self, scales: list[dict[str, DelayedScales]]) -> None:
        for op, states in zip(self._ops, scales, strict=True):
            op._delayed = states

    @property
    def _ops(self) -> list[BasicOperation]:
        return [op for pipeline in self.pipelines.values() for op in pipeline.ops]

    def refusal(self, owner: torch.nn.Module) -> str | None:
        """As of the unit; also if the owner, or a child that is not called, computes otherwise."""
        if torch.compiler.is_compiling():
            return self._refusal(owner)
        if torch.nn.Linear.forward is not LINEARS_FORWARD:
            return "the forward of torch.nn.Linear was replaced"
        if is_functorch_active() or forward_ad_level() >= 0:
            return "torch.func or forward-mode AD transforms its call, which no pipeline can be in"
        if not has_global_hooks() and self._known.are_as_noted(owner):
            return self.unit.changed_read(owner) if self.unit.reads else None
        refusal = self._refusal(owner)
        if refusal is None:
            self._known.note(child_of(owner, path) for path in self._looked_at)
        return refusal

    def _changed(self, owner: torch.nn.Module) -> str | None:
        """Of traced code: which attribute with a plain value, or which forward, is another one."""
        for path in self._watched:
            child = child_of(owner, path)
            # Reading it is a guard of Dynamo; to look for an absent key of ``__dict__`` is none.
            if child is not None and (child.forward is None or "forward" in child.__dict__):
                return f"the forward of {path or 'it'} was replaced"
        for path, forward, values in self._plain:
            child = child_of(owner, path)
            if child is None:
                continue  # which the unit refuses
            if forward_of(child) is not forward:
                return f"the forward of {path or 'it'} was replaced"
            for name, value in values:
                if child.__dict__.get(name) != value:
                    return f"an attribute of {path or 'it'} was changed"
        return None

    def _refusal(self, owner: torch.nn.Module) -> str | None:
        return self.unit.refusal(owner) or self._refusal_of_change(owner)

    def present_unit(self, owner: torch.nn.Module) -> Unit:
        """The unit, which says how the modules have changed since they were converted."""
        change = self._refusal_of_change(owner)
        return self.unit if change is None else replace(self.unit, change=change)

    def continue_scales(self, earlier: Runner | None) -> None:
        """Continue with the scales of an earlier conversion, if that has the same ops."""
        if earlier is not None and earlier.pipelines and self.unit.chains == earlier.unit.chains:
            self.scales = earlier.scales

    def _refusal_of_change(self, owner: torch.nn.Module) -> str | None:
        """What of the modules is not as it was when they were converted; None if nothing."""
        is_traced = torch.compiler.is_compiling()
        if is_traced and (changed := self._changed(owner)) is not None:
            return changed
        for path, attributes in () if is_traced else self._attributes:
            child = child_of(owner, path)
            if child is None or attributes_of(child) != attributes:
                return f"an attribute of {path or 'it'} was changed"
        for path, names in self._children:
            if _names_of_children(child_of(owner, path)) != names:
                return f"a child of {path or 'it'} was added or removed"
        for pipeline in self.pipelines.values():
            apart = pipeline.in_autocast if is_traced else None
            for name, module in (apart or pipeline).own_modules:  # traced code makes no pipeline
                if child_of(owner, name) is not module:
                    return f"{name} was replaced"
        return None

    def bound(self, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """The values of the inputs and all other keywords; None if they are no such call."""
        if len(args) > len(self.names):
            return None
        given = dict(zip(self.names, args, strict=False))
        if keywords and any(name in given for name in keywords):
            return None
        others: dict[str, Any] = {}
        for name, value in keywords.items():
            (given if name in self.names else others)[name] = value
        values: list[Any] = []
        for name, default in self.unit.inputs:
            if name == OTHER_KEYWORDS:
                values.append(None)  # **kwargs, the last input: steps get the keywords themselves
                continue
            if name not in given and default is REQUIRED:
                return None
            values.append(given.get(name, default))
        if others and not self.takes_others:
            return None
        if self._first is not None:
            inputs = _filled(self.unit.steps[0].args, values)
            if not self._first.takes(inputs):
                return None
        if any(_is_wider_than_pipelines(values[index]) for index in self._summed):
            return None
        return values, others

    def run(self, owner: torch.nn.Module, values: list[Any], others: dict[str, Any]) -> Any:
        """The output of the forward.

        Raises
        ------
        StateError
            If weights are on meta, and inputs are not.
        """
        if not self._has_values:
            self._check_values(owner, values)
        for index, step in enumerate(self.unit.steps):
            args = _filled(step.args, values)
            pipeline = self.pipelines.get(index)
            if pipeline is not None:
                values.append(pipeline(owner, args, self.unit.is_quantized))
                continue
            keywords = {name: _filled(value, values) for name, value in step.keywords}
            if step.target is F.dropout:  # with the mode, or it would be no step
                keywords["training"] = owner.training
            if step.takes_others:
                keywords.update(others)
            called = owner.get_submodule(step.target) if type(step.target) is str else step.target
            values.append(called(*args, **keywords))
        return _filled(self.unit.output, values)

    def _of_one_input(self, owner: torch.nn.Module, x: torch.Tensor) -> Any:
        return self.run(owner, [x], {})

    def _check_values(self, owner: torch.nn.Module, values: Iterable[Any]) -> None:
        """Refuse weights on meta, of which torch multiplies whatever memory holds."""
        if torch.compiler.is_compiling():
            return
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        device = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
        if device is None:
            return  # of shapes alone
        for name, parameter in owner.named_parameters():
            if parameter.is_meta:
                raise StateError(
                    f"{type(owner).__name__} has {name} of shape {tuple(parameter.shape)} on the "
                    f"meta device, which has no values, and is called on {device}: call "
                    "model.to_empty(device=...) and load its weights before a forward."
                )
        self._has_values = True


class ChainPipeline:
    """A chain's pipeline, which computes with the present parameters of its owner."""

    def __init__(
        self,
        chain: Chain,
        owner: torch.nn.Module,
        given: Sequence[Sequence[torch.nn.Module]] | None = None,
    ) -> None:
        self.chain = chain
        of_parts = given or [part.modules(owner) for part in chain.parts]
        modules = list(itertools.chain.from_iterable(of_parts))
        self.sequential = Sequential(*modules)
        every = [op for module in modules for op in basic_ops_of(module)]
        self._slots = [slot for op in every for slot in find_slots(op, type(op).__name__)]
        self._lock = threading.RLock()
        self._gathered: dict[int, JoinedGathering] = {}
        """Of parameters that are joined, by their numbers: what makes gathered ones one."""
        names = [part.name for part in chain.parts if isinstance(part, ModulePart)]
        self.own_modules = [(name, child_of(owner, name)) for name in names]
        own = {id(module) for _, module in self.own_modules}
        of_chain = [module for module in modules if id(module) not in own]
        self.ops = [op for m in of_chain for op in m.modules() if isinstance(op, BasicOperation)]
        """All that the chain has made: not those of the owner's children."""
        with_weights = [m for m in modules if isinstance(m, (fused_ops.Linear, GroupedLinear))]
        weights = [name for part in chain.parts for name in part.weights]
        self.linears = list(zip(weights, with_weights, strict=True))
        """The ops that multiply by weights, by the path of these from the owner."""
        self._of_parts = of_parts
        self._has_norms_in_fp32 = chain.in_autocast() is not chain
        self.in_autocast = None if given is not None else self._with_torchs_norms(owner)
        """What runs inside of torch's autocast; None for itself, which would be a cycle."""

    def _with_torchs_norms(self, owner: torch.nn.Module) -> ChainPipeline | None:
        """The pipeline of :meth:`Chain.in_autocast`, which shares all other ops; None without one.

        A norm alone has none: there the owner's own forward runs.
        """
        chain = self.chain.in_autocast()
        if chain is self.chain or len(chain.parts) == 1:
            return None
        of_parts = [
            modules if own is part else own.modules(owner)
            for part, own, modules in zip(
                self.chain.parts, chain.parts, self._of_parts, strict=True
            )
        ]
        return ChainPipeline(chain, owner, of_parts)

    def __call__(self, owner: torch.nn.Module, inputs: Sequence[Any], is_quantized: bool) -> Any:
        """The output of the pipeline; ``inputs`` are the main one and those of its sums.

        Raises
        ------
        StateError
            If a tensor that is added would widen the rows to which it is added.
        """
        x, *others = self.chain.parts[0].inputs(tuple(inputs))
        if self._has_norms_in_fp32 and autocast_dtype(x.device.type) is not None:
            apart = self.in_autocast
            if apart is None:
                return forward_of(owner)(owner, x)
            if any(child_of(owner, name) is not module for name, module in apart.own_modules):
                self.in_autocast = apart = self._with_torchs_norms(owner)
            assert apart is not None
            return apart(owner, inputs, is_quantized)
        if others:
            x, others = self._broadcast(owner, x, others)

        def run(owner: Any, *tensors: torch.Tensor, op_kwargs: None = None) -> CallResult:
            return self._run(owner, tensors, is_quantized)

        is_kept = budget.limit.memory_budget != 0 or not torch.is_grad_enabled()
        if is_kept or torch.compiler.is_compiling() or is_in_checkpoint():
            return run(owner, x, *others)
        # The parameters are here in this call alone, so this call is repeated in backward.
        return PASSES.guest.keeping_inputs(owner, run, (x, *others), None)

    def _broadcast(
        self, owner: torch.nn.Module, x: Any, others: Sequence[Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Inputs in the shapes of the sums that they are in, as torch's addition takes them."""
        if self.chain.starts_with_a_sum:
            x, *others = _terms(x, *others)
        sums = self.chain.sums(x.shape[-1])
        if len(sums) != len(others):
            return x, list(others)
        widths = [width for width, _ in sums]
        tensors: list[torch.Tensor] = []
        for other, (_, is_of_product) in zip(others, sums, strict=True):
            given = other if isinstance(other, torch.Tensor) else torch.tensor(other)
            # Numbers, tensors without dimensions and integers take the dtype of the rows.
            if not given.is_complex() and (given.dim() == 0 or not given.is_floating_point()):
                dtype = autocast_dtype(x.device.type) if is_of_product else None
                given = given.to(x.device, dtype or x.dtype)
            tensors.append(given)
        try:
            shapes = [x.shape[:-1], *(t.shape[:-1] for t in tensors)]
            rows = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
            wide = [(*rows, width) for width in widths]
            expanded = [_expanded(t, shape) for t, shape in zip(tensors, wide, strict=True)]
        except RuntimeError:
            texts = " and ".join(str(tuple(t.shape)) for t in (x, *tensors))
            raise StateError(
                f"A converted forward of {type(owner).__name__} adds tensors of shapes "
                f"{texts}, and its pipeline makes rows of no other width of them: leave this "
                "module out with fuser.convert(..., filter=)."
            ) from None
        return _expanded(x, (*rows, x.shape[-1])), expanded

    def _run(
        self, owner: torch.nn.Module, tensors: Sequence[torch.Tensor], is_quantized: bool
    ) -> CallResult:
        with contextlib.nullcontext() if is_quantized else autocast(enabled=False):
            parameters = self.chain.tensors(owner)
            if torch.compiler.is_compiling():
                x, *others = tensors
                given = (parameters, self._called_with)
                traced: CallResult = traced_call(self.sequential, x, tuple(others), {}, given)
                return traced
            return self._called_with(parameters, self.sequential, *tensors)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_gathered")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _gathered={})

    def _called_with(
        self,
        parameters: Sequence[tuple[torch.Tensor, ...]],
        call: Callable[..., CallResult],
        *args: Any,
    ) -> CallResult:
        """``call(*args)`` with ``parameters``, each of the tensors that it joins, in the ops."""
        with self._lock:  # two threads would give the ops two parameters
            before = [held[name] for held, name in self._slots]
            try:
                values = [
                    tensors[0] if len(tensors) == 1 else self._joined(number, tensors)
                    for number, tensors in enumerate(parameters)
                ]
                for (held, name), value in zip(self._slots, values, strict=True):
                    held[name] = value
                return self._checked(call(*args), parameters)
            finally:
                # A joined weight would otherwise live, with its graph, until the next call.
                for (held, name), value in zip(self._slots, before, strict=True):
                    held[name] = value
                for gathering in self._gathered.values():
                    gathering.free_all()

    def _joined(self, number: int, parts: Sequence[Any]) -> torch.Tensor:
        """The tensors of parameter ``number`` as one; gathered ones until the end of the call."""
        if not is_gathered(parts[0]):
            return joined(parts)
        known = self._gathered.get(number)
        if known is None or not known.is_of(parts):
            known = self._gathered[number] = JoinedGathering(parts)
        return known.whole()

    def _checked(
        self, result: CallResult, parameters: Sequence[tuple[torch.Tensor, ...]]
    ) -> CallResult:
        """The output of a call, whose backward refuses joined weights that were written to since.

        They are read as one tensor, of which torch does not know that it is theirs. What makes
        gathered ones one lets its memory go after the backward.
        """
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        if node is None:
            return result
        several = [tensor for tensors in parameters if len(tensors) > 1 for tensor in tensors]
        if self._gathered and any(map(is_gathered, several)):
            gathered = list(self._gathered.values())

            def let_go(*_: Any) -> None:
                for one in gathered:
                    one.free_all()

            node.register_hook(let_go)
        elif several and not any(map(torch.Tensor.is_inference, several)):
            versions = Versions(several, "a converted module")
            node.register_prehook(lambda grads: versions.check())
        return result


def unit_of(
    module: torch.nn.Module, opened: Sequence[torch.nn.Module], *, takes_norms: bool = True
) -> Unit | str:
    """The unit of a module's forward, with norms or without; why it has none."""
    try:
        graph = traced(module, opened)
    except Untraceable as refusal:
        return str(refusal)
    chains = Chains(module, takes_norms=takes_norms)
    nodes = list(graph.nodes)
    ends: dict[fx.Node, FoundChain] = {}
    taken: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in taken:
            continue
        in_graph = chains.ending_at(node)
        if in_graph is not None and in_graph.is_worthwhile and in_graph.nodes.isdisjoint(taken):
            ends[node] = in_graph
            taken |= in_graph.nodes
    if not ends:
        return chains.stop(nodes) or NO_CHAIN
    parameters = parameters_of(module)
    defaults = {p.name: p.default for p in parameters}
    optional = {p.name for p in parameters if p.default is not p.empty}
    for in_graph in ends.values():
        if any(n.op == "placeholder" and n.target in optional for n in in_graph.inputs):
            return NO_CHAIN  # it may be no tensor
        paths = [
            name for part in in_graph.parts if isinstance(part, LinearPart) for name in part.names
        ]
        linears = [child_of(module, path) for path in paths]
        every = [m for _, m in module.named_modules(remove_duplicate=False)]
        if any(sum(m is linear for m in every) > 1 for linear in linears):
            return NO_CHAIN  # a linear under two names, which may be two later
    inputs: list[tuple[str, Any]] = []
    places: dict[Any, Any] = {}
    steps: list[UnitStep] = []

    def with_refs(argument: Any) -> Any:
        return map_aggregate(argument, lambda leaf: places.get(leaf, leaf))

    placeholders = [node for node in nodes if node.op == "placeholder"]
    for node in placeholders:
        default = defaults.get(str(node.target), REQUIRED)
        is_required = default is inspect.Parameter.empty
        inputs.append((str(node.target), REQUIRED if is_required else default))
        places[node] = Ref(len(places))
    output: Any = None
    order = {node: index for index, node in enumerate(nodes)}
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            output = with_refs(node.args[0])
            continue
        if node in ends:
            in_graph = ends[node]
            start = min(order[part] for part in in_graph.nodes)
            is_random = any(isinstance(part, ModulePart) for part in in_graph.parts)
            for earlier in nodes[start : order[node]]:
                if earlier not in taken and _may_write(earlier, module, in_graph.inputs):
                    return f"{earlier.target} is called within a chain, whose input it may write"
                if earlier not in taken and is_random and _may_draw(earlier, module):
                    return f"{name_of(earlier)} is called within a chain, and both draw numbers"
            chain = Chain(in_graph.parts, chains.replaced(in_graph))
            step = UnitStep(chain, tuple(places[n] for n in in_graph.inputs))
        elif node in taken or (not node.users and node.target is operator.getitem):
            continue
        else:
            target = _target(node, module)
            if target is None:
                return chains.stop(nodes) or NO_CHAIN
            keywords = {k: v for k, v in node.kwargs.items() if k != OTHER_KEYWORDS}
            takes_others = len(keywords) < len(node.kwargs)
            named = tuple((name, with_refs(value)) for name, value in keywords.items())
            step = UnitStep(target, with_refs(node.args), named, takes_others)
        places[node] = Ref(len(inputs) + len(steps))
        steps.append(step)
    return Unit(tuple(inputs), tuple(steps), output)


def _target(node: fx.Node, owner: torch.nn.Module) -> Any:
    """What a step between chains calls; None if that may have an effect besides its result."""
    if node.op == "call_module":
        called = child_of(owner, str(node.target))
        is_inplace = any(getattr(module, "inplace", False) for module in called.modules())
        return None if is_inplace else str(node.target)
    if node.op == "call_method":
        return Method(str(node.target)) if node.target in METHODS else None
    if "out" in node.kwargs:
        return None
    is_dropout = node.target is F.dropout and node.kwargs.get("training") == MODE
    is_dropout &= not node.kwargs.get("inplace")
    is_shape = node.target is getattr and node.args[1:] == ("shape",)
    return node.target if node.target in FUNCTIONS or is_dropout or is_shape else None


def _expanded(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in a shape that it broadcasts to; itself if it has it."""
    return tensor if tensor.shape == shape else tensor.expand(shape)


def _terms(x: Any, other: Any, *others: Any) -> tuple[Any, ...]:
    """The terms of a sum, of which the first one has rows in its dtype, and all its columns."""
    if not _is_rows(x) and _is_rows(other):
        x, other = other, x
    if isinstance(other, torch.Tensor) and other.dim() and x.shape[-1:] == (1,):
        x = x.expand(*x.shape[:-1], other.shape[-1])
    return x, other, *others


def _is_rows(term: Any) -> bool:
    return isinstance(term, torch.Tensor) and term.dim() > 0 and term.is_floating_point()


def _is_wider_than_pipelines(term: Any) -> bool:
    """Whether a sum with a term has a dtype that no pipeline computes in."""
    if isinstance(term, torch.Tensor):
        return term.is_complex() or (_is_rows(term) and term.dtype not in COMPUTE_DTYPES)
    return isinstance(term, complex)


def _paths_above(path: str) -> list[str]:
    """The paths of the modules that hold the one at ``path``, from the owner on."""
    return ["", *prefixes(path)][:-1]


def _names_of_children(module: torch.nn.Module | None) -> list[str] | None:
    """The names of the children that a module has; None if there is no module."""
    if module is None:
        return None
    return [name for name, child in module._modules.items() if child is not None]


def _may_write(node: fx.Node, owner: torch.nn.Module, tensors: Sequence[fx.Node]) -> bool:
    """Whether a module of a user's class is called with one of ``tensors``, or a view of one."""
    if node.op != "call_module":
        return False
    modules = child_of(owner, str(node.target)).modules()
    if all(type(module).__module__.startswith("torch.nn.") for module in modules):
        return False
    return not {_viewed(n) for n in node.all_input_nodes}.isdisjoint(map(_viewed, tensors))


def _may_draw(node: fx.Node, owner: torch.nn.Module) -> bool:
    """Whether a step is a dropout, or calls a module that may hold one or is of a user's class."""
    if node.op != "call_module":
        return node.target is F.dropout
    modules = list(child_of(owner, str(node.target)).modules())
    return any(
        isinstance(module, DROPOUTS) or not type(module).__module__.startswith("torch.nn.")
        for module in modules
    )


def _viewed(node: fx.Node) -> fx.Node:
    """The node of which a node may be a view."""
    while node.op == "call_method" or node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _filled(argument: Any, values: Sequence[Any]) -> Any:
    """An argument with values in place of references."""
    if type(argument) is Ref:
        return values[argument.index]
    if isinstance(argument, tuple):
        return type(argument)([_filled(a, values) for a in argument])
    if isinstance(argument, list):
        return [_filled(a, values) for a in argument]  # a graph's own list cannot be changed
    if isinstance(argument, slice):
        ends = argument.start, argument.stop, argument.step
        return slice(*[_filled(end, values) for end in ends])
    if isinstance(argument, dict):
        return {k: _filled(v, values) for k, v in argument.items()}
    return argument
