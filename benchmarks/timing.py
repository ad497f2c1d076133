"""Time of variants that do the same work: alternated in one run, cold in L2, on random data.

On a GPU a variant is captured once into a CUDA graph that makes its calls back to back, each on
the next of several input sets, which together are several times as large as the L2. A call that
cannot be captured is timed without a graph, with its host time. Each round replays every variant
once, in another order, so that a power-limited chip is equally warm for all: after a variant that
needs less power, the next one runs some percent faster.
On a CPU a clock times the same calls.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], object]
Calls = Mapping[str, Call]
Reading = Callable[[], float]

ROUNDS = {"cuda": 25, "cpu": 5}
HOST_ROUNDS = 7
# Input sets together move at least this many times the L2, so that no input is in it when read.
L2_MULTIPLE = 4
MOST_SETS = 512
# The last cache of a CPU is unknown; sizes on a CPU are for trying the script, not for results.
CPU_SETS = 2
# One replay moves at least this much: it takes a millisecond, so its launch does not matter.
REPLAY_BYTES = 4e9
COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, and the 20th and 80th percentile of the rounds.

    ``host`` is the median of the seconds until a call returns, on a device that was idle before.
    """

    median: float
    p20: float
    p80: float
    method: str = "clock"
    host: float = field(default=math.nan, compare=False)

    @classmethod
    def of(
        cls, seconds: Sequence[float], method: str = "clock", host: Sequence[float] = ()
    ) -> Timing:
        """The statistics of at least one sample."""
        middle = statistics.median(seconds)
        of_host = statistics.median(host or seconds)
        if len(seconds) == 1:
            return cls(middle, middle, middle, method, of_host)
        low, _, _, high = statistics.quantiles(seconds, n=5, method="inclusive")
        return cls(middle, low, high, method, of_host)


@dataclass(frozen=True)
class Failure:
    """The reason why a variant has no time, in one line."""

    reason: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The error's type and its first line that is not empty."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return cls(": ".join([type(error).__name__, *lines[:1]])[:200])


Result = Timing | Failure


@dataclass(frozen=True)
class Prepared:
    """Calls that are ready to be timed together.

    ``method`` is ``"clock"``, ``"graph"``, ``"events"``, or ``"not captured"`` if a graph was
    wanted and the calls could not be captured.
    """

    run: Call
    calls: int
    method: str


# -- clocks -------------------------------------------------------------------


class HostClock:
    """Times calls on a CPU."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def prepare(self, calls: Sequence[Call], passes: int) -> Prepared:
        """One run of all ``calls``, ``passes`` times, after each was called once."""
        for call in calls:
            call()

        def run() -> None:
            for _ in range(passes):
                for call in calls:
                    call()

        return Prepared(run, passes * len(calls), "clock")

    def sample(self, run: Call) -> Reading:
        """Time one run; the reading is its duration."""
        begin = self.now()
        run()
        elapsed = self.now() - begin
        return lambda: elapsed

    def wait(self) -> None:
        """Nothing to wait for: everything has run."""

    def host(self, run: Call) -> list[float]:
        """The times until a run returns; none where those are the times of the run."""
        return []


class DeviceClock(HostClock):
    """Times calls on the current CUDA device with events on its queue."""

    def __init__(self, *, is_captured: bool = True) -> None:
        super().__init__()
        self.is_captured = is_captured

    def prepare(self, calls: Sequence[Call], passes: int) -> Prepared:
        """A CUDA graph of the calls, or the calls if they cannot be captured."""
        # First on a side stream, as capturing requires: this compiles and tunes kernels.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        plain = super().prepare(calls, passes)
        if not self.is_captured:
            return Prepared(plain.run, plain.calls, "events")
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                plain.run()
        except RuntimeError:
            torch.cuda.synchronize()
            return Prepared(plain.run, plain.calls, "not captured")
        return Prepared(graph.replay, plain.calls, "graph")

    def sample(self, run: Call) -> Reading:
        """Put one run between two events; the reading is valid after :meth:`wait`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        return lambda: begin.elapsed_time(end) / 1e3

    def wait(self) -> None:
        """Let the device finish."""
        torch.cuda.synchronize()

    def host(self, run: Call) -> list[float]:
        """The times until a run returns, each on an idle device."""
        times = []
        for _ in range(HOST_ROUNDS):
            self.wait()
            begin = self.now()
            run()
            times.append(self.now() - begin)
        self.wait()
        return times


