"""Rotations, routers, random states and dropouts of Transformer Engine's paths, by formulas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from said import said

import fuser
from fuser import recipe as recipes
from fuser.communication import PlannedGroup
from fuser.precision.contexts import AutocastState, recomputing_under
from fuser.te.pytorch import attention, distributed, rope, router, state, transformer

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROUNDING = {F32: 1e-5, F16: 2**-10, BF16: 2**-7}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_the_group_of_amaxes_is_that_of_the_forward() -> None:
    manager, group = state.FP8GlobalStateManager, PlannedGroup(2)
    assert manager.get_fp8_group() is None
    with recomputing_under(AutocastState(recipes.DelayedScaling(), group=group)):
        assert manager.get_fp8_group() is group
        assert manager.get_fp8_recipe() == recipes.DelayedScaling()


# -- rotations -----------------------------------------------------------------------


def angles_of(positions: torch.Tensor, rotated: int, base: float, paired: bool) -> torch.Tensor:
    """The angles of rotated features by the formula, in fp64."""
    inverse = base ** (-torch.arange(0, rotated, 2, dtype=F64) / rotated)
    angles = positions.double()[:, None] * inverse
    return angles.repeat_interleave(2, -1) if paired else torch.cat((angles, angles), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("options", "rotated"),
    [
        ({}, 8),
        ({"rotary_percent": 0.5}, 4),
        ({"rotary_base": 100.0}, 8),
        ({"rotary_percent": 0.25, "rotary_base": 500.0}, 2),
    ],
)
def test_angles_are_positions_times_inverse_frequencies(
    options: dict[str, float], rotated: int, interleaved: bool
) -> None:
    base = options.get("rotary_base", 10000.0)
    module = rope.RotaryPositionEmbedding(8, interleaved=interleaved, **options)
    for length, offset in ((1, 0), (6, 0), (6, 3)):
        found = module(length, offset) if offset else module(length)
        assert found.shape == (length, 1, 1, rotated)
        assert found.dtype is F32
        expected = angles_of(torch.arange(length) + offset, rotated, base, interleaved)
        torch.testing.assert_close(found[:, 0, 0].double(), expected, rtol=1e-6, atol=1e-6)


def interpolated(factor: float | None) -> rope.RotaryPositionEmbedding:
    """Angles of positions divided by ``factor``."""
    return rope.RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=factor, pretrained_max_position_embeddings=64
    )


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_a_factor_of_interpolation_divides_positions(factor: float) -> None:
    step = int(factor)
    assert torch.equal(interpolated(factor)(4 * step)[::step], interpolated(None)(4))
    # The offset is a position too, and is divided.
    assert torch.equal(interpolated(factor)(4 * step, step)[::step], interpolated(None)(5)[1:])


def test_positions_are_interpolated_only_for_a_length_that_was_learned() -> None:
    """As in Transformer Engine: a factor alone, or a length alone, changes nothing."""
    plain = rope.RotaryPositionEmbedding(8)(12)
    factor = rope.RotaryPositionEmbedding(8, seq_len_interpolation_factor=4.0)
    length = rope.RotaryPositionEmbedding(8, pretrained_max_position_embeddings=4)
    assert torch.equal(factor(12), plain)
    assert torch.equal(length(12), plain)
    both = rope.RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=2.0, pretrained_max_position_embeddings=4
    )
    # Up to 8 positions are divided by 2; 16 end where 4 positions would.
    assert torch.equal(both(8)[::2], plain[:4])
    assert torch.equal(both(16)[::4], plain[:4])


@pytest.mark.parametrize("default", [BF16, F64])
def test_angles_are_in_fp32_whatever_the_default_dtype_is(default: torch.dtype) -> None:
    expected = rope.RotaryPositionEmbedding(32)(7)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = rope.RotaryPositionEmbedding(32)(7)
    finally:
        torch.set_default_dtype(before)
    assert found.dtype is F32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_angles_go_to_the_device_of_what_they_rotate(layout: Any) -> None:
    t = torch.empty(4, 4, 2, 8, device="meta")
    assert rope.apply_rotary_pos_emb(t, rope.RotaryPositionEmbedding(8)(6), layout).is_meta


def test_the_inverse_frequencies_are_saved() -> None:
    assert list(rope.RotaryPositionEmbedding(8).state_dict()) == ["inv_freq"]


def rotated_by_formula(
    t: torch.Tensor, places: torch.Tensor, rotated: int, paired: bool
) -> torch.Tensor:
    """``t``, ``[s, b, h, d]``, at ``places`` ``[s, b]``: products of complex numbers in fp64."""
    part, rest = t.double()[..., :rotated], t.double()[..., rotated:]
    inverse = 10000.0 ** (-torch.arange(0, rotated, 2, dtype=F64) / rotated)
    turns = torch.polar(torch.ones((), dtype=F64), places.double()[..., None, None] * inverse)
    pairs = part.unflatten(-1, (-1, 2) if paired else (2, -1))
    pairs = pairs if paired else pairs.transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous()) * turns
    turned = torch.view_as_real(numbers)
    turned = turned if paired else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2), rest), -1)


STARTS = {"none": None, "zeros": [0, 0, 0], "apart": [2, 0, 5]}


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [4, 8])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rotations_and_their_gradients_are_those_of_complex_numbers(
    dtype: torch.dtype, rotated: int, interleaved: bool, layout: Any, starts: str
) -> None:
    t = torch.randn(4, 3, 2, 8).to(dtype)
    begin = STARTS[starts]
    first = torch.zeros(3, dtype=torch.int64) if begin is None else torch.tensor(begin)
    places = torch.arange(4)[:, None] + first
    results = []
    for is_ours in (True, False):
        leaf = (t if is_ours else t.double()).detach().requires_grad_()
        if is_ours:
            angles = rope.RotaryPositionEmbedding(rotated, interleaved=interleaved)(9)
            given = leaf if layout == "sbhd" else leaf.transpose(0, 1)
            y = rope.apply_rotary_pos_emb(
                given, angles, layout, None if begin is None else first, interleaved
            )
            y = y if layout == "sbhd" else y.transpose(0, 1)
        else:
            y = rotated_by_formula(leaf, places, rotated, interleaved)
        (y * torch.arange(1.0, 1.0 + y.numel()).view(y.shape).to(y.dtype).sin()).sum().backward()
        assert leaf.grad is not None
        results.append((y.detach().double(), leaf.grad.double()))
        assert y.dtype is leaf.dtype
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("has_starts", [False, True], ids=["from 0", "from its own"])
@pytest.mark.parametrize("sizes", [[4, 5], [1, 0, 8], [9], [3, 3, 3]])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_packed_sequence_begins_at_its_position(
    sizes: list[int], interleaved: bool, has_starts: bool
) -> None:
    t = torch.randn(9, 2, 8)
    ends = torch.tensor([0, *sizes]).cumsum(0)
    begin = torch.arange(1, 1 + len(sizes)) * 3 if has_starts else torch.zeros(len(sizes)).long()
    angles = rope.RotaryPositionEmbedding(8, interleaved=interleaved)(18)
    y = rope.apply_rotary_pos_emb(
        *(t, angles, "thd", begin if has_starts else None, interleaved), cu_seqlens=ends
    )
    places = torch.cat([torch.arange(n) + int(i) for n, i in zip(sizes, begin, strict=True)])
    expected = rotated_by_formula(t[:, None], places[:, None], 8, interleaved)[:, 0]
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("starts", "count", "sentence"),
    [
        (None, 5, said("rope-apply-angles-positions", 5, 9)),
        ([0, 2], 6, said("rope-apply-angles-positions", 6, 7)),
        ([0, -1], 6, said("rope-apply-start-positions", -1)),
    ],
)
def test_a_packed_sequence_without_angles_is_refused(
    starts: list[int] | None, count: int, sentence: str
) -> None:
    angles, t = rope.RotaryPositionEmbedding(8)(count), torch.randn(9, 2, 8)
    ends = torch.tensor([0, 9] if starts is None else [0, 4, 9])
    first = None if starts is None else torch.tensor(starts)
    with pytest.raises(fuser.InputError, match=sentence):
        rope.apply_rotary_pos_emb(t, angles, "thd", first, cu_seqlens=ends)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("per_group", [1, 2])
def test_the_parts_of_one_projection_are_rotated_each_by_its_angles(
    per_group: int, starts: str, interleaved: bool, layout: Any
) -> None:
    groups, d = 2, 8
    q = torch.randn(4, 3, groups * per_group, d)
    k, v = torch.randn(2, 4, 3, groups, d)
    grouped_q = q.unflatten(2, (groups, per_group)).flatten(3)
    mixed = torch.cat((grouped_q, k, v), dim=-1)
    begin = STARTS[starts]
    first = torch.zeros(3, dtype=torch.int64) if begin is None else torch.tensor(begin)
    of_q = rope.RotaryPositionEmbedding(8, interleaved=interleaved)(9)
    of_k = rope.RotaryPositionEmbedding(4, interleaved=interleaved)(9)
    found = rope.apply_fused_qkv_rotary_pos_emb(
        mixed if layout == "sbhd" else mixed.transpose(0, 1),
        *(of_q, of_k, [per_group * d, d, d], layout, None if begin is None else first, interleaved),
    )
    places = torch.arange(4)[:, None] + first
    expected = (
        rotated_by_formula(q, places, 8, interleaved),
        rotated_by_formula(k, places, 4, interleaved),
        v.double(),
    )
    for part, wanted in zip(found, expected, strict=True):
        part = part if layout == "sbhd" else part.transpose(0, 1)
        torch.testing.assert_close(part.double(), wanted, rtol=1e-5, atol=1e-5)


# -- routers -------------------------------------------------------------------------

EXPERTS = 6
SCORES = [("softmax", False), ("softmax", True), ("sigmoid", False)]


def routed_by_formula(
    logits: torch.Tensor,
    k: int,
    score: str,
    pre: bool,
    scale: float | None,
    bias: torch.Tensor | None,
    groups: tuple[int, int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in the dtype of ``logits``, and the experts of each token, token by token."""
    rows, masks = [], []
    for row in logits:
        if score == "sigmoid":
            scores = 1 / (1 + (-row).exp())
        else:
            scores = (row - row.max()).exp() / (row - row.max()).exp().sum() if pre else row
        ranked = (scores if bias is None else scores + bias).detach()
        allowed = list(range(EXPERTS))
        if groups is not None:
            count, chosen = groups
            members = [g.tolist() for g in torch.arange(EXPERTS).chunk(count)]
            sums = [sum(sorted(ranked[m].tolist())[::-1][: k // chosen]) for m in members]
            best = sorted(range(count), key=lambda g: -sums[g])[:chosen]
            allowed = [e for g in best for e in members[g]]
        order = sorted(allowed, key=lambda e: -float(ranked[e]))[:k]
        taken = scores[order]
        if score == "softmax" and not pre:
            taken = (taken - taken.max()).exp() / (taken - taken.max()).exp().sum()
        if score == "sigmoid" and k > 1:
            taken = taken / taken.sum()
        if scale is not None:
            taken = taken * scale
        rows.append(torch.zeros_like(row).index_put((torch.tensor(order),), taken))
        masks.append(
            torch.zeros(EXPERTS, dtype=torch.bool).index_fill(0, torch.tensor(order), True)
        )
    return torch.stack(rows), torch.stack(masks)


def assert_routes_are_those_of_the_formula(dtype: torch.dtype, k: int, **options: Any) -> None:
    score, pre = options["score"], options["pre"]
    scale, bias, groups = (options.get(name) for name in ("scale", "bias", "groups"))
    # A quarter apart: no rounding to 16 bits changes the order.
    values = torch.stack([torch.randperm(EXPERTS) for _ in range(5)]) * 0.25 - 0.5
    logits = values.to(dtype)
    weights = torch.randn(5, EXPERTS)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    count, chosen = groups or (None, None)
    found, mask = router.fused_topk_with_score_function(
        ours, k, pre, count, chosen, scale, score, bias
    )
    expected, wanted = routed_by_formula(exact, k, score, pre, scale, bias, groups)
    assert torch.equal(mask, wanted)
    assert (found.dtype, mask.dtype) == (dtype, torch.bool)
    tolerance = 2 * ROUNDING[dtype] * (scale or 1)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    (found.float() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("score", "pre"), SCORES)
@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_probabilities_and_their_gradients_are_those_of_the_formula(
    k: int, score: str, pre: bool, dtype: torch.dtype
) -> None:
    biases = [None, torch.randn(EXPERTS)] if score == "sigmoid" else [None]
    for scale in (None, 2.5):
        for bias in biases:
            assert_routes_are_those_of_the_formula(
                dtype, k, score=score, pre=pre, scale=scale, bias=bias
            )


@pytest.mark.parametrize(("score", "pre"), SCORES)
@pytest.mark.parametrize(
    ("k", "groups"), [(1, (2, 1)), (2, (3, 2)), (2, (3, 1)), (3, (2, 1)), (4, (3, 2)), (3, (1, 1))]
)
def test_experts_are_those_of_the_groups_with_the_largest_sums(
    k: int, groups: tuple[int, int], score: str, pre: bool
) -> None:
    for _ in range(3):
        assert_routes_are_those_of_the_formula(F32, k, score=score, pre=pre, groups=groups)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_scores_of_the_loss_are_of_all_experts_and_sum_to_1(
    k: int, score: Any, dtype: torch.dtype
) -> None:
    logits = (torch.stack([torch.randperm(EXPERTS) for _ in range(5)]) * 0.25 - 0.5).to(dtype)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    mask, scores = router.fused_compute_score_for_moe_aux_loss(ours, k, score)
    values = exact.sigmoid() if score == "sigmoid" else exact.exp()
    expected = values / values.sum(-1, keepdim=True)
    assert scores.dtype is F32
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(mask, exact >= exact.topk(k).values[:, -1:])
    counts = mask.sum(0)
    loss = router.fused_moe_aux_loss(scores, counts, 5, EXPERTS, k, 0.5)
    shares = counts / (5 * k)
    wanted = 0.5 * EXPERTS * (shares * expected.mean(0)).sum()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    loss.backward()
    wanted.backward()
    assert ours.grad is not None
    tolerance = ROUNDING[dtype]
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=tolerance, atol=1e-6)


# -- random states -------------------------------------------------------------------


def test_the_states_of_a_program_are_those_of_the_tracker_that_was_changed_last() -> None:
    one, two = distributed.CudaRNGStatesTracker(), distributed.CudaRNGStatesTracker()
    one.add("a", 1)
    assert set(distributed.get_all_rng_states()) == {"a"}
    two.add("b", 1)  # seeds and names are those of a tracker
    two.add("c", 2)
    assert set(distributed.get_all_rng_states()) == {"b", "c"}
    saved = one.get_states()
    one.set_states(saved)
    assert set(distributed.get_all_rng_states()) == {"a"}
    two.set_states({"d": saved["a"]})
    assert set(distributed.get_all_rng_states()) == {"d"}
    one.reset()
    assert set(distributed.get_all_rng_states()) == {"d"}
    assert one.get_states() == {}
    one.add("a", 1)  # neither the name nor the seed is held any more
    assert set(distributed.get_all_rng_states()) == {"a"}
    assert torch.equal(distributed.get_all_rng_states()["a"], saved["a"])


def test_states_that_were_taken_draw_again_what_they_drew() -> None:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    saved = tracker.get_states()
    drawn = []
    for _ in range(2):
        with tracker.fork("a"):
            drawn.append(torch.rand(3))
        with tracker.fork("b"):
            drawn.append(torch.rand(3))
        tracker.set_states(dict(saved))
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert set(tracker.get_states()) == {"a", "b"}


def test_a_state_goes_on_and_the_others_come_back_after_an_error() -> None:
    tracker = distributed.CudaRNGStatesTracker()
    before = torch.get_rng_state()
    tracker.add("model-parallel-rng", 7)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = []
    with contextlib.suppress(ZeroDivisionError), tracker.fork():
        drawn.append(torch.rand(3))
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork():
        drawn.append(torch.rand(3))
    torch.manual_seed(7)
    assert torch.equal(torch.cat(drawn), torch.cat((torch.rand(3), torch.rand(3))))


def test_what_a_checkpoint_says_ends_with_it() -> None:
    def said() -> tuple[bool, bool]:
        return (
            distributed.is_fp8_activation_recompute_enabled(),
            distributed.in_fp8_activation_recompute_phase(),
        )

    for outer in ((True, False), (True, True), (False, False)):
        with distributed.activation_recompute_forward(*outer):
            assert said() == outer
            with distributed.activation_recompute_forward(True, True):
                assert said() == (True, True)
            assert said() == outer
        assert said() == (False, False)


# -- dropouts ------------------------------------------------------------------------


def layer_of(dropout: dict[str, float]) -> torch.nn.Module:
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **dropout}
    return transformer.TransformerLayer(32, 48, 4, **options)


DROPOUTS: dict[str, tuple[Callable[[float], Any], str]] = {
    "attention": (lambda p: attention.DotProductAttention(4, 8, attention_dropout=p), "heads"),
    "bshd attention": (
        lambda p: attention.DotProductAttention(4, 8, attention_dropout=p, qkv_format="bshd"),
        "heads",
    ),
    "masked attention": (
        lambda p: attention.DotProductAttention(4, 8, attention_dropout=p, window_size=(2, 0)),
        "heads",
    ),
    "multi-head attention": (
        lambda p: transformer.MultiheadAttention(32, 4, attention_dropout=p),
        "hidden",
    ),
    "layer, hidden": (lambda p: layer_of({"hidden_dropout": p}), "hidden"),
    "layer, attention": (lambda p: layer_of({"attention_dropout": p}), "hidden"),
    "op": (fuser.Dropout, "hidden"),
    "op in a Sequential": (
        lambda p: fuser.Sequential(fuser.Linear(32, 32), fuser.Dropout(p)),
        "hidden",
    ),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_a_dropout_draws_in_training_alone(name: str) -> None:
    make, takes = DROPOUTS[name]
    dropped, plain = make(0.5), make(0.0)
    plain.load_state_dict(dropped.state_dict())
    size = (6, 2, 4, 8) if takes == "heads" else (6, 2, 32)
    inputs = tuple(torch.randn(3 if takes == "heads" else 1, *size))

    def called(module: Any, seed: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = module(*leaves)
        y.square().sum().backward()
        return (y.detach(), *(leaf.grad for leaf in leaves))

    def are_equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    expected = called(plain.train(), 1)
    for _ in range(3):  # a later call may be recorded
        for seed in (1, 2):
            assert are_equal(called(dropped.eval(), seed), expected)
        one, other = (called(dropped.train(), seed) for seed in (1, 2))
        assert are_equal(called(dropped.train(), 1), one)
        assert not torch.equal(one[0], other[0])
        assert not torch.equal(one[0], expected[0])
        assert are_equal(called(plain.train(), 2), expected)


@pytest.mark.parametrize("name", ["attention", "multi-head attention", "layer, attention"])
def test_the_dropout_of_attention_draws_from_the_tracker(name: str) -> None:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    saved = tracker.get_states()
    options: dict[str, Any] = {"get_rng_state_tracker": lambda: tracker}
    size: tuple[int, ...] = (3, 6, 2, 4, 8) if name == "attention" else (1, 6, 2, 32)
    if name == "attention":
        module: Any = attention.DotProductAttention(4, 8, attention_dropout=0.5, **options)
    elif name == "multi-head attention":
        module = transformer.MultiheadAttention(32, 4, attention_dropout=0.5, **options)
    else:
        module = transformer.TransformerLayer(32, 48, 4, hidden_dropout=0.0, **options)
    inputs = tuple(torch.randn(size))
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tracker.set_states(dict(saved))
        before = torch.get_rng_state()
        results.append(module(*inputs))
        assert torch.equal(torch.get_rng_state(), before)
    again = module(*inputs)
    assert torch.equal(*results)
    assert not torch.equal(results[0], again)  # the state went on
    states = tracker.get_states()
    module.eval()(*inputs)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], states["model-parallel-rng"])
