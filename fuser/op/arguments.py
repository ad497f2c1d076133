"""Arguments of an op's forward: those from its pipeline, and those from its caller."""

from __future__ import annotations

import functools
import inspect
from typing import TypeGuard

from fuser.op.basic import BasicOperation
from fuser.op.fusible import FusibleOperation

QUANTIZER_ARGUMENTS = ("prev_op_grad_output_quantizer", "next_op_input_quantizer")
"""Keyword arguments that a pipeline gives to ``op_forward``."""


def is_plain(cls: type[FusibleOperation], side: str) -> TypeGuard[type[BasicOperation]]:
    """Whether ``op_forward``, or ``op_backward``, is what an op of this class runs on a side."""
    return issubclass(cls, BasicOperation) and all(
        getattr(cls, method) is getattr(BasicOperation, method)
        for method in (f"fuser_{side}", f"step_{side}")
    )


@functools.cache
def pipeline_arguments(cls: type[BasicOperation]) -> tuple[str, ...]:
    """Arguments of an op's forward that its pipeline gives; a caller cannot give them."""
    if not is_plain(cls, "forward"):
        return ()  # it gets the caller's arguments in a dict
    parameters = list(inspect.signature(cls.op_forward).parameters.values())[1:3]
    named = (p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    return (*named, *QUANTIZER_ARGUMENTS)


@functools.cache
def keyword_names(cls: type[BasicOperation]) -> tuple[str, ...] | None:
    """The keyword arguments that an op of this class takes from its caller; None for any."""
    if not is_plain(cls, "forward"):
        is_own = cls.step_forward.__module__.partition(".")[0] == "fuser"
        has_other = cls.fuser_forward is not BasicOperation.fuser_forward
        return cls.step_keywords if is_own and not has_other else None
    parameters = list(inspect.signature(cls.op_forward).parameters.values())[3:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.name not in QUANTIZER_ARGUMENTS)


def method_of(op: FusibleOperation, side: str) -> str:
    """The method that runs ``op`` on ``"forward"`` or ``"backward"``.

    ``step_`` of this library's fusions and ops with extra tensors, ``op_`` of a basic op without,
    and else ``fuser_``, also of a class or an object that defines it anew.
    """
    cls, method = type(op), f"fuser_{side}"
    is_inherited = any(
        getattr(cls, method) is getattr(base, method) for base in (BasicOperation, FusibleOperation)
    )
    if is_plain(cls, side) and not (op.num_extra_inputs or op.num_extra_outputs):
        return f"op_{side}"
    if is_inherited and method not in op.__dict__:
        step = f"step_{side}"
        return method if getattr(cls, step) is getattr(FusibleOperation, step) else step
    return method
