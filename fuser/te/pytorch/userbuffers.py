"""``initialize_ub`` and ``destroy_ub``, which do nothing here: no communication overlaps a GEMM."""

from __future__ import annotations

import enum
from typing import Any

from fuser.te.pytorch.layers import _warn_of_overlap

__all__ = ["UserBufferQuantizationMode", "destroy_ub", "initialize_ub"]


class UserBufferQuantizationMode(enum.Enum):
    """What a program says that it will send through userbuffers; no effect."""

    NONE = "none"
    FP8 = "fp8"


def initialize_ub(*args: Any, **options: Any) -> None:
    """Make no buffers, with one warning; layers ignore arguments for userbuffers."""
    _warn_of_overlap("initialize_ub", ("its buffers",))


def destroy_ub() -> None:
    """Free nothing: :func:`initialize_ub` makes no buffers."""
