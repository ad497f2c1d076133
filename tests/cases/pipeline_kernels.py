"""The emulator for whole pipelines, whose chains are made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from emulator import emulated

from fuser.cuda.module import KERNELS
from fuser.functional import pointwise

# fuser's own sources by another name: the emulator refuses kernels of fuser that the compile check
# does not know, and of all chains and what takes them that knows a few of each kind.
SOURCES = KERNELS / ".." / KERNELS.name


@contextmanager
def on_kernels() -> Iterator[None]:
    """Inside, pipelines on the CPU run on kernels, whichever they need, small tensors too."""
    with pytest.MonkeyPatch.context() as patch, emulated(sources=SOURCES, every_launch=False):
        patch.setattr(pointwise, "FEW_ELEMENTS", 0)
        yield
