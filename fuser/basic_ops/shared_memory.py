"""Parameters that are views of one buffer, and tensors that share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from fuser.tensors import QuantizedTensor


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The buffer of which ``parts`` are the slices in order; None if they are not.

    Its version counter is theirs.
    """
    first = parts[0]
    if not first.is_contiguous() or type(first) not in (torch.Tensor, torch.nn.Parameter):
        return None
    step = first.numel() * first.element_size()
    start = first.data_ptr()
    for place, part in enumerate(parts):
        if part.data_ptr() != start + place * step or not part.is_contiguous():
            return None
    last = first.storage_offset() + len(parts) * first.numel()
    if last * first.element_size() > first.untyped_storage().nbytes():
        return None  # neighbours by chance
    return first.detach().as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))


def pack(parts: Sequence[Parameter]) -> None:
    """Make parameters views of one buffer, if nothing else is in their memory."""
    if packed(parts) is not None or not all(map(_has_own_memory, parts)):
        return
    buffer = torch.stack([part.detach() for part in parts])
    for part, place in zip(parts, buffer, strict=True):
        part.data = place


def _has_own_memory(parameter: Parameter) -> bool:
    """Whether nothing else is in the memory of a parameter, and no other process sees it."""
    nbytes = parameter.numel() * parameter.element_size()
    if nbytes != parameter.untyped_storage().nbytes() or parameter.is_inference():
        return False
    # On a GPU torch calls every tensor shared.
    is_on_cpu = parameter.device.type == "cpu"
    return not (is_on_cpu and parameter.is_shared())  # type: ignore[no-untyped-call]


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may share memory."""
    if isinstance(other, QuantizedTensor) or 0 in (one.numel(), other.numel()):
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and not (
        _end(one) <= other.data_ptr() or _end(other) <= one.data_ptr()
    )


def _end(tensor: torch.Tensor) -> int:
    """The address after the last element."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
