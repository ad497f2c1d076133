"""Graphed callables: modules whose forward and backward are CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from fuser.errors import InputError, InputTypeError, StateError
from fuser.op import BasicOperation, modules_and_ops
from fuser.precision.contexts import AutocastState, autocast, current_recipe, current_state
from fuser.precision.delayed_scaling import (
    DelayedScales,
    end_with_backward,
    holding_steps,
    note_uses,
    noting_uses,
    record_until_backward_ends,
)
from fuser.recipe import Recipe
from fuser.tensors.sharding import is_distributed

Module = torch.nn.Module


def make_graphed_callables(
    modules: Module | Sequence[Module],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    *,
    enabled: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any | None = None,
    pool: Any | None = None,
) -> Any:
    """Capture forward and backward of modules in CUDA graphs, which later calls replay.

    A replay launches the whole forward, or backward, of a module at once, so a small step takes as
    long as its kernels. The conventions are those of :func:`torch.cuda.make_graphed_callables`,
    which captures: a module's ``forward`` is replaced in place, the sample arguments become the
    memory that a graph reads, and outputs are overwritten by the next call of a module that was
    captured with theirs: clone what must stay. Gradients of leaves that are still there at that
    call are moved to memory of their own. A module in another mode (``train``, ``eval``) than at
    the capture runs without a graph.

    Parameters
    ----------
    modules
        Pipelines, or modules that contain some, on one GPU: one, or several in the order in which
        they run.
    sample_args
        The tensors of a call, with the shapes, dtypes and ``requires_grad`` of all later calls: a
        tuple, or for several modules one for each. Values do not matter.
    num_warmup_iters
        How often each module runs before the capture.
    allow_unused_input
        Whether an input or parameter may get no gradient.
    enabled, recipe, amax_reduction_group
        As of :class:`fuser.autocast`: the modules run under it in the capture, so their graphs are
        quantized. By default under the recipe of the autocast around this call. Delayed scaling's
        scales are read and its steps end as without a graph; the runs before the capture leave no
        amax. NVFP4's stochastic rounding takes its seed from the host, so that all replays of a
        graph round with the same random bits.
    pool
        Memory of another graph to share, from :func:`torch.cuda.graph_pool_handle`.

    Returns
    -------
    torch.nn.Module or tuple of these
        The modules themselves.

    Raises
    ------
    InputError, InputTypeError
        If the arguments do not fit each other. A call of a graphed module raises it for tensors
        unlike the sample's.
    StateError
        If there is no GPU; if a module has hooks, or waits for the GPU in its forward or backward,
        as a capture cannot; if a graphed module is called under another recipe.
    """
    is_one = not isinstance(modules, (tuple, list))
    chosen: tuple[Any, ...] = (modules,) if is_one else tuple(modules)  # type: ignore[arg-type]
    args = _checked_args(chosen, (sample_args,) if is_one else sample_args)
    if enabled is None:
        enabled, recipe = _default(recipe)
    if not torch.cuda.is_available():
        raise StateError("A CUDA graph needs a GPU, and torch sees no CUDA device.")
    for number, (module, given) in enumerate(zip(chosen, args, strict=True)):
        _check_module(number, module, given)

    memory = _Memory() if pool is None else _memory_of_pool.setdefault(pool, _Memory())
    context = autocast(enabled, recipe=recipe, amax_reduction_group=amax_reduction_group)
    # An older graph that garbage collection frees inside a capture breaks that capture.
    gc.collect()
    kept = _states(chosen)
    try:
        with holding_steps() as steps, context:
            graphed = [
                _probed(number, module, given, context, memory, steps, allow_unused_input)
                for number, (module, given) in enumerate(zip(chosen, args, strict=True))
            ]
            torch.cuda.make_graphed_callables(
                chosen, args, num_warmup_iters, allow_unused_input, pool
            )
    finally:
        _restore(kept, chosen)
    for module, one in zip(chosen, graphed, strict=True):
        one.bind(module)
    return chosen[0] if is_one else chosen


# -- arguments ------------------------------------------------------------------


def _default(recipe: Recipe | None) -> tuple[bool, Recipe | None]:
    """Without ``enabled``: whether to quantize, and the recipe."""
    recipe = recipe or current_recipe()
    return recipe is not None, recipe


def _checked_args(modules: tuple[Any, ...], sample_args: Any) -> tuple[tuple[Any, ...], ...]:
    for module in modules:
        if not isinstance(module, Module):
            raise InputTypeError(
                f"make_graphed_callables takes modules; got a {type(module).__name__}."
            )
    if len(set(map(id, modules))) < len(modules):
        raise InputError("make_graphed_callables got one module twice; a graph runs in one place.")
    if not isinstance(sample_args, (tuple, list)) or len(sample_args) != len(modules):
        count = len(sample_args) if isinstance(sample_args, (tuple, list)) else "no"
        raise InputError(
            f"make_graphed_callables got {len(modules)} modules and {count} tuples of sample "
            "arguments; it takes one for each."
        )
    args = []
    for number, given in enumerate(sample_args):
        given = (given,) if isinstance(given, torch.Tensor) else given
        if not isinstance(given, (tuple, list)):
            raise InputTypeError(
                f"The sample arguments of module {number} are a tuple of tensors; got a "
                f"{type(given).__name__}."
            )
        places: dict[int, int] = {}
        for place, tensor in enumerate(pytree.tree_leaves(tuple(given))):
            if not isinstance(tensor, torch.Tensor):
                raise InputTypeError(
                    f"Sample argument {place} of module {number} is a {type(tensor).__name__}; a "
                    "graph takes tensors."
                )
            first = places.setdefault(id(tensor), place)
            if first != place and tensor.requires_grad:
                raise InputError(
                    f"Sample arguments {first} and {place} of module {number} are one tensor of "
                    f"shape {tuple(tensor.shape)} that requires a gradient, which a graph would "
                    "give twice: pass two tensors. Later calls may pass one for both."
                )
        args.append(tuple(given))
    return tuple(args)


def _check_module(number: int, module: Module, args: tuple[Any, ...]) -> None:
    name = f"Module {number} ({type(module).__name__})"
    for kind in ("_backward_hooks", "_forward_hooks", "_forward_pre_hooks"):
        if getattr(module, kind):
            raise StateError(
                f"{name} has hooks, which a CUDA graph does not call: register them afterwards."
            )
    for path, op in modules_and_ops(module):
        if not getattr(op, "is_capturable", True):
            why = "process groups; a CUDA graph does not repeat its communication"
            if getattr(op, "delay_wgrad_compute", False):
                why = (
                    "delay_wgrad_compute, whose backward leaves work to a later call; a CUDA graph "
                    "repeats its kernels alone"
                )
            elif hasattr(op, "num_local_experts"):
                why = (
                    "experts on several ranks and no capacity, so that the numbers of rows are "
                    "read on the host"
                )
            raise StateError(f"{name} has the op {path or type(op).__name__!r} with {why}.")
    tensors = [*pytree.tree_leaves(args), *module.parameters(), *module.buffers()]
    for tensor in tensors:
        if is_distributed(tensor):
            raise InputError(
                f"{name} got or holds a DTensor of shape {tuple(tensor.shape)}; a CUDA graph reads "
                "plain tensors."
            )
        if not tensor.is_cuda:
            raise InputError(
                f"{name} got or holds a tensor of shape {tuple(tensor.shape)} on {tensor.device}; "
                "a CUDA graph reads memory of the GPU."
            )


# -- capture --------------------------------------------------------------------


def _probed(
    number: int,
    module: Module,
    args: tuple[Any, ...],
    context: autocast,
    memory: _Memory,
    steps: list[DelayedScales],
    allow_unused_input: bool,
) -> _Graphed:
    """Run a module as the capture will, and note what a replay must do beside the graph."""
    step = functools.partial(_step, module, args, allow_unused_input)
    step()  # compiles kernels and makes parameters
    steps.clear()
    torch.cuda.synchronize()
    try:
        with noting_uses() as used, _refusing_to_wait():
            step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise StateError(
            f"Module {number} ({type(module).__name__}) cannot be captured in a CUDA graph: its "
            f"forward or backward waits for the GPU, {_place(error)}. A graph has no values while "
            "it is captured; keep such decisions on the GPU or outside the module."
        ) from error
    specs = tuple(_Spec.of(tensor) for tensor in pytree.tree_leaves(args))
    forward, backward = dict.fromkeys(used), dict.fromkeys(steps)
    states = tuple(forward), tuple(backward)
    steps.clear()
    return _Graphed(number, context, module.training, specs, *states, memory)


def _step(module: Module, args: tuple[Any, ...], allow_unused_input: bool) -> None:
    """One forward and, if anything needs a gradient, backward."""
    outputs = [t for t in pytree.tree_leaves(module(*args)) if isinstance(t, torch.Tensor)]
    outputs = [output for output in outputs if output.requires_grad]
    inputs = [*pytree.tree_leaves(args), *module.parameters()]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if outputs and wanted:
        torch.autograd.grad(
            outputs, wanted, list(map(torch.empty_like, outputs)), allow_unused=allow_unused_input
        )


@contextlib.contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Context in which torch raises an error where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch._C._cuda_set_sync_debug_mode(before)


def _place(error: BaseException) -> str:
    """Where an error was raised, outside of torch, for a message."""
    place = "in torch"
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if f"{torch.__name__}/" not in code.co_filename:
            place = f"in {code.co_name} ({code.co_filename}:{frame.tb_lineno})"
        frame = frame.tb_next
    return place


def _states(modules: Sequence[Module]) -> dict[DelayedScales, tuple[torch.Tensor, torch.Tensor]]:
    """Copies of scales and histories of all states in the modules."""
    return {
        state: (state.scale.clone(), state.amax_history.clone())
        for module in modules
        for _, op in modules_and_ops(module)
        if isinstance(op, BasicOperation)
        for state in op._delayed.values()
        if state.scale.numel()
    }


def _restore(
    kept: dict[DelayedScales, tuple[torch.Tensor, torch.Tensor]], modules: Sequence[Module]
) -> None:
    """Give all states in the modules what they had; a new state what it begins with."""
    for state in _states(modules):
        before = kept.get(state)
        if before is None or before[1].shape != state.amax_history.shape:
            state.scale.fill_(1)
            state.amax_history.zero_()
        else:
            state.scale.copy_(before[0])
            state.amax_history.copy_(before[1])


# -- calls ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Spec:
    """The properties that later arguments must have in common with the sample's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Spec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)

    def __str__(self) -> str:
        grad = " with a gradient" if self.requires_grad else ""
        return f"{self.dtype} {self.shape} on {self.device}{grad}"


