"""Methods of a user's op or fusion as a plan calls them, with checks of what they return."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from fuser.cuda.arguments import PLAIN_OR_NONE
from fuser.doors import VIEW
from fuser.errors import StateError
from fuser.functional.lazy import LazyTensor
from fuser.op import BasicOperation, FusibleOperation, StepInputs
from fuser.op.step import Contexts, rows
from fuser.plan.graph import assumes_extra_outputs
from fuser.runtime.diagnose import note_extra_outputs

_RESULTS = {
    "op_backward": ("grad_input", "param_grads"),
    "fuser_forward": ("output", "extra_outputs"),
    "fuser_backward": ("grad_input", "param_grads", "grad_extra_inputs"),
}


class UsersMethods:
    """``fuser_forward`` and ``fuser_backward``, with the arguments of ``step_`` methods.

    ``ops`` has the index of each basic op whose work ``op``, an op or a fusion, does, the basic op,
    and the number of its parameters; ``needed`` the extra outputs that other ops or the caller
    read: the place of the op among these, the index, and a description.
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
        self.input_counts = [member.num_extra_inputs for _, member, _ in ops]
        self.output_counts = [member.num_extra_outputs for _, member, _ in ops]
        self.is_one = len(ops) == 1
        self.assumes_outputs = isinstance(op, BasicOperation) and assumes_extra_outputs(op)

    def fuser_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> Any:
        entering = (x.shape, x.dtype) if self.assumes_outputs else None
        extras, after, kwargs = inputs
        before = ctxs[0].grad_input_quantizer
        if before is not None and self.op.is_external:
            before = VIEW.guest.of(before, None)
        result = self.op.fuser_forward(
            list(ctxs),
            x,
            basic_op_extra_inputs=[extras] if self.is_one else rows(extras, self.input_counts),
            prev_op_grad_output_quantizer=before,
            next_op_input_quantizer=after,
            basic_op_kwargs=list(kwargs),
        )
        output, outputs = parts_of(self.op, "fuser_forward", result)
        if not any(self.output_counts) and outputs is not None:
            outputs = [*outputs]
            if torch.Tensor not in map(type, outputs) and not any(outputs):
                return output, ()
        of_ops = self._checked(outputs, "extra outputs", self.output_counts)
        for place, k, read in self.needed:
            if of_ops[place][k] is None:
                raise StateError(f"{type(self.op).__name__} returned None for {read}.")
        outputs = of_ops[0] if self.is_one else tuple(itertools.chain(*of_ops))
        if entering is not None:
            note_extra_outputs(self.op, entering, outputs)
        return output, outputs

    def fuser_backward(self, ctxs: Contexts, dy: torch.Tensor, grads: Any) -> Any:
        result = self.op.fuser_backward(
            list(ctxs),
            dy,
            basic_op_grad_extra_outputs=[grads] if self.is_one else rows(grads, self.output_counts),
        )
        dx, params, extras = parts_of(self.op, "fuser_backward", result)
        is_right = params and len(params) == len(self.indices)
        if not is_right or torch.Tensor in map(type, params):
            params = self._checked(params, "parameters", self.param_counts)
        if not any(self.input_counts):
            return dx, params, ()
        extras = self._checked(extras, "extra inputs", self.input_counts)
        return dx, params, extras[0] if self.is_one else itertools.chain(*extras)

    def _checked(
        self, returned: Iterable[Iterable[Any] | None] | None, noun: str, counts: list[int]
    ) -> list[tuple[Any, ...]]:
        """One row of tensors for each basic op; those of the last ops may be left out if empty."""
        if type(returned) is list and len(returned) == 1 == len(counts):  # as of most ops
            (row,) = returned
            is_right = type(row) is tuple and len(row) == counts[0]
            if is_right and PLAIN_OR_NONE.issuperset(map(type, row)):
                return returned
        method = "fuser_forward" if noun == "extra outputs" else "fuser_backward"
        if isinstance(returned, torch.Tensor):
            raise _of_other_form(self.op, method, returned)
        name, first, last = type(self.op).__name__, self.indices[0], self.indices[-1]
        if returned is None:
            raise StateError(
                f"{name} returned None in the place of its rows of {noun}; it returns "
                f"{len(counts)}, for ops {first} to {last}, of {counts} {noun}."
            )
        part = f"{'' if noun == 'extra outputs' else 'gradients of '}{noun}"
        if not _is_row(returned):
            raise _of_other_form(self.op, method, returned, f" as its {part}")
        checked = []
        for row in returned:
            if isinstance(row, torch.Tensor):
                raise _of_other_form(self.op, method, row)
            if row is not None and not _is_row(row):
                raise _of_other_form(self.op, method, row, f" as the {part} of an op")
            checked.append(tuple(row or ()))
            for value in checked[-1]:
                if value is not None and not isinstance(value, (torch.Tensor, LazyTensor)):
                    raise _of_other_form(self.op, method, value, f" among its {part}")
        checked += [()] * (len(counts) - len(checked))
        if [len(row) for row in checked] != counts:
            raise StateError(
                f"{name} replaces ops {first} to {last}, which have {counts} {noun}, and returned "
                f"{[len(row) for row in checked]}."
            )
        return checked


def parts_of(op: FusibleOperation, method: str, result: Any) -> Any:
    """The parts of the result of a method. A tensor is none, though it may have as many rows."""
    names, parts = _RESULTS[method], result
    if type(result) is not tuple:
        parts = tuple(result) if _is_row(result) else ()
    if len(parts) != len(names):
        raise _of_other_form(op, method, result)
    second = parts[1]
    if type(second) in (tuple, list) or second is None or _is_row(second):
        return parts
    is_tensor = isinstance(second, torch.Tensor)
    raise _of_other_form(op, method, second, "" if is_tensor else f" as its {names[1]}")


def _is_row(value: object) -> bool:
    """Whether it has parts in an order that mean something: no tensor, text, mapping or set."""
    others = (torch.Tensor, str, bytes, Mapping, Set)
    has_parts = isinstance(value, Iterable) or hasattr(type(value), "__getitem__")
    return has_parts and not isinstance(value, others)


def _of_other_form(
    op: FusibleOperation, method: str, result: object, place: str = ""
) -> StateError:
    """The error that names the method whose result, or a part of it, has another form.

    ``place`` says which part.
    """
    form = type(result).__name__
    if isinstance(result, (tuple, list)):
        form = f"{form} of {len(result)}"
    form += place
    cls = type(op).__name__
    parts = ", ".join(_RESULTS[method])
    return StateError(f"{cls}.{method} returns ({parts}); it returned a {form}.")
