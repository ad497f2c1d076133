"""Stacks of matrices in one quantized tensor ``[G, N, K]``, such as the weights of all experts.

Each matrix has the bytes and scales of a tensor of its own. N is a multiple of 128, so that no
block of a format reaches over the end of a matrix: formats of blocks need no class of their own.
Tensors of formats with one scale for a tensor are those of groups (``group_formats.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from fuser.cuda.launch import kernels_support
from fuser.errors import InputError
from fuser.formats import GROUP_TILE
from fuser.functional.grouped import padded_groups, padded_rows
from fuser.functional.lazy import LazyTensor, materialize, matrix_of
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.fp8 import Float8CurrentScalingQuantizer
from fuser.tensors.group_formats import Float8GroupsTensor, NVFP4GroupsTensor, groups_quantizer
from fuser.tensors.grouped import join
from fuser.tensors.nvfp4 import NVFP4Quantizer
from fuser.tensors.quantizer import Quantizer


class _StackQuantizer(Quantizer):
    """Base of the quantizers of stacks; the other base is the quantizer of one matrix."""

    of_one: ClassVar[type[Quantizer]]
    accepts_lazy = True
    reduces_scales = False
    amaxes_of = Quantizer.amaxes_of  # None: a rank has whole matrices

    def alone(self) -> Quantizer:
        """The quantizer of one matrix."""
        options = {one.name: getattr(self, one.name) for one in fields(self.of_one)}
        return self.of_one(**options)

    def encoding(self) -> tuple[object, ...]:
        return (*super().encoding(), self.stacked_rows)

    def of_view(self, root: Quantizer, start: int) -> Quantizer:
        """Of tiles if the view cuts its first matrix: the scales of its rows may differ."""
        if start % root.stacked_rows == 0:
            return root
        return replace(self, stacked_rows=GROUP_TILE)  # type: ignore[call-arg]

    def buffers_of(self, rows: Any) -> dict[str, torch.Tensor | None]:
        """As in the base class, of a multiple of 128 rows; the last matrix may have fewer rows."""
        into = rows.buffers if isinstance(rows, LazyTensor) else None
        rows = materialize(rows).view(matrix_of(rows))
        count, size = rows.shape[0], self.stacked_rows
        if count % GROUP_TILE:
            raise InputError(
                f"{type(self).__name__}, of matrices of {size} rows, got {count} rows; it takes a "
                f"multiple of {GROUP_TILE}."
            )
        alone = self.alone()
        if not count or count % size or not kernels_support(rows):
            parts = [alone(part) for part in torch.split(rows, size)]
            return join(parts, self.tensor_class, self).buffers()
        groups = padded_groups(size, count // size, count, rows.device)
        usages = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        padded = padded_rows(rows, groups)
        if isinstance(padded, LazyTensor):
            padded.buffers = into
        return groups_quantizer([alone], groups, **usages).buffers_of(padded)


@dataclass(frozen=True)
class Float8StackQuantizer(_StackQuantizer, Float8CurrentScalingQuantizer):
    """FP8 of stacked matrices of ``stacked_rows`` rows, each with the scale of its own amax."""

    stacked_rows: int = field(default=GROUP_TILE, kw_only=True)  # type: ignore[misc]

    of_one = Float8CurrentScalingQuantizer
    tensor_class = Float8GroupsTensor


@dataclass(frozen=True)
class NVFP4StackQuantizer(_StackQuantizer, NVFP4Quantizer):
    """NVFP4 of stacked matrices of ``stacked_rows`` rows, each with the scale of its own amax."""

    stacked_rows: int = field(default=GROUP_TILE, kw_only=True)  # type: ignore[misc]

    of_one = NVFP4Quantizer
    tensor_class = NVFP4GroupsTensor


_STACKS: dict[type[Quantizer], Any] = {
    each.of_one: each for each in (Float8StackQuantizer, NVFP4StackQuantizer)
}


def stack_quantizer(alone: Quantizer, rows: int) -> Quantizer | None:
    """The quantizer of stacked matrices of ``rows`` rows, each quantized as ``alone`` does.

    None if the format has none, as delayed scaling, or no kernel, or if ``rows`` is not a multiple
    of 128.
    """
    alone = alone.value()
    if rows % GROUP_TILE or not alone.format.has_kernel:
        return None
    if alone.is_of_blocks:
        return alone
    kind = _STACKS.get(type(alone))
    if kind is None:
        return None
    options = {one.name: getattr(alone, one.name) for one in fields(kind.of_one)}
    quantizer: Quantizer = kind(**options, stacked_rows=rows)
    return quantizer


def is_stack(weights: Sequence[QuantizedTensor]) -> bool:
    """Whether these are one ``[G, N, K]`` whose matrices are quantized alone, as padded groups."""
    (stack,) = weights
    rows, quantizer = stack.shape[-2], stack._quantizer
    if quantizer.is_of_blocks:
        return rows % GROUP_TILE == 0
    return bool(quantizer.stacked_rows == rows)


def matrices(stack: torch.Tensor, usage: str | None = None) -> list[torch.Tensor]:
    """The matrices ``[N, K]`` of a tensor ``[G, N, K]``, in their own format; they share memory.

    Of a gathered parameter they have the copies that are in memory now; a backward makes sure of
    ``usage``, if the stack has it. A matrix whose rows cut blocks of the format is a view that is
    dequantized when it is read.
    """
    assert isinstance(stack, QuantizedTensor)
    present = stack._present(usage if usage is not None and stack._has(usage) else None)
    return [_alone(matrix) for matrix in present.detach().unbind()]


def _alone(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix of a stack with the one scale that it has, in place of one for each 128 rows."""
    quantizer = getattr(matrix, "_quantizer", None)
    if not isinstance(quantizer, _StackQuantizer):
        return matrix
    assert isinstance(matrix, QuantizedTensor)
    one = quantizer.alone()
    result = one.tensor_class(
        {}, matrix.shape, matrix.dtype, matrix.device, one, view_of=matrix._view_of
    )
    rows_of_result, of_stack = result._layout.rows, matrix._layout.rows
    for name, buffer in matrix.buffers().items():
        is_shared = buffer is not None and name in of_stack and name not in rows_of_result
        setattr(result, name, buffer[:1] if is_shared else buffer)  # type: ignore[index]
    result._is_read_only = True
    result._gathering = matrix._gathering
    return result
