"""Bytes that torch's tensors take during a piece of work: at the peak, and still at the end.

On a GPU torch's allocator counts. On a CPU nothing counts by itself, so torch's
profiler records every allocation and every free of the CPU allocator, those
inside an operator and in the backward of autograd too, and they are added up in
the order in which they happened. What a library allocates by itself, past
torch's allocator, is seen on neither.
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
# Of the frames of this repository that led to an allocation, so many are kept.
FRAMES = 6
# The profiler announces each of its starts and stops on stderr otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True)
class Usage:
    """Bytes alive in one phase, beyond those that were alive before the first phase.

    ``sites`` says who allocated what is alive at the peak, largest first, where
    that was asked for.
    """

    peak: int
    end: int
    sites: Mapping[str, int] = field(default_factory=dict)


def measure(
    phases: Mapping[str, Callable[[], object]], device: str, *, with_sites: bool = False
) -> dict[str, Usage]:
    """Call each phase in turn and say what memory it takes.

    Parameters
    ----------
    phases
        Calls by name. What one returns is dropped at once.
    device
        ``"cpu"`` or ``"cuda"``: whose memory is counted.
    with_sites
        Also find out who allocated what is alive at each phase's peak; CPU only.

    Raises
    ------
    ValueError
        If sites are asked for on a GPU.
    """
    gc.collect()  # garbage of earlier work would be freed in the middle of this
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
        # The free of a block from before the first event changes nothing here.
        totals.append(totals[-1] + (size if size > 0 else -sizes.pop(address, 0)))
    return totals


def _sites(allocations: list[Any]) -> dict[str, int]:
    """What is alive after these events: bytes by who allocated them, largest first."""
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
        # The profiler sees calls, not operators such as +; of a function that
        # contains one it knows the first line.
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
