"""The operations of compiled graphs: ``fuser::forward`` and ``fuser::backward``.

``fuser::host_forward`` and ``fuser::host_backward`` are the same for passes that need the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fuser.errors import StateError
from fuser.op.graph_operations import define, library
from fuser.runtime.compiled_passes import Passes, lock
from fuser.runtime.compiled_values import GivenBack, GivenTensors, Tensors
from fuser.runtime.diagnose import refuse_second_derivative
from fuser.runtime.exported import is_exported, passes_of_export
from fuser.runtime.graph_parameters import buffers_of
from fuser.tensors.dispatch import HANDLERS
from fuser.torch_private import is_compiled_ahead

# Part of the names of passes: another number after a change of what the operations take or return,
# because torch keeps compiled graphs on disk.
VERSION = 8

_FORWARD = (
    "forward(str call, Tensor x, Tensor[] params, Tensor[] extras, Tensor[] seeds, Tensor[] host)"
    " -> Tensor[]"
)
_BACKWARD = (
    "backward(str call, SymInt[] sizes, int[] inputs, int[] outputs, Tensor?[] grads,"
    " Tensor[] saved, Tensor[] params, Tensor[] host) -> Tensor[]"
)


_passes: dict[str, Passes] = {}


def add_passes(call: str, make: Callable[[], Passes]) -> None:
    """Make the passes with this name, unless they exist."""
    with lock:
        if call not in _passes:
            _passes[call] = make()


def _passes_of(call: str) -> Passes:
    passes = _passes.get(call)
    if passes is None and is_exported(call):
        add_passes(call, lambda: passes_of_export(call))
        passes = _passes[call]
    if passes is None:
        raise StateError(
            f"No pipeline in this process was traced as {call!r}. Compile it again in this process."
        )
    return passes


def _forward(
    is_fake: bool,
    call: str,
    x: torch.Tensor,
    params: Tensors,
    extras: Tensors,
    seeds: Tensors,
    host: Tensors,
) -> list[torch.Tensor]:
    if is_fake and is_compiled_ahead():
        raise StateError(
            "AOTInductor makes a library that runs without Python, and fuser plans and launches in "
            "Python. Run the exported program by its module(), or compile the model by "
            "torch.compile."
        )
    tensors = GivenTensors(x, tuple(params), tuple(extras), tuple(seeds), host)
    return _passes_of(call).forward(tensors, is_fake=is_fake)


def _backward(is_fake: bool, call: str, *arguments: Any) -> list[torch.Tensor]:
    return _passes_of(call).backward(GivenBack(*arguments), is_fake=is_fake)


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    call, *tensors = inputs
    counts = tuple(map(len, tensors[1:]))
    given = GivenTensors(*tensors)
    given = given._replace(params=buffers_of(given.params))
    passes = _passes_of(call)
    ctx.call, ctx.count = call, passes.output_count
    ctx.sizes, ctx.saved = given.sizes(), passes.noted.saved
    ctx.counts = (*counts, len(given.params))
    saved = [*output[ctx.count :], *(given.inputs[i] for i in passes.noted.saved.inputs)]
    saved += [output[i] for i in passes.noted.saved.outputs]
    ctx.save_for_backward(*saved, *given.params, *given.host)
    # Gradients of the saved tensors, and of extra outputs that no loss reads, are None.
    ctx.set_materialize_grads(False)
    ctx.main = (output[0].shape, output[0].dtype, output[0].device)


def _gradients(backward: Any, ctx: Any, grads: Any) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        refuse_second_derivative()
    _, _, seeds, host, buffers = ctx.counts
    held = list(ctx.saved_tensors)
    first = len(held) - buffers - host
    tensors = (held[:first], held[first : first + buffers], held[first + buffers :])
    of_outputs = list(grads[: ctx.count])
    if of_outputs[0] is None:
        shape, dtype, device = ctx.main
        of_outputs[0] = torch.zeros(shape, dtype=dtype, device=device)
    inputs, outputs, _ = ctx.saved
    passes = _passes_of(ctx.call)
    results = backward(ctx.call, ctx.sizes, inputs, outputs, of_outputs, *tensors)
    gradients = iter(passes.gradients(results))
    of_tensors = [next(gradients) if is_wanted else None for is_wanted in passes.noted.wanted]
    end = 1 + len(passes.noted.facts.summed)
    of_params = passes.noted.parameters.gradients_of(of_tensors[1:end], tensors[1])
    return None, of_tensors[0], of_params, of_tensors[end:], [None] * seeds, [None] * host


def _define_passes(prefix: str, *tags: torch.Tag) -> Any:
    """Both passes, whose fakes run the same functions; the forward."""
    backward, forward = (
        define(
            f"{prefix}{schema}",
            functools.partial(function, False),
            functools.partial(function, True),
            (torch.Tag.needs_exact_strides, *tags),
        )
        for schema, function in ((_BACKWARD, _backward), (_FORWARD, _forward))
    )
    torch.library.register_autograd(
        f"fuser::{prefix}forward",
        functools.partial(_gradients, backward),
        setup_context=_keep_for_backward,
        lib=library,
    )
    HANDLERS[forward.default] = _with_buffers
    return forward


def _with_buffers(
    forward: Callable[..., object], call: str, x: torch.Tensor, params: Tensors, *others: Tensors
) -> object:
    """A forward that was called with quantized parameters."""
    return forward(call, x, buffers_of(params), *others)


forward = _define_passes("")
# What they do on the host, such as the steps of delayed scaling, a replay of a CUDA graph would
# leave out.
forward_on_host = _define_passes("host_", torch.Tag.cudagraph_unsafe)
