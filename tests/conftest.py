"""Every test is seeded; those outside ``tests/gpu`` run on the CPU, also beside a GPU."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Tensors are small here, and workers take the cores: torch's threads would wait for each other.
# Set before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import other_sums  # noqa: F401  torch adds in other orders if the environment says so
import torch
from slow_files import ALLOWED_SECONDS, SLOW_FILES, unlisted

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


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing matplotlib, or any module of it, is an error."""
    for name in [*sys.modules, "matplotlib"]:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check-slow-files",
        action="store_true",
        help=f"fail if a file outside SLOW_FILES takes more than {ALLOWED_SECONDS:g} CPU seconds",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)


_measured_until = [0.0]


def pytest_collection_finish() -> None:
    # Thousands of collected tests live as long as the process: no collection looks at them again.
    gc.collect()
    gc.freeze()
    _measured_until[0] = time.process_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """A report of a phase of a test has its CPU seconds, also when it comes from a worker."""
    report = yield
    now = time.process_time()
    report.cpu_seconds = now - _measured_until[0]
    _measured_until[0] = now
    return report


def too_slow(config: pytest.Config) -> dict[str, float]:
    """The files outside ``SLOW_FILES`` that took too long in this run, and their CPU seconds."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not config.getoption("--check-slow-files") or reporter is None:
        return {}
    seconds: Counter[str] = Counter()
    for reports in reporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu_seconds"):
                seconds[Path(report.nodeid.partition("::")[0]).name] += report.cpu_seconds
    return unlisted(seconds)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if too_slow(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the compile check found, which checks could not run, and which files are slow."""
    for file, taken in too_slow(terminalreporter.config).items():
        terminalreporter.write_line(
            f"{file} took {taken:.1f} CPU seconds: make it faster, or put it into SLOW_FILES of "
            "tests/slow_files.py."
        )
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
