"""The launch backend inside ``emulated()``, and what it finds about a launch."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kernel_instantiations
import numpy as np
import pytest
import torch

from emulator import compile as compilation
from emulator.errors import KernelError
from emulator.worker import SCHEDULES, Argument, Buffer, Request, Worker
from fuser.chain import headers_in
from fuser.cuda import launch as launching
from fuser.cuda import module
from fuser.cuda.arguments import Encoded, Struct, encode
from fuser.cuda.launch import Kernel, Launch

# Bytes that a kernel has not written and must not read. In every floating-point format the first
# makes a NaN and the second a number near 1, which arithmetic changes. One for each schedule.
POISONS = (0xFF, 0x3F, 0xFF)
# What a block can have at most on any GPU so far (compute capability 9.0 and 10.0).
MAX_SHARED_BYTES = 227 * 1024

WARP = 32

# Compiling takes 0.3 s, and 0.1 s more for each kernel; several processes share a large source.
TOGETHER = 8

FULL = "FUSER_TEST_FULL"
"""The variable with which launches of pipelines run three times each, too; ``--full`` sets it."""

_worker = Worker()
_examined: set[Kernel] = set()
_groups: dict[Kernel, tuple[str, ...]] = {}


def prepare(*kernels: Kernel) -> None:
    """Say that ``kernels`` will be launched: those of one source are compiled together.

    Compiling happens at the first launch of one of them. Nothing depends on it but time.
    """
    for name in {kernel.module for kernel in kernels}:
        symbols = sorted({kernel.symbol for kernel in kernels if kernel.module == name})
        for first in range(0, len(symbols), TOGETHER):
            group = tuple(symbols[first : first + TOGETHER])
            _groups.update({Kernel(name, symbol): group for symbol in group})


@contextmanager
def emulated(
    *,
    written: Sequence[torch.Tensor] = (),
    deterministic: bool = True,
    every_launch: bool = True,
    multiprocessors: int = 4,
    sources: Path | None = None,
) -> Iterator[None]:
    """Inside, kernels take CPU tensors and run on the CPU; the test is skipped where they cannot.

    Every launch runs three times: with blocks and threads in order, in the opposite order with
    other garbage in unwritten memory, and warp by warp, each to its next barrier before another
    one starts, where a block has more than one. The results of the first run stay. What is an
    error:

    - an access outside a tensor's bytes or outside shared memory; a vector access at an address
      that is no multiple of its size; a write between the elements of a strided tensor;
    - arguments that do not fit the kernel's parameters in number, size or kind;
    - a barrier or warp collective that waits forever, or is reached at two places at once;
    - barriers, copies, registers and products of Hopper that break the rules of the PTX ISA: sizes,
      alignment, arrivals, bytes that were not announced, threads of a warpgroup that differ;
    - bits that depend on the order of threads, on unwritten outputs or on shared memory that
      nobody has written: a missing barrier, mostly, or a second buffer that takes no turn;
    - bytes of ``written`` that no launch writes;
    - a kernel of fuser that the compile check does not know.

    Tensors that share bytes share memory in the worker; all others have red zones around them.

    Parameters
    ----------
    written
        Outputs that the launches inside must write completely, together. They are poisoned.
    deterministic
        Whether a result that depends on the order of threads is an error: False for sums by
        atomics on floats.
    every_launch
        Whether each launch runs three times, or of each kernel the first one in this process: where
        a test looks at pipelines, and others at their kernels.
    multiprocessors
        What :func:`fuser.cuda.launch.multiprocessors` says inside.
    sources
        The folder of the ``.cu`` files, fuser's own by default.

    Raises
    ------
    KernelError
        For every error above.
    """
    reason = compilation.why_unavailable()
    if reason is not None:
        pytest.skip(f"needs the emulator: {reason}")
    emulator = Emulator(
        sources or module.KERNELS,
        deterministic,
        every_launch or FULL in os.environ,
        multiprocessors,
        [Output(t) for t in written],
    )
    before = launching.backend
    launching.backend = emulator
    try:
        yield
    finally:
        launching.backend = before
    for position, output in enumerate(emulator.outputs):
        output.note_torch()
        if output.unwritten.any():
            raise KernelError(
                f"{_where(output.unwritten)} of output {position} {_shown(output.tensor)} "
                "not written."
            )


# -- memory -------------------------------------------------------------------


def elements(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each byte from a tensor's first element to its last: does it belong to an element?"""
    return _elements(tuple(tensor.shape), tensor.stride(), tensor.element_size())


