"""Weights of several linears in one memory: as one weight, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.torch_private import storage_uses


class _Joined(torch.autograd.Function):
    """Tensors that follow one another in one memory, as one; gradients are parts of one tensor."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        ctx.save_for_backward(*parts)
        first = parts[0]
        size = (sum(ctx.rows), *first.shape[1:])
        # No view of the first part: it would have that one's version, and none of the others'.
        whole = torch.empty(0, dtype=first.dtype, device=first.device)
        storage = first.untyped_storage()
        return whole.set_(storage, first.storage_offset(), size, first.stride())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _ = ctx.saved_tensors  # torch's error if one was written to since
        return torch.split(grad, ctx.rows)


def are_joined(parts: Sequence[torch.Tensor]) -> bool:
    """Whether tensors follow one another in one memory, each contiguous."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous() or part.dtype != first.dtype:
            return False
        end += part.nbytes
    storage = first.untyped_storage()
    return storage.data_ptr() + storage.nbytes() >= end


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors as one, along dimension 0: a view if they are joined in memory, else a copy."""
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_compiling() or not are_joined(parts):
        return torch.cat(list(parts))
    whole: torch.Tensor = _Joined.apply(*parts)  # type: ignore[no-untyped-call]
    return whole


def join(parts: Sequence[torch.nn.Parameter]) -> None:
    """Move parameters into one memory. They stay the same objects, with the same values.

    Parameters whose memory is not theirs alone stay there, such as those that FSDP2 gathers:
    somebody else may write to it. So do parameters on meta, and of other classes.
    """
    first = parts[0]
    if any(
        type(part) is not torch.nn.Parameter
        or part.is_meta
        or part.is_shared()  # type: ignore[no-untyped-call]
        or (part.dtype, part.device, part.shape[1:]) != (first.dtype, first.device, first.shape[1:])
        or part.untyped_storage().nbytes() != part.nbytes
        or storage_uses(part.untyped_storage()) > 2  # the parameter, and the storage itself
        for part in parts
    ):
        return
    # Parameters made of an inference tensor would never get a gradient again.
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat(list(parts))
        for part, rows in zip(
            parts, torch.split(whole, [part.shape[0] for part in parts]), strict=True
        ):
            part.data = rows
