"""A stand-in, on a CPU, for CUDA graphs that are found by addresses.

A replay calls what was captured over the addresses of the capture, whatever is there by then: an
address that does not belong to the call any more shows as other values.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fuser.cuda import pass_graphs, sequence
from fuser.source import SourceCode

ALIGNMENT = 64
"""Of memory, in bytes, as torch has it on a CPU: the order of a sum may follow from it."""


def at_its_address(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, which it does not keep."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    place = (tensor.shape, tensor.stride(), tensor.storage_offset())
    return torch.empty(0, dtype=tensor.dtype).set_(raw.untyped_storage(), place[2], *place[:2])


class Replay(NamedTuple):
    replay: Callable[[], None]
    nbytes: int


class CpuCapturer:
    """Captures on the CPU; ``captures`` counts them."""

    def __init__(self) -> None:
        self.captures = 0
        self.nbytes = 0
        self.added = 1000
        """The bytes that a capture adds to the memory of graphs."""
        self.setting: Hashable = None
        """Stands for the stream and torch's settings."""
        self.error: Exception | None = None
        """Raised by captures."""

    def device_of(self, index: int | None) -> int:
        return 0

    def place(self, device: int) -> Hashable:
        return (self.setting,)

    def capture(self, device: int, body: Any, tensors: list[torch.Tensor]) -> Replay:
        if self.error is not None:
            raise self.error
        self.captures += 1
        self.nbytes += self.added
        held = list(map(at_its_address, tensors))
        return Replay(lambda: body([*held]), self.added)


class Memory:
    """An allocator that gives the first free block of a size, as torch's on a GPU does."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, Any]]] = {}

    def new(self, layout: sequence.Dense, *, is_zeroed: bool) -> torch.Tensor:
        """A tensor in memory that had other values: ones, unless it is zeroed."""
        count = max(layout.nbytes, 1)
        free = self._free.setdefault(count, [])
        if free:
            address, block = heapq.heappop(free)
        else:
            whole = np.empty(count + ALIGNMENT, dtype=np.uint8)
            start = -whole.ctypes.data % ALIGNMENT
            block = whole[start : start + count]
            address = block.ctypes.data
        block.fill(0 if is_zeroed else 255)  # NaN
        part = block[:]
        weakref.finalize(part, heapq.heappush, free, (address, block))
        raw = torch.from_numpy(part).untyped_storage()
        return torch.empty(0, dtype=layout.dtype).set_(raw, 0, layout.shape, layout.strides)

    def allocate(self, src: SourceCode, action: sequence.Allocation, contiguous: Any) -> None:
        """Write the allocation of a tensor, as the sequences' own function does."""
        is_zeroed = contiguous is torch.zeros

        def new() -> torch.Tensor:
            return self.new(action.layout, is_zeroed=is_zeroed)

        src.add(f"t{action.place} = {src.bind(f'new_{action.place}', new)}()")


@contextlib.contextmanager
def on_cpu_graphs() -> Iterator[CpuCapturer]:
    """Inside, sequences are replayed by the stand-in, and addresses come back."""
    capturer = CpuCapturer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_graphs, "capturer", capturer)
        patch.setattr(sequence, "_allocate", Memory().allocate)
        yield capturer
