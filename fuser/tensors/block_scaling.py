"""FP8 block scaling: one fp32 scale for each block of 1x128 or 128x128 elements."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser.cuda import block_scaling as kernels
from fuser.formats import (
    FP8_BLOCK,
    BlockScalingDim,
    DType,
    NumberFormat,
    ceil_div,
    check_fp8_dtype,
    fp8_block_scale_shape,
)
from fuser.functional.lazy import LazyTensor, buffer, filled, matrix_of, source_of
from fuser.recipe import Float8BlockScaling, fp8_dtype, role_params
from fuser.reference import block_scaling as reference
from fuser.tensors.base import BlockScaledTensor
from fuser.tensors.fp8 import transposed_bytes
from fuser.tensors.quantizer import Quantizer


class Float8BlockwiseQTensor(BlockScaledTensor):
    """FP8 bytes with one fp32 scale for each block of 128 or 128x128 elements.

    Buffers: ``_rowwise_data`` [M, K] and ``_columnwise_data`` [K, M] uint8;
    ``_rowwise_scale_inv`` and ``_columnwise_scale_inv``, fp32, in the shape of
    ``formats.fp8_block_scale_shape``.
    """

    has_independent_blocks = True
    _quantizer: Float8BlockQuantizer

    def _layout(self, m: int, k: int) -> dict[str, tuple[int, ...]]:
        block_dim = self._quantizer.block_scaling_dim
        return {
            "_rowwise_data": (m, k),
            "_columnwise_data": (k, m),
            "_rowwise_scale_inv": fp8_block_scale_shape(m, k, False, block_dim),
            "_columnwise_scale_inv": fp8_block_scale_shape(m, k, True, block_dim),
        }

    def _row_units(self) -> dict[str, tuple[int, int]]:
        is_1d = self._quantizer.block_scaling_dim == 1
        return {
            "_rowwise_data": (0, 1),
            "_columnwise_data": (1, 1),
            "_rowwise_scale_inv": (1, 1) if is_1d else (0, FP8_BLOCK),
            "_columnwise_scale_inv": (0, FP8_BLOCK) if is_1d else (1, FP8_BLOCK),
        }

    def _unpadded_columns(self, k: int) -> dict[str, int]:
        if self._quantizer.block_scaling_dim == 1:
            return {"_columnwise_scale_inv": k}
        return {"_rowwise_scale_inv": ceil_div(k, FP8_BLOCK)}

    def _is_transposable(self) -> bool:
        return self._quantizer.block_scaling_dim == 2

    @property
    def derives_columnwise(self) -> bool:
        return self._is_transposable()

    def derive(
        self, usage: str, source: dict[str, torch.Tensor | None], out: dict[str, torch.Tensor]
    ) -> None:
        data_name, scale_name = self._names(usage)
        others = self._names("columnwise" if usage == "rowwise" else "rowwise")
        data, scale = (source[name] for name in others)
        assert data is not None
        assert scale is not None
        transposed_bytes(data, out[data_name])
        columns = ceil_div(data.shape[1], FP8_BLOCK)  # the rest is padding
        target = out[scale_name].zero_()
        target[:, : len(scale)].copy_(scale[:, :columns].t())

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        data, scale, columnwise = self._one_copy()
        quantizer = self._quantizer
        shape = data.shape[::-1] if columnwise else data.shape
        return filled(
            torch.empty(shape, dtype=dtype, device=data.device),
            kernels.dequantize,
            reference.dequantize,
            *(data, scale, quantizer.fp8_dtype, dtype),
            block_dim=quantizer.block_scaling_dim,
            columnwise=columnwise,
        )


@dataclass(frozen=True)
class Float8BlockQuantizer(Quantizer):
    """FP8 with one scale for each block of 1x128 (1D) or 128x128 elements (2D).

    Parameters
    ----------
    fp8_dtype
        E4M3 or E5M2.
    amax_epsilon
        Lower bound of the amax from which a scale is computed.
    force_pow_2_scales
        Round scales down to powers of two.
    block_scaling_dim
        1 for activations and gradients, 2 for weights.
    """

    fp8_dtype: DType = DType.kFloat8E4M3
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    amax_epsilon: float = field(default=0.0, kw_only=True)
    force_pow_2_scales: bool = field(default=True, kw_only=True)
    block_scaling_dim: BlockScalingDim = field(default=2, kw_only=True)

    tensor_class = Float8BlockwiseQTensor
    recipe_class = Float8BlockScaling
    accepts_lazy = True

    def __post_init__(self) -> None:
        check_fp8_dtype("Float8BlockQuantizer", self.fp8_dtype)

    @classmethod
    def of_recipe(cls, recipe: Float8BlockScaling, role: str) -> Quantizer:
        params = role_params(recipe, role)
        dims = {
            "input": recipe.x_block_scaling_dim,
            "weight": recipe.w_block_scaling_dim,
            "grad_output": recipe.grad_block_scaling_dim,
        }
        return cls(
            fp8_dtype(recipe.fp8_format, role),
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
            block_scaling_dim=dims[role],
        )

    @functools.cached_property
    def format(self) -> NumberFormat:
        if self.block_scaling_dim == 1:
            return NumberFormat("FP8 1x128", self.fp8_dtype, FP8_BLOCK)
        return NumberFormat("FP8 128x128", self.fp8_dtype, FP8_BLOCK * FP8_BLOCK)

    @functools.cached_property
    def launch_key(self) -> Hashable | None:
        scales = (self.block_scaling_dim, self.force_pow_2_scales, self.amax_epsilon)
        return "block", self.fp8_dtype, self.rowwise, self.columnwise, *scales

    def encoding(self) -> tuple[Any, ...]:
        return (self.fp8_dtype, self.block_scaling_dim)

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        m, k = matrix_of(x)
        row_shape, col_shape = (
            fp8_block_scale_shape(m, k, columnwise, self.block_scaling_dim)
            for columnwise in (False, True)
        )
        row, col = buffer(x, (m, k), self.rowwise), buffer(x, (k, m), self.columnwise)
        row_scale_inv = buffer(x, row_shape, self.rowwise, torch.float32)
        col_scale_inv = buffer(x, col_shape, self.columnwise, torch.float32)
        kernels.quantize(
            source_of(x),
            self.fp8_dtype,
            block_dim=self.block_scaling_dim,
            pow2=self.force_pow_2_scales,
            eps=self.amax_epsilon,
            row=row,
            row_scale_inv=row_scale_inv,
            col=col,
            col_scale_inv=col_scale_inv,
        )
        return self.copies(row, row_scale_inv, col, col_scale_inv)

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return self.copies(
            *reference.quantize(
                x,
                self.fp8_dtype,
                block_dim=self.block_scaling_dim,
                rowwise=self.rowwise,
                columnwise=self.columnwise,
                pow2=self.force_pow_2_scales,
                eps=self.amax_epsilon,
            )
        )
