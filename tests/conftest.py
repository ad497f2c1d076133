"""Every test is seeded; those outside ``tests/gpu`` run on the CPU, also beside a GPU."""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# Tensors are small here, and workers take the cores: torch's threads would wait for each other.
# Set before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor finds a graph that it has compiled by what it computes, whatever vectors it is compiled
# for: a run that takes another CPU for its own has graphs of its own.
if CAPABILITY := os.environ.get("ATEN_CPU_CAPABILITY"):
    graphs = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{CAPABILITY}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(graphs))

import garbage
import other_sums  # noqa: F401  torch adds in other orders if the environment says so
import torch
from samples import ask_for_all_examples, sample
from stages import ROOT, stage_of
from unmeasured_guards import leave_guards_unmeasured

import fuser

GPU_TESTS = Path(__file__).parent / "gpu"
MOST_OF_MACHINES = 4
"""Items of a function whose file starts compilers, ranks or the emulator, or as many as the values
of one parameter."""
SHOWN = 12
"""Names in a line of the summary."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Modules make ops for their tables when they are collected."""
    with contextlib.nullcontext() if GPU_TESTS in collector.path.parents else torch.device("cpu"):
        return (yield)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test has the same numbers at every run, alone or after others."""
    torch.manual_seed(0)
    leave_guards_unmeasured()


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Beside a GPU a test runs as where there is none.

    Its patch is its own: ``monkeypatch``, made here, would be undone after all fixtures of a test,
    and where both patch a name it would bring back the patch of theirs, for all later tests.
    """
    if GPU_TESTS in request.path.parents or not torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch, torch.device("cpu"):
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing matplotlib, or any module of it, is an error."""
    for name in [*sys.modules, "matplotlib"]:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)


def pytest_make_parametrize_id(val: object) -> str | None:
    """A message, which ``said`` has made, names a test by its code."""
    return getattr(val, "code", None) if isinstance(val, str) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="all parameters of the tests that are marked sampled"
    )
    parser.addoption(
        "--write-seconds",
        action="store_true",
        help="note in seconds.json what files took",
    )
    parser.addoption(
        "--write-counts", action="store_true", help="rewrite the file of calls: `make counts`"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.full:
        os.environ["FUSER_TEST_FULL"] = "1"  # for the emulator, in ranks too
    ask_for_all_examples(asks_for_all(config))


def asks_for_all(config: pytest.Config) -> bool:
    """Whether a run takes no samples: it is the full one, or a test is asked for by its name."""
    by_name = config.option.keyword or any("::" in name for name in config.args)
    return bool(config.option.full or by_name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is in no sample, if no test is asked for by its name."""
    if asks_for_all(config):
        return
    alike: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_varied = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if is_varied and (is_of_machines(item.path) or item.get_closest_marker("sampled")):
            alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: list[pytest.Item] = []
    for group in alike.values():
        marks = [mark.kwargs for mark in group[0].iter_markers("sampled")]
        counts = [options.get("most") for options in marks]
        if is_of_machines(group[0].path):
            counts.append(MOST_OF_MACHINES)
        most = min((count for count in counts if count), default=None)
        if any(options.get("are_alike") for options in marks):
            taken = set(range(0, len(group), -(-len(group) // max(filter(None, counts)))))
        elif most and all(list(item.callspec.params) == ["seed"] for item in group):
            taken = set(range(most))  # one seed is as good as another
        else:
            taken = set(sample(rows_of(group), most))
        left_out += [item for index, item in enumerate(group) if index not in taken]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


@functools.cache
def is_of_machines(path: Path) -> bool:
    """Whether the tests of a file start something."""
    is_here = path.is_relative_to(ROOT) and GPU_TESTS not in path.parents
    return is_here and stage_of(path.relative_to(ROOT).as_posix()) == "machines"


def rows_of(items: Iterable[pytest.Function]) -> list[list[Hashable]]:
    """The parameters of the items of one test, each of them in the same columns of every row."""
    rows = [[parts_of(value) for value in item.callspec.params.values()] for item in items]
    widths = [max(map(len, parts)) for parts in zip(*rows, strict=True)]
    return [
        [part for parts, width in zip(row, widths, strict=True) for part in filled(parts, width)]
        for row in rows
    ]


def filled(parts: list[Hashable], width: int) -> list[Hashable]:
    return parts + [None] * (width - len(parts))


def parts_of(value: object) -> list[Hashable]:
    """What a parameter is made of: a case on several ranks, "f [mxfp8, groups]", of three parts.

    A recipe is two: what it is, and what its backward reads.
    """
    if isinstance(value, str):
        name, _, options = value.partition(" [")
        return [name, *options.removesuffix("]").split(", ")] if options else [name]
    if isinstance(value, fuser.recipe.Recipe):
        override = value.backward_override
        return [repr(value).replace(repr(override), ""), override]
    return [value if isinstance(value, (int, torch.dtype)) else id(value)]


def cpu_seconds() -> float:
    """What this process took until now, the processes that it started, and what these waited for.

    A process that has ended counts all at once; on Linux one that runs counts as it runs.
    """
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


_measured_until = [0.0]


def pytest_collection_finish() -> None:
    garbage.look_for_garbage()  # thousands of collected tests live as long as the process
    _measured_until[0] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """After a file, its garbage goes, and no look for garbage goes through what lives again.

    Tests look for it themselves: at the end of a run one such test took ten times as long as alone.
    """
    yield
    if nextitem is not None and nextitem.path != item.path:
        garbage.look_for_garbage()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """The last report of a test has its CPU seconds, also when it comes from a worker."""
    report = yield
    if report.when != "teardown":
        return report
    now = cpu_seconds()
    report.cpu_seconds = now - _measured_until[0]
    _measured_until[0] = now
    return report


def note_seconds(paths: Mapping[str, float]) -> None:
    """Write what each file took, for ``make test-fast``; others keep what they have."""
    record = Path(__file__).with_name("seconds.json")
    known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    known |= {path: round(seconds, 1) for path, seconds in paths.items()}
    rows = (f"  {json.dumps(path)}: {known[path]}" for path in sorted(known))
    record.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def write_seconds(terminalreporter: pytest.TerminalReporter) -> None:
    """The CPU seconds of each folder of tests and of the slowest files, processes included."""
    folders: Counter[str] = Counter()
    files: Counter[str] = Counter()
    paths: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu_seconds"):
                path = report.nodeid.partition("::")[0]
                file = Path(path)
                folders[file.parent.name] += report.cpu_seconds
                files[file.name] += report.cpu_seconds
                paths[path] += report.cpu_seconds
    if terminalreporter.config.option.write_seconds:
        note_seconds(paths)
    for title, seconds in (("Folders", folders), ("Slowest files", files)):
        if len(seconds) > 1:
            each = (f"{name} {taken:.0f}" for name, taken in seconds.most_common(SHOWN))
            terminalreporter.write_line(f"{title} by CPU seconds: {', '.join(each)}.")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what took the time, what the compile check found, and which checks could not run."""
    write_seconds(terminalreporter)
    stats = terminalreporter.stats
    reported = [dict(report.user_properties) for report in stats.get("passed", [])]
    recorded = sum(properties.get("recorded", 0) for properties in reported)
    if recorded:
        terminalreporter.write_line(
            f"{recorded} kernels not compiled: unchanged since tests/kernels/compiled.json."
        )
    found = [properties for properties in reported if "compiled" in properties]
    if found:
        kernels = [kernel for properties in found for kernel in properties["compiled"]]
        widest = max(kernels, key=lambda kernel: kernel[1])[0]
        seconds = sum(properties["seconds"] for properties in found)
        terminalreporter.write_line(
            f"{len(kernels)} kernels compiled by NVRTC in {seconds:.1f} s of all processes, or "
            f"earlier from the same text, without spills; the widest: {' '.join(widest.split())}."
        )
    for line in not_tested(stats.get("skipped", [])):
        terminalreporter.write_line(line)


def not_tested(skipped: Iterable[pytest.TestReport]) -> list[str]:
    """A line for each thing that this machine lacks: what tests of it were skipped, and why."""
    files: dict[str, Counter[str]] = {}
    for report in skipped:
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason.startswith("needs "):
                file = report.nodeid.partition("::")[0].rpartition("/")[2]
                files.setdefault(reason, Counter())[file] += 1
    return [
        f"{sum(counts.values())} skipped, of {', '.join(sorted(counts))}: {reason}"
        for reason, counts in files.items()
    ]
