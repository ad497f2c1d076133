"""Plant every mutant in a copy of the repository and say which tests notice it: ``make mutants``.

    python tests/mutants/run.py                        # all of them
    python tests/mutants/run.py --only kernels         # areas, mistakes or files that match
    python tests/mutants/run.py --resume               # what no earlier run has killed
    python tests/mutants/run.py --list

The checkout is never edited. Each mutant is planted alone, and its tests run until the first
failure; that test runs again without the mistake, once for all mutants. A mutant is *killed* if a
test fails that passes without it, *survives* if all pass, and is *stale* if its place in the
source, or one of its tests, is gone, or if that test fails in any case. The results go to
``mutants.md`` and ``mutants.csv`` in ``--out``; the latter gets a row as soon as there is a result,
so that ``--resume`` can go on after an interruption.

On Linux tests run in children of a process that has imported torch (``warm.py``). Files of tests
that pass in a process of their own alone have one, and so do the tests of a mutant that would
survive, before that is said of it.

The exit status is 0 if every mutant was killed, or has an argument why no test can notice it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

sys.path.append(str(Path(__file__).resolve().parents[1]))

from mutants import AREAS, Mutant

ROOT = Path(__file__).resolve().parents[2]
WARM = str(Path(__file__).with_name("warm.py"))
# What the tests of mutants read.
COPIED = ("fuser", "tests", "examples", "benchmarks", "docs", "pyproject.toml")
COPIED_PATTERNS = ("*.md", "Makefile", "LICENSE", "constraints.txt")
# A mistake may make a test wait for ever.
TIMEOUT = 600.0
KILLED, SURVIVED, ARGUED, STALE = "killed", "survived", "argued", "stale"
Item = TypeVar("Item")
Done = TypeVar("Done")
# pytest's exit status.
PASSED, FAILED = 0, 1
NONE_SELECTED = 5
NOTHING_RAN = (2, 4, NONE_SELECTED)
# Imported once for all mutants: what is not fuser's or its tests', and takes long.
PRELOADED: tuple[str, ...] = (
    "torch",
    "numpy",
    "networkx",
    "pytest",
    "xdist.plugin",
    "_hypothesis_pytestplugin",
    "hypothesis.strategies",
    "safetensors.torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.testing",
    "torch.utils.checkpoint",
    "unittest.mock",
)
OF_PLUGINS: tuple[str, ...] = ("-n0", "--hypothesis-seed=0")
FORKS = sys.platform == "linux"


@dataclass(frozen=True)
class Result:
    """What became of one mutant: the test that failed first, or why there is none; seconds."""

    area: str
    mutant: Mutant
    status: str
    detail: str
    seconds: float


class Known(NamedTuple):
    """What is known of tests without a mistake, in all trees."""

    passes: dict[str, bool]
    alone: set[str]
    """Files of tests that do not pass in a child of the warm process."""


class Tree:
    """A copy of the repository, in which one mutant at a time is planted."""

    # Bytecode is known by the second of its source, so no two texts of a file share one: these are
    # later than any at which a file is written.
    _times = itertools.count(int(time.time()) + 10**6, 10)

    def __init__(self, folder: Path, known: Known) -> None:
        self.folder = folder
        self.known = known
        self._warm: subprocess.Popen[str] | None = None
        self._alone: subprocess.Popen[str] | None = None
        self._is_closed = False
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        extra = (path.name for pattern in COPIED_PATTERNS for path in ROOT.glob(pattern))
        for name in (*COPIED, *extra):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            elif (ROOT / name).exists():
                shutil.copy2(ROOT / name, folder / name)

    @contextlib.contextmanager
    def planted(self, file: str, text: str) -> Iterator[None]:
        """Another text of a file of the package."""
        path = self.folder / "fuser" / file
        original, was = path.read_bytes(), path.stat()
        path.write_text(text, encoding="utf-8")
        moment = next(self._times)
        os.utime(path, (moment, moment))
        try:
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))

    def close(self) -> None:
        """End the warm process, and tests that run."""
        self._is_closed = True
        if self._alone is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._alone.pid, signal.SIGKILL)
        if self._warm is not None:
            self._warm.terminate()
            self._warm.wait()

    def test(
        self, tests: Sequence[str], select: str, *options: str, alone: bool = False
    ) -> tuple[int, str]:
        """pytest's exit status, and what it printed; a timeout counts as a failure."""
        arguments = ["-q", "--tb=no", "-rfE", "--no-header", "-p", "no:cacheprovider"]
        arguments += ["-W", "ignore", *OF_PLUGINS, *options]
        arguments += [*(("-k", select) if select else ()), *tests]
        alone |= not FORKS or any(map(self.is_alone, tests))
        code, printed = (self._fresh if alone else self._forked)(arguments)
        if code is None:
            return FAILED, f"FAILED (no end after {TIMEOUT:g} s)"
        return code, printed

    def is_alone(self, test: str) -> bool:
        """Whether a test passes in a process of its own alone, as far as is known."""
        return test.partition("::")[0] in self.known.alone

    def passes(self, test: str, mutant: Mutant) -> bool:
        """Whether one of a mutant's tests passes without the mistake."""
        passes = self.known.passes.get(test)
        if passes is None:
            code, _ = self.test([test], "")
            if code in NOTHING_RAN:  # not each name is one that pytest finds again
                code, _ = self.test(mutant.files, mutant.select)
            if code != PASSED and not self.is_alone(test):
                code, _ = self.test(mutant.files, mutant.select, alone=True)
                if code == PASSED:
                    self.known.alone.add(test.partition("::")[0])
            passes = self.known.passes[test] = code == PASSED
        return passes

    def _environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return {
            **inherited,
            "PYTHONPATH": str(self.folder),
            # What mistaken kernels compile to is of no use to anybody else.
            "XDG_CACHE_HOME": str(self.folder.parent / "cache"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def _fresh(self, arguments: Sequence[str]) -> tuple[int | None, str]:
        """Run pytest in a new process."""
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            self._alone = process
            try:
                printed, _ = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return None, ""
            finally:
                self._alone = None
        return process.returncode, printed

    def _forked(self, arguments: Sequence[str]) -> tuple[int | None, str]:
        """Run pytest in a child of the warm process."""
        if self._warm is None:
            self._warm = subprocess.Popen(
                [sys.executable, WARM, *PRELOADED],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        output = self.folder.with_suffix(".txt")
        request = {"arguments": list(arguments), "output": str(output), "seconds": TIMEOUT}
        assert self._warm.stdin
        assert self._warm.stdout
        try:
            print(json.dumps(request), file=self._warm.stdin, flush=True)
            code = json.loads(self._warm.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self._warm.kill()
            self._warm.wait()
            self._warm = None
            if self._is_closed:
                raise
            return self._fresh(arguments)  # a test has ended it
        if code is None:
            return None, ""  # perhaps before it has opened its output
        return code, output.read_text(encoding="utf-8", errors="replace")


def share_compiled(folder: Path) -> None:
    """Let the emulator find what it has compiled before; what it adds stays in the folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    compiled = (Path(base) if base else Path.home() / ".cache") / "fuser-emulator"
    (folder / compiled.name).mkdir(parents=True)
    for entry in compiled.glob("*/"):
        (folder / compiled.name / entry.name).symlink_to(entry.resolve(), target_is_directory=True)


def examined(area: str, mutant: Mutant, tree: Tree) -> Result:
    """Plant ``mutant`` in ``tree``, run its tests, and take it out again."""
    started = time.perf_counter()
    original = (ROOT / "fuser" / mutant.file).read_text(encoding="utf-8")

    def result(status: str, detail: str) -> Result:
        return Result(area, mutant, status, detail, time.perf_counter() - started)

    try:
        mutated = mutant.applied(original)
    except LookupError as error:
        return result(STALE, str(error))
    code, printed = tested(mutant, mutated, tree)
    test = next(failures(printed), None) if code == FAILED else None
    if test is not None and "::" in test:  # else it did not end
        was_alone = tree.is_alone(test)
        if not tree.passes(test, mutant):
            return result(STALE, f"{shortened(test)} fails without the mistake")
        if tree.is_alone(test) and not was_alone:
            code, printed = tested(mutant, mutated, tree)
            test = next(failures(printed), None)
    if code == FAILED:
        return result(KILLED, "?" if test is None else shortened(test))
    if code == PASSED:
        return result(ARGUED if mutant.survives else SURVIVED, mutant.survives)
    if code == NONE_SELECTED:
        return result(STALE, f"{mutant.tests} -k {mutant.select!r} has no test")
    last = printed.strip().splitlines()[-1:] or ["nothing was printed"]
    return result(STALE, f"pytest ended with {code}: {last[0]}")


def tested(mutant: Mutant, mutated: str, tree: Tree) -> tuple[int, str]:
    """The tests of a mutant with the mistake, also in a process of their own if all pass."""
    with tree.planted(mutant.file, mutated):
        code, printed = tree.test(mutant.files, mutant.select, "-x")
        if code not in (FAILED, *NOTHING_RAN):
            code, printed = tree.test(mutant.files, mutant.select, "-x", alone=True)
    return code, printed


def failures(printed: str) -> Iterator[str]:
    """The tests that failed."""
    for found in re.finditer(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE):
        yield found.group(1)


def shortened(test: str) -> str:
    """The name of a test without the part of the path that all share."""
    return re.sub(r"^tests/(?:\w+/)?", "", test)


def in_trees(
    trees: Sequence[Tree], work: Callable[[Tree, Item], Done], items: Iterable[Item]
) -> Iterator[Done]:
    """What comes of each item in one of the trees, as it comes."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def done(item: Item) -> Done:
        tree = free.get()
        try:
            return work(tree, item)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        futures = [pool.submit(done, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # an interruption waits for nothing
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in trees:
                tree.close()
            raise


def examine_all(chosen: Sequence[tuple[str, Mutant]], trees: Sequence[Tree]) -> Iterator[Result]:
    """Every result as it comes, with a line for each and the time that is left."""

    started = time.perf_counter()
    work = in_trees(trees, lambda tree, both: examined(*both, tree), chosen)
    for number, result in enumerate(work, start=1):
        left = (time.perf_counter() - started) / number * (len(chosen) - number)
        print(
            f"{number:>3}/{len(chosen)}  {result.status:<8} {result.seconds:>5.1f} s  "
            f"{result.area}: {result.mutant.mistake}\n"
            f"{'':>26}{result.detail or result.mutant.file}; {left / 60:.0f} min left",
            flush=True,
        )
        yield result


def summary(results: Sequence[Result]) -> str:
    """A row for each area, and every mutant with what became of it, as Markdown."""
    counts = Counter((result.area, result.status) for result in results)
    areas = list(dict.fromkeys(result.area for result in results))
    statuses = (KILLED, SURVIVED, ARGUED, STALE)
    lines = [f"| area | mutants | {' | '.join(statuses)} |", "|---|---:|---:|---:|---:|---:|"]
    for area in areas:
        row = [counts[area, status] for status in statuses]
        lines.append(f"| {area} | {sum(row)} | {' | '.join(map(str, row))} |")
    totals = [sum(counts[area, status] for area in areas) for status in statuses]
    lines.append(f"| all | {sum(totals)} | {' | '.join(map(str, totals))} |")
    counted = sum(totals[:2])
    share = totals[0] / counted if counted else 1.0
    lines += ["", f"{share:.1%} of those that a test can notice are killed."]
    for area in areas:
        lines += ["", f"## {area}", "", "| mistake | file | result |", "|---|---|---|"]
        for result in (result for result in results if result.area == area):
            told = result.detail.replace("|", "\\|")
            status = "" if result.status == KILLED else f"**{result.status}** "
            lines.append(f"| {result.mutant.mistake} | {result.mutant.file} | {status}{told} |")
    return "\n".join(lines) + "\n"


COLUMNS = ("area", "mistake", "file", "result", "detail", "seconds", "text")


def text_of(mutant: Mutant) -> str:
    """Changes with the mutant, its tests' names, and the file in which it is planted."""
    with contextlib.suppress(LookupError):
        original = (ROOT / "fuser" / mutant.file).read_text(encoding="utf-8")
        text = [mutant.applied(original), mutant.file, mutant.tests, mutant.select]
        return hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]
    return "stale"


def row_of(result: Result) -> list[str]:
    told = (result.area, result.mutant.mistake, result.mutant.file, result.status, result.detail)
    return [*told, f"{result.seconds:.1f}", text_of(result.mutant)]


def appended(out: Path, results: Iterator[Result]) -> Iterator[Result]:
    """The results, each of which is a row of ``mutants.csv`` before the next one comes."""
    with (out / "mutants.csv").open("a", newline="", encoding="utf-8") as file:
        for result in results:
            csv.writer(file).writerow(row_of(result))
            file.flush()
            yield result


def earlier_results(out: Path) -> list[Result]:
    """What an earlier run killed, or could not but leave alive, of mutants that have not changed.

    A mutant that survived may have got a test since.
    """
    path = out / "mutants.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = {row["mistake"]: row for row in csv.DictReader(file)}
    results = []
    for area, mutants in AREAS.items():
        for mutant in mutants:
            row = rows.get(mutant.mistake)
            if row and row["result"] in (KILLED, ARGUED) and row["text"] == text_of(mutant):
                seconds = float(row["seconds"])
                results.append(Result(area, mutant, row["result"], row["detail"], seconds))
    return results


def write_results(out: Path, results: Sequence[Result]) -> None:
    """``mutants.md`` and ``mutants.csv``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "mutants.md").write_text(f"# Mutants\n\n{summary(results)}", encoding="utf-8")
    with (out / "mutants.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *map(row_of, results)])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description="Plant small mistakes in a copy of fuser, and see which tests notice.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--only", metavar="REGEX", help="mutants whose area, mistake or file matches")
    add("--resume", action="store_true", help="leave out what --out says is killed")
    add("--list", action="store_true", help="print the chosen mutants, and run nothing")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    add("--out", type=Path, metavar="DIR", default=Path("out"), help="where results go")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1.")
    try:
        re.compile(options.only or "")
    except re.error as error:
        parser.error(f"--only {options.only!r} is no regular expression: {error}.")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Examine the chosen mutants; returns the exit status."""
    options = parse(argv)
    wanted = re.compile(options.only or "", re.IGNORECASE)
    chosen = [
        (area, mutant)
        for area, mutants in AREAS.items()
        for mutant in mutants
        if any(wanted.search(text) for text in (area, mutant.mistake, mutant.file))
    ]
    if not chosen:
        print(f"No mutant's area, mistake or file matches {options.only!r}.", file=sys.stderr)
        return 2
    if options.list:
        for area, mutant in chosen:
            print(f"{area}: {mutant.mistake} ({mutant.file})")
        print(f"{len(chosen)} mutants.")
        return 0
    results = earlier_results(options.out) if options.resume else []
    done = {result.mutant.mistake for result in results}
    left = [(area, mutant) for area, mutant in chosen if mutant.mistake not in done]
    if done:
        print(f"{len(chosen) - len(left)} of {len(chosen)} mutants are done.", flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuser-mutants-")))
        share_compiled(folder / "cache")
        known = Known({}, set())
        trees = [Tree(folder / f"tree{i}", known) for i in range(min(options.jobs, len(left)))]
        for tree in trees:
            stack.callback(tree.close)
        if left:
            write_results(options.out, results)
            results += appended(options.out, examine_all(left, trees))
    order = {mutant.mistake: i for i, mutant in enumerate(itertools.chain(*AREAS.values()))}
    results.sort(key=lambda result: order[result.mutant.mistake])
    write_results(options.out, results)
    print(f"\n{summary(results).partition(chr(10) + '##')[0]}")
    for result in results:
        if result.status in (SURVIVED, STALE):
            print(f"{result.status}: {result.mutant.mistake} ({result.mutant.file})")
    print(f"\nIn {options.out}: mutants.md, mutants.csv")
    return int(any(result.status in (SURVIVED, STALE) for result in results))


if __name__ == "__main__":
    sys.exit(main())
