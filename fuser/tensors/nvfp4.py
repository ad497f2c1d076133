"""NVFP4: 16 E2M1 elements share an E4M3 scale, and the tensor an fp32 scale."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser.formats import NVFP4_BLOCK, DType, NumberFormat, nvfp4_scale_shape, padded_shape
from fuser.functional import nvfp4
from fuser.functional.values import Values
from fuser.reference.nvfp4 import inverse_hadamard_transform
from fuser.tensors.base import BlockScaledTensor
from fuser.tensors.quantizer import Quantizer, whole_blocks


class NVFP4Tensor(BlockScaledTensor):
    """E2M1 pairs with E4M3 block scales and the tensor's amax.

    Buffers: ``_rowwise_data`` [M, K / 2] and ``_columnwise_data`` [K, M / 2]
    uint8, low nibble first, M and K rounded up to multiples of 16;
    ``_rowwise_scale_inv`` and ``_columnwise_scale_inv``, E4M3 bytes padded as
    ``formats.nvfp4_scale_shape`` says; ``_amax_rowwise`` and
    ``_amax_columnwise`` [1] fp32.
    """

    buffer_names = (*BlockScaledTensor.buffer_names, "_amax_rowwise", "_amax_columnwise")
    rowwise_names = (*BlockScaledTensor.rowwise_names, "_amax_rowwise")
    columnwise_names = (*BlockScaledTensor.columnwise_names, "_amax_columnwise")
    has_independent_blocks = False  # one amax for all
    _amax_rowwise: torch.Tensor | None
    _amax_columnwise: torch.Tensor | None
    _quantizer: NVFP4Quantizer

    def _layout(self, m: int, k: int) -> dict[str, tuple[int, ...]]:
        m, k = padded_shape(m, k, NVFP4_BLOCK)
        return {
            "_rowwise_data": (m, k // 2),
            "_columnwise_data": (k, m // 2),
            "_rowwise_scale_inv": nvfp4_scale_shape(m, k, columnwise=False),
            "_columnwise_scale_inv": nvfp4_scale_shape(m, k, columnwise=True),
            "_amax_rowwise": (1,),
            "_amax_columnwise": (1,),
        }

    def _row_units(self) -> dict[str, tuple[int, int]]:
        return {
            "_rowwise_data": (0, 1),
            "_columnwise_data": (1, 2),
            "_rowwise_scale_inv": (0, 1),
            "_columnwise_scale_inv": (1, NVFP4_BLOCK),
        }

    def _is_transposable(self) -> bool:
        how = self._quantizer
        return how.with_2d_quantization and not (how.with_rht or how.stochastic_rounding)

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        data, scale, columnwise = self._one_copy()
        amax = self._amax_columnwise if columnwise else self._amax_rowwise
        assert amax is not None
        if not (columnwise and self._quantizer.with_rht):
            return nvfp4.dequantize(data, scale, amax, dtype, columnwise=columnwise)
        turned = nvfp4.dequantize(data, scale, amax, torch.float32, columnwise=True).t()
        return inverse_hadamard_transform(turned).t().to(dtype).contiguous()


@dataclass(frozen=True)
class NVFP4Quantizer(Quantizer):
    """NVFP4: scales of 1x16 blocks, or 16x16 for weights.

    Parameters
    ----------
    with_2d_quantization
        One scale for 16x16 elements.
    with_rht
        A 16-point random Hadamard transform on the columnwise copy.
    stochastic_rounding
        Round at random, so that the expected value is kept.
    seed
        Of the stochastic rounding; None draws one from torch's generator at every call.
    """

    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    with_2d_quantization: bool = field(default=False, kw_only=True)
    with_rht: bool = field(default=False, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)

    tensor_class = NVFP4Tensor
    takes_values = True

    @functools.cached_property
    def format(self) -> NumberFormat:
        side = NVFP4_BLOCK if self.with_2d_quantization else 1
        return NumberFormat("NVFP4", DType.kFloat4E2M1, side * NVFP4_BLOCK, 1, NVFP4_BLOCK)

    def encoding(self) -> tuple[Any, ...]:
        return (self.with_2d_quantization, self.with_rht)

    def buffers_of(self, rows: torch.Tensor | Values) -> dict[str, torch.Tensor | None]:
        padded = whole_blocks(rows, NVFP4_BLOCK)
        if padded is not None:
            return self._buffers(padded)
        seed = 0
        if self.stochastic_rounding:
            seed = int(torch.randint(2**31, (), device="cpu")) if self.seed is None else self.seed
        row, row_scale, row_amax, col, col_scale, col_amax = nvfp4.quantize(
            rows,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
            two_dimensional=self.with_2d_quantization,
            hadamard=self.with_rht,
            stochastic=self.stochastic_rounding,
            seed=seed,
        )
        values = (row, col, row_scale, col_scale, row_amax, col_amax)
        return dict(zip(NVFP4Tensor.buffer_names, values, strict=True))
