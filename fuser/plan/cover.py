"""Covers: the cheapest way to run all ops, as a shortest path over candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from fuser.op import FusedOperation
from fuser.plan.plan import Refusal, Step

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

    @property
    def weight(self) -> float:
        """The cost by which covers are compared."""
        return self.cost + STEP_COST


@dataclass(frozen=True)
class Cover:
    """The chosen candidates of each side, in pipeline order, and their total cost."""

    forward: tuple[Candidate, ...]
    backward: tuple[Candidate, ...]
    cost: float


class _Stretch(NamedTuple):
    """A way to run ops ``start`` to ``stop - 1`` on both sides: a joint pair, or covers of each."""

    start: int
    stop: int
    weight: float
    forward: tuple[Candidate, ...]
    backward: tuple[Candidate, ...]


def cheapest_cover(
    count: int,
    forward: Sequence[Candidate],
    backward: Sequence[Candidate],
    joint: Sequence[tuple[Candidate, Candidate]] = (),
) -> Cover:
    """The cheapest way to cover ``count`` ops, forward and backward.

    Nodes are the gaps between ops, candidates are edges, and a cover is a
    shortest path. A joint pair covers its window on both sides. An outer path
    chooses the pairs; a stretch between two pairs costs its best forward plus
    its best backward.
    """
    stretches = []
    for start in sorted({0, *(pair[0].stop for pair in joint)}):
        paths = [_cheapest_from(start, side) for side in (forward, backward)]
        for stop in sorted({count, *(pair[0].start for pair in joint)}):
            if start < stop and all(stop in reached for reached in paths):
                (weight, of_forward), (other, of_backward) = (reached[stop] for reached in paths)
                stretches.append(_Stretch(start, stop, weight + other, of_forward, of_backward))
    stretches += [_Stretch(a.start, a.stop, a.weight + b.weight, (a,), (b,)) for a, b in joint]
    _, chosen = _cheapest_from(0, stretches)[count]
    forward_run = [candidate for stretch in chosen for candidate in stretch.forward]
    backward_run = [candidate for stretch in chosen for candidate in stretch.backward]
    cost = sum(candidate.cost for candidate in (*forward_run, *backward_run))
    return Cover(tuple(forward_run), tuple(backward_run), cost)


class _Edge(Protocol):
    """What leads from a gap between ops to a later one."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def weight(self) -> float: ...


Edge = TypeVar("Edge", bound=_Edge)


def _cheapest_from(start: int, edges: Iterable[Edge]) -> dict[int, tuple[float, tuple[Edge, ...]]]:
    """The cheapest path from gap ``start`` to each gap that is reached: its weight and edges."""
    paths: dict[int, tuple[float, tuple[Edge, ...]]] = {start: (0.0, ())}
    for edge in sorted(edges, key=lambda edge: edge.start):
        if edge.start in paths:
            weight, before = paths[edge.start]
            weight += edge.weight
            if edge.stop not in paths or weight < paths[edge.stop][0]:
                paths[edge.stop] = (weight, (*before, edge))
    return paths


def unchosen(candidates: Sequence[Candidate], cover: Sequence[Candidate]) -> list[Refusal]:
    """A refusal for each fused candidate that the cover does not use, with its extra cost."""
    count = cover[-1].stop if cover else 0
    before = _cheapest_from(0, candidates)
    after = {stop: _cheapest_from(stop, candidates)[count] for stop in {c.stop for c in candidates}}
    best = sum(candidate.weight for candidate in cover)
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
        around = before[candidate.start][0] + after[candidate.stop][0]
        refusals.append(_unchosen_refusal(candidate, around + candidate.weight - best))
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
        window = range(pair[0].start, pair[0].stop)
        if not any(
            used.run is pair[0].run and used.start <= window.start and window.stop <= used.stop
            for used in cover.forward
        ):
            forced = cheapest_cover(
                count,
                outside(window, forward),
                outside(window, backward),
                [*(other for other in joint if outside(window, other[:1])), pair],
            )
            refusals.append(_unchosen_refusal(pair[0], forced.cost - cover.cost))
    return refusals


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