@functools.lru_cache(maxsize=256)
def _elements(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The mask of a layout, which all tensors of the layout share: it is never written to."""
    if 0 in shape:
        return np.zeros(0, dtype=np.bool_)
    steps = [size * stride for stride in strides]
    span = size + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    mask = np.zeros(span, dtype=np.bool_)
    np.lib.stride_tricks.as_strided(mask, (*shape, size), (*steps, 1))[...] = True
    mask.flags.writeable = False
    return mask


@dataclass
class Output:
    """A tensor that must be written, and which of its bytes are not yet."""

    tensor: torch.Tensor
    unwritten: np.ndarray[Any, np.dtype[np.bool_]] = field(init=False)
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.unwritten = elements(self.tensor).copy()
        self.version = self.tensor._version

    def note_torch(self) -> None:
        """Count the tensor as written if torch has changed it since the beginning."""
        if self.tensor._version != self.version:
            self.unwritten[:] = False


@dataclass
class Memory:
    """The bytes of one tensor, or of several that share bytes."""

    argument: int
    begin: int
    end: int
    tensors: list[torch.Tensor]

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes themselves, in this process."""
        array = (ctypes.c_uint8 * (self.end - self.begin)).from_address(self.begin)
        return np.ctypeslib.as_array(array)

    def elements(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the bytes belong to an element of a tensor."""
        if len(self.tensors) == 1:
            return elements(self.tensors[0])
        mask = np.zeros(self.end - self.begin, dtype=np.bool_)
        for tensor in self.tensors:
            own = elements(tensor)
            mask[tensor.data_ptr() - self.begin :][: own.size] |= own
        return mask

    def unwritten(self, outputs: list[Output]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the bytes are an output's and not written yet."""
        mask = np.zeros(self.end - self.begin, dtype=np.bool_)
        for output in outputs:
            here, there = _overlap(self, output)
            mask[here] |= output.unwritten[there]
        return mask


def _overlap(memory: Memory, output: Output) -> tuple[slice, slice]:
    """The bytes that both have, in the one and in the other."""
    address = output.tensor.data_ptr()
    begin = max(memory.begin, address)
    end = max(begin, min(memory.end, address + output.unwritten.size))
    return (
        slice(begin - memory.begin, end - memory.begin),
        slice(begin - address, end - address),
    )


def memories(args: Sequence[Any]) -> list[Memory]:
    """The memory of all tensors in a launch's arguments; tensors that share bytes share one."""
    found: list[Memory] = []
    for position, arg in enumerate(args):
        for tensor in arg.fields if isinstance(arg, Struct) else (arg,):
            if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
                continue
            begin = tensor.data_ptr()
            new = Memory(position, begin, begin + elements(tensor).size, [tensor])
            for old in [m for m in found if m.begin < new.end and new.begin < m.end]:
                found.remove(old)
                begin, end = min(old.begin, new.begin), max(old.end, new.end)
                new = Memory(old.argument, begin, end, old.tensors + new.tensors)
            found.append(new)
    return found


# -- the backend --------------------------------------------------------------


@dataclass
class Emulator(launching.LaunchBackend):
    """Runs launches in the worker, and compares the runs of each."""

    sources: Path
    deterministic: bool
    examines_every_launch: bool
    multiprocessor_count: int
    outputs: list[Output]

    device_type = "cpu"
    emulates_wgmma = False
    """Whether products of Hopper's tensor cores run here, which takes long."""

    def refusal(self) -> str | None:
        return None

    def multiprocessors(self, device: torch.device) -> int:
        return self.multiprocessor_count

    def shared_bytes(self, device: torch.device) -> int:
        return MAX_SHARED_BYTES

    def has_wgmma(self, device: torch.device) -> bool:
        return self.emulates_wgmma

    def tensor_map(self, matrix: torch.Tensor, box_rows: int) -> tuple[Any, ...]:
        """The fields of a ``TensorMap`` of ``fuser/core/sm90.cuh``, as ``sm90.cpp`` reads them.

        A matrix of bytes, of which boxes of 128 columns are loaded with a swizzle of 128 bytes. The
        matrix itself takes the place of its address.

        Raises
        ------
        KernelError
            For what CUDA's driver refuses.
        """
        (rows, columns), row_bytes, address = matrix.shape, matrix.stride(0), matrix.data_ptr()
        if not (0 < columns <= 2**32 and 0 < rows <= 2**32):
            raise KernelError(f"A tensor map gets a matrix of {rows} rows and {columns} columns.")
        if row_bytes % 16 != 0 or not columns <= row_bytes < 2**40:
            raise KernelError(
                f"A tensor map of {columns} columns gets rows of {row_bytes} bytes; it is a "
                "multiple of 16."
            )
        if address % 16 != 0:
            raise KernelError(f"A tensor map gets the address {address:#x}, no multiple of 16.")
        if not 1 <= box_rows <= 256:
            raise KernelError(f"A tensor map gets a box of {box_rows} rows; it has 1 to 256.")
        words = (columns, rows, row_bytes, 128, box_rows, 128, *(0,) * 9)
        return (matrix, *map(np.uint64, words))

    def run(self, kernel: Kernel, launch: Launch, args: tuple[Any, ...]) -> None:
        self._check_registered(kernel)
        encode(kernel.symbol, args, "cpu")  # refuses what a GPU would be refused
        encoded = [encode(kernel.symbol, (arg,), "cpu") for arg in args]
        for output in self.outputs:
            output.note_torch()
        memory = memories(args)
        request = self._request(kernel, launch, args, encoded, memory)
        try:
            self._run_by_schedules(request, memory, self._schedules(kernel, launch))
        except KernelError as error:
            raise KernelError(f"{kernel.symbol} ({launch}): {error}") from None
        _examined.add(kernel)

    def _check_registered(self, kernel: Kernel) -> None:
        if isinstance(kernel.module, Path) or headers_in(kernel.symbol):
            return  # a user's, or with a user's stage
        known = kernel_instantiations.instantiations()
        if self.sources == module.KERNELS and kernel.symbol not in known.get(kernel.module, ()):
            raise KernelError(
                f"{kernel.symbol} of {kernel.module}.cu is launched, and the compile check does "
                "not know it: its launcher's instantiations() must return it."
            )

    def _request(
        self,
        kernel: Kernel,
        launch: Launch,
        args: tuple[Any, ...],
        encoded: Sequence[Encoded],
        memory: list[Memory],
    ) -> Request:
        if launch.shared_bytes > MAX_SHARED_BYTES:
            raise KernelError(
                f"{kernel.symbol} asks for {launch.shared_bytes} bytes of shared memory; a block "
                f"has {MAX_SHARED_BYTES}."
            )
        symbols = _groups.get(kernel, (kernel.symbol,))
        return Request(
            library=compilation.library(self.sources, kernel.module, symbols),
            symbol=kernel.symbol,
            grid=_three(launch.grid),
            block=_three(launch.block),
            shared_bytes=launch.shared_bytes,
            buffers=tuple(Buffer(m.argument, m.bytes().tobytes(), m.begin) for m in memory),
            arguments=tuple(
                _argument(arg, one, memory) for arg, one in zip(args, encoded, strict=True)
            ),
        )

    def _schedules(self, kernel: Kernel, launch: Launch) -> int:
        """How many orders of threads a launch runs in."""
        if kernel in _examined and not self.examines_every_launch and not self.outputs:
            return 1
        # Threads of one warp run in the same order warp by warp.
        return len(SCHEDULES) - (math.prod(launch.block) <= WARP)

    def _run_by_schedules(self, request: Request, memory: list[Memory], count: int) -> None:
        masks = [m.elements() for m in memory]
        unwritten = [m.unwritten(self.outputs) for m in memory]
        garbage = [~mask | not_yet for mask, not_yet in zip(masks, unwritten, strict=True)]
        has_garbage = [bool(which.any()) for which in garbage]
        results = []
        for schedule, poison in enumerate(POISONS[:count]):
            poisoned = []
            for buffer, which, has_some in zip(request.buffers, garbage, has_garbage, strict=True):
                if not has_some:
                    poisoned.append(buffer)
                    continue
                contents = np.frombuffer(bytearray(buffer.contents), dtype=np.uint8)
                contents[which] = poison
                poisoned.append(Buffer(buffer.argument, contents.tobytes(), buffer.address))
            sent = Request(**{**vars(request), "buffers": tuple(poisoned)})
            answer = _worker.run(sent, schedule, poison)
            results.append([np.frombuffer(buffer, dtype=np.uint8) for buffer in answer])
        places = zip(memory, masks, unwritten, has_garbage, *results, strict=True)
        for m, mask, not_yet, has_some, *runs in places:
            if not has_some and count == 1:  # nothing to compare
                np.copyto(m.bytes(), runs[0])
                continue
            untouched = [run == poison for run, poison in zip(runs, POISONS, strict=False)]
            between = ~mask & ~np.logical_and.reduce(untouched)
            if between.any():
                raise KernelError(
                    f"{_where(between)} between the elements of argument {m.argument} "
                    f"{_shown(m.tensors[0])} written."
                )
            left = not_yet & np.logical_and.reduce(untouched)
            for run, how in zip(runs[1:], SCHEDULES[1:], strict=False):
                differs = mask & ~left & (runs[0] != run)
                if differs.any() and self.deterministic:
                    raise KernelError(
                        f"{_where(differs)} of argument {m.argument} {_shown(m.tensors[0])} not "
                        f"the same when {how}."
                    )
            for output in self.outputs:
                here, there = _overlap(m, output)
                output.unwritten[there] &= left[here]
            np.copyto(m.bytes(), runs[0], where=mask)


def _argument(arg: Any, encoded: Encoded, memory: list[Memory]) -> Argument:
    """An argument as its bytes, with its tensors' addresses to be filled in by the worker."""
    contents = struct.pack(encoded.format, *encoded.values)
    if isinstance(arg, Struct):
        addresses = []
        place = 0
        for field_ in arg.fields:
            size = 8 if field_ is None or isinstance(field_, torch.Tensor) else field_.nbytes
            place = -(-place // size) * size
            addresses += _address(place, field_, memory)
            place += size
        return Argument("s", contents, tuple(addresses))
    if arg is None or isinstance(arg, torch.Tensor):
        return Argument("p", contents, tuple(_address(0, arg, memory)))
    return Argument("f" if isinstance(arg, np.floating) else "i", contents)


def _address(place: int, tensor: Any, memory: list[Memory]) -> list[tuple[int, int, int]]:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return []
    begin = tensor.data_ptr()
    index = next(i for i, m in enumerate(memory) if m.begin <= begin < m.end)
    return [(place, index, begin - memory[index].begin)]


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _shown(tensor: torch.Tensor) -> str:
    return f"({tensor.dtype}, shape {tuple(tensor.shape)})".replace("torch.", "")


def _where(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> str:
    """The beginning of a sentence about the bytes of a mask."""
    count, first = int(mask.sum()), int(mask.argmax())
    return f"Byte {first}" if count == 1 else f"{count} bytes, the first at {first},"
