"""GroupedTensor: quantized groups of rows in one set of buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.errors import InputError
from fuser.formats import GROUP_TILE, round_up
from fuser.functional.grouped import PaddedGroups, padded_groups, padded_rows, unpad
from fuser.tensors.base import QuantizedTensor, fitted
from fuser.tensors.fp8 import Float8Tensor
from fuser.tensors.group_formats import (
    Float8GroupsTensor,
    NVFP4GroupsTensor,
    groups_quantizer,
    quantizes_groups,
)
from fuser.tensors.nvfp4 import NVFP4Tensor
from fuser.tensors.quantizer import Quantizer

_OF_GROUPS: dict[type[QuantizedTensor], type[QuantizedTensor]] = {
    Float8Tensor: Float8GroupsTensor,
    NVFP4Tensor: NVFP4GroupsTensor,
}
"""By class of a tensor, that of padded groups of such tensors; a tensor of blocks has its own."""


def can_be_joined(members: Sequence[torch.Tensor]) -> bool:
    """Whether :func:`joined` takes these tensors."""
    kind = type(members[0])
    if not issubclass(kind, QuantizedTensor):
        return False
    alike = [one for one in members if isinstance(one, QuantizedTensor) and type(one) is kind]
    if len(alike) < len(members) or not all(member.format.has_kernel for member in alike):
        return False
    return kind in _OF_GROUPS or kind.has_independent_blocks


def joined(members: Sequence[QuantizedTensor], usage: str) -> QuantizedTensor:
    """Tensors ``[N, K]`` of one format as padded groups ``[G N', K]``, with one copy of each.

    N' is N, rounded up to whole tiles of 128 rows. Bytes and scales are those of the members.
    """
    parts = [one_copy(member, usage) for member in members]
    kind = type(parts[0])
    return join(parts, _OF_GROUPS.get(kind, kind), parts[0]._quantizer.unbound())


def join(
    parts: Sequence[QuantizedTensor], kind: type[QuantizedTensor], quantizer: Quantizer
) -> QuantizedTensor:
    """Tensors ``[N, K]``, of several N, as padded groups: a ``kind`` with ``quantizer``."""
    first = parts[0]
    rows = [round_up(len(part), GROUP_TILE) for part in parts]
    result = kind({}, (sum(rows), first.shape[-1]), first.dtype, first.device, quantizer)
    of_groups, of_one = result._layout.rows, first._layout.rows
    for name, buffer in first.buffers().items():
        if buffer is None:
            continue
        dim, unit = of_groups[name]
        sizes = [n // unit for n in rows]
        buffers = [getattr(part, name) for part in parts]
        if name in of_one:
            buffers = [fitted(one, dim, size) for one, size in zip(buffers, sizes, strict=True)]
            setattr(result, name, torch.cat(buffers, dim))
        else:
            setattr(result, name, _for_tiles(buffers, sizes))
    return result


def one_copy(tensor: QuantizedTensor, usage: str) -> QuantizedTensor:
    """One copy of a tensor; quantized from its values, if it can be had in no other way."""
    if tensor._has(usage) or tensor.derives_columnwise:
        return tensor._present(usage).with_usage(usage).compact()
    usages = {name: name == usage for name in ("rowwise", "columnwise")}
    quantizer = tensor._quantizer.unbound().with_usage(**usages)
    quantized: QuantizedTensor = quantizer(tensor.dequantize())
    return quantized


def _for_tiles(numbers: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """A number ``[1]`` of each member, once for each of its ``counts`` tiles."""
    if len(set(counts)) == 1:  # in two launches, however many members there are
        of_tiles = torch.cat(list(numbers)).unsqueeze(1).expand(-1, counts[0])
        return of_tiles.contiguous().view(-1)  # flatten() of one member is a view of one number
    return torch.cat([one.expand(count) for one, count in zip(numbers, counts, strict=True)])


class GroupedTensor:
    """Quantized groups of rows ``[T, K]``, each with scales of its own, in one set of buffers.

    Each group is padded with zeros to whole tiles of 128 rows, so that no block of a format
    reaches over its end; :attr:`padded` holds that matrix. Rows after the last group belong to
    none, and are zeros when dequantized.
    """

    def __init__(self, padded: QuantizedTensor, groups: PaddedGroups, quantizer: Quantizer) -> None:
        self.padded = padded
        self.groups = groups
        self.quantizer = quantizer

    @classmethod
    def quantize(
        cls, x: torch.Tensor, split_sizes: torch.Tensor, quantizer: Quantizer | Sequence[Quantizer]
    ) -> GroupedTensor:
        """Quantize the groups of consecutive rows of ``x``.

        Parameters
        ----------
        x
            ``[T, K]``; fp32, fp16 or bf16.
        split_sizes
            Integers ``[G]``: the number of rows of each group. They are not read on the host;
            sizes below zero count as zero, and groups end at the last row.
        quantizer
            Of all groups; or one for each, which delayed scaling needs.

        Raises
        ------
        InputError
            If ``x`` is not a matrix, or the format has no quantizer of groups, as FP8 with a scale
            for each row.
        """
        if x.dim() != 2 or split_sizes.dim() != 1:
            raise InputError(
                f"GroupedTensor.quantize got a tensor of shape {tuple(x.shape)} and split sizes of "
                f"shape {tuple(split_sizes.shape)}; it takes a matrix and a vector."
            )
        quantizers = [quantizer] if isinstance(quantizer, Quantizer) else list(quantizer)
        frozen = [one.value() for one in quantizers]
        if any(getattr(one, "with_amax_reduction", False) for one in quantizers):
            raise InputError(
                "GroupedTensor.quantize reduces no amaxes over a process group."
                " Quantize each group by its quantizer."
            )
        sizes = split_sizes.to(x.device, non_blocking=True)
        groups = padded_groups(sizes, len(sizes), x.shape[0], x.device)
        first = frozen[0]
        if not quantizes_groups(frozen, len(sizes)):
            raise InputError(
                f"{type(first).__name__} quantizes no groups in one launch, in {first.format}: "
                "current and delayed scaling, FP8 in blocks of 128, MXFP8 and NVFP4 with one scale "
                f"do; delayed scaling takes a quantizer for each of the {len(sizes)} groups."
            )
        usages = {"rowwise": first.rowwise, "columnwise": first.columnwise}
        of_groups = groups_quantizer(frozen, groups, **usages)
        return cls(of_groups(padded_rows(x, groups)), groups, first)

    @property
    def shape(self) -> torch.Size:
        """``[T, K]``."""
        return torch.Size((self.groups.rows, self.padded.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype before quantization."""
        return self.padded.dtype

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self.padded.device

    def __repr__(self) -> str:
        return (
            f"GroupedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"groups={len(self.groups.ends)}, {self.quantizer})"
        )

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values ``[T, K]`` in ``dtype`` or else the nominal dtype; zeros after the last group.

        Does not read the split sizes on the host.
        """
        return unpad(self.padded.dequantize(dtype=dtype), self.groups)

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """As :meth:`QuantizedTensor.update_usage`."""
        self.padded.update_usage(rowwise_usage, columnwise_usage)

    def members(self) -> list[QuantizedTensor]:
        """Each group as a quantized tensor of its own, with copies of its bytes and scales.

        Waits for the device: the shapes depend on the split sizes.
        """
        ends, padded_ends = (torch.stack(self.groups[:2])).tolist()
        starts = [0, *ends[:-1]]
        firsts = [0, *padded_ends[:-1]]
        return [
            self._member(first, end - start)
            for first, start, end in zip(firsts, starts, ends, strict=True)
        ]

    def _member(self, first: int, rows: int) -> QuantizedTensor:
        """The group of ``rows`` rows that starts at row ``first`` of the padded matrix."""
        padded, quantizer = self.padded, self.quantizer.unbound()
        empty: QuantizedTensor = quantizer.tensor_class({}, (rows, padded.shape[-1]))
        empty._quantizer = quantizer
        layout, units = empty._layout.shapes(rows, padded.shape[-1]), padded._layout.rows
        buffers: dict[str, torch.Tensor | None] = {}
        stored = round_up(rows, quantizer.multiple)
        for name, whole in padded.buffers().items():
            if whole is None:
                buffers[name] = None
                continue
            dim, unit = units[name]
            part = whole.new_zeros(layout[name])
            count = min(-(-stored // unit), part.shape[dim])
            part.narrow(dim, 0, count).copy_(whole.narrow(dim, first // unit, count))
            buffers[name] = part
        return quantizer.tensor_class(
            buffers, (rows, padded.shape[-1]), padded.dtype, padded.device, quantizer
        )
