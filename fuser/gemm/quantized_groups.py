"""Products of grouped linears whose operands are quantized.

``x`` is ``[C, K]`` and ``dy`` ``[C, N]``: the rows of padded groups
(``fuser.functional.grouped.PaddedGroups``), with zeros from the end of a group to the next multiple
of 128 rows. ``weight`` is the padded groups of its N rows. A kernel multiplies FP8 with a scale for
each group or for blocks of 128; operands in other formats, or on other devices, are dequantized and
multiplied by torch.
"""

from __future__ import annotations

import torch

from fuser.cuda import grouped_gemm as kernel
from fuser.cuda.grouped_gemm import Sums
from fuser.errors import KernelUnavailable
from fuser.formats import NumberFormat
from fuser.functional.grouped import PaddedGroups, padded_rows, unpad, zero_tail
from fuser.functional.lazy import materialize
from fuser.gemm.grouped import Groups, multiply_at_once, wgrad
from fuser.gemm.matmul import column_values
from fuser.tensors import Float8CurrentScalingQuantizer, Float8Quantizer, QuantizedTensor, Quantizer


def sums_of(a: NumberFormat, b: NumberFormat, is_split: bool) -> Sums | None:
    """How the kernel forms sums of operands of these formats; None if it does not take them."""
    sums = {
        ("FP8", "FP8"): Sums.SPLIT if is_split else Sums.FAST,
        ("FP8 1x128", "FP8 1x128"): Sums.BLOCKS_1D,
        ("FP8 1x128", "FP8 128x128"): Sums.BLOCKS_2D,
    }
    return sums.get((a.name, b.name))


def reads_columns(quantizer: Quantizer, other: Quantizer, device: torch.device) -> bool:
    """Whether a product over columns reads a columnwise copy of what ``quantizer`` quantizes.

    If both copies have the same values and the product is emulated, it reads the rowwise copy.
    """
    has_one_scale = isinstance(quantizer, (Float8CurrentScalingQuantizer, Float8Quantizer))
    return not has_one_scale or (
        kernel.has_kernel(device) and sums_of(quantizer.format, other.format, True) is not None
    )


def quantized_forward(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    groups: PaddedGroups,
    size: int,
    dtype: torch.dtype,
    *,
    is_split: bool,
    is_padded: bool,
) -> torch.Tensor:
    """``x_g @ weight_g.T`` from the rowwise copies; ``size`` is N.

    ``[C, N]`` if ``is_padded``, else ``[T, N]``: the rows of groups without padding, and zeros
    after the last group. ``is_split`` requests a split accumulator, here and in the functions
    below.
    """
    return _by_weight(x, weight, "rowwise", groups, size, dtype, is_split, is_padded)


def quantized_dgrad(
    dy: QuantizedTensor,
    weight: QuantizedTensor,
    groups: PaddedGroups,
    dtype: torch.dtype,
    *,
    is_split: bool,
    is_padded: bool,
) -> torch.Tensor:
    """``dy_g @ weight_g`` from dy's rowwise and the weight's columnwise copy.

    ``[C, K]`` if ``is_padded``, else ``[T, K]`` as in the forward.
    """
    columns = weight.shape[-1]
    return _by_weight(dy, weight, "columnwise", groups, columns, dtype, is_split, is_padded)


def quantized_wgrad(
    dy: QuantizedTensor,
    x: QuantizedTensor,
    groups: PaddedGroups,
    dtype: torch.dtype,
    *,
    is_split: bool,
) -> torch.Tensor:
    """``dy_g.T @ x_g``, ``[G, N, K]``, from the columnwise copies."""
    n, k = dy.shape[-1], x.shape[-1]
    sums = sums_of(dy.format, x.format, is_split)
    if sums is not None and kernel.serves((n, k), dtype, dy.device):
        dw = torch.empty(len(groups.ends), n, k, dtype=dtype, device=dy.device)
        of_dy, of_x = _operand(dy, "columnwise"), _operand(x, "columnwise")
        try:
            return kernel.multiply_depth(of_dy, of_x, groups.padded_ends, sums, out=dw)
        except KernelUnavailable:
            pass
    if dy.column_transform is not None:  # rows of padding have values too
        return wgrad(*column_values(dy, x, dtype), Groups(groups.padded_ends, None))
    a, b = _values(dy, "columnwise", dtype), _values(x, "columnwise", dtype)
    if _is_unpadded(a):
        return wgrad(unpad(a, groups), unpad(b, groups), Groups(groups.ends, None))
    return wgrad(a, b, Groups(groups.padded_ends, None))


def _by_weight(
    a: QuantizedTensor,
    weight: QuantizedTensor,
    usage: str,
    groups: PaddedGroups,
    columns: int,
    dtype: torch.dtype,
    is_split: bool,
    is_padded: bool,
) -> torch.Tensor:
    """The product of the rows of ``a`` and one copy of the weight, by the kernel or by torch."""
    sums = sums_of(a.format, weight.format, is_split)
    if sums is not None and kernel.serves((a.shape[-1], columns), dtype, a.device):
        rows = groups.padded_rows if is_padded else groups.rows
        out = torch.empty(rows, columns, dtype=dtype, device=a.device)
        try:
            out = kernel.multiply_rows(
                _operand(a, "rowwise"),
                _operand(weight, usage),
                groups.padded_ends,
                groups.tiles,
                sums,
                out=out,
                is_padded=is_padded,
                b_groups="rows" if usage == "rowwise" else "depth",
            )
        except KernelUnavailable:
            pass
        else:
            return out if is_padded else zero_tail(groups.ends, out)
    matrices = _values(weight, usage, dtype).view(len(groups.ends), -1, weight.shape[-1])
    if usage == "rowwise":
        matrices = matrices[:, :columns].transpose(1, 2)
    else:
        matrices = matrices[:, : a.shape[-1]]
    return _product(_values(a, "rowwise", dtype), matrices, groups, is_padded)


def _operand(tensor: QuantizedTensor, usage: str) -> kernel.GroupedOperand:
    data, number_format, scales = tensor.operand(usage)
    return kernel.GroupedOperand(data, number_format.element, scales)


def _values(tensor: QuantizedTensor, usage: str, dtype: torch.dtype) -> torch.Tensor:
    """The values of one copy, or of a rowwise copy that has the same values."""
    if not tensor._has(usage) and tensor._is_transposable():
        usage = "rowwise"
    return tensor.with_usage(usage).dequantize(dtype=dtype)


def _product(
    a: torch.Tensor, b: torch.Tensor, groups: PaddedGroups, is_padded: bool
) -> torch.Tensor:
    """``a_g @ b_g`` for the padded rows of each group."""
    if _is_unpadded(a):
        y = zero_tail(groups.ends, multiply_at_once(unpad(a, groups), b, groups.ends))
        return materialize(padded_rows(y, groups)) if is_padded else y
    y = multiply_at_once(a, b, groups.padded_ends)
    return y if is_padded else unpad(y, groups)


def _is_unpadded(values: torch.Tensor) -> bool:
    """Whether rows of padding are not multiplied: on a CPU they take as long as others."""
    return values.device.type == "cpu"
