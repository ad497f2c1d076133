"""Groups of consecutive rows in PyTorch: where they end, zeros after the last, and their biases.

Group g has the rows from ``ends[g - 1]`` up to ``ends[g]``. Nothing here reads a value on the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def group_ends(split_sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """Where each group ends, int32 ``[G]``, from the number of rows of each.

    A size below zero counts as zero, and no group ends after the last row.
    """
    sizes = split_sizes.to(torch.int64).clamp(0, rows)
    return sizes.cumsum(0).clamp(max=rows).to(torch.int32)


def is_after(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Whether each row is after the last group, ``[rows]``."""
    return torch.arange(rows, dtype=torch.int32, device=ends.device) >= ends[-1:]


def zero_tail(ends: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` ``[rows, ...]``, with zeros written into the rows after the last group."""
    mask = is_after(ends, out.shape[0])
    return out.masked_fill_(mask.view(-1, *[1] * (out.dim() - 1)), 0)


def of_rows(ends: torch.Tensor, values: torch.Tensor, rows: int) -> torch.Tensor:
    """``values`` ``[G, N]`` of the group of each row, ``[rows, N]``; zeros after the last group."""
    places = torch.arange(rows, dtype=torch.int32, device=ends.device)
    group = torch.bucketize(places, ends, right=True, out_int32=True)
    return F.pad(values, (0, 0, 0, 1)).index_select(0, group)


def add_bias(
    ends: torch.Tensor, bias: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """``out`` ``[rows, N]``, plus the bias of each row's group times the scale of the row.

    Rows after the last group become zero.
    """
    added = of_rows(ends, bias, out.shape[0])
    out.add_(added if scales is None else added * scales[:, None])
    return zero_tail(ends, out)
