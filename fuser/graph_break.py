"""torch.compile: functions that a compiled graph calls as they are, with one break before each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

REASON = "fuser plans and runs a pipeline itself, as one autograd node"


def breaks_graph(function: Function) -> Function:
    """Decorator: dynamo traces neither ``function`` nor what it calls.

    A caller that is compiled calls it between two graphs. ``torch.compiler.disable`` says the same
    by a wrapper, which costs 1 us at every call, compiled or not; here the function itself is
    marked, and nothing is added to a call.
    """
    try:
        # The frame evaluation of torch.compile: importing it does not import torch._dynamo.
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError):  # a torch that has it elsewhere
        disabled: Function = torch.compiler.disable(function, reason=REASON)  # type: ignore[no-untyped-call]
        return disabled
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    return function
