"""What kernels take: scalars of a known size, structs with tensors in them, and their encoding."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fuser.errors import InputError, InputTypeError

ELEMENTS = {
    torch.float32: "float",
    torch.float16: "fuser::fp16",
    torch.bfloat16: "fuser::bf16",
}
"""Dtypes of pipelines, as kernels call them."""

MAX_FLOAT32 = float(np.finfo(np.float32).max)
NULL = np.uint64(0)
SCALAR_TYPES = frozenset(
    {np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
    | {np.float16, np.float32, np.float64}
)


def int32(value: int) -> np.int32:
    """``value`` as a kernel's ``int`` argument; InputError if it does not fit."""
    if not -(2**31) <= value < 2**31:
        raise InputError(f"{value} does not fit a kernel's int32 argument.")
    result: np.int32 = np.int32(value)
    return result


def int64(value: int) -> np.int64:
    """``value`` as a kernel's ``long long`` argument; InputError if it does not fit."""
    if not -(2**63) <= value < 2**63:
        raise InputError(f"{value} does not fit a kernel's int64 argument.")
    result: np.int64 = np.int64(value)
    return result


def float32(value: float) -> np.float32:
    """``value`` as a kernel's ``float`` argument; InputError if a finite one overflows."""
    if MAX_FLOAT32 < abs(value) < math.inf:
        raise InputError(f"{value} does not fit a kernel's float32 argument.")
    result: np.float32 = np.float32(value)
    return result


@dataclass(frozen=True)
class Struct:
    """A struct argument by value, with tensors in it: what many tensors' kernels take.

    ``fields`` are as a kernel's arguments are, and lie as C lays them out: each at a multiple of
    its size, the whole padded to a multiple of the largest. ``T* pointers[n]`` is n tensors.

    Raises
    ------
    InputError
        If there are no fields.
    InputTypeError
        If a field is a struct itself.
    """

    fields: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.fields:
            raise InputError("A kernel's struct argument got no fields.")
        for position, field in enumerate(self.fields):
            if isinstance(field, Struct) or _is_struct(field):
                raise InputTypeError(
                    f"A kernel's struct argument got a struct as field {position}; its fields are "
                    "tensors, None and numpy scalars."
                )


@dataclass(frozen=True)
class Producer:
    """Values of a matrix ``[rows, columns]`` that a kernel makes and another would have to read.

    Launchers of tiled kernels take one wherever they take a matrix. ``type`` is the C++ type for a
    kernel's template argument, ``argument`` holds its tensors, and ``is_aligned`` says whether it
    takes 8 columns at a time.
    """

    type: str
    argument: Struct
    rows: int
    columns: int
    dtype: torch.dtype
    is_aligned: bool


def encode(
    symbol: str, args: tuple[Any, ...], device_type: str = "cuda"
) -> tuple[tuple[Any, ...], int | None]:
    """Kernel arguments as CuPy passes them on byte for byte, and the device they are on.

    CuPy checks nothing: a Python float would arrive as a double, an int as 8
    bytes. So the width is in the argument. A CUDA tensor becomes its address,
    None a null pointer; numpy scalars, and structs as numpy ``void`` arrays of
    one element, pass as they are; :func:`int32`, :func:`int64` and
    :func:`float32` make scalars, :class:`Struct` a struct with tensors in it.
    The device is None without a tensor.

    Parameters
    ----------
    symbol
        The kernel, for messages.
    args
        The arguments.
    device_type
        Of the tensors.

    Raises
    ------
    InputError
        If a tensor is not on a CUDA device, or on another one than the first.
    InputTypeError
        If an argument is anything else, a bare Python number for instance.
    """
    values: list[Any] = []
    device: int | None = None
    is_there = f"is_{device_type}"
    for position, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            if not getattr(arg, is_there):
                raise InputError(
                    f"Kernel {symbol} got a tensor on {arg.device} as argument {position}; "
                    f"kernels read and write {device_type.upper()} tensors."
                )
            index = arg.get_device()
            if device is not None and index != device:
                raise InputError(
                    f"Kernel {symbol} got tensors on cuda:{device} and, as argument {position}, "
                    f"on cuda:{index}; all must be on one device."
                )
            device = index
            values.append(np.uint64(arg.data_ptr()))
        elif type(arg) in SCALAR_TYPES or _is_struct(arg):
            values.append(arg)
        elif arg is None:
            values.append(NULL)
        elif isinstance(arg, Struct):
            where = f"{symbol}, in argument {position},"
            fields, of_fields = encode(where, arg.fields, device_type)
            if None not in (device, of_fields) and device != of_fields:
                raise InputError(
                    f"Kernel {symbol} got tensors on cuda:{device} and, in argument {position}, "
                    f"on cuda:{of_fields}; all must be on one device."
                )
            device = of_fields if device is None else device
            values.append(_packed(fields))
        else:
            raise InputTypeError(
                f"Kernel {symbol} got {_described(arg)} as argument {position}; {_hint(arg)}."
            )
    return tuple(values), device


def _packed(fields: tuple[Any, ...]) -> Any:
    # numpy's letters are those of Python's struct module, whose native layout is C's; a count of
    # 0 aligns the end.
    letters = [field.dtype.char for field in fields]
    widest = max(letters, key=struct.calcsize)
    packed = struct.pack(f"@{''.join(letters)}0{widest}", *fields)
    return np.frombuffer(packed, dtype=f"V{len(packed)}")


def _is_struct(arg: Any) -> bool:
    return isinstance(arg, np.ndarray) and arg.dtype.kind == "V" and arg.size == 1


def _described(arg: Any) -> str:
    if isinstance(arg, np.ndarray):
        return f"a numpy array of {arg.size} elements of {arg.dtype}"
    if isinstance(arg, (bool, int, float)):
        return f"the Python {type(arg).__name__} {arg}"
    return f"an object of type {type(arg).__name__}"


def _hint(arg: Any) -> str:
    if isinstance(arg, bool):
        return f"a kernel must know its size: pass numpy.bool_({arg})"
    if isinstance(arg, int):
        return f"a kernel must know its size: pass int32({arg}) or int64({arg})"
    if isinstance(arg, float):
        return f"a kernel must know its size: pass float32({arg})"
    return "kernels take CUDA tensors, None, numpy scalars and numpy structs of one element"