class _Memory:
    """The memory of the graphs of one pool, which torch lends to leaves as their gradients.

    A leaf without a gradient gets the graph's own memory. The next forward of any graph of the pool
    may write there, so before that, gradients that are still in use get memory of their own.
    """

    def __init__(self) -> None:
        self._lent: list[Callable[[], torch.Tensor | None]] = []

    def lend(self, leaves: Iterable[torch.Tensor]) -> None:
        """Note the leaves to which a backward gives its memory: those without a gradient."""
        self._lent += [TensorWeakRef(leaf) for leaf in leaves if leaf.grad is None]

    def take_back(self) -> None:
        """Move the gradients that are in this memory, of leaves that are still in use."""
        lent, self._lent = self._lent, []
        for ref in lent:
            leaf = ref()
            if leaf is not None and leaf.grad is not None:
                leaf.grad = leaf.grad.clone()


# By the pools that callers share between captures.
_memory_of_pool: dict[Any, _Memory] = {}


@dataclass
class _Graphed:
    """A graphed module: its checks, and what its replays do outside of the graph."""

    number: int
    context: autocast
    training: bool
    specs: tuple[_Spec, ...]
    forward_states: tuple[DelayedScales, ...]
    backward_states: tuple[DelayedScales, ...]
    memory: _Memory
    replay: Callable[..., Any] = field(init=False)
    parameters: tuple[torch.nn.Parameter, ...] = field(init=False)

    def bind(self, module: Module) -> None:
        """Put the checks before the ``forward`` that torch has set on the module."""
        self.replay = module.forward
        self.parameters = tuple(p for p in module.parameters() if p.requires_grad)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if module.training != self.training:
                return self.replay(*args, **kwargs)  # torch runs the module itself
            if kwargs:
                raise InputError(
                    f"Graphed module {self.number} takes the positional arguments of its sample; "
                    f"got {', '.join(kwargs)}."
                )
            self._check(args)
            with self._autocast():
                return self._replay(args)

        module.forward = forward

    def _check(self, args: tuple[Any, ...]) -> None:
        given = pytree.tree_leaves(args)
        if len(given) != len(self.specs):
            raise InputError(
                f"Graphed module {self.number} was captured with {len(self.specs)} tensors, and "
                f"got {len(given)}."
            )
        is_differentiated = torch.is_grad_enabled()
        for place, (tensor, spec) in enumerate(zip(given, self.specs, strict=True)):
            if not isinstance(tensor, torch.Tensor):
                raise InputTypeError(
                    f"Argument {place} of graphed module {self.number} is a "
                    f"{type(tensor).__name__}; a graph takes tensors."
                )
            if (tensor.shape, tensor.dtype, tensor.device) != (spec.shape, spec.dtype, spec.device):
                raise InputError(
                    f"Argument {place} of graphed module {self.number} is {_Spec.of(tensor)}; it "
                    f"was captured as {spec}. Other shapes need a capture of their own."
                )
            if is_differentiated and tensor.requires_grad and not spec.requires_grad:
                raise InputError(
                    f"Argument {place} of graphed module {self.number} needs a gradient, and the "
                    "sample did not: its graph computes none."
                )

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        """The autocast of the capture, unless the call is already under such a one."""
        current, captured = current_recipe(), self.context.recipe
        if current == captured:
            return contextlib.nullcontext()
        if current is None and current_state().region is None:
            return autocast(recipe=captured, amax_reduction_group=self.context.amax_reduction_group)
        raise StateError(
            f"Graphed module {self.number} was captured under {captured or 'no recipe'}, and is "
            f"called under {current or 'no recipe'}: a graph cannot change its recipe."
        )

    def _replay(self, args: tuple[Any, ...]) -> Any:
        if self.forward_states:
            note_uses(self.forward_states)
        self.memory.take_back()
        outputs = self.replay(*args)
        hook = functools.partial(self._before_backward, current_state(), args)
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(hook)  # type: ignore[no-untyped-call]
        return outputs

    def _before_backward(
        self, conditions: AutocastState, args: tuple[Any, ...], _: torch.Tensor
    ) -> None:
        """Make the backward end delayed scaling's steps, and note which gradients it may lend."""
        for state in self.backward_states:
            record_until_backward_ends(state, conditions.group)
        if conditions.region is not None and conditions.region.recorded:
            end_with_backward(conditions.region)
        leaves = [*self.parameters, *pytree.tree_leaves(args)]
        self.memory.lend(leaf for leaf in leaves if leaf.is_leaf and leaf.requires_grad)
