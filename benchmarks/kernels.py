"""Memory-bound kernels of fuser against the copy bandwidth and other libraries.

The rows are in kernel_cases.py: the bytes and operations of an element, the shape, and the calls of
each variant: fuser's launcher, torch eager, torch.compile, and torchao, Liger and Transformer
Engine if they can be imported. All variants of a row run alternately in one run, cold in L2, on
random data (timing.py). GB/s are the bytes that must move over the median time, and "/ best peer"
is the time of the fastest other variant over fuser's. On a CPU sizes are tiny and fuser runs its
references, to try the script; there are no targets, and no fractions of the copy bandwidth.

    python benchmarks/kernels.py --out out/kernels.csv --chart out/kernels.png
    python benchmarks/kernels.py --only 'norm|swiglu' --no-compile
    python benchmarks/kernels.py --device cpu --no-compile
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import charts
import torch
from evidence import Sink, progress, provenance, say
from kernel_cases import CASES, SHAPES, Case, Inputs
from options import new_parser, parsed
from peers import absent
from timing import Failure, Result, clock, copy_bandwidth, measure, pass_count, set_count

from fuser.cuda.module import kernels_unavailable


@dataclass(frozen=True)
class Run:
    """Settings of a run; ``rows`` and ``columns`` are None for the sizes of the table."""

    device: str
    dtype: torch.dtype
    rows: int | None = None
    columns: int | None = None
    rounds: int = 25
    is_compiled: bool = True

    def shape(self, case: Case) -> tuple[int, int]:
        """M and K of a row: its own or the table's; the options set those of all but the update."""
        rows, columns = SHAPES[self.device]
        if case.rows is not None:
            return case.rows, case.columns or columns
        own = columns if case.columns is None else min(case.columns, columns)
        return self.rows or rows, self.columns or own

    def has(self, variant: str) -> bool:
        """Whether a variant takes part; other libraries have no kernels for a CPU."""
        is_here = self.device == "cuda" or variant in ("fuser", "eager", "compile")
        return is_here and (self.is_compiled or variant != "compile")


def distinct(cases: Sequence[Case], run: Run) -> list[Case]:
    """The rows without repetitions of a name and shape."""
    return list({(case.name, run.shape(case)): case for case in reversed(cases)}.values())[::-1]


def measured(case: Case, run: Run, copy: float) -> list[dict[str, object]]:
    """One record for each variant of a row; if the inputs cannot be made, one failure of fuser."""
    rows, columns = run.shape(case)
    first = Inputs(rows, columns, run.dtype, run.device, seed=0)
    moved = rows * columns * case.per_element(case.moves, first)
    results: dict[str, Result]
    try:
        count = set_count(moved, run.device)
        sets = [case.make(first)]
        for seed in range(1, count):
            sets.append(case.make(Inputs(rows, columns, run.dtype, run.device, seed)))
        names = [name for name in sets[0] if run.has(name)]
        sets = [{name: calls[name] for name in names} for calls in sets]
        passes = pass_count(moved, count, run.device)
        results = measure(sets, clock(run.device), passes=passes, rounds=run.rounds)
    except Exception as error:  # a row that does not run must not end the table
        results = {"fuser": Failure.of(error)}
    records = []
    for variant, result in results.items():
        record: dict[str, object] = {
            "row": case.name,
            "rows": rows,
            "columns": columns,
            "moves": case.moves,
            "flop": case.flop,
            "bytes": round(moved),
            "flops": round(rows * columns * case.per_element(case.flop, first)),
            "target": case.target if case.target is not None and run.device == "cuda" else "",
            "copy GB/s": round(copy / 1e9, 1),
            "variant": variant,
            **dict.fromkeys(("us", "p20", "p80", "GB/s", "of copy", "method", "failure"), ""),
        }
        if isinstance(result, Failure):
            record["failure"] = result.reason
        else:
            rate = moved / result.median
            record |= {
                "us": round(result.median * 1e6, 2),
                "p20": round(result.p20 * 1e6, 2),
                "p80": round(result.p80 * 1e6, 2),
                "GB/s": round(rate / 1e9, 1),
                "of copy": round(rate / copy, 3),
                "method": result.method,
            }
        records.append(record)
    return records


