"""Seeds of random numbers: drawn from torch's generators, or given by a compiled graph.

A compiled graph draws the seeds of its pipelines itself, and gives the same ones to a
recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch

MOST_DROPOUT, MOST_ROUNDING = 2**63 - 1, 2**31


class _GivenSeeds(NamedTuple):
    dropout: Iterator[torch.Tensor]
    rounding: Iterator[int]


_given: ContextVar[_GivenSeeds | None] = ContextVar("fuser_seeds", default=None)


@contextlib.contextmanager
def given_seeds(dropout: Iterable[torch.Tensor], rounding: Iterable[int] = ()) -> Iterator[None]:
    """Context in which seeds are taken from these in turn."""
    token = _given.set(_GivenSeeds(iter(dropout), iter(rounding)))
    try:
        yield
    finally:
        _given.reset(token)


def dropout_seed(device: torch.device) -> torch.Tensor:
    """Two random int64 from torch's generator of the device; new ones at a CUDA graph's replay."""
    seeds = _given.get()
    if seeds is None:
        return torch.randint(MOST_DROPOUT, (2,), device=device)
    return next(seeds.dropout)


def rounding_seed() -> int:
    """A random number from torch's generator of the CPU, for stochastic rounding."""
    seeds = _given.get()
    if seeds is None:
        return int(torch.randint(MOST_ROUNDING, (), device="cpu"))
    return next(seeds.rounding)


def rounding_seeds(first: int) -> Iterator[int]:
    """Seeds that follow from one, by the linear congruential generator of ANSI C's ``rand``."""
    seed = first
    while True:
        yield seed
        seed = (seed * 1103515245 + 12345) % MOST_ROUNDING
