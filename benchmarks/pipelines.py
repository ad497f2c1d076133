"""Whole feed-forward blocks, forward and backward, against torch and other libraries.

Two blocks: Linear-GELU-Linear, and RMSNorm-Linear-SwiGLU-Linear with the residual added inside,
both in fuser and in Transformer Engine's te.ops, by the same lines of code. Every variant
quantizes its weights in every step. They run alternately in one run (timing.py), on random data,
and launch from Python as a training loop does; --graph also times each as one CUDA graph, without
host time. The floor is the GEMMs' arithmetic at the rate that a matrix product of 8192 cubed
reaches in the same run, in bf16 or in FP8. On a CPU sizes are small, to try the script.

    python benchmarks/pipelines.py --out out/pipelines.csv --chart out/pipelines.png
    python benchmarks/pipelines.py --blocks swiglu --recipes current --graph
    python benchmarks/pipelines.py --blocks gelu --profile current
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import charts
import torch
from evidence import Sink, progress, provenance, say
from memory_meter import measure as measure_memory
from options import new_parser, parsed
from peers import absent, library
from timing import Call, Failure, Result, Timing, clock, measure
from torch.profiler import ProfilerActivity, profile

import fuser
import fuser.recipe

BF16 = "bf16"
# Class names, the same in both libraries. The last two have no GEMMs before compute capability 10.
RECIPES = {
    "current": "Float8CurrentScaling",
    "delayed": "DelayedScaling",
    "128-block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
USUAL = ("current", "delayed", "128-block")
SIZES = {"cuda": (8192, 4096, 14336), "cpu": (256, 128, 256)}
CEILING_SIZE = {"cuda": 8192, "cpu": 256}
PASSES = {"forward": 1, "forward + backward": 3}
# Number of kernels that --profile prints, and characters of a name.
KERNELS, NAME = 25, 100


@dataclass(frozen=True)
class Sizes:
    """Sizes of a block: tokens, hidden and intermediate width."""

    tokens: int
    hidden: int
    intermediate: int


# -- blocks -------------------------------------------------------------------


def gelu_ops(ops: Any, sizes: Sizes, options: dict[str, Any], channel: str = "") -> torch.nn.Module:
    """Linear-GELU-Linear with biases; ``ops`` is fuser or te.ops. It has no channel."""
    model: torch.nn.Module = ops.Sequential(
        ops.Linear(sizes.hidden, sizes.intermediate, **options),
        ops.GELU(),
        ops.Linear(sizes.intermediate, sizes.hidden, **options),
    )
    return model


def swiglu_ops(
    ops: Any, sizes: Sizes, options: dict[str, Any], channel: str = "residual"
) -> torch.nn.Module:
    """RMSNorm-Linear-SwiGLU-Linear-add without biases; ``ops`` is fuser or te.ops."""
    residual, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    residual.set_extra_output_channel(0, channel, output_to_caller=False)
    add.set_extra_input_channel(0, channel)
    model: torch.nn.Module = ops.Sequential(
        residual,
        ops.RMSNorm(sizes.hidden, **options),
        ops.Linear(sizes.hidden, 2 * sizes.intermediate, bias=False, **options),
        ops.SwiGLU(),
        ops.Linear(sizes.intermediate, sizes.hidden, bias=False, **options),
        add,
    )
    return model


def gelu_torch(sizes: Sizes, options: dict[str, Any]) -> torch.nn.Module:
    """Linear-GELU-Linear in torch.nn."""
    return torch.nn.Sequential(
        torch.nn.Linear(sizes.hidden, sizes.intermediate, **options),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Linear(sizes.intermediate, sizes.hidden, **options),
    )


class SwiGLUBlock(torch.nn.Module):
    """RMSNorm-Linear-SwiGLU-Linear-add in torch.nn."""

    def __init__(self, sizes: Sizes, options: dict[str, Any]) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(sizes.hidden, eps=1e-5, **options)
        self.up = torch.nn.Linear(sizes.hidden, 2 * sizes.intermediate, bias=False, **options)
        self.down = torch.nn.Linear(sizes.intermediate, sizes.hidden, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, linear = self.up(self.norm(x)).chunk(2, -1)
        y: torch.Tensor = x + self.down(torch.nn.functional.silu(gate) * linear)
        return y


@dataclass(frozen=True)
class Block:
    """A block as ops and in torch.nn, and the number of its H x F weight matrices.

    ``as_ops`` takes the library, sizes, options, and optionally the name of a channel.
    """

    title: str
    as_ops: Callable[..., torch.nn.Module]
    as_torch: Callable[[Sizes, dict[str, Any]], torch.nn.Module]
    matrices: int

    def flop(self, sizes: Sizes, passes: int) -> int:
        """FLOP of the GEMMs, with ``passes`` GEMMs for each weight."""
        weights = self.matrices * sizes.hidden * sizes.intermediate
        return 2 * passes * sizes.tokens * weights


BLOCKS = {
    "gelu": Block("Linear-GELU-Linear", gelu_ops, gelu_torch, 2),
    "swiglu": Block("RMSNorm-Linear-SwiGLU-Linear-add", swiglu_ops, SwiGLUBlock, 3),
}


# -- variants -----------------------------------------------------------------

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Variant:
    """A library under a recipe or in bf16; ``make`` returns a model and its forward's context."""

    library: str
    recipe: str
    make: Callable[[Block, Sizes, dict[str, Any]], tuple[torch.nn.Module, Context]]

    @property
    def name(self) -> str:
        """The name in tables and in results."""
        return f"{self.library} {self.recipe}"

    @property
    def ceiling(self) -> str:
        """The ceiling of its GEMMs."""
        return BF16 if self.recipe == BF16 else "fp8"


