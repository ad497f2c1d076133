"""Covers: the cheapest way to run all ops, as a shortest path over candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fuser.op import FusedOperation
from fuser.plan.plan import Refusal, Step

if TYPE_CHECKING:
    import networkx as nx

# Of two covers with equal modelled time, the one with fewer steps needs less host time.
STEP_COST = 1e-9

_NO_STEP = Step((), None, "", 0.0, 0.0)


@dataclass(frozen=True)
class Candidate:
    """One way to run ops ``start`` to ``stop - 1``, with its modelled seconds.

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


def cheapest_cover(
    count: int,
    forward: Iterable[Candidate],
    backward: Iterable[Candidate],
    joint: Iterable[tuple[Candidate, Candidate]] = (),
) -> Cover:
    """The cheapest way to cover ``count`` ops, forward and backward.

    Nodes are the gaps between ops, candidates are edges, and a cover is a
    shortest path. A joint pair covers its window on both sides. An outer path
    chooses the pairs; a stretch between two pairs costs its best forward plus
    its best backward.
    """
    import networkx as nx  # at the first plan: half of the modules that fuser imports

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
    """The digraph of gaps, with the cheapest candidate of each window as an edge."""
    import networkx as nx

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


def unchosen(candidates: Sequence[Candidate], cover: Sequence[Candidate]) -> list[Refusal]:
    """A refusal for each fused candidate that the cover does not use, with its extra cost."""
    import networkx as nx

    count = cover[-1].stop if cover else 0
    graph = _gap_graph(count, candidates)
    before = nx.single_source_dijkstra_path_length(graph, 0)
    after = nx.single_source_dijkstra_path_length(graph.reverse(copy=False), count)
    best = sum(_weight(candidate) for candidate in cover)
    refusals = []
    for candidate in candidates:
        is_fusion = candidate.run is not None and not isinstance(candidate.run, FusedOperation)
        if not is_fusion or _is_used(candidate, cover):
            continue
        extra = before[candidate.start] + _weight(candidate) + after[candidate.stop] - best
        refusals.append(_unchosen_refusal(candidate, extra))
    return refusals


def unchosen_joint(
    count: int,
    forward: Sequence[Candidate],
    backward: Sequence[Candidate],
    joint: Sequence[tuple[Candidate, Candidate]],
    cover: Cover,
) -> list[Refusal]:
    """A refusal for each joint window that the cover does not use, with its extra cost."""
    refusals = []
    for pair in joint:
        if not _is_used(pair[0], cover.forward):
            window = range(pair[0].start, pair[0].stop)
            others = [other for other in joint if outside(window, other[:1])]
            sides = outside(window, forward), outside(window, backward)
            forced = cheapest_cover(count, *sides, [*others, pair])
            refusals.append(_unchosen_refusal(pair[0], forced.cost - cover.cost))
    return refusals


def _is_used(candidate: Candidate, cover: Sequence[Candidate]) -> bool:
    """Whether the cover runs the ops of a candidate by the same fusion, perhaps with more."""
    return any(
        used.run is candidate.run and used.start <= candidate.start and candidate.stop <= used.stop
        for used in cover
    )


def _unchosen_refusal(candidate: Candidate, extra: float) -> Refusal:
    """The refusal of ``candidate``, whose best cover takes ``extra`` seconds more."""
    assert isinstance(candidate.run, type)
    if extra > STEP_COST * len(candidate.step.ops):
        reason = f"possible, but the chosen cover is {extra * 1e6:.2f} us cheaper."
    elif extra > -STEP_COST:
        reason = "possible, but another cover costs the same with no more steps."
    else:
        reason = (
            "possible, but a joint fusion takes these ops, and is cheaper for both sides together."
        )
    return Refusal(candidate.run.__name__, candidate.run.side, candidate.step.ops, reason)


def outside(window: range, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that have no op of ``window``."""
    return [c for c in candidates if c.stop <= window.start or c.start >= window.stop]
