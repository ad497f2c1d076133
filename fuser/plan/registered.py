"""Registered fusions: functions that rewrite the list of ops before planning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fuser.errors import InputTypeError, StateError
from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.plan.graph import OpGraph
from fuser.specs import PlanKey

Ops = list[FusibleOperation]
FusionFunction = Callable[..., Ops]

Pinned = dict[str, list[tuple[int, FusedOperation]]]


@dataclass(frozen=True)
class RegisteredFusions:
    """Functions ``func(ops, *, recipe) -> ops`` that rewrite the list of ops of each side."""

    joint: tuple[FusionFunction, ...] = ()
    forward: tuple[FusionFunction, ...] = ()
    backward: tuple[FusionFunction, ...] = ()


def apply_registered(graph: OpGraph, key: PlanKey, registered: RegisteredFusions) -> Pinned:
    """For each side, the fused ops that registered functions inserted, with their first op."""

    def run(functions: Iterable[FusionFunction], start: Ops) -> Ops:
        for function in functions:
            start = list(function(start, recipe=key.recipe))
            _check_covers(graph.ops, start, function)
        return start

    joint = run(registered.joint, list(graph.ops))
    sides = {
        "forward": run(registered.forward, list(joint)),
        "backward": run(registered.backward, list(joint)),
    }
    pinned: Pinned = {}
    for side, result in sides.items():
        pinned[side] = []
        start = 0
        for op in result:
            length = len(op.basic_ops) if isinstance(op, FusedOperation) else 1
            if isinstance(op, FusedOperation):
                check_has_methods(type(op), side)
                pinned[side].append((start, op))
            start += length
    return pinned


def check_has_methods(fusion: type[FusedOperation], side: str) -> None:
    """Refuse a fusion that does not implement the methods of ``side``."""
    for half in ("forward", "backward") if side == "joint" else (side,):
        methods = (f"fuser_{half}", f"step_{half}")
        if all(getattr(fusion, name) is getattr(FusibleOperation, name) for name in methods):
            raise InputTypeError(
                f"{fusion.__name__} has no {methods[0]}, which a {side} fusion must implement."
            )


def _check_covers(ops: Sequence[BasicOperation], result: Ops, function: FusionFunction) -> None:
    parts = (op.basic_ops if isinstance(op, FusedOperation) else [op] for op in result)
    flat: list[Any] = [op for part in parts for op in part]
    if len(flat) != len(ops) or any(a is not b for a, b in zip(flat, ops, strict=True)):
        held = ", ".join(type(op).__name__ for op in ops)
        got = ", ".join(type(op).__name__ for op in flat)
        name = getattr(function, "__name__", repr(function))
        raise StateError(
            f"The registered fusion {name} returned ops that do not cover the pipeline: it holds "
            f"[{held}], and they replace [{got}]."
        )
