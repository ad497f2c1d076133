"""Effect of inputs of activations in FP8 on training: gradients, and losses.

The demo's model (fuser/demo/train_lm.py) trains from the same weights and on the same batches with
and without ``activation_memory_budget(1, lossy_activation_inputs=True)``, under each recipe and
seed; without a recipe, plain torch does too. The error of a parameter's gradient on the first
batch is ``|g - other| / |other|``, with 2-norms; the table has the median of all parameters and
the largest. "Rounding" compares gradients with and without, also with the weights that the run
without has trained; "recipe" compares the latter, before training, with plain torch.

    python benchmarks/lossy_inputs.py --out out/lossy_inputs.csv
    python benchmarks/lossy_inputs.py --recipes none --seeds 1 --steps 20
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from evidence import Sink, provenance, say

import fuser
from fuser.demo import train_lm
from fuser.demo.corpus import Corpus, library_corpus

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from compare_recipes import TAIL, AllRuns

RECIPES = ("none", "current", "block")
WAYS: dict[str, contextlib.AbstractContextManager[None]] = {
    "exact": fuser.activation_memory_budget(1),
    "rounded": fuser.activation_memory_budget(1, lossy_activation_inputs=True),
    "plain torch": contextlib.nullcontext(),
}


def gradients_of(
    model: train_lm.LanguageModel, corpus: Corpus, options: train_lm.Options
) -> list[torch.Tensor]:
    """The gradients of the parameters on the first batch."""
    _, batch = next(train_lm.training_batches(corpus.training, options))
    with options.autocast():
        loss = train_lm.next_byte_loss(model, batch)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def errors(found: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> dict[str, str]:
    """The median and the largest relative error, in percent."""
    pairs = zip(found, other, strict=True)
    relative = [100 * float((a - b).norm() / b.norm()) for a, b in pairs]
    return {"median %": f"{statistics.median(relative):.2f}", "largest %": f"{max(relative):.2f}"}


def measured(corpus: Corpus, options: train_lm.Options, progress: AllRuns) -> dict[str, object]:
    """The row of one recipe and seed."""
    row: dict[str, object] = {"recipe": options.recipe, "seed": options.seed}
    row |= {"steps": options.steps, "layers": options.layers, "width": options.width}
    gradients, trained, losses = {}, {}, {}
    for way, budget in WAYS.items():
        is_plain = way == "plain torch"
        own = replace(options, recipe="none") if is_plain else options
        model = train_lm.make_models(own)[is_plain]
        with budget:
            gradients[way] = gradients_of(model, corpus, own)
        if is_plain and options.recipe != "none":
            continue
        progress.start(f"{options.recipe}, seed {options.seed}, {way}")
        with budget:
            run = train_lm.train(way, model, corpus, own, progress)
        last = run.losses[-math.ceil(TAIL * len(run.losses)) :]
        losses[f"training loss, {way}"] = f"{statistics.fmean(last):.4f}"
        losses[f"validation loss, {way}"] = f"{run.validation[len(run.losses)]:.4f}"
        if way == "exact":
            for name, again in WAYS.items():
                with again:
                    trained[name] = gradients_of(model, corpus, own)
    for name, (found, other) in {
        "rounding": (gradients["rounded"], gradients["exact"]),
        "rounding, trained": (trained["rounded"], trained["exact"]),
        "recipe": (gradients["exact"], gradients["plain torch"]),
    }.items():
        row |= {f"{name}, {column}": value for column, value in errors(found, other).items()}
    empty = {f"{kind} loss, plain torch": "" for kind in ("training", "validation")}
    return row | empty | losses


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write where asked; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=RECIPES, choices=train_lm.RECIPES)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=150, help="training steps of a run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--commit", help="the commit, where git cannot tell")
    parser.add_argument("--out", type=Path, metavar="CSV", help="a file for the rows")
    given = parser.parse_args(argv)
    options = train_lm.Options(steps=given.steps, device=given.device, dtype="bfloat16")
    if problem := train_lm.problem_with(options):
        parser.error(problem)
    corpus = library_corpus(options.context)
    if corpus is None:
        return 1
    corpus = corpus.to(options.device)
    sink = Sink(given.out, provenance(options.device, options.compute_dtype, given.commit))
    runs = sum(2 + (recipe == "none") for recipe in given.recipes) * given.seeds
    progress = AllRuns(runs, options.steps)
    for recipe in given.recipes:
        for seed in range(given.seeds):
            row = measured(corpus, replace(options, recipe=recipe, seed=seed), progress)
            say("; ".join(f"{name} {value}" for name, value in row.items()))
            sink.write([row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
