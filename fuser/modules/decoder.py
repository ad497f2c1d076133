"""Decoders of public sizes, as a user of fuser writes them: what the command line plans by name.

Every layer is two pipelines around attention: norm and linear before it, linear and residual after
it, and a feed-forward block or a mixture of experts with its residual. Weights are random.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fuser.basic_ops import (
    AddExtraInput,
    GroupedLinear,
    MakeExtraOutput,
    MoeCombine,
    MoeDispatch,
    RMSNorm,
    ScaledSwiGLU,
    SwiGLU,
)
from fuser.errors import InputError
from fuser.fused_ops import Linear
from fuser.plan.transformers import Transformer
from fuser.sequential import Sequential


class Attention(torch.nn.Module):
    """Causal attention over ``[batch, sequence, qkv_features]``, with rotary embedding."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        by_head = qkv.view(*qkv.shape[:-1], -1, self.head_dim).transpose(1, 2)
        counts = [self.heads, self.kv_heads, self.kv_heads]
        query, key, value = torch.split(by_head, counts, dim=1)
        positions = torch.arange(qkv.shape[1], device=qkv.device, dtype=torch.float32)
        steps = torch.arange(0, self.head_dim, 2, device=qkv.device) / self.head_dim
        angles = (positions[:, None] / 500000.0**steps).repeat(1, 2)
        cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
        query, key = (x * cos + _turned(x) * sin for x in (query, key))
        is_grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
        return y.transpose(1, 2).flatten(-2)


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Experts(torch.nn.Module):
    """A norm, a router, and ``experts`` of which ``top_k`` compute a token; with the residual."""

    def __init__(self, sizes: Transformer, **options: Any) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.norm = RMSNorm(sizes.hidden, **options)
        self.router = torch.nn.Linear(sizes.hidden, sizes.experts, bias=False, **options)
        options |= {"bias": False, "single_grouped_weight": True}
        dispatch = MoeDispatch(sizes.experts)
        for index, channel in enumerate(("split sizes", "probs", "rows")):
            dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
        up = GroupedLinear(sizes.experts, sizes.hidden, 2 * sizes.intermediate, **options)
        down = GroupedLinear(sizes.experts, sizes.intermediate, sizes.hidden, **options)
        self.experts = Sequential(
            dispatch,
            up.set_extra_input_channel(0, "split sizes"),
            ScaledSwiGLU().set_extra_input_channel(0, "probs"),
            down.set_extra_input_channel(0, "split sizes"),
            MoeCombine().set_extra_input_channel(0, "rows"),
            AddExtraInput(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        rows = self.norm(tokens)
        probs, indices = self.router(rows).float().softmax(-1).topk(self.top_k)
        y: torch.Tensor = self.experts(
            rows, indices.to(torch.int32), probs / probs.sum(-1, keepdim=True), tokens
        )
        return y.view(x.shape)


class DecoderLayer(torch.nn.Module):
    """Attention and a feed-forward block; without heads, the block alone."""

    def __init__(self, sizes: Transformer, **options: Any) -> None:
        super().__init__()
        hidden, width = sizes.hidden, sizes.intermediate
        self.has_attention = sizes.heads > 0
        if self.has_attention:
            self.before = Sequential(
                RMSNorm(hidden, **options),
                Linear(hidden, sizes.qkv_features, bias=False, **options),
            )
            self.attention = Attention(sizes)
            self.after = Sequential(
                Linear(sizes.attention_features, hidden, bias=False, **options), AddExtraInput()
            )
        self.feed_forward: torch.nn.Module
        if sizes.experts:
            self.feed_forward = Experts(sizes, **options)
        else:
            fork = MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False)
            self.feed_forward = Sequential(
                fork,
                RMSNorm(hidden, **options),
                Linear(hidden, 2 * width, bias=False, **options),
                SwiGLU(),
                Linear(width, hidden, bias=False, **options),
                AddExtraInput().set_extra_input_channel(0, "residual"),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.has_attention:
            x = self.after(self.attention(self.before(x)), x)
        y: torch.Tensor = self.feed_forward(x)
        return y


class Decoder(torch.nn.Module):
    """A decoder of ``sizes``: logits ``[batch, sequence, vocab]`` of token numbers.

    Without a vocabulary it takes and returns hidden states. ``options`` are ``device`` and
    ``dtype`` of the parameters.
    """

    def __init__(self, sizes: Transformer, **options: Any) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding, self.head = None, None
        if sizes.vocab:
            self.embedding = torch.nn.Embedding(sizes.vocab, sizes.hidden, **options)
            self.head = Sequential(
                RMSNorm(sizes.hidden, **options),
                Linear(sizes.hidden, sizes.vocab, bias=False, **options),
            )
        self.layers = torch.nn.ModuleList(
            DecoderLayer(sizes, **options) for _ in range(sizes.layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)

    def example(self, tokens: int) -> torch.Tensor:
        """An input of ``tokens`` on the meta device: one sequence, or as many as fit.

        Raises
        ------
        InputError
            If there are more tokens than a sequence, and they are no whole sequences.
        """
        length = self.sizes.sequence
        if tokens > length and tokens % length:
            raise InputError(
                f"{tokens} tokens are no whole sequences of {length}, which is the length that "
                f"{self.sizes.name} is planned for."
                " Choose a multiple."
            )
        shape = (max(1, tokens // length), min(tokens, length))
        if self.embedding is not None:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        dtype = next(self.parameters()).dtype
        states = torch.empty(*shape, self.sizes.hidden, dtype=dtype, device="meta")
        return states.requires_grad_()
