"""Products of grouped linears: the rows of each group are multiplied by the weight of that group.

``x`` is ``[T, K]``, ``weight`` is ``[G, N, K]``, ``dy`` is ``[T, N]``. Group g has the rows from
``ends[g - 1]`` up to ``ends[g]``. Rows after the last group belong to none: they are not read into
any result, and are zeros in results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fuser.cuda.launch import capability, recording, values_on_host
from fuser.errors import InputError
from fuser.formats import round_up
from fuser.functional import grouped
from fuser.functional.grouped import PaddedGroups

# grouped_mm reads rows in vectors of 16 bytes.
VECTOR_BYTES = 16


class Groups(NamedTuple):
    """The rows of each group.

    ``ends`` is int32 ``[G]`` on the device of the rows: where each group ends, and the next one
    begins. ``sizes`` are the numbers of rows, int64 ``[G]`` on the CPU, None if they have not been
    read. ``padded``: the same groups with padding, None if :func:`groups_of` was called without
    ``is_padded``.
    """

    ends: torch.Tensor
    sizes: torch.Tensor | None
    padded: PaddedGroups | None = None

    @classmethod
    def at(
        cls,
        ends: torch.Tensor,
        sizes: torch.Tensor | None,
        padded_ends: torch.Tensor | None,
        tiles: torch.Tensor | None,
        rows: int,
    ) -> Groups:
        """Groups of ``rows`` rows from their :meth:`tensors`."""
        if padded_ends is None or tiles is None:
            return cls(ends, sizes)
        return cls(ends, sizes, PaddedGroups(ends, padded_ends, tiles, rows))

    def tensors(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """What :meth:`at` takes, to be saved for backward."""
        if self.padded is None:
            return self.ends, self.sizes, None, None
        return self.ends, self.sizes, self.padded.padded_ends, self.padded.tiles

    def slices(self) -> list[slice]:
        """The rows of each group; the sizes must have been read."""
        assert self.sizes is not None
        slices, start = [], 0
        for size in values_on_host(self.sizes):
            slices.append(slice(start, start + size))
            start += size
        return slices


def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for all groups in one launch; else each has its own product."""
    is_narrow = dtype in (torch.float16, torch.bfloat16)
    return is_narrow and device.type == "cuda" and capability(device)[0] in (9, 10)


