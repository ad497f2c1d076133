"""Train the demo's model under every recipe and backward override, and compare with bf16.

Every run starts from the same weights and reads the same batches as a run without
a recipe. A run of plain torch modules computes the same function and rounds at
other places: it shows the difference between two runs that rounding alone makes.

    python examples/compare_recipes.py
    python examples/compare_recipes.py --recipes mxfp8 nvfp4 --steps 400
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import torch
from evidence import environment
from memory_meter import METHODS, measure

import fuser
from fuser.demo.corpus import Corpus, library_corpus
from fuser.demo.progress import make_bar
from fuser.demo.train_lm import (
    DTYPES,
    OVERRIDES,
    LanguageModel,
    Options,
    Run,
    add_training_options,
    checked,
    make_models,
    next_byte_loss,
    smoothed,
    smoothing_span,
    train,
    training_batches,
    write_losses,
)

# Fewer steps than the demo, because there are fifteen runs; they are compared with bf16.
DEFAULTS = Options(steps=150, dtype="bfloat16")
# The final training loss is the mean over this last part of the run.
TAIL = 0.1
# A point of a curve is the mean over a tenth of the run around it.
SMOOTHING_PARTS = 20
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Options that the results depend on, with dtype and machine.
SIZES = (
    "steps",
    "layers",
    "width",
    "heads",
    "context",
    "batch_size",
    "learning_rate",
    "seed",
)
COLORS = {
    "current": "tab:blue",
    "delayed": "tab:cyan",
    "block": "tab:green",
    "mxfp8": "tab:orange",
    "nvfp4": "tab:red",
}
LINES = {"none": "-", "high_precision": "--", "dequantized": ":"}


@dataclass(frozen=True)
class Variant:
    """One way to train: a recipe and an override, or neither, with fuser or in plain torch."""

    recipe: str = "none"
    override: str = "none"
    is_plain_torch: bool = False

    def columns(self, dtype: str) -> tuple[str, str]:
        """Recipe and override as text, or the name of a run without a recipe."""
        if self.recipe != "none":
            return self.recipe, self.override
        base = SHORT_NAMES[dtype]
        return (f"{base}, plain torch" if self.is_plain_torch else base), ""

    def options(self, options: Options) -> Options:
        """``options`` for this run."""
        return replace(options, recipe=self.recipe, override=self.override)

    def model(self, options: Options) -> LanguageModel:
        """The model with its initial weights, which are the same for every variant."""
        fused, plain = make_models(options)
        return plain if self.is_plain_torch else fused


@dataclass(frozen=True)
class StepMemory:
    """Bytes held between forward and backward, and bytes alive at the peak of both.

    Both are without the memory before the step, which is the same for all
    variants: float32 parameters and the optimizer's state.
    """

    held: int
    peak: int


@dataclass(frozen=True)
class Result:
    """The result of one run: losses in nats per byte, and the memory of a step in bytes."""

    variant: Variant
    run: Run
    memory: StepMemory

    @property
    def training_loss(self) -> float:
        """The mean training loss over the end of the run."""
        return statistics.fmean(self.run.losses[-math.ceil(TAIL * len(self.run.losses)) :])

    @property
    def validation_loss(self) -> float:
        """The validation loss after the last step."""
        return self.run.validation[len(self.run.losses)]


def variants(recipes: Sequence[str]) -> Iterator[Variant]:
    """No recipe, plain torch, and each recipe with every override that it accepts."""
    yield Variant()
    yield Variant(is_plain_torch=True)
    for name in recipes:
        recipe = fuser.recipe.NAMES[name]
        accepted = OVERRIDES if recipe.accepts_backward_override else OVERRIDES[:1]
        yield from (Variant(name, override) for override in accepted)


def step_memory(variant: Variant, corpus: Corpus, options: Options) -> StepMemory:
    """The memory of forward and backward on one batch, with the initial weights."""
    model, options = variant.model(options), variant.options(options)
    _, batch = next(training_batches(corpus.training, options))
    losses: list[torch.Tensor] = []

    def forward() -> None:
        with options.autocast():
            losses.append(next_byte_loss(model, batch))

    def backward() -> None:
        losses.pop().backward()

    # The first step makes plans and recipes' state.
    forward()
    backward()
    model.zero_grad()
    usages = measure({"forward": forward, "backward": backward}, options.device)
    return StepMemory(usages["forward"].end, max(usage.peak for usage in usages.values()))


class AllRuns:
    """A progress bar over the steps of all runs; without a terminal, a line for each run."""

    def __init__(self, runs: int, steps: int) -> None:
        self.bar = make_bar(runs * steps, unit="step")
        self.runs, self.done, self.name = runs, 0, ""
        self.started = time.perf_counter()
        self.loss = math.nan

    def start(self, name: str) -> None:
        """Start the next run."""
        self.name = name
        if self.bar is not None:
            self.bar.set_description(name)

    def advanced(self, done: float) -> None:
        """Count one more step."""
        if self.bar is not None:
            self.bar.update()

    def reported(self, step: int, loss: float, rate: float) -> None:
        """Show loss and speed beside the bar."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s")

    def validated(self, step: int, loss: float) -> None:
        """Keep the validation loss for the line at the end of the run."""
        self.loss = loss

    def close(self) -> None:
        """End a run; after the last run, close the bar."""
        self.done += 1
        seconds = time.perf_counter() - self.started
        line = f"{self.done:>2}/{self.runs} {self.name}: validation loss {self.loss:.4f}"
        if self.bar is None:
            left = seconds / self.done * (self.runs - self.done)
            print(f"{line}, {seconds:.0f} s so far, about {left:.0f} s left", flush=True)
            return
        self.bar.write(line, file=sys.stdout)
        if self.done == self.runs:
            self.bar.close()


