"""Methods of a user's op or fusion as a plan calls them, with checks of what they return."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fuser.doors import VIEW
from fuser.errors import StateError
from fuser.op import BasicOperation, FusibleOperation, OperationContext, StepInputs
from fuser.op.step import Contexts
from fuser.plan.graph import assumes_extra_outputs
from fuser.runtime.diagnose import note_extra_outputs

_RESULTS = {
    "op_backward": ("grad_input", "param_grads"),
    "fuser_forward": ("output", "extra_outputs"),
    "fuser_backward": ("grad_input", "param_grads", "grad_extra_inputs"),
}


class UsersMethods:
    """``op_backward``, and ``fuser_`` methods with the arguments of ``step_`` methods.

    Parameters
    ----------
    op
        The op or the fusion.
    ops
        The index of each basic op whose work it does, the op, and the number of its parameters.
    needed
        The extra outputs that other ops or the caller read: the place of the op among these, the
        index, and a description.
    """

    def __init__(
        self,
        op: FusibleOperation,
        ops: Sequence[tuple[int, BasicOperation, int]],
        needed: Sequence[tuple[int, int, str]],
    ) -> None:
        self.op: Any = op
        self.needed = needed
        self.indices = [index for index, _, _ in ops]
        self.param_counts = [count for _, _, count in ops]
        self.extra_inputs = _Rows(member.num_extra_inputs for _, member, _ in ops)
        self.extra_outputs = _Rows(member.num_extra_outputs for _, member, _ in ops)
        self.assumes_outputs = isinstance(op, BasicOperation) and assumes_extra_outputs(op)

    def op_backward(self, ctx: OperationContext, dy: torch.Tensor) -> Any:
        return self._parts("op_backward", self.op.op_backward(ctx, dy))

    def fuser_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> Any:
        entering = x.shape, x.dtype
        before = ctxs[0].grad_input_quantizer
        if before is not None and self.op.is_external:
            before = VIEW.guest.of(before, None)
        result = self.op.fuser_forward(
            list(ctxs),
            x,
            basic_op_extra_inputs=self.extra_inputs.of(inputs.extras),
            prev_op_grad_output_quantizer=before,
            next_op_input_quantizer=inputs.quantizer,
            basic_op_kwargs=list(inputs.kwargs),
        )
        output, extras = self._parts("fuser_forward", result)
        if not (self.extra_outputs.total or any(extras)):
            return output, ()
        rows = self._checked(extras, "extra outputs", self.extra_outputs.counts)
        for place, k, read in self.needed:
            if rows[place][k] is None:
                raise StateError(f"{type(self.op).__name__} returned None for {read}.")
        outputs = tuple(itertools.chain(*rows))
        if self.assumes_outputs:
            note_extra_outputs(self.op, entering, outputs)
        return output, outputs

    def fuser_backward(self, ctxs: Contexts, dy: torch.Tensor, grads: Any) -> Any:
        result = self.op.fuser_backward(
            list(ctxs), dy, basic_op_grad_extra_outputs=self.extra_outputs.of(grads)
        )
        dx, params, extras = self._parts("fuser_backward", result)
        if not (params and len(params) == len(self.indices)):
            params = self._checked(params, "parameters", self.param_counts)
        if self.extra_inputs.total:
            rows = self._checked(extras, "extra inputs", self.extra_inputs.counts)
            return dx, params, tuple(itertools.chain(*rows))
        return dx, params, ()

    def _parts(self, method: str, result: Any) -> Any:
        """The parts of a result. A tensor is none, though it may have as many rows."""
        names = _RESULTS[method]
        try:
            parts = () if isinstance(result, torch.Tensor) else tuple(result)
        except TypeError:
            parts = ()
        if len(parts) == len(names):
            tensors = [part for part in parts[1:] if isinstance(part, torch.Tensor)]
            if not tensors:
                return parts
            result = tensors[0]
        form = type(result).__name__
        if isinstance(result, (tuple, list)):
            form = f"{form} of {len(result)}"
        cls = type(self.op).__name__
        raise StateError(f"{cls}.{method} returns ({', '.join(names)}); it returned a {form}.")

    def _checked(
        self, given: Iterable[Iterable[Any] | None] | None, what: str, counts: list[int]
    ) -> list[tuple[Any, ...]]:
        """One row of tensors for each basic op; those of the last ops may be left out if empty."""
        name, first, last = type(self.op).__name__, self.indices[0], self.indices[-1]
        if given is None:
            raise StateError(
                f"{name} returned None in the place of its rows of {what}; it returns "
                f"{len(counts)}, for ops {first} to {last}, of {counts} {what}."
            )
        rows = [tuple(row or ()) for row in given]
        rows += [()] * (len(counts) - len(rows))
        if [len(row) for row in rows] != counts:
            raise StateError(
                f"{name} replaces ops {first} to {last}, which have {counts} {what}, and returned "
                f"{[len(row) for row in rows]}."
            )
        return rows


class _Rows:
    """How tensors are divided among basic ops."""

    def __init__(self, counts: Iterable[int]) -> None:
        self.counts = list(counts)
        self.total = sum(self.counts)
        ends = itertools.accumulate(self.counts)
        self.slices = [slice(e - n, e) for n, e in zip(self.counts, ends, strict=True)]

    def of(self, tensors: Sequence[Any]) -> list[Any]:
        return [tensors[row] for row in self.slices]
