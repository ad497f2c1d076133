"""The ways of gradients through a pipeline's autograd node: from its outputs, and to its inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import Node

from fuser.op import OperationContext, context_of
from fuser.plan.graph import Source
from fuser.precision.delayed_scaling import holds_steps
from fuser.torch_private import will_run_node

Gradients = tuple[torch.Tensor | None, ...]


def readers(sources: Sequence[tuple[Source, ...]], param_counts: Sequence[int]) -> list[int]:
    """The op that reads each tensor of a call: the input, the parameters, and the extra inputs."""
    takers = {s.caller_index: i for i, row in enumerate(sources) for s in row}
    return [
        0,
        *(i for i, count in enumerate(param_counts) for _ in range(count)),
        *(i for n, i in sorted((n, i) for n, i in takers.items() if n is not None)),
    ]


def of_reached(
    backward: Callable[[torch.Tensor], Gradients],
    grad_extras: Sequence[torch.Tensor | None],
    producers: Sequence[int],
    specs: Sequence[tuple[torch.Size, torch.dtype]],
    readers: Sequence[int],
) -> Gradients:
    """The gradients of a node whose main output has none: as in torch, None where none arrives.

    A loss may need extra outputs alone, which ``producers`` make. Ops after the last one that it
    needs are not reached. The steps of a plan run all ops, so ``backward`` gets zeros for the main
    output, whose shape and dtype are the last of ``specs``, and the gradients of what later ops
    read are dropped.
    """
    reached = [op for op, grad in zip(producers, grad_extras, strict=True) if grad is not None]
    if not reached:
        return (None,) * (1 + len(readers))
    shape, dtype = specs[-1]
    device = next(grad.device for grad in grad_extras if grad is not None)
    first, *grads = backward(torch.zeros(shape, dtype=dtype, device=device))
    last = max(reached)
    kept = (grad if op <= last else None for op, grad in zip(readers, grads, strict=True))
    return (first, *kept)


Edges = Sequence[tuple[Node | None, int]]
Needed = tuple[bool, ...]


def needed_gradients(edges: Edges) -> Needed | None:
    """Which gradients of a node, of the input and the parameters, its backward needs; None for all.

    ``backward()`` needs all; ``torch.autograd.grad`` and ``backward(inputs=...)`` some, as pipeline
    schedules without bubbles do: first those of the input, later those of the parameters.
    """
    needed = tuple([node is not None and _is_needed(node) for node, _ in edges])
    is_all = all(is_one or node is None for is_one, (node, _) in zip(needed, edges, strict=True))
    return None if is_all else needed


def needing(contexts: Sequence[OperationContext], needed: Needed) -> list[OperationContext]:
    """Copies of the contexts of a node's ops, for a backward that needs the ``needed`` gradients.

    The node's own contexts stay, for another backward through it.
    """
    partial, place = [], 1
    for i, context in enumerate(contexts):
        of_params = context.params_require_grad
        after = place + len(of_params)
        copy = context_of(type(context), context.__dict__)
        copy.is_partial = True
        copy.params_require_grad = tuple(map(operator.and_, of_params, needed[place:after]))
        copy.input_requires_grad = context.input_requires_grad and (i > 0 or needed[0])
        partial.append(copy)
        place = after
    return partial


def _is_needed(node: Node) -> bool:
    try:
        return will_run_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad was given
        return True


def accumulating_leaf(edge: tuple[Node | None, int]) -> torch.Tensor | None:
    """The leaf whose gradient this backward accumulates at ``edge``; None if it does not.

    None if the gradient flows on, is computed for a caller of ``torch.autograd.grad``, or is not
    needed: ``backward(inputs=...)`` may leave it out. In the capture of a graph, every leaf.
    """
    node, _ = edge
    leaf: torch.Tensor | None = getattr(node, "variable", None)
    if leaf is None or node is None:
        return None
    try:
        return leaf if will_run_node(node) else None
    except RuntimeError:  # torch cannot tell for a leaf that torch.autograd.grad was given
        return leaf if holds_steps() else None
