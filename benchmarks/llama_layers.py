"""Training steps of eight layers of Llama-3-8B's shape: tokens a second, memory, and losses.

Width 4096, hidden 14336, 32 heads and 8 of keys and values, 4 sequences of 2048 bytes, parameters
in bf16, torch's fused AdamW. Variants: plain torch, eager and compiled; torchao's float8 training,
compiled (where torchao is installed); the plain layers after fuser.convert, launched and compiled;
fuser's own layers compiled whole. The last two without a recipe and under FP8 recipes.
Every linear of the layers is in FP8 then, of fuser and of torchao. Steps run alternately
(timing.py); with --losses each variant also trains alone on the sources of Python's library, from
the same weights and on the same batches. On a CPU sizes are small, to try the script.

    python benchmarks/llama_layers.py --losses 300 --out out/llama_layers.csv
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from evidence import Sink, progress, provenance, say
from model_steps import measured_steps, table
from options import new_parser, parsed
from timing import Call, Failure
from torch import nn
from torch.nn import functional as F

import fuser
from fuser import recipe as recipes
from fuser.demo import corpus, train_lm

BF16 = torch.bfloat16
LAST = 20
"""The number of last steps whose mean loss is reported."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its batches."""

    layers: int = 8
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    groups: int = 8
    context: int = 2048
    batch: int = 4
    head: int = 128
    """Columns of one head of attention."""
    vocabulary: int = train_lm.VOCABULARY
    is_tied: bool = False
    """Whether the last product reads the weight of the embedding."""
    seed: int = 0
    """Of the first weights, and of the batches of :func:`losses`."""


SIZES = {"cuda": Sizes(), "cpu": Sizes(2, 256, 384, 2, 1, 64, 2)}