def with_fuser(
    recipe: str, block: Block, sizes: Sizes, options: dict[str, Any]
) -> tuple[torch.nn.Module, Context]:
    """fuser's pipeline."""
    model = block.as_ops(fuser, sizes, options)
    if recipe == BF16:
        return model, contextlib.nullcontext
    chosen = getattr(fuser.recipe, RECIPES[recipe])()
    return model, functools.partial(fuser.autocast, recipe=chosen)


def with_torch(
    is_compiled: bool, block: Block, sizes: Sizes, options: dict[str, Any]
) -> tuple[torch.nn.Module, Context]:
    """torch.nn, eager or compiled."""
    model = block.as_torch(sizes, options)
    if is_compiled:
        model.compile(dynamic=False)
    return model, contextlib.nullcontext


def with_torchao(
    block: Block, sizes: Sizes, options: dict[str, Any]
) -> tuple[torch.nn.Module, Context]:
    """torch.nn with torchao's FP8 linears, compiled as torchao recommends."""
    float8 = importlib.import_module("torchao.float8")
    model = float8.convert_to_float8_training(block.as_torch(sizes, options))
    model.compile(dynamic=False)
    return model, contextlib.nullcontext


def with_te(
    recipe: str, block: Block, sizes: Sizes, options: dict[str, Any]
) -> tuple[torch.nn.Module, Context]:
    """Transformer Engine's te.ops, by the same lines as fuser's pipeline."""
    te: ModuleType = importlib.import_module("transformer_engine.pytorch")
    model = block.as_ops(te.ops, sizes, options)
    if recipe == BF16:
        return model, contextlib.nullcontext
    recipes = importlib.import_module("transformer_engine.common.recipe")
    chosen = getattr(recipes, RECIPES[recipe])()
    if hasattr(te, "autocast"):
        return model, functools.partial(te.autocast, enabled=True, recipe=chosen)
    return model, functools.partial(te.fp8_autocast, enabled=True, fp8_recipe=chosen)


