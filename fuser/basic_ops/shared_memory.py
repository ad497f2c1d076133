"""Parameters that are views of one buffer, and tensors that share memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from fuser.cuda.arguments import end_of
from fuser.errors import StateError
from fuser.tensors import QuantizedTensor
from fuser.torch_private import storage_uses, without_torch_function


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The buffer of which ``parts`` are the slices in order; None if they are not.

    Its version counter is theirs.
    """
    if not are_packed(parts):
        return None
    first = parts[0]
    return first.detach().as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))


def are_packed(parts: Sequence[torch.Tensor]) -> bool:
    """Whether ``parts`` are the slices of one buffer, in order."""
    first = parts[0]
    if not first.is_contiguous() or type(first) not in (torch.Tensor, torch.nn.Parameter):
        return False
    step = first.nbytes
    start = first.data_ptr()
    addresses = list(map(torch.Tensor.data_ptr, parts))
    if step and addresses != list(range(start, start + len(parts) * step, step)):
        return False
    if not all(map(torch.Tensor.is_contiguous, parts)) or any(map(torch.Tensor.is_neg, parts)):
        return False
    if set(map(_dtype, parts)) != {first.dtype}:
        return False
    last = first.storage_offset() + len(parts) * first.numel()
    # Otherwise they are neighbours by chance.
    return last * first.element_size() <= first.untyped_storage().nbytes()


class Versions:
    """Versions of tensors whose memory a backward reads through one view, which has one of them.

    ``tensors``: two or more. ``owner``: the op that has them, for the message.
    """

    __slots__ = ("owner", "tensors", "versions")

    def __init__(self, tensors: Sequence[torch.Tensor], owner: str) -> None:
        self.tensors = tensors
        self.owner = owner
        with without_torch_function():
            self.versions = list(map(_version, tensors))

    def check(self) -> None:
        """Compare the noted versions with the present ones.

        Raises StateError if a tensor was changed in place.
        """
        with without_torch_function():
            versions = list(map(_version, self.tensors))
        if versions != self.versions:
            pairs = zip(self.tensors, self.versions, versions, strict=True)
            tensor = next(tensor for tensor, before, now in pairs if before != now)
            raise StateError(
                f"A parameter of {self.owner}, of shape {tuple(tensor.shape)}, was changed in "
                "place between forward and backward."
                " Write to it after the backward."
            )


_version = operator.attrgetter("_version")
_dtype = operator.attrgetter("dtype")


def pack(parts: Sequence[Parameter]) -> bool:
    """Make parameters views of one buffer, if nothing else is in their memory.

    They stay the same objects, with the same values. A parameter may also be in its place of
    another such buffer, which has no other use: it was pickled with it, or others left it. A weight
    that two ops have, each beside others, so stays with the op that was called first.

    Returns whether they were moved.
    """
    if are_packed(parts) or not _are_alike(parts):
        return False
    if not all(_may_move(part, place, len(parts)) for place, part in enumerate(parts)):
        return False
    if not _have_own_memory(parts):
        return False
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.stack([part.detach() for part in parts])
        for part, place in zip(parts, buffer, strict=True):
            part.data = place
    return True


def _are_alike(parts: Sequence[Parameter]) -> bool:
    """Whether tensors, no two of which are in one place, can be slices of one buffer."""
    kinds = {(part.shape, part.dtype, part.device) for part in parts}
    are_rows = all(part.is_contiguous() and not part.is_neg() for part in parts)
    places = set(map(torch.Tensor.data_ptr, parts))
    return len(kinds) == 1 and are_rows and len(places) == len(parts)


def _may_move(parameter: Parameter, place: int, count: int) -> bool:
    """Whether nothing else is in the memory of a parameter, and no other process sees it.

    It may be slice ``place`` of ``count`` of its size.
    """
    held, offset = parameter.untyped_storage().nbytes(), parameter.storage_offset()
    is_alone = held == parameter.nbytes
    is_slice = held == count * parameter.nbytes and offset == place * parameter.numel()
    if not (is_alone or is_slice) or parameter.is_inference():
        return False
    return not is_seen_by_others(parameter)


def is_seen_by_others(tensor: torch.Tensor) -> bool:
    """Whether other processes may read a tensor; on a GPU torch calls every tensor shared."""
    return tensor.is_cpu and tensor.is_shared()  # type: ignore[no-untyped-call]


def _have_own_memory(parts: Sequence[Parameter]) -> bool:
    """Whether no tensor besides the parameters, and no array of numpy, is in their memory."""
    storages = [part.untyped_storage() for part in parts]
    places = [storage.data_ptr() for storage in storages]
    return all(
        # torch counts the tensors, and the object that this function holds.
        storage.resizable() and storage_uses(storage) == places.count(at) + 1
        for storage, at in zip(storages, places, strict=True)
    )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may share memory."""
    if isinstance(other, QuantizedTensor) or 0 in (one.numel(), other.numel()):
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and not (
        end_of(one) <= other.data_ptr() or end_of(other) <= one.data_ptr()
    )
