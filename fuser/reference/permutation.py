"""Permutation of tokens to rows sorted by expert, and back, in PyTorch; for fp64 too.

An *assignment* is one of the ``T * k`` pairs of a token and an expert; its number is
``token * k + choice``. Two maps of int32 describe a permutation:

- ``row_map`` ``[rows]``: the number of the assignment in each row; -1 in the rows after the last
  one in use, which are zero;
- ``inverse_map`` ``[T, k]``: the row of each assignment; -1 if it is dropped.

Sums are in fp32, and in fp64 for values of fp64. No function waits for the device.
"""

from __future__ import annotations

import torch

DOT_LANES = 32
DOT_COLUMNS = 8


def sort_by_expert(
    expert_indices: torch.Tensor, num_experts: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The split sizes, ``row_map`` and ``inverse_map`` of a stable sort by expert.

    An index outside ``0..num_experts - 1`` drops its assignment, and so does a place in the sorted
    order that is ``rows`` or more. ``split_sizes``, int32 ``[num_experts]``, counts the rows of
    each expert that are left.
    """
    device, count = expert_indices.device, expert_indices.numel()
    indices = expert_indices.reshape(-1)
    is_dropped = (indices < 0) | (indices >= num_experts)
    keys, order = torch.sort(indices.masked_fill(is_dropped, num_experts), stable=True)
    experts = torch.arange(num_experts + 1, dtype=keys.dtype, device=device)
    starts = torch.searchsorted(keys, experts, out_int32=True).clamp(max=rows)
    used = starts[-1]
    places = torch.arange(max(count, rows), dtype=torch.int32, device=device)
    places = torch.where(places < used, places, -1)
    inverse_map = torch.empty(count, dtype=torch.int32, device=device)
    inverse_map.scatter_(0, order, places[:count])
    row_map = torch.full((rows,), -1, dtype=torch.int32, device=device)
    shared = min(count, rows)
    row_map[:shared] = torch.where(places[:shared] >= 0, order[:shared].int(), -1)
    return starts.diff(), row_map, inverse_map.view(expert_indices.shape)


def permute(x: torch.Tensor, row_map: torch.Tensor, inverse_map: torch.Tensor) -> torch.Tensor:
    """The rows of ``x [T, hidden]`` in the order of ``row_map``: ``[rows, hidden]``."""
    tokens, choices = inverse_map.shape
    if tokens == 0:
        return x.new_zeros(row_map.shape[0], x.shape[1])
    y = x.index_select(0, row_map.clamp(min=0).div(choices, rounding_mode="floor"))
    return y.masked_fill_((row_map < 0)[:, None], 0)


def unpermute(
    y: torch.Tensor, inverse_map: torch.Tensor, probs: torch.Tensor | None
) -> torch.Tensor:
    """``out[t] = sum over j of y[inverse_map[t, j]] * probs[t, j]``, in the order of j.

    The sum begins with 0 and leaves out dropped assignments. ``probs`` is ``[T, k]``; without it
    every factor is 1.
    """
    tokens, choices = inverse_map.shape
    out = torch.zeros(tokens, y.shape[1], dtype=_wide(y), device=y.device)
    for choice in range(choices if y.shape[0] else 0):
        rows = inverse_map[:, choice]
        term = y.index_select(0, rows.clamp(min=0)).to(out.dtype)
        if probs is not None:
            term.mul_(probs[:, choice, None].to(out.dtype))
        out = torch.where((rows >= 0)[:, None], out + term, out)
    return out.to(y.dtype)


def unpermute_backward(
    dout: torch.Tensor,
    y: torch.Tensor | None,
    row_map: torch.Tensor,
    inverse_map: torch.Tensor,
    probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``y`` and, if ``y`` is given, of ``probs``.

    ``dy[row] = dout[t] * probs[t, j]`` for the assignment in a row, in the dtype of ``dout``; 0 in
    rows without one. ``dprobs[t, j]`` is the dot product of ``dout[t]`` and the row of ``y``, or 0
    if the assignment is dropped; fp32.
    """
    tokens, choices = inverse_map.shape
    wide = _wide(dout)
    if tokens == 0:
        dprobs = None if y is None else dout.new_zeros(inverse_map.shape, dtype=wide)
        return dout.new_zeros(row_map.shape[0], dout.shape[1]), dprobs
    numbers = row_map.clamp(min=0)
    token = numbers.div(choices, rounding_mode="floor")
    scales = probs.to(wide).reshape(-1).index_select(0, numbers)
    dy = (dout.index_select(0, token).to(wide) * scales[:, None]).to(dout.dtype)
    dy.masked_fill_((row_map < 0)[:, None], 0)
    if y is None:
        return dy, None
    dprobs = torch.zeros(tokens, choices, dtype=wide, device=dout.device)
    for choice in range(choices if y.shape[0] else 0):
        rows = inverse_map[:, choice]
        products = dout.to(wide) * y.index_select(0, rows.clamp(min=0)).to(wide)
        dprobs[:, choice] = torch.where(rows >= 0, _row_sums(products), 0)
    return dy, dprobs


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row, in the order of the kernel.

    A lane of a warp has 8 neighbouring columns of every 256. It adds these over the steps of 256;
    then its 8 sums are added in halves, and then those of the 32 lanes.
    """
    rows, columns = x.shape
    width = DOT_LANES * DOT_COLUMNS
    sums = x.new_zeros(rows, width)
    for first in range(0, columns, width):
        part = x[:, first : first + width]
        sums[:, : part.shape[1]] += part
    sums = _halved(sums.view(rows, DOT_LANES, DOT_COLUMNS)).squeeze(-1)
    return _halved(sums).squeeze(-1)


def _halved(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, a power of two, by adding its halves."""
    while x.shape[-1] > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x


def _wide(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(x.dtype, torch.float32)
