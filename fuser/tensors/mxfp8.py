"""MXFP8: blocks of 32 elements share a power-of-two scale."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from fuser.cuda import mxfp8 as kernels
from fuser.formats import MXFP8, MXFP8_BLOCK, DType, NumberFormat, check_fp8_dtype
from fuser.functional.lazy import LazyTensor, source_of
from fuser.recipe import MXFP8BlockScaling, fp8_dtype
from fuser.reference import mxfp8 as reference
from fuser.tensors.base import BlockScaledTensor
from fuser.tensors.quantizer import Quantizer


class MXFP8Tensor(BlockScaledTensor, layout=MXFP8):
    """MXFP8 bytes with E8M0 scales.

    Buffers: ``_rowwise_data`` and ``_columnwise_data`` [M, K] uint8, each quantized
    from the original values, M and K rounded up to multiples of 32;
    ``_rowwise_scale_inv`` and ``_columnwise_scale_inv``, E8M0 bytes in the shapes of
    ``formats.MXFP8``.
    """

    _quantizer: MXFP8Quantizer
    _kernels, _reference = kernels, reference


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
    accepts_lazy = True
    is_repeatable = True

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
        return NumberFormat("MXFP8", self.fp8_dtype, MXFP8, side * MXFP8_BLOCK)

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        buffers = self.new_buffers(x)
        kernels.quantize(self.format, source_of(x), buffers)
        return buffers

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
