"""Compile time of a stack of blocks: its first step in torch.compile, with cold caches.

The stack is 12 blocks of RMSNorm-Linear-SwiGLU-Linear with the residual added inside, as plain
torch and as fuser's pipelines, in bf16 and under recipes. Each variant is compiled by inductor in a
process of its own, with caches off, and runs one step, forward and backward; variants take turns.
The time of a second step, which compiles nothing, is subtracted.

    python benchmarks/compile_time.py --out out/compile_time.csv
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
import warnings
from typing import Any

import torch
import torch._inductor.config as inductor
from evidence import Sink, progress, provenance, say
from options import new_parser, parsed
from pipelines import BF16, BLOCKS, RECIPES, USUAL, Context, Sizes, with_fuser

import fuser

SIZES = {"cuda": (2048, 1024, 2816), "cpu": (64, 128, 256)}
LAYERS = 12
PLAIN = "torch.compile"


class Stack(torch.nn.Module):
    """Blocks in a loop, as a model has them."""

    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def seconds_of(variant: str, sizes: Sizes, device: str, layers: int) -> float:
    """The compile time of plain torch, or of fuser in bf16 or under a recipe."""
    inductor.force_disable_caches = True
    warnings.filterwarnings("ignore", category=fuser.FuserWarning)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    context: Context = contextlib.nullcontext
    blocks: list[torch.nn.Module] = []
    for _ in range(layers):
        if variant == PLAIN:
            blocks.append(BLOCKS["swiglu"].as_torch(sizes, options))
        else:
            block, context = with_fuser(variant, BLOCKS["swiglu"], sizes, options)
            blocks.append(block)
    model = torch.compile(Stack(blocks), fullgraph=True)
    x = torch.randn(sizes.tokens, sizes.hidden, requires_grad=True, **options)
    torch.compile(lambda x: x * 2)(x.detach())  # what the first graph of a process takes
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        with context():
            y = model(x)
        y.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[0] - seconds[1]


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    names = ("tokens", "hidden", "intermediate", "layers")
    parser = new_parser(__doc__, dict.fromkeys(names, "of the stack"))
    parser.add_argument(
        "--recipes", nargs="*", default=list(USUAL), choices=list(RECIPES), help="of fuser"
    )
    options = parsed(parser, argv, dict.fromkeys(names, ""))
    if options.chart:
        parser.error("compile_time.py draws no chart.")
    defaults = dict(zip(names, (*SIZES[options.device], LAYERS), strict=True))
    given = {name: getattr(options, name) or defaults[name] for name in names}
    layers = given.pop("layers")
    sizes = Sizes(**given)
    where = provenance(options.device, torch.bfloat16, options.commit)
    variants = [PLAIN, BF16, *options.recipes]
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for variant in progress(variants * options.rounds, "compile"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds[variant].append(
                pool.apply(seconds_of, (variant, sizes, options.device, layers))
            )
    plain = statistics.median(seconds[PLAIN])
    rows: list[dict[str, Any]] = []
    for variant, found in seconds.items():
        title = variant if variant == PLAIN else f"fuser {variant}"
        median = statistics.median(found)
        rows.append(
            {"layers": layers, **given, "variant": title, "rounds": options.rounds}
            | {"seconds": round(median, 2), "/ torch.compile": round(median / plain, 3)}
        )
        say(f"{title:<24}{median:8.1f} s{median / plain:8.2f}")
    Sink(options.out, where).write(rows)


if __name__ == "__main__":
    main()
