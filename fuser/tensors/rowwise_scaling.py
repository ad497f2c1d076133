"""FP8 with one scale for each row: of the tensor in one copy, of its transpose in the other."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from fuser.cuda import rowwise_scaling as kernels
from fuser.formats import FP8_ROWS, DType, NumberFormat, check_fp8_dtype
from fuser.functional.lazy import LazyTensor, matrix_of, rows_of, source_of
from fuser.recipe import Float8RowwiseScaling, fp8_options
from fuser.reference import rowwise_scaling as reference
from fuser.tensors.base import BlockScaledTensor
from fuser.tensors.quantizer import Quantizer


class Float8RowwiseTensor(BlockScaledTensor, layout=FP8_ROWS):
    """FP8 bytes with one fp32 scale for each row of a copy.

    Buffers: ``_rowwise_data`` [M, K] and ``_columnwise_data`` [K, M] uint8;
    ``_rowwise_scale_inv`` [M] and ``_columnwise_scale_inv`` [K], fp32. Each copy is quantized from
    the original values, so neither is the other's transpose.
    """

    _quantizer: Float8RowwiseQuantizer
    _kernels, _reference = kernels, reference


@dataclass(frozen=True)
class Float8RowwiseQuantizer(Quantizer):
    """FP8 with a scale for each row of a copy, from the amax of that row.

    Parameters
    ----------
    fp8_dtype
        E4M3 or E5M2.
    force_pow_2_scales
        Round scales down to powers of two.
    amax_epsilon
        A smaller amax counts as this.
    """

    fp8_dtype: DType = DType.kFloat8E4M3
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    force_pow_2_scales: bool = field(default=False, kw_only=True)
    amax_epsilon: float = field(default=0.0, kw_only=True)

    tensor_class = Float8RowwiseTensor
    recipe_class = Float8RowwiseScaling
    accepts_lazy = True
    is_repeatable = True
    reduces_scales = True

    def __post_init__(self) -> None:
        check_fp8_dtype("Float8RowwiseQuantizer", self.fp8_dtype)

    @classmethod
    def of_recipe(cls, recipe: Float8RowwiseScaling, role: str) -> Quantizer:
        return cls(**fp8_options(recipe, role))

    @functools.cached_property
    def format(self) -> NumberFormat:
        return NumberFormat("FP8 rowwise", self.fp8_dtype, FP8_ROWS)

    def amaxes_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Those of columns, for their copy."""
        if not self.columnwise:
            return None
        return (
            rows.abs().amax(0).float() if rows.shape[0] else rows.new_zeros(rows.shape[1]).float()
        )

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        buffers, (m, k), reduced = self.new_buffers(x), matrix_of(x), self.reduced_amaxes
        if isinstance(x, torch.Tensor):
            x = rows_of(x)  # once, though it is read twice
        row_amax, col_amax = (
            torch.zeros(size, dtype=torch.float32, device=x.device) if is_needed else None
            for size, is_needed in ((m, self.rowwise), (k, self.columnwise and reduced is None))
        )
        source = source_of(x)
        if self.rowwise or reduced is None:
            kernels.amaxes(source, row_amax=row_amax, col_amax=col_amax)
        kernels.quantize(
            self.format,
            source,
            buffers,
            pow2=self.force_pow_2_scales,
            eps=self.amax_epsilon,
            row_amax=row_amax,
            col_amax=col_amax if reduced is None else reduced,
        )
        return buffers

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return self.copies(
            *reference.quantize(
                x,
                self.fp8_dtype,
                rowwise=self.rowwise,
                columnwise=self.columnwise,
                pow2=self.force_pow_2_scales,
                eps=self.amax_epsilon,
                col_amax=self.reduced_amaxes,
            )
        )
