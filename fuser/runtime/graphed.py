"""A module whose forward and backward are CUDA graphs: their capture and their replays."""

from __future__ import annotations

import contextlib
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import TensorWeakRef

from fuser.basic_ops.main_grad import stand_in_gradient
from fuser.basic_ops.shared_memory import Versions
from fuser.errors import FuserWarning, InputError, InputTypeError, StateError
from fuser.op import autocast_dtype
from fuser.precision.contexts import autocast, current_recipe, current_state
from fuser.precision.delayed_scaling import (
    DelayedScales,
    end_with_backward,
    holds_steps,
    note_uses,
    noting_uses,
)
from fuser.runtime.captured import Captured, CapturedStates, accumulating_weights
from fuser.runtime.gradient_paths import accumulating_leaf
from fuser.tensors.observation import observing
from fuser.torch_private import pytree

Module = torch.nn.Module
Tensors = Sequence[torch.Tensor]


# -- memory that graphs share ----------------------------------------------------


@dataclass(eq=False, slots=True)
class SavedForward:
    """A forward whose graph was replayed: what it has saved for its backward.

    It is in the graphs' memory, so that a later replay may overwrite it.
    """

    forward: int
    backward: int
    overwritten_by: str | None = None


class GraphMemory:
    """The memory of the graphs of one pool, each known by its place in the order of captures.

    What a forward saves was in use from its own capture to the capture of its backward: the graphs
    captured between these two do not write there, and all others may.

    torch gives a leaf without a gradient the memory in which a backward has its result. The next
    forward of any graph of the pool may write there too, so before that, gradients that are still
    in use get memory of their own.
    """

    def __init__(self) -> None:
        self._count = 0
        self._saved: list[SavedForward] = []
        self._lent: list[tuple[Callable[[], torch.Tensor | None], int]] = []

    def next_place(self) -> int:
        """The place of the graph that is captured now."""
        self._count += 1
        return self._count

    def replays(self, place: int, name: str) -> None:
        """Note that a graph is replayed, which overwrites what some forwards have saved."""
        saved = self._saved  # each one's places are between the places of the one before it
        while saved and not saved[-1].forward < place < saved[-1].backward:
            saved.pop().overwritten_by = name

    def saves(self, forward: int, backward: int) -> SavedForward:
        """Note that the forward at a place is replayed and saves something for a backward."""
        saved = SavedForward(forward, backward)
        self._saved.append(saved)
        return saved

    def lend(self, leaves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note the leaves to which a backward may give its memory, each with that memory."""
        self._lent += [
            (TensorWeakRef(leaf), memory.data_ptr()) for leaf, memory in leaves if leaf.grad is None
        ]

    def take_back(self) -> None:
        """Move the gradients that are in this memory, of leaves that are still in use."""
        lent, self._lent = self._lent, []
        for leaf_of, address in lent:
            leaf = leaf_of()
            grad = None if leaf is None else leaf.grad
            if leaf is not None and grad is not None and grad.data_ptr() == address:
                leaf.grad = grad.clone()


# By the pools that callers share between captures.
_of_pool: WeakValueDictionary[Any, GraphMemory] = WeakValueDictionary()


def memory_of(pool: Any) -> GraphMemory:
    """The memory of a pool: the same as long as a graph of it is in use."""
    return _of_pool.setdefault(pool, GraphMemory())


# -- graphs -----------------------------------------------------------------------


class Graph:
    """The graphs of a module's forward and backward, and the memory that they read and write.

    ``args`` are the tensors of the capture, which become the memory of later arguments, and
    ``context`` is its autocast. The graphs have their memory in ``memory``, of ``pool``.
    """

    def __init__(
        self,
        name: str,
        module: Module,
        args: tuple[object, ...],
        context: autocast,
        memory: GraphMemory,
        pool: Any,
    ) -> None:
        self.name = name
        self._module = module
        self._args = args
        self._context = context
        self._memory = memory
        self._pool = pool
        self._inputs: list[torch.Tensor] = pytree.tree_leaves(args)
        self._needs_grad = [tensor.requires_grad for tensor in self._inputs]
        tensors = [*self._inputs, *module.parameters()]
        self._device_type = tensors[0].device.type if tensors else "cuda"
        places = list(map(id, self._inputs))
        self._first_places = list(map(places.index, places))
        self._is_flat = all(isinstance(arg, torch.Tensor) for arg in args)
        self._mode = _mode(module, self._device_type)
        self._forward_graph = torch.cuda.CUDAGraph()
        self._backward_graph: torch.cuda.CUDAGraph | None = None

    # -- capture --------------------------------------------------------------

    def step(self, *, allow_unused_input: bool) -> None:
        """Run the module's forward and backward once, as they will be captured."""
        outputs = pytree.tree_leaves(self._module(*self._args))
        for place, output in enumerate(outputs):
            if not isinstance(output, torch.Tensor):
                raise InputTypeError(
                    f"Output {place} of {self.name} is a {type(output).__name__}; a graph returns "
                    "tensors."
                )
        grads = self._gradients(outputs, list(map(_zeros_like, outputs)))
        added = list(map(id, accumulating_weights(self._module)))
        has_backward = any(output.requires_grad for output in outputs)
        for tensor, grad in zip(self._leaves(), grads, strict=True):
            is_missing = tensor.requires_grad and grad is None and id(tensor) not in added
            if is_missing and has_backward and not allow_unused_input:
                raise InputError(
                    f"An argument or parameter of {self.name}, of shape {tuple(tensor.shape)}, "
                    "requires a gradient and gets none: freeze it, or call "
                    "make_graphed_callables with allow_unused_input=True."
                )

    def capture_forward(self) -> None:
        """Capture the forward. What it saves stays in use until the capture of the backward."""
        self._forward_place = self._memory.next_place()
        with torch.cuda.graph(self._forward_graph, pool=self._pool), noting_uses() as used:
            results = self._module(*self._args)
        self._outputs, self._structure = pytree.tree_flatten(results)
        self._captured = Captured(self._module)
        self._records = bool(used)  # in a module that enters autocast, without a recipe of its own
        self._forward_states = CapturedStates(self._module, list(dict.fromkeys(used)))
        self._backward_states = CapturedStates(self._module, [])

    def capture_backward(self, steps: list[DelayedScales]) -> None:
        """Capture the backward; ``steps`` are the states of gradients that end with a backward."""
        outputs, leaves = self._outputs, self._leaves()
        self._is_differentiable = [output.requires_grad for output in outputs]
        if any(self._is_differentiable) and any(leaf.requires_grad for leaf in leaves):
            self._backward_place = self._memory.next_place()
            self._grad_outputs = list(map(_zeros_like, outputs))
            self._backward_graph = torch.cuda.CUDAGraph()
            steps.clear()
            with torch.cuda.graph(self._backward_graph, pool=self._pool):
                grads = self._gradients(outputs, self._grad_outputs)
            self._backward_states = CapturedStates(self._module, list(dict.fromkeys(steps)))
            self._note_gradients(leaves, grads)
        self._outputs = [output.detach() for output in outputs]

    def _note_gradients(self, leaves: Tensors, grads: Sequence[torch.Tensor | None]) -> None:
        """Note which gradients the graph returns, and which it adds to a ``main_grad``."""
        added = list(map(id, accumulating_weights(self._module)))
        self._added = [place for place, leaf in enumerate(leaves) if id(leaf) in added]
        # Of a weight that tells Megatron-LM of the sum, autograd gets another tensor at each call.
        standing_in = [p for p in self._added if hasattr(leaves[p], "grad_added_to_main_grad")]
        self._grads = {
            place: grad
            for place, grad in enumerate(grads)
            if grad is not None and place not in standing_in
        }
        parameters = (p for p in self._grads if p >= len(self._inputs) and p not in self._added)
        self._returned = next(parameters, None)
        addresses = [grad.data_ptr() for grad in self._grads.values()]
        self._shared = {
            place for at, place in enumerate(self._grads) if addresses[at] in addresses[:at]
        }

    def _leaves(self) -> list[torch.Tensor]:
        return [*self._inputs, *self._module.parameters()]

    def _gradients(self, outputs: Tensors, grads: Tensors) -> list[torch.Tensor | None]:
        """The gradient of each argument and parameter, None if it has none."""
        leaves = self._leaves()
        pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
        leaves_with_gradient = [leaf for leaf in leaves if leaf.requires_grad]
        if not pairs or not leaves_with_gradient:
            return [None] * len(leaves)
        with torch.autocast(self._device_type, enabled=False):  # as torch asks of a backward
            gradients = torch.autograd.grad(
                [output for output, _ in pairs],
                leaves_with_gradient,
                [grad for _, grad in pairs],
                allow_unused=True,
            )
        remaining = iter(gradients)
        return [next(remaining) if leaf.requires_grad else None for leaf in leaves]

    # -- calls ----------------------------------------------------------------

    def is_for(self, module: Module) -> bool:
        """Whether the module is in the mode of the capture, and no other graph is captured."""
        is_captured = holds_steps() or torch.cuda.is_current_stream_capturing()
        return not is_captured and _mode(module, self._device_type) == self._mode

    def change(self) -> str | None:
        """What of the module has changed since the capture; None if nothing has."""
        return None if self._captured.is_unchanged() else self._captured.change()

    def check(self, args: tuple[object, ...]) -> Tensors:
        """The tensors of a call, if they are like those of the capture."""
        tensors: Sequence[object] = args if self._is_flat else pytree.tree_leaves(args)
        if len(tensors) != len(self._inputs):
            raise InputError(
                f"{self.name} was captured with {len(self._inputs)} tensors, and got "
                f"{len(tensors)}. Capture it again with such a sample."
            )
        for place, (tensor, ours) in enumerate(zip(tensors, self._inputs, strict=True)):
            if not isinstance(tensor, torch.Tensor):
                raise InputTypeError(
                    f"Argument {place} of {self.name} is a {type(tensor).__name__}; a graph takes "
                    "tensors."
                )
            if (tensor.shape, tensor.dtype, tensor.device) != (ours.shape, ours.dtype, ours.device):
                raise InputError(
                    f"Argument {place} of {self.name} is {_described(tensor)}; it was captured as "
                    f"{_described(ours)}. Other shapes need a capture of their own."
                )
            if tensor.requires_grad and not self._needs_grad[place] and torch.is_grad_enabled():
                raise InputError(
                    f"Argument {place} of {self.name} needs a gradient, and the sample did not: "
                    "its graph computes none."
                    " Capture it with a sample that requires one."
                )
            first = self._first_places[place]
            if tensors[first] is not tensor:
                raise InputError(
                    f"Arguments {first} and {place} of {self.name} are two tensors of shape "
                    f"{tuple(ours.shape)}, and were one tensor at its capture: its graph reads one."
                    " Pass one, or capture it with two."
                )
        return cast("Tensors", tensors)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The autocast of the capture, unless the call is already under such a one."""
        current, captured = current_recipe(), self._context.recipe
        is_outside = current is None and current_state().region is None
        if current == captured and not (is_outside and self._records):
            return contextlib.nullcontext()
        if is_outside:
            group = self._context.amax_reduction_group
            return autocast(captured is not None, recipe=captured, amax_reduction_group=group)
        raise StateError(
            f"{self.name} was captured under {captured or 'no recipe'}, and is called under "
            f"{current or 'no recipe'}: a graph cannot change its recipe."
            " Capture one for each recipe."
        )

    def states(self) -> tuple[list[DelayedScales], list[DelayedScales]] | None:
        """The states in which forward and backward record; None if they cannot be the graph's."""
        forward, backward = self._forward_states.current(), self._backward_states.current()
        return None if forward is None or backward is None else (forward, backward)

    def replay(
        self, inputs: Tensors, states: tuple[list[DelayedScales], list[DelayedScales]]
    ) -> object:
        """The results of the module for ``inputs``."""
        forward_states, backward_states = states
        if forward_states:
            note_uses(forward_states)
        if self._backward_graph is None:
            with torch.no_grad():
                outputs = self.replay_forward(inputs)
        else:
            parameters = self._captured.parameters()
            outputs = _replayed(self, backward_states, len(inputs), *inputs, *parameters)
        if self._structure.is_leaf():
            return outputs[0]
        return pytree.tree_unflatten(list(outputs), self._structure)

    def replay_forward(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        """The outputs, in the memory of the graph."""
        self._memory.take_back()
        for ours, theirs in zip(self._inputs, inputs, strict=True):
            if ours.data_ptr() != theirs.data_ptr() or ours.stride() != theirs.stride():
                shares = ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
                ours.copy_(theirs.clone() if shares else theirs)
        self._memory.replays(self._forward_place, self.name)
        self._forward_graph.replay()
        return tuple(output.detach() for output in self._outputs)

    def save(self) -> SavedForward:
        """Note that what the replayed forward has saved is wanted by a backward."""
        return self._memory.saves(self._forward_place, self._backward_place)

    def without_gradient(self, outputs: Tensors) -> list[torch.Tensor]:
        """The outputs that needed no gradient in the capture."""
        return list(itertools.compress(outputs, map(operator.not_, self._is_differentiable)))

    def check_backward(self, saved: SavedForward) -> None:
        """Refuse a backward without what its forward saved, or with other parameters."""
        if saved.overwritten_by is not None:
            raise StateError(
                f"The backward of {self.name} comes too late: a replay of {saved.overwritten_by} "
                "has overwritten what its forward saved. A forward has one backward, before its "
                "module is called again, and modules that were captured together run backward in "
                "the opposite order of their forwards."
            )
        if not self._captured.is_in_place():
            raise StateError(
                f"Between forward and backward of {self.name}, {self._captured.change()}; its "
                "graph reads the memory of the forward."
                " Make the change after the backward."
            )

    def replay_backward(
        self, grad_outputs: Tensors, edges: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """The gradients of arguments and parameters, which autograd sends to ``edges``.

        Refuses a backward that asks for a gradient that the graph adds to a ``main_grad``.
        """
        leaves = {place: accumulating_leaf(edges[place]) for place in self._added}
        if any(leaf is None for leaf in leaves.values()):
            raise StateError(
                f"{self.name} adds weight gradients to main_grad in its graph, and this backward "
                "asks for them, as torch.autograd.grad does, or for other gradients alone. Call "
                "backward() without inputs."
            )
        pairs = zip(self._grad_outputs, grad_outputs, strict=True)
        for ours, theirs in itertools.compress(pairs, self._is_differentiable):
            if ours.data_ptr() != theirs.data_ptr() or ours.stride() != theirs.stride():
                ours.copy_(theirs)
        assert self._backward_graph is not None
        self._memory.replays(self._backward_place, self.name)
        self._backward_graph.replay()
        # The caller of torch.autograd.grad keeps gradients; of these, torch takes no leaf's.
        grads: list[torch.Tensor | None] = [None] * len(edges)
        is_kept = self._returned is None or accumulating_leaf(edges[self._returned]) is None
        for place, ours in self._grads.items():
            grads[place] = ours.clone() if is_kept or place in self._shared else ours.detach()
        if not is_kept:
            nodes = [
                (getattr(edges[place][0], "variable", None), g) for place, g in self._grads.items()
            ]
            self._memory.lend((leaf, ours) for leaf, ours in nodes if leaf is not None)
        for place, leaf in leaves.items():
            grads[place] = stand_in_gradient(leaf) if grads[place] is None else grads[place]
        return grads


def _mode(module: Module, device_type: str) -> tuple[object, ...]:
    """The mode in which a module runs; a graph is for one."""
    return (
        module.training,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_dtype(device_type),
    )


def _described(tensor: torch.Tensor) -> str:
    parts = [str(tensor.dtype), str(tuple(tensor.shape)), "on", str(tensor.device)]
    return " ".join(parts + ["with a gradient"] * tensor.requires_grad)


def _zeros_like(output: torch.Tensor) -> torch.Tensor:
    """A first gradient of an output, plain and with values."""
    return torch.zeros(output.shape, dtype=output.dtype, device=output.device)


class _ReplayNode(torch.autograd.Function):
    """The autograd node of a graphed module."""

    @staticmethod
    def forward(
        ctx: Any, graph: Graph, states: list[DelayedScales], count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = graph.replay_forward(tensors[:count])
        ctx.mark_non_differentiable(*graph.without_gradient(outputs))
        versions = Versions(tensors[count:], graph.name)
        ctx.call = (graph, graph.save(), versions, states, current_state())
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        graph, saved, versions, states, conditions = ctx.call
        if torch.is_grad_enabled():
            raise StateError(
                f"{graph.name} cannot be differentiated twice, and this backward was asked for "
                "with create_graph=True: its backward is a graph, which has no derivative."
                " Call the module itself."
            )
        graph.check_backward(saved)
        versions.check()
        grads = graph.replay_backward(grad_outputs, ctx.next_functions)
        end_with_backward(states, conditions.group, conditions.region)
        return (None, None, None, *grads)


_replayed: Callable[..., tuple[torch.Tensor, ...]] = _ReplayNode.apply


class GraphedForward:
    """The ``forward`` of a graphed module: replays its graph, or runs the module itself.

    A copy of the module, or one that was pickled, has no graph.

    ``plain`` is the ``forward`` that was set on the module before, None if it is that of its class.
    """

    def __init__(
        self, module: Module, plain: Callable[..., object] | None = None, graph: Graph | None = None
    ) -> None:
        self._module = module
        self._plain = plain
        self._graph = graph
        self._told: set[str] = set()

    @classmethod
    def put_on(cls, module: Module, graph: Graph) -> None:
        """Give a module this ``forward``; an earlier graph of the module is dropped."""
        plain = module.__dict__.get("forward")
        module.forward = cls(module, plain._plain if isinstance(plain, cls) else plain, graph)

    def __call__(self, *args: object, **kwargs: object) -> object:
        graph = self._graph
        if graph is None or not graph.is_for(self._module):
            return self._run(args, kwargs)
        change = graph.change()
        if change is None:
            if kwargs:
                raise InputError(
                    f"{graph.name} takes the positional arguments of its sample; got "
                    f"{', '.join(kwargs)}."
                )
            inputs = graph.check(args)
        with graph.autocast():
            if observing.steps is not None:  # an inspector sees no replay
                return self._run(args, kwargs)
            if change is None:
                states = graph.states()
                if states is not None:
                    return graph.replay(inputs, states)
                change = "an op with quantized parameters has another state of delayed scaling"
            if change not in self._told:
                self._told.add(change)
                warnings.warn(
                    f"{graph.name} runs without its graph, because since the capture {change}. "
                    "Capture it again, or undo the change.",
                    FuserWarning,
                    stacklevel=4,  # the caller of the module
                )
            return self._run(args, kwargs)

    def _run(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The results of the module itself."""
        if self._plain is not None:
            return self._plain(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return GraphedForward, (self._module, self._plain)
