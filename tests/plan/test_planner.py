"""The planner: the cheapest cover against brute force, windows, and the bytes model."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from fresh import python
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import BENCHMARKS
from samples import examples

import fuser
from fuser.op import BasicOperation, FusedOperation, OperationContext
from fuser.plan.cost import NOMINAL_TOKENS
from fuser.plan.cover import Candidate, cheapest_cover
from fuser.plan.devices import CPU
from fuser.plan.graph import OpGraph, extra_input_sources
from fuser.plan.window import Many, OneOf, Optional, matches
from fuser.specs import TensorSpec

sys.path.append(str(BENCHMARKS))

from planning import feed_forward_ops

# A power of two near a microsecond: sums of multiples are exact, and a step's
# tie-breaking cost stays far below one unit.
UNIT = 2.0**-20

Pair = tuple[Candidate, Candidate]


# -- the cheapest cover -------------------------------------------------------------


@st.composite
def planning_problems(
    draw: st.DrawFn,
) -> tuple[int, list[Candidate], list[Candidate], list[Pair]]:
    """A chain of up to 8 ops, its forward and backward candidates, and joint pairs."""
    count = draw(st.integers(1, 8))
    costs = st.integers(0, 9).map(lambda units: units * UNIT)

    def windows(most: int) -> list[tuple[int, int]]:
        starts = st.integers(0, count - 1)
        window = starts.flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, count)))
        return draw(st.lists(window, max_size=most))

    def side() -> list[Candidate]:
        single = [Candidate(i, i + 1, draw(costs)) for i in range(count)]
        fused = [Candidate(start, stop, draw(costs)) for start, stop in windows(12)]
        return draw(st.permutations(single + fused))

    joint = [
        (Candidate(start, stop, draw(costs)), Candidate(start, stop, draw(costs)))
        for start, stop in windows(6)
    ]
    return count, side(), side(), joint


def all_covers(count: int, candidates: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Every way to lay candidates end to end from gap 0 to gap ``count``."""
    by_start: dict[int, list[Any]] = {}
    for candidate in candidates:
        by_start.setdefault(candidate.start, []).append(candidate)

    def extend(at: int, chosen: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if at == count:
            yield chosen
        for candidate in by_start.get(at, ()):
            yield from extend(candidate.stop, (*chosen, candidate))

    return extend(0, ())


def cheapest_by_brute_force(
    count: int, forward: list[Candidate], backward: list[Candidate], joint: list[Pair]
) -> tuple[float, int]:
    """Cost and number of steps of the best cover, over every cover of both sides.

    Two covers go together if they hold the same joint pairs.
    """
    best: list[dict[frozenset[int], tuple[float, int]]] = [{}, {}]
    for side, (single, halves) in enumerate(
        [(forward, [pair[0] for pair in joint]), (backward, [pair[1] for pair in joint])]
    ):
        numbers = {id(half): number for number, half in enumerate(halves)}
        for cover in all_covers(count, [*single, *halves]):
            pairs = frozenset(numbers[id(c)] for c in cover if id(c) in numbers)
            found = (sum(c.cost for c in cover), len(cover))
            best[side][pairs] = min(found, best[side].get(pairs, found))
    totals = [
        (cost + best[1][pairs][0], steps + best[1][pairs][1])
        for pairs, (cost, steps) in best[0].items()
        if pairs in best[1]
    ]
    return min(totals)


@settings(max_examples=examples(400), derandomize=True, deadline=None, database=None)
@given(planning_problems())
def test_the_cover_is_the_cheapest_of_all(
    problem: tuple[int, list[Candidate], list[Candidate], list[Pair]],
) -> None:
    count, forward, backward, joint = problem
    cover = cheapest_cover(count, forward, backward, joint)
    cost, steps = cheapest_by_brute_force(*problem)
    assert cover.cost == cost
    assert len(cover.forward) + len(cover.backward) == steps


@settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
@given(planning_problems())
def test_the_cover_is_made_of_given_candidates_and_whole_pairs(
    problem: tuple[int, list[Candidate], list[Candidate], list[Pair]],
) -> None:
    count, forward, backward, joint = problem
    cover = cheapest_cover(count, forward, backward, joint)
    for part in (cover.forward, cover.backward):
        assert [c.start for c in part] == [0, *(c.stop for c in part[:-1])]
        assert part[-1].stop == count
    alone = ({id(c) for c in forward}, {id(c) for c in backward})
    tied = [
        [id(c) for c in part if id(c) not in known]
        for part, known in zip((cover.forward, cover.backward), alone, strict=True)
    ]
    pairs = {id(f): id(b) for f, b in joint}
    assert [pairs[half] for half in tied[0]] == tied[1]


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(planning_problems())
def test_without_joint_windows_the_two_sides_are_independent(
    problem: tuple[int, list[Candidate], list[Candidate], list[Pair]],
) -> None:
    count, forward, backward, _ = problem
    both = cheapest_cover(count, forward, backward)
    assert cheapest_cover(count, forward, forward).forward == both.forward
    assert cheapest_cover(count, backward, backward).backward == both.backward


def test_no_ops_have_an_empty_cover() -> None:
    cover = cheapest_cover(0, [], [])
    assert (cover.forward, cover.backward, cover.cost) == ((), (), 0)


def test_of_two_covers_that_cost_the_same_the_one_with_fewer_steps_is_taken() -> None:
    single = [Candidate(i, i + 1, UNIT) for i in range(4)]
    whole, half = Candidate(0, 4, 4 * UNIT), Candidate(0, 2, 2 * UNIT)
    cover = cheapest_cover(4, [*single, half, whole], [*single, half])
    assert cover.forward == (whole,)
    assert cover.backward == (half, single[2], single[3])


def test_of_two_equal_windows_the_first_is_taken() -> None:
    first, second = Candidate(0, 2, UNIT), Candidate(0, 2, UNIT)
    cover = cheapest_cover(2, [first, second], [second, first])
    assert cover.forward[0] is first
    assert cover.backward[0] is second


def test_a_joint_window_ties_both_sides() -> None:
    """Worth it as a pair, though each half alone would lose to something else."""
    single = [Candidate(i, i + 1, 3 * UNIT) for i in range(3)]
    forward_only = Candidate(0, 2, 2 * UNIT)
    pair = (Candidate(0, 2, 4 * UNIT), Candidate(0, 2, UNIT))
    cover = cheapest_cover(3, [*single, forward_only], single, [pair])
    assert cover.forward == (pair[0], single[2])
    assert cover.backward == (pair[1], single[2])
    dearer = (Candidate(0, 2, 8 * UNIT), Candidate(0, 2, UNIT))
    cover = cheapest_cover(3, [*single, forward_only], single, [dearer])
    assert cover.forward == (forward_only, single[2])
    assert cover.backward == tuple(single)


# -- windows ------------------------------------------------------------------------


class _Plain(BasicOperation):
    """Passes on what it gets."""

    def op_forward(
        self, ctx: OperationContext, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output, ()


class _Other(_Plain):
    """Another op: a new computation."""

    def op_forward(
        self, ctx: OperationContext, input_: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return input_ * 1


class _Renamed(_Plain):
    """Computes as its base does."""


class _Changed(_Plain):
    """Computes something else in backward."""

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output * 2, ()


KINDS = (_Plain, _Other, _Renamed, _Changed)
# Which op may stand for which type: an op that overrides what its base computes may not.
STANDS_FOR = {(kind, kind) for kind in KINDS} | {(_Renamed, _Plain)}

one_type = st.sampled_from(KINDS)
one_op = one_type | st.lists(one_type, min_size=1, max_size=3).map(lambda types: OneOf(*types))
several = one_op.map(Many)
patterns = st.lists(one_op | several | (one_op | several).map(Optional), max_size=4)
chains = st.lists(one_type, max_size=6).map(lambda kinds: [kind() for kind in kinds])


def readings(element: Any, ops: tuple[Any, ...]) -> list[Any]:
    """What ``element`` would be bound to if it took exactly ``ops``; empty if it cannot."""
    if isinstance(element, Optional):
        return ([None] if not ops else []) + readings(element.element, ops)
    if isinstance(element, Many):
        return [ops] if ops and all(readings(element.element, (op,)) for op in ops) else []
    types = element.types if isinstance(element, OneOf) else (element,)
    return list(ops) if len(ops) == 1 and {(type(ops[0]), t) for t in types} & STANDS_FOR else []


def all_readings(
    pattern: Sequence[Any], ops: Sequence[Any], start: int
) -> list[tuple[int, tuple[Any, ...]]]:
    """Every way to cut ops from ``start`` on into one run for each element of the pattern."""
    cuts = itertools.combinations_with_replacement(range(start, len(ops) + 1), len(pattern))
    found = []
    for ends in cuts:
        runs = zip((start, *ends), ends, strict=False)
        parts = [readings(e, tuple(ops[a:b])) for e, (a, b) in zip(pattern, runs, strict=True)]
        stop = ends[-1] if ends else start
        found += [(stop, bound) for bound in itertools.product(*parts)]
    return found


@settings(max_examples=examples(400), derandomize=True, deadline=None, database=None)
@given(patterns, chains, st.integers(0, 3))
def test_windows_match_wherever_brute_force_finds_them(
    pattern: list[Any], ops: list[BasicOperation], start: int
) -> None:
    start = min(start, len(ops))
    found = [(match.stop, match.bound) for match in matches(pattern, ops, start)]
    assert Counter(found) == Counter(all_readings(pattern, ops, start))


def test_a_window_binds_one_value_for_each_element() -> None:
    linear, bias, gelu = fuser.BasicLinear(4, 4), fuser.Bias(4), fuser.GELU()
    pattern = (fuser.BasicLinear, Optional(fuser.Bias), Many(OneOf(fuser.GELU, fuser.SiLU)))
    bound = [match.bound for match in matches(pattern, [linear, bias, gelu, gelu], 0)]
    assert bound == [(linear, bias, (gelu, gelu)), (linear, bias, (gelu,))]
    assert [match.bound for match in matches(pattern, [linear, gelu], 0)] == [
        (linear, None, (gelu,))
    ]
    assert list(matches(pattern, [linear, bias], 0)) == []
    assert list(matches(pattern, [linear, bias, gelu], 1)) == []


class _Fusion(FusedOperation):
    """One kernel over everything its window takes; for planning only."""

    side = "forward"
    fuser_forward: Any = None  # only planned
    fuser_backward: Any = None


def planned(
    ops: Sequence[BasicOperation], *fusions: type[FusedOperation], training: bool = True, **kw: Any
) -> fuser.FusionPlan:
    return fuser.Sequential(*ops, fusions=fusions).plan(
        torch.empty(2, 8, requires_grad=kw.get("requires_grad", True)), training=training
    )


def test_a_window_of_many_ops_takes_the_longest_run() -> None:
    class Chain(_Fusion):
        window = (fuser.BasicLinear, Optional(fuser.Bias), Many(OneOf(fuser.GELU, fuser.SiLU)))

    ops = [fuser.Linear(8, 8), fuser.GELU(), fuser.SiLU(), fuser.GELU(), fuser.ReLU(), fuser.GELU()]
    plan = planned(ops, Chain, training=False)
    assert [(step.ops, step.fusion) for step in plan.forward] == [
        ((0, 1, 2, 3, 4), "Chain"),
        ((5,), None),
        ((6,), None),
    ]


def test_what_matched_is_asked_about_with_the_key_of_its_window() -> None:
    asked: list[tuple[tuple[Any, ...], int]] = []

    class Asking(_Fusion):
        window = (fuser.GELU, Optional(fuser.ReLU), Many(fuser.SiLU))

        @classmethod
        def refuses(cls, *ops: Any, key: fuser.PlanKey) -> str | None:
            asked.append((ops, len(key.ops)))
            return "it only asks."

    gelu, first, second = fuser.GELU(), fuser.SiLU(), fuser.SiLU()
    fuser.Sequential(gelu, first, second, fusions=(Asking,))(torch.ones(2, 8))
    assert Counter(asked) == Counter(
        [((gelu, None, (first, second)), 3), ((gelu, None, (first,)), 2)]
    )
    plan = planned([gelu, first, second], Asking)
    assert {refusal.ops for refusal in plan.refusals} == {(0, 1), (0, 1, 2)}


def test_a_subclass_that_computes_something_else_is_not_fused() -> None:
    class Doubling(fuser.GELU):
        def op_forward(self, ctx: OperationContext, input_: torch.Tensor, *a: Any, **k: Any) -> Any:
            return 2 * super().op_forward(ctx, input_, *a, **k)

    class Named(fuser.GELU):
        pass

    fused = fuser.Sequential(fuser.Linear(8, 8), Named()).plan(torch.empty(2, 8))
    unfused = fuser.Sequential(fuser.Linear(8, 8), Doubling()).plan(torch.empty(2, 8))
    assert [step.ops for step in fused.forward] == [(0, 1, 2)]
    assert [step.ops for step in unfused.forward] == [(0, 1), (2,)]


def test_more_fusions_never_make_a_plan_dearer() -> None:
    def cost(fusions: Sequence[type[FusedOperation]]) -> float:
        plan = fuser.Sequential(*feed_forward_ops(12), fusions=fusions).plan(torch.empty(2, 8))
        return sum(step.microseconds for step in plan.forward + plan.backward)

    everything = cost(fuser.FUSIONS)
    for left_out in range(len(fuser.FUSIONS)):
        fewer = cost(fuser.FUSIONS[:left_out] + fuser.FUSIONS[left_out + 1 :])
        assert everything <= fewer + 1e-9
        assert fewer <= cost(()) + 1e-9


class _Joint(FusedOperation):
    """Two pointwise ops in one kernel, both halves."""

    window = (fuser.GELU, fuser.SiLU)
    side = "joint"
    fuser_forward: Any = None  # only planned
    fuser_backward: Any = None


def test_a_joint_fusion_runs_on_both_sides_or_on_none() -> None:
    class ForwardTail(_Fusion):
        window = (fuser.SiLU, fuser.ReLU)

    ops = [fuser.GELU(), fuser.SiLU(), fuser.ReLU()]
    plan = planned(ops, _Joint, ForwardTail)
    assert [(step.ops, step.fusion) for step in plan.forward] == [((0, 1), "_Joint"), ((2,), None)]
    assert [(step.ops, step.fusion) for step in plan.backward] == [((2,), None), ((0, 1), "_Joint")]
    plan = planned(ops, _Joint, ForwardTail, training=False)
    assert "_Joint" in {step.fusion for step in plan.forward}
    assert plan.backward == ()


def test_a_window_that_lost_to_a_joint_fusion_is_not_said_to_cost_the_same() -> None:
    class Cheap(_Fusion):
        window = (fuser.GELU, fuser.SiLU)

    class Pair(_Joint):
        @classmethod
        def kernels(cls, *ops: Any, side: str, key: fuser.PlanKey) -> tuple[tuple[str, int], ...]:
            return (("one", 2), ("more", 0)) if side == "forward" else (("one", 2),)

    plan = planned([fuser.GELU(), fuser.SiLU()], Pair, Cheap)
    assert [step.fusion for step in plan.forward + plan.backward] == ["Pair", "Pair"]
    (refusal,) = [r for r in plan.refusals if r.fusion == "Cheap"]
    assert "the same" not in refusal.reason


def test_a_joint_fusion_costs_nothing_in_backward_if_there_is_none() -> None:
    class Pair(_Joint):
        @classmethod
        def kernels(cls, *ops: Any, side: str, key: fuser.PlanKey) -> tuple[tuple[str, int], ...]:
            return (("one", 2),) if side == "forward" else (("one", 2), *[("slow", 0)] * 50)

    ops = [fuser.GELU(), fuser.SiLU(), fuser.Linear(8, 8)]
    plan = planned(ops, Pair, requires_grad=False)
    assert plan.forward[0].fusion == "Pair"
    assert [step.ops for step in plan.backward] == [(3,), (2,)]


def test_a_channel_inside_a_window_refuses_it() -> None:
    class Whole(_Fusion):
        window = (fuser.MakeExtraOutput, fuser.GELU, fuser.AddExtraInput)

    ops = [
        fuser.MakeExtraOutput().set_extra_output_channel(0, "skip"),
        fuser.GELU(),
        fuser.AddExtraInput().set_extra_input_channel(0, "skip"),
    ]
    plan = planned(ops, Whole)
    (refusal,) = plan.refusals
    assert refusal.ops == (0, 1, 2)
    for part in ("'skip'", "op 0 (MakeExtraOutput)", "op 2 (AddExtraInput)"):
        assert part in refusal.reason


# -- the bytes model ------------------------------------------------------------------

T = 10  # tokens


def graph_of(
    ops: Sequence[BasicOperation],
    x: torch.Tensor,
    *extras: torch.Tensor,
    training: bool = True,
) -> OpGraph:
    """The graph of ``ops`` bound to the key that such inputs have."""
    key = fuser.OperationFuser(ops).plan(x, *extras, training=training).key
    specs = [TensorSpec(tuple(t.shape), t.dtype) for t in (x, *extras)]
    graph = OpGraph(ops, extra_input_sources(ops), specs[0], specs[1:], None)
    graph.bind(key)
    return graph


def linear_bias_gelu(dtype: torch.dtype = torch.float32) -> list[BasicOperation]:
    return [fuser.BasicLinear(4, 6, dtype=dtype), fuser.Bias(6, dtype=dtype), fuser.GELU()]


# One tensor of T rows: x is 4 wide, all others 6. In fp32 that is 160 and 240 bytes.
X, Y = T * 4 * 4, T * 6 * 4
WEIGHT, BIAS = 6 * 4 * 4, 6 * 4


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((0, 1), (X + Y, WEIGHT)),
        ((1, 2), (Y + Y, BIAS)),
        ((2, 3), (Y + Y, 0)),  # saves the input that it reads: not moved again
        ((0, 2), (X + Y, WEIGHT + BIAS)),  # what the linear gives to the bias is free
        ((1, 3), (Y + Y + Y, BIAS)),  # GELU's input is inside, but written for backward
        ((0, 3), (X + Y + Y, WEIGHT + BIAS)),
    ],
)
def test_forward_bytes_in_training(window: tuple[int, int], expected: tuple[int, int]) -> None:
    graph = graph_of(linear_bias_gelu(), torch.empty(T, 4, requires_grad=True))
    assert graph.window_bytes(*window, "forward") == expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [((2, 3), (Y + Y, 0)), ((1, 3), (Y + Y, BIAS)), ((0, 3), (X + Y, WEIGHT + BIAS))],
)
def test_forward_bytes_without_backward_hold_nothing_saved(
    window: tuple[int, int], expected: tuple[int, int]
) -> None:
    graph = graph_of(linear_bias_gelu(), torch.empty(T, 4), training=False)
    assert graph.window_bytes(*window, "forward") == expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((2, 3), (Y + Y + Y, 0)),  # dy, the saved input, dx
        ((0, 1), (Y + X + X, 2 * WEIGHT)),  # dy, the saved x, dx; the weight and its gradient
        ((1, 3), (Y + Y + Y, 2 * BIAS)),
        ((0, 3), (Y + Y + X + X, 2 * (WEIGHT + BIAS))),
    ],
)
def test_backward_bytes(window: tuple[int, int], expected: tuple[int, int]) -> None:
    graph = graph_of(linear_bias_gelu(), torch.empty(T, 4, requires_grad=True))
    assert graph.window_bytes(*window, "backward") == expected