# -- results ------------------------------------------------------------------


def records(results: Sequence[Result], dtype: str) -> list[dict[str, object]]:
    """A row for each run, with differences to the first run, which has no recipe."""
    reference, base = results[0], SHORT_NAMES[dtype]
    rows: list[dict[str, object]] = []
    for result in results:
        recipe, override = result.variant.columns(dtype)
        training, validation = result.training_loss, result.validation_loss
        rows.append(
            {
                "recipe": recipe,
                "override": override,
                "training loss": f"{training:.4f}",
                f"training - {base}": f"{training - reference.training_loss:+.4f}",
                "validation loss": f"{validation:.4f}",
                f"validation - {base}": f"{validation - reference.validation_loss:+.4f}",
                "MB held": f"{result.memory.held / 1e6:.1f}",
                "MB at peak": f"{result.memory.peak / 1e6:.1f}",
                "tokens/s": round(result.run.tokens_per_second),
            }
        )
    return rows


def table(rows: Sequence[dict[str, object]]) -> str:
    """The rows as a Markdown table with aligned columns."""
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rules = ["-" * width if i < 2 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = []
    for line in (cells[0], rules, *cells[1:]):
        padded = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def legend(options: Options) -> str:
    """An explanation of the columns."""
    count = math.ceil(TAIL * options.steps)
    base = SHORT_NAMES[options.dtype]
    return (
        f"Losses are in nats a byte; the training loss is the mean of the last {count} of "
        f"{options.steps} steps. Every run has the weights and the batches of {base}. MB are "
        "held between forward and backward, and alive at the peak of both, beyond parameters and "
        f"optimizer state (counted: {METHODS[options.device]}). Tokens a second are "
        "those of a run's fastest twentieth."
    )


def write_results(
    out: Path, results: Sequence[Result], options: Options, where: dict[str, object]
) -> None:
    """Write ``recipes.csv``, ``recipes.md``, ``recipes_losses.csv`` and, if possible, a picture."""
    rows = records(results, options.dtype)
    sizes = {name: getattr(options, name) for name in SIZES}
    with (out / "recipes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*where, *sizes, *rows[0]])
        writer.writeheader()
        writer.writerows({**where, **sizes, **row} for row in rows)
    told = ", ".join(f"{name} {value}" for name, value in {**where, **sizes}.items())
    (out / "recipes.md").write_text(
        f"# The demo's model under every recipe\n\n`examples/compare_recipes.py`: {told}.\n\n"
        f"{table(rows)}\n\n{legend(options)}\n\n![loss curves](recipes.png)\n"
    )
    write_losses(out / "recipes_losses.csv", [result.run for result in results])
    written = ["recipes.csv", "recipes.md", "recipes_losses.csv"]
    try:
        draw(out / "recipes.png", results, options.dtype)
        written.append("recipes.png")
    except ImportError:
        print("\nNo recipes.png: drawing it needs matplotlib; pip install matplotlib.")
    print(f"\nIn {out}: {', '.join(written)}")


def draw(path: Path, results: Sequence[Result], dtype: str) -> None:
    """Draw the training losses of all runs and, below, a panel per recipe: the difference to bf16.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    base = SHORT_NAMES[dtype]
    recipes = list(dict.fromkeys(result.variant.recipe for result in results[2:]))
    figure = Figure(figsize=(10, 7), layout="constrained")
    parts: Any = figure.subfigures(2, height_ratios=[3, 2])
    above, below = parts
    losses = above.subplots()
    draw_losses(losses, results)
    panels = below.subplots(1, len(recipes), sharex=True, sharey=True, squeeze=False)[0]
    for panel, recipe in zip(panels, recipes, strict=True):
        draw_differences(panel, recipe, results)
    panels[0].set_ylabel(f"loss minus {base}'s")
    below.supxlabel("step", fontsize=10)
    entries: list[tuple[str, dict[str, Any]]] = [
        (base, {"color": "black", "lw": 2.5}),
        (f"{base}, plain torch", {"color": "gray"}),
        *((recipe, {"color": COLORS[recipe]}) for recipe in recipes),
        *((f"override {name}", {"color": "black", "ls": ls}) for name, ls in LINES.items()),
    ]
    losses.legend(
        handles=[Line2D([], [], label=label, **look) for label, look in entries],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
    )
    for panel in (losses, *panels):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def draw_losses(panel: Any, results: Sequence[Result]) -> None:
    """Draw the losses of all runs. They overlap, so a second panel enlarges the end."""
    from matplotlib.ticker import MaxNLocator

    count = len(results[0].run.losses)
    enlarged = panel.inset_axes([0.5, 0.4, 0.48, 0.52])
    last: list[float] = []
    for result in results:
        curve = smoothed(result.run.losses, smoothing_span(result.run.losses, SMOOTHING_PARTS))
        for axes in (panel, enlarged):
            axes.plot(range(1, count + 1), curve, **look(result.variant))
        last += curve[-math.ceil(TAIL * count) :]
    margin = 0.05 * (max(last) - min(last))
    enlarged.set_xlim(count - math.ceil(TAIL * count), count)
    enlarged.set_ylim(min(last) - margin, max(last) + margin)
    enlarged.set_title(f"the last {math.ceil(TAIL * count)} steps", fontsize=9)
    enlarged.tick_params(labelsize=8)
    enlarged.grid(alpha=0.25)
    enlarged.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(MaxNLocator(8))
    panel.yaxis.set_major_formatter("{x:.1f}")
    panel.minorticks_off()
    panel.set_ylabel("training loss (nats/byte)")
    panel.set_title("The demo's model from the same weights, on the same batches", fontsize=11)


def draw_differences(panel: Any, recipe: str, results: Sequence[Result]) -> None:
    """Draw the differences of a recipe's runs, and of plain torch, to the first run."""
    reference, plain, *quantized = results
    panel.axhline(0, color="black", lw=1)
    for result in (plain, *(result for result in quantized if result.variant.recipe == recipe)):
        pairs = zip(result.run.losses, reference.run.losses, strict=True)
        differences = [ours - theirs for ours, theirs in pairs]
        difference = smoothed(differences, smoothing_span(differences, SMOOTHING_PARTS))
        panel.plot(range(1, len(difference) + 1), difference, **look(result.variant))
    panel.set_title(recipe, color=COLORS[recipe], fontsize=10)


def look(variant: Variant) -> dict[str, Any]:
    """The line style of a run: a colour for the recipe, a dash style for the override."""
    if variant.is_plain_torch:
        return {"color": "gray", "lw": 1}
    if variant.recipe == "none":
        return {"color": "black", "lw": 2.5}
    return {"color": COLORS[variant.recipe], "ls": LINES[variant.override], "lw": 1.4}


# -- command line -------------------------------------------------------------


def parse(argv: list[str] | None) -> tuple[Options, list[str]]:
    """The options of the training runs, and the recipes; argparse refuses bad options."""
    names = list(COLORS)
    parser = argparse.ArgumentParser(
        description="Train the demo's model under every recipe and backward override.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=DEFAULTS.steps, help="training steps of a run")
    add_training_options(parser, DEFAULTS)
    parser.add_argument("--recipes", nargs="+", choices=names, default=names, help="which of them")
    given = vars(parser.parse_args(argv))
    recipes = list(dict.fromkeys(given.pop("recipes")))
    variable = fuser.recipe.BACKWARD_OVERRIDE_VARIABLE
    if os.environ.get(variable):
        parser.error(
            f"{variable} is {os.environ[variable]}, which would put that override into the runs "
            "without one; unset it."
        )
    return checked(parser, replace(DEFAULTS, **given)), recipes


def main(argv: list[str] | None = None) -> int:
    """Measure a step of each run, train them all, compare; returns the exit status."""
    options, recipes = parse(argv)
    corpus = library_corpus(options.context)
    if corpus is None:
        return 1
    corpus = corpus.to(options.device)
    runs = list(variants(recipes))
    print(f"{len(runs)} runs of {options.steps} steps; first the memory of one step of each.")
    memory = [step_memory(variant, corpus, options) for variant in runs]
    progress = AllRuns(len(runs), options.steps)
    results = []
    for variant, usage in zip(runs, memory, strict=True):
        name = " ".join(variant.columns(options.dtype)).rstrip()
        progress.start(name)
        run = train(name, variant.model(options), corpus, variant.options(options), progress)
        results.append(Result(variant, run, usage))

    print(f"\n{table(records(results, options.dtype))}\n\n{legend(options)}")
    where = environment(options.device, DTYPES[options.dtype])
    write_results(options.out, results, options, where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
