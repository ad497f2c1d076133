"""Models that several test files build."""

from __future__ import annotations

from typing import Any

import oracles

import fuser


def mlp(
    width: int = 8,
    hidden: int = 12,
    *,
    fusions: Any = fuser.FUSIONS,
    randomized: bool = True,
    **like: Any,
) -> fuser.Sequential:
    """Linear, GELU, Linear, of basic ops 0-1, 2 and 3-4; ``like`` is the linears' device, dtype."""
    ops = (fuser.Linear(width, hidden, **like), fuser.GELU(), fuser.Linear(hidden, width, **like))
    model = fuser.Sequential(*ops, fusions=fusions)
    return oracles.randomize(model) if randomized else model


def residual_block(
    width: int,
    hidden: int,
    *,
    channel: str = "residual",
    fusions: Any = fuser.FUSIONS,
    randomized: bool = True,
    **like: Any,
) -> fuser.Sequential:
    """``x + W2 swiglu(W1 rmsnorm(x))`` whose residual runs on a channel: 8 basic ops."""
    model = fuser.Sequential(
        fuser.MakeExtraOutput().set_extra_output_channel(0, channel, output_to_caller=False),
        fuser.RMSNorm(width, **like),
        fuser.Linear(width, 2 * hidden, **like),
        fuser.SwiGLU(),
        fuser.Linear(hidden, width, **like),
        fuser.AddExtraInput().set_extra_input_channel(0, channel),
        fusions=fusions,
    )
    return oracles.randomize(model) if randomized else model
