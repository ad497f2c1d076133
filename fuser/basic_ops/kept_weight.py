"""Weights of the first microbatch, kept quantized for the microbatches that follow."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fuser.basic_ops.linear_operands import quantized
from fuser.precision.contexts import recomputed_state
from fuser.precision.delayed_scaling import holds_steps
from fuser.tensors import Float8Quantizer, QuantizedTensor, Quantizer
from fuser.tensors.sharding import Gathered, gathered_by
from fuser.torch_private import free_with, reshards_after_forward

Made = TypeVar("Made")


def kept_weight(
    kept: WeakTensorKeyDictionary | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
    quantizer: Quantizer,
    is_first_microbatch: bool,
) -> tuple[QuantizedTensor, WeakTensorKeyDictionary | None]:
    """The quantized weight of a microbatch, and the dictionary to keep for the next one."""
    return kept_weights(
        kept,
        [weight],
        dtype,
        [quantizer],
        is_first_microbatch,
        lambda: quantized(weight, dtype, quantizer),
        lambda made: made._has("columnwise") or not quantizer.columnwise,
    )


def kept_weights(
    kept: WeakTensorKeyDictionary | None,
    weights: Sequence[torch.Tensor],
    dtype: torch.dtype,
    quantizers: Sequence[Quantizer],
    is_first_microbatch: bool,
    make: Callable[[], Made],
    is_complete: Callable[[Made], bool],
) -> tuple[Made, WeakTensorKeyDictionary | None]:
    """The result of ``make`` for a microbatch, and the dictionary to keep for the next one.

    ``kept`` has one entry: the first weight, with everything on which the quantized form depends,
    and that form. Weights that have changed since are quantized again, whatever the caller says,
    and so are those whose form is not ``is_complete``. Weights that ``fully_shard`` gathers are
    quantized again after each gathering, which writes to them and is not counted by torch. The
    capture of a graph keeps nothing: its replays would read what other microbatches have kept.
    """
    # The local tensor of a DTensor is a new one at each call (runtime/local_parts.py).
    wholes = [getattr(w, "whole_parameter", w) for w in weights]
    gathered = gathered_by(wholes)
    if holds_steps() or any(reshards_after_forward(one.group) for one in gathered):
        return make(), None
    versions = tuple(None if w.is_inference() else w._version for w in wholes)
    places = (*(w.data_ptr() for w in weights), *map(id, wholes[1:]))
    how = tuple(_encoding(quantizer) for quantizer in quantizers)
    made_for = (versions, optimizer_steps(), places, dtype, how)
    entry = kept.get(wholes[0]) if kept else None  # type: ignore[no-untyped-call]
    gathering = _noted_gathering(gathered, None if entry is None else entry[2])
    if kept is not None and entry is not None and entry[0] == made_for and gathering.lasts():
        made: Made = entry[1]
        is_taken = recomputed_state() is not None or not is_first_microbatch
        if is_taken and is_complete(made):
            return made, kept
    made = make()
    gathering.begin()
    return made, WeakTensorKeyDictionary({wholes[0]: (made_for, made, gathering)})


class _Gathering:
    """Whether gathered weights are still those of :meth:`begin`; always if none is gathered."""

    def __init__(self, gathered: Sequence[Gathered]) -> None:
        self._freed: torch.Tensor | None = None
        self._params = [one.param for one in gathered]
        if gathered:
            # ``fully_shard`` frees the memory of these tensors when it frees the parameter.
            self._freed = torch.empty(1, dtype=torch.uint8, device="cpu")
            for param in self._params:
                free_with(param, self._freed)

    def is_of(self, gathered: Sequence[Gathered]) -> bool:
        params = [one.param for one in gathered]
        return len(params) == len(self._params) and all(map(operator.is_, params, self._params))

    def lasts(self) -> bool:
        return self._freed is None or self._freed.untyped_storage().size() > 0

    def begin(self) -> None:
        if self._freed is not None:
            self._freed.untyped_storage().resize_(1)


def _noted_gathering(gathered: Sequence[Gathered], noted: _Gathering | None) -> _Gathering:
    return noted if noted is not None and noted.is_of(gathered) else _Gathering(gathered)


def _encoding(quantizer: Quantizer) -> Any:
    """All that a quantized weight depends on, besides the weight and its copies."""
    # A recomputation under delayed scaling has another scale, and so another quantizer.
    is_delayed = isinstance(quantizer, Float8Quantizer)
    both = quantizer.with_usage(rowwise=True, columnwise=True)
    return quantizer.encoding() if is_delayed else both


_steps = 0


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


@functools.cache
def _register_step_count() -> None:
    register_optimizer_step_post_hook(_count_step)


def optimizer_steps() -> int:
    """Steps of optimizers since the first call of this function.

    Fused optimizers write to parameters without raising their version.
    """
    _register_step_count()
    return _steps
