"""Training steps of a language model of 437 million parameters, in tokens a second.

The model of fuser/demo/train_lm.py with 32 layers of width 1024, sequences of 1024 bytes, 8 in a
batch, parameters in fp32, torch's autocast in bf16, and torch's fused AdamW. Variants: plain torch,
eager and compiled whole, with CUDA graphs or without; feed-forward blocks in fuser, with attention
in eager torch or compiled, and the model compiled whole; and norms, projections and residuals of
attention in fuser too. They run alternately (timing.py). On a CPU sizes are small, to try the
script.

    python benchmarks/language_model.py --out out/language_model.csv
    python benchmarks/language_model.py --layers 8 --only "torch.compile|fuser compiled.*"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from evidence import Sink, provenance, say
from model_steps import measured_steps, table
from options import new_parser, parsed
from timing import Call
from torch import nn
from torch.nn import functional as F

import fuser
from fuser.demo import train_lm

SIZES = {"cuda": (32, 1024, 1024, 8), "cpu": (2, 64, 32, 2)}
NAMES = ("layers", "width", "context", "batch_size")


class FusedAttention(nn.Module):
    """Attention whose norm and projections are two pipelines, with the residual in the second."""

    def __init__(self, width: int, heads: int, device: str) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = fuser.Sequential(
            fuser.RMSNorm(width, device=device),
            fuser.Linear(width, 3 * width, bias=False, device=device),
        )
        self.out = fuser.Sequential(
            fuser.Linear(width, width, bias=False, device=device), fuser.AddExtraInput()
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        query, key = train_lm.rotated(query, cos, sin), train_lm.rotated(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2), x)


def plain(options: train_lm.Options) -> nn.Module:
    return train_lm.LanguageModel(options, train_lm.PlainFeedForward)


def compiled(options: train_lm.Options) -> nn.Module:
    model = plain(options)
    model.compile(dynamic=False)
    return model


def compiled_with_graphs(options: train_lm.Options) -> nn.Module:
    model = plain(options)
    model.compile(dynamic=False, mode="reduce-overhead")
    return model


def fused_compiled(options: train_lm.Options) -> nn.Module:
    model = fused(options)
    model.compile(dynamic=False, fullgraph=True)
    return model


def fused_compiled_with_graphs(options: train_lm.Options) -> nn.Module:
    model = fused(options)
    model.compile(dynamic=False, fullgraph=True, mode="reduce-overhead")
    return model


def fused(options: train_lm.Options) -> train_lm.LanguageModel:
    return train_lm.LanguageModel(options, train_lm.fused_feed_forward)


def fused_beside_compiled(options: train_lm.Options) -> nn.Module:
    model = fused(options)
    for attention in model.attention:
        attention.compile(dynamic=False)
    return model


def fused_everywhere(options: train_lm.Options) -> nn.Module:
    model = fused(options)
    for place in range(options.layers):
        model.attention[place] = FusedAttention(options.width, options.heads, options.device)
    return model


Make = Callable[[train_lm.Options], nn.Module]

VARIANTS: dict[str, tuple[Make, str]] = {
    "torch eager": (plain, "none"),
    "torch.compile": (compiled, "none"),
    "torch.compile, graphs": (compiled_with_graphs, "none"),
    "fuser": (fused, "none"),
    "fuser, attention compiled": (fused_beside_compiled, "none"),
    "the same, current": (fused_beside_compiled, "current"),
    "fuser compiled": (fused_compiled, "none"),
    "fuser compiled, current": (fused_compiled, "current"),
    "fuser compiled, delayed": (fused_compiled, "delayed"),
    "fuser compiled, 128-block": (fused_compiled, "block"),
    "fuser compiled, graphs": (fused_compiled_with_graphs, "none"),
    "the same, current, graphs": (fused_compiled_with_graphs, "current"),
    "the same, 128-block, graphs": (fused_compiled_with_graphs, "block"),
    "fuser everywhere": (fused_everywhere, "none"),
    "fuser everywhere, current": (fused_everywhere, "current"),
    "fuser everywhere, 128-block": (fused_everywhere, "block"),
}

COMPILED = (
    *(compiled, compiled_with_graphs, fused_beside_compiled),
    *(fused_compiled, fused_compiled_with_graphs),
)


def step_of(make: Make, options: train_lm.Options) -> Call:
    """A training step of a new model on one batch."""
    torch.manual_seed(0)
    model = make(options)
    is_fused = options.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_fused)
    shape = (options.batch_size, options.context + 1)
    text = torch.randint(train_lm.VOCABULARY, shape, device=options.device)

    def step() -> None:
        with options.autocast():
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measured(chosen: Sequence[str], options: train_lm.Options, rounds: int) -> list[dict[str, Any]]:
    """A record for each variant."""

    def maker(name: str) -> Callable[[], Call]:
        make, recipe = VARIANTS[name]
        return lambda: step_of(make, replace(options, recipe=recipe))

    tokens = options.batch_size * options.context
    makers = {name: maker(name) for name in chosen}
    sizes = {size: getattr(options, size) for size in NAMES}
    return [sizes | row for row in measured_steps(makers, tokens, options.device, rounds)]


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write where asked."""
    defaults = {device: dict(zip(NAMES, sizes, strict=True)) for device, sizes in SIZES.items()}
    texts = {
        name: f"default: {defaults['cuda'][name]}, on a CPU {defaults['cpu'][name]}"
        for name in NAMES
    }
    parser = new_parser(__doc__, texts)
    parser.add_argument("--only", metavar="REGEX", help="the variants whose names match, whole")
    given = parsed(parser, argv, texts)
    if given.chart:
        parser.error("language_model.py draws no chart.")
    sizes: dict[str, Any] = {
        name: getattr(given, name) or defaults[given.device][name] for name in NAMES
    }
    options = train_lm.Options(
        **sizes, heads=sizes["width"] // 64, device=given.device, dtype="bfloat16"
    )
    count = sum(p.numel() for p in plain(replace(options, device="meta")).parameters())
    where = provenance(given.device, torch.bfloat16, given.commit)
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    print(f"{count / 1e6:.0f} million parameters, {sizes}")
    chosen = [name for name in VARIANTS if not (given.no_compile and VARIANTS[name][0] in COMPILED)]
    chosen = [name for name in chosen if re.fullmatch(given.only or ".*", name)]
    if not chosen:
        parser.error(f"--only is {given.only}; there are {'; '.join(VARIANTS)}.")
    records = measured(chosen, options, given.rounds)
    say(table(records))
    Sink(given.out, where).write(records)


if __name__ == "__main__":
    main()
