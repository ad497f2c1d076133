"""The process that runs compiled kernels, and what it answers.

AddressSanitizer has to be in a process from its first instruction, and it ends the process at the
first error. So kernels do not run in Python: a small executable, built with the sanitizer, gets a
launch with the tensors' bytes through a pipe, allocates each tensor anew so that its end is the end
of an allocation, runs the kernel, and sends the bytes back. It stays for the next launch; after an
error it is gone, its report is in the exception, and the next launch starts another.
"""

from __future__ import annotations

import atexit
import os
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from emulator import compile as compilation
from emulator.errors import KernelError

SECONDS = 60
"""How long one run of a kernel may take."""

SCHEDULES = (
    "threads run in order",
    "threads run in the opposite order and unwritten memory holds another garbage",
    "a warp runs to its next barrier before another one starts",
)
"""In what order threads run, as ``worker.cpp`` numbers them."""

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=0:quarantine_size_mb=8:color=never",
    "UBSAN_OPTIONS": "color=never:print_stacktrace=1",
}


NOISE = re.compile(
    r"^\s*#\d.*(fuser_emulator|in fiber|__interceptor|\(/)|^0x\w+( is located|: note)|^allocated by"
    r"|^[ =^]*$|^  ([0-9a-f]{2} +){8}"
)


@dataclass(frozen=True)
class Buffer:
    """Memory of its own for one or more tensors: the first of their arguments, bytes, address."""

    argument: int
    contents: bytes
    address: int


@dataclass(frozen=True)
class Argument:
    """One argument: ``kind`` as in ``runtime.hpp``, its bytes, and the addresses in them.

    An address is a place in the bytes, a buffer's index and an offset into the buffer.
    """

    kind: str
    contents: bytes
    addresses: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Request:
    """A launch: which kernel of which library, its shape, its memory and its arguments."""

    library: Path
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    buffers: tuple[Buffer, ...] = field(repr=False)
    arguments: tuple[Argument, ...] = field(repr=False)

    def message(self, schedule: int, poison: int) -> bytes:
        """The bytes to send. ``poison`` fills shared memory before every block."""
        parts = [_text(str(self.library)), _text(self.symbol)]
        shape = (*self.grid, *self.block, self.shared_bytes, schedule, poison)
        parts += [_numbers(*shape, len(self.buffers))]
        for buffer in self.buffers:
            parts += [_numbers(buffer.argument, len(buffer.contents), buffer.address % 256)]
            parts += [buffer.contents]
        parts += [_numbers(len(self.arguments))]
        for argument in self.arguments:
            parts += [_numbers(ord(argument.kind)), _text(argument.contents)]
            parts += [_numbers(len(argument.addresses))]
            parts += [_numbers(*address) for address in argument.addresses]
        return b"".join(parts)


class Worker:
    """The executable, started at the first run and again after an error."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        # A file, since nobody reads a pipe while the worker writes its report.
        self._reports = tempfile.TemporaryFile()  # noqa: SIM115
        atexit.register(self.stop)

    def run(self, request: Request, schedule: int, poison: int) -> list[bytearray]:
        """The buffers after a run by a :data:`SCHEDULES` index.

        Raises
        ------
        KernelError
            With the worker's report.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request.message(schedule, poison))
            process.stdin.flush()
        except BrokenPipeError:
            pass
        if not process.stdout.read(8):
            self.stop()
            raise KernelError(trimmed(self._report()))
        buffers = [bytearray(process.stdout.read(len(b.contents))) for b in request.buffers]
        printed = self._report()
        if printed:
            print(printed, end="")
        return buffers

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [str(compilation.worker()), str(SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._reports,
                env={**os.environ, **OPTIONS},
            )
        return self._process

    def _report(self) -> str:
        """What the worker wrote since the last time."""
        self._reports.seek(0)
        report = self._reports.read().decode(errors="replace")
        self._reports.seek(0)
        self._reports.truncate()
        return report


def trimmed(report: str) -> str:
    """A sanitizer's report without what is not about the kernel: the worker, its heap, shadows."""
    kept: list[str] = []
    in_shadow = False
    for line in report.splitlines():
        in_shadow = in_shadow or line.startswith("SUMMARY")
        if line.startswith(("in ", "at byte ")):
            kept.append(line)
        elif not in_shadow and not NOISE.search(line):
            kept.append(re.sub(r"^==\d+==ERROR: ", "", line))
    return "\n".join(kept) or "The worker ended without a report."


def _numbers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _text(text: str | bytes) -> bytes:
    contents = text.encode() if isinstance(text, str) else text
    return _numbers(len(contents)) + contents
