"""Launching a kernel: launch shape, argument encoding, torch's current stream."""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fuser.cuda import module
from fuser.errors import InputError, InputTypeError
from fuser.formats import ceil_div

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_FLOAT32 = float(np.finfo(np.float32).max)
# More dynamic shared memory than this has to be allowed kernel by kernel.
DEFAULT_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class Launch:
    """The shape of a launch: blocks, threads a block, bytes of dynamic shared memory.

    ``grid`` and ``block`` have one to three sizes. A 0 in ``grid`` is an empty
    launch: nothing runs.

    Raises
    ------
    InputError
        If a size is no int or outside CUDA's limits.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        _check_sizes("grid", self.grid, 0, MAX_GRID)
        _check_sizes("block", self.block, 1, MAX_BLOCK)
        if math.prod(self.block) > MAX_THREADS:
            raise InputError(
                f"A block of {self.block} has {math.prod(self.block)} threads; "
                f"the most is {MAX_THREADS}."
            )
        if self.shared_bytes < 0:
            raise InputError(f"A launch got {self.shared_bytes} bytes of shared memory.")


# What kernels read and write: values in these dtypes, and bytes.
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)

# Of the skeleton in fuser/tiled.cuh.
TILE = 128
TILE_THREADS = 256


@functools.lru_cache(maxsize=1024)
def tiles(rows: int, columns: int) -> Launch:
    """A block for each tile of 128 x 128 of a matrix."""
    return Launch((ceil_div(rows, TILE) * ceil_div(columns, TILE),), (TILE_THREADS,))


@dataclass(frozen=True)
class Kernel:
    """One CUDA function; compiled for a device at the first launch there.

    Calling it launches asynchronously on torch's current stream of the device
    that the tensor arguments are on, from any thread. It allocates no device
    memory, does not wait for the device and reads nothing from it. Launch once
    before capturing a CUDA graph: compiling cannot be captured.

    Parameters
    ----------
    module
        The source, ``fuser/cuda/kernels/<module>.cu``.
    symbol
        An ``extern "C"`` function, or a template instantiation such as
        ``fuser_swiglu<float, 4>``; starts with ``fuser_``.

    Raises
    ------
    InputError
        If the symbol starts otherwise.
    """

    module: str
    symbol: str

    def __post_init__(self) -> None:
        if not self.symbol.startswith("fuser_"):
            raise InputError(f"Kernel symbols start with fuser_; got {self.symbol!r}.")

    def __call__(self, launch: Launch, *args: Any) -> None:
        """Launch over ``args``, in the order of the function's parameters.

        Parameters
        ----------
        launch
            The shape of the launch; nothing is launched where its grid is empty.
        args
            As :func:`encode` takes them.

        Raises
        ------
        InputError, InputTypeError
            As :func:`encode`.
        StateError
            If the kernel cannot be compiled here.
        """
        if 0 not in launch.grid:
            machine.run(self, launch, args)


# -- where launches go --------------------------------------------------------


class Machine:
    """What runs kernels: the GPUs of this process.

    A subclass that stands in :data:`machine` runs every launch elsewhere.
    """

    def run(self, kernel: Kernel, launch: Launch, args: tuple[Any, ...]) -> None:
        """Run ``kernel`` over ``args``; no size in the launch's grid is 0."""
        values, device = encode(kernel.symbol, args)
        if device is None or device == torch.cuda.current_device():
            self._run_on(torch.cuda.current_device(), kernel, launch, values)
        else:
            with torch.cuda.device(device):
                self._run_on(device, kernel, launch, values)

    def takes(self, tensor: torch.Tensor) -> bool:
        """As :func:`kernels_take`."""
        return (
            tensor.is_cuda
            and tensor.dtype in KERNEL_DTYPES
            and module.kernels_unavailable() is None
        )

    def multiprocessors(self, device: torch.device) -> int:
        """As the function of this name."""
        return _multiprocessors(device)

    def shared_bytes(self, device: torch.device) -> int:
        """As the function of this name."""
        return _shared_bytes(device)

    def _run_on(self, device: int, kernel: Kernel, launch: Launch, values: tuple[Any, ...]) -> None:
        handle = module.kernel(kernel.module, kernel.symbol, device)
        if launch.shared_bytes > DEFAULT_SHARED_BYTES:
            module.allow_large_shared_memory(kernel.module, kernel.symbol, device)
        # CuPy's own current stream is another one than torch's.
        stream = _Stream(torch._C._cuda_getCurrentRawStream(device))
        handle(launch.grid, launch.block, values, shared_mem=launch.shared_bytes, stream=stream)


machine = Machine()
"""Where launches go; read at every launch."""


def kernels_take(tensor: torch.Tensor) -> bool:
    """Whether kernels run on tensors like this one, of its dtype and where it is."""
    return machine.takes(tensor)


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a device has, for grids that fill it once."""
    return machine.multiprocessors(device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a block can have on a device, in bytes."""
    return machine.shared_bytes(device)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    # Not in torch's stubs.
    properties: Any = torch.cuda.get_device_properties(device)
    most: int = properties.shared_memory_per_block_optin
    return most


class _Stream:
    """A raw CUDA stream as CuPy wants it: an object with ``ptr``."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


# -- arguments ----------------------------------------------------------------

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

    ``type`` is the C++ type for a kernel's template argument, ``argument`` holds its tensors, and
    ``is_aligned`` says whether it takes 8 columns at a time.
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


def _check_sizes(what: str, sizes: Any, least: int, most: tuple[int, ...]) -> None:
    if (
        not isinstance(sizes, tuple)
        or not 1 <= len(sizes) <= 3
        or not all(
            type(size) is int and least <= size <= limit
            for size, limit in zip(sizes, most, strict=False)
        )
    ):
        limits = ", ".join(f"{least} to {limit}" for limit in most)
        raise InputError(f"A launch got {what} {sizes!r}; it is a tuple of ints, {limits}.")
