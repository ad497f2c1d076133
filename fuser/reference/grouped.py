"""Groups of consecutive rows in PyTorch: where they end, zeros after the last, and their biases.

Group g has the rows from ``ends[g - 1]`` up to ``ends[g]``. Padded, it starts at a multiple of 128
rows, ``padded_ends[g - 1]``, and zeros fill the rows after its last. Nothing here reads a value on
the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser.formats import GROUP_TILE as TILE


def group_ends(split_sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """Where each group ends, int32 ``[G]``, from the number of rows of each.

    A size below zero counts as zero, and no group ends after the last row.
    """
    sizes = split_sizes.to(torch.int64).clamp(0, rows)
    return sizes.cumsum(0).clamp(max=rows).to(torch.int32)


def group_tiles(ends: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each group ends if it is padded, int32 ``[G]``; and the rows of each tile.

    The second is int32 ``[count, 4]``, of :func:`fuser.formats.tile_count` tiles: the group, -1 for
    a tile after the last group; the first row, not padded; the number of rows; 0.
    """
    starts = F.pad(ends[:-1], (1, 0))
    sizes = ends - starts
    padded = (sizes + (TILE - 1)) // TILE * TILE
    padded_ends = padded.cumsum(0).to(torch.int32)
    first = torch.arange(count, dtype=torch.int32, device=ends.device) * TILE
    group = torch.bucketize(first, padded_ends, right=True)
    is_used = group < len(ends)
    group = group.clamp(max=len(ends) - 1)
    inside = first - (padded_ends - padded)[group]
    tiles = torch.stack(
        [
            torch.where(is_used, group.to(torch.int32), -1),
            (starts[group] + inside) * is_used,
            (sizes[group] - inside).clamp(max=TILE) * is_used,
            torch.zeros_like(first),
        ],
        1,
    )
    return padded_ends, tiles.to(torch.int32)


def pad(x: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """The rows of padded groups, ``[128 tiles, K]``, from ``x [rows, K]``; zeros in between."""
    inside = torch.arange(TILE, dtype=torch.int32, device=x.device)
    rows = (tiles[:, 1:2] + inside).clamp(max=max(x.shape[0] - 1, 0)).flatten()
    is_row = (inside < tiles[:, 2:3]).flatten()
    return x.index_select(0, rows).masked_fill_(~is_row[:, None], 0)


def unpad(
    padded: torch.Tensor, ends: torch.Tensor, padded_ends: torch.Tensor, rows: int
) -> torch.Tensor:
    """``[rows, ...]`` from the rows of padded groups; zeros after the last group."""
    places = torch.arange(rows, dtype=torch.int32, device=ends.device)
    group = torch.bucketize(places, ends, right=True).clamp(max=len(ends) - 1)
    shift = (F.pad(padded_ends[:-1], (1, 0)) - F.pad(ends[:-1], (1, 0)))[group]
    from_rows = (places + shift).clamp(max=max(padded.shape[0] - 1, 0))
    return zero_tail(ends, padded.index_select(0, from_rows))


def sum_groups(padded: torch.Tensor, tiles: torch.Tensor, groups: int) -> torch.Tensor:
    """The sums of the rows of each group, ``[groups, N]``, from the rows of padded groups.

    Padding is not read. Sums are in fp32, of the rows of each tile and then of a group's tiles.
    """
    is_row = torch.arange(TILE, dtype=torch.int32, device=tiles.device) < tiles[:, 2:3]
    rows = padded.view(tiles.shape[0], TILE, padded.shape[-1]).float()
    parts = rows.masked_fill(~is_row[..., None], 0).sum(1)
    return sum_tiles(parts, tiles, groups).to(padded.dtype)


def sum_tiles(parts: torch.Tensor, tiles: torch.Tensor, groups: int) -> torch.Tensor:
    """The sums of the tiles of each group, ``[groups, N]``, from ``parts`` ``[tiles, N]``."""
    is_of = tiles[:, 0] == torch.arange(groups, dtype=torch.int32, device=tiles.device)[:, None]
    return torch.stack([parts.masked_fill(~mine[:, None], 0).sum(0) for mine in is_of])


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
