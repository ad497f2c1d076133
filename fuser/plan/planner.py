"""The planner: windows become candidates or refusals, and the cheapest cover is the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import networkx as nx

from fuser.errors import InputTypeError, StateError
from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.plan.graph import OpGraph
from fuser.plan.plan import Channel, FusionPlan, Refusal, Step
from fuser.plan.window import matches
from fuser.specs import PlanKey

# Shapes are not part of a plan's key, so one token count serves for all. Large
# enough that memory traffic and not the launch decides, as in training.
NOMINAL_TOKENS = 8192


@dataclass(frozen=True)
class DeviceCosts:
    """What the cost model knows of a device: bytes a second, seconds a launch."""

    bandwidth: float
    launch: float


# An H200 copies 4.2 TB/s and a launch costs about 5 us of host time (measured,
# docs/facts.md). The CPU's numbers are nominal: the size of two cores and a call.
MACHINES = {"cuda": DeviceCosts(4.2e12, 5e-6), "cpu": DeviceCosts(2e10, 2e-6)}

# Two covers of equal modelled time differ in host time: fewer steps win.
STEP_COST = 1e-9


_NO_STEP = Step((), None, "", 0.0, 0.0)


@dataclass(frozen=True)
class Candidate:
    """One way to run ops ``start`` up to ``stop``, with its modelled seconds.

    ``run`` is a fused op's class, an instance of one, or None for a basic op.
    """

    start: int
    stop: int
    cost: float
    run: type[FusedOperation] | FusedOperation | None = None
    step: Step = _NO_STEP


@dataclass(frozen=True)
class Cover:
    """The chosen candidates of each side, in pipeline order, and their total cost."""

    forward: tuple[Candidate, ...]
    backward: tuple[Candidate, ...]
    cost: float


@dataclass(frozen=True)
class Planned:
    """A plan, and the operations that run it: ``(operation, basic-op indices)``.

    ``forward`` is in the order it runs, ``backward`` too: from the last op to
    the first that needs a gradient.
    """

    plan: FusionPlan
    forward: tuple[tuple[FusibleOperation, tuple[int, ...]], ...]
    backward: tuple[tuple[FusibleOperation, tuple[int, ...]], ...]


FusionFunction = Callable[..., list[FusibleOperation]]


@dataclass(frozen=True)
class RegisteredFusions:
    """Functions ``func(ops, *, recipe) -> ops`` that rewrite a list of ops, run first."""

    joint: tuple[FusionFunction, ...] = ()
    forward: tuple[FusionFunction, ...] = ()
    backward: tuple[FusionFunction, ...] = ()


def make_plan(graph: OpGraph, key: PlanKey, registered: RegisteredFusions) -> Planned:
    """Plan the ops of ``graph`` under ``key``.

    A fusion that raises while it is asked is refused with the exception as the
    reason, and a warning says so.

    Raises
    ------
    StateError
        If a registered function returns ops that do not cover the pipeline.
    """
    graph.bind(key)
    search = _Search(graph, key)
    pinned = _apply_registered(graph, key, registered)
    forward = search.side("forward", pinned["forward"])
    backward = search.side("backward", pinned["backward"])
    joint = search.joint(pinned)
    cover = cheapest_cover(len(graph.ops), forward, backward, joint)
    forward_run = cover.forward
    backward_run = tuple(c for c in reversed(cover.backward) if c.stop > search.first)
    unchosen = [*_unchosen(forward, cover.forward), *_unchosen(backward, cover.backward)]
    unchosen += _unchosen_joint(len(graph.ops), forward, backward, joint, cover)
    plan = FusionPlan(
        key=key,
        ops=tuple(type(op).__name__ for op in graph.ops),
        forward=tuple(c.step for c in forward_run),
        backward=tuple(c.step for c in backward_run),
        unfused_forward=tuple(c.step for c in search.basic("forward")),
        unfused_backward=tuple(
            c.step for c in reversed(search.basic("backward")) if c.start >= search.first
        ),
        refusals=(*search.refusals, *unchosen),
        channels=tuple(
            Channel(source.channel or "", source.producer, consumer)
            for consumer, row in enumerate(graph.sources)
            for source in row
            if source.producer is not None
        ),
        activation_bytes=_line_bytes(graph, "forward"),
        grad_activation_bytes=_line_bytes(graph, "backward"),
        nominal_tokens=NOMINAL_TOKENS,
    )
    made: dict[tuple[int, int, Any], FusibleOperation] = {}
    return Planned(
        plan,
        tuple(_operation(graph.ops, c, made) for c in forward_run),
        tuple(_operation(graph.ops, c, made) for c in backward_run),
    )


def cheapest_cover(
    count: int,
    forward: Iterable[Candidate],
    backward: Iterable[Candidate],
    joint: Iterable[tuple[Candidate, Candidate]] = (),
) -> Cover:
    """The cheapest way to cover ``count`` ops, forward and backward.

    Nodes are the gaps between ops, candidates are edges, and a cover is a
    shortest path. A joint pair takes its window on both sides: an outer path
    chooses such pairs, and crosses the stretches between them at the cost of
    the best forward plus the best backward.
    """
    sides = (_gap_graph(count, forward), _gap_graph(count, backward))
    pairs: dict[tuple[int, int], tuple[Candidate, Candidate]] = {}
    for pair in joint:
        window = (pair[0].start, pair[0].stop)
        if window not in pairs or _weight(*pair) < _weight(*pairs[window]):
            pairs[window] = pair
    starts = sorted({0, *(stop for _, stop in pairs)})
    stops = {count, *(start for start, _ in pairs)}
    outer = nx.DiGraph()
    outer.add_nodes_from({0, count})
    stretches: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for start in starts:
        reached = [nx.single_source_dijkstra(graph, start) for graph in sides]
        (forward_cost, forward_path), (backward_cost, backward_path) = reached
        for stop in stops:
            if start < stop and stop in forward_cost and stop in backward_cost:
                outer.add_edge(start, stop, weight=forward_cost[stop] + backward_cost[stop])
                stretches[start, stop] = (forward_path[stop], backward_path[stop])
    for (start, stop), pair in pairs.items():
        weight = _weight(*pair)
        if not outer.has_edge(start, stop) or weight < outer.edges[start, stop]["weight"]:
            outer.add_edge(start, stop, weight=weight)
            stretches.pop((start, stop), None)
    chosen: tuple[list[Candidate], list[Candidate]] = ([], [])
    path = nx.dijkstra_path(outer, 0, count)
    for start, stop in pairwise(path):
        if (start, stop) not in stretches:
            for part, candidate in zip(chosen, pairs[start, stop], strict=True):
                part.append(candidate)
            continue
        for part, graph, gaps in zip(chosen, sides, stretches[start, stop], strict=True):
            part += [graph.edges[edge]["candidate"] for edge in pairwise(gaps)]
    cost = sum(candidate.cost for part in chosen for candidate in part)
    return Cover(tuple(chosen[0]), tuple(chosen[1]), cost)


def _gap_graph(count: int, candidates: Iterable[Candidate]) -> nx.DiGraph:
    """Gaps as nodes, and for each window its cheapest candidate as an edge."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(count + 1))
    for candidate in candidates:
        edge = (candidate.start, candidate.stop)
        weight = _weight(candidate)
        if not graph.has_edge(*edge) or weight < graph.edges[edge]["weight"]:
            graph.add_edge(*edge, weight=weight, candidate=candidate)
    return graph


