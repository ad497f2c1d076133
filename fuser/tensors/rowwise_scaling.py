"""FP8 with one scale for each row: of the tensor in one copy, of its transpose in the other."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser.cuda import rowwise_scaling as kernels
from fuser.formats import DType, NumberFormat, check_fp8_dtype
from fuser.functional.lazy import (
    LazyTensor,
    buffer,
    filled,
    matrix_of,
    rows_of,
    source_of,
)
from fuser.recipe import Float8RowwiseScaling, fp8_dtype, role_params
from fuser.reference import rowwise_scaling as reference
from fuser.tensors.base import BlockScaledTensor
from fuser.tensors.quantizer import Quantizer


class Float8RowwiseTensor(BlockScaledTensor):
    """FP8 bytes with one fp32 scale for each row of a copy.

    Buffers: ``_rowwise_data`` [M, K] and ``_columnwise_data`` [K, M] uint8;
    ``_rowwise_scale_inv`` [M] and ``_columnwise_scale_inv`` [K], fp32. Each copy is quantized from
    the original values, so neither is the other's transpose.
    """

    has_independent_blocks = False  # a scale of the columnwise copy is of all rows
    _quantizer: Float8RowwiseQuantizer

    def _layout(self, m: int, k: int) -> dict[str, tuple[int, ...]]:
        return {
            "_rowwise_data": (m, k),
            "_columnwise_data": (k, m),
            "_rowwise_scale_inv": (m,),
            "_columnwise_scale_inv": (k,),
        }

    def _row_units(self) -> dict[str, tuple[int, int]]:
        return {"_rowwise_data": (0, 1), "_columnwise_data": (1, 1), "_rowwise_scale_inv": (0, 1)}

    def _is_transposable(self) -> bool:
        return False

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        data, scale, columnwise = self._one_copy()
        shape = data.shape[::-1] if columnwise else data.shape
        return filled(
            torch.empty(shape, dtype=dtype, device=data.device),
            kernels.dequantize,
            reference.dequantize,
            *(data, scale, self._quantizer.fp8_dtype, dtype),
            columnwise=columnwise,
        )


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
    reduces_scales = True

    def __post_init__(self) -> None:
        check_fp8_dtype("Float8RowwiseQuantizer", self.fp8_dtype)

    @classmethod
    def of_recipe(cls, recipe: Float8RowwiseScaling, role: str) -> Quantizer:
        params = role_params(recipe, role)
        return cls(
            fp8_dtype(recipe.fp8_format, role),
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
        )

    @functools.cached_property
    def format(self) -> NumberFormat:
        return NumberFormat("FP8 rowwise", self.fp8_dtype, has_row_scales=True)

    @functools.cached_property
    def launch_key(self) -> Hashable | None:
        if self.reduced_amaxes is not None:
            return None
        scales = (self.force_pow_2_scales, self.amax_epsilon)
        return "rowwise", self.fp8_dtype, self.rowwise, self.columnwise, *scales

    def encoding(self) -> tuple[Any, ...]:
        return (self.fp8_dtype,)

    def amaxes_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Those of columns, for their copy."""
        if not self.columnwise:
            return None
        return rows.abs().amax(0).float() if len(rows) else rows.new_zeros(rows.shape[1]).float()

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        (m, k), col_amax = matrix_of(x), self.reduced_amaxes
        if isinstance(x, torch.Tensor):
            x = rows_of(x)  # once, though it is read twice
        row, col = buffer(x, (m, k), self.rowwise), buffer(x, (k, m), self.columnwise)
        row_scale_inv = buffer(x, (m,), self.rowwise, torch.float32)
        col_scale_inv = buffer(x, (k,), self.columnwise, torch.float32)
        is_given = col_amax is not None
        row_amax, own_col_amax = (
            torch.zeros(size, dtype=torch.float32, device=x.device) if is_needed else None
            for size, is_needed in ((m, self.rowwise), (k, self.columnwise and not is_given))
        )
        source = source_of(x)
        if self.rowwise or not is_given:
            kernels.amaxes(source, row_amax=row_amax, col_amax=own_col_amax)
        kernels.quantize(
            source,
            self.fp8_dtype,
            pow2=self.force_pow_2_scales,
            eps=self.amax_epsilon,
            row_amax=row_amax,
            row=row,
            row_scale_inv=row_scale_inv,
            col_amax=col_amax if is_given else own_col_amax,
            col=col,
            col_scale_inv=col_scale_inv,
        )
        return self.copies(row, row_scale_inv, col, col_scale_inv)

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
