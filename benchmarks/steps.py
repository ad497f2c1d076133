"""Training steps of a stack of blocks: launched, with one thread, and as CUDA graphs.

A model of many small blocks is bound by the host: this is where the time of a call counts. The
stack is 24 blocks of RMSNorm-Linear-SwiGLU-Linear with the residual added inside, T 512, H 1024,
F 2816. fuser runs it as 24 pipelines, as a model with one `Sequential` a block does, and as one.
"launched" is a step from Python, as a training loop runs it; in "one thread" torch's autograd runs
backward in the calling thread; "graph" is a CUDA graph of the step, without host time. All
variants run alternately (timing.py). On a CPU sizes are small, to try the script.

    python benchmarks/steps.py --out out/steps.csv
    python benchmarks/steps.py --recipes current --blocks gelu --layers 1 --tokens 2048
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from evidence import Sink, progress, provenance, say
from options import new_parser, parsed
from peers import absent
from pipelines import (
    BF16,
    BLOCKS,
    RECIPES,
    USUAL,
    Block,
    Context,
    Sizes,
    Variant,
    steps,
    variants,
    with_fuser,
)
from timing import Call, Failure, Result, Timing, clock, measure

SIZES = {"cuda": (512, 1024, 2816), "cpu": (16, 32, 64)}
LAYERS = {"cuda": 24, "cpu": 3}
WAYS = ("launched", "one thread", "graph")
TRAIN = "forward + backward"


def stacked(block: Block, layers: int, *, is_one: bool = False) -> Block:
    """``layers`` such blocks in a row. With ops each is a pipeline, or all are one."""

    def as_ops(ops: Any, sizes: Sizes, options: dict[str, Any]) -> torch.nn.Module:
        # Equal names in pipelines of their own: these are of one structure, and share a graph.
        made: list[Any] = [
            block.as_ops(ops, sizes, options, channel=f"residual{i if is_one else ''}")
            for i in range(layers)
        ]
        if is_one:
            model: torch.nn.Module = ops.Sequential(*(op for part in made for op in part))
            return model
        return torch.nn.Sequential(*made)

    def as_torch(sizes: Sizes, options: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Sequential(*(block.as_torch(sizes, options) for _ in range(layers)))

    return replace(block, title=f"{layers} x {block.title}", as_ops=as_ops, as_torch=as_torch)


def with_cuda_graphs(
    block: Block, sizes: Sizes, options: dict[str, Any]
) -> tuple[torch.nn.Module, Context]:
    """torch.nn, compiled with CUDA graphs."""
    model = block.as_torch(sizes, options)
    model.compile(mode="reduce-overhead")
    return model, contextlib.nullcontext


def compiled_with_fuser(
    recipe: str, mode: str | None, block: Block, sizes: Sizes, options: dict[str, Any]
) -> tuple[torch.nn.Module, Context]:
    """The pipelines in one graph of torch.compile."""
    model, context = with_fuser(recipe, block, sizes, options)
    model.compile(mode=mode, fullgraph=True)
    return model, context


def all_variants(
    recipes: Sequence[str], block: Block, layers: int, *, is_compiled: bool
) -> list[tuple[Variant, Block]]:
    """Every variant with its stack of blocks."""
    separate, one = (stacked(block, layers, is_one=is_one) for is_one in (False, True))
    found = [
        (variant, separate)
        for variant in variants(recipes, is_compiled=is_compiled)
        if variant.library != "GEMMs alone"
    ]
    if layers > 1:
        found += [
            (Variant("fuser as one", name, functools.partial(with_fuser, name)), one)
            for name in (BF16, *recipes)
        ]
    if is_compiled and torch.cuda.is_available():
        found.append((Variant("torch.compile with graphs", BF16, with_cuda_graphs), separate))
        for name in (BF16, *recipes):
            for title, mode in (("compiled", None), ("compiled with graphs", "reduce-overhead")):
                make = functools.partial(compiled_with_fuser, name, mode)
                found.append((Variant(f"fuser {title}", name, make), separate))
    return found


def in_one_thread(call: Call) -> Call:
    """The call, with backward in the calling thread."""

    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            call()

    return run


def measured(
    chosen: Sequence[tuple[Variant, Block]], sizes: Sizes, device: str, rounds: int
) -> list[dict[str, Any]]:
    """A record for each variant and way of running."""
    calls: dict[str, Call] = {}
    failures: dict[str, Result] = {}
    for variant, block in progress(chosen, "warm up"):
        try:
            call = steps(variant, block, sizes, device)[TRAIN]
            for _ in range(4):  # compiled, recorded, and repeated
                call()
            calls[variant.name] = call
        except Exception as error:  # a variant that fails must not stop the others
            failures[variant.name] = Failure.of(error)
    records = []
    for way in WAYS if device == "cuda" else WAYS[:1]:
        ready = {
            name: in_one_thread(call) if way == "one thread" else call
            for name, call in calls.items()
        }
        timer = clock(device, is_captured=way == "graph")
        results: dict[str, Result] = {**failures, **measure([ready], timer, rounds=rounds)}
        eager = results["torch eager bf16"]
        for variant, block in chosen:
            result = results[variant.name]
            row: dict[str, Any] = {
                "block": block.title,
                "tokens": sizes.tokens,
                "hidden": sizes.hidden,
                "intermediate": sizes.intermediate,
                "way": way,
                "variant": variant.name,
                **dict.fromkeys(
                    ("ms", "p20", "p80", "host ms", "/ eager", "method", "failure"), ""
                ),
            }
            if isinstance(result, Failure):
                row["failure"] = result.reason
            else:
                row |= {
                    "ms": round(result.median * 1e3, 4),
                    "p20": round(result.p20 * 1e3, 4),
                    "p80": round(result.p80 * 1e3, 4),
                    "host ms": round(result.host * 1e3, 4),
                    "method": result.method,
                }
                if isinstance(eager, Timing):
                    row["/ eager"] = round(result.median / eager.median, 3)
            records.append(row)
        gc.collect()
    return records


def table(records: list[dict[str, Any]]) -> str:
    """The records of one way as text."""
    lines = [f"\n{records[0]['block']}, {records[0]['way']}"]
    lines.append(f"{'':<34}{'ms':>9}{'p20':>9}{'p80':>9}{'host ms':>9}{'/ eager':>9}")
    for row in records:
        if row["failure"]:
            lines.append(f"{row['variant']:<34}  FAILED {row['failure']}")
        else:
            lines.append(
                f"{row['variant']:<34}{row['ms']:>9.3f}{row['p20']:>9.3f}{row['p80']:>9.3f}"
                f"{row['host ms']:>9.3f}{row['/ eager']:>9}  {row['method']}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    names = ("tokens", "hidden", "intermediate", "layers")
    defaults = {
        device: dict(zip(names, (*SIZES[device], LAYERS[device]), strict=True)) for device in SIZES
    }
    texts = {
        name: f"default: {defaults['cuda'][name]}, on a CPU {defaults['cpu'][name]}"
        for name in names
    }
    parser = new_parser(__doc__, texts)
    parser.add_argument("--block", default="swiglu", choices=list(BLOCKS), help="default: swiglu")
    parser.add_argument(
        "--recipes",
        nargs="*",
        default=list(USUAL),
        choices=list(RECIPES),
        help=f"of fuser, beside bf16; default: {' '.join(USUAL)}",
    )
    options = parsed(parser, argv, texts)
    if options.chart:
        parser.error("steps.py draws no chart.")
    given = {name: getattr(options, name) or defaults[options.device][name] for name in names}
    layers = given.pop("layers")
    sizes = Sizes(**given)
    where = provenance(options.device, torch.bfloat16, options.commit)
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    print(f"T {sizes.tokens}  H {sizes.hidden}  F {sizes.intermediate}", end="")
    print(f"; not here: {', '.join(absent())}" if absent() else "")
    chosen = all_variants(
        options.recipes, BLOCKS[options.block], layers, is_compiled=not options.no_compile
    )
    records = measured(chosen, sizes, options.device, options.rounds)
    for way in dict.fromkeys(row["way"] for row in records):
        say(table([row for row in records if row["way"] == way]))
    Sink(options.out, where).write(records)


if __name__ == "__main__":
    main()
