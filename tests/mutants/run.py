"""Plant every mutant in a copy of the repository and say which tests notice it: ``make mutants``.

    python tests/mutants/run.py                        # all of them
    python tests/mutants/run.py --only kernels         # areas, mistakes or files that match
    python tests/mutants/run.py --list

The checkout is never edited. First the tests of all chosen mutants run without any mistake, and
must pass; then each mutant is planted alone, and its tests run until the first failure. A mutant is
*killed* if a test fails, *survives* if all pass, and is *stale* if its place in the source, or one
of its tests, is gone. The results go to ``mutants.md`` and ``mutants.csv`` in ``--out``.

The exit status is 0 if every mutant was killed, or has an argument why no test can notice it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from mutants import AREAS, Mutant

ROOT = Path(__file__).resolve().parents[2]
# What the tests of mutants read.
COPIED = ("fuser", "tests", "examples", "benchmarks", "docs", "pyproject.toml")
COPIED_PATTERNS = ("*.md", "Makefile", "LICENSE", "constraints.txt")
# A mistake may make a test wait for ever.
TIMEOUT = 600.0
KILLED, SURVIVED, ARGUED, STALE = "killed", "survived", "argued", "stale"
# pytest's exit status.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Result:
    """What became of one mutant: the test that failed first, or why there is none; seconds."""

    area: str
    mutant: Mutant
    status: str
    detail: str
    seconds: float


class Tree:
    """A copy of the repository, in which one mutant at a time is planted."""

    _times = itertools.count(int(time.time()), 10)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        extra = (path.name for pattern in COPIED_PATTERNS for path in ROOT.glob(pattern))
        for name in (*COPIED, *extra):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, folder / name)

    def write(self, file: str, text: str) -> None:
        """Replace a file of the package, at a time that no bytecode of it has seen."""
        path = self.folder / "fuser" / file
        path.write_text(text, encoding="utf-8")
        moment = next(self._times)
        os.utime(path, (moment, moment))

    def test(self, tests: Sequence[str], select: str, *options: str) -> tuple[int, str]:
        """pytest's exit status, and what it printed; a timeout counts as a failure."""
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "--tb=no", "-rfE", "--no-header"]
        command += ["-p", "no:cacheprovider", "--hypothesis-seed=0", "-W", "ignore", *options]
        command += [*(("-k", select) if select else ()), *tests]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            # A mutant of the same size, written within a second, would run as compiled before.
            "PYTHONDONTWRITEBYTECODE": "1",
            # What mistaken kernels compile to is of no use to anybody else.
            "XDG_CACHE_HOME": str(self.folder.parent / "cache"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        try:
            run = subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return FAILED, f"FAILED (no end after {TIMEOUT:g} s)"
        return run.returncode, run.stdout


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
    tree.write(mutant.file, mutated)
    try:
        code, printed = tree.test(mutant.files, mutant.select, "-x")
    finally:
        tree.write(mutant.file, original)
    if code == FAILED:
        return result(KILLED, next(failures(printed), "?"))
    if code == PASSED:
        return result(ARGUED if mutant.survives else SURVIVED, mutant.survives)
    last = printed.strip().splitlines()[-1:] or ["nothing was printed"]
    return result(STALE, f"pytest ended with {code}: {last[0]}")


def failures(printed: str) -> Iterator[str]:
    """The tests that failed, without the part of the path that all share."""
    for found in re.finditer(
        r"^(?:FAILED|ERROR) (?:tests/(?:\w+/)?)?(.+?)(?: - .*)?$", printed, re.MULTILINE
    ):
        yield found.group(1)


def passes_without(chosen: Sequence[tuple[str, Mutant]], tree: Tree) -> bool:
    """Whether the tests of all chosen mutants pass in a repository without a mistake."""
    by_select: dict[str, dict[str, None]] = {}
    for _, mutant in chosen:
        by_select.setdefault(mutant.select, {}).update(dict.fromkeys(mutant.files))
    failed: list[str] = []
    for select, tests in by_select.items():
        code, printed = tree.test(list(tests), select)
        if code != PASSED:
            failed += failures(printed) if code == FAILED else [printed.strip()[-2000:]]
    for test in failed:
        print(f"fails without any mistake: {test}")
    return not failed


def examine_all(chosen: Sequence[tuple[str, Mutant]], trees: Sequence[Tree]) -> Iterator[Result]:
    """Every result as it comes, with a line for each and the time that is left."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def work(area: str, mutant: Mutant) -> Result:
        tree = free.get()
        try:
            return examined(area, mutant, tree)
        finally:
            free.put(tree)

    started = time.perf_counter()
    with ThreadPoolExecutor(len(trees)) as pool:
        futures = [pool.submit(work, area, mutant) for area, mutant in chosen]
        for number, future in enumerate(as_completed(futures), start=1):
            result = future.result()
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


def write_results(out: Path, results: Sequence[Result]) -> None:
    """``mutants.md`` and ``mutants.csv``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "mutants.md").write_text(f"# Mutants\n\n{summary(results)}", encoding="utf-8")
    with (out / "mutants.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["area", "mistake", "file", "result", "detail", "seconds"])
        for r in results:
            told = (r.area, r.mutant.mistake, r.mutant.file, r.status, r.detail)
            rows.writerow([*told, f"{r.seconds:.1f}"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description="Plant small mistakes in a copy of fuser, and see which tests notice.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--only", metavar="REGEX", help="mutants whose area, mistake or file matches")
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
    with tempfile.TemporaryDirectory(prefix="fuser-mutants-") as folder:
        trees = [Tree(Path(folder) / f"tree{i}") for i in range(options.jobs)]
        print(f"The tests of {len(chosen)} mutants, without a mistake ...", flush=True)
        if not passes_without(chosen, trees[0]):
            return 2
        results = list(examine_all(chosen, trees))
    order = {id(mutant): i for i, (_, mutant) in enumerate(chosen)}
    results.sort(key=lambda result: order[id(result.mutant)])
    write_results(options.out, results)
    print(f"\n{summary(results).partition(chr(10) + '##')[0]}")
    for result in results:
        if result.status in (SURVIVED, STALE):
            print(f"{result.status}: {result.mutant.mistake} ({result.mutant.file})")
    print(f"\nIn {options.out}: mutants.md, mutants.csv")
    return int(any(result.status in (SURVIVED, STALE) for result in results))


if __name__ == "__main__":
    sys.exit(main())