class Products(torch.nn.Module):
    """The matrix products of a block alone, forward and backward, by torch's calls.

    Operands are random and ready: nothing is quantized, transposed or added.
    """

    def __init__(self, recipe: str, matrices: Sequence[tuple[int, int]], tokens: int) -> None:
        super().__init__()
        self.products = [
            product(recipe, m, n, k, is_wgrad=name == "wgrad", is_fast=name == "forward")
            for rows, columns in matrices
            for name, m, n, k in (
                ("forward", tokens, rows, columns),
                ("dgrad", tokens, columns, rows),
                ("wgrad", rows, columns, tokens),
            )
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Products.apply(x, self.products)
        return y


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, products: list[Call]) -> torch.Tensor:
        ctx.products = products
        for call in products[::3]:
            call()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        for place, call in enumerate(ctx.products):
            if place % 3:
                call()
        return dy, None


def product(recipe: str, m: int, n: int, k: int, *, is_wgrad: bool, is_fast: bool) -> Call:
    """One product ``[m, k] @ [n, k].T`` of random operands, into bf16."""
    a, b = (torch.randn(size, k, device="cuda", dtype=torch.bfloat16) for size in (m, n))
    if recipe == BF16:
        return lambda: torch.mm(a, b.t())
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    given: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": is_fast}
    if recipe != "128-block":
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(a8, b8, one, one, **given)
    given["use_fast_accum"] = False
    scale_a = torch.ones(k // 128, m, device="cuda").t()
    shape = (k // 128, n) if is_wgrad else (k // 128, n // 128)
    scale_b = torch.ones(shape, device="cuda")
    if not is_wgrad:  # blocks of 128 x 128, with those of a row next to each other
        scale_b = scale_b.t().contiguous().t()
    return lambda: torch._scaled_mm(a8, b8, scale_a, scale_b, **given)


def with_products(
    recipe: str, block: Block, sizes: Sizes, options: dict[str, Any]
) -> tuple[torch.nn.Module, Context]:
    """The products of a block alone."""
    parameters = block.as_torch(sizes, options).parameters()
    shapes = [(p.shape[0], p.shape[1]) for p in parameters if p.dim() == 2]
    return Products(recipe, shapes, sizes.tokens), contextlib.nullcontext


def variants(recipes: Sequence[str], *, is_compiled: bool) -> list[Variant]:
    """The variants of each block; absent libraries have none."""
    names = [BF16, *recipes]
    found = [Variant("fuser", name, functools.partial(with_fuser, name)) for name in names]
    if torch.cuda.is_available():
        found += [
            Variant("GEMMs alone", name, functools.partial(with_products, name))
            for name in names
            if name in (BF16, *USUAL)
        ]
    found.append(Variant("torch eager", BF16, functools.partial(with_torch, False)))
    if is_compiled:
        found.append(Variant("torch.compile", BF16, functools.partial(with_torch, True)))
    if is_compiled and "current" in recipes and library("torchao"):
        found.append(Variant("torchao", "current", with_torchao))
    if library("TE"):
        found += [Variant("TE", name, functools.partial(with_te, name)) for name in names]
    # Variants with the same arithmetic are side by side.
    return sorted(found, key=lambda variant: names.index(variant.recipe))


def steps(variant: Variant, block: Block, sizes: Sizes, device: str) -> dict[str, Call]:
    """The timed calls of a variant, by name; gradients are None first."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    model, context = variant.make(block, sizes, options)
    x = torch.randn(sizes.tokens, sizes.hidden, requires_grad=True, **options)
    dy = torch.randn(sizes.tokens, sizes.hidden, **options)
    parameters = list(model.parameters())

    def forward() -> None:
        with torch.no_grad(), context():
            model(x)

    def train() -> None:
        with context():
            y = model(x)
        y.backward(dy)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return dict(zip(PASSES, (forward, train), strict=True))


# -- ceilings -----------------------------------------------------------------


def gemm_ceilings(device: str, rounds: int) -> dict[str, float]:
    """FLOP per second of a matrix product of random values, in bf16 and, on a GPU, in FP8."""
    size = CEILING_SIZE[device]
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    calls: dict[str, Call] = {BF16: lambda: torch.mm(a, b.t(), out=out)}
    if device == "cuda":
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        calls["fp8"] = lambda: torch._scaled_mm(
            a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    results = measure([calls], clock(device), passes=4, rounds=rounds)
    timings = {name: r for name, r in results.items() if isinstance(r, Timing)}
    return {name: 2 * size**3 / timing.median for name, timing in timings.items()}


# -- measuring ----------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Settings of a run."""

    device: str
    sizes: Sizes
    rounds: int
    is_captured: bool = False


def measured(
    block: Block, chosen: Sequence[Variant], run: Run, ceilings: dict[str, float]
) -> list[dict[str, Any]]:
    """A record for each variant, pass and timing method."""
    failures: dict[str, Failure] = {}
    calls: dict[str, dict[str, Call]] = {}
    peaks: dict[str, int] = {}
    for variant in progress(chosen, f"{block.title}: warm up"):
        try:
            made = steps(variant, block, run.sizes, run.device)
            for call in (*made.values(), *made.values()):
                call()
            train = made["forward + backward"]
            peaks[variant.name] = measure_memory({"step": train}, run.device)["step"].peak
            calls[variant.name] = made
        except Exception as error:  # a variant that fails must not stop the others
            failures[variant.name] = Failure.of(error)
    ways = [False, True] if run.is_captured else [False]
    records = []
    for pass_ in PASSES:
        for is_captured in ways:
            timer = clock(run.device, is_captured=is_captured)
            ready = {name: made[pass_] for name, made in calls.items()}
            results: dict[str, Result] = {**failures}
            results |= measure([ready], timer, rounds=run.rounds)
            records += [
                record(block, variant, pass_, run, results[variant.name], ceilings)
                | {"peak MiB": round(peaks[variant.name] / 2**20) if variant.name in peaks else ""}
                for variant in chosen
            ]
    return records


def record(
    block: Block,
    variant: Variant,
    pass_: str,
    run: Run,
    result: Result,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    """The record of one result, with the floor to compare it with."""
    flop = block.flop(run.sizes, PASSES[pass_])
    ceiling = ceilings.get(variant.ceiling)
    found: dict[str, Any] = {
        "block": block.title,
        "tokens": run.sizes.tokens,
        "hidden": run.sizes.hidden,
        "intermediate": run.sizes.intermediate,
        "pass": pass_,
        "variant": variant.name,
        "library": variant.library,
        "recipe": variant.recipe,
        "flop": flop,
        "ceiling TFLOP/s": round(ceiling / 1e12, 3) if ceiling else "",
        "floor ms": round(flop / ceiling * 1e3, 4) if ceiling else "",
        **dict.fromkeys(("ms", "p20", "p80", "TFLOP/s", "/ floor", "method", "failure"), ""),
    }
    if isinstance(result, Failure):
        return found | {"failure": result.reason}
    return found | {
        "ms": round(result.median * 1e3, 4),
        "p20": round(result.p20 * 1e3, 4),
        "p80": round(result.p80 * 1e3, 4),
        "TFLOP/s": round(flop / result.median / 1e12, 3),
        "/ floor": round(result.median * ceiling / flop, 3) if ceiling else "",
        "method": result.method,
    }


# -- profile ------------------------------------------------------------------


def profiled(call: Call, device: str) -> str:
    """A table of one call by total time: kernels on a GPU, torch's ops on a CPU."""
    for _ in range(3):
        call()
    is_cuda = device == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        call()
        if is_cuda:
            torch.cuda.synchronize()
    rows: dict[str, list[float]] = {}
    spans: list[tuple[float, float]] = []
    for event in profiler.events():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        if is_cuda != is_kernel:
            continue
        elapsed = event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total
        rows.setdefault(event.name, []).append(elapsed)
        spans.append((event.time_range.start, event.time_range.end))
    if not spans:
        return "The profiler saw nothing."
    total = sum(map(sum, rows.values()))
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    lines = [f"{'us':>10}{'share':>8}{'calls':>7}  name"]
    for name, times in sorted(rows.items(), key=lambda item: -sum(item[1]))[:KERNELS]:
        told = " ".join(name.split())
        told = told if len(told) <= NAME else f"{told[:NAME]}..."
        lines.append(f"{sum(times):>10.1f}{sum(times) / total:>8.1%}{len(times):>7}  {told}")
    if len(rows) > KERNELS:
        lines.append(f"and {len(rows) - KERNELS} more")
    lines.append(
        f"{total:>10.1f} in all, {sum(map(len, rows.values()))} calls; first to last {span:.1f} us"
    )
    return "\n".join(lines)


# -- results ------------------------------------------------------------------

HEADER = (
    f"{'':<26}{'ms':>9}{'p20':>9}{'p80':>9}{'TFLOP/s':>10}{'floor ms':>10}{'/ floor':>9}"
    f"{'peak MiB':>10}  timed by"
)


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records of a block as text, pass by pass."""
    lines = []
    for pass_ in PASSES:
        lines.append(f"\n{records[0]['block']}, {pass_}\n{HEADER}")
        for row in records:
            if row["pass"] != pass_:
                continue
            if row["failure"]:
                lines.append(f"{row['variant']:<26}  FAILED {row['failure']}")
                continue
            lines.append(
                f"{row['variant']:<26}{row['ms']:>9.3f}{row['p20']:>9.3f}{row['p80']:>9.3f}"
                f"{row['TFLOP/s']:>10.1f}{row['floor ms']:>10}{row['/ floor']:>9}"
                f"{row['peak MiB']:>10}  {row['method']}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    on_gpu, on_cpu = SIZES["cuda"], SIZES["cpu"]
    names = ("tokens", "hidden", "intermediate")
    texts = {
        name: f"default: {on_gpu[place]}, on a CPU {on_cpu[place]}"
        for place, name in enumerate(names)
    }
    parser = new_parser(__doc__, texts)
    parser.add_argument(
        "--blocks", nargs="+", default=list(BLOCKS), choices=list(BLOCKS), help="default: all"
    )
    parser.add_argument(
        "--recipes",
        nargs="*",
        default=list(USUAL),
        choices=list(RECIPES),
        help=f"of fuser, beside bf16; default: {' '.join(USUAL)}",
    )
    parser.add_argument(
        "--graph", action="store_true", help="time CUDA graphs of the steps too; needs a GPU"
    )
    parser.add_argument(
        "--profile",
        choices=[BF16, *RECIPES],
        help="instead of timing, print what one step of fuser runs under this recipe",
    )
    options = parsed(parser, argv, texts)
    if options.graph and options.device == "cpu":
        parser.error("--graph captures CUDA graphs; --device is cpu.")
    if options.profile and (options.out or options.chart or options.graph):
        parser.error("--profile times nothing, so that --out, --chart and --graph have no result.")
    given = [getattr(options, name) for name in names]
    sizes = Sizes(*(a or b for a, b in zip(given, SIZES[options.device], strict=True)))
    run = Run(options.device, sizes, options.rounds, options.graph)

    where = provenance(run.device, torch.bfloat16, options.commit)
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    print(f"T {sizes.tokens}  H {sizes.hidden}  F {sizes.intermediate}", end="")
    print(f"; not here: {', '.join(absent())}" if absent() else "")
    if options.profile:
        one = Variant("fuser", options.profile, functools.partial(with_fuser, options.profile))
        for block in map(BLOCKS.__getitem__, options.blocks):
            call = steps(one, block, sizes, run.device)["forward + backward"]
            print(f"\n{block.title}, forward + backward, {one.name}")
            print(profiled(call, run.device))
        return

    ceilings = gemm_ceilings(run.device, run.rounds)
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in ceilings.items())
    print(f"a GEMM of {CEILING_SIZE[run.device]} cubed reaches {rates}")
    sink = Sink(options.out, where)
    chosen = variants(options.recipes, is_compiled=not options.no_compile)
    every: list[dict[str, Any]] = []
    for block in map(BLOCKS.__getitem__, options.blocks):
        records = measured(block, chosen, run, ceilings)
        say(table(records))
        sink.write(records)
        every += records
        if run.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    if options.chart:
        charts.draw_pipelines(options.chart, [{**where, **record} for record in every])


if __name__ == "__main__":
    main()