def _weight(*candidates: Candidate) -> float:
    return sum(candidate.cost + STEP_COST for candidate in candidates)


class _Search:
    """The candidates of one graph under one key, and what was refused on the way."""

    def __init__(self, graph: OpGraph, key: PlanKey) -> None:
        self.graph = graph
        self.key = key
        count = len(graph.ops)
        self.first = next((i for i, op in enumerate(key.ops) if op.requires_grad), count)
        self.machine = MACHINES.get(key.device, MACHINES["cuda"])
        self.refusals: list[Refusal] = []

    def side(self, side: str, pinned: Sequence[tuple[int, FusedOperation]]) -> list[Candidate]:
        """Every candidate of ``side``; the pinned fused ops are the only ones of their places."""
        found = [*self.basic(side), *self._fused(side)]
        for start, fused in pinned:
            window = range(start, start + len(fused.basic_ops))
            found = _outside(window, found)
            found.append(
                self._candidate(window, side, fused, [(type(fused).__name__, len(window))])
            )
        return found

    def basic(self, side: str) -> list[Candidate]:
        """Every op on its own; no cost where no backward comes."""
        candidates = []
        for i, op in enumerate(self.graph.ops):
            window = range(i, i + 1)
            key = self.key.window(i, i + 1)
            names = op.kernels(side, key)
            if side == "backward" and i < self.first:
                names = ()
            kernels = [(name, int(last)) for last, name in _marking_last(names)]
            fuses_quantize = op.fuses_quantize(side, key)
            candidates.append(self._candidate(window, side, None, kernels, fuses_quantize))
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

    def _fused(self, side: str) -> list[Candidate]:
        """Every allowed window of the fusions of ``side``."""
        asked = (
            self._ask(fusion, window, bound, side) for fusion, window, bound in self._windows(side)
        )
        return [candidate for candidate in asked if candidate is not None]

    def _windows(self, side: str) -> Iterable[tuple[type[FusedOperation], range, tuple[Any, ...]]]:
        """Where the fusions of ``side`` match by type, closed and with a backward if needed."""
        ops = self.graph.ops
        for fusion in self.key.fusions:
            if fusion.side != side or not fusion.window:
                continue
            for start in range(len(ops)):
                for match in matches(fusion.window, ops, start):
                    window = range(start, match.stop)
                    reason = self._open_reason(window, side)
                    if reason is None:
                        yield fusion, window, match.bound
                    elif reason:
                        self._refuse(fusion, window, reason)

    def _open_reason(self, window: range, side: str) -> str | None:
        """Why no fusion can take ``window`` on ``side``; empty where nothing needs to be said."""
        if side == "backward" and window.stop <= self.first:
            return ""
        needs_backward = side != "forward" and self.key.requires_grad
        if needs_backward and window.start < self.first < window.stop:
            return f"backward ends at op {self.first}: nothing before it needs a gradient."
        return self.graph.channels_inside(window.start, window.stop)

    def _ask(
        self, fusion: type[FusedOperation], window: range, bound: tuple[Any, ...], side: str
    ) -> Candidate | None:
        """The candidate of ``fusion`` over ``window``, or None once its refusal is kept."""
        key = self.key.window(window.start, window.stop)
        try:
            reason = fusion.refuses(*bound, key=key)
            kernels = fusion.kernels(*bound, side=side, key=key) if reason is None else ()
            fuses_quantize = reason is None and fusion.fuses_quantize(*bound, side=side, key=key)
        except Exception as error:  # a broken fusion must not break the pipeline
            reason = f"{fusion.__name__} raised {type(error).__name__}: {error}"
            warnings.warn(
                f"Fusion {fusion.__name__} is not used: asked about ops {_listed(window)}, it "
                f"raised {type(error).__name__}: {error}",
                stacklevel=2,
            )
        if reason is None and sum(covered for _, covered in kernels) != len(window):
            reason = f"its kernels {kernels} do not cover the {len(window)} ops of the window."
        if reason is not None:
            self._refuse(fusion, window, reason)
            return None
        return self._candidate(window, side, fusion, kernels, fuses_quantize)

    def _refuse(self, fusion: type[FusedOperation], window: range, reason: str) -> None:
        refusal = Refusal(fusion.__name__, fusion.side, tuple(window), reason)
        # A joint window is asked about on both sides, and after the wider ones that it is part of.
        if fusion.side != "joint" or not any(
            (other.fusion, other.reason) == (fusion.__name__, reason)
            and set(refusal.ops) <= set(other.ops)
            for other in self.refusals
        ):
            self.refusals.append(refusal)

    def _candidate(
        self,
        window: range,
        side: str,
        run: type[FusedOperation] | FusedOperation | None,
        kernels: Sequence[tuple[str, int]],
        fuses_quantize: bool = False,
    ) -> Candidate:
        """Cost a window from the kernels it launches and the bytes each must move."""
        token_bytes = param_bytes = 0
        done = 0
        recomputes = run is not None and run.recomputes
        for _, covered in kernels:
            if covered == 0:
                continue
            low, high = window.start + done, window.start + done + covered
            if side == "backward":
                low, high = window.stop - done - covered, window.stop - done
            for_tokens, for_params = self.graph.window_bytes(low, high, side, recomputes=recomputes)
            token_bytes += for_tokens
            param_bytes += for_params
            done += covered
        names = [name for name, _ in kernels]
        if side == "forward" or window.stop > self.first:
            before = self.graph.quantize_kernels(window.start, window.stop, side)
            names = [*(name for name, _, _ in before), *names]
            token_bytes += sum(for_tokens for _, for_tokens, _ in before)
            param_bytes += sum(for_params for _, _, for_params in before)
            after = self.graph.emitting_bytes(window.start, window.stop, side)
            if after is not None and not fuses_quantize:
                names.append("quantize")
                token_bytes += after
        a_token = token_bytes / self.graph.tokens
        traffic = a_token * NOMINAL_TOKENS + param_bytes
        cost = traffic / self.machine.bandwidth + len(names) * self.machine.launch
        fusion = None if run is None else (run if isinstance(run, type) else type(run)).__name__
        step = Step(
            ops=tuple(window),
            fusion=fusion,
            kernel=", ".join(names),
            bytes_per_token=a_token + param_bytes / NOMINAL_TOKENS,
            microseconds=cost * 1e6,
            emits=self.graph.quant_spec(window.stop if side == "forward" else window.start, side),
        )
        return Candidate(window.start, window.stop, cost, run, step)


