"""FP8 block scaling: one fp32 scale for each block of 1x128 or 128x128 elements."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from fuser.cuda import block_scaling as kernels
from fuser.doors import OfProduct
from fuser.formats import (
    FP8_BLOCK,
    FP8_BLOCKS,
    BlockScalingDim,
    DType,
    NumberFormat,
    ceil_div,
    check_fp8_dtype,
    fp8_blocks,
)
from fuser.functional.lazy import LazyTensor, source_of
from fuser.recipe import Float8BlockScaling, fp8_options
from fuser.reference import block_scaling as reference
from fuser.tensors.base import BlockScaledTensor
from fuser.tensors.fp8 import transposed_bytes
from fuser.tensors.quantizer import Quantizer


class Float8BlockwiseQTensor(BlockScaledTensor, layout=FP8_BLOCKS[1]):
    """FP8 bytes with one fp32 scale for each block of 128 or 128x128 elements.

    Buffers: ``_rowwise_data`` [M, K] and ``_columnwise_data`` [K, M] uint8;
    ``_rowwise_scale_inv`` and ``_columnwise_scale_inv``, fp32, in the shapes of
    ``formats.FP8_BLOCKS``.
    """

    _quantizer: Float8BlockQuantizer
    _kernels, _reference = kernels, reference
    _is_2D_scaled = OfProduct("fuser.te.tensors")

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
        how = self._quantizer
        return self._dequantized(dtype, how.fp8_dtype, block_dim=how.block_scaling_dim)


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
    is_repeatable = True

    def __post_init__(self) -> None:
        check_fp8_dtype("Float8BlockQuantizer", self.fp8_dtype)

    @classmethod
    def of_recipe(cls, recipe: Float8BlockScaling, role: str) -> Quantizer:
        dims = {
            "input": recipe.x_block_scaling_dim,
            "weight": recipe.w_block_scaling_dim,
            "grad_output": recipe.grad_block_scaling_dim,
        }
        return cls(**fp8_options(recipe, role), block_scaling_dim=dims[role])

    @functools.cached_property
    def format(self) -> NumberFormat:
        layout, is_1d = fp8_blocks(self.block_scaling_dim), self.block_scaling_dim == 1
        name, size = ("FP8 1x128", FP8_BLOCK) if is_1d else ("FP8 128x128", FP8_BLOCK**2)
        return NumberFormat(name, self.fp8_dtype, layout, size)

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        buffers, pow2 = self.new_buffers(x), self.force_pow_2_scales
        kernels.quantize(self.format, source_of(x), buffers, pow2=pow2, eps=self.amax_epsilon)
        return buffers

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