def multiplies_quantized(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether groups that were quantized together are one product, also on the CPU."""
    is_on_cpu = device.type == "cpu" and dtype is not torch.float64
    return is_on_cpu or has_grouped_mm(device, dtype)


def groups_of(
    split_sizes: torch.Tensor, x: torch.Tensor, *, is_read: bool, is_padded: bool = False
) -> Groups:
    """The groups of the rows of ``x [T, K]``, from the number of rows of each.

    ``split_sizes`` are integers ``[G]``, checked on the CPU; on another device they are not read
    unless ``is_read``, for which they are needed on the host: sizes below zero then count as zero,
    and groups end at the last row. ``is_padded``: padded groups are needed too.
    """
    rows, sizes = x.shape[0], None
    if is_read:  # not the caller's tensor, which may change before the backward
        sizes = split_sizes.to("cpu", torch.int64, copy=True)
    if split_sizes.device.type == "cpu" or is_read:
        _check_sizes(values_on_host(split_sizes if sizes is None else sizes), rows)
    if split_sizes.device != x.device:
        split_sizes = split_sizes.to(x.device, non_blocking=True)
    if is_padded:
        padded = grouped.padded_groups(split_sizes, len(split_sizes), rows, x.device)
        return Groups(padded.ends, sizes, padded)
    return Groups(grouped.group_ends(split_sizes, x), sizes)


def _check_sizes(sizes: Sequence[int], rows: int) -> None:
    if any(size < 0 for size in sizes):
        raise InputError(f"Split sizes must not be negative; got {listed(sizes)}.")
    if (total := sum(sizes)) > rows:
        raise InputError(
            f"Split sizes sum to {total}, more than the {rows} rows of the input: {listed(sizes)}."
            " Give sizes of these rows."
        )


def listed(sizes: Sequence[int], most: int = 16) -> str:
    """Split sizes for an error message: the first ``most`` of them, and the number of others."""
    more = f" and {len(sizes) - most} more" if len(sizes) > most else ""
    return f"{', '.join(map(str, sizes[:most]))}{more}"


def forward(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``x_g @ weight_g.T`` for the rows of each group, ``[T, N]``."""
    return _multiply(x, weight.transpose(1, 2), groups)


def dgrad(dy: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``dy_g @ weight_g`` for the rows of each group: the gradient of x, ``[T, K]``."""
    return _multiply(dy, weight, groups)


def wgrad(dy: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``dy_g.T @ x_g`` of each group: the gradient of the weights, ``[G, N, K]``."""
    if groups.sizes is None:
        n, k = dy.shape[1], x.shape[1]
        if dy.shape[0] == 0:  # torch refuses a product over no rows
            return dy.new_zeros(len(groups.ends), n, k)
        products = grouped_mm(whole_vectors(dy).t(), whole_vectors(x), groups.ends)
        return products if products.shape[1:] == (n, k) else products[:, :n, :k]
    products = dy.new_empty(len(groups.sizes), dy.shape[1], x.shape[1])
    for product, rows in zip(products, groups.slices(), strict=True):
        torch.mm(dy[rows].t(), x[rows], out=product)
    return products


def sums(dy: torch.Tensor, groups: Groups, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of the rows of each group, times their ``scales`` ``[T]``: ``[G, N]``."""
    if groups.sizes is None and dy.shape[0] == 0:
        return dy.new_zeros(len(groups.ends), dy.shape[1])
    if groups.sizes is None:
        # A product with rows of ones, of which it needs whole vectors.
        factors = dy.new_ones(1) if scales is None else scales.to(dy.dtype)
        width = VECTOR_BYTES // dy.element_size()
        left = factors[:, None].expand(dy.shape[0], width).contiguous()
        products = grouped_mm(left.t(), whole_vectors(dy), groups.ends)
        return products[:, 0, : dy.shape[1]]
    weighted = dy if scales is None else dy * scales[:, None].to(dy.dtype)
    return torch.stack([weighted[rows].sum(0) for rows in groups.slices()])


class GroupProducts(NamedTuple):
    """The functions of :mod:`fuser.gemm` for operands ``[..., K]`` and a weight for each group.

    Addends are contiguous, and written.
    """

    groups: Groups
    """Of rows that are not padded."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x_g @ weight_g.T``."""
        return _shaped_as(x, forward(_rows(x), weight, self.groups))

    def linear_add(
        self, x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """``scale * x_g @ weight_g.T + addend``."""
        return self._added(_rows(x), weight.transpose(1, 2), addend, scale)

    def dgrad(
        self,
        dy: torch.Tensor,
        weight: torch.Tensor,
        scale: float = 1.0,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``scale * dy_g @ weight_g (+ addend)``."""
        if addend is not None:
            return self._added(_rows(dy), weight, addend, scale)
        return _shaped_as(dy, _scaled(dgrad(_rows(dy), weight, self.groups), scale))

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """``scale * dy_g.T @ x_g``."""
        return _scaled(wgrad(_rows(dy), _rows(x), self.groups), scale)

    def _added(
        self, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """``addend`` with ``scale * a_g @ b_g``: one GEMM for each group where each is one."""
        sums = addend.view(-1, addend.shape[-1])
        if self.groups.sizes is None or sums.dtype is not a.dtype:
            sums.add_(_multiply(a, b, self.groups), alpha=scale)
            return addend
        for rows, matrix in zip(self.groups.slices(), b, strict=True):
            sums[rows].addmm_(a[rows], matrix, alpha=scale)
        return addend


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _shaped_as(x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    return product.view(*x.shape[:-1], product.shape[-1])


def _scaled(product: torch.Tensor, scale: float) -> torch.Tensor:
    return product if scale == 1.0 else product.mul_(scale)


def _multiply(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``a_g @ b_g`` for the rows of each group; ``b`` is ``[G, inner, columns]``."""
    if groups.sizes is None:
        return grouped.zero_tail(groups.ends, multiply_at_once(a, b, groups.ends))
    parts = [torch.mm(a[rows], weight) for rows, weight in zip(groups.slices(), b, strict=True)]
    rest = a.shape[0] - sum(map(len, parts))
    return torch.cat([*parts, a.new_zeros(rest, b.shape[2])])


def multiply_at_once(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``a_g @ b_g`` in one launch; rows after the last group are undefined."""
    columns = b.shape[2]
    y = grouped_mm(whole_vectors(a), aligned_matrices(b), ends)
    return y if y.shape[1] == columns else y[:, :columns].contiguous()


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """``torch.nn.functional.grouped_mm``, also of fake tensors in any dtype."""
    if not recording.is_dry:
        return F.grouped_mm(a, b, offs=ends)
    # Of fake tensors torch takes bf16 alone.
    groups = () if b.dim() == 3 else (len(ends),)
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


def whole_vectors(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are contiguous whole vectors; padded with zeros if they are not."""
    width = VECTOR_BYTES // matrix.element_size()
    missing = round_up(matrix.shape[1], width) - matrix.shape[1]
    if missing:
        return F.pad(matrix, (0, missing))
    (down, right), columns = matrix.stride(), matrix.shape[1]
    is_aligned = right == 1 and down >= columns and down % width == 0
    if is_aligned and matrix.data_ptr() % VECTOR_BYTES == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def aligned_matrices(b: torch.Tensor) -> torch.Tensor:
    """Matrices ``[G, inner, columns]``, padded with zeros to whole vectors in both sizes."""
    width = VECTOR_BYTES // b.element_size()
    missing = [round_up(size, width) - size for size in b.shape[1:]]
    if any(missing):
        return F.pad(b, (0, missing[1], 0, missing[0]))
    is_aligned = all(s == 1 or s % width == 0 for s in b.stride())
    return b if is_aligned and b.data_ptr() % VECTOR_BYTES == 0 else b.contiguous()