def test_a_bias_in_backward_reads_its_gradient_once_and_passes_it_on() -> None:
    """It sums dy, and hands the same dy to the op before it."""
    graph = graph_of(linear_bias_gelu(), torch.empty(T, 4, requires_grad=True))
    assert graph.window_bytes(1, 2, "backward")[0] == Y


def test_gradients_that_are_not_needed_cost_no_bytes() -> None:
    graph = graph_of(linear_bias_gelu(), torch.empty(T, 4))
    assert graph.window_bytes(0, 1, "backward") == (Y + X, 2 * WEIGHT)
    ops = linear_bias_gelu()
    ops[0].weight.requires_grad_(False)
    graph = graph_of(ops, torch.empty(T, 4, requires_grad=True))
    assert graph.window_bytes(0, 1, "backward") == (Y + X, WEIGHT)


def test_sixteen_bits_move_half() -> None:
    graph = graph_of(
        linear_bias_gelu(torch.bfloat16), torch.empty(T, 4, dtype=torch.bfloat16), training=False
    )
    assert graph.window_bytes(0, 3, "forward") == ((X + Y) // 2, (WEIGHT + BIAS) // 2)


def test_a_wider_input_is_read_in_its_own_dtype() -> None:
    graph = graph_of(linear_bias_gelu(torch.bfloat16), torch.empty(T, 4), training=False)
    assert graph.window_bytes(0, 1, "forward") == (X + Y // 2, WEIGHT // 2)


def residual_block() -> list[BasicOperation]:
    """x to a channel; RMSNorm, a linear without bias, and x added again; all 4 wide."""
    return [
        fuser.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        fuser.RMSNorm(4),
        fuser.BasicLinear(4, 4),
        fuser.AddExtraInput().set_extra_input_channel(0, "x"),
    ]


ROWS = 4 * T  # one fp32 statistic a row
SQUARE = 4 * 4 * 4


@pytest.mark.parametrize(
    ("window", "side", "expected"),
    [
        ((1, 2), "forward", (X + X + ROWS, 16)),  # x, y, rstd
        ((2, 4), "forward", (X + X + X, SQUARE)),  # normed, the residual, the sum
        ((3, 4), "forward", (X + X + X, 0)),
        ((1, 4), "forward", (X + X + X + ROWS, 16 + SQUARE)),  # x is read once; normed is saved
        ((0, 2), "forward", (X + X + ROWS, 16)),  # the channel carries x by reference
        ((3, 4), "backward", (X, 0)),  # dy goes on to both sides by reference
        ((2, 4), "backward", (X + X + X, 2 * SQUARE)),  # dy, saved, dx; dy again on the channel
        ((0, 1), "backward", (X + X + X, 0)),  # two gradients, their sum
        ((0, 2), "backward", (X + X + X + X + ROWS, 32)),  # dy, dx, saved x, d_residual, rstd
    ],
)
def test_bytes_of_a_residual_block(
    window: tuple[int, int], side: str, expected: tuple[int, int]
) -> None:
    graph = graph_of(residual_block(), torch.empty(T, 4, requires_grad=True))
    assert graph.window_bytes(*window, side) == expected


def test_an_extra_output_is_written_once_however_many_want_it() -> None:
    ops = [fuser.AddExtraInput(), fuser.MakeExtraOutput(), fuser.LayerNorm(4)]
    x = torch.empty(T, 4, requires_grad=True)
    graph = graph_of(ops, x, torch.empty(T, 4, requires_grad=True))
    # x, extra, y; z goes to the caller and is saved, which is one tensor; mean and rstd.
    assert graph.window_bytes(0, 3, "forward") == (4 * X + 2 * ROWS, 32)
    # dy, dz, dx (which is the extra's gradient too), saved z; statistics.
    assert graph.window_bytes(0, 3, "backward") == (4 * X + 2 * ROWS, 64)


def test_scales_and_statistics_are_counted_and_a_seed_is_not() -> None:
    x = torch.empty(T, 8, requires_grad=True)
    ops = [fuser.ScaledSwiGLU(), fuser.Dropout(0.5), fuser.RMSNorm(4)]
    graph = graph_of(ops, x, torch.empty(T))
    assert graph.window_bytes(0, 1, "forward") == (2 * X + X + ROWS, 0)
    assert graph.window_bytes(1, 2, "forward") == (X + X, 0)
    assert graph.window_bytes(1, 2, "backward") == (X + X, 0)
    assert graph.window_bytes(2, 3, "forward") == (X + X + ROWS, 16)


def test_a_step_costs_the_bytes_and_the_launches_of_its_kernels() -> None:
    plan = fuser.Sequential(*linear_bias_gelu()).plan(torch.empty(T, 4))
    (step,) = plan.forward
    assert (step.fusion, step.kernel) == ("ForwardLinearBiasActivation", "addmm, gelu")
    tokens, params = (X + Y) + (Y + Y), WEIGHT + BIAS
    assert step.bytes_per_token == tokens / T + params / NOMINAL_TOKENS
    seconds = (tokens / T * NOMINAL_TOKENS + params) / CPU.bandwidth + 2 * CPU.launch
    assert step.microseconds == pytest.approx(seconds * 1e6)
    assert plan.activation_bytes == (16, 24, 24, 24)


# Of a fusion's kernels: how many ops each finishes, and the numbers a token that all of them move.
# Widths are 16, 16, 8 and 8; backward begins with the last op, and reads each saved input.
BACKWARD_SPLITS = {
    (3,): 8 + (8 + 16 + 16) + 16,
    (1, 2): (8 + 8 + 8) + (8 + 16 + 16 + 16),
    (2, 1): (8 + 8 + 16 + 16) + (16 + 16 + 16),
    (0, 1, 0, 2): (8 + 8 + 8) + (8 + 16 + 16 + 16),
}
FORWARD_SPLITS = {
    (3,): 16 + 8,
    (1, 2): (16 + 16) + (16 + 8),
    (2, 1): (16 + 8) + (8 + 8),
    (0, 2, 0, 1): (16 + 8) + (8 + 8),
}


@pytest.mark.parametrize(
    ("side", "split", "moved"),
    [
        *(("backward", split, moved) for split, moved in BACKWARD_SPLITS.items()),
        *(("forward", split, moved) for split, moved in FORWARD_SPLITS.items()),
    ],
)
def test_a_fusions_kernels_cost_what_the_ops_that_each_finishes_move(
    side: str, split: tuple[int, ...], moved: int
) -> None:
    class Split(FusedOperation):
        window = (fuser.GELU, fuser.SwiGLU, fuser.SiLU)

        @classmethod
        def kernels(cls, *ops: Any, **where: Any) -> tuple[tuple[str, int], ...]:
            return tuple((f"kernel {i}", covered) for i, covered in enumerate(split))

        def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("planned alone")

        fuser_backward = fuser_forward

    Split.side = side  # type: ignore[assignment]
    model = fuser.Sequential(fuser.GELU(), fuser.SwiGLU(), fuser.SiLU(), fusions=(Split,))
    needs_grad = side == "backward"
    plan = model.plan(torch.empty(T, 16, requires_grad=needs_grad), training=needs_grad)
    (step,) = plan.steps(side)
    assert step.fusion == "Split"
    assert step.kernel == ", ".join(f"kernel {i}" for i in range(len(split)))
    assert step.bytes_per_token == 4 * moved
    seconds = 4 * moved * NOMINAL_TOKENS / CPU.bandwidth + len(split) * CPU.launch
    assert step.microseconds == pytest.approx(seconds * 1e6)


# -- speed ------------------------------------------------------------------------------


def test_a_cached_plan_costs_no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    import fuser.runtime.pipeline

    calls: list[fuser.PlanKey] = []
    real = fuser.runtime.pipeline.make_plan

    def counting(graph: Any, key: fuser.PlanKey, registered: Any) -> Any:
        calls.append(key)
        return real(graph, key, registered)

    monkeypatch.setattr(fuser.runtime.pipeline, "make_plan", counting)
    pipeline = fuser.OperationFuser([fuser.Linear(8, 8), fuser.GELU(), fuser.Linear(8, 8)])
    modes: list[dict[str, Any]] = [
        {"requires_grad": False, "enabled": True, "dtype": torch.float32},
        {"requires_grad": True, "enabled": True, "dtype": torch.float32},
        {"requires_grad": False, "enabled": False, "dtype": torch.float32},
        {"requires_grad": False, "enabled": True, "dtype": torch.bfloat16},
    ]
    for _ in range(3):
        for shape in ((2, 8), (5, 3, 8), (8,), (0, 8)):
            for mode in modes:
                x = torch.randn(shape, dtype=mode["dtype"]).requires_grad_(mode["requires_grad"])
                with torch.set_grad_enabled(mode["enabled"]):
                    pipeline(x)
                    pipeline.plan(x, training=mode["enabled"])
    assert len(calls) == len(set(calls)) == len(modes)
    assert pipeline.planned_count == len(modes) == len(pipeline.plans)


def test_two_inputs_that_differ_only_under_no_grad_share_a_plan() -> None:
    pipeline = fuser.OperationFuser([fuser.Linear(8, 8), fuser.GELU()])
    for requires_grad in (True, False):
        pipeline.plan(torch.empty(2, 8, requires_grad=requires_grad), training=False)
    assert pipeline.planned_count == 1


def test_networkx_is_imported_by_the_first_plan_and_nothing_heavy_before() -> None:
    code = """
import sys
import torch
before = set(sys.modules)
import fuser
added = {name for name in sys.modules if name not in before}
packages = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names)
assert packages <= {"fuser", "torch"}, packages
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed", "torch.export", "torch.testing")
heavy += ("torch.utils.flop_counter",)  # it imports Triton, which not every build of torch has
assert not [name for name in added if name.startswith(heavy)], added
model = fuser.Sequential(fuser.Linear(8, 8), fuser.GELU())
assert "networkx" not in sys.modules
model(torch.randn(2, 8))
assert "networkx" in sys.modules
"""
    run = python(["-c", code])
    assert run.returncode == 0, run.stderr
