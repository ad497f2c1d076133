"""Checks of launchers: element types and their C++ names, tensors and their layout.

They raise InputError.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch

from fuser.cuda.arguments import ELEMENTS
from fuser.errors import InputError
from fuser.formats import DType, Layout, buffers_for_kernels

FLOAT8 = {DType.kFloat8E4M3: "fuser::E4M3", DType.kFloat8E5M2: "fuser::E5M2"}
"""8-bit elements to their C++ names."""


def is_aligned(tensor: torch.Tensor | None, nbytes: int) -> bool:
    """Whether a tensor begins at a multiple of ``nbytes``. True for None."""
    return tensor is None or tensor.data_ptr() % nbytes == 0


def boolean(value: bool) -> str:
    """A bool in C++ spelling."""
    return "true" if value else "false"


@functools.lru_cache(maxsize=256)
def bits_of(value: float) -> np.uint32:
    """The bits of a number in fp32; a negative number counts as 0."""
    bits: np.uint32 = np.float32(max(value, 0.0)).view(np.uint32)
    return bits


# -- checks -------------------------------------------------------------------


def check_element(launcher: str, x: torch.Tensor) -> str:
    """The C++ name of the dtype of ``x``, fp32, fp16 or bf16; ``launcher`` names the launcher."""
    name = ELEMENTS.get(x.dtype)
    if name is None:
        raise InputError(f"{launcher} takes float32, float16 and bfloat16, not {x.dtype}.")
    return name


def check_matrix(launcher: str, x: torch.Tensor) -> tuple[int, int]:
    """The sizes of a matrix: rows at any distance, the elements of a row adjacent."""
    if x.dim() != 2:
        raise InputError(f"{launcher} takes a matrix [M, K]; got the shape {tuple(x.shape)}.")
    m, k = x.shape
    if k > 1 and m > 0 and x.stride(1) != 1:
        raise InputError(
            f"{launcher} takes rows that lie in memory element by element; got strides "
            f"{x.stride()} "
            "of a matrix {}. Copy it with .contiguous() first.".format([m, k])
        )
    return m, k


def check_float8(launcher: str, dtype: DType) -> str:
    """The C++ name of E4M3 or E5M2."""
    name = FLOAT8.get(dtype)
    if name is None:
        raise InputError(f"{launcher} takes elements E4M3 and E5M2, not {dtype.label}.")
    return name


def check_buffer(
    launcher: str,
    name: str,
    tensor: torch.Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    alignment: int = 1,
) -> None:
    """Refuse a tensor that is not contiguous, or of another dtype, shape or alignment; not None."""
    if tensor is None:
        return
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise InputError(
            f"{launcher} needs {name} contiguous, {dtype} and of shape {shape}; got {tensor.dtype} "
            f"of shape {tuple(tensor.shape)} and strides {tensor.stride()}."
        )
    if tensor.data_ptr() % alignment:
        raise InputError(
            f"{launcher} needs {name} at a multiple of {alignment} bytes; it is at "
            f"{tensor.data_ptr():#x}."
        )


def check_copy(
    launcher: str,
    name: str,
    data: torch.Tensor | None,
    shape: tuple[int, ...],
    scale_name: str,
    scale: torch.Tensor | None,
    scale_dtype: torch.dtype,
    scale_shape: tuple[int, ...],
) -> None:
    """Refuse a quantized copy without data or scales, or with wrong ones; data is uint8."""
    if (data is None) != (scale is None):
        present, missing = (name, scale_name) if scale is None else (scale_name, name)
        raise InputError(f"{launcher} got {present} without {missing}; a copy is data and scales.")
    check_buffer(launcher, name, data, torch.uint8, shape)
    check_buffer(launcher, scale_name, scale, scale_dtype, scale_shape, alignment=16)


def check_buffers(
    launcher: str, layout: Layout, m: int, k: int, buffers: Mapping[str, torch.Tensor | None]
) -> bool:
    """Refuse buffers that are not those of copies of ``[m, k]``; return whether there is a copy."""
    for names in (layout.rowwise[:2], layout.columnwise[:2]):
        if len(names) == 2 and (buffers.get(names[0]) is None) != (buffers.get(names[1]) is None):
            present, missing = names if buffers.get(names[1]) is None else names[::-1]
            raise InputError(
                f"{launcher} got {present} without {missing}; a copy is data and scales."
            )
    for name, described, shape in buffers_for_kernels(layout, m, k):
        buffer = buffers.get(name)
        if buffer is not None:
            check_buffer(launcher, name, buffer, described.dtype, shape, described.alignment)
    data = (layout.rowwise[0], layout.columnwise[0])
    return not (buffers.get(data[0]) is None and buffers.get(data[1]) is None)
