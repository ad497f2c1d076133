"""Amax, the largest absolute value of a tensor: kernels if available, else PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.cuda import fp8_scaling as kernels
from fuser.cuda.launch import call_each_time
from fuser.functional.lazy import LazyTensor, kernel_or_torch, rows_of
from fuser.reference import fp8_scaling as reference
from fuser.torch_private import foreach_copy_


def amax(x: torch.Tensor | LazyTensor) -> torch.Tensor:
    """``max |x|`` of ``[M, K]`` as fp32 ``[1]``; see the reference."""
    return kernel_or_torch(x, _by_kernel, reference.amax)


def _by_kernel(x: torch.Tensor | LazyTensor) -> torch.Tensor:
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    raise_amax(x, out)
    return out


def raise_amax(x: torch.Tensor | LazyTensor, out: torch.Tensor) -> None:
    """Set ``out``, fp32 ``[1]``, to the maximum of itself and ``max |x|``, with a kernel.

    KernelUnavailable if it cannot be compiled here.
    """
    if isinstance(x, LazyTensor):
        x.amax(out)
    else:
        kernels.amax(rows_of(x), out=out)


def largest_of_ranks(amaxes: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    """Replace ``amaxes`` by their maxima over the ranks of ``group``."""
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group=group)


def reduce_amaxes(amaxes: Sequence[torch.Tensor], group: Any) -> None:
    """Replace each tensor ``[n]`` by its maximum over the ranks of ``group``, in one reduction."""
    flat = torch.cat(list(amaxes))
    call_each_time(largest_of_ranks, flat, group)
    parts = torch.split(flat, [one.numel() for one in amaxes])
    foreach_copy_(list(amaxes), list(parts))
