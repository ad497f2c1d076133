"""Dropout in plain torch, with a mask computed from a seed of two numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

WORD = 0xFFFFFFFF
PHILOX_ROUNDS = 7


def dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """``x * mask / (1 - p)`` for the forward, and for a gradient in backward; 0 for ``p = 1``.

    As in torch, a dropped infinity is NaN. Arguments as for :func:`dropout_mask`.
    """
    scale = 1 / (1 - p) if p < 1 else 0.0
    result: torch.Tensor = torch.ops.aten.native_dropout_backward(
        x, dropout_mask(seed, tuple(x.shape), p), scale
    )
    return result


def dropout_mask(seed: torch.Tensor, shape: tuple[int, ...], p: float) -> torch.Tensor:
    """The mask of a dropout, True for kept elements: word i of Philox4x32-7 is >= ``p 2^32``.

    ``seed`` is two int64: the key, and the upper half of the counter, whose lower half is
    ``i // 4``; i counts the elements of the mask in memory. ``p`` is the probability that an
    element is zeroed.
    """
    index = torch.arange(math.prod(shape), device=seed.device)
    words = torch.stack(philox(index // 4, seed[1], seed[0]))
    threshold = min(round(p * 2**32), WORD)
    return (words.gather(0, (index % 4)[None])[0] >= threshold).view(shape)


def philox(
    low: torch.Tensor,
    high: torch.Tensor | int,
    key: torch.Tensor | int,
    rounds: int = PHILOX_ROUNDS,
) -> tuple[torch.Tensor, ...]:
    """Four random 32-bit words for each 128-bit counter (Salmon et al., 2011), as int64."""
    c: list[Any] = [low & WORD, low >> 32 & WORD, high & WORD, high >> 32 & WORD]
    k: list[Any] = [key & WORD, key >> 32 & WORD]
    for _ in range(rounds):
        # int64 products wrap around, and keep all 64 bits.
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32 & WORD) ^ c[1] ^ k[0], p1 & WORD, (p0 >> 32 & WORD) ^ c[3] ^ k[1], p0 & WORD]
        k = [k[0] + 0x9E3779B9 & WORD, k[1] + 0xBB67AE85 & WORD]
    return tuple(c)
