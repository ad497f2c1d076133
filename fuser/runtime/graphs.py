"""Graphed callables: modules whose forward and backward are CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fuser.communication import GroupArgument, is_distributed
from fuser.errors import InputError, InputTypeError, StateError
from fuser.op import BasicOperation, modules_and_ops
from fuser.precision.contexts import autocast, current_recipe
from fuser.precision.delayed_scaling import holding_steps
from fuser.recipe import Recipe
from fuser.runtime.captured import accumulating_weights
from fuser.runtime.graphed import Graph, GraphedForward, memory_of
from fuser.torch_private import pytree, set_sync_debug_mode

Module = torch.nn.Module


def make_graphed_callables(
    modules: Module | Sequence[Module],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    *,
    enabled: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: GroupArgument = None,
    pool: Any | None = None,
) -> Any:
    """Capture forward and backward of modules in CUDA graphs, which later calls replay.

    A replay launches the whole forward, or backward, of a module at once, so a small step takes as
    long as its kernels. As with :func:`torch.cuda.make_graphed_callables`, a module's ``forward``
    is replaced in place, the sample arguments become the memory that a graph reads, and outputs are
    overwritten by the next call of a module that was captured with theirs: clone what must stay.
    So are gradients. Those that are the ``.grad`` of a leaf at that call are moved to memory of
    their own before, which torch's graphs do not. One that is kept elsewhere, as by a hook or by
    ``kept = leaf.grad`` before ``leaf.grad = None``, must be cloned to stay.

    The capture runs the modules and leaves no trace of that: scales, amaxes, buffers, ``main_grad``
    and random numbers are as before, also after an error. Replays add to ``main_grad``.

    A call in another mode than the capture runs the module itself, as if there were no graph: in
    training or evaluation, with or without gradients, under torch's autocast or not, and within the
    capture of another graph. So does a call after a change that its graph does not see, with a
    warning that names it: of parameters, buffers and their memory, of submodules, their modes and
    hooks, and of attributes of ops. Attributes of other modules are not compared. A copy of a
    graphed module has no graph. Loaded values are used by the graph, scales of delayed scaling too;
    with ``assign=True`` the parameters are others, and the module runs without its graph.

    A forward has one backward, with the parameters of the forward, before the module is called
    again; modules that were captured together run backward in the opposite order. All else is
    refused. An output that no loss needs has a gradient of zeros.

    Parameters
    ----------
    modules
        Pipelines, or modules that contain some, on one GPU: one, or several in the order in which
        they run.
    sample_args
        The tensors of a call, with the shapes, dtypes and ``requires_grad`` of all later calls: a
        tuple, or for several modules one for each. Values do not matter.
    num_warmup_iters
        How often each module runs before the capture, once more than that, with gradients of zeros.
    allow_unused_input
        Whether an input or parameter may get no gradient.
    enabled, recipe, amax_reduction_group
        As of :class:`fuser.autocast`: the modules run under it in the capture, so their graphs are
        quantized. By default under the recipe of the autocast around this call. Delayed scaling's
        scales are read and its steps end as without a graph. NVFP4's stochastic rounding takes its
        seed from the host, so that all replays of a graph round with the same random bits.
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
        If there is no GPU; if a module or a tensor has hooks, or if the module waits for the GPU in
        its forward or backward, as a capture cannot. Later, if a graphed module is called under
        another recipe, or if a backward needs what was overwritten.
    """
    is_one = not isinstance(modules, (tuple, list))
    chosen: tuple[Any, ...] = (modules,) if is_one else tuple(modules)  # type: ignore[arg-type]
    args = _checked_args(chosen, (sample_args,) if is_one else sample_args)
    if enabled is None:
        recipe = recipe or current_recipe()
        enabled = recipe is not None
    if not torch.cuda.is_available():
        raise StateError(
            "A CUDA graph needs a GPU, and torch sees no CUDA device. Call the module itself."
        )
    for number, (module, sample) in enumerate(zip(chosen, args, strict=True)):
        _check_module(number, module, sample)

    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    memory = memory_of(pool)
    context = autocast(enabled, recipe=recipe, amax_reduction_group=amax_reduction_group)
    graphs = []
    for number, (module, sample) in enumerate(zip(chosen, args, strict=True)):
        name = f"Graphed module {number} ({type(module).__name__})"
        graphs.append(Graph(name, module, sample, context, memory, pool))
    # An older graph that garbage collection frees inside a capture breaks that capture.
    gc.collect()
    with _leaving_no_trace(chosen, args), holding_steps() as steps, context:
        for graph, module in zip(graphs, chosen, strict=True):
            with _other_main_grads(module):
                _warm_up(graph, num_warmup_iters, allow_unused_input)
        for graph in graphs:
            graph.capture_forward()
        for graph in reversed(graphs):
            graph.capture_backward(steps)
    for module, graph in zip(chosen, graphs, strict=True):
        GraphedForward.put_on(module, graph)
    return chosen[0] if is_one else chosen


# -- arguments ------------------------------------------------------------------


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
    for number, sample in enumerate(sample_args):
        sample = (sample,) if isinstance(sample, torch.Tensor) else sample
        if not isinstance(sample, (tuple, list)):
            raise InputTypeError(
                f"The sample arguments of module {number} are a tuple of tensors; got a "
                f"{type(sample).__name__}."
            )
        places: dict[int, int] = {}
        for place, tensor in enumerate(pytree.tree_leaves(tuple(sample))):
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
        args.append(tuple(sample))
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
    for buffer_name, buffer in module.named_buffers():
        if buffer.requires_grad:
            raise StateError(
                f"{name} has the buffer {buffer_name!r}, which requires a gradient; a graph "
                "computes gradients of arguments and parameters."
                " Make it a parameter."
            )
    for weight in accumulating_weights(module):
        if hasattr(weight, "__fsdp_param__"):
            raise StateError(
                f"{name} has a weight of shape {tuple(weight.shape)} with another main_grad in "
                "each backward; a CUDA graph adds to one."
            )
    tensors = [*pytree.tree_leaves(args), *module.parameters(), *module.buffers()]
    for tensor in tensors:
        if is_distributed(tensor):
            raise InputError(
                f"{name} got or holds a DTensor of shape {tuple(tensor.shape)}; a CUDA graph reads "
                "plain tensors."
            )
        if tensor._backward_hooks:
            raise StateError(
                f"{name} got or holds a tensor of shape {tuple(tensor.shape)} with hooks, which "
                "would run in the capture and after each replay: register them afterwards."
            )
        if not _is_on_gpu(tensor):
            raise InputError(
                f"{name} got or holds a tensor of shape {tuple(tensor.shape)} on {tensor.device}; "
                "a CUDA graph reads memory of the GPU."
            )


_is_on_gpu = operator.attrgetter("is_cuda")


# -- capture --------------------------------------------------------------------

_new_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream


def _warm_up(graph: Graph, count: int, allow_unused_input: bool) -> None:
    """Run a module as the capture will, on a stream of its own."""
    torch.cuda.synchronize()
    with torch.cuda.stream(_new_stream()):
        for _ in range(max(count, 1)):  # compiles kernels and makes parameters
            graph.step(allow_unused_input=allow_unused_input)
        torch.cuda.synchronize()
        try:
            with _refusing_to_wait():
                graph.step(allow_unused_input=allow_unused_input)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise StateError(
                f"{graph.name} cannot be captured in a CUDA graph: its forward or backward waits "
                f"for the GPU, {_place(error)}. A graph has no values while it is captured; keep "
                "such decisions on the GPU or outside the module."
            ) from error
    torch.cuda.synchronize()


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
        set_sync_debug_mode(before)


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


@contextlib.contextmanager
def _leaving_no_trace(
    modules: Sequence[Module], args: tuple[tuple[Any, ...], ...]
) -> Iterator[None]:
    """Context after which nothing is left of what ran in it, also if it ends by an error.

    States of delayed scaling, buffers, attributes of parameters and random numbers are as before.
    """
    ops = [op for module in modules for _, op in modules_and_ops(module)]
    states = [(op, dict(op._delayed)) for op in ops if isinstance(op, BasicOperation)]
    numbers = [state.snapshot() for _, of_op in states for state in of_op.values()]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    weights = [weight for module in modules for weight in accumulating_weights(module)]
    attributes = [(weight, dict(vars(weight))) for weight in weights]
    cached = torch.is_autocast_cache_enabled()
    tensors = [*pytree.tree_leaves(args), *(p for module in modules for p in module.parameters())]
    devices = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    torch.set_autocast_cache_enabled(False)  # a graph casts weights that change
    torch.clear_autocast_cache()  # casts that autograd would join with another stream
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for weight, before in attributes:
            vars(weight).clear()
            vars(weight).update(before)
        for op, of_op in states:
            vars(op)["_delayed"] = of_op  # no change of an attribute for recorded passes
        torch.cuda.synchronize()  # an error may have left work on another stream
        with torch.no_grad():
            for restore in numbers:
                restore()
            for buffer, values in buffers:
                buffer.copy_(values)


@contextlib.contextmanager
def _other_main_grads(module: Module) -> Iterator[None]:
    """Context in which gradients are added to other buffers than each weight's ``main_grad``."""
    weights = {
        weight: weight.main_grad
        for weight in accumulating_weights(module)
        if hasattr(weight, "main_grad")
    }
    try:
        for weight, main_grad in weights.items():
            weight.main_grad = torch.zeros_like(main_grad)
        yield
    finally:
        for weight, main_grad in weights.items():
            weight.main_grad = main_grad
