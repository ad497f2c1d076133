"""The inspector: a context in which calls of a model show how well their operands are quantized."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from fuser.conversion.converted import ops_of_conversions
from fuser.errors import InputError, InputTypeError, StateError
from fuser.inspection.report import InspectionReport, QuantizingOp
from fuser.op import BasicOperation, FusedOperation, FusibleOperation, modules_and_ops
from fuser.precision.recomputation import is_checkpointed_forward, is_recomputation
from fuser.tensors.observation import Steps, observing
from fuser.torch_private import compiled_from

_lock = threading.Lock()
_inspected: dict[int, QuantizingOp] = {}
"""The ops of the models that are inspected now, by the ids of their attributes."""


@contextlib.contextmanager
def inspect(model: torch.nn.Module, *, every: int = 1) -> Iterator[InspectionReport]:
    """Measure what quantization does to each operand of a model's linears.

    Inside, the first call of the model in training, and each ``every``-th after it, is inspected
    with its backward, which may also run after the context. A call counts if gradients are enabled.
    The results of an inspected call have the bits of any other. It takes longer: it runs the plan's
    own code and no recording, and unquantized operands are computed once more, for a moment.
    Recomputations of checkpoints are not counted again.

    torch.compile is left out inside the context: compiled functions run as they are written. If
    ``model`` is what ``torch.compile`` returned for a module, only its inspected calls do.

    Parameters
    ----------
    model
        The model whose calls are counted, with its ops at any depth; no op itself, because a hook
        on an op takes it out of its pipeline.
    every
        The distance between two inspected calls.

    Yields
    ------
    InspectionReport
        Empty, with a ``reason``, if nothing is quantized.

    Raises
    ------
    InputTypeError
        If ``model`` is no module or an op, or ``every`` no integer.
    InputError
        If ``every`` is below 1.
    StateError
        If an op of the model is being inspected already.
    """
    _check(model, every)
    places = _places(model)
    with _lock:
        taken = next((_inspected[op] for op in places if op in _inspected), None)
        if taken is not None:
            raise StateError(
                f"fuser.inspect is open for {taken.layer or 'the model'} ({taken.op}) already; an "
                "op has one inspector at a time. Use its report, or leave it first."
            )
        _inspected.update(places)
    report = InspectionReport(places, every)
    try:
        with contextlib.ExitStack() as stack:
            if compiled_from(model) is None:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            calls = _ModelCalls(report)
            for handle in (
                model.register_forward_pre_hook(calls.before),
                model.register_forward_hook(calls.after, always_call=True),
            ):
                stack.callback(handle.remove)
            yield report
    finally:
        with _lock:
            for op in places:
                del _inspected[op]


def _check(model: Any, every: Any) -> None:
    is_op = isinstance(model, FusibleOperation)
    if is_op or not isinstance(model, torch.nn.Module):
        shown = f"the op {type(model).__name__}" if is_op else repr(model)
        raise InputTypeError(
            f"fuser.inspect takes a model that contains ops, such as a Sequential; got {shown:.60}."
        )
    if not isinstance(every, int) or isinstance(every, bool):
        raise InputTypeError(f"fuser.inspect takes an integer as every; got {every!r}.")
    if every < 1:
        raise InputError(f"fuser.inspect got every={every}; it must be at least 1.")


def _places(model: torch.nn.Module) -> dict[int, QuantizingOp]:
    """The ops of a model that quantize, in its order."""
    model = compiled_from(model) or model
    places: dict[int, QuantizingOp] = {}
    composites: dict[int, QuantizingOp] = {}
    for path, op, is_spare in ops_of_conversions(model):
        members = op.members if isinstance(op, FusedOperation) else [op]
        place = QuantizingOp(path, type(op).__name__, is_spare)
        places.update((id(member.__dict__), place) for member in members if _quantizes(member))
    for path, module in modules_and_ops(model):
        if isinstance(module, FusedOperation):
            members = [op for op in module.members if _quantizes(op)]
            if len(members) == 1:  # a Linear: its name says more than that of its member
                composites[id(members[0].__dict__)] = QuantizingOp(path, type(module).__name__)
        elif isinstance(module, BasicOperation) and _quantizes(module):
            key = id(module.__dict__)
            places[key] = composites.get(key, QuantizingOp(path, type(module).__name__))
    return places


def _quantizes(op: BasicOperation) -> bool:
    return any(map(op.num_quantizers, ("forward", "backward")))


class _ModelCalls:
    """The hooks of the model, around each of its calls; those of a copy of it, without a report."""

    def __init__(self, report: InspectionReport | None) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._open = threading.local()

    def __reduce__(self) -> tuple[object, ...]:
        return _ModelCalls, (None,)  # a copy of the model is not inspected

    def before(self, model: torch.nn.Module, _: Any) -> None:
        """Let the ops show what they quantize, if this call is inspected."""
        report = self._report
        if report is None:
            return
        stack: list[tuple[Steps | None, Any]] = self._open.__dict__.setdefault("stack", [])
        outer, stance = observing.steps, None
        in_training = torch.is_grad_enabled() or is_checkpointed_forward()
        if not stack and in_training and not is_recomputation():
            with self._lock:
                step = report.next_step()
            if step is not None:
                steps = dict.fromkeys(report.places, step)
                observing.steps = {**(outer or {}), **steps}
                if compiled_from(model) is not None:
                    stance = torch.compiler.set_stance("force_eager")
        stack.append((outer, stance))

    def after(self, *_: Any) -> None:
        """As it was before the call."""
        stack = self._open.__dict__.get("stack")
        if stack:
            observing.steps, stance = stack.pop()
            if stance is not None:
                stance.__exit__(None, None, None)