def clock(device: str, *, is_captured: bool = True) -> HostClock:
    """The clock of a device."""
    return DeviceClock(is_captured=is_captured) if device == "cuda" else HostClock()


# -- measuring ----------------------------------------------------------------


def set_count(nbytes: float, device: str) -> int:
    """The number of input sets for a call that moves ``nbytes``, so that none is in the L2."""
    if device != "cuda":
        return CPU_SETS
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return sets_beyond(properties.L2_cache_size, nbytes)


def sets_beyond(cache: int, nbytes: float) -> int:
    """The least number of sets, two at least, that move ``L2_MULTIPLE`` times a cache."""
    return min(MOST_SETS, max(2, int(-(-L2_MULTIPLE * cache // nbytes))))


def pass_count(nbytes: float, sets: int, device: str) -> int:
    """The number of passes over the sets in one run."""
    if device != "cuda":
        return 1
    return max(1, min(round(REPLAY_BYTES / (sets * nbytes)), MOST_SETS // sets))


def measure(
    sets: Sequence[Calls], timer: HostClock, *, passes: int = 1, rounds: int = 25
) -> dict[str, Result]:
    """Time every variant, alternating them.

    Parameters
    ----------
    sets
        For each input set the variants' calls by name; the names are the same in all.
    timer
        The clock.
    passes
        How often one run goes over the sets.
    rounds
        How often each variant is timed; one more round comes first and is not counted.

    Returns
    -------
    dict
        Seconds of one call by variant, or its failure.
    """
    ready: dict[str, Prepared] = {}
    results: dict[str, Result] = dict.fromkeys(sets[0], Failure("not run"))
    for name in sets[0]:
        try:
            ready[name] = timer.prepare([calls[name] for calls in sets], passes)
        except Exception as error:  # a variant that fails must not stop the others
            results[name] = Failure.of(error)
    names = list(ready)
    readings: dict[str, list[Reading]] = {name: [] for name in names}
    shuffled = random.Random(0)  # the same on all ranks, which communicate
    for round_ in range(rounds + 1):
        for name in shuffled.sample(names, len(names)):
            reading = timer.sample(ready[name].run)
            if round_:
                readings[name].append(reading)
    timer.wait()
    for name, prepared in ready.items():
        seconds = [reading() / prepared.calls for reading in readings[name]]
        host = [each / prepared.calls for each in timer.host(prepared.run)]
        results[name] = Timing.of(seconds, prepared.method, host)
    return results


def copy_bandwidth(device: str, rounds: int) -> float:
    """Bytes a second, read and written, of a large copy on the device; random data."""
    count = COPY_BYTES[device] // 2

    def calls(seed: int) -> Calls:
        generator = torch.Generator(device).manual_seed(seed)
        options: dict[str, Any] = {"dtype": torch.int16, "device": device}
        source = torch.randint(-(2**15), 2**15, (count,), generator=generator, **options)
        target = torch.empty_like(source)
        return {"copy": lambda: target.copy_(source)}

    sets = [calls(seed) for seed in range(2)]
    # Launched, not captured: a memcpy node of a graph takes 1.6 times as long on an H200.
    timer = clock(device, is_captured=False)
    result = measure(sets, timer, passes=2, rounds=rounds)["copy"]
    if isinstance(result, Failure):
        raise RuntimeError(f"A copy of {COPY_BYTES[device]} bytes failed: {result.reason}")
    return 2 * COPY_BYTES[device] / result.median
