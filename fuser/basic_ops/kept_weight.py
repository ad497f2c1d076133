"""The weight of the first microbatch, kept quantized for the microbatches that follow."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fuser.basic_ops.linear_operands import quantized
from fuser.precision.contexts import recomputed_state
from fuser.tensors import Float8Quantizer, QuantizedTensor, Quantizer


def kept_weight(
    kept: WeakTensorKeyDictionary | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
    quantizer: Quantizer,
    is_first_microbatch: bool,
) -> tuple[QuantizedTensor, WeakTensorKeyDictionary]:
    """The quantized weight of a microbatch, and the dictionary to keep for the next one.

    ``kept`` has one entry: the weight, with all that its quantized form was made for and that form.
    A weight that has changed since is quantized again, whatever the caller says.
    """
    version = None if weight.is_inference() else weight._version
    # A recomputation under delayed scaling has another scale, and so another quantizer.
    is_delayed = isinstance(quantizer, Float8Quantizer)
    both = quantizer.with_usage(rowwise=True, columnwise=True)
    how = quantizer.encoding() if is_delayed else both
    made_for = (version, optimizer_steps(), weight.data_ptr(), dtype, how)
    entry = kept.get(weight) if kept else None  # type: ignore[no-untyped-call]
    if kept is not None and entry is not None and entry[0] == made_for:
        made: QuantizedTensor = entry[1]
        is_taken = recomputed_state() is not None or not is_first_microbatch
        if is_taken and (made._has("columnwise") or not quantizer.columnwise):
            return made, kept
    made = quantized(weight, dtype, quantizer)
    return made, WeakTensorKeyDictionary({weight: (made_for, made)})


_steps = 0


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


@functools.cache
def _register_step_count() -> None:
    register_optimizer_step_post_hook(_count_step)


def optimizer_steps() -> int:
    """Steps of optimizers since this was first asked.

    Fused optimizers write to parameters without raising their version.
    """
    _register_step_count()
    return _steps
