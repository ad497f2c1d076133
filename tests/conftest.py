"""Every test is seeded; those outside ``tests/gpu`` run on the CPU, also beside a GPU."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Tensors are small here, and workers take the cores: torch's threads would wait for each other.
# Set before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Modules make ops for their tables when they are collected."""
    with contextlib.nullcontext() if GPU_TESTS in collector.path.parents else torch.device("cpu"):
        return (yield)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test has the same numbers at every run, alone or after others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if GPU_TESTS in request.path.parents or not torch.cuda.is_available():
        yield
        return
    with torch.device("cpu"):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the compile check found, and which checks of kernels could not run."""
    stats = terminalreporter.stats
    found = [dict(report.user_properties) for report in stats.get("passed", [])]
    found = [properties for properties in found if "compiled" in properties]
    if found:
        kernels = [kernel for properties in found for kernel in properties["compiled"]]
        widest = max(kernels, key=lambda kernel: kernel[1])[0]
        seconds = sum(properties["seconds"] for properties in found)
        terminalreporter.write_line(
            f"{len(kernels)} kernels compiled by NVRTC in {seconds:.1f} s of all processes, or "
            f"earlier from the same text, without spills; the widest: {' '.join(widest.split())}."
        )
    skipped = (report.longrepr for report in stats.get("skipped", []))
    reasons = Counter(reason[2] for reason in skipped if isinstance(reason, tuple))
    for reason, count in reasons.items():
        if "needs the emulator" in reason or "needs NVRTC" in reason:
            terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
