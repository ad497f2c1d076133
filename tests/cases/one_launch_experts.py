"""Grouped linears on the CPU as on a Hopper GPU: all groups are one product, sizes are not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser.functional.grouped import group_ends
from fuser.gemm import grouped


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Let each group be quantized and multiplied alone, also on the CPU, as on older GPUs."""

    def multiplies_quantized(device: torch.device, dtype: torch.dtype) -> bool:
        return grouped.has_grouped_mm(device, dtype)

    patch.setattr(grouped, "multiplies_quantized", multiplies_quantized)


def in_one_launch(patch: pytest.MonkeyPatch) -> None:
    """Let grouped linears in 16 bits run as they do on a Hopper GPU."""

    def groups_of(split_sizes: torch.Tensor, x: torch.Tensor, **_: Any) -> grouped.Groups:
        return grouped.Groups(group_ends(split_sizes, x), None)

    patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: dtype is torch.bfloat16)
    patch.setattr(grouped, "groups_of", groups_of)
