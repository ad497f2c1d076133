"""Saved tensors of a pipeline as buffers, of which quantized tensors are made again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.nn import Parameter

from fuser.tensors import QuantizedTensor, Quantizer


class QuantizedPart(NamedTuple):
    """A quantized tensor: everything but its buffers, which have these places."""

    kind: type[QuantizedTensor]
    buffers: dict[str, int]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    quantizer: Quantizer
    is_read_only: bool

    def tensor(self, held: Sequence[torch.Tensor]) -> QuantizedTensor:
        """The tensor over other buffers."""
        buffers: dict[str, torch.Tensor | None] = {n: held[at] for n, at in self.buffers.items()}
        tensor = self.kind(buffers, self.shape, self.dtype, self.device, self.quantizer)
        tensor._is_read_only = self.is_read_only
        return tensor


class GatheredPart(NamedTuple):
    """A gathered parameter, or a copy of it. It has other memory in backward, and is not saved."""

    tensor: QuantizedTensor


Part: TypeAlias = "QuantizedPart | GatheredPart | int | None"
"""How to make a saved tensor from others: the place of one, or those of its buffers."""


def taken_apart(
    saved: Iterable[torch.Tensor | None],
) -> tuple[list[Part], tuple[torch.Tensor, ...]]:
    """How to make saved tensors from others, and these: buffers of quantized tensors.

    A checkpoint compares what a forward and its recomputation save. Either may be recorded, so
    both save buffers.
    """
    held: list[torch.Tensor] = []
    parts = [saved_as(tensor, held) for tensor in saved]
    return parts, tuple(held)


def put_together(
    saved: Iterable[Part], held: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The tensors that were taken apart, over the buffers ``held``."""
    return tuple([tensor_of(part, held) for part in saved])


def saved_as(tensor: torch.Tensor | None, held: list[torch.Tensor]) -> Part:
    """How to make a saved tensor from the tensors in ``held``, to which its own are added."""
    if tensor is None:
        return None
    if isinstance(tensor, QuantizedTensor) and tensor._gathering is not None:
        return GatheredPart(tensor)
    if not isinstance(tensor, QuantizedTensor) or not _is_buffers_alone(tensor):
        return _index(tensor, held)
    buffers = {n: _index(b, held) for n, b in tensor.buffers().items() if b is not None}
    rest = (tensor.shape, tensor.dtype, tensor.device, tensor._quantizer)
    return QuantizedPart(type(tensor), buffers, *rest, tensor._is_read_only)


def _is_buffers_alone(tensor: QuantizedTensor) -> bool:
    """Whether a quantized tensor is neither a parameter nor refers to another tensor."""
    references = (tensor._view_of, tensor._source)
    return not any(references) and not isinstance(tensor, Parameter)


def tensor_of(saved: Part, held: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A saved tensor, over other buffers."""
    if saved is None or isinstance(saved, int):
        return None if saved is None else held[saved]
    return saved.tensor if isinstance(saved, GatheredPart) else saved.tensor(held)


def _index(tensor: torch.Tensor, held: list[torch.Tensor]) -> int:
    """The place of ``tensor`` in ``held``, to which it is added if it is not there."""
    for place, other in enumerate(held):
        if other is tensor:
            return place
    held.append(tensor)
    return len(held) - 1
