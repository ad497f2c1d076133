"""What planning costs: the first plan of pipelines of 8 to 160 ops, on the CPU.

Residual feed-forward blocks of eight ops, each a candidate of many fusions. Each round plans a new
pipeline of each length in turn, so that nothing is read from a cache. The figures are CPU time of
this process, the least and the median of the rounds; what has no window of a fusion costs less.

    python benchmarks/planning.py [--rounds 40]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import fuser
from fuser import BasicOperation

LENGTHS = (8, 40, 160)


def feed_forward_ops(count: int) -> list[BasicOperation]:
    """``count`` basic ops of residual feed-forward blocks, with windows for every fusion."""
    ops: list[Any] = []
    for block in range(count // 8 + 1):
        name = f"residual {block}"
        ops += [
            fuser.MakeExtraOutput().set_extra_output_channel(0, name, output_to_caller=False),
            fuser.RMSNorm(8),
            fuser.BasicLinear(8, 16),
            fuser.Bias(16),
            fuser.SwiGLU(),
            fuser.BasicLinear(8, 8),
            fuser.ConstantScale(0.5),
            fuser.AddExtraInput().set_extra_input_channel(0, name),
        ]
    return ops[:count]


def seconds_of_a_plan(count: int) -> float:
    """CPU seconds that the plan of a new pipeline takes, forward and backward."""
    model = fuser.Sequential(*feed_forward_ops(count))
    x = torch.randn(4, 8, requires_grad=True)
    start = time.process_time()
    plan = model.plan(x)
    seconds = time.process_time() - start
    assert len(plan.ops) == count
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="plans of each length")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1.")
    times: dict[int, list[float]] = {count: [] for count in LENGTHS}
    for _ in range(options.rounds):
        for count, seconds in times.items():
            seconds.append(seconds_of_a_plan(count))
    print("  ops   least ms  median ms  us an op")
    for count, seconds in times.items():
        least, median = min(seconds), statistics.median(seconds)
        print(f"{count:5} {1e3 * least:10.1f} {1e3 * median:10.1f} {1e6 * least / count:9.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
