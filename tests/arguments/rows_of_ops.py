"""Rows of the arguments of ops, layers, experts and functions."""

from __future__ import annotations

import torch
from argument_rows import sets
from torch.testing import assert_close

import fuser

OPTIONS: dict[str, tuple[str, ...]] = {}


@sets("fuser.RMSNorm", eps=0.5)
def _eps_of_the_norm(given: dict[str, object]) -> None:
    op, x = fuser.RMSNorm(8, **given), torch.randn(4, 8)
    assert_close(op(x), x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.5))
