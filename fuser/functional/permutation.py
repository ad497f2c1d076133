"""Permutation of tokens to rows sorted by expert, and back: kernels if available, else PyTorch."""

from __future__ import annotations

import torch

from fuser.cuda import permutation as kernels
from fuser.cuda.arguments import Producer
from fuser.cuda.launch import kernels_support
from fuser.functional.lazy import LazyTensor, as_stored, launched, rows_of
from fuser.reference import permutation as reference


def sort_by_expert(
    expert_indices: torch.Tensor, num_experts: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The split sizes, ``row_map`` and ``inverse_map`` of a stable sort; see the reference."""
    device, count = expert_indices.device, expert_indices.numel()
    split_sizes = torch.empty(num_experts, dtype=torch.int32, device=device)
    is_small = num_experts <= kernels.MAX_EXPERTS and count <= kernels.MAX_ASSIGNMENTS
    if is_small and kernels_support(split_sizes.view(torch.uint8)):
        shape = kernels.counts_shape(count, num_experts)
        counts = None if shape is None else split_sizes.new_empty(shape)
        row_map = split_sizes.new_empty(rows)
        inverse_map = split_sizes.new_empty(expert_indices.shape)
        indices = expert_indices.contiguous()
        if launched(kernels.sort_by_expert, indices, split_sizes, row_map, inverse_map, counts):
            return split_sizes, row_map, inverse_map
    return reference.sort_by_expert(expert_indices, num_experts, rows)


def row_map_of(inverse_map: torch.Tensor, rows: int) -> torch.Tensor:
    """The ``row_map`` of a permutation to ``rows`` rows, from its ``inverse_map``."""
    numbers = torch.arange(inverse_map.numel(), dtype=torch.int32, device=inverse_map.device)
    places = inverse_map.reshape(-1).long()
    # One place more, for the assignments without a row.
    row_map = numbers.new_full((rows + 1,), -1)
    return row_map.scatter_(0, places.masked_fill(places < 0, rows), numbers)[:rows]


def permute(x: torch.Tensor, row_map: torch.Tensor, inverse_map: torch.Tensor) -> torch.Tensor:
    """The rows of ``x [T, hidden]`` in the order of ``row_map``; see the reference."""
    if kernels_support(x):
        y = torch.empty(row_map.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
        if launched(kernels.permute, rows_of(x), row_map, inverse_map, y):
            return y
    return reference.permute(x, row_map, inverse_map)


class _GatheredRows(LazyTensor):
    """The rows of a permutation, which a kernel reads by their index among the tokens."""

    is_of_groups = True

    def __init__(self, x: torch.Tensor, row_map: torch.Tensor, inverse_map: torch.Tensor) -> None:
        self.x, self.row_map, self.inverse_map = rows_of(x), row_map, inverse_map
        self.shape = torch.Size((row_map.shape[0], x.shape[1]))
        self.dtype, self.device = x.dtype, x.device

    def _from_kernel(self) -> torch.Tensor:
        y = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        kernels.permute(self.x, self.row_map, self.inverse_map, y)
        return y

    def _from_reference(self) -> torch.Tensor:
        return reference.permute(self.x, self.row_map, self.inverse_map)

    def producer(self) -> Producer:
        return kernels.gathered_rows(self.x, self.row_map, self.inverse_map.shape[1])


def gathered_rows(
    x: torch.Tensor, row_map: torch.Tensor, inverse_map: torch.Tensor
) -> torch.Tensor | LazyTensor:
    """The rows that :func:`permute` returns; lazy where kernels run."""
    if kernels_support(x):
        return _GatheredRows(x, row_map, inverse_map)
    return reference.permute(x, row_map, inverse_map)


def unpermute(
    y: torch.Tensor, inverse_map: torch.Tensor, probs: torch.Tensor | None
) -> torch.Tensor:
    """The sum of each token's rows, weighted by ``probs`` if given; see the reference."""
    if kernels_support(y):
        out = torch.empty(inverse_map.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
        scales = None if probs is None else _scales(probs)
        if launched(kernels.unpermute, rows_of(y), inverse_map, scales, out):
            return out
    return reference.unpermute(y, inverse_map, probs)


def unpermute_backward(
    dout: torch.Tensor,
    y: torch.Tensor | None,
    row_map: torch.Tensor,
    inverse_map: torch.Tensor,
    probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``y`` and, if ``y`` is given, of ``probs``; see the reference."""
    if kernels_support(dout):
        scales = _scales(probs)
        dy = torch.empty(row_map.shape[0], dout.shape[1], dtype=dout.dtype, device=dout.device)
        dprobs = None if y is None else torch.empty_like(scales)
        read = (rows_of(dout), None if y is None else rows_of(y), row_map, inverse_map, scales)
        if launched(kernels.unpermute_backward, *read, dy, dprobs):
            return dy, dprobs
    return reference.unpermute_backward(dout, y, row_map, inverse_map, probs)


def _scales(probs: torch.Tensor) -> torch.Tensor:
    """``probs`` as kernels read them: fp32, contiguous."""
    return as_stored(probs).contiguous().float()
