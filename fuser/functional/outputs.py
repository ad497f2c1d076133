"""What kernels are given: matrices row by row, and outputs of the right shape."""

from __future__ import annotations

import torch


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x [M, K]`` with neighbours in a row next to each other; a copy where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def buffer(
    x: torch.Tensor, shape: tuple[int, int], is_wanted: bool, dtype: torch.dtype = torch.uint8
) -> torch.Tensor | None:
    """An unwritten output on x's device, None where it is not wanted."""
    return torch.empty(shape, dtype=dtype, device=x.device) if is_wanted else None
