"""MXFP8: blocks of 32 elements share a power-of-two scale."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser.cuda import mxfp8 as kernels
from fuser.formats import (
    MXFP8_BLOCK,
    DType,
    NumberFormat,
    check_fp8_dtype,
    mxfp8_scale_shape,
    padded_shape,
)
from fuser.functional.lazy import LazyTensor, buffer, filled, matrix_of, source_of
from fuser.recipe import MXFP8BlockScaling, fp8_dtype
from fuser.reference import mxfp8 as reference
from fuser.tensors.base import BlockScaledTensor
from fuser.tensors.quantizer import Quantizer


class MXFP8Tensor(BlockScaledTensor):
    """MXFP8 bytes with E8M0 scales.

    Buffers: ``_rowwise_data`` and ``_columnwise_data`` [M, K] uint8, each quantized
    from the original values, M and K rounded up to multiples of 32;
    ``_rowwise_scale_inv`` and ``_columnwise_scale_inv``, E8M0 bytes in the shape of
    ``formats.mxfp8_scale_shape``.
    """

    has_independent_blocks = True
    _quantizer: MXFP8Quantizer

    def _layout(self, m: int, k: int) -> dict[str, tuple[int, ...]]:
        m, k = padded_shape(m, k, MXFP8_BLOCK)
        return {
            "_rowwise_data": (m, k),
            "_columnwise_data": (m, k),
            "_rowwise_scale_inv": mxfp8_scale_shape(m, k, columnwise=False),
            "_columnwise_scale_inv": mxfp8_scale_shape(m, k, columnwise=True),
        }

    def _row_units(self) -> dict[str, tuple[int, int]]:
        return {
            "_rowwise_data": (0, 1),
            "_columnwise_data": (0, 1),
            "_rowwise_scale_inv": (0, 1),
            "_columnwise_scale_inv": (0, MXFP8_BLOCK),
        }

    def _unpadded_columns(self, k: int) -> dict[str, int]:
        k = padded_shape(0, k, MXFP8_BLOCK)[1]
        return {"_rowwise_scale_inv": k // MXFP8_BLOCK, "_columnwise_scale_inv": k}

    def _is_transposable(self) -> bool:
        return False  # columnwise data is not transposed

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        data, scale, columnwise = self._one_copy()
        args = (data, scale, self._quantizer.fp8_dtype, dtype)
        out = torch.empty(data.shape, dtype=dtype, device=data.device)
        return filled(out, kernels.dequantize, reference.dequantize, *args, columnwise=columnwise)


@dataclass(frozen=True)
class MXFP8Quantizer(Quantizer):
    """MXFP8 (OCP MX): one scale for each 1x32 block rowwise and 32x1 block columnwise.

    Parameters
    ----------
    fp8_dtype
        E4M3 or E5M2.
    with_2d_quantization
        One scale for each block of 32x32 elements, for weights.
    """

    fp8_dtype: DType = DType.kFloat8E4M3
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    with_2d_quantization: bool = field(default=False, kw_only=True)

    tensor_class = MXFP8Tensor
    recipe_class = MXFP8BlockScaling
    multiple = MXFP8_BLOCK
    accepts_lazy = True

    def __post_init__(self) -> None:
        check_fp8_dtype("MXFP8Quantizer", self.fp8_dtype)

    @classmethod
    def of_recipe(cls, recipe: MXFP8BlockScaling, role: str) -> Quantizer:
        return cls(
            fp8_dtype(recipe.fp8_format, role),
            with_2d_quantization=recipe.enable_2d_quantization and role == "weight",
        )

    @functools.cached_property
    def format(self) -> NumberFormat:
        side = MXFP8_BLOCK if self.with_2d_quantization else 1
        return NumberFormat("MXFP8", self.fp8_dtype, side * MXFP8_BLOCK, 1, MXFP8_BLOCK)

    @functools.cached_property
    def launch_key(self) -> Hashable | None:
        return "mx", self.fp8_dtype, self.rowwise, self.columnwise, self.with_2d_quantization

    def encoding(self) -> tuple[Any, ...]:
        return (self.fp8_dtype, self.with_2d_quantization)

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        m, k = matrix_of(x)
        row, col = buffer(x, (m, k), self.rowwise), buffer(x, (m, k), self.columnwise)
        row_scale = buffer(x, mxfp8_scale_shape(m, k, False), self.rowwise)
        col_scale = buffer(x, mxfp8_scale_shape(m, k, True), self.columnwise)
        kernels.quantize(
            source_of(x),
            self.fp8_dtype,
            two_dimensional=self.with_2d_quantization,
            row=row,
            row_scale=row_scale,
            col=col,
            col_scale=col_scale,
        )
        return self.copies(row, row_scale, col, col_scale)

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return self.copies(
            *reference.quantize(
                x,
                self.fp8_dtype,
                rowwise=self.rowwise,
                columnwise=self.columnwise,
                two_dimensional=self.with_2d_quantization,
            )
        )
