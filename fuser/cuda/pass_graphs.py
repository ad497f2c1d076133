"""CUDA graphs of launch sequences, graph by the addresses of their tensors.

torch's caching allocator gives the tensors of a training step the addresses that those of an
earlier step had. A sequence whose tensors are where they were does the same on the GPU again, so
the graph that was captured of the earlier call is replayed: one launch in place of all. Nothing is
copied, no tensor is kept, and where an address differs the sequence is played.

What leaves a sequence is allocated before its graph. What does not is in a memory pool that all
graphs of a stream share: they run one after the other, and none reads what another left there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

import torch

from fuser.errors import InputTypeError
from fuser.torch_private import cuda_stream, dispatch_modes, product_settings

Body = Callable[[list[torch.Tensor]], None]
"""The launches and calls of a sequence, over its inputs and results; it empties the list."""

FEWEST_CALLS = 3
"""Launches and products of a sequence that is worth a graph."""
MOST_GRAPHS = 64
"""Of one sequence: a graph for each set of addresses. Equal blocks in torch.compile share one."""
MOST_OF_PROCESS = 1024
"""Graphs of ten kernels each take 140 MiB of a GPU and as much of the host."""
PATIENCE = 256
"""After so many misses in turn a sequence plays as many calls, then twice as many, unlooked at."""
LONGEST_PAUSE = 4096


class Switch:
    """Whether graphs are on."""

    is_on = os.environ.get("FUSER_GRAPH_PASSES", "1") != "0"


def graph_passes(enabled: bool) -> None:
    """Whether recorded passes are replayed as CUDA graphs where addresses come back.

    On by default; the environment variable ``FUSER_GRAPH_PASSES=0`` turns it off. Graphs that exist
    are kept, and are used again after ``graph_passes(True)``.

    Parameters
    ----------
    enabled
        Whether passes of this process are, True or False.

    Raises
    ------
    InputTypeError
        If it is neither.
    """
    if not isinstance(enabled, bool):
        raise InputTypeError(f"graph_passes takes True or False, got {enabled!r}.")
    Switch.is_on = enabled


class _Side:
    """Where the passes of a stream are captured: another stream, and a pool of memory.

    The pool is that of the graphs that live; torch frees it with the last of them.
    """

    def __init__(self, device: int) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._nbytes = 0
        self._pool: Any = None
        self._graphs: weakref.WeakSet[_Replay] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """The memory of the pool."""
        return self._nbytes if len(self._graphs) else 0

    def capture(self, run: Callable[[], None]) -> _Replay:
        """A graph of what ``run`` launches."""
        living = [*self._graphs]
        if not living:
            self._pool = torch.cuda.graph_pool_handle()
            self._nbytes = 0
        reserved = _reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        replay = _Replay(graph, max(_reserved(self._device) - reserved, 0))
        self._nbytes += replay.nbytes
        self._graphs.add(replay)
        return replay


def _reserved(device: int) -> int:
    """The bytes that torch has taken from a GPU; a capture takes more, and none that are free."""
    try:
        return torch.cuda.memory_reserved(device)
    except RuntimeError:  # an allocator of the user, which counts nothing
        return 0


class _Replay:
    """Replays a graph, which is not destroyed in a capture: CUDA would end that one.

    ``nbytes`` is what its capture added to the pool.
    """

    dead: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self, graph: torch.cuda.CUDAGraph, nbytes: int) -> None:
        self._graph = graph
        self.nbytes = nbytes
        self.replay = graph.replay

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and torch.cuda.is_current_stream_capturing():
            self.dead.append(self._graph)


class Capturer:
    """Captures and replays on a GPU. A test sets another one as :data:`capturer`."""

    def __init__(self) -> None:
        self._sides: dict[tuple[int, int], _Side] = {}
        # torch has one capture of memory at a time; who comes meanwhile plays.
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The memory that the graphs of the process hold."""
        return sum([side.nbytes for side in [*self._sides.values()]])

    def device_of(self, index: int | None) -> int | None:
        """The index of the GPU whose launches are captured; None without one."""
        return index if torch.backends.cuda.is_built() else None  # type: ignore[no-untyped-call]

    def place(self, device: int) -> Hashable:
        """What a replay depends on besides addresses; None if nothing may be replayed now."""
        if dispatch_modes() or torch.cuda.is_current_stream_capturing():
            return None
        _Replay.dead.clear()
        return (cuda_stream(device), *product_settings())

    def capture(self, device: int, body: Body, tensors: list[torch.Tensor]) -> Any:
        """What replays a call of ``body``, which does not run; None if another thread captures."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            current = (device, cuda_stream(device))
            side = self._sides.get(current)
            if side is None:
                side = self._sides[current] = _Side(device)
            return side.capture(lambda: body([*tensors]))
        finally:
            self._lock.release()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Objects that are collected in a capture may call what it does not allow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


capturer: Any = Capturer()


class _AddressGraph:
    __slots__ = ("__weakref__", "captured", "last_use", "replay")
    of_process: ClassVar[weakref.WeakSet[_AddressGraph]] = weakref.WeakSet()

    def __init__(self, captured: Any, last_use: int) -> None:
        self.of_process.add(self)
        self.captured = captured
        self.replay: Callable[[], None] = captured.replay
        self.last_use = last_use


def graphs_of_process() -> tuple[int, int]:
    """The number of graphs that exist, and the bytes that they hold."""
    return len(_AddressGraph.of_process), capturer.nbytes


class PassGraphs:
    """The graphs of a sequence on the GPU ``device``, by the addresses of its tensors."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.refusal: str | None = None
        """Why it is never captured; None if it may be."""
        self.calls = self.hits = 0
        self.nbytes = 0
        """The memory that its captures added to what the graphs of a stream share."""
        self._graphs: dict[Hashable, _AddressGraph] = {}
        self._seen: dict[Hashable, int] = {}
        """The last calls with the latest addresses that have no graph."""
        self._misses = 0
        self._pause = PATIENCE
        self._resumes_at = 0

    @property
    def count(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    def run(self, body: Body, addresses: tuple[int, ...], tensors: list[torch.Tensor]) -> None:
        """Replay the graph for ``addresses``, or run ``body`` over ``tensors``, which it empties.

        The second call with the same addresses is captured.
        """
        self.calls = call = self.calls + 1
        place = None
        if Switch.is_on and self.refusal is None and call >= self._resumes_at:
            place = capturer.place(self.device)
        if place is None:
            body(tensors)
            return
        key = (place, addresses)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._captured(body, key, tensors, call)
        if graph is None:
            body(tensors)
            return
        graph.last_use = call
        self.hits += 1
        self._misses = 0
        graph.replay()
        tensors.clear()

    def _captured(
        self, body: Body, key: Hashable, tensors: list[torch.Tensor], call: int
    ) -> _AddressGraph | None:
        """A new graph if the addresses were seen before; else they are noted."""
        before = self._seen.pop(key, 0)
        if not before:
            self._miss(call)
        oldest = None
        if before and len(self._graphs) >= MOST_GRAPHS:
            oldest = min([*self._graphs.items()], key=lambda item: item[1].last_use)
            if oldest[1].last_use >= before:
                before = 0  # its addresses come back later than those of every graph
        elif before and len(_AddressGraph.of_process) >= MOST_OF_PROCESS:
            before = 0
        if not before:
            while len(self._seen) >= PATIENCE:
                self._seen.pop(next(iter(self._seen)), None)
            self._seen[key] = call
            return None
        try:
            captured = capturer.capture(self.device, body, tensors)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self.refusal = f"its capture failed: {str(error).splitlines()[0]}"
            return None
        if captured is None:
            return None
        if oldest is not None:
            self._graphs.pop(oldest[0], None)
        self._graphs[key] = graph = _AddressGraph(captured, call)
        self.nbytes += captured.nbytes
        return graph

    def _miss(self, call: int) -> None:
        self._misses += 1
        if self._misses >= PATIENCE:
            self._resumes_at = call + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._misses = 0
            self._seen.clear()
