"""Walks of calls through the library: how deep, and what a reader meets on the way.

    python tests/walks.py       # a table; --json for programs
    PYTHONPATH=/other/checkout python tests/walks.py

A walk is a forward and a backward of a small dense block on a CPU. It counts calls of functions of
this library, the deepest nesting of them, and the files and the classes whose methods were called.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fuser

LIBRARY = str(Path(fuser.__file__).parent)
T, H, F = 32, 64, 128
BF16 = torch.bfloat16


class Plain(torch.nn.Module):
    """A block in plain torch, for ``fuser.convert``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(H, eps=1e-5)
        self.gate = torch.nn.Linear(H, F, bias=False)
        self.up = torch.nn.Linear(H, F, bias=False)
        self.down = torch.nn.Linear(F, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        found: torch.Tensor = x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
        return found


def block() -> torch.nn.Module:
    """RMSNorm, linear, SwiGLU, linear."""
    return fuser.Sequential(
        fuser.RMSNorm(H, dtype=BF16),
        fuser.Linear(H, 2 * F, bias=False, dtype=BF16),
        fuser.SwiGLU(),
        fuser.Linear(F, H, bias=False, dtype=BF16),
    )


def step(model: Callable[[torch.Tensor], torch.Tensor], recipe: Any) -> Callable[[], None]:
    """A forward and a backward of a model."""
    x = torch.randn(T, H, dtype=BF16, requires_grad=True)

    def run() -> None:
        with fuser.autocast(recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(torch.ones_like(y))

    return run


def walk(call: Callable[[], None]) -> dict[str, int]:
    """What a call meets: calls, deepest nesting, files, classes."""
    calls = depth = deepest = 0
    files: set[str] = set()
    classes: set[tuple[str, str]] = set()

    def noted(frame: Any, event: str, _: Any) -> None:
        nonlocal calls, depth, deepest
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARY):
            return
        if event == "return":
            depth -= 1
        elif event == "call":
            calls += 1
            depth += 1
            deepest = max(deepest, depth)
            files.add(code.co_filename)
            names = getattr(code, "co_qualname", code.co_name).split(".<locals>")[0].split(".")
            if len(names) > 1:
                classes.add((code.co_filename, names[0]))

    sys.setprofile(noted)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {"calls": calls, "deepest": deepest, "files": len(files), "classes": len(classes)}


def walks() -> Iterator[tuple[str, dict[str, int]]]:
    """The walks, each with its name."""
    current = fuser.recipe.Float8CurrentScaling()
    for name, recipe in (("bf16", None), ("FP8 current", current)):
        run = step(block(), recipe)
        yield f"{name}, first call", walk(run)
        for _ in range(4):
            run()
        yield f"{name}, warm", walk(run)
    compiled = torch.compile(block(), backend="aot_eager")
    run = step(compiled, current)
    yield "compiled, first call", walk(run)
    for _ in range(4):
        run()
    yield "compiled, warm", walk(run)
    model = Plain().bfloat16()
    fuser.convert(model, recipe=current)
    run = step(model, current)
    yield "converted, first call", walk(run)
    for _ in range(4):
        run()
    yield "converted, warm", walk(run)


def main() -> None:
    warnings.simplefilter("ignore")
    rows = dict(walks())
    if "--json" in sys.argv:
        print(json.dumps(rows))
        return
    print(f"{'':24}{'calls':>8}{'deepest':>9}{'files':>7}{'classes':>9}")
    for name, row in rows.items():
        print(
            f"{name:24}"
            + "".join(f"{n:>{w}}" for n, w in zip(row.values(), (8, 9, 7, 9), strict=True))
        )


if __name__ == "__main__":
    main()
