"""Groups of consecutive rows: a kernel where kernels run, else PyTorch."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from fuser.chain import Stage, Stages
from fuser.cuda import grouped as cuda
from fuser.cuda.arguments import Producer
from fuser.cuda.launch import kernels_support
from fuser.cuda.tiled import as_producer
from fuser.errors import KernelUnavailable
from fuser.formats import GROUP_TILE, tile_count
from fuser.functional.lazy import LazyTensor, as_stored, launched, materialize, matrix_of, rows_of
from fuser.functional.pointwise import BackwardChain, Operands, chain_backward, kernels_take
from fuser.reference import grouped as reference


class PaddedGroups(NamedTuple):
    """Groups of rows that are padded with zeros to whole tiles of 128 rows.

    ``ends`` and ``padded_ends`` are int32 ``[G]``: where each group ends without and with padding;
    ``tiles`` is int32 ``[n, 4]``, as ``fuser.reference.grouped.group_tiles`` describes it. A padded
    matrix has 128 n rows, the most that these groups can take; those after the last group are
    undefined. ``rows`` is the number of rows without padding.
    """

    ends: torch.Tensor
    padded_ends: torch.Tensor
    tiles: torch.Tensor
    rows: int

    @property
    def padded_rows(self) -> int:
        """Rows of a padded matrix."""
        return self.tiles.shape[0] * GROUP_TILE


def padded_groups(
    split_sizes: torch.Tensor | int, groups: int, rows: int, device: torch.device
) -> PaddedGroups:
    """Groups of the given sizes, or all of one size, on the device of the rows; in one launch."""
    one_size = None if isinstance(split_sizes, torch.Tensor) else split_sizes
    count = tile_count(rows, groups, one_size)
    if device.type == "cuda":
        shapes = ((groups,), (groups,), (count, 4))
        ends, padded_ends, tiles = (
            torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes
        )
        sizes = split_sizes
        if isinstance(sizes, torch.Tensor):
            sizes = sizes.contiguous()
            sizes = sizes if sizes.dtype in cuda.INDICES else sizes.to(torch.int32)
        if launched(cuda.group_tiles, sizes, rows, ends=ends, padded_ends=padded_ends, tiles=tiles):
            return PaddedGroups(ends, padded_ends, tiles, rows)
    if not isinstance(split_sizes, torch.Tensor):
        split_sizes = torch.full((groups,), split_sizes, device=device)
    ends = reference.group_ends(split_sizes, rows)
    return PaddedGroups(ends, *reference.group_tiles(ends, count), rows)


class _PaddedRows(LazyTensor):
    """The rows of padded groups, of a matrix or of a lazy one."""

    def __init__(
        self, rows: torch.Tensor | LazyTensor, groups: PaddedGroups, is_padded: bool
    ) -> None:
        self.rows = rows if isinstance(rows, LazyTensor) else rows_of(rows)
        self.groups, self.is_padded = groups, is_padded
        self.shape = torch.Size((groups.padded_rows, matrix_of(rows)[1]))
        self.dtype, self.device = rows.dtype, rows.device

    def apart(self) -> LazyTensor:
        other: _PaddedRows = copy.copy(self)
        other.rows = self.rows.apart() if isinstance(self.rows, LazyTensor) else self.rows
        return other

    def _from_kernel(self) -> torch.Tensor:
        if self.is_padded:
            return self._from_reference()
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        cuda.pad(materialize(self.rows).view(matrix_of(self.rows)), self.groups.tiles, out=out)
        return out

    def _from_reference(self) -> torch.Tensor:
        rows = materialize(self.rows).view(matrix_of(self.rows))
        return _padded_by_torch(rows, self.groups, self.is_padded)

    def producer(self) -> Producer:
        rows = self.rows
        inner = rows.producer() if isinstance(rows, LazyTensor) else as_producer("pad", rows)
        return cuda.padded_rows(inner, self.groups.tiles, is_padded=self.is_padded)

    def finish(self) -> None:
        if isinstance(self.rows, LazyTensor):
            self.rows.finish()


def padded_rows(
    rows: torch.Tensor | LazyTensor, groups: PaddedGroups, *, is_padded: bool = False
) -> torch.Tensor | LazyTensor:
    """The rows of padded groups, ``[padded rows, K]``: lazy where kernels run.

    ``rows`` is ``[groups.rows, K]``; or ``[padded rows, K]`` with anything in the padding, if
    ``is_padded``.
    """
    if isinstance(rows, LazyTensor) or kernels_support(rows):
        return _PaddedRows(rows, groups, is_padded)
    return _padded_by_torch(rows, groups, is_padded)


def _padded_by_torch(rows: torch.Tensor, groups: PaddedGroups, is_padded: bool) -> torch.Tensor:
    tiles = groups.tiles
    if is_padded:
        tiles = tiles.clone()
        tiles[:, 1] = torch.arange(tiles.shape[0], device=tiles.device) * GROUP_TILE
    return reference.pad(rows, tiles)


def unpad(padded: torch.Tensor, groups: PaddedGroups) -> torch.Tensor:
    """``[groups.rows, N]`` from the rows of padded groups; zeros after the last group."""
    if kernels_support(padded):
        padded = padded.contiguous()
        out = padded.new_empty(groups.rows, padded.shape[1])
        if launched(cuda.unpad, padded, groups.ends, groups.padded_ends, out=out):
            return out
    return reference.unpad(padded, groups.ends, groups.padded_ends, groups.rows)


def group_ends(split_sizes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The ends of groups of the rows of ``x``, in one launch; the reference has the same name."""
    rows = x.shape[0]
    if kernels_support(x) and split_sizes.device == x.device:
        sizes = split_sizes.contiguous()
        sizes = sizes if sizes.dtype in cuda.INDICES else sizes.to(torch.int32)
        out = torch.empty(sizes.shape, dtype=torch.int32, device=sizes.device)
        if launched(cuda.group_ends, sizes, rows, out=out):
            return out
    return reference.group_ends(split_sizes, rows)


