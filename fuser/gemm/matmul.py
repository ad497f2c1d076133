"""Matrix products of linear layers: forward, dgrad and wgrad, each as one library call.

``x`` is ``[..., K]``, ``weight`` is ``[N, K]``, ``dy`` is ``[..., N]``; all in one dtype, or all
quantized. If the device has tensor cores for the formats of quantized operands, they multiply the
quantized bytes (gemm/native.py). Otherwise the product is emulated: the same operands are
dequantized into the compute dtype and multiplied with fp32 accumulation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser.cuda import cublaslt
from fuser.cuda.launch import capability
from fuser.gemm.native import NativeGemm, by_cublaslt, native_gemm, product
from fuser.tensors import QuantizedTensor
from fuser.torch_private import addmm_activation
from fuser.wrapper_tensor import WrapperTensor

# ``linear(x, weight, bias=None)``: x @ weight.T (+ bias), of shape [..., N]; the
# bias is a GEMM epilogue. An alias of torch's function: a wrapper would cost 0.1 us.
linear = F.linear


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``gelu(x @ weight.T + bias)``, tanh GELU as a cuBLASLt epilogue; CUDA only."""
    y: torch.Tensor = addmm_activation(bias, _rows(x), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], weight.shape[0])


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``scale * (x @ weight.T) (+ bias)``, rounded once."""
    rows, columns = _rows(x), weight.t()
    if bias is None:
        y = _scaled_mm(rows, columns, scale)
    else:
        y = torch.addmm(bias, rows, columns, alpha=scale)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    addend: torch.Tensor,
    *,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale * (x @ weight.T) (+ bias) + addend``: one GEMM where cuBLASLt takes a bias.

    Only a product without a bias has a ``scale``. With an addend in fp32 the sum is in fp32.
    """
    y = _add_product(_rows(addend), _rows(x), weight.t(), scale, bias)
    return y.view(addend.shape)


def dgrad(
    dy: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, addend: torch.Tensor | None = None
) -> torch.Tensor:
    """``scale * dy @ weight (+ addend)``: the gradient of x, ``[..., K]``.

    One GEMM: ``scale`` is its ``alpha``, and the addend is added with ``beta = 1``.
    """
    if dy.dim() != 2:
        addend = None if addend is None else _rows(addend)
        return dgrad(_rows(dy), weight, scale, addend).view(*dy.shape[:-1], weight.shape[1])
    if addend is not None:
        if addend.dtype is not dy.dtype:
            return dgrad(dy, weight, scale) + addend
        return _add_product(addend, dy, weight, scale)
    return torch.mm(dy, weight) if scale == 1.0 else _scaled_mm(dy, weight, scale)


