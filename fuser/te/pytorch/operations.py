"""``transformer_engine.pytorch.ops``: ops with arguments that programs of te.ops pass."""

from __future__ import annotations

from typing import Any

from fuser import basic_ops
from fuser.te.pytorch.layers import _warn_of_overlap

__all__ = ["BasicLinear"]


class BasicLinear(basic_ops.BasicLinear):
    """:class:`fuser.BasicLinear`, which ignores options for userbuffers, with a warning."""

    def __init__(self, *args: Any, userbuffers_options: Any = None, **kwargs: Any) -> None:
        if userbuffers_options is not None:
            _warn_of_overlap("BasicLinear", ("userbuffers_options",))
        super().__init__(*args, **kwargs)
