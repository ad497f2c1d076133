"""Mixtures of experts, forward and backward: GroupedLinear-ScaledSwiGLU-GroupedLinear.

Variants: fuser as one pipeline, in bf16 and under recipes, also with parameters in FP8; the same in
torch with `grouped_mm`, eager and compiled; a loop of linears over the experts, with their sizes on
the host; and the six grouped products alone. Weights are one tensor for all experts, quantized ones
a tensor each. Tokens are split unevenly. All run alternately (timing.py), launched from Python and
as CUDA graphs. On a CPU sizes are small, to try the script.

    python benchmarks/grouped.py --out out/grouped.csv
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from evidence import Sink, progress, provenance, say
from memory_meter import measure as measure_memory
from options import new_parser, parsed
from timing import Call, Failure, Result, Timing, clock, measure
from torch.nn import functional as F

import fuser
from fuser import recipe as recipes
from fuser.recipe import Recipe

# Experts, tokens, hidden and intermediate width.
SIZES = {
    "cuda": ((8, 32768, 4096, 14336), (32, 32768, 7168, 2048), (64, 16384, 2048, 1024)),
    "cpu": ((4, 64, 32, 48),),
}


class Case:
    """The tensors of one size, which all variants share."""

    def __init__(self, size: tuple[int, int, int, int], device: str) -> None:
        torch.manual_seed(0)
        self.experts, self.tokens, self.hidden, self.width = size
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        shares = torch.rand(self.experts) + 0.5
        sizes = (shares / shares.sum() * self.tokens).int()
        sizes[0] += self.tokens - int(sizes.sum())
        self.sizes = sizes.tolist()
        self.splits = sizes.to(device)
        self.ends = sizes.cumsum(0).int().to(device)
        self.x = torch.randn(self.tokens, self.hidden, requires_grad=True, **options)
        self.dy = torch.randn(self.tokens, self.hidden, **options)
        self.scales = torch.rand(self.tokens, requires_grad=True, **options)
        shapes = (2 * self.width, self.hidden), (self.hidden, self.width)
        self.up, self.down = (
            torch.nn.Parameter(torch.randn(self.experts, n, k, **options) * k**-0.5)
            for n, k in shapes
        )
        self.leaves = [self.x, self.scales, self.up, self.down]
        """What gets gradients."""


def in_fuser(
    case: Case, recipe: Recipe | None = None, *, has_quantized_parameters: bool = False
) -> Call:
    options: dict[str, Any] = {
        "bias": False,
        "single_grouped_weight": not has_quantized_parameters,
        "device": case.x.device,
        "dtype": torch.bfloat16,
    }
    with fuser.quantized_model_init(enabled=has_quantized_parameters, recipe=recipe):
        model = fuser.Sequential(
            fuser.GroupedLinear(case.experts, case.hidden, 2 * case.width, **options),
            fuser.ScaledSwiGLU(),
            fuser.GroupedLinear(case.experts, case.width, case.hidden, **options),
        )
    if has_quantized_parameters:
        case.leaves += model.parameters()
    else:
        model[0].weight, model[2].weight = case.up, case.down

    def forward() -> torch.Tensor:
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y: torch.Tensor = model(case.x, case.splits, case.scales, case.splits)
        return y

    return forward


def activation(z: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    gate, linear = z.chunk(2, -1)
    return F.silu(gate) * linear * scales[:, None]


def in_torch(case: Case) -> Call:
    def forward() -> torch.Tensor:
        z = F.grouped_mm(case.x, case.up.transpose(1, 2), offs=case.ends)
        h = activation(z, case.scales)
        return F.grouped_mm(h, case.down.transpose(1, 2), offs=case.ends)

    return forward


def compiled(case: Case) -> Call:
    return torch.compile(in_torch(case), dynamic=False)


def in_a_loop(case: Case) -> Call:
    def forward() -> torch.Tensor:
        each = (
            case.x.split(case.sizes),
            case.scales.split(case.sizes),
            case.up.unbind(),
            case.down.unbind(),
        )
        return torch.cat(
            [
                activation(x @ up.t(), scales) @ down.t()
                for x, scales, up, down in zip(*each, strict=True)
            ]
        )

    return forward


def products(case: Case) -> Call:
    """The six grouped products of forward and backward, over ready operands."""
    h = torch.randn(case.tokens, case.width, device=case.x.device, dtype=torch.bfloat16)
    z = torch.randn(case.tokens, 2 * case.width, device=case.x.device, dtype=torch.bfloat16)
    x, up, down = case.x.detach(), case.up.detach(), case.down.detach()

    def run() -> None:
        F.grouped_mm(x, up.transpose(1, 2), offs=case.ends)
        F.grouped_mm(h, down.transpose(1, 2), offs=case.ends)
        F.grouped_mm(case.dy, down, offs=case.ends)
        F.grouped_mm(case.dy.t(), h, offs=case.ends)
        F.grouped_mm(z, up, offs=case.ends)
        F.grouped_mm(z.t(), x, offs=case.ends)

    return run


RECIPES = {
    "current": recipes.Float8CurrentScaling(),
    "current, E4M3 only": recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3),
    "delayed": recipes.DelayedScaling(),
    "128-block": recipes.Float8BlockScaling(),
    "MXFP8": recipes.MXFP8BlockScaling(),
    "NVFP4": recipes.NVFP4BlockScaling(),
}
VARIANTS: dict[str, Callable[[Case], Call]] = {
    "fuser": in_fuser,
    **{f"fuser {name}": partial(in_fuser, recipe=recipe) for name, recipe in RECIPES.items()},
    **{
        f"fuser {name}, FP8 parameters": partial(
            in_fuser, recipe=RECIPES[name], has_quantized_parameters=True
        )
        for name in ("current", "delayed", "128-block")
    },
    "torch grouped_mm": in_torch,
    "torch.compile": compiled,
    "a loop of linears": in_a_loop,
    "products alone": products,
}


def step_of(name: str, case: Case) -> Call:
    """Forward and backward; gradients are None first."""
    call = VARIANTS[name](case)
    if name == "products alone":
        return call

    def step() -> None:
        y: Any = call()
        y.backward(case.dy)
        for leaf in case.leaves:
            leaf.grad = None

    return step


def measured(
    size: tuple[int, int, int, int], names: list[str], device: str, rounds: int
) -> list[dict[str, Any]]:
    """A record for each variant and way of running."""
    case = Case(size, device)
    calls: dict[str, Call] = {}
    results: dict[str, Result] = {}
    peaks: dict[str, int] = {}
    for name in progress(names, f"{size}: warm up"):
        try:
            calls[name] = step_of(name, case)
            for _ in range(4):  # compiled, recorded, and repeated
                calls[name]()
            peaks[name] = measure_memory({"step": calls[name]}, device)["step"].peak
        except Exception as error:  # a variant that fails must not stop the others
            results[name] = Failure.of(error)
            calls.pop(name, None)
    records = []
    for way in ("launched", "graph") if device == "cuda" else ("launched",):
        timer = clock(device, is_captured=way == "graph")
        found = {**results, **measure([calls], timer, rounds=rounds)}
        for name in names:
            result = found[name]
            row: dict[str, Any] = {
                **dict(zip(("experts", "tokens", "hidden", "intermediate"), size, strict=True)),
                "way": way,
                "variant": name,
                **dict.fromkeys(
                    ("ms", "p20", "p80", "host ms", "peak MiB", "method", "failure"), ""
                ),
            }
            if isinstance(result, Timing):
                row |= {
                    "ms": round(result.median * 1e3, 4),
                    "p20": round(result.p20 * 1e3, 4),
                    "p80": round(result.p80 * 1e3, 4),
                    "host ms": round(result.host * 1e3, 4),
                    "peak MiB": round(peaks[name] / 2**20),
                    "method": result.method,
                }
            else:
                row["failure"] = result.reason
            records.append(row)
        gc.collect()
    return records


def table(records: list[dict[str, Any]]) -> str:
    """The records of one size and way as text."""
    first = records[0]
    lines = [
        f"\n{first['experts']} experts, T {first['tokens']}, H {first['hidden']}, "
        f"F {first['intermediate']}, {first['way']}",
        f"{'':<32}{'ms':>9}{'p20':>9}{'p80':>9}{'host ms':>9}{'peak MiB':>10}",
    ]
    for row in records:
        if row["failure"]:
            lines.append(f"{row['variant']:<32}  FAILED {row['failure']}")
        else:
            lines.append(
                f"{row['variant']:<32}{row['ms']:>9.3f}{row['p20']:>9.3f}{row['p80']:>9.3f}"
                f"{row['host ms']:>9.3f}{row['peak MiB']:>10}  {row['method']}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    parser = new_parser(__doc__, {})
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="a regular expression in names of variants"
    )
    parser.add_argument(
        "--experts", type=int, nargs="+", help="only sizes with so many; by default all sizes"
    )
    options = parsed(parser, argv, {})
    if options.chart:
        parser.error("grouped.py draws no chart.")
    where = provenance(options.device, torch.bfloat16, options.commit)
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    names = [name for name in VARIANTS if not (options.no_compile and name == "torch.compile")]
    names = [name for name in names if re.search(options.only, name)]
    sink = Sink(options.out, where)
    for size in SIZES[options.device]:
        if options.experts and size[0] not in options.experts:
            continue
        records = measured(size, names, options.device, options.rounds)
        for way in dict.fromkeys(row["way"] for row in records):
            say(table([row for row in records if row["way"] == way]))
        sink.write(records)
        if options.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