def wgrad(dy: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``scale * dy.T @ x`` over all rows: the gradient of the weight, ``[N, K]``."""
    if dy.dim() != 2:
        dy, x = _rows(dy), _rows(x)
    return torch.mm(dy.t(), x) if scale == 1.0 else _scaled_mm(dy.t(), x, scale)


def wgrad_accumulate(
    main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, scale: float = 1.0
) -> None:
    """Add :func:`wgrad` to ``main_grad`` in place, in the precision of ``main_grad``.

    With equal dtypes this is one GEMM with ``beta = 1``. If ``main_grad`` is fp32 and the
    operands have 16 bits, it receives the GEMM's fp32 accumulator, not a rounded copy.
    """
    a, b = _rows(dy).t(), _rows(x)
    if a.dtype == main_grad.dtype:
        main_grad.addmm_(a, b, alpha=scale)
    elif a.is_cuda and main_grad.dtype == torch.float32:
        torch.addmm(main_grad, a, b, alpha=scale, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.add_(torch.mm(a.to(main_grad.dtype), b.to(main_grad.dtype)), alpha=scale)


# -- quantized operands ---------------------------------------------------------------------------


def architecture(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None for any other device."""
    return capability(device) if device.type == "cuda" else None


def quantized_linear(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    dtype: torch.dtype,
    *,
    is_split: bool,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale * (x @ weight.T) (+ bias) (+ addend)``, ``[..., N]``, from the rowwise copies.

    In ``dtype``, and with an addend in the wider of the two. ``is_split`` requests a split
    accumulator (gemm/native.py), here and in the functions below.
    """
    row = _native(x, weight)
    if row is None:
        values = _values(x, "rowwise", dtype), _values(weight, "rowwise", dtype)
        if scale == 1.0:
            y = linear(*values, bias)
        else:
            y = linear(*values) * scale
            y = y if bias is None else y + bias
        return y if addend is None else y + addend
    y = _product(
        row, x, "rowwise", weight, "rowwise", dtype, is_split, bias=bias, scale=scale, addend=addend
    )
    return y if y.dim() == x.dim() else y.reshape(*x.shape[:-1], weight.shape[0])


def quantized_dgrad(
    dy: QuantizedTensor,
    weight: QuantizedTensor,
    dtype: torch.dtype,
    *,
    is_split: bool,
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale * dy @ weight (+ addend)``, ``[..., K]`` in ``dtype``.

    Reads the rowwise copy of dy and the columnwise copy of the weight.
    """
    row = _native(dy, weight, "rowwise", "columnwise")
    if row is None:
        dx = dgrad(_values(dy, "rowwise", dtype), _values(weight, "columnwise", dtype), scale)
        return dx if addend is None else dx + addend
    dx = _product(
        row, dy, "rowwise", weight, "columnwise", dtype, is_split, scale=scale, addend=addend
    )
    return dx if dx.dim() == dy.dim() else dx.reshape(*dy.shape[:-1], weight.shape[1])


def quantized_wgrad(
    dy: QuantizedTensor,
    x: QuantizedTensor,
    dtype: torch.dtype,
    *,
    is_split: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    """``scale * dy.T @ x``, ``[N, K]`` in ``dtype``, from the columnwise copies."""
    row = _native(dy, x, "columnwise", "columnwise")
    if row is None:
        return wgrad(*column_values(dy, x, dtype), scale)
    return _product(row, dy, "columnwise", x, "columnwise", dtype, is_split, scale=scale)


def quantized_wgrad_accumulate(
    main_grad: torch.Tensor,
    dy: QuantizedTensor,
    x: QuantizedTensor,
    dtype: torch.dtype,
    *,
    is_split: bool,
    scale: float = 1.0,
) -> None:
    """Add :func:`quantized_wgrad` to ``main_grad`` in place, in the precision of ``main_grad``."""
    if _native(dy, x, "columnwise", "columnwise") is None:
        wgrad_accumulate(main_grad, *column_values(dy, x, dtype), scale)
        return
    a, b = dy.operand("columnwise"), x.operand("columnwise")
    if by_cublaslt(main_grad, a, b, is_split, scale=scale, addend=main_grad) is None:
        main_grad.add_(quantized_wgrad(dy, x, main_grad.dtype, is_split=is_split, scale=scale))


def _values(tensor: QuantizedTensor, usage: str, dtype: torch.dtype) -> torch.Tensor:
    """The values of one copy of a tensor; the other copy can have other values."""
    return tensor.with_usage(usage).dequantize(dtype=dtype)


def column_values(
    dy: QuantizedTensor, x: QuantizedTensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the columnwise copies, as matrices with all rows that a GEMM contracts.

    An orthogonal transform that both copies have is not inverted: the product is the same. Rows
    that pad the last block are zeros, except after a Hadamard transform, which spreads the
    rounding errors of a block over all of its rows.
    """
    is_transformed = dy.column_transform is not None and dy.column_transform == x.column_transform
    a, b = _columns(dy, dtype, is_transformed), _columns(x, dtype, is_transformed)
    if a.shape[0] != b.shape[0]:  # two formats with different padding: at least one has zeros there
        rows = min(a.shape[0], b.shape[0])
        return a[:rows], b[:rows]
    return a, b


def _columns(tensor: QuantizedTensor, dtype: torch.dtype, is_transformed: bool) -> torch.Tensor:
    if is_transformed:
        values = tensor.transformed_columns(dtype)
    else:
        values = tensor.with_usage("columnwise").dequantize_padded(dtype)
    k = tensor.shape[-1]
    return values if values.shape[1] == k else values[:, :k]


def _product(
    row: NativeGemm,
    a: QuantizedTensor,
    a_copy: str,
    b: QuantizedTensor,
    b_copy: str,
    dtype: torch.dtype,
    is_split: bool,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale * a @ b.T (+ bias) (+ addend)`` of two copies.

    Without the rows that pad their blocks.
    """
    one, other = a.operand(a_copy), b.operand(b_copy)
    if a.format.multiple == 1:
        added = None if addend is None else _in_memory(_rows(addend))
        return product(row, one, other, dtype, is_split, bias=bias, scale=scale, addend=added)
    rows, columns = (
        tensor._matrix()[usage == "columnwise"] for tensor, usage in ((a, a_copy), (b, b_copy))
    )
    result = product(row, one, other, dtype, is_split, bias=bias, scale=scale)[:rows, :columns]
    return result if addend is None else result + _rows(addend)


def _native(
    a: QuantizedTensor, b: QuantizedTensor, a_copy: str = "rowwise", b_copy: str = "rowwise"
) -> NativeGemm | None:
    if a.has_scales_of_rows or b.has_scales_of_rows:
        return None  # such a GEMM reads one scale of a tensor
    first, second = a._quantizer.format, b._quantizer.format
    if first.parts is not None or second.parts is not None:
        if a.format.multiple != b.format.multiple:
            return None  # one of them is padded for its other copy
        first, second = first.of(a_copy), second.of(b_copy)
    return native_gemm(first, second, architecture(a.device))


def _add_product(
    addend: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale * a @ b (+ bias) + addend``; torch copies the addend before it adds to it."""
    if cublaslt.library(a.device.type) is not None:
        addend, a, b = (_in_memory(matrix) for matrix in (addend, a, b))
        out = torch.empty(addend.shape, dtype=addend.dtype, device=addend.device)
        operands = cublaslt.Operands(out, a, b, addend, bias)
        if cublaslt.serves(operands):
            return cublaslt.multiply(operands, alpha=scale)
    if bias is not None:
        return torch.addmm(bias, a, b) + addend
    if addend.dtype is a.dtype:
        return torch.addmm(addend, a, b, alpha=scale)
    return torch.mm(a, b) * scale + addend


def _in_memory(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` itself, or the values of a quantized one; torch's functions take them too."""
    return matrix.dequantize() if isinstance(matrix, WrapperTensor) else matrix


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    # With beta = 0 the addend is never read; an expanded scalar uses no memory.
    return torch.addmm(a.new_empty(()).expand(a.shape[0], b.shape[1]), a, b, beta=0, alpha=scale)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
