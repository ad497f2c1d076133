"""Memory curve of a pipeline: its ops planned under every activation memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fuser.plan.devices import Device
from fuser.plan.graph import OpGraph
from fuser.plan.kept import kept_tensors
from fuser.plan.memory import BudgetCost, MemoryCurve
from fuser.plan.plan import FusionPlan
from fuser.plan.planner import make_plan
from fuser.plan.registered import RegisteredFusions
from fuser.plan.saved_inputs import Limit
from fuser.specs import PlanKey

LIMITS = (
    Limit(None, True),
    Limit(1, True),
    Limit(1, False),
    Limit(1, True, lossy_activation_inputs=True),
)


def memory_curve(
    graph: OpGraph,
    plan: FusionPlan | None,
    key_under: Callable[[Limit], PlanKey],
    registered: RegisteredFusions,
    target: Device | None = None,
    *,
    cuts: Sequence[int] = (),
) -> MemoryCurve:
    """What each budget keeps and costs; ``key_under`` gives the key of the ops under a limit.

    ``plan`` is the plan of one of these keys, of this graph, which is not made again. ``target`` is
    an argument of :func:`make_plan`. ``cuts`` are the ops before which the pipeline is cut into
    autograd nodes. Binds ``graph``.
    """
    every: list[BudgetCost] = []
    known: dict[PlanKey, BudgetCost] = {}
    repeated: BudgetCost | None = None
    for limit in LIMITS:
        key = key_under(limit)
        if not key.requires_grad:
            return MemoryCurve()
        if key in known:  # no weight is quantized, or there is no activation
            every.append(replace(known[key], **limit._asdict()))
            continue
        if plan is not None and plan.key == key and not cuts:
            graph.bind(key)
            of_limit, kept = plan, plan.kept
        else:
            planned = make_plan(graph, key, registered, target)
            of_limit, kept = planned.plan, kept_tensors(graph, planned.forward, cuts)
        sides = (of_limit.forward, of_limit.backward)
        times = [sum(step.microseconds for step in side) for side in sides]
        a_token, weights = sum(k.bytes_per_token for k in kept), sum(k.nbytes for k in kept)
        again = [k for k in kept if k.is_rebuilt]
        known[key] = BudgetCost(
            *limit,
            nbytes=a_token * graph.tokens + weights,
            weight_bytes=weights,
            bytes_per_token=a_token,
            microseconds=sum(times),
            inputs=tuple(k.ops[0] for k in again if k.name == "input"),
            weights=tuple(k.ops[0] for k in again if k.name == "weight"),
        )
        every.append(known[key])
        if repeated is None:  # a forward that runs again keeps everything
            nbytes = _input_bytes(graph)
            repeated = BudgetCost(
                *Limit(0, True),
                nbytes=nbytes,
                weight_bytes=0,
                bytes_per_token=nbytes / graph.tokens,
                microseconds=times[0] + sum(times),
                repeats_forward=True,
            )
    assert repeated is not None
    return MemoryCurve((*every, repeated), graph.tokens, of_limit.nominal_tokens)


def _input_bytes(graph: OpGraph) -> int:
    """Bytes of the main input and of the extra inputs that a caller gives."""
    sizes = {
        source.caller_index: spec.nbytes
        for row, specs in zip(graph.sources, graph.extra_inputs, strict=True)
        for source, spec in zip(row, specs, strict=True)
        if source.caller_index is not None
    }
    return graph.gap_bytes(0, "forward") + sum(sizes.values())
