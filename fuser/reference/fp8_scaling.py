"""FP8 with one scale a tensor, in plain torch: current and delayed scaling.

Data is uint8 and holds E4M3 or E5M2; ``scale_inv`` is fp32. A tensor ``[M, K]`` has rowwise data
``[M, K]`` and columnwise data ``[K, M]``: the transpose of the same bytes, under the same scale.
Formulas are those of Micikevicius et al., "FP8 Formats for Deep Learning" (2022), with the
rounding of every step fixed: each is one fp32 operation, rounded to nearest.
"""

from __future__ import annotations

import math

import torch

from fuser.errors import InputError
from fuser.formats import GROUP_TILE, DType
from fuser.reference.fp8 import FLOAT32_MAX, decode, encode, scale_from_amax, transpose


def amax(x: torch.Tensor) -> torch.Tensor:
    """``max |x|`` as fp32 ``[1]``: 0 for an empty tensor, NaN where one element is."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float().reshape(1)


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: DType) -> torch.Tensor:
    """``RNE_satfinite(fp32(x) * scale)``: uint8 in x's shape; ``scale`` is fp32 and broadcasts."""
    return encode(x.float() * scale, dtype).contiguous()


def quantize_current(
    x: torch.Tensor,
    dtype: DType,
    *,
    pow2: bool = False,
    eps: float = 0.0,
    rowwise: bool = True,
    columnwise: bool = True,
    amax_value: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Quantize ``x [M, K]`` with the scale of its own amax.

    ``amax_value`` (fp32 ``[1]``) replaces that amax if a group of processes has reduced it. Returns
    row, col, scale_inv: data ``[M, K]`` and ``[K, M]`` (None if not requested), and fp32 ``[1]``.
    """
    largest = amax(x) if amax_value is None else amax_value.reshape(1)
    scale = scale_from_amax(largest, dtype.max, pow2, eps)
    row, col = _cast_both(x, scale, dtype, rowwise, columnwise)
    return row, col, scale.reciprocal()


def quantize_delayed(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: DType,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Quantize ``x [M, K]`` with a ``scale`` (fp32 ``[1]``) from earlier steps.

    Returns row, col, scale_inv, amax: data ``[M, K]`` and ``[K, M]`` (None if not requested), and
    fp32 ``[1]`` each; ``amax`` is measured before scaling, for :func:`update_delayed`.
    """
    row, col = _cast_both(x, scale, dtype, rowwise, columnwise)
    return row, col, scale.reciprocal(), amax(x)


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: DType, out_dtype: torch.dtype
) -> torch.Tensor:
    """``data * scale_inv`` in fp32, rounded once to ``out_dtype``; in data's shape."""
    return (decode(data, dtype) * scale_inv).to(out_dtype)


def dequantize_groups(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: DType,
    out_dtype: torch.dtype,
    *,
    columnwise: bool,
) -> torch.Tensor:
    """As :func:`dequantize`, with a scale of each 128 rows; ``[M, K]``.

    Columnwise ``data`` is ``[K, M]``, and is transposed back.
    """
    values = decode(data.t() if columnwise else data, dtype)
    return (values * scale_inv.repeat_interleave(GROUP_TILE)[:, None]).to(out_dtype)


def update_delayed(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    max_fp8: torch.Tensor | float,
    amaxes: torch.Tensor | None = None,
    *,
    margin: int = 0,
    algorithm: str = "max",
) -> None:
    """Update the scales of ``n`` tensors, fp32 ``[n]``, from their amaxes, in place.

    ``scale = max_fp8 * 2^-margin / amax`` if the amax is positive and finite, FLT_MAX if that
    overflows, and unchanged otherwise. ``amax`` is the maximum of the whole history, fp32
    ``[length, n]``, or with ``"most_recent"`` its newest entry. After it is read, the history
    rolls: row 0 (the newest) becomes the last row, row ``i`` becomes ``i - 1``, and row 0 is 0,
    ready for the next step. The history of a tensor whose newest amax is 0, because it was not
    used, stays as it is.

    ``max_fp8``, the largest value of the format, is ``[n]``, or one number for all. ``amaxes``,
    fp32 ``[n]``, are the newest ones, in place of row 0; -1 for a tensor whose step has not ended:
    its scale and history stay as they are.
    """
    if algorithm not in ("max", "most_recent"):
        raise InputError(
            f"Delayed scaling got amax algorithm {algorithm!r}; it is 'max' or 'most_recent'."
        )
    newest = amax_history[0] if amaxes is None else amaxes
    is_over = newest != -1
    history = torch.cat([newest.unsqueeze(0), amax_history[1:]])
    largest = history.amax(0) if algorithm == "max" else newest
    numerator = torch.zeros_like(scale).add_(max_fp8).mul_(2.0**-margin)
    fresh = numerator.div_(largest).clamp_(max=FLOAT32_MAX)
    scale.copy_(torch.where(is_over & (largest > 0) & (largest < math.inf), fresh, scale))
    rolled = history.roll(-1, 0)
    rolled[0].zero_()
    amax_history.copy_(torch.where(is_over & (newest != 0), rolled, amax_history))


def _cast_both(
    x: torch.Tensor, scale: torch.Tensor, dtype: DType, rowwise: bool, columnwise: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not (rowwise or columnwise):
        return None, None
    row = cast(x, scale, dtype)
    return row if rowwise else None, transpose(row) if columnwise else None