class PlainAttention(nn.Module):
    """An attention as published models have it: three projections read one tensor."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        super().__init__()
        self.head = sizes.head
        options: Any = {"bias": False, "device": device, "dtype": BF16}
        self.q_proj = nn.Linear(sizes.width, sizes.heads * sizes.head, **options)
        self.k_proj = nn.Linear(sizes.width, sizes.groups * sizes.head, **options)
        self.v_proj = nn.Linear(sizes.width, sizes.groups * sizes.head, **options)
        self.o_proj = nn.Linear(sizes.heads * sizes.head, sizes.width, **options)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        query = self.q_proj(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
        key = self.k_proj(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
        value = self.v_proj(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
        return self.o_proj(attention(query, key, value, cos, sin))  # type: ignore[no-any-return]


class PlainFeedForward(nn.Module):
    """A feed-forward block as published models have it: three projections."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        super().__init__()
        options: Any = {"bias": False, "device": device, "dtype": BF16}
        self.gate_proj = nn.Linear(sizes.width, sizes.hidden, **options)
        self.up_proj = nn.Linear(sizes.width, sizes.hidden, **options)
        self.down_proj = nn.Linear(sizes.hidden, sizes.width, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class PlainLayer(nn.Module):
    """Attention and a feed-forward block, each after a norm and with a residual."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        super().__init__()
        options: Any = {"eps": 1e-5, "device": device, "dtype": BF16}
        self.input_norm = nn.RMSNorm(sizes.width, **options)
        self.attention = PlainAttention(sizes, device)
        self.post_norm = nn.RMSNorm(sizes.width, **options)
        self.feed_forward = PlainFeedForward(sizes, device)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin)
        return x + self.feed_forward(self.post_norm(x))  # type: ignore[no-any-return]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """The mixed values of all heads, from ``[batch, heads, tokens, head]``."""
    query, key = train_lm.rotated(query, cos, sin), train_lm.rotated(key, cos, sin)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(-2)


def fused_parts(sizes: Sizes, width: int, device: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Projections, last projection and feed-forward block as pipelines."""
    options: Any = {"device": device, "dtype": BF16}
    linear: Any = {"bias": False, **options}
    residual = fuser.MakeExtraOutput()
    residual.set_extra_output_channel(0, "residual", output_to_caller=False)
    add = fuser.AddExtraInput().set_extra_input_channel(0, "residual")
    return (
        fuser.Sequential(
            fuser.RMSNorm(sizes.width, eps=1e-5, **options),
            fuser.Linear(sizes.width, width, **linear),
        ),
        fuser.Sequential(fuser.Linear(sizes.width, sizes.width, **linear), fuser.AddExtraInput()),
        fuser.Sequential(
            residual,
            fuser.RMSNorm(sizes.width, eps=1e-5, **options),
            fuser.Linear(sizes.width, 2 * sizes.hidden, **linear),
            fuser.SwiGLU(),
            fuser.Linear(sizes.hidden, sizes.width, **linear),
            add,
        ),
    )


class FusedLayer(nn.Module):
    """The same of pipelines, with one projection for queries, keys and values."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        super().__init__()
        self.heads, self.groups, self.head = sizes.heads, sizes.groups, sizes.head
        width = (sizes.heads + 2 * sizes.groups) * sizes.head
        self.qkv, self.out, self.feed_forward = fused_parts(sizes, width, device)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
        query, key, value = split.split((self.heads, self.groups, self.groups), 1)
        mixed = attention(query, key, value, cos, sin)
        return self.feed_forward(self.out(mixed, x))  # type: ignore[no-any-return]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets)


class Model(nn.Module):
    """The layers between an embedding of bytes and a head."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: Sizes, device: str, *, is_fused: bool) -> None:
        super().__init__()
        self.loss_of = cross_entropy
        options: Any = {"device": device, "dtype": BF16}
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width, **options)
        layer = FusedLayer if is_fused else PlainLayer
        self.layers = nn.ModuleList(layer(sizes, device) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5, **options)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False, **options)
        if sizes.is_tied:
            self.head.weight = self.embedding.weight
        frequencies = 5e5 ** (-torch.arange(0, sizes.head, 2, device=device) / sizes.head)
        angles = torch.outer(torch.arange(sizes.context, device=device), frequencies)
        self.register_buffer("cos", angles.cos().to(BF16), persistent=False)
        self.register_buffer("sin", angles.sin().to(BF16), persistent=False)

    def forward(self, text: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.loss_of(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def initialised(model: Model, seed: int = 0) -> Model:
    """The same weights for all plain variants; those of fuser's own layers are drawn alike."""
    generator = torch.Generator(model.cos.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model


def plain(sizes: Sizes, device: str) -> nn.Module:
    return initialised(Model(sizes, device, is_fused=False), sizes.seed)


def compiled(sizes: Sizes, device: str) -> nn.Module:
    model = plain(sizes, device)
    model.compile(dynamic=False)
    return model


def torchao(recipe: str | None) -> Callable[[Sizes, str], nn.Module]:
    """torchao's float8 training of every linear of the layers, compiled."""

    def make(sizes: Sizes, device: str) -> nn.Module:
        float8 = importlib.import_module("torchao.float8")
        model = initialised(Model(sizes, device, is_fused=False), sizes.seed)
        config = None if recipe is None else float8.Float8LinearConfig.from_recipe_name(recipe)
        float8.convert_to_float8_training(model.layers, config=config)
        model.compile(dynamic=False)
        return model

    return make


def converted(sizes: Sizes, device: str) -> nn.Module:
    model = plain(sizes, device)
    fuser.convert(model, linears="all", keep=("head",))  # the head of the others is not quantized
    return model


def converted_compiled(sizes: Sizes, device: str) -> nn.Module:
    model = converted(sizes, device)
    model.compile(dynamic=False, fullgraph=True)
    return model


def fused(sizes: Sizes, device: str) -> nn.Module:
    model = initialised(Model(sizes, device, is_fused=True), sizes.seed)
    model.compile(dynamic=False, fullgraph=True)
    return model


Variant = tuple[Callable[[Sizes, str], nn.Module], Callable[[], Any]]
VARIANTS: dict[str, Variant] = {
    "torch eager": (plain, lambda: None),
    "torch.compile": (compiled, lambda: None),
    "torchao float8 compiled": (torchao(None), lambda: None),
    "torchao rowwise compiled": (torchao("rowwise"), lambda: None),
    "converted": (converted, lambda: None),
    "converted, current": (converted, recipes.Float8CurrentScaling),
    "converted, delayed": (converted, recipes.DelayedScaling),
    "converted compiled": (converted_compiled, lambda: None),
    "converted compiled, current": (converted_compiled, recipes.Float8CurrentScaling),
    "converted compiled, delayed": (converted_compiled, recipes.DelayedScaling),
    "fuser compiled": (fused, lambda: None),
    "fuser compiled, current": (fused, recipes.Float8CurrentScaling),
    "fuser compiled, delayed": (fused, recipes.DelayedScaling),
    "fuser compiled, 128-block": (fused, recipes.Float8BlockScaling),
}
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def training(variant: Variant, sizes: Sizes, device: str) -> Step:
    """A step of a new model, which returns the loss."""
    make, recipe = variant
    model = make(sizes, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    given = recipe()

    def step(text: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with contextlib.nullcontext() if given is None else fuser.autocast(recipe=given):
            loss = model(text, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    return step


def on_one_batch(variant: Variant, sizes: Sizes, device: str) -> Call:
    """A step on the same batch at each call."""
    step = training(variant, sizes, device)
    text = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context + 1), device=device)

    def call() -> None:
        step(text[:, :-1], text[:, 1:])

    return call


def losses(variant: Variant, sizes: Sizes, device: str, count: int) -> dict[str, Any]:
    """The mean loss of the first and of the last steps of a training."""
    text = corpus.library_corpus(sizes.context)
    assert text is not None
    generator = torch.Generator().manual_seed(1 + sizes.seed)
    try:
        step = training(variant, sizes, device)
        found = []
        for _ in range(count):
            last = len(text.training) - sizes.context - 1
            starts = torch.randint(last, (sizes.batch,), generator=generator)
            batch = corpus.windows(text.training, starts, sizes.context)
            found.append(step(*(each.to(device) for each in batch)))
        each = torch.stack(found).tolist()
    except Exception as error:  # a variant that fails must not stop the others
        return {"loss": "", "failure": Failure.of(error).reason}
    recent = each[-LAST:]
    return {"first loss": round(each[0], 4), "loss": round(sum(recent) / len(recent), 4)}


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    texts = {"losses": "steps of a training whose losses are reported; by default none"}
    parser = new_parser(__doc__, texts)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="by default all of them")
    given = parsed(parser, argv, texts)
    if given.chart:
        parser.error("llama_layers.py draws no chart.")
    device, sizes = given.device, SIZES[given.device]
    where = provenance(device, BF16, given.commit)
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    with torch.device("meta"):
        count = sum(p.numel() for p in Model(sizes, "meta", is_fused=False).parameters())
    print(f"{count / 1e6:.0f} million parameters, {sizes}")
    chosen = list(given.variants or VARIANTS)
    if given.no_compile:
        chosen = [name for name in chosen if VARIANTS[name][0] is plain]
    records = steps_of(chosen, sizes, device, given.rounds)
    say(table(records))
    if given.losses:
        for row in progress(records, "losses"):
            gc.collect()
            torch._dynamo.reset()
            row |= losses(VARIANTS[row["variant"]], sizes, device, given.losses)
        say("\n".join(f"{r['variant']:<30} loss {r['loss']} {r['failure']}" for r in records))
    Sink(given.out, where).write(records)


def steps_of(chosen: Sequence[str], sizes: Sizes, device: str, rounds: int) -> list[dict[str, Any]]:
    """A record of the steps of each variant."""

    def maker(name: str) -> Callable[[], Call]:
        return lambda: on_one_batch(VARIANTS[name], sizes, device)

    makers = {name: maker(name) for name in chosen}
    return measured_steps(makers, sizes.batch * sizes.context, device, rounds)


if __name__ == "__main__":
    main()
