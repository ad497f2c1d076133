"""Budgets of memory in passes and plans; a forward that runs again, and keeps its inputs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fuser.doors import OBSERVER, PASSES, Observer, PassRunner
from fuser.errors import InputError, StateError
from fuser.op import CallResult, FusibleOperation
from fuser.op.structure import structure_of
from fuser.plan.graph import OpGraph
from fuser.plan.kept import kept_tensors
from fuser.plan.memory_curve import memory_curve
from fuser.plan.plan import FusionPlan
from fuser.plan.rebuilt import activation_memory_budget, with_rebuilt_tensors
from fuser.tensors.sharding import gathered_by


def keeping_inputs(
    model: torch.nn.Module,
    forward: Callable[..., CallResult],
    inputs: tuple[torch.Tensor, ...],
    op_kwargs: object,
) -> CallResult:
    """``forward(model, *inputs, op_kwargs=op_kwargs)``, which keeps ``inputs`` for backward alone.

    torch compares the versions of tensors that it is given; those of parameters are compared here,
    and what else the ops compute with.
    """
    keywords = op_kwargs.values() if isinstance(op_kwargs, Mapping) else ()
    if any(isinstance(of_op, Mapping) and "output" in of_op for of_op in keywords):
        raise InputError(
            "op_kwargs has a buffer output, and the activation memory budget is 0: forward would "
            "write to it again before backward. Leave it out, or use a budget of 1."
        )
    of_first: list[object] = []

    def run(*tensors: torch.Tensor) -> CallResult:
        state = _state(model)
        if not of_first:
            of_first.append(state)
        elif state is not None and state != of_first[0]:
            raise StateError(
                f"A parameter or an op of a {type(model).__name__} was changed between its forward "
                "and its backward, which runs forward again: its activation memory budget is 0. "
                "Change it after the backward, or use a budget of 1."
            )
        return forward(model, *tensors, op_kwargs=op_kwargs)

    result: CallResult = checkpoint(run, *inputs, use_reentrant=False)
    return result


def _state(model: torch.nn.Module) -> object:
    """What a forward depends on besides its inputs; None if ``fully_shard`` changes parameters."""
    parameters = list(model.parameters())
    if gathered_by(parameters):
        return None
    modules = list(model.modules())
    ops = [structure_of(op) for op in modules if isinstance(op, FusibleOperation)]
    versions = [None if p.is_inference() else p._version for p in parameters]
    return [*map(id, modules)], ops, [*map(id, parameters)], versions


class SavingPasses(PassRunner):
    """Passes that keep less for backward than it reads."""

    saving = staticmethod(with_rebuilt_tensors)
    budget = staticmethod(activation_memory_budget)
    keeping_inputs = staticmethod(keeping_inputs)


class MemoryObserver(Observer):
    """What plans keep, and what they would keep under other budgets."""

    kept = staticmethod(kept_tensors)

    def costs(
        self, graph: OpGraph, plan: FusionPlan, *given: Any, is_known: bool = False
    ) -> dict[str, Any]:
        fields = super().costs(graph, plan, *given, is_known=is_known)
        cuts = plan.cuts if plan.waiting else ()
        new_plan = None if is_known else plan
        return {**fields, "memory": memory_curve(graph, new_plan, *given, cuts=cuts)}


PASSES.open(SavingPasses())
OBSERVER.open(MemoryObserver())
