"""Grouped linears on the CPU as on a Hopper GPU: all groups are one product, sizes are not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuser.functional.grouped import group_ends, padded_groups
from fuser.gemm import grouped


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Let each group be quantized and multiplied alone, also on the CPU, as on older GPUs."""

    def multiplies_quantized(device: torch.device, dtype: torch.dtype) -> bool:
        return grouped.has_grouped_mm(device, dtype)

    patch.setattr(grouped, "multiplies_quantized", multiplies_quantized)


def in_one_launch(patch: pytest.MonkeyPatch) -> None:
    """Let grouped linears run as they do on a Hopper GPU."""

    def groups_of(
        split_sizes: torch.Tensor, x: torch.Tensor, *, is_padded: bool = False, **_: Any
    ) -> grouped.Groups:
        if not is_padded:
            return grouped.Groups(group_ends(split_sizes, x), None)
        padded = padded_groups(split_sizes, len(split_sizes), x.shape[0], x.device)
        return grouped.Groups(padded.ends, None, padded)

    patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: dtype is torch.bfloat16)
    patch.setattr(grouped, "groups_of", groups_of)
