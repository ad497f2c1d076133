"""NVFP4: 16 E2M1 elements share an E4M3 scale, and the tensor an fp32 scale."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch

from fuser.errors import InputError
from fuser.formats import NVFP4_BLOCK, DType, NumberFormat, nvfp4_scale_shape, padded_shape
from fuser.functional import nvfp4
from fuser.functional.lazy import LazyTensor
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
        back = inverse_hadamard_transform(turned, self._quantizer.with_random_sign_mask)
        return back.t().to(dtype).contiguous()


@dataclass(frozen=True)
class NVFP4Quantizer(Quantizer):
    """NVFP4: scales of 1x16 blocks, or 16x16 for weights.

    Parameters
    ----------
    fp4_dtype
        E2M1, the only element type.
    with_2d_quantization
        One scale for 16x16 elements.
    with_rht
        A 16-point random Hadamard transform on the columnwise copy, in fp32 and
        rounded to bf16 whatever the dtype.
    with_random_sign_mask
        Change signs before the transform (``formats.HADAMARD_SIGNS``).
    stochastic_rounding
        Round at random, so that the expected value is kept.
    seed
        Of the stochastic rounding; None draws one from torch's generator at every call.
    with_post_rht_amax
        Changes nothing: the amax of a transformed copy is that of its transformed values.
    row_scaled_activation, nvfp4_4over6
        Accepted as False.

    Raises
    ------
    InputError
        If ``fp4_dtype`` is another, or one of the last two is True.
    """

    fp4_dtype: InitVar[DType] = DType.kFloat4E2M1
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    with_2d_quantization: bool = field(default=False, kw_only=True)
    with_rht: bool = field(default=False, kw_only=True)
    with_random_sign_mask: bool = field(default=True, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    with_post_rht_amax: InitVar[bool] = field(default=False, kw_only=True)
    row_scaled_activation: InitVar[bool] = field(default=False, kw_only=True)
    nvfp4_4over6: InitVar[bool] = field(default=False, kw_only=True)

    tensor_class = NVFP4Tensor
    accepts_lazy = True

    def __post_init__(
        self,
        fp4_dtype: DType,
        with_post_rht_amax: bool,
        row_scaled_activation: bool,
        nvfp4_4over6: bool,
    ) -> None:
        if fp4_dtype is not DType.kFloat4E2M1:
            raise InputError(f"NVFP4 got fp4_dtype {fp4_dtype}; it has {DType.kFloat4E2M1} alone.")
        if row_scaled_activation:
            raise InputError(
                "NVFP4 got row_scaled_activation=True; in this version a tensor has one fp32 "
                "scale, and its rows have none of their own."
            )
        if nvfp4_4over6:
            raise InputError(
                "NVFP4 got nvfp4_4over6=True; in this version a block's largest value becomes 6, "
                "and 4 is not tried."
            )

    @functools.cached_property
    def format(self) -> NumberFormat:
        side = NVFP4_BLOCK if self.with_2d_quantization else 1
        return NumberFormat("NVFP4", DType.kFloat4E2M1, side * NVFP4_BLOCK, 1, NVFP4_BLOCK)

    @functools.cached_property
    def launch_key(self) -> Hashable | None:
        if self.stochastic_rounding and self.seed is None:
            return None  # a seed is drawn at every call, and launched with
        copies = (self.rowwise, self.columnwise)
        transform = (self.with_rht, self.with_random_sign_mask)
        rounding = (self.stochastic_rounding, self.seed)
        return "nvfp4", copies, self.with_2d_quantization, transform, rounding

    def encoding(self) -> tuple[Any, ...]:
        return (self.with_2d_quantization, self.with_rht, self.with_random_sign_mask)

    def buffers_of(self, rows: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
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
            random_signs=self.with_random_sign_mask,
            stochastic=self.stochastic_rounding,
            seed=seed,
        )
        values = (row, col, row_scale, col_scale, row_amax, col_amax)
        return dict(zip(NVFP4Tensor.buffer_names, values, strict=True))
