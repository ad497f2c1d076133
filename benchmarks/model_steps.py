"""Training steps of whole models, timed alternately: records, and a table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from evidence import progress
from timing import Call, Failure, Result, Timing, clock, measure

WARM_UP = 4
"""Steps before the first that is timed: compiled, recorded, and repeated."""


def measured_steps(
    makers: Mapping[str, Callable[[], Call]], tokens: int, device: str, rounds: int
) -> list[dict[str, Any]]:
    """A record for each model; ``makers`` make a call that is a step over ``tokens`` tokens.

    The memory of a model is the largest during its first steps, without that of models before it.
    """
    calls: dict[str, Call] = {}
    results: dict[str, Result] = {}
    memory: dict[str, float] = {}
    for name in progress(list(makers), "warm up"):
        before = 0
        if device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        try:
            calls[name] = makers[name]()
            for _ in range(WARM_UP):
                calls[name]()
        except Exception as error:  # a variant that fails must not stop the others
            results[name] = Failure.of(error)
            calls.pop(name, None)
        if device == "cuda":
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    results |= measure([calls], clock(device, is_captured=False), rounds=rounds)
    baseline = results[next(iter(makers))]
    return [
        {"variant": name} | _row(results[name], baseline, tokens, memory.get(name))
        for name in makers
    ]


def _row(result: Result, baseline: Result, tokens: int, memory: float | None) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(
        ("ms", "p20", "p80", "host ms", "tokens/s", "/ eager", "GiB", "failure"), ""
    )
    if isinstance(result, Failure):
        return row | {"failure": result.reason}
    row |= {
        "ms": round(result.median * 1e3, 3),
        "p20": round(result.p20 * 1e3, 3),
        "p80": round(result.p80 * 1e3, 3),
        "host ms": round(result.host * 1e3, 3),
        "tokens/s": round(tokens / result.median),
    }
    if memory is not None:
        row["GiB"] = round(memory, 2)
    if isinstance(baseline, Timing):
        row["/ eager"] = round(baseline.median / result.median, 3)
    return row


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as text; tokens a second over those of eager torch, the first variant."""
    names = f"{'':<30}{'ms':>9}{'p20':>9}{'p80':>9}{'host ms':>9}"
    lines = [f"{names}{'tokens/s':>10}{'/ eager':>9}{'GiB':>8}"]
    for row in records:
        if row["failure"]:
            lines.append(f"{row['variant']:<30}  FAILED {row['failure']}")
        else:
            lines.append(
                f"{row['variant']:<30}{row['ms']:>9.2f}{row['p20']:>9.2f}{row['p80']:>9.2f}"
                f"{row['host ms']:>9.2f}"
                f"{row['tokens/s']:>10}{row['/ eager']:>9}{row['GiB']:>8}"
            )
    return "\n".join(lines)
