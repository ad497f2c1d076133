"""Decoders of public sizes in plain torch: what the command line converts and plans by name.

They are made of the modules that other libraries' models are made of, with the same names: linears
for queries, keys and values, norms before attention and before the feed-forward block or the
experts. Weights are random, if there are any: a plan needs none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fuser.errors import InputError
from fuser.plan.transformers import Transformer


class Attention(torch.nn.Module):
    """Causal attention with rotary embedding."""

    def __init__(self, sizes: Transformer, **options: Any) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.is_grouped = sizes.heads != sizes.kv_heads
        heads, kv_heads = sizes.attention_features, sizes.kv_heads * sizes.head_dim
        self.q_proj = torch.nn.Linear(sizes.hidden, heads, bias=False, **options)
        self.k_proj = torch.nn.Linear(sizes.hidden, kv_heads, bias=False, **options)
        self.v_proj = torch.nn.Linear(sizes.hidden, kv_heads, bias=False, **options)
        self.o_proj = torch.nn.Linear(heads, sizes.hidden, bias=False, **options)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        query, key, value = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for y in projected
        )
        query, key = (y * cos + _turned(y) * sin for y in (query, key))
        y = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.is_grouped
        )
        out: torch.Tensor = self.o_proj(y.transpose(-3, -2).flatten(-2))
        return out


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Rotary(torch.nn.Module):
    """Cosines and sines of the rotary embedding, for a sequence of the rows of ``x``."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        steps = torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim
        angles = (positions[:, None] / 500000.0**steps).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class FeedForward(torch.nn.Module):
    """A SwiGLU block."""

    def __init__(self, sizes: Transformer, **options: Any) -> None:
        super().__init__()
        hidden, width = sizes.hidden, sizes.intermediate
        self.gate_proj = torch.nn.Linear(hidden, width, bias=False, **options)
        self.up_proj = torch.nn.Linear(hidden, width, bias=False, **options)
        self.down_proj = torch.nn.Linear(width, hidden, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Experts(torch.nn.Module):
    """SwiGLU blocks of which each token has some, with their weights in two parameters."""

    def __init__(self, sizes: Transformer, **options: Any) -> None:
        super().__init__()
        self.experts, hidden, width = sizes.experts, sizes.hidden, sizes.intermediate
        up = torch.empty(self.experts, 2 * width, hidden, **options)
        down = torch.empty(self.experts, hidden, width, **options)
        self.gate_up_proj = torch.nn.Parameter(torch.nn.init.normal_(up, std=0.02))
        self.down_proj = torch.nn.Parameter(torch.nn.init.normal_(down, std=0.02))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in range(len(self.gate_up_proj)):
            tokens, ranks = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[tokens], self.gate_up_proj[expert]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, self.down_proj[expert])
            weighted = rows * top_k_weights[tokens, ranks, None]
            y = y.index_add(0, tokens, weighted.to(y.dtype))
        return y


class MixtureOfExperts(torch.nn.Module):
    """A router, and the experts that it chooses for each token."""

    def __init__(self, sizes: Transformer, **options: Any) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.gate = torch.nn.Linear(sizes.hidden, sizes.experts, bias=False, **options)
        self.experts = Experts(sizes, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        probs, indices = self.gate(tokens).float().softmax(-1).topk(self.top_k)
        probs = (probs / probs.sum(-1, keepdim=True)).to(x.dtype)
        y: torch.Tensor = self.experts(tokens, indices, probs)
        return y.view(x.shape)


class DecoderLayer(torch.nn.Module):
    """Attention and a feed-forward block; without heads, the block alone."""

    def __init__(self, sizes: Transformer, **options: Any) -> None:
        super().__init__()
        self.has_attention = sizes.heads > 0
        if self.has_attention:
            self.input_layernorm = torch.nn.RMSNorm(sizes.hidden, eps=1e-5, **options)
            self.self_attn = Attention(sizes, **options)
        self.post_attention_layernorm = torch.nn.RMSNorm(sizes.hidden, eps=1e-5, **options)
        block = MixtureOfExperts if sizes.experts else FeedForward
        self.mlp = block(sizes, **options)

    def forward(self, x: torch.Tensor, cos: Any = None, sin: Any = None) -> torch.Tensor:
        if self.has_attention:
            x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Loss(torch.nn.Module):
    """Cross entropy of logits, in fp32, with the number of each next token."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class Decoder(torch.nn.Module):
    """A decoder of ``sizes``: logits ``[batch, sequence, vocab]`` of token numbers, or their loss.

    With targets it returns the loss. Without a vocabulary it takes and returns hidden states.
    ``options`` are ``device`` and ``dtype`` of the parameters.
    """

    def __init__(self, sizes: Transformer, **options: Any) -> None:
        super().__init__()
        self.sizes = sizes
        if sizes.vocab:
            self.embed_tokens = torch.nn.Embedding(sizes.vocab, sizes.hidden, **options)
        if sizes.heads:
            self.rotary = Rotary(sizes)
        self.layers = torch.nn.ModuleList(
            DecoderLayer(sizes, **options) for _ in range(sizes.layers)
        )
        if sizes.vocab:
            self.norm = torch.nn.RMSNorm(sizes.hidden, eps=1e-5, **options)
            self.lm_head = torch.nn.Linear(sizes.hidden, sizes.vocab, bias=False, **options)
            self.loss = Loss()

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if self.sizes.vocab:
            x = self.embed_tokens(x)
        angles = self.rotary(x) if self.sizes.heads else ()
        for layer in self.layers:
            x = layer(x, *angles)
        if not self.sizes.vocab:
            return x
        y: torch.Tensor = self.lm_head(self.norm(x))
        return y if targets is None else self.loss(y, targets)

    def example(self, tokens: int, *, training: bool = False) -> tuple[torch.Tensor, ...]:
        """Inputs of ``tokens`` on the meta device: one sequence, or as many as fit.

        In ``training`` with the targets of the loss, if there is one. Raises InputError if there
        are more tokens than a sequence, and they are no whole sequences.
        """
        length = self.sizes.sequence
        if tokens > length and tokens % length:
            raise InputError(
                f"{tokens} tokens are no whole sequences of {length}, which is the length that "
                f"{self.sizes.name} is planned for."
                " Choose a multiple."
            )
        shape = (max(1, tokens // length), min(tokens, length))
        if self.sizes.vocab:
            numbers = torch.empty(shape, dtype=torch.int64, device="meta")
            return (numbers, numbers) if training else (numbers,)
        dtype = next(self.parameters()).dtype
        states = torch.empty(*shape, self.sizes.hidden, dtype=dtype, device="meta")
        return (states.requires_grad_(),)
