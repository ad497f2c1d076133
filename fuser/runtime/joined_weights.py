"""Weights of several linears in one memory: as one weight, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from fuser.basic_ops.shared_memory import is_seen_by_others
from fuser.torch_private import is_fake, is_traced_with_proxies, storage_uses

DEVICES = ("cpu", "cuda")
"""Where parameters are moved into one memory."""

MEMORY = "_fuser_memory"
"""The attribute of the first parameter's storage that has the memory in which it begins.

So the memory lives as long as that storage. A weak reference to a parameter would stop torch from
swapping it, and an attribute of one would be part of its pickles.
"""


class _Joined(torch.autograd.Function):
    """Tensors that follow one another in ``whole``, as one; gradients are parts of one tensor."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        ctx.save_for_backward(*parts)
        # No view of the memory: it would have that one's version, and none of the parts'.
        view = torch.empty(0, dtype=whole.dtype, device=whole.device)
        if is_fake(view):  # while a model is planned
            return view.new_empty(whole.shape)
        return view.set_(whole.untyped_storage(), 0, whole.shape, whole.stride())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _ = ctx.saved_tensors  # torch's error if one was written to since
        return None, *torch.split(grad, ctx.rows)


def memory_of(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory in which tensors follow one another, each contiguous; None if there is none."""
    memory: torch.Tensor | None = parts[0].untyped_storage().__dict__.get(MEMORY)
    if memory is None:
        return None
    end = memory.data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous() or part.dtype != memory.dtype:
            return None
        end += part.nbytes
    return memory if end == memory.data_ptr() + memory.nbytes else None


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors as one, along dimension 0: a view if they are joined in memory, else a copy.

    Those on meta are planned as what they are once they have memory: joined.
    """
    if len(parts) == 1:
        return parts[0]
    memory = _like_joined(parts) if parts[0].is_meta else memory_of(parts)
    if memory is None or is_traced_with_proxies():  # a graph has no storages
        return torch.cat(list(parts))
    whole: torch.Tensor = _Joined.apply(memory, *parts)  # type: ignore[no-untyped-call]
    return whole


def _like_joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A tensor like the memory into which :func:`join` moves such parts; None if it does not."""
    first = parts[0]
    if any((part.dtype, part.shape[1:]) != (first.dtype, first.shape[1:]) for part in parts):
        return None
    rows = sum(part.shape[0] for part in parts)
    return torch.empty(rows, *first.shape[1:], dtype=first.dtype, device=first.device)


def join(parts: Sequence[torch.nn.Parameter]) -> None:
    """Move parameters into one memory. They stay the same objects, with the same values.

    Each has a storage of its own size: safetensors and others take two tensors of one storage for
    a tied weight, of which they save one. Parameters whose memory is not theirs alone stay there,
    such as those that FSDP2 gathers: somebody else may write to it. So do parameters on meta, and
    of other classes.
    """
    if memory_of(parts) is not None:
        return
    first = parts[0]
    if any(
        type(part) is not torch.nn.Parameter
        or part.device.type not in DEVICES
        or is_seen_by_others(part)
        or (part.dtype, part.device, part.shape[1:]) != (first.dtype, first.device, first.shape[1:])
        or part.untyped_storage().nbytes() != part.nbytes
        or part.nbytes == 0
        or storage_uses(part.untyped_storage()) > 2  # the parameter, and the storage itself
        for part in parts
    ):
        return
    # Parameters made of an inference tensor would never get a gradient again.
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.cat(list(parts))
        rows = torch.split(memory, [part.shape[0] for part in parts])
        for part, values in zip(parts, rows, strict=True):
            part.data = from_dlpack(values)
        setattr(first.untyped_storage(), MEMORY, memory)
