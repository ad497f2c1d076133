"""The dtypes that pipelines take; float64 is among them inside ``allow_float64``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fuser.op import COMPUTE_DTYPES

_dtypes: ContextVar[tuple[torch.dtype, ...]] = ContextVar("dtypes", default=COMPUTE_DTYPES)


def compute_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that inputs and parameters may have in this thread."""
    return _dtypes.get()


@contextmanager
def allow_float64() -> Iterator[None]:
    """Inside, pipelines of this thread take float64, for ``torch.autograd.gradcheck``.

    Formulas that an op computes in float32, as activations of the library are, stay in float32. A
    pipeline that was called inside keeps its plan for float64, and takes it afterwards too.
    """
    token = _dtypes.set((*COMPUTE_DTYPES, torch.float64))
    try:
        yield
    finally:
        _dtypes.reset(token)
