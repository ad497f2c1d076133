"""Kernel arguments: scalars of a known size, structs with tensors in them, and their encoding."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fuser.errors import InputError, InputTypeError

ELEMENTS = {
    torch.float32: "float",
    torch.float16: "fuser::fp16",
    torch.bfloat16: "fuser::bf16",
}
"""Dtypes of pipelines to their C++ names."""

# Tensors whose layout says everything: other classes have contents of their own.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
PLAIN_OR_NONE = PLAIN | {type(None)}

MAX_FLOAT32 = float(np.finfo(np.float32).max)


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


class Struct(NamedTuple):
    """A struct that is passed by value, with tensors in it.

    ``fields``, at least one, may be any kernel argument except a struct. Their layout is that of C:
    each is at a multiple of its size, and the struct is padded to a multiple of the largest. ``T*
    pointers[n]`` is n tensors.
    """

    fields: tuple[Any, ...]


TILE_RUN = 8
"""Columns that a thread of a tile reads at a time, in every dtype."""


class Producer(NamedTuple):
    """Values of a matrix ``[rows, columns]`` that a kernel makes and another would have to read.

    Launchers of tiled kernels take one wherever they take a matrix. ``type`` is the C++ type for a
    kernel's template argument, ``argument`` holds its tensors, and ``is_aligned`` says whether it
    takes :data:`TILE_RUN` columns at a time. A producer that makes a kernel write more than its
    values has one of the same values ``alone``, for a kernel that runs before that one.
    """

    type: str
    argument: Struct
    rows: int
    columns: int
    dtype: torch.dtype
    is_aligned: bool
    alone: Producer | None = None


def layout_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Everything about a tensor that a launch depends on, except its address.

    None if its memory does not hold its values: it is of another class, lazily negated, one of
    torch's zero tensors, or its memory was freed.
    """
    if type(tensor) not in PLAIN or tensor.is_neg():
        return None
    address = tensor.data_ptr()
    if not address and tensor.numel():
        return None
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), address & 15)


def end_of(tensor: torch.Tensor) -> int:
    """The address after the last element of a tensor that is not empty."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


class Slot(NamedTuple):
    """A placeholder for a tensor, in the arguments of a recorded launch."""

    place: int


def filled(value: Any, tensors: Sequence[torch.Tensor | None]) -> Any:
    """``value``, with tensors in place of the slots in it."""
    if type(value) is Slot:
        return tensors[value.place]
    if type(value) is Struct:
        return Struct(tuple(filled(field, tensors) for field in value.fields))
    if type(value) is dict:
        return {name: filled(item, tensors) for name, item in value.items()}
    return value


class Encoded(NamedTuple):
    """Arguments in the layout of C: the struct module packs ``values`` by ``format``.

    ``values`` has a :class:`Slot` itself where its address will be.
    """

    format: str
    values: list[Any]
    device: int | None
    """The index of the device that the tensors are on; None without a tensor."""


def encode(symbol: str, args: tuple[Any, ...], device_type: str = "cuda") -> Encoded:
    """Encode a kernel's arguments in order, each at a multiple of its alignment.

    A launch checks nothing: a kernel would receive a Python float as a double and an int as 8
    bytes. So each argument states its width. A CUDA tensor becomes its address, and None a null
    pointer; numpy scalars keep their type. :func:`int32`, :func:`int64` and :func:`float32` make
    scalars, :class:`Struct` makes a struct with tensors in it. ``symbol`` is the kernel's name, for
    messages.

    InputError if a tensor is not on a device of ``device_type``, or on another one than the first,
    or a struct has no fields. InputTypeError if an argument is anything else, a bare Python number
    for instance, or a tensor without memory of its own.
    """
    # Native sizes and alignment, which are C's.
    letters, values = ["@"], []  # type: list[str], list[Any]
    device: int | None = None
    is_there = _IS_THERE[device_type]
    for position, arg in enumerate(args):
        in_struct = type(arg) is Struct
        begin = len(letters)
        if in_struct:
            letters.append("")
            if not arg.fields:
                raise InputError(f"Kernel {symbol} got no fields in struct argument {position}.")
        for place, item in enumerate(arg.fields if in_struct else (arg,)):
            letter = _LETTERS.get(type(item))
            if letter is not None:
                letters.append(letter)
                values.append(item)
            elif item is None:
                letters.append("P")
                values.append(0)
            elif isinstance(item, torch.Tensor):
                index = item.get_device() if is_there(item) else None
                if index is None or (device is not None and index != device):
                    where = _where(symbol, position, place, in_struct)
                    raise InputError(_misplaced(where, item, index, device, device_type))
                device = index
                address = item.data_ptr()
                if not address and item.numel():
                    where = _where(symbol, position, place, in_struct)
                    raise InputTypeError(_without_memory(where, item))
                letters.append("P")
                values.append(address)
            elif type(item) is Slot:
                letters.append("P")
                values.append(item)
            else:
                where = _where(symbol, position, place, in_struct)
                raise InputTypeError(f"{where.format(_described(item))}; {_hint(item)}.")
        if in_struct:
            # A count of 0 aligns, before the struct and at its end.
            letters[begin] = _aligning("".join(letters[begin:]))
            letters.append(letters[begin])
    return Encoded("".join(letters), values, device)


# The struct module's letters.
_LETTERS = {
    kind: np.dtype(kind).char
    for kind in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64),
    )
}
_IS_THERE = {
    device_type: operator.attrgetter(f"is_{device_type}") for device_type in ("cuda", "cpu")
}


@functools.lru_cache(maxsize=4096)
def _aligning(letters: str) -> str:
    return f"0{max(letters, key=struct.calcsize)}"


def _where(symbol: str, position: int, place: int, in_struct: bool) -> str:
    """The start of a refusal, which names the argument; ``{}`` becomes what it is."""
    if in_struct:
        return f"Kernel {symbol}, in argument {position}, got {{}} as field {place}"
    return f"Kernel {symbol} got {{}} as argument {position}"


def _misplaced(
    where: str, tensor: torch.Tensor, index: int | None, device: int | None, device_type: str
) -> str:
    if index is None:
        got = where.format(f"a tensor on {tensor.device}")
        return f"{got}; kernels read and write {device_type.upper()} tensors."
    got = where.format(f"a tensor on {device_type}:{index}")
    return f"{got}, and others on {device_type}:{device}; all must be on one device."


def _without_memory(where: str, tensor: torch.Tensor) -> str:
    got = where.format(f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}")
    return f"{got}; kernels read memory, and it has none: it was freed, or other tensors have it."


def _described(arg: object) -> str:
    if isinstance(arg, np.ndarray):
        return f"a numpy array of {arg.size} elements of {arg.dtype}"
    if isinstance(arg, (bool, int, float)):
        return f"the Python {type(arg).__name__} {arg}"
    return f"an object of type {type(arg).__name__}"


def _hint(arg: object) -> str:
    if isinstance(arg, bool):
        return f"a kernel must know its size: pass numpy.bool_({arg})"
    if isinstance(arg, int):
        return f"a kernel must know its size: pass int32({arg}) or int64({arg})"
    if isinstance(arg, float):
        return f"a kernel must know its size: pass float32({arg})"
    return "kernels take CUDA tensors, None, numpy scalars and structs of these"