def _marking_last(names: Sequence[str]) -> list[tuple[bool, str]]:
    return [(number + 1 == len(names), name) for number, name in enumerate(names)]


def _line_bytes(graph: OpGraph, side: str) -> tuple[float, ...]:
    return tuple(graph.gap_bytes(gap, side) / graph.tokens for gap in range(len(graph.main_specs)))


def _listed(window: range) -> str:
    return str(window.start) if len(window) == 1 else f"{window.start}-{window.stop - 1}"


def _unchosen(candidates: Sequence[Candidate], cover: Sequence[Candidate]) -> list[Refusal]:
    """For each fused candidate that the cover does not use, what using it would cost."""
    count = cover[-1].stop if cover else 0
    graph = _gap_graph(count, candidates)
    before = nx.single_source_dijkstra_path_length(graph, 0)
    after = nx.single_source_dijkstra_path_length(graph.reverse(copy=False), count)
    best = sum(_weight(candidate) for candidate in cover)
    refusals = []
    for candidate in candidates:
        fusion = candidate.run
        if fusion is None or isinstance(fusion, FusedOperation):
            continue
        if any(
            used.run is fusion and used.start <= candidate.start and candidate.stop <= used.stop
            for used in cover
        ):
            continue
        extra = before[candidate.start] + _weight(candidate) + after[candidate.stop] - best
        refusals.append(_unchosen_refusal(candidate, extra))
    return refusals


