"""Launching a kernel: launch shape, torch's current stream."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from fuser.cuda import module
from fuser.cuda.arguments import Producer as Producer
from fuser.cuda.arguments import Struct as Struct
from fuser.cuda.arguments import encode as encode
from fuser.cuda.arguments import float32 as float32
from fuser.cuda.arguments import int32 as int32
from fuser.cuda.arguments import int64 as int64
from fuser.errors import InputError
from fuser.formats import ceil_div

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024


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
        # Without leave a block has 48 KB, and what the kernel declares itself is part of that.
        if launch.shared_bytes:
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
