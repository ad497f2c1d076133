"""Tensors and quantizers of padded groups of rows, by format.

A quantizer of groups quantizes all groups of a matrix at once, and gives each its own scales.
Formats of blocks, such as MXFP8, need no class here: no block reaches over the end of a padded
group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fuser.cuda import fp8_scaling as kernels
from fuser.cuda import nvfp4 as nvfp4_kernels
from fuser.cuda.launch import values_on_host
from fuser.errors import KernelUnavailable
from fuser.formats import GROUP_TILE, DType, NumberFormat
from fuser.functional.grouped import PaddedGroups, padded_rows
from fuser.functional.lazy import LazyTensor, source_of
from fuser.reference import fp8_scaling as reference
from fuser.reference import nvfp4 as nvfp4_reference
from fuser.reference.fp8 import scale_from_amax, transpose
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.fp8 import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from fuser.tensors.nvfp4 import NVFP4Quantizer, NVFP4Tensor
from fuser.tensors.quantizer import AMAXES, Quantizer
from fuser.torch_private import foreach_maximum_


@dataclass(frozen=True, eq=False)
class _OfGroups:
    """A base of quantizers of the rows of padded ``groups``; ``alone`` is that of one group."""

    groups: PaddedGroups
    alone: Any
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)

    accepts_lazy = True

    @functools.cached_property
    def format(self) -> NumberFormat:
        number_format: NumberFormat = self.alone.format
        return number_format

    def state_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self.groups.tiles,)


# -- FP8 with one scale a group --------------------------------------------------


class Float8GroupsTensor(Float8Tensor):
    """FP8 bytes of padded groups, with one fp32 scale for each 128 rows.

    Buffers: as :class:`Float8Tensor`, but ``_scale_inv`` is fp32 ``[M / 128]``. The scales of one
    group are equal.
    """

    has_scales_of_rows = True


@dataclass(frozen=True, eq=False)
class Float8GroupsQuantizer(_OfGroups, Quantizer):
    """FP8 with one scale a group, of the rows of padded ``groups``.

    ``alone`` is the quantizer of one group; of delayed scaling that of the same elements.
    ``scales`` and ``amaxes`` are those of delayed scaling: fp32 ``[1]`` for each group, or one
    ``[G]`` for all of them. ``amaxes`` become the maxima of themselves and the amaxes of the
    groups; empty if nothing is recorded. If ``scales`` is empty, scales follow from the amaxes of
    the groups.
    """

    alone: Float8CurrentScalingQuantizer = field(default_factory=Float8CurrentScalingQuantizer)
    scales: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    amaxes: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)

    tensor_class = Float8GroupsTensor

    @property
    def fp8_dtype(self) -> DType:
        return self.alone.fp8_dtype

    @property
    def is_repeatable(self) -> bool:
        return not self.scales  # those of other calls

    def unbound(self) -> Quantizer:
        if self.scales:
            return super().unbound()
        return self.alone.with_usage(rowwise=self.rowwise, columnwise=self.columnwise)

    def to_repeat(self, tensor: QuantizedTensor) -> torch.Tensor | None:
        scaling = super().to_repeat(tensor)
        return torch.cat(self.scales) if self.scales and scaling is None else scaling

    def repeating(self, kept: torch.Tensor | None) -> Quantizer:
        if not self.scales:
            return super().repeating(kept)
        assert kept is not None
        return replace(self, scales=(kept,), amaxes=())

    def _scale(self) -> torch.Tensor:
        """The scales of all groups, fp32 ``[G]``."""
        return self.scales[0] if len(self.scales) == 1 else torch.cat(self.scales)

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        assert isinstance(x, LazyTensor)
        source, tiles, buffers = source_of(x), self.groups.tiles, self.new_buffers(x)
        alone, amaxes = self.alone, self.reduced_amaxes
        if amaxes is None:
            amaxes = torch.zeros(len(self.groups.ends), dtype=torch.float32, device=x.device)
        if self.scales:
            scale, amax = self._scale(), amaxes if self.amaxes else None
            kernels.quantize(self.format, source, buffers, scale=scale, recorded=amax, tiles=tiles)
            self._record(amaxes)
            buffers[AMAXES] = scale.clone() if scale is self.scales[0] else scale
        else:
            if self.reduced_amaxes is None:
                kernels.quantize(self.format, source, {}, recorded=amaxes, tiles=tiles)
            how: dict[str, Any] = {"pow2": alone.force_pow_2_scales, "eps": alone.amax_epsilon}
            kernels.quantize(self.format, source, buffers, amax_value=amaxes, **how, tiles=tiles)
            buffers[AMAXES] = amaxes
        return buffers

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        known, groups, alone = self.reduced_amaxes, self.groups.tiles[:, 0], self.alone
        amaxes = amaxes_of_groups(x, self.groups) if known is None else known
        if self.scales:
            scale = self._scale()
            self._record(amaxes)
        else:
            how = (alone.force_pow_2_scales, alone.amax_epsilon)
            scale = scale_from_amax(amaxes, self.fp8_dtype.max, *how)
        of_tiles = scale[groups.clamp(min=0).long()].masked_fill(groups < 0, 1)
        row = reference.cast(x, of_tiles.repeat_interleave(GROUP_TILE)[:, None], self.fp8_dtype)
        col = transpose(row) if self.columnwise else None
        copies = (row if self.rowwise else None, col, of_tiles.reciprocal())
        buffers = dict(zip(Float8Tensor.buffer_names, copies, strict=True))
        return buffers if self.scales else {**buffers, AMAXES: amaxes}

    def _record(self, amaxes: torch.Tensor) -> None:
        if self.amaxes:
            foreach_maximum_(list(self.amaxes), list(amaxes.view(-1, 1).unbind()))


def amaxes_of_groups(rows: torch.Tensor | LazyTensor, groups: PaddedGroups) -> torch.Tensor:
    """The amax of each group, fp32 ``[G]``, of the rows of padded groups."""
    amaxes = torch.zeros(len(groups.ends), dtype=torch.float32, device=rows.device)
    if isinstance(rows, LazyTensor):
        try:
            kernels.amax(source_of(rows), out=amaxes, tiles=groups.tiles)
        except KernelUnavailable:
            rows = rows.tensor()
        else:
            return amaxes
    start = 0
    for g, end in enumerate(values_on_host(groups.padded_ends)):
        amaxes[g : g + 1] = reference.amax(rows[start:end])
        start = end
    return amaxes


# -- NVFP4 with the amaxes of groups ---------------------------------------------


class NVFP4GroupsTensor(NVFP4Tensor):
    """NVFP4 of padded groups, with an amax for each 128 rows.

    Buffers: as :class:`NVFP4Tensor`, but the amaxes are fp32 ``[M / 128]``. Those of one group are
    equal.
    """

    has_scales_of_rows = True


@dataclass(frozen=True, eq=False)
class NVFP4GroupsQuantizer(_OfGroups, Quantizer):
    """NVFP4 of the rows of padded ``groups``, each with an amax of its own.

    ``alone`` is the quantizer of one group. Stochastic rounding draws one seed for all groups.
    """

    alone: NVFP4Quantizer

    tensor_class = NVFP4GroupsTensor

    @property
    def is_repeatable(self) -> bool:
        return self.alone.is_repeatable

    def encoding(self) -> tuple[object, ...]:
        return self.alone.encoding()

    def unbound(self) -> Quantizer:
        return self.alone

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        if isinstance(x, torch.Tensor):  # whose columns were padded to whole blocks
            lazy = padded_rows(x, self.groups, is_padded=True)
            return self.from_kernel(lazy) if lazy is not x else self.from_reference(x)
        source, tiles, alone = source_of(x), self.groups.tiles, self.alone
        amaxes = self.reduced_amaxes
        if amaxes is None:
            shape = (len(self.groups.ends), 1 + alone.with_rht)
            amaxes = torch.zeros(shape, dtype=torch.float32, device=x.device)
            if alone.with_rht:
                signs = alone.with_random_sign_mask
                nvfp4_kernels.hadamard_amax(source, random_signs=signs, out=amaxes, tiles=tiles)
            else:
                kernels.amax(source, out=amaxes.view(-1), tiles=tiles)
        buffers = self.new_buffers(x)
        options = alone._options()
        nvfp4_kernels.quantize(self.format, source, buffers, amaxes, **options, tiles=tiles)
        buffers[AMAXES] = amaxes
        return buffers

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        usages: dict[str, Any] = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        ends, is_square = values_on_host(self.groups.padded_ends), self.alone.with_2d_quantization
        options = {**usages, **self.alone._options(), "two_dimensional": is_square}
        amaxes = self.reduced_amaxes
        if amaxes is None:
            groups = (x[start:end] for start, end in zip((0, *ends), ends, strict=False))
            amaxes = torch.stack([self.alone._amaxes_from_reference(rows) for rows in groups])
        copies = self.copies(*nvfp4_reference.quantize_groups(x, ends, **options, amaxes=amaxes))
        return {**copies, AMAXES: amaxes}


# -- all formats ------------------------------------------------------------------


def quantizes_groups(quantizers: Sequence[Quantizer], groups: int) -> bool:
    """Whether all groups can be quantized in one launch.

    ``quantizers``: the quantizer of each group, or one for all of them.
    """
    if not quantizers:
        return False
    first = quantizers[0]
    if not first.format.has_kernel:
        return False
    if isinstance(first, Float8Quantizer):
        is_whole = all(type(q) is Float8Quantizer and q.saturates for q in quantizers)
        return len(quantizers) == groups and is_whole
    return first.is_of_blocks or type(first) in (Float8CurrentScalingQuantizer, NVFP4Quantizer)


def groups_quantizer(
    quantizers: Sequence[Quantizer], groups: PaddedGroups, *, rowwise: bool, columnwise: bool
) -> Quantizer:
    """The quantizer of the rows of padded groups, where :func:`quantizes_groups` is true."""
    first = quantizers[0]
    usages: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
    if isinstance(first, Float8CurrentScalingQuantizer):
        return Float8GroupsQuantizer(groups, first, **usages)
    if isinstance(first, Float8Quantizer):
        states = [q for q in quantizers if isinstance(q, Float8Quantizer)]
        scales = tuple(q.scale for q in states)
        amaxes = tuple(q.amax for q in states if q.amax is not None)
        alone = Float8CurrentScalingQuantizer(first.fp8_dtype)
        return Float8GroupsQuantizer(groups, alone, scales=scales, amaxes=amaxes, **usages)
    if isinstance(first, NVFP4Quantizer):
        both = first.with_usage(rowwise=True, columnwise=True)
        assert isinstance(both, NVFP4Quantizer)
        return NVFP4GroupsQuantizer(groups, both, **usages)
    return first.with_usage(**usages)  # blocks do not reach over the end of a tile
