"""The emulator for whole pipelines, whose chains are made when they are asked for."""

from __future__ import annotations

from contextlib import AbstractContextManager

from emulator import emulated

from fuser.cuda.module import KERNELS

# fuser's own sources by another name: the emulator refuses kernels of fuser that the compile check
# does not know, and of all chains and what takes them that knows a few of each kind.
SOURCES = KERNELS / ".." / KERNELS.name


def on_kernels() -> AbstractContextManager[None]:
    """Inside, pipelines on the CPU run on kernels, whichever they need."""
    return emulated(sources=SOURCES)
