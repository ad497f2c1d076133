"""Observation of tensors as they are quantized, for inspectors (``fuser.inspect``).

While a pass is observed, every quantizer leaves with its result what it was quantized from, and the
op that reads the result shows both to the inspector. In other passes this costs two reads of an
attribute that is None.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from fuser.functional.lazy import LazyTensor
from fuser.tensors.base import QuantizedTensor

Result = TypeVar("Result")


class Observation:
    """What a quantized tensor was made from, until it is measured; then the measurements.

    ``source`` has the tensor's shape; it is None after the measurement.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.source: torch.Tensor | None = source
        self.measured: dict[str, torch.Tensor] = {}


Steps = Mapping[int, Any]
"""By the id of an op's attributes, the step of ``fuser.inspect`` that inspects its calls."""


class _Observing(threading.local):
    """What is observed in this thread; None if nothing is."""

    steps: Steps | None = None
    """During an inspected call of a model, and in its recomputations."""
    is_repeated = False
    """Whether this is a recomputation, whose forward has been observed."""
    now: Steps | None = None
    """:attr:`steps` in a pass that is observed."""
    is_repeated_now = False


observing = _Observing()


def observed(function: Callable[..., Result], steps: Steps) -> Callable[..., Result]:
    """A pass, ``function``, as it runs under observation."""

    @functools.wraps(function)
    def observed_pass(*args: Any, **kwargs: Any) -> Result:
        outer = observing.now, observing.is_repeated_now
        observing.now, observing.is_repeated_now = steps, observing.is_repeated
        try:
            return function(*args, **kwargs)
        finally:
            observing.now, observing.is_repeated_now = outer

    return observed_pass


def note_run(ops: Sequence[object], steps: Steps, *, has_recipe: bool) -> None:
    """Show the inspector that the forward of ``ops`` runs."""
    for op in ops:
        step = steps.get(id(op.__dict__))
        if step is not None:
            step.ran(id(op.__dict__), has_recipe=has_recipe)


def keep_source(tensor: QuantizedTensor, source: torch.Tensor | LazyTensor) -> None:
    """Leave with ``tensor`` what it was quantized from; a lazy tensor is computed once more."""
    if isinstance(source, LazyTensor):
        source = source.apart().tensor().view(source.shape)
    tensor._observation = Observation(source.detach())


def note_operands(
    op: object, *, groups: object | None = None, only_new: bool = False, **operands: object
) -> None:
    """Show the inspector the quantized tensors that ``op`` reads, by role.

    An operand is a tensor, or a nest of tensors; those that are not quantized do not count.
    ``groups``: the input and the gradient have the rows of these padded groups. ``only_new``: what
    backward quantized again, and not tensors that forward has shown, nor bytes that it has shown in
    their transpose.
    """
    assert observing.now is not None
    key = id(op.__dict__)
    step = observing.now.get(key)
    if step is None:
        return
    for role, operand in operands.items():
        tensors = list(_quantized_in(operand, only_new))
        if tensors:
            of_rows = None if role == "weight" else groups
            step.saw(key, role, tensors, of_rows, is_repeated=observing.is_repeated_now)


def _quantized_in(operand: object, only_new: bool) -> Iterator[QuantizedTensor]:
    if isinstance(operand, QuantizedTensor):
        seen = operand._observation
        is_new = seen is not None and seen.source is not None and not operand._is_transposable()
        if is_new or not only_new:
            yield operand
    elif isinstance(operand, (list, tuple)):
        for item in operand:
            yield from _quantized_in(item, only_new)
