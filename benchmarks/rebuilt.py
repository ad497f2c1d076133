"""The price of computing tensors again in backward: steps with and without, interleaved.

A block runs forward and backward in one CUDA graph, and launched, once under an activation memory
budget of 1, and once with a plan that keeps every tensor. Also the bytes held before backward.

    python benchmarks/rebuilt.py --out out/rebuilt.csv
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from evidence import Sink, progress, provenance, say
from options import new_parser, parsed
from pipelines import BF16, BLOCKS, RECIPES, USUAL, Sizes, with_fuser
from timing import Failure, clock, measure

import fuser

SIZES = {"cuda": (8192, 4096, 14336), "cpu": (64, 64, 128)}
WAYS = ("budget 1", "everything kept")


def step_of(
    block: str, recipe: str, sizes: Sizes, device: str, is_kept: bool
) -> tuple[Callable[[], None], int]:
    """A training step, warmed up, and the bytes held before its backward (on a GPU)."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    model, context = with_fuser(recipe, BLOCKS[block], sizes, options)
    x = torch.randn(sizes.tokens, sizes.hidden, requires_grad=True, **options)
    dy = torch.randn_like(x)
    held = [0]

    def step() -> None:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        with fuser.activation_memory_budget(None if is_kept else 1), context():
            y = model(x)
        if device == "cuda":
            held[0] = torch.cuda.memory_allocated() - before - y.nbytes
        y.backward(dy)
        for tensor in (x, *model.parameters()):
            tensor.grad = None

    for _ in range(4):
        step()
    return step, held[0]


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    names = ("tokens", "hidden", "intermediate")
    parser = new_parser(__doc__, dict.fromkeys(names, "of the block"))
    parser.add_argument("--recipes", nargs="*", default=[BF16, *USUAL], choices=[BF16, *RECIPES])
    options = parsed(parser, argv, dict.fromkeys(names, ""))
    device = options.device
    defaults = dict(zip(names, SIZES[device], strict=True))
    sizes = Sizes(**{name: getattr(options, name) or defaults[name] for name in names})
    where = provenance(device, torch.bfloat16, options.commit)
    rows: list[dict[str, Any]] = []
    for block in ("swiglu", "gelu"):
        for recipe in progress(options.recipes, block):
            steps = {way: step_of(block, recipe, sizes, device, way != WAYS[0]) for way in WAYS}
            for timer in (True, False) if device == "cuda" else (False,):
                calls = {way: step for way, (step, _) in steps.items()}
                found = measure([calls], clock(device, is_captured=timer), rounds=options.rounds)
                for way, result in found.items():
                    row = {"block": block, **vars(sizes), "recipe": recipe, "plan": way}
                    row["way"] = "graph" if timer else "launched"
                    row["held bytes"] = steps[way][1]
                    if isinstance(result, Failure):
                        rows.append(row | {"failure": result.reason})
                        continue
                    kept = found[WAYS[1]]
                    ratio = "" if isinstance(kept, Failure) else result.median / kept.median
                    row |= {"ms": round(result.median * 1e3, 4), "/ kept": ratio, "failure": ""}
                    rows.append(row)
                    say(
                        f"{block:<8}{recipe:<10}{row['way']:<10}{way:<18}{row['ms']:9.3f} ms "
                        f"{ratio:6.4f}  {row['held bytes'] / 1e6:9.1f} MB"
                    )
    Sink(options.out, where).write(rows)


if __name__ == "__main__":
    main()
