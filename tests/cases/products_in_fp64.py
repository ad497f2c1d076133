"""Products and sums in fp64, so that no order of terms counts."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class InFp64(TorchDispatchMode):
    """Products and sums are computed in fp64 and rounded once, so that no order counts.

    Two orders of such a sum differ by 2**-48 of its terms, which the rounding hides.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        dtype = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return function(*args, **(kwargs or {}))
        if function is torch.ops.aten._grouped_mm.default:
            return grouped_product(*args).to(dtype)
        if function in (torch.ops.aten.mm.default, torch.ops.aten.sum.dim_IntList):
            wide = (arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args)
            return function(*wide, **(kwargs or {})).to(dtype)
        return function(*args, **(kwargs or {}))


def grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``torch._grouped_mm`` in fp64: rows of a by matrices of b, or columns of a by rows of b."""
    bounds = itertools.pairwise([0, *ends.tolist()])
    if b.dim() == 2:
        return torch.stack([a[:, i:j].double() @ b[i:j].double() for i, j in bounds])
    y = torch.full((a.shape[0], b.shape[2]), torch.nan, dtype=torch.float64)
    for matrix, (i, j) in zip(b, bounds, strict=True):
        y[i:j] = a[i:j].double() @ matrix.double()
    return y
