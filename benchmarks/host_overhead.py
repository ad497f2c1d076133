"""Host time of a small pipeline against torch.nn.Sequential, in one run.

Linear-GELU-Linear on 16x128: the arithmetic takes almost no time, so this is
the cost of a call. Each round times every variant in turn. The figure is the
median over the rounds of the ratio within a round. The script prints a table,
and with --out writes it as CSV with machine and commit. With --recipe fuser's
layers are quantized, and nn.Sequential's are not; under mxfp8, whose blocks
have 32 elements, there are 32 rows.

    python benchmarks/host_overhead.py [--device cuda] [--rounds 60] [--out FILE]
    python benchmarks/host_overhead.py --device cuda --dtype bfloat16 --recipe current
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from evidence import environment, progress

import fuser
from fuser import recipe

TARGETS = {"forward, no grad": 1.3, "forward + backward": 1.1}
# Targets under a recipe, microseconds on an H200: half the time of te.ops there.
RECIPE_TARGETS = {"forward, no grad": 250, "forward + backward": 800}
RECIPES = {
    "current": recipe.Float8CurrentScaling,
    "delayed": recipe.DelayedScaling,
    "rowwise": recipe.Float8RowwiseScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
ROWS, WIDTH = 16, 128
# A whole block, so that padding is not timed.
MXFP8_ROWS = 32


def models(device: str, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """The same three layers with the same weights, by name."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Linear(WIDTH, WIDTH),
    ).to(device, dtype)
    fused = fuser.Sequential(
        fuser.Linear(WIDTH, WIDTH, device=device, dtype=dtype),
        fuser.GELU(),
        fuser.Linear(WIDTH, WIDTH, device=device, dtype=dtype),
    )
    for own, theirs in ((fused[0], plain[0]), (fused[2], plain[2])):
        with torch.no_grad():
            own.weight.copy_(theirs.weight)
            own.bias.copy_(theirs.bias)
    return {"nn.Sequential": plain, "fuser": fused}


def under(made: recipe.Recipe, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The model's output under a recipe, entered as in every training step."""
    with fuser.autocast(recipe=made):
        y: torch.Tensor = model(x)
    return y


def calls(
    model: torch.nn.Module, x: torch.Tensor, recipe_name: str | None = None
) -> dict[str, Callable[[], object]]:
    """The timed calls of a model, by name; gradients are None first, as in a training step."""
    made = RECIPES[recipe_name]() if recipe_name else None
    run = model if made is None else functools.partial(under, made, model)

    def forward() -> None:
        with torch.no_grad():
            run(x)

    def train() -> None:
        run(x).sum().backward()
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    parameters = list(model.parameters())
    return {"forward, no grad": forward, "forward + backward": train}


def microseconds(call: Callable[[], object], count: int, device: str) -> float:
    """Host time of one call; on a GPU it waits for the device before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return elapsed / count * 1e6


def measure(
    device: str, dtype: torch.dtype, rounds: int, count: int, recipe_name: str | None = None
) -> list[dict[str, object]]:
    """One row for each timed call: medians, ratio with its 20th and 80th percentile."""
    rows_of_x = MXFP8_ROWS if recipe_name == "mxfp8" else ROWS
    x = torch.randn(rows_of_x, WIDTH, device=device, dtype=dtype, requires_grad=True)
    timed = {
        name: calls(model, x, recipe_name if name == "fuser" else None)
        for name, model in models(device, dtype).items()
    }
    rows: list[dict[str, object]] = []
    for what, target in (RECIPE_TARGETS if recipe_name else TARGETS).items():
        for variant in timed.values():
            microseconds(variant[what], 6 * count, device)
        times = {name: [] for name in timed}  # type: dict[str, list[float]]
        for _ in progress(range(rounds), f"{what}, rounds"):
            for name, variant in timed.items():
                times[name].append(microseconds(variant[what], count, device))
        ratios = [f / n for f, n in zip(times["fuser"], times["nn.Sequential"], strict=True)]
        low, _, _, high = statistics.quantiles(ratios, n=5)
        rows.append(
            {
                "what": what,
                "nn.Sequential us": round(statistics.median(times["nn.Sequential"]), 1),
                "fuser us": round(statistics.median(times["fuser"]), 1),
                "ratio": round(statistics.median(ratios), 3),
                "p20": round(low, 3),
                "p80": round(high, 3),
                "target": target,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__.splitlines()[0]} Takes about a minute.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of all"
    )
    parser.add_argument(
        "--recipe",
        choices=list(RECIPES),
        help=f"of fuser's layers; under mxfp8 with {MXFP8_ROWS} rows instead of {ROWS}",
    )
    parser.add_argument("--rounds", type=int, default=60, help="how often all are timed")
    parser.add_argument("--count", type=int, default=50, help="calls of each variant in a round")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    options = parser.parse_args(argv)
    for name, least in (("rounds", 2), ("count", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least {least}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no CUDA device.")
    dtype = getattr(torch, options.dtype)
    where = environment(options.device, dtype) | {"recipe": options.recipe or "none"}
    print("  ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    rows = measure(options.device, dtype, options.rounds, options.count, options.recipe)
    print(f"{'':20} {'nn.Sequential':>14} {'fuser':>8} {'ratio':>7}  (p20-p80)       at most")
    for row in rows:
        print(
            f"{row['what']:20} {row['nn.Sequential us']:>11} us {row['fuser us']:>5} us "
            f"{row['ratio']:>7}  ({row['p20']}-{row['p80']})   {row['target']}"
            f"{' us' if options.recipe else ''}"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*where, *rows[0]])
            writer.writeheader()
            writer.writerows({**where, **row} for row in rows)


if __name__ == "__main__":
    main()
