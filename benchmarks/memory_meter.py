"""Memory of torch's tensors during a piece of work: at the peak, and at the end.

On a GPU torch's allocator counts. The CPU allocator does not count, so torch's
profiler records every allocation and every free, also inside operators and in
the backward of autograd, and this module adds them up in their order. Memory
that a library allocates without torch's allocator is not counted.
"""

from __future__ import annotations

import functools
import gc
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

METHODS = {
    "cpu": "every allocation and free of torch's CPU allocator, from torch.profiler",
    "cuda": "torch.cuda.max_memory_allocated, reset before each phase",
}
ROOT = Path(__file__).resolve().parents[1]
# Number of frames of this repository that are kept for an allocation.
FRAMES = 6
# The profiler announces each of its starts and stops on stderr otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True)
class Usage:
    """Bytes alive in one phase, without the bytes alive before the first phase.

    ``sites`` has the allocation sites of the memory at the peak, largest first,
    if requested.
    """

    peak: int
    end: int
    sites: Mapping[str, int] = field(default_factory=dict)


def measure(
    phases: Mapping[str, Callable[[], object]], device: str, *, with_sites: bool = False
) -> dict[str, Usage]:
    """Call each phase in turn and measure its memory.

    Parameters
    ----------
    phases
        Calls by name. The result of a call is freed at once.
    device
        The device whose memory is counted: ``"cpu"`` or ``"cuda"``.
    with_sites
        Also find the allocation sites at each phase's peak; CPU only.

    Raises
    ------
    ValueError
        If sites are requested on a GPU.
    """
    gc.collect()  # else garbage of earlier work is freed during the measurement
    if device == "cpu":
        return _measure_on_cpu(phases, with_sites)
    if with_sites:
        raise ValueError(f"Sites are found on the CPU only, and the device is {device}.")
    return _measure_on_cuda(phases)


def _measure_on_cuda(phases: Mapping[str, Callable[[], object]]) -> dict[str, Usage]:
    usages = {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for name, phase in phases.items():
        torch.cuda.reset_peak_memory_stats()
        phase()
        torch.cuda.synchronize()
        peak, end = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        usages[name] = Usage(peak - before, end - before)
    return usages


def _measure_on_cpu(
    phases: Mapping[str, Callable[[], object]], with_sites: bool
) -> dict[str, Usage]:
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, with_stack=with_sites) as profiler:
        for name, phase in phases.items():
            with record_function(_label(name)):
                phase()
    assert profiler.profiler is not None
    events = list(_events(profiler.profiler.kineto_results.experimental_event_tree()))
    return _usages(events, list(phases), with_sites)


def _label(phase: str) -> str:
    return f"memory_meter: {phase}"


def _events(roots: list[Any]) -> Iterator[Any]:
    """The profiler's events, whatever their depth."""
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def _usages(events: list[Any], phases: list[str], with_sites: bool) -> dict[str, Usage]:
    allocations = [event for event in events if event.tag.name == "Allocation"]
    allocations.sort(key=_time)
    totals = _totals(allocations)
    # Names of other kinds of events are not always valid text.
    spans = {event.name: event for event in events if event.tag.name == "TorchOp"}
    usages, first = {}, 0
    for phase in phases:
        last = bisect_right(allocations, spans[_label(phase)].end_time_ns, key=_time)
        peak = max(range(first, last + 1), key=totals.__getitem__)
        sites = _sites(allocations[:peak]) if with_sites else {}
        usages[phase] = Usage(totals[peak], totals[last], sites)
        first = last
    return usages


def _time(event: Any) -> int:
    time: int = event.start_time_ns
    return time


def _totals(allocations: list[Any]) -> list[int]:
    """Bytes alive before the first of these events, and after each of them."""
    sizes: dict[int, int] = {}
    totals = [0]
    for event in allocations:
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0:
            sizes[address] = size
        # Ignore the free of a block from before the first event.
        totals.append(totals[-1] + (size if size > 0 else -sizes.pop(address, 0)))
    return totals


def _sites(allocations: list[Any]) -> dict[str, int]:
    """Bytes alive after these events, by allocation site, largest first."""
    alive: dict[int, Any] = {}
    for event in allocations:
        if event.extra_fields.alloc_size > 0:
            alive[event.extra_fields.ptr] = event
        else:
            alive.pop(event.extra_fields.ptr, None)
    sizes: Counter[str] = Counter()
    for event in alive.values():
        sizes[_site(event)] += event.extra_fields.alloc_size
    return dict(sizes.most_common())


def _site(event: Any) -> str:
    """The operator that allocated, and the innermost lines of this repository around it."""
    operator = ""
    frames: list[str] = []
    parent = event.parent
    while parent is not None and len(frames) < FRAMES:
        kind = parent.tag.name
        if kind == "TorchOp" and not operator and parent.name.startswith("aten::"):
            operator = parent.name
        # The profiler sees calls, not operators such as +; for an operator it knows
        # the first line of the function that contains it.
        if kind == "PyCall" and not frames:
            frames += _line(parent.extra_fields.callsite)
        if kind in ("PyCall", "PyCCall"):
            frames += _line(parent.extra_fields.caller)
        parent = parent.parent
    return f"{operator or 'autograd'} in {' < '.join(frames) or 'torch'}"


def _line(frame: Any) -> list[str]:
    """``["file:line"]``, or nothing for a file that is not of this repository."""
    path = _path_here(frame.file_name)
    return [f"{path}:{frame.line_number}"] if path else []


@functools.lru_cache(maxsize=1024)
def _path_here(name: str) -> Path | None:
    """A file of this repository; the profiler takes folders of ``sys.path`` off names."""
    path = ROOT / name
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) and path.is_file() else None
