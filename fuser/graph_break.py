"""Graph breaks for torch.compile: a compiled graph calls the marked functions uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fuser.torch_private import skip_when_compiling

Function = TypeVar("Function", bound=Callable[..., Any])

REASON = "fuser plans and runs a pipeline itself, as one autograd node"


def breaks_graph(function: Function) -> Function:
    """Decorator: dynamo traces neither ``function`` nor the functions that it calls.

    A compiled caller calls it between two graphs. ``torch.compiler.disable`` does the same with a
    wrapper, which costs 1 us at every call, compiled or not. This decorator marks the function
    itself, and a call costs nothing more.
    """
    try:
        skip_when_compiling(function, REASON)
    except (ImportError, AttributeError):  # a version of torch that has it in another place
        disabled: Function = torch.compiler.disable(function, reason=REASON)  # type: ignore[no-untyped-call]
        return disabled
    return function
