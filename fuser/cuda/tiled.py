"""Launches of ``fuser_tiled<Producer, Store>``: what the launchers of all formats share.

The rules of these launchers, on top of what each one says: outputs are keyword arguments, and a
launcher writes all of every output, the padding of scales with zeros. Inputs are fp32, fp16 or
bf16, of ``b`` bytes an element. A launcher raises InputError if a tensor does not match its
description, allocates nothing, and does not wait for the device.

The rows of a matrix may be at any distance, but the elements of a row are next to each other. A
kernel reads and writes unaligned data (views at odd offsets, odd widths) one element at a time.

A quantize launcher also takes a :class:`~fuser.cuda.arguments.Producer` as its input. Then ``b`` is
what the producer reads for an element, and one kernel computes the values, rounds them to the
producer's dtype and quantizes them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from fuser.cuda import launch
from fuser.cuda.arguments import ELEMENTS, TILE_RUN, Producer, Struct, int32, int64
from fuser.cuda.checks import (
    FLOAT8,
    boolean,
    check_buffer,
    check_element,
    check_float8,
    check_matrix,
    is_aligned,
)
from fuser.cuda.launch import TILE, TILE_THREADS, Kernel, Launch, tiles
from fuser.errors import KernelUnavailable, StateError
from fuser.formats import DType, ceil_div

ALIGNED = ((True, True), (True, False), (False, False))
"""Alignment of a producer and of its store; with an unaligned producer the store is unaligned."""

# -- producers ----------------------------------------------------------------


def as_producer(launcher: str, x: torch.Tensor | Producer) -> Producer:
    """The producer that loads a matrix, for a launcher; a producer is returned as it is."""
    if isinstance(x, Producer):
        return x
    m, k = check_matrix(launcher, x)
    element = check_element(launcher, x)
    # The threads of a tile read 16 bytes at a time, 8 elements each.
    aligned = (
        x.data_ptr() % 16 == 0
        and k % TILE_RUN == 0
        and (m <= 1 or (x.stride(0) * x.element_size()) % 16 == 0)
    )
    argument = Struct((x, int64(x.stride(0))))
    return Producer(loads(element, aligned), argument, m, k, x.dtype, aligned)


def loads(element: str, aligned: bool) -> str:
    """The C++ type of the producer that loads a matrix of that element."""
    return f"fuser::LoadProducer<{element}, {boolean(aligned)}>"


# -- launches -----------------------------------------------------------------


def transposes_aligned(
    producer: Producer, row: torch.Tensor | None, col: torch.Tensor | None
) -> bool:
    """Whether a store writes 8 bytes of ``row`` and 16 of the transposed ``col`` at a time."""
    aligned = producer.is_aligned and is_aligned(row, 8)
    return aligned and (col is None or (is_aligned(col, 16) and producer.rows % 16 == 0))


JOINABLE_STORES = ("Fp8Store", "Block1dStore", "Block2dStore", "Mxfp8Store", "Mxfp8SquareStore")
"""Those of one pass, which look at their own tile alone: two such launches may be one."""


class _Tiled(NamedTuple):
    """The launch of a producer with its store."""

    kernel: Kernel
    producer: Producer
    store: Struct

    @property
    def is_joinable(self) -> bool:
        """Whether the store is one of :data:`JOINABLE_STORES`."""
        return any(f" fuser::{store}<" in self.kernel.symbol for store in JOINABLE_STORES)

    @property
    def arguments(self) -> tuple[Launch, Struct, Struct, np.int64, np.int32]:
        """What the kernel is called with."""
        m, k = self.producer.rows, self.producer.columns
        return tiles(m, k), self.producer.argument, self.store, int64(m), int32(k)

    def run_with(self, other: _Tiled) -> bool:
        """Both in one launch, if they go together."""
        m, k, other_k = self.producer.rows, self.producer.columns, other.producer.columns
        is_alike = other.producer.rows == m and other.kernel.module == self.kernel.module
        if not (is_alike and m and 0 < other_k <= k and self.is_joinable):
            return False
        of_other = ceil_div(other_k, TILE)
        blocks = ceil_div(m, TILE) * of_other * (ceil_div(ceil_div(k, TILE), of_other) + 1)
        arguments = [a for one in (self, other) for a in (one.producer.argument, one.store)]
        sizes = int64(m), int32(k), int32(other_k)
        pair = pair_of(self.kernel, other.kernel)
        pair(Launch((blocks,), (TILE_THREADS,)), *arguments, *sizes)
        return True

    def run_late(self) -> None:
        """Run, after the caller has gone on, which therefore has no fallback for it any more."""
        try:
            self.kernel(*self.arguments)
        except KernelUnavailable as error:
            raise NotInOneLaunch(str(error)) from error


def pair_of(kernel: Kernel, other: Kernel) -> Kernel:
    """The kernel that does the work of two of :func:`store_kernel`, of one source."""
    types = [one.symbol[len("fuser_tiled<") : -1] for one in (kernel, other)]
    return Kernel(kernel.module, f"fuser_tiled_pair<{', '.join(types)}>")


class NotInOneLaunch(StateError):
    """A launch that waited for another one has no kernel: do the work again, without waiting."""


class _Waiting(threading.local):
    """The launches of a thread that wait for another one."""

    is_on = False
    first: _Tiled | None = None


_waiting = _Waiting()


@contextlib.contextmanager
def in_one_launch() -> Iterator[None]:
    """The first store that is launched inside waits for the second one, and joins its launch.

    What the first writes is to be read after the context. If the two do not go together, each has a
    launch of its own; NotInOneLaunch if there is no kernel for the one that waited.
    """
    outer, _waiting.is_on = _waiting.is_on, True
    launch.recording.is_joined = True
    try:
        yield
    finally:
        _waiting.is_on = launch.recording.is_joined = outer
        first, _waiting.first = _waiting.first, None
        if first is not None:
            first.run_late()


def launch_store(kernel: Kernel, producer: Producer, store: Struct) -> None:
    """Launch a producer with its store, a block for each tile."""
    tiled = _Tiled(kernel, producer, store)
    if _waiting.is_on and _waiting.first is None and tiled.is_joinable:
        _waiting.first = tiled
        return
    first, _waiting.first = _waiting.first, None
    if first is not None:
        try:
            if tiled.run_with(first):
                return
        except KernelUnavailable:
            first.run_late()
            raise
        first.run_late()
    tiled.kernel(*tiled.arguments)


def launch_decoder(
    kernel: Kernel, producer: Struct, out: torch.Tensor, rows: int, columns: int, transposed: bool
) -> None:
    """Launch a producer that decodes ``[rows, columns]`` to ``out``, transposed or not."""
    target = Struct((out,)) if transposed else out
    kernel(tiles(rows, columns), producer, target, int64(rows), int32(columns))


def decode_blocks(
    source: str,
    launcher: str,
    producer: Struct,
    dtype: DType,
    out_dtype: torch.dtype,
    columnwise: bool,
    out: torch.Tensor,
) -> None:
    """Launch the producer of checked data, its first field, whose blocks are along its columns.

    ``out`` is ``[M, K]``, contiguous and of ``out_dtype``; ``columnwise`` data is transposed back.
    """
    data = producer.fields[0]
    rows, columns = data.shape
    check_buffer(
        launcher, "out", out, out_dtype, (columns, rows) if columnwise else (rows, columns)
    )
    element, of = check_element(launcher, out), check_float8(launcher, dtype)
    aligned = is_aligned(data, 8) and columns % 8 == 0 and is_aligned(out, 16)
    aligned = aligned and not (columnwise and rows % 8)
    kernel = block_decoder(source, element, of, aligned, columnwise)
    launch_decoder(kernel, producer, out, rows, columns, columnwise)


# -- kernels ------------------------------------------------------------------


def store_kernel(source: str, producer: str, store: str) -> Kernel:
    """The kernel of a producer and a store of ``fuser``, both C++ types."""
    return Kernel(source, f"fuser_tiled<{producer}, fuser::{store}>")


def decoder_kernel(
    source: str, producer: str, element: str, aligned: bool, transposed: bool
) -> Kernel:
    """The kernel that writes what a producer decodes, transposed or not."""
    if transposed:
        return store_kernel(source, producer, f"TransposedStore<{element}, {boolean(aligned)}>")
    return Kernel(source, f"fuser_tiled_rows<{producer}>")


@functools.cache
def block_decoder(source: str, element: str, of: str, aligned: bool, columnwise: bool) -> Kernel:
    """The kernel of a source that decodes blocks along the columns of a stored matrix."""
    producer = f"fuser::BlockProducer<{element}, {of}, {boolean(aligned)}>"
    return decoder_kernel(source, producer, element, aligned, columnwise)


def block_decoders(source: str) -> tuple[Kernel, ...]:
    """Every :func:`block_decoder` of a source."""
    return tuple(
        block_decoder(source, *types, columnwise)
        for types in decoder_types()
        for columnwise in (False, True)
    )


def decoder_types() -> Iterable[tuple[str, str, bool]]:
    """Every element, 8-bit type and alignment of a kernel that dequantizes."""
    return itertools.product(ELEMENTS.values(), FLOAT8.values(), (False, True))


def quantizing_kernels(
    stores: Callable[[str, DType, bool], tuple[Kernel, ...]],
) -> tuple[Kernel, ...]:
    """Matrices of every dtype and alignment with each store that ``stores`` returns."""
    return tuple(
        kernel
        for element in ELEMENTS.values()
        for of_producer, of_store in ALIGNED
        for to in FLOAT8
        for kernel in stores(loads(element, of_producer), to, of_store)
    )