# -- results ------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The format of printed rows: column widths, and whether there are targets (on a GPU)."""

    name: int
    moves: int
    has_aims: bool

    @classmethod
    def of(cls, cases: Sequence[Case], run: Run) -> Table:
        """As wide as these rows need."""
        name, moves = (
            max(len(getattr(case, what)) for case in cases) for what in ("name", "moves")
        )
        return cls(name, moves, run.device == "cuda")

    def header(self) -> str:
        """The line above the rows."""
        aims = f"{'of copy':>9}{'target':>8}" if self.has_aims else ""
        return (
            f"{'':<{self.name}}{'shape':>15}  {'moves':>{self.moves}}{'flop':>6}{'us':>9}{'p20':>9}"
            f"{'p80':>9}{'GB/s':>8}{aims}{'/ best peer':>13}   peers, GB/s"
        )

    def line(self, records: Sequence[dict[str, Any]]) -> str:
        """A row as text: fuser's figures, and the rates of the others."""
        own, *others = records
        shape = f"{own['rows']} x {own['columns']}"
        start = (
            f"{own['row']:<{self.name}}{shape:>15}  {own['moves']:>{self.moves}}{own['flop']:>6}"
        )
        peers = [f"{r['variant']} {r['GB/s']:.0f}" for r in others if not r["failure"]]
        failures = [f"\n    {r['variant']} failed: {r['failure']}" for r in others if r["failure"]]
        uncaptured = [r["variant"] for r in records if r["method"] == "not captured"]
        note = f"  (not captured: {', '.join(uncaptured)})" if uncaptured else ""
        told = "  ".join(peers)
        return f"{start}{self._figures(own, others)}   {told}{note}{''.join(failures)}"

    def _figures(self, own: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
        if own["failure"]:
            return f"   FAILED {own['failure']}"
        best = min((r["us"] for r in others if not r["failure"]), default=None)
        ratio = f"{best / own['us']:.2f}" if best else ""
        aims = ""
        if self.has_aims:
            target = "" if own["target"] == "" else f"{own['target']:.2f}"
            aims = f"{own['of copy']:>9.2f}{target:>8}"
        return (
            f"{own['us']:>9.1f}{own['p20']:>9.1f}{own['p80']:>9.1f}{own['GB/s']:>8.0f}"
            f"{aims}{ratio:>13}"
        )


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    sizes = {
        name: f"{letter} of every row; default: its own or {SHAPES['cuda'][place]}, on a CPU "
        f"{SHAPES['cpu'][place]}"
        for place, (name, letter) in enumerate((("rows", "M"), ("columns", "K")))
    }
    parser = new_parser(__doc__, sizes)
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["float32", "bfloat16", "float16"],
        help="of what is not quantized; default: %(default)s",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="a regular expression that the names of rows contain; default: all rows",
    )
    options = parsed(parser, argv, sizes)
    if options.device == "cuda" and (reason := kernels_unavailable()):
        parser.error(f"fuser's kernels do not run here, and there is nothing to time. {reason}")
    pattern = re.compile(options.only, re.IGNORECASE)
    run = Run(
        options.device,
        getattr(torch, options.dtype),
        options.rows,
        options.columns,
        options.rounds,
        not options.no_compile,
    )
    cases = [case for case in distinct(CASES, run) if pattern.search(case.name)]
    if not cases:
        parser.error(f"--only {options.only!r} matches no row.")

    where = provenance(run.device, run.dtype, options.commit)
    sink = Sink(options.out, where)
    copy = copy_bandwidth(run.device, run.rounds)
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    print(f"copy {copy / 1e9:.0f} GB/s (read + written)", end="")
    print(f"; not here: {', '.join(absent())}\n" if absent() else "\n")
    table = Table.of(cases, run)
    print(table.header())
    every: list[dict[str, Any]] = []
    for case in progress(cases, "rows"):
        records = measured(case, run, copy)
        say(table.line(records))
        sink.write(records)
        every += records
        if run.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    print(f"\ncopy at the end {copy_bandwidth(run.device, run.rounds) / 1e9:.0f} GB/s")
    if options.chart:
        charts.draw_kernels(options.chart, [{**where, **record} for record in every])


if __name__ == "__main__":
    main()