def zero_tail(ends: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Zero the rows after the last group, and write no others; the reference has the same name."""
    if _is_matrix_of_kernels(out) and launched(cuda.zero_tail, ends, out=out):
        return out
    return reference.zero_tail(ends, out)


def add_bias(
    ends: torch.Tensor, bias: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Add biases to rows of groups, in one pass over ``out``; the reference has the same name."""
    if _is_matrix_of_kernels(out) and launched(
        cuda.add_bias, ends, bias.contiguous(), scales, out=out
    ):
        return out
    return reference.add_bias(ends, bias, scales, out)


def _is_matrix_of_kernels(out: torch.Tensor) -> bool:
    return kernels_support(out) and out.dim() == 2 and out.is_contiguous()


class _BackwardOfGroups(BackwardChain):
    """That of padded rows of ``groups``, which also leaves ``dbias``, its sums over each group."""

    def __init__(
        self,
        stages: Stages,
        dy: torch.Tensor,
        x: torch.Tensor,
        operands: Operands,
        grads: Operands,
        groups: PaddedGroups,
        dbias: torch.Tensor | None,
    ) -> None:
        super().__init__(stages, dy, x, operands, grads)
        self.groups, self.dbias = groups, dbias

    @property
    def sums_rows(self) -> bool:  # type: ignore[override]
        return self.dbias is not None

    def apart(self) -> LazyTensor:
        other: Any = super().apart()
        other.dbias = None
        return other  # type: ignore[no-any-return]

    def _from_kernel(self) -> torch.Tensor:
        return self._summed(super()._from_kernel())

    def _from_reference(self) -> torch.Tensor:
        return self._summed(super()._from_reference())

    def _summed(self, dx: torch.Tensor) -> torch.Tensor:
        if self.dbias is not None:
            self.dbias.copy_(reference.sum_groups(dx, self.groups.tiles, len(self.dbias)))
        return dx

    def finish(self) -> None:
        sums, self.sums = self.sums, None
        if self.dbias is not None and sums is not None:
            try:
                cuda.sum_groups(sums, self.groups.padded_ends, out=self.dbias)
            except KernelUnavailable:
                self.dbias.copy_(reference.sum_tiles(sums, self.groups.tiles, len(self.dbias)))
        super().finish()


def scaled_activation_bias_backward(
    stage: Stage,
    dy: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor,
    groups: PaddedGroups,
    *,
    wants_dscales: bool = True,
) -> tuple[torch.Tensor | LazyTensor, torch.Tensor | None, torch.Tensor]:
    """Gradients of a scaled activation, and those of the biases in its input ``x``.

    All rows are those of padded ``groups``, whose biases are before the activation: their gradients
    ``[G, columns of x]`` are the sums of the first result over the rows of each group. A lazy
    result is to be written as :func:`padded_rows` of these groups.
    """
    count, stages = len(groups.ends), (stage.scaled,)
    if not kernels_take(dy, x):
        values, (dscales,) = chain_backward(stages, dy, x, (scales,), (wants_dscales,))
        return values, dscales, reference.sum_groups(materialize(values), groups.tiles, count)
    operand = as_stored(scales).contiguous()
    dscales = torch.empty_like(operand) if wants_dscales else None
    dbias = torch.empty(count, x.shape[-1], dtype=x.dtype, device=x.device)
    dx = _BackwardOfGroups(stages, dy, x, (operand,), (dscales,), groups, dbias)
    return dx, dscales, dbias
