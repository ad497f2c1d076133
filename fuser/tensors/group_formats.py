"""Tensors and quantizers of padded groups of rows, by format.

A quantizer of groups quantizes all groups of a matrix at once, and gives each its own scales.
128-blocks and MXFP8 need no class here: no block of theirs reaches over the end of a padded group.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser.cuda import grouped_fp8 as kernels
from fuser.cuda import grouped_nvfp4 as nvfp4_kernels
from fuser.errors import KernelUnavailable
from fuser.formats import GROUP_TILE, NVFP4_BLOCK, DType, NumberFormat, nvfp4_scale_shape
from fuser.functional.grouped import PaddedGroups, padded_rows
from fuser.functional.lazy import LazyTensor, buffer, filled, matrix_of, source_of
from fuser.reference import fp8_scaling as reference
from fuser.reference import nvfp4 as nvfp4_reference
from fuser.reference.fp8 import decode
from fuser.tensors.block_scaling import Float8BlockQuantizer
from fuser.tensors.fp8 import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from fuser.tensors.mxfp8 import MXFP8Quantizer
from fuser.tensors.nvfp4 import NVFP4Quantizer, NVFP4Tensor
from fuser.tensors.quantizer import Quantizer
from fuser.torch_private import foreach_maximum_

# -- FP8 with one scale a group --------------------------------------------------


class Float8GroupsTensor(Float8Tensor):
    """FP8 bytes of padded groups, with one fp32 scale for each 128 rows.

    Buffers: as :class:`Float8Tensor`, but ``_scale_inv`` is fp32 ``[M / 128]``. The scales of one
    group are equal.
    """

    has_scales_of_rows = True

    def _layout(self, m: int, k: int) -> dict[str, tuple[int, ...]]:
        return {**super()._layout(m, k), "_scale_inv": (m // GROUP_TILE,)}

    def _row_units(self) -> dict[str, tuple[int, int]]:
        return {**super()._row_units(), "_scale_inv": (0, GROUP_TILE)}

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        columnwise = self._rowwise_data is None
        data = self._columnwise_data if columnwise else self._rowwise_data
        assert data is not None
        return filled(
            torch.empty(
                data.shape[::-1] if columnwise else data.shape, dtype=dtype, device=data.device
            ),
            kernels.dequantize,
            _dequantized,
            *(data, self._scale_inv, self._fp8_dtype, dtype),
            columnwise=columnwise,
        )


def _dequantized(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
) -> torch.Tensor:
    values = decode(data.t() if columnwise else data, dtype)
    return (values * scale_inv.repeat_interleave(GROUP_TILE)[:, None]).to(out_dtype)


@dataclass(frozen=True, eq=False)
class Float8GroupsQuantizer(Quantizer):
    """FP8 with one scale a group, of the rows of padded ``groups``.

    Parameters
    ----------
    groups
        Where the groups are.
    fp8_dtype
        E4M3 or E5M2.
    force_pow_2_scales, amax_epsilon
        As in :class:`Float8CurrentScalingQuantizer`.
    scales, amaxes
        Delayed scaling: fp32 ``[1]`` for each group. ``amaxes`` become the maxima of themselves
        and the amaxes of the groups; empty if nothing is recorded. If ``scales`` is empty, scales
        follow from the amaxes of the groups.
    """

    groups: PaddedGroups
    fp8_dtype: DType = DType.kFloat8E4M3
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    force_pow_2_scales: bool = field(default=False, kw_only=True)
    amax_epsilon: float = field(default=0.0, kw_only=True)
    scales: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    amaxes: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)

    tensor_class = Float8GroupsTensor
    accepts_lazy = True

    @functools.cached_property
    def format(self) -> NumberFormat:
        return NumberFormat("FP8", self.fp8_dtype)

    @functools.cached_property
    def launch_key(self) -> Hashable | None:
        if self.scales:
            return None  # more than launches: torch gathers and raises the state of the groups
        copies = (self.rowwise, self.columnwise)
        how = (self.force_pow_2_scales, self.amax_epsilon, len(self.groups.ends))
        return ("groups", self.fp8_dtype, *copies, *how)

    def state_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self.groups.tiles,)

    def encoding(self) -> tuple[Any, ...]:
        return (self.fp8_dtype,)

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        assert isinstance(x, LazyTensor)
        (m, k), tiles = matrix_of(x), self.groups.tiles
        row, col = buffer(x, (m, k), self.rowwise), buffer(x, (k, m), self.columnwise)
        scale_inv = buffer(x, (len(tiles),), dtype=torch.float32)
        outputs: dict[str, Any] = {"row": row, "col": col, "scale_inv": scale_inv}
        source: Any = source_of(x)
        count = len(self.groups.ends)
        if self.scales:
            scale = torch.cat(self.scales)
            found = torch.zeros(count, dtype=torch.float32, device=x.device)
            kernels.quantize(
                source,
                self.fp8_dtype,
                tiles,
                scale=scale,
                recorded=found if self.amaxes else None,
                **outputs,
            )
            self._record(found)
        else:
            found = torch.zeros(count, dtype=torch.float32, device=x.device)
            kernels.quantize(source, self.fp8_dtype, tiles, recorded=found)
            kernels.quantize(
                source,
                self.fp8_dtype,
                tiles,
                amax_value=found,
                pow2=self.force_pow_2_scales,
                eps=self.amax_epsilon,
                **outputs,
            )
        return dict(zip(Float8Tensor.buffer_names, (row, col, scale_inv), strict=True))

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        m, k = x.shape
        row, col = x.new_zeros(m, k, dtype=torch.uint8), x.new_zeros(k, m, dtype=torch.uint8)
        scale_inv = x.new_ones(m // GROUP_TILE, dtype=torch.float32)
        found = x.new_zeros(len(self.groups.ends), dtype=torch.float32)
        start = 0
        for g, end in enumerate(self.groups.padded_ends.tolist()):
            rows, start = slice(start, end), end
            if rows.start == end:
                continue
            values = x[rows]
            found[g : g + 1] = reference.amax(values)
            if self.scales:
                made = reference.quantize_delayed(values, self.scales[g], self.fp8_dtype)[:3]
            else:
                made = reference.quantize_current(
                    values,
                    self.fp8_dtype,
                    pow2=self.force_pow_2_scales,
                    eps=self.amax_epsilon,
                )
            assert made[0] is not None
            row[rows], scale_inv[rows.start // GROUP_TILE : end // GROUP_TILE] = made[0], made[2]
            col[:, rows] = made[0].t()
        if self.scales:
            self._record(found)
        kept = (row if self.rowwise else None, col if self.columnwise else None, scale_inv)
        return dict(zip(Float8Tensor.buffer_names, kept, strict=True))

    def _record(self, found: torch.Tensor) -> None:
        if self.amaxes:
            foreach_maximum_(list(self.amaxes), list(found.view(-1, 1).unbind()))


def amaxes_of_groups(rows: torch.Tensor | LazyTensor, groups: PaddedGroups) -> torch.Tensor:
    """The amax of each group, fp32 ``[G]``, of the rows of padded groups."""
    found = torch.zeros(len(groups.ends), dtype=torch.float32, device=rows.device)
    if isinstance(rows, LazyTensor):
        try:
            source: Any = source_of(rows)
            kernels.quantize(source, DType.kFloat8E4M3, groups.tiles, recorded=found)
        except KernelUnavailable:
            rows = rows.tensor()
        else:
            return found
    start = 0
    for g, end in enumerate(groups.padded_ends.tolist()):
        found[g : g + 1] = reference.amax(rows[start:end])
        start = end
    return found


# -- NVFP4 with the amaxes of groups ---------------------------------------------


class NVFP4GroupsTensor(NVFP4Tensor):
    """NVFP4 of padded groups, with an amax for each 128 rows.

    Buffers: as :class:`NVFP4Tensor`, but the amaxes are fp32 ``[M / 128]``. Those of one group are
    equal.
    """

    has_scales_of_rows = True

    def _layout(self, m: int, k: int) -> dict[str, tuple[int, ...]]:
        amaxes = dict.fromkeys(("_amax_rowwise", "_amax_columnwise"), (m // GROUP_TILE,))
        return {**super()._layout(m, k), **amaxes}

    def _row_units(self) -> dict[str, tuple[int, int]]:
        amaxes = dict.fromkeys(("_amax_rowwise", "_amax_columnwise"), (0, GROUP_TILE))
        return {**super()._row_units(), **amaxes}

    def _decoded(
        self,
        out: torch.Tensor,
        data: torch.Tensor,
        scale: torch.Tensor,
        amax: torch.Tensor,
        *,
        columnwise: bool,
    ) -> torch.Tensor:
        def by_torch(
            data: torch.Tensor, *args: Any, columnwise: bool, out_dtype: torch.dtype = out.dtype
        ) -> torch.Tensor:
            of_rows = amax.repeat_interleave(GROUP_TILE)
            of_blocks = of_rows[None, ::NVFP4_BLOCK] if columnwise else of_rows[:, None]
            return nvfp4_reference.dequantize(
                data, scale, of_blocks, out_dtype, columnwise=columnwise
            )

        args = (data, scale, amax, out.dtype)
        return filled(out, nvfp4_kernels.dequantize, by_torch, *args, columnwise=columnwise)


@dataclass(frozen=True, eq=False)
class NVFP4GroupsQuantizer(Quantizer):
    """NVFP4 of the rows of padded ``groups``, each with an amax of its own.

    ``alone`` is the quantizer of one group. Stochastic rounding draws one seed for all groups.
    """

    groups: PaddedGroups
    alone: NVFP4Quantizer
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)

    tensor_class = NVFP4GroupsTensor
    accepts_lazy = True
    multiple = NVFP4_BLOCK

    @functools.cached_property
    def format(self) -> NumberFormat:
        return self.alone.format

    @functools.cached_property
    def launch_key(self) -> Hashable | None:
        key = self.alone.launch_key
        copies = (self.rowwise, self.columnwise, len(self.groups.ends))
        return None if key is None else ("groups", copies, key)

    def state_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self.groups.tiles,)

    def encoding(self) -> tuple[Any, ...]:
        return self.alone.encoding()

    def unbound(self) -> Quantizer:
        return self.alone

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        if isinstance(x, torch.Tensor):  # whose columns were padded to whole blocks
            lazy = padded_rows(x, self.groups, is_padded=True)
            return self.from_kernel(lazy) if lazy is not x else self.from_reference(x)
        (m, k), groups = matrix_of(x), self.groups
        source: Any = source_of(x)
        has_rht = self.alone.with_rht
        amaxes = torch.zeros(len(groups.ends), 1 + has_rht, dtype=torch.float32, device=x.device)
        if has_rht:
            signs = self.alone.with_random_sign_mask
            nvfp4_kernels.hadamard_amaxes(source, groups.tiles, random_signs=signs, out=amaxes)
        else:
            kernels.quantize(
                source, DType.kFloat8E4M3, groups.tiles, recorded=amaxes.view(len(amaxes))
            )
        row, col = buffer(x, (m, k // 2), self.rowwise), buffer(x, (k, m // 2), self.columnwise)
        row_scale = buffer(x, nvfp4_scale_shape(m, k, False), self.rowwise)
        col_scale = buffer(x, nvfp4_scale_shape(m, k, True), self.columnwise)
        row_amax, col_amax = (
            buffer(x, (len(groups.tiles),), is_needed, torch.float32)
            for is_needed in (self.rowwise, self.columnwise)
        )
        nvfp4_kernels.quantize(
            source,
            groups.tiles,
            **self.alone._options(),
            amax_value=amaxes,
            row=row,
            row_scale=row_scale,
            row_amax=row_amax,
            col=col,
            col_scale=col_scale,
            col_amax=col_amax,
        )
        return self.copies(row, row_scale, row_amax, col, col_scale, col_amax)

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        usages: dict[str, Any] = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        ends = self.groups.padded_ends.tolist()
        made = nvfp4_reference.quantize_groups(x, ends, **usages, **self.alone._options())
        return self.copies(*made)


# -- all formats ------------------------------------------------------------------


def quantizes_groups(quantizers: Sequence[Quantizer], groups: int) -> bool:
    """Whether all groups can be quantized in one launch.

    ``quantizers``: the quantizer of each group, or one for all of them.
    """
    if not quantizers:
        return False
    first = quantizers[0]
    if isinstance(first, Float8Quantizer):
        is_whole = all(type(q) is Float8Quantizer and q.saturates for q in quantizers)
        return len(quantizers) == groups and is_whole
    kinds = (Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer)
    return type(first) in kinds


def groups_quantizer(
    quantizers: Sequence[Quantizer], groups: PaddedGroups, *, rowwise: bool, columnwise: bool
) -> Quantizer:
    """The quantizer of the rows of padded groups, where :func:`quantizes_groups` is true."""
    first = quantizers[0]
    usages: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
    if isinstance(first, Float8CurrentScalingQuantizer):
        return Float8GroupsQuantizer(
            groups,
            first.fp8_dtype,
            force_pow_2_scales=first.force_pow_2_scales,
            amax_epsilon=first.amax_epsilon,
            **usages,
        )
    if isinstance(first, Float8Quantizer):
        states = [q for q in quantizers if isinstance(q, Float8Quantizer)]
        amaxes = tuple(q.amax for q in states if q.amax is not None)
        scales = tuple(q.scale for q in states)
        return Float8GroupsQuantizer(
            groups, first.fp8_dtype, scales=scales, amaxes=amaxes, **usages
        )
    if isinstance(first, NVFP4Quantizer):
        alone = first.with_usage(rowwise=True, columnwise=True)
        assert isinstance(alone, NVFP4Quantizer)
        return NVFP4GroupsQuantizer(groups, alone, **usages)
    return first.with_usage(**usages)  # blocks do not reach over the end of a tile
