"""Groups of consecutive rows: a kernel where kernels run, else PyTorch."""

from __future__ import annotations

import torch

from fuser.cuda import grouped as cuda
from fuser.cuda.launch import kernels_support
from fuser.errors import KernelUnavailable
from fuser.reference import grouped as reference


def group_ends(split_sizes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As :func:`fuser.reference.grouped.group_ends`, of the rows of ``x``; in one launch."""
    rows = x.shape[0]
    if kernels_support(x) and split_sizes.device == x.device:
        sizes = split_sizes.contiguous()
        sizes = sizes if sizes.dtype in cuda.INDICES else sizes.to(torch.int32)
        out = torch.empty(sizes.shape, dtype=torch.int32, device=sizes.device)
        try:
            cuda.group_ends(sizes, rows, out=out)
        except KernelUnavailable:
            pass
        else:
            return out
    return reference.group_ends(split_sizes, rows)


def zero_tail(ends: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As :func:`fuser.reference.grouped.zero_tail`; writes the rows after the last group alone."""
    if kernels_support(out) and out.dim() == 2 and out.is_contiguous():
        try:
            cuda.zero_tail(ends, out=out)
        except KernelUnavailable:
            pass
        else:
            return out
    return reference.zero_tail(ends, out)


def add_bias(
    ends: torch.Tensor, bias: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """As :func:`fuser.reference.grouped.add_bias`; reads and writes ``out`` once."""
    if kernels_support(out) and out.dim() == 2 and out.is_contiguous():
        try:
            cuda.add_bias(ends, bias.contiguous(), scales, out=out)
        except KernelUnavailable:
            pass
        else:
            return out
    return reference.add_bias(ends, bias, scales, out)
