"""A Llama in the way of torchtitan: blocks with h and out, layers in a ModuleDict."""

from __future__ import annotations

from typing import Any

import torch

import fuser
from fuser.runtime.compiled_passes import Passes

VOCABULARY = 96


class FeedForward(torch.nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(dim, hidden, bias=False)
        self.w2 = torch.nn.Linear(hidden, dim, bias=False)
        self.w3 = torch.nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))
        return y


class Attention(torch.nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (
            torch.nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(
        self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            linear(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.wo(y.transpose(1, 2).reshape(batch, length, dim))
        return out


class TransformerBlock(torch.nn.Module):
    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.feed_forward = FeedForward(dim, hidden)
        self.attention_norm = torch.nn.RMSNorm(dim, eps=1e-5)
        self.ffn_norm = torch.nn.RMSNorm(dim, eps=1e-5)

    def forward(
        self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), attention_masks, positions)
        out: torch.Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class TitanLike(torch.nn.Module):
    """A Llama in the way of torchtitan: layers in a ModuleDict, blocks with h and out."""

    def __init__(self, dim: int = 64, hidden: int = 96, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.norm: torch.nn.Module | None
        self.tok_embeddings: torch.nn.Module | None
        self.lm_head: torch.nn.Module | None
        self.tok_embeddings = torch.nn.Embedding(VOCABULARY, dim)
        self.layers = torch.nn.ModuleDict(
            {str(i): TransformerBlock(dim, hidden, heads) for i in range(layers)}
        )
        self.norm = torch.nn.RMSNorm(dim, eps=1e-5)
        self.lm_head = torch.nn.Linear(dim, VOCABULARY, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: Any = None,
    ) -> torch.Tensor:
        # A stage of a pipeline has None in place of what other stages have.
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, attention_masks, positions)
        h = self.norm(h) if self.norm is not None else h
        logits: torch.Tensor = self.lm_head(h) if self.lm_head is not None else h
        return logits


def titan() -> torch.nn.Module:
    torch.manual_seed(0)
    return TitanLike()


def tokens(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (2, 12), generator=generator, device="cpu")


def counted(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What a call of a model returns, and how many pipelines it ran, also in compiled graphs."""
    count = 0
    call, run = fuser.Sequential.forward, Passes.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return call(self, *args, **kwargs)

    def in_a_graph(self: Any, given: Any, *, is_fake: bool) -> Any:
        nonlocal count
        count += not is_fake
        return run(self, given, is_fake=is_fake)

    fuser.Sequential.forward = forward  # type: ignore[method-assign]
    Passes.forward = in_a_graph  # type: ignore[method-assign]
    try:
        return model(x), count
    finally:
        fuser.Sequential.forward = call  # type: ignore[method-assign]
        Passes.forward = run  # type: ignore[method-assign]