def _unchosen_joint(
    count: int,
    forward: Sequence[Candidate],
    backward: Sequence[Candidate],
    joint: Sequence[tuple[Candidate, Candidate]],
    cover: Cover,
) -> list[Refusal]:
    """For each joint window that the cover does not use, what using it would cost."""
    refusals = []
    for pair in joint:
        window = range(pair[0].start, pair[0].stop)
        if not any(
            used.run is pair[0].run and used.start <= window.start and window.stop <= used.stop
            for used in cover.forward
        ):
            forced = cheapest_cover(
                count,
                _outside(window, forward),
                _outside(window, backward),
                [*(other for other in joint if _outside(window, other[:1])), pair],
            )
            refusals.append(_unchosen_refusal(pair[0], forced.cost - cover.cost))
    return refusals


def _unchosen_refusal(candidate: Candidate, extra: float) -> Refusal:
    """That ``candidate`` could run, and the seconds by which its best cover costs more."""
    assert isinstance(candidate.run, type)
    if extra > STEP_COST * len(candidate.step.ops):
        reason = f"possible, but the chosen cover is {extra * 1e6:.2f} us cheaper."
    elif extra > -STEP_COST:
        reason = "possible, but another cover costs the same with no more steps."
    else:
        reason = (
            "possible, but a joint fusion takes these ops, and is cheaper on both sides in all."
        )
    return Refusal(candidate.run.__name__, candidate.run.side, candidate.step.ops, reason)


def _outside(window: range, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that share no op with ``window``."""
    return [c for c in candidates if c.stop <= window.start or c.start >= window.stop]


def _operation(
    ops: Sequence[BasicOperation],
    candidate: Candidate,
    made: dict[tuple[int, int, Any], FusibleOperation],
) -> tuple[FusibleOperation, tuple[int, ...]]:
    """The operation that runs ``candidate``; a joint window gets one for both sides."""
    window = range(candidate.start, candidate.stop)
    if candidate.run is None:
        return ops[window.start], tuple(window)
    if isinstance(candidate.run, FusedOperation):
        return candidate.run, tuple(window)
    place = (window.start, window.stop, candidate.run)
    if place not in made:
        made[place] = candidate.run([ops[i] for i in window])
    return made[place], tuple(window)


Pinned = dict[str, list[tuple[int, FusedOperation]]]


def _apply_registered(graph: OpGraph, key: PlanKey, registered: RegisteredFusions) -> Pinned:
    """The fused ops that registered functions put in, with where they start, for each side."""

    def run(functions: Iterable[FusionFunction], start: list[Any]) -> list[Any]:
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
    """Refuse a fusion that does not implement what it runs on ``side``.

    Raises
    ------
    InputTypeError
    """
    for half in ("forward", "backward") if side == "joint" else (side,):
        method = f"fuser_{half}"
        if getattr(fusion, method) is getattr(FusibleOperation, method):
            raise InputTypeError(
                f"{fusion.__name__} has no {method}, which a {side} fusion must implement."
            )


def _check_covers(ops: Sequence[BasicOperation], result: Sequence[Any], function: Any) -> None:
    flat: list[Any] = []
    for op in result:
        flat.extend(op.basic_ops if isinstance(op, FusedOperation) else [op])
    if len(flat) != len(ops) or any(a is not b for a, b in zip(flat, ops, strict=True)):
        wanted = ", ".join(type(op).__name__ for op in ops)
        got = ", ".join(type(op).__name__ for op in flat)
        name = getattr(function, "__name__", repr(function))
        raise StateError(
            f"The registered fusion {name} returned ops that do not cover the pipeline: it holds "
            f"[{wanted}], and they replace [{got}]."
        )
