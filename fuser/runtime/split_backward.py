"""A backward in two parts: first the gradient of the input, later the gradients of parameters.

Zero-bubble pipeline schedules run it so, and keep the graph in between. The first part keeps the
gradients that enter steps with parameters, and the second one starts each such step from its own,
without the products between them. This needs the same gradient of the output. Torch does not say
whether it is the same, so values are compared, and the second part waits for the device once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fuser.op import OperationContext, method_of
from fuser.runtime.executor import CompiledPlan
from fuser.runtime.gradient_paths import Needed
from fuser.tensors import QuantizedTensor
from fuser.torch_private import keeps_graph

Function = Callable[..., Any]


class _FirstPart(NamedTuple):
    """The gradients of a node's outputs in its first part, and what entered its steps."""

    grads: tuple[torch.Tensor | None, ...]
    versions: tuple[int | None, ...]
    entering: list[Any]

    def are(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are the same gradients, and the kept ones are as they were."""
        return _versions(self.grads) == self.versions and all(
            one is other if one is None or other is None else _equal(one, other)
            for one, other in zip(self.grads, grads, strict=True)
        )


class SplittablePlan(CompiledPlan):
    """A plan whose callers may ask for the gradients of backward apart."""

    @functools.cached_property
    def _parts(self) -> tuple[Function, Function]:
        """The two parts of the generated backward."""
        first, second = {}, {}
        names, ops, param_counts = self.code.names, self.code.ops, self.code.param_counts
        for number, (op, indices) in enumerate(self.code.steps["backward"]):
            name = f"backward{number}"
            has_params = any(param_counts[i] for i in indices)
            extras = sum(ops[i].num_extra_inputs + ops[i].num_extra_outputs for i in indices)
            if has_params or extras:
                first[name] = _keeping(names[name])
                is_alone = len(indices) == 1 and op is ops[indices[0]]
                second[name] = _from_kept(names[name], is_alone=is_alone and has_params)
            else:
                second[name] = _left_out(method_of(op, "backward"), len(indices))
        return self.code.functions(first)[1], self.code.functions(second)[1]

    @functools.cached_property
    def _params(self) -> slice:
        """The parameters among the inputs of the node."""
        return slice(1, 1 + sum(self.code.param_counts))

    def part_of_backward(
        self, ctx: Any, needed: Needed, grads: tuple[torch.Tensor | None, ...]
    ) -> Function | None:
        of_params = needed[self._params]
        if not any(of_params):
            return self._first(ctx, grads) if keeps_graph() else None
        kept: _FirstPart | None = getattr(ctx, "kept", None)
        if kept is None or sum(needed) > sum(of_params) or _is_capturing(grads):
            return None
        ctx.kept = None  # kernels may write over what they read last
        return self._second(kept.entering) if kept.are(grads) else None

    def _first(self, ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> Function:
        """The first part, which keeps in ``ctx``, the node's in torch, what the second needs."""

        def first(contexts: list[OperationContext], *rest: Any) -> Any:
            results = self._parts[0](contexts, *rest)
            entering = [vars(context).pop("entering", None) for context in contexts]
            ctx.kept = None
            if all(e is None or _can_be_kept(e) for e in entering):
                ctx.kept = _FirstPart(grads, _versions(grads), entering)
            return results

        return first

    def _second(self, entering: list[Any]) -> Function:
        def second(contexts: list[OperationContext], *rest: Any) -> Any:
            for context, gradient in zip(contexts, entering, strict=True):
                context.entering = gradient  # type: ignore[attr-defined]
            results = self._parts[1](contexts, *rest)
            return (*results[:1], None, *results[2:])  # without dx, which is no gradient here

        return second


def _contexts(contexts: Any) -> Sequence[Any]:
    """The contexts of a step, which gets one or several."""
    return (contexts,) if isinstance(contexts, OperationContext) else contexts


def _keeping(backward: Function) -> Function:
    def kept(contexts: Any, dx: Any, *rest: Any) -> Any:
        for context in _contexts(contexts):
            context.rebuilt_output = None  # its kernel would store that over what is kept
        _contexts(contexts)[0].entering = dx
        return backward(contexts, dx, *rest)

    return kept


def _from_kept(backward: Function, *, is_alone: bool) -> Function:
    """A step's backward from the gradient that entered it; ``is_alone``: without its own dx."""

    def from_kept(contexts: Any, dx: Any, *rest: Any) -> Any:
        context = _contexts(contexts)[0]
        entering = context.entering
        if is_alone:
            context.input_requires_grad = False
        leaving, *others = backward(contexts, entering, *rest)
        return (entering if leaving is None else leaving, *others)

    return from_kept


def _left_out(method: str, count: int) -> Function:
    """A step's backward that leaves the gradient as it is: nothing reads it."""
    if method == "op_backward":
        return lambda context, dx: (dx, ())
    params = ((),) * count if method == "fuser_backward" else ()
    return lambda contexts, dx, grads: (dx, params, ())


def _can_be_kept(gradient: Any) -> bool:
    """Whether it has been computed: a lazy one is computed when it is read."""
    return type(gradient) is torch.Tensor or isinstance(gradient, QuantizedTensor)


def _versions(grads: Sequence[torch.Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if g is None or g.is_inference() else g._version for g in grads)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
    )


def _is_capturing(grads: Sequence[torch.Tensor | None]) -> bool:
    on_gpu = any(g is not None and g.is_cuda for g in grads)
    return on_gpu and torch.cuda.is_current_stream_capturing()
