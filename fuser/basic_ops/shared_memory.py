"""Parameters that are views of one buffer, and tensors that share memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from fuser.cuda.sequence import end_of
from fuser.errors import StateError
from fuser.tensors import QuantizedTensor


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The buffer of which ``parts`` are the slices in order; None if they are not.

    Its version counter is theirs.
    """
    first = parts[0]
    if not first.is_contiguous() or type(first) not in (torch.Tensor, torch.nn.Parameter):
        return None
    step = first.nbytes
    start = first.data_ptr()
    addresses = list(map(torch.Tensor.data_ptr, parts))
    if step and addresses != list(range(start, start + len(parts) * step, step)):
        return None
    if not all(map(torch.Tensor.is_contiguous, parts)) or any(map(torch.Tensor.is_neg, parts)):
        return None
    if set(map(_dtype, parts)) != {first.dtype}:
        return None
    last = first.storage_offset() + len(parts) * first.numel()
    if last * first.element_size() > first.untyped_storage().nbytes():
        return None  # neighbours by chance
    return first.detach().as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))


class Versions:
    """Versions of tensors whose memory a backward reads through one view, which has one of them.

    Parameters
    ----------
    tensors
        Two or more.
    owner
        The op that has them, for the message.
    """

    __slots__ = ("owner", "tensors", "versions")

    def __init__(self, tensors: Sequence[torch.Tensor], owner: str) -> None:
        self.tensors = tensors
        self.owner = owner
        self.versions = list(map(_version, tensors))

    def check(self) -> None:
        """Compare the noted versions with the present ones.

        Raises
        ------
        StateError
            If a tensor was changed in place.
        """
        found = list(map(_version, self.tensors))
        if found != self.versions:
            pairs = zip(self.tensors, self.versions, found, strict=True)
            tensor = next(tensor for tensor, before, now in pairs if before != now)
            raise StateError(
                f"A parameter of {self.owner}, of shape {tuple(tensor.shape)}, was changed in "
                "place between forward and backward."
            )


_version = operator.attrgetter("_version")
_dtype = operator.attrgetter("dtype")


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
        end_of(one) <= other.data_ptr() or end_of(other) <= one.data_ptr()
    )
