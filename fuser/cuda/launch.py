"""Launch of a kernel: its shape, its arguments, and torch's current stream."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from fuser.cuda import module
from fuser.cuda.arguments import encode
from fuser.cuda.sources import checked_source
from fuser.errors import InputError
from fuser.formats import ceil_div
from fuser.torch_private import calling_file, cuda_device, cuda_stream, size_hint

Result = TypeVar("Result")

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024


@dataclass(frozen=True)
class Launch:
    """The shape of a launch: blocks, threads in a block, bytes of dynamic shared memory.

    ``grid`` and ``block`` have one to three sizes. A 0 in ``grid`` is an empty
    launch: nothing runs.

    Raises
    ------
    InputError
        If a size is not an int or outside CUDA's limits.
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

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The three sizes of the grid, and the three sizes of a block."""
        return tuple(size for sizes in (self.grid, self.block) for size in (*sizes, 1, 1)[:3])


# Kernels read and write values in these dtypes, and bytes.
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)

# Tile size of the skeleton in fuser/tile/tile.cuh.
TILE = 128
TILE_THREADS = 256


@functools.lru_cache(maxsize=1024)
def tiles(rows: int, columns: int) -> Launch:
    """A launch with one block for each tile of 128 x 128 of a matrix."""
    return Launch((ceil_div(rows, TILE) * ceil_div(columns, TILE),), (TILE_THREADS,))


@dataclass(frozen=True)
class Kernel:
    """One CUDA function; compiled for a device at the first launch there.

    A call launches asynchronously on torch's current stream of the tensor
    arguments' device, from any thread. It allocates no device memory, does not
    wait for the device and reads nothing from it. Launch once before capturing a
    CUDA graph, because a compilation cannot be captured.

    Parameters
    ----------
    module
        The source: the path of a ``.cu`` file, which may include fuser's headers
        ``<fuser/*.cuh>`` and files in its folder; or the name of one of fuser's,
        ``fuser/cuda/kernels/<module>.cu``.
    symbol
        An ``extern "C"`` function, or a template instantiation such as
        ``fuser_swiglu<float, 4>``; names of fuser's kernels start with ``fuser_``.
    has_tensor_maps
        Whether it has parameters of type ``TensorMap``. They are aligned to 64 bytes, and the
        driver then gets the arguments one by one, because it lays them out itself. Such a launch
        is not recorded: its arguments contain addresses in a form that nothing can replace.

    Raises
    ------
    InputError
        If the symbol of one of fuser's kernels starts otherwise, or the file does not exist.
    """

    module: str | Path
    symbol: str
    has_tensor_maps: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.module, Path):
            object.__setattr__(self, "module", checked_source(self.module))
        elif not self.symbol.startswith("fuser_"):
            raise InputError(
                f"Kernel symbols start with fuser_; got {self.symbol!r}. The source of a kernel of "
                "your own is a pathlib.Path."
            )

    def __call__(self, launch: Launch, *args: object) -> None:
        """Launch over ``args``, in the order of the function's parameters.

        Parameters
        ----------
        launch
            The shape of the launch; nothing is launched if its grid is empty.
        args
            Types as :func:`encode` supports them.

        Raises
        ------
        InputError, InputTypeError
            As :func:`encode`.
        KernelUnavailable
            If the kernel cannot be compiled here.
        StateError
            If the source has no such kernel, or a user's source does not compile.
        """
        if 0 not in launch.grid:
            if recording.listener is not None:
                if recording.is_dry:
                    return
                if not self.has_tensor_maps:
                    recording.listener(self, launch, args)
            backend.run(self, launch, args)


class _ThreadRecorder(threading.local):
    """What a thread records its launches with."""

    listener: Callable[[Kernel, Launch, tuple[object, ...]], None] | None = None
    """Called at each launch; None without a recording."""
    recorder: Any = None
    """What records the other actions: that of :mod:`fuser.cuda.sequence`."""
    is_dry = False
    """Whether launches do nothing: tensors are fake."""


class _FakeTensors(TorchFunctionMode):
    """Fake tensors have the addresses of whole allocations, and, for launchers, sizes in numbers.

    A launch depends on sizes, and a graph with symbolic ones must not: each question about a symbol
    would make the graph one of this size. Launchers allocate nothing, so what they compute from
    sizes goes nowhere else.
    """

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.data_ptr:
            tensor = args[0]
            return FAKE_ADDRESS + size_hint(tensor.storage_offset()) * tensor.element_size()
        if func in _SIZES and calling_file(2).startswith(_LAUNCHERS):
            if func is torch.Tensor.is_contiguous:
                return _is_contiguous(args[0])
            return _in_numbers(func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


FAKE_ADDRESS = 1 << 20
_LAUNCHERS = os.path.dirname(__file__)


def _getter(name: str) -> Any:
    """What a function mode gets of a read of this attribute."""
    attribute: Any = getattr(torch.Tensor, name)
    return attribute.__get__


_SIZES = frozenset(
    (
        *(torch.Tensor.size, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.storage_offset),
        *(_getter("shape"), _getter("nbytes"), torch.Tensor.is_contiguous, torch.Tensor.__len__),
    )
)


def _in_numbers(sizes: Any) -> Any:
    if isinstance(sizes, tuple):
        return torch.Size(map(size_hint, sizes))
    return size_hint(sizes)


def _is_contiguous(tensor: torch.Tensor) -> bool:
    expected = 1
    for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
        number = size_hint(size)
        if number != 1 and size_hint(stride) != expected:
            return False
        expected *= max(number, 1)
    return True


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Context in which this thread launches nothing and records nothing: its tensors are fake."""
    outer = recording.listener, recording.is_dry
    recording.listener, recording.is_dry = (lambda *_: None), True
    try:
        with _FakeTensors():
            yield
    finally:
        recording.listener, recording.is_dry = outer


def call_each_time(function: Callable[..., Result], *args: object) -> Result | None:
    """``function(*args)``; the repetition of a recording calls it too. None in a dry run.

    It is recorded as a whole: a collective, or a check of values. Its result depends on tensors,
    on results of such calls, on the process groups that the recording has as inputs, and on
    constants, all of which are in ``args``; it allocates nothing that is read later.
    """
    if recording.is_dry:
        return None
    recorder = recording.recorder
    if recorder is None:
        return function(*args)
    result: Result = recorder.called(function, args)
    return result


def values_on_host(tensor: torch.Tensor) -> list[int]:
    """The values of a tensor ``[n]`` of integers, for which the host waits; zeros of a fake one.

    What reads them is not repeated from a recording.
    """
    if recording.is_dry:
        return [0] * len(tensor)
    # ``item`` and not only ``tolist``, which a recording would not observe.
    tensor.sum().item()
    values: list[int] = tensor.tolist()
    return values


def refuse_recording(reason: str) -> None:
    """If a recording is being made, note that it cannot be repeated."""
    if recording.recorder is not None:
        recording.recorder.refuse(reason)


recording = _ThreadRecorder()


# -- backends -----------------------------------------------------------------


class LaunchBackend:
    """Runs kernels on the GPUs of this process.

    A subclass that is set as :data:`backend` runs every launch in another place.
    """

    def run(self, kernel: Kernel, launch: Launch, args: tuple[object, ...]) -> None:
        """Run ``kernel`` over ``args``; no size in the launch's grid is 0."""
        if kernel.has_tensor_maps:
            _run_one_by_one(kernel, launch, args)
            return
        encoded = encode(kernel.symbol, args)
        device = encoded.device
        if device is None:
            device = torch.cuda.current_device()
        if device == cuda_device():
            fire(prepared(kernel, launch, encoded.format, device), encoded.values, device)
        else:
            with torch.cuda.device(device):
                fire(prepared(kernel, launch, encoded.format, device), encoded.values, device)

    device_type = "cuda"
    """The type of the devices that it runs kernels on."""

    def refusal(self) -> str | None:
        """Why it runs no kernels, as a sentence; None if it does."""
        return module.missing_requirement()

    def multiprocessors(self, device: torch.device) -> int:
        """As the function :func:`multiprocessors`."""
        return int(_properties(device).multi_processor_count)

    def shared_bytes(self, device: torch.device) -> int:
        """As the function :func:`shared_bytes`."""
        return int(_properties(device).shared_memory_per_block_optin)

    def has_wgmma(self, device: torch.device) -> bool:
        """Whether a device has TMA copies and wgmma, which are Hopper's."""
        return bool(capability(device) == (9, 0))

    def tensor_map(self, matrix: torch.Tensor, box_rows: int) -> tuple[object, ...]:
        """The fields of a ``TensorMap`` (fuser/core/sm90.cuh) of contiguous uint8 ``[M, K]``.

        The copy engine reads boxes of ``box_rows`` rows of 128 bytes.
        """
        from fuser.cuda.tensor_map import driver_map

        return driver_map(matrix.data_ptr(), *matrix.shape, box_rows)


class Prepared(NamedTuple):
    """A launch on a device, complete except for the values of its arguments."""

    function: int
    """The driver's handle."""
    sizes: tuple[int, ...]
    shared_bytes: int
    packer: struct.Struct


def prepared(kernel: Kernel, launch: Launch, arguments: str, device: int) -> Prepared:
    """A launch of ``kernel`` over arguments of a struct format, on ``device``, the current one."""
    function = module.function(
        kernel.module, kernel.symbol, device, has_dynamic_memory=launch.shared_bytes > 0
    )
    packer = _packer(arguments)
    if packer.size > MAX_ARGUMENT_BYTES:
        raise InputError(
            f"Kernel {kernel.symbol} got {packer.size} bytes of arguments; the most is "
            f"{MAX_ARGUMENT_BYTES}."
        )
    return Prepared(function, launch.sizes, launch.shared_bytes, packer)


def fire(ready: Prepared, values: Sequence[object], device: int) -> None:
    """Launch over ``values``, on torch's current stream of ``device``, the current device."""
    launches, buffer, size, stream, extra = begin(device)
    function, sizes, shared_bytes, packer = ready
    packer.pack_into(buffer, 0, *values)
    size.value = packer.size
    launches(function, *sizes, shared_bytes, stream, 0, extra)


def begin(device: int) -> tuple[Callable[..., None], Any, Any, int, int]:
    """The arguments that launches of this thread need on ``device``, the current device.

    The driver's launch function, the buffer for arguments and its size, torch's
    current stream, and the address of buffer and size as the driver's ``extra``.
    """
    slot = _slot
    if device not in slot.bound:
        module.bind_context(device)
        slot.bound.add(device)
    # CuPy's own current stream differs from torch's.
    stream = cuda_stream(device)
    return module.driver_launch(), slot.buffer, slot.size, stream, slot.extra


def _run_one_by_one(kernel: Kernel, launch: Launch, args: tuple[object, ...]) -> None:
    """Run a kernel with the address of each argument, of which the first has a tensor."""
    parts = [encode(kernel.symbol, (arg,)) for arg in args]
    device = next(part.device for part in parts if part.device is not None)
    buffers = [_packer(part.format).pack(*part.values) for part in parts]
    addresses = (ctypes.c_char_p * len(parts))(*buffers)
    with torch.cuda.device(device):
        ready = prepared(kernel, launch, "", device)
        launches, _, _, stream, _ = begin(device)
        sizes, shared_bytes = ready.sizes, ready.shared_bytes
        at = ctypes.addressof(addresses)
        launches(ready.function, *sizes, shared_bytes, stream, at, 0)


# There are about as many formats as kernels.
_packer = functools.lru_cache(maxsize=4096)(struct.Struct)

MAX_ARGUMENT_BYTES = 4096
# CUDA's names for the parts of a launch's ``extra``: a buffer, its size, the end.
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0


class _ArgumentBuffer(threading.local):
    """A thread's buffer for arguments, which the driver copies at the launch.

    The driver receives the buffer as a whole; CuPy's launch inspects every argument.
    """

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(MAX_ARGUMENT_BYTES)
        self.size = ctypes.c_size_t(0)
        buffer, size = ctypes.addressof(self.buffer), ctypes.addressof(self.size)
        parts = (BUFFER_POINTER, buffer, BUFFER_SIZE, size, END)
        self.bound: set[int] = set()  # devices whose context the thread has
        self.parts = (ctypes.c_void_p * len(parts))(*parts)
        self.extra = ctypes.addressof(self.parts)


_slot = _ArgumentBuffer()

backend = LaunchBackend()
"""The backend of all launches; read at every launch."""


def kernel_refusal(device_type: str) -> str | None:
    """Why kernels do not run on devices of a type, as a sentence; None if they run."""
    if device_type != backend.device_type:
        return off_cuda(device_type)
    failure = module.compile_failure
    return backend.refusal() if failure is None else str(failure)


def off_cuda(device_type: str) -> str:
    """The refusal of a device that fuser has no kernels for."""
    return f"kernels run on CUDA, and the tensors are on {device_type}."


def kernels_support(tensor: torch.Tensor) -> bool:
    """Whether kernels support tensors of this tensor's dtype and device.

    After a failed compilation, no tensors are supported.
    """
    return (
        module.compile_failure is None
        and tensor.dtype in KERNEL_DTYPES
        and tensor.device.type == backend.device_type
        and backend.refusal() is None
    )


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a device, for grids that fill it once."""
    return backend.multiprocessors(device)


capability = functools.cache(torch.cuda.get_device_capability)


@functools.cache
def _properties(device: torch.device) -> Any:  # some are not in torch's stubs
    return torch.cuda.get_device_properties(device)


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a block can have on a device, in bytes."""
    return backend.shared_bytes(device)


def _check_sizes(kind: str, sizes: object, least: int, most: tuple[int, ...]) -> None:
    if (
        not isinstance(sizes, tuple)
        or not 1 <= len(sizes) <= 3
        or not all(
            type(size) is int and least <= size <= limit
            for size, limit in zip(sizes, most, strict=False)
        )
    ):
        limits = ", ".join(f"{least} to {limit}" for limit in most)
        raise InputError(f"A launch got {kind} {sizes!r}; it is a tuple of ints, {limits}.")
