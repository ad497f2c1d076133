"""Steps of AdamW on quantized weights: time of the optimizer, of whole steps, and losses.

Optimizers: torch's fused AdamW on weights in fp32 alone; the same, whose weights are then copied to
the quantized ones; and ``fuser.te``'s FusedAdam with master weights, which quantizes in its own
kernel. Gradients are in bf16, and torch's optimizer gets them in fp32. Weights are those of a layer
of Llama-3-8B, or of 64 experts.

Training steps are of layers of Llama-3-8B's shape, or of experts, with weights in bf16 that every
forward quantizes, and with weights that the optimizer quantizes. Losses are of small models of the
same kind over 300 steps, for several seeds.

    python benchmarks/optimizer.py --out out/optimizer.csv
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import llama_layers
import torch
from evidence import Sink, progress, provenance, say
from options import new_parser, parsed
from pipelines import Sizes
from rebuilt import experts
from timing import Call, Failure, clock, measure

import fuser
from fuser import recipe as recipes
from fuser.demo import corpus, train_lm
from fuser.te.pytorch.optimizers import FusedAdam

BF16, F32 = torch.bfloat16, torch.float32
RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
# Of a layer of Llama-3-8B: queries, keys and values; output; up and gate; down.
DENSE = {
    "cuda": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "cpu": ((96, 64), (64, 64), (256, 64), (64, 128)),
}
EXPERTS = {"cuda": (64, 2048, 1408), "cpu": (4, 128, 128)}
OF_TOKENS = {"cuda": (8192, 6), "cpu": (64, 2)}
SMALL = llama_layers.Sizes(4, 1024, 2816, 8, 2, 512, 8)
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LAST = 20


class ThenQuantized:
    """torch's fused AdamW on weights in fp32, which are then copied to the parameters."""

    def __init__(self, parameters: Sequence[Any], *, writes: bool = True, **options: Any) -> None:
        self.parameters, self.writes = parameters, writes
        self.masters = [torch.nn.Parameter(values_of(p)) for p in parameters]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **options)

    @torch.no_grad()
    def step(self) -> None:
        """One step; gradients are cast to fp32."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
        self.optimizer.step()
        if self.writes:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.detach().copy_(master)


def values_of(parameter: Any) -> torch.Tensor:
    """The values of a parameter in fp32."""
    is_quantized = isinstance(parameter, fuser.QuantizedTensor)
    values: torch.Tensor = parameter.dequantize() if is_quantized else parameter.detach()
    return values.float().clone()


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "torch's AdamW, then quantized": functools.partial(ThenQuantized, capturable=True),
    "torch's AdamW alone": functools.partial(ThenQuantized, capturable=True, writes=False),
    "FusedAdam": functools.partial(FusedAdam, capturable=True, master_weights=True),
}


def layers_of(kind: str, device: str) -> list[torch.nn.Module]:
    options: dict[str, Any] = {"bias": False, "dtype": BF16, "device": device}
    if kind == "dense":
        return [fuser.Linear(k, m, **options) for m, k in DENSE[device]]
    count, hidden, width = EXPERTS[device]
    options["single_grouped_weight"] = kind == "experts, one weight"
    return [
        fuser.GroupedLinear(count, hidden, 2 * width, **options),
        fuser.GroupedLinear(count, width, hidden, **options),
    ]


def optimizer_rows(kind: str, name: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """The time of each optimizer, as a CUDA graph, on the weights of a layer."""
    with fuser.quantized_model_init(recipe=RECIPES[name]()):
        layers = layers_of(kind, device)
    parameters = [p for layer in layers for p in layer.parameters()]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, dtype=BF16, device=device)
    count = sum(p.numel() for p in parameters)
    steps = {way: make(parameters, **OPTIONS).step for way, make in OPTIMIZERS.items()}
    found = measure([steps], clock(device), rounds=rounds)
    rows = []
    for way, result in found.items():
        row: dict[str, Any] = {"part": "optimizer", "what": kind, "recipe": name, "variant": way}
        row["million weights"] = round(count / 1e6, 1)
        rows.append(row | timed(result, found[next(iter(found))]))
    return rows


def timed(result: Any, baseline: Any) -> dict[str, Any]:
    """Milliseconds, of the host too, and the ratio to the first variant."""
    if isinstance(result, Failure):
        times: dict[str, Any] = {"ms": "", "host ms": "", "/ first": ""}
        return {**times, "loss": "", "failure": result.reason}
    ratio = "" if isinstance(baseline, Failure) else round(result.median / baseline.median, 3)
    times = {"ms": round(result.median * 1e3, 4), "host ms": round(result.host * 1e3, 4)}
    return {**times, "/ first": ratio, "loss": "", "failure": ""}


def llama(device: str, sizes: llama_layers.Sizes, recipe: Any, *, is_quantized: bool) -> Any:
    """Layers between an embedding and a head, of weights in bf16 or quantized."""
    torch.manual_seed(0)
    with (
        fuser.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True)
        if is_quantized
        else contextlib.nullcontext()
    ):
        model = llama_layers.Model(sizes, device, is_fused=True)
    return llama_layers.initialised(model)


WEIGHTS = ("in bf16", "quantized")


def llama_step(name: str, weights: str, device: str) -> Call:
    sizes = llama_layers.SIZES[device]
    recipe = RECIPES[name]()
    model = llama(device, sizes, recipe, is_quantized=weights == "quantized")
    optimizer = FusedAdam(model.parameters(), master_weights=True, **OPTIONS)
    text = torch.randint(train_lm.VOCABULARY, (sizes.batch, sizes.context + 1), device=device)

    def step() -> None:
        with fuser.autocast(recipe=recipe):
            loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def experts_step(name: str, weights: str, device: str) -> Call:
    count, hidden, width = EXPERTS[device]
    tokens, chosen = OF_TOKENS[device]
    recipe = RECIPES[name]()
    options: dict[str, Any] = {"device": device, "dtype": BF16}
    with (
        fuser.quantized_model_init(recipe=recipe)
        if weights == "quantized"
        else contextlib.nullcontext()
    ):
        model, extras = experts(Sizes(tokens, hidden, width), count, chosen, options)
    optimizer = FusedAdam(model.parameters(), master_weights=True, **OPTIONS)
    x = torch.randn(tokens, hidden, requires_grad=True, **options)
    dy = torch.randn_like(x)

    def step() -> None:
        with fuser.autocast(recipe=recipe):
            y = model(x, *extras)
        y.backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    return step


MODELS: dict[str, Callable[[str, str, str], Call]] = {"llama": llama_step, "experts": experts_step}


def step_rows(kind: str, name: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """The time of training steps with both kinds of weights."""
    calls = {f"weights {w}": MODELS[kind](name, w, device) for w in WEIGHTS}
    for call in calls.values():
        for _ in range(4):
            call()
    found = measure([calls], clock(device, is_captured=False), rounds=rounds)
    first = found["weights in bf16"]
    head = {"part": "training step", "what": kind, "recipe": name}
    return [
        {**head, "variant": way, "million weights": "", **timed(result, first)}
        for way, result in found.items()
    ]


def loss_rows(name: str, way: str, seed: int, device: str, steps: int) -> list[dict[str, Any]]:
    """The mean loss of the last steps of a training of quantized weights."""
    sizes = SMALL if device == "cuda" else llama_layers.SIZES["cpu"]
    recipe = RECIPES[name]()
    model = llama(device, sizes, recipe, is_quantized=True)
    optimizer = OPTIMIZERS[way](list(model.parameters()), **OPTIONS)
    text = corpus.library_corpus(sizes.context)
    assert text is not None
    generator = torch.Generator().manual_seed(seed)
    last, losses = len(text.training) - sizes.context - 1, []
    for _ in range(steps):
        starts = torch.randint(last, (sizes.batch,), generator=generator)
        batch = corpus.windows(text.training, starts, sizes.context)
        with fuser.autocast(recipe=recipe):
            loss = model(*(each.to(device) for each in batch))
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        losses.append(loss.detach())
    recent = statistics.fmean(torch.stack(losses[-min(LAST, steps) :]).tolist())
    row: dict[str, Any] = {"part": f"losses, {steps} steps", "what": f"seed {seed}"}
    row |= {"recipe": name, "variant": way, "million weights": "", "ms": "", "/ first": ""}
    failure = "" if math.isfinite(recent) else "diverged"
    return [row | {"loss": round(recent, 4), "failure": failure}]


def shown(row: dict[str, Any]) -> str:
    figures = row["failure"] or f"{row['ms']:>9} ms {row['/ first']:>7} {row['loss']:>8}"
    parts = (row["part"], row["what"], row["recipe"], row["variant"])
    return "{:<20}{:<20}{:<9}{:<31}".format(*parts) + figures


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    texts = {"losses": "steps of a training whose losses are reported", "seeds": "how many"}
    parser = new_parser(__doc__, texts)
    kinds = ["dense", "experts", "experts, one weight"]
    parser.add_argument("--weights", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES)
    given = parsed(parser, argv, texts)
    device = given.device
    sink = Sink(given.out, provenance(device, BF16, given.commit))
    work: list[Callable[[], list[dict[str, Any]]]] = []
    for name in given.recipes:
        for kind in given.weights:
            if (name, kind) != ("delayed", "experts, one weight"):  # it needs a scale for each
                work.append(functools.partial(optimizer_rows, kind, name, device, given.rounds))
        for kind in given.models:
            if (name, kind) != ("delayed", "experts"):
                work.append(functools.partial(step_rows, kind, name, device, given.rounds))
        for seed in range(given.seeds or 0):
            for way in (*list(OPTIMIZERS)[:1], "FusedAdam"):
                count = given.losses or 300
                work.append(functools.partial(loss_rows, name, way, seed, device, count))
    for rows_of in progress(work, "measurements"):
        rows = rows_of()
        say("\n".join(map(shown, rows)))
        sink.write(rows)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
