"""FP8 bytes, their scales, and the padding of scales, for all FP8 formats.

Each step is one fp32 operation, rounded to nearest.
"""

from __future__ import annotations

import math

import torch

from fuser.formats import DType

FLOAT32_MAX = torch.finfo(torch.float32).max


def scale_from_amax(
    amax: torch.Tensor,
    max_fp8: float,
    pow2: bool,
    eps: float,
    when_infinite: float = FLOAT32_MAX,
) -> torch.Tensor:
    """The scale that maps ``amax`` to ``max_fp8``, in fp32 and in amax's shape.

    ``scale = max_fp8 / max(amax, eps)``, and 1 where the amax is 0, infinite or NaN. A quotient
    that overflows becomes ``when_infinite``. ``pow2`` then rounds down to a power of two.
    """
    amax = amax.to(torch.float32)
    amax = torch.where(amax < eps, eps, amax)
    # torch computes a scalar over a tensor as scalar * (1 / tensor), which rounds twice.
    scale = torch.full_like(amax, max_fp8).div_(amax)
    scale = scale.masked_fill_(scale == math.inf, when_infinite)
    if pow2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where((amax > 0) & (amax < math.inf), scale, 1.0)


def encode(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """fp32 to FP8 bytes, to nearest and saturating; uint8 in x's shape. Overwrites ``x``.

    Infinities saturate too. Any NaN becomes 0x7F, the one NaN that the conversion instruction of
    the GPU writes; a CPU would keep its sign.
    """
    largest = dtype.max
    x.clamp_(-largest, largest).nan_to_num_(nan=math.nan)
    return x.to(dtype.torch_dtype).view(torch.uint8)


def decode(data: torch.Tensor, dtype: DType) -> torch.Tensor:
    """FP8 bytes to fp32, by a table: torch's conversion on a CPU is four times slower."""
    if not data.is_cpu:
        return data.view(dtype.torch_dtype).float()
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype.torch_dtype).float()
    return table.index_select(0, data.flatten().int()).view(data.shape)


def transpose(data: torch.Tensor) -> torch.Tensor:
    """``[M, K]`` bytes as ``[K, M]``, contiguous."""
    return data.t().clone(memory_format=torch.contiguous_format)


def padded(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``scale`` in the corner of zeros of ``shape``."""
    result = scale.new_zeros(shape)
    result[: scale.shape[0], : scale.shape[1]] = scale
    return result
