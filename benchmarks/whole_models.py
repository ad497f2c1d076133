"""Training steps of whole models of Llama's shapes: tokens a second, memory, and losses.

1B is Llama-3.2-1B's shape (16 layers of width 2048, hidden 8192, an embedding of 128256 words that
the last product reads too), 8B that of Llama-3-8B (32 layers of 4096, hidden 14336, a head of its
own). 4 sequences of 2048 tokens, parameters in bf16, torch's fused AdamW. What is compiled is each
layer and the loss, as trainers of large models do. Every linear of the layers is in FP8 under a
recipe, of torchao (where it is installed) and of fuser; heads are in bf16.

The variants of a model run one after the other, so that the largest has the memory of the GPU; with
--losses each also trains on the sources of Python's library, from the same weights and on the same
batches; with --seeds several times, each from other weights and on other batches. On a CPU sizes
are small, to try the script.

    python benchmarks/whole_models.py --losses 300 --out out/models.csv --chart out/models.png
"""

from __future__ import annotations

import gc
import importlib
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import charts
import llama_layers
import torch
from evidence import Sink, progress, provenance, say
from llama_layers import BF16, Model, Sizes, Variant
from model_steps import measured_steps, table
from options import new_parser, parsed
from torch import nn

import fuser
from fuser import recipe as recipes

SIZES = {
    "1B": Sizes(16, 2048, 8192, 32, 8, head=64, vocabulary=128256, is_tied=True),
    "8B": Sizes(32, 4096, 14336, 32, 8, head=128, vocabulary=128256),
}
SMALL: dict[str, Any] = {
    "vocabulary": 512,
    "layers": 2,
    "width": 128,
    "hidden": 192,
    "heads": 2,
    "groups": 1,
    "context": 64,
}


def compiled(model: Any) -> nn.Module:
    """The model, with its layers and its loss compiled, each layer by the graph of the first."""
    for layer in model.layers:
        layer.compile(dynamic=False, fullgraph=True)
    model.loss_of = torch.compile(model.loss_of, dynamic=False)
    return model  # type: ignore[no-any-return]


def torchao(model: Any) -> Any:
    """The model whose layers have torchao's linears, with a scale for each tensor."""
    float8 = importlib.import_module("torchao.float8")
    float8.convert_to_float8_training(model.layers)
    return model


def converted(model: Any) -> Any:
    """The model after fuser.convert; heads are not quantized, as those of the others."""
    fuser.convert(model, linears="all", keep=("head",))
    return model


def variant(
    *changes: Callable[[Any], nn.Module], recipe: Callable[[], Any] = lambda: None
) -> Variant:
    """The plain model, changed; and the recipe of its steps."""

    def make(sizes: Sizes, device: str) -> nn.Module:
        model: nn.Module = llama_layers.initialised(
            Model(sizes, device, is_fused=False), sizes.seed
        )
        for change in changes:
            model = change(model)
        return model

    return make, recipe


CURRENT, DELAYED = recipes.Float8CurrentScaling, recipes.DelayedScaling
VARIANTS: dict[str, Variant] = {
    "torch eager": variant(),
    "torch.compile": variant(compiled),
    "torchao float8, compiled": variant(torchao, compiled),
    "fuser bf16, compiled": variant(converted, compiled),
    "fuser current, launched": variant(converted, recipe=CURRENT),
    "fuser current, compiled": variant(converted, compiled, recipe=CURRENT),
    "fuser delayed, compiled": variant(converted, compiled, recipe=DELAYED),
}


def records_of(
    model: str, sizes: Sizes, chosen: list[str], device: str, rounds: int
) -> list[dict[str, Any]]:
    """A record of the steps of each variant of a model; ratios are to the first of them."""
    records: list[dict[str, Any]] = []
    for name in chosen:
        clean(device)
        make = {name: lambda name=name: llama_layers.on_one_batch(VARIANTS[name], sizes, device)}
        (record,) = measured_steps(make, sizes.batch * sizes.context, device, rounds)
        records.append({"model": model, **record})
        first = records[0]["tokens/s"]
        if record["tokens/s"] and first:
            records[-1]["/ eager"] = round(record["tokens/s"] / first, 3)
    return records


def losses(name: str, sizes: Sizes, device: str, count: int, seeds: int) -> dict[str, Any]:
    """The mean losses of a variant's trainings, one for each seed, and each of the last ones."""
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        clean(device)
        row = llama_layers.losses(VARIANTS[name], replace(sizes, seed=seed), device, count)
        if row.get("failure"):
            return {**row, "losses": ""}
        rows.append(row)
    means = {k: round(statistics.mean(row[k] for row in rows), 4) for k in rows[0]}
    return {**means, "losses": ", ".join(str(row["loss"]) for row in rows)}


def clean(device: str) -> None:
    """Free the models and the graphs of earlier variants."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> None:
    """Measure, print, draw, and write where asked."""
    texts = {
        "losses": "steps of a training whose losses are reported; by default none",
        "seeds": "trainings of each variant; default: 1",
    }
    parser = new_parser(__doc__ or "", texts)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="by default all of them")
    given = parsed(parser, argv, texts)
    device, where = given.device, provenance(given.device, BF16, given.commit)
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    chosen = given.variants or [
        name for name in VARIANTS if not (given.no_compile and "compile" in name)
    ]
    sink, every = Sink(given.out, where), []
    for model in given.models:
        sizes = SIZES[model] if device == "cuda" else replace(SIZES[model], **SMALL)
        with torch.device("meta"):
            count = sum(p.numel() for p in Model(sizes, "meta", is_fused=False).parameters())
        print(f"{model}: {count / 1e6:.0f} million parameters, {sizes}")
        records = records_of(model, sizes, chosen, device, given.rounds)
        say(table(records))
        for row in progress(records, "losses") if given.losses else ():
            row |= losses(row["variant"], sizes, device, given.losses, given.seeds or 1)
        if given.losses:
            say(
                "\n".join(
                    f"{r['variant']:<30} loss {r['loss']} ({r['losses'] or r['failure']})"
                    for r in records
                )
            )
        sink.write(records)
        every += records
    if given.chart:
        charts.draw_models(given.chart, [{**where, **record} for record in every])


if __name__ == "__main__":
    main()
