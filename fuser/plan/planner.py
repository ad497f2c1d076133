"""The planner: finds candidates for windows of ops, and plans the cheapest cover."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fuser.doors import OBSERVER
from fuser.errors import FuserWarning, StateError
from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.plan.cost import NOMINAL_TOKENS, CostModel
from fuser.plan.cover import Candidate, cheapest_cover, outside, unchosen, unchosen_joint
from fuser.plan.devices import Device, device_of
from fuser.plan.graph import OpGraph
from fuser.plan.plan import Channel, FusionPlan, Note, Refusal
from fuser.plan.registered import Pinned, RegisteredFusions, apply_registered
from fuser.plan.window import matches
from fuser.report.text import span
from fuser.specs import PlanKey


@dataclass(frozen=True)
class Planned:
    """A plan, and the operations that run it: ``(operation, basic-op indices)``.

    Both sides are in the order in which they run: ``backward`` goes from the
    last op to the first that needs a gradient.
    """

    plan: FusionPlan
    forward: tuple[tuple[FusibleOperation, tuple[int, ...]], ...]
    backward: tuple[tuple[FusibleOperation, tuple[int, ...]], ...]


def make_plan(
    graph: OpGraph, key: PlanKey, registered: RegisteredFusions, target: Device | None = None
) -> Planned:
    """Plan the ops of ``graph`` under ``key``, for ``target`` and the tokens of the graph.

    Without a target for the device of the key, and for a number of tokens that all plans share.

    If a method of a fusion raises, the planner refuses the fusion with the exception as the reason,
    and warns. Raises StateError if a registered function returns ops that do not cover the
    pipeline, or a fused op that does not do their communication.
    """
    graph.bind(key)
    tokens = NOMINAL_TOKENS if target is None else graph.tokens
    search = _Search(graph, key, target or device_of(key.device), tokens)
    pinned = apply_registered(graph, key, registered)
    forward = search.side("forward", pinned["forward"])
    backward = search.side("backward", pinned["backward"])
    joint = search.joint(pinned)
    cover = cheapest_cover(len(graph.ops), forward, backward, joint)
    backward_run = tuple(c for c in reversed(cover.backward) if c.stop > search.first)
    lost = [*unchosen(forward, cover.forward), *unchosen(backward, cover.backward)]
    lost += unchosen_joint(len(graph.ops), forward, backward, joint, cover)
    joint_ops: dict[tuple[int, int, type[FusedOperation]], FusibleOperation] = {}
    run = {
        "forward": tuple(_operation(graph.ops, c, joint_ops) for c in cover.forward),
        "backward": tuple(_operation(graph.ops, c, joint_ops) for c in backward_run),
    }
    plan = FusionPlan(
        key=key,
        ops=tuple(type(op).__name__ for op in graph.ops),
        forward=tuple(c.step for c in cover.forward),
        backward=tuple(c.step for c in backward_run),
        unfused_forward=tuple(c.step for c in search.basic["forward"]),
        unfused_backward=tuple(
            c.step for c in reversed(search.basic["backward"]) if c.start >= search.first
        ),
        refusals=(*search.refusals, *lost),
        channels=tuple(
            Channel(
                source.channel or "",
                source.producer,
                consumer,
                key.ops[consumer].extra_inputs[k].dtype.is_floating_point,
            )
            for consumer, row in enumerate(graph.sources)
            for k, source in enumerate(row)
            if source.producer is not None
        ),
        activation_bytes=_bytes_per_token(graph, "forward"),
        grad_activation_bytes=_bytes_per_token(graph, "backward"),
        nominal_tokens=tokens,
        target=target,
        features=features_of(graph),
        wholes=tuple(op.part_of for op in graph.ops),
        extra_outputs=tuple(op.num_extra_outputs for op in graph.ops),
        kept=OBSERVER.guest.kept(graph, run["forward"]) if key.requires_grad else (),
        notes=_notes(graph, key, (*run["forward"], *run["backward"]), tokens),
    )
    return Planned(plan, run["forward"], run["backward"])


def features_of(graph: OpGraph) -> tuple[int, ...]:
    """The columns of the tensors between the ops, of the first input to the last output."""
    return tuple(spec.shape[-1] for spec in graph.main_specs)


def _notes(
    graph: OpGraph,
    key: PlanKey,
    run: Sequence[tuple[FusibleOperation, tuple[int, ...]]],
    tokens: int,
) -> tuple[Note, ...]:
    """The notes of the basic ops, and of the fused ops that run."""
    fused = [(op, ops) for op, ops in run if op.is_fused_op]
    notes = []
    for op, ops in dict.fromkeys([*((op, (i,)) for i, op in enumerate(graph.ops)), *fused]):
        rows = math.prod(graph.main_specs[ops[0]].shape[:-1])
        texts = op.notes(key.window(ops[0], ops[-1] + 1), round(rows * tokens / graph.tokens))
        name = type(op).__name__ if op.is_fused_op else None
        notes += [Note(ops, text, fusion=name) for text in texts]
    return tuple(notes)


class _Search:
    """The search for candidates in one graph under one key; it collects refusals."""

    def __init__(self, graph: OpGraph, key: PlanKey, device: Device, tokens: int) -> None:
        self.graph = graph
        self.key = key
        count = len(graph.ops)
        self.first = next((i for i, op in enumerate(key.ops) if op.requires_grad), count)
        self.costs = CostModel(graph, device, self.first, tokens)
        self.basic = {side: self._basic(side) for side in ("forward", "backward")}
        self.refusals: list[Refusal] = []

    def side(self, side: str, pinned: Sequence[tuple[int, FusedOperation]]) -> list[Candidate]:
        """Every candidate of ``side``; a pinned fused op is the only candidate for its ops."""
        asked = (self._ask(*match, side) for match in self._windows(side))
        candidates = [*self.basic[side], *(fused for fused in asked if fused is not None)]
        for start, fused in pinned:
            window = range(start, start + len(fused.basic_ops))
            reason = self._unsent(fused, window, side)
            if reason is not None:
                raise StateError(
                    f"The registered fusion {type(fused).__name__} cannot run ops "
                    f"{span(window)}: {reason}"
                )
            candidates = outside(window, candidates)
            candidates.append(
                self.costs.candidate(window, side, fused, [(type(fused).__name__, len(window))])
            )
        return candidates

    def _basic(self, side: str) -> list[Candidate]:
        """Every op alone; in backward, an op that backward does not reach costs nothing."""
        candidates = []
        for i, op in enumerate(self.graph.ops):
            window = range(i, i + 1)
            key = self.key.window(i, i + 1)
            names = op.kernels(side, key)
            if side == "backward" and i < self.first:
                names = ()
            kernels = [*((name, 0) for name in names[:-1]), *((name, 1) for name in names[-1:])]
            fuses_quantize = op.fuses_quantize(side, key)
            candidates.append(self.costs.candidate(window, side, None, kernels, fuses_quantize))
        return candidates

    def joint(self, pinned: Pinned) -> list[tuple[Candidate, Candidate]]:
        """Every allowed joint window, as its forward and its backward candidate."""
        taken = [
            range(start, start + len(fused.basic_ops))
            for side in pinned.values()
            for start, fused in side
        ]
        pairs = []
        for fusion, window, bound in self._windows("joint"):
            if any(window.start < t.stop and t.start < window.stop for t in taken):
                self._refuse(fusion, window, "a registered fusion takes part of these ops.")
                continue
            forward = self._ask(fusion, window, bound, "forward")
            backward = self._ask(fusion, window, bound, "backward")
            if forward is None or backward is None:
                continue
            if window.stop <= self.first:
                backward = Candidate(window.start, window.stop, 0.0, fusion, backward.step)
            pairs.append((forward, backward))
        return pairs

    def _windows(
        self, side: str
    ) -> Iterable[tuple[type[FusedOperation], range, tuple[object, ...]]]:
        """Windows that fusions of ``side`` match by type and that nothing rules out."""
        ops = self.graph.ops
        for fusion in self.key.fusions:
            if fusion.side != side or not fusion.window:
                continue
            for start in range(len(ops)):
                for match in matches(fusion.window, ops, start):
                    window = range(start, match.stop)
                    reason = self._open_reason(fusion, window, side)
                    if reason is None:
                        yield fusion, window, match.bound
                    elif reason:
                        self._refuse(fusion, window, reason)

    def _open_reason(self, fusion: type[FusedOperation], window: range, side: str) -> str | None:
        """The reason why no fusion can run ``window`` on ``side``; empty for a silent refusal."""
        if side == "backward" and window.stop <= self.first:
            return ""
        needs_backward = side != "forward" and self.key.requires_grad
        if needs_backward and window.start < self.first < window.stop:
            return f"backward ends at op {self.first}: nothing before it needs a gradient."
        if fusion.makes_channels:
            return None
        return self.graph.channels_inside(window.start, window.stop)

    def _ask(
        self, fusion: type[FusedOperation], window: range, bound: tuple[object, ...], side: str
    ) -> Candidate | None:
        """The candidate of ``fusion`` for ``window``; if refused, None, and the refusal is kept."""
        key = self.key.window(window.start, window.stop)
        try:
            reason = self._unsent(fusion, window, side)
            if reason is None:
                reason = fusion.refuses(*bound, key=key)
            kernels = fusion.kernels(*bound, side=side, key=key) if reason is None else ()
            fuses_quantize = reason is None and fusion.fuses_quantize(*bound, side=side, key=key)
            sends = fusion.sends(*bound, side=side, key=key) if reason is None else {}
        except Exception as error:  # a broken fusion must not break the pipeline
            reason = f"{fusion.__name__} raised {type(error).__name__}: {error}"
            warnings.warn(
                f"Fusion {fusion.__name__} is not used: asked about ops {span(window)}, it "
                f"raised {type(error).__name__}: {error}",
                FuserWarning,
                stacklevel=2,
            )
        if reason is None and sum(covered for _, covered in kernels) != len(window):
            reason = f"its kernels {kernels} do not cover the {len(window)} ops of the window."
        if reason is not None:
            if reason:
                self._refuse(fusion, window, reason)
            return None
        return self.costs.candidate(window, side, fusion, kernels, fuses_quantize, sends)

    def _unsent(
        self, fusion: type[FusedOperation] | FusedOperation, window: range, side: str
    ) -> str | None:
        """The reason if ops of the window communicate and the fusion would not; else None."""
        for i in window if not fusion.communicates else ():
            op = self.graph.ops[i]
            for collective in op.collectives(side, self.key.window(i, i + 1)):
                return (
                    f"op {i} ({type(op).__name__}) communicates, which the fusion does not do: "
                    f"{collective.kind} of {collective.tensor} over "
                    f"{collective.ranks} ranks in {side}."
                )
        return None

    def _refuse(self, fusion: type[FusedOperation], window: range, reason: str) -> None:
        refusal = Refusal(fusion.__name__, fusion.side, tuple(window), reason)
        # A joint window is tried on both sides, and after the wider windows that contain it.
        if fusion.side != "joint" or not any(
            (other.fusion, other.reason) == (fusion.__name__, reason)
            and set(refusal.ops) <= set(other.ops)
            for other in self.refusals
        ):
            self.refusals.append(refusal)


def _bytes_per_token(graph: OpGraph, side: str) -> tuple[float, ...]:
    return tuple(graph.gap_bytes(gap, side) / graph.tokens for gap in range(len(graph.main_specs)))


def _operation(
    ops: Sequence[BasicOperation],
    candidate: Candidate,
    joint_ops: dict[tuple[int, int, type[FusedOperation]], FusibleOperation],
) -> tuple[FusibleOperation, tuple[int, ...]]:
    """The operation that runs ``candidate``; both sides of a joint window share one."""
    window = range(candidate.start, candidate.stop)
    if candidate.run is None:
        return ops[window.start], tuple(window)
    if isinstance(candidate.run, FusedOperation):
        return candidate.run, tuple(window)
    place = (window.start, window.stop, candidate.run)
    if place not in joint_ops:
        joint_ops[place] = candidate.run([ops[i] for i in window])
    return joint_ops[place], tuple(window)
