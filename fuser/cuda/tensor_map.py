"""Descriptors of matrices for the copy engine of Hopper, TMA, by the driver.

Function and constants: CUDA driver API, ``cuTensorMapEncodeTiled``.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from fuser.errors import InputError

_UINT8, _INTERLEAVE_NONE, _SWIZZLE_128B, _L2_256B, _FILL_ZEROS = 0, 0, 3, 3, 0
BOX_BYTES = 128  # the width of a box, and of its swizzle


@functools.lru_cache(maxsize=4096)
def driver_map(address: int, rows: int, columns: int, box_rows: int) -> tuple[np.uint64, ...]:
    """The 128 bytes of a ``CUtensorMap`` of uint8 ``[rows, columns]``; a box is 128 bytes wide.

    InputError if the driver refuses it.
    """
    words = (ctypes.c_uint64 * 32)()
    start = -ctypes.addressof(words) % 64
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.addressof(words) + start,
        _UINT8,
        2,
        address,
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns),
        (ctypes.c_uint32 * 2)(BOX_BYTES, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        _L2_256B,
        _FILL_ZEROS,
    )
    if status:
        raise InputError(
            f"cuTensorMapEncodeTiled failed with status {status} for [{rows}, {columns}] bytes at "
            f"{address:#x}."
        )
    first = start // 8
    return tuple(np.uint64(word) for word in words[first : first + 16])


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    driver.cuTensorMapEncodeTiled.argtypes = (
        *(pointer, ctypes.c_int, number, pointer, pointer, pointer, pointer, pointer),
        *(ctypes.c_int,) * 4,
    )
    return driver
