"""Memory budgets of a plan: what each would keep for backward, and the modelled time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuser.plan.devices import Device
from fuser.plan.graph import OpGraph
from fuser.plan.kept import kept_tensors
from fuser.plan.plan import FusionPlan, MemoryCurve
from fuser.plan.planner import make_plan
from fuser.plan.registered import RegisteredFusions
from fuser.plan.saved_inputs import Limit
from fuser.report.text import columns, format_bytes, format_time
from fuser.specs import PlanKey

LIMITS = (
    Limit(None),
    Limit(1),
    Limit(1, keep_weight_copies=False),
    Limit(1, lossy_activation_inputs=True),
)


@dataclass(frozen=True)
class BudgetCost:
    """What a plan keeps for backward under one :class:`~fuser.activation_memory_budget`.

    ``nbytes`` are kept for inputs of the planned shape, ``weight_bytes`` of them by copies of
    quantized weights and the others by tensors of the tokens, ``bytes_per_token`` for each.
    Backward computes the ``inputs`` of these ops again and quantizes the ``weights`` of those;
    ``repeats_forward``: it runs forward again. ``microseconds`` is the modelled time of the steps
    of forward and backward, for the tokens that the plan is modelled for. Modules between pipelines
    are not counted.
    """

    memory_budget: float | None
    keep_weight_copies: bool
    lossy_activation_inputs: bool
    nbytes: float
    weight_bytes: int
    bytes_per_token: float
    microseconds: float
    inputs: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    repeats_forward: bool = False

    def __str__(self) -> str:
        return (
            f"{self.memory_budget}"
            + ", keep_weight_copies=False" * (not self.keep_weight_copies)
            + ", lossy_activation_inputs=True" * self.lossy_activation_inputs
        )

    @property
    def again(self) -> str:
        """What backward computes again, as text."""
        if self.repeats_forward:
            return "forward"
        parts = (("inputs", self.inputs), ("weights", self.weights))
        return "; ".join(f"{name} of {', '.join(map(str, ops))}" for name, ops in parts if ops)

    def __add__(self, other: BudgetCost) -> BudgetCost:
        """The costs of two pipelines under one budget."""
        names = ("nbytes", "weight_bytes", "bytes_per_token", "microseconds", "inputs", "weights")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def moved(self, by: int) -> BudgetCost:
        """The same with ops whose indices are larger by ``by``."""
        inputs, weights = (tuple(i + by for i in ops) for ops in (self.inputs, self.weights))
        return replace(self, inputs=inputs, weights=weights)


@dataclass(frozen=True)
class BudgetCurve(MemoryCurve):
    """The budgets of a training plan, from the most memory to the least.

    As text it is a table. Budgets that keep the same bytes as an earlier one are left out of it,
    and of iteration.
    """

    every: tuple[BudgetCost, ...] = ()

    def __iter__(self) -> Iterator[BudgetCost]:
        seen: set[tuple[float, int]] = set()
        for cost in self.every:
            if (place := (cost.nbytes, cost.weight_bytes)) not in seen:
                seen.add(place)
                yield cost

    def __str__(self) -> str:
        heading = ("budget", "a token", "weights", "all", f"step of {self.nominal_tokens}", "again")
        rows = [
            (
                str(cost),
                format_bytes(cost.bytes_per_token),
                format_bytes(cost.weight_bytes),
                format_bytes(cost.nbytes),
                format_time(cost.microseconds),
                cost.again or "nothing",
            )
            for cost in self
        ]
        return "\n".join(
            [f"kept for backward of {self.tokens} tokens", *_columns([heading, *rows])]
        )

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            {**vars(cost), "inputs": list(cost.inputs), "weights": list(cost.weights)}
            for cost in self
        ]

    def moved(self, by: int) -> BudgetCurve:
        return replace(self, every=tuple(cost.moved(by) for cost in self.every))

    def followed_by(self, other: MemoryCurve, by: int) -> BudgetCurve:
        if not isinstance(other, BudgetCurve):
            return self
        pairs = zip(self.every, other.moved(by).every, strict=True)
        return replace(self, every=tuple(first + second for first, second in pairs))

    def with_inputs(self, sizes: Iterable[int]) -> BudgetCurve:
        """Also: budget 0 keeps the inputs."""
        nbytes = sum(sizes)
        return replace(
            self,
            every=tuple(
                replace(cost, nbytes=nbytes, bytes_per_token=nbytes / self.tokens)
                if cost.repeats_forward
                else cost
                for cost in self.every
            ),
        )


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """The rows of the table: the last column, which is text, to the left."""
    numbers = columns([row[:-1] for row in rows], left=1)
    return [f"{line}  {row[-1]}" for line, row in zip(numbers, rows, strict=True)]


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
            own, kept = plan, plan.kept
        else:
            planned = make_plan(graph, key, registered, target)
            own, kept = planned.plan, kept_tensors(graph, planned.forward, cuts)
        times = [sum(step.microseconds for step in side) for side in (own.forward, own.backward)]
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
                *Limit(0),
                nbytes=nbytes,
                weight_bytes=0,
                bytes_per_token=nbytes / graph.tokens,
                microseconds=times[0] + sum(times),
                repeats_forward=True,
            )
    assert repeated is not None
    return BudgetCurve((*every, repeated), graph.tokens, own.nominal_tokens)


def _input_bytes(graph: OpGraph) -> int:
    """Bytes of the main input and of the extra inputs that a caller gives."""
    given = {
        source.caller_index: spec.nbytes
        for row, specs in zip(graph.sources, graph.extra_inputs, strict=True)
        for source, spec in zip(row, specs, strict=True)
        if source.caller_index is not None
    }
    return graph.gap_bytes(0, "forward") + sum(given.values())
