"""Rows of the arguments of Transformer Engine's routers, permutations and padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from argument_rows import Of, ignores, refuses, sets
from rows_of_te_layers import Given, close
from torch.nn import functional as F
from torch.testing import assert_close

from fuser.te import pytorch as te
from fuser.te.pytorch import router

HERE = "fuser.te.pytorch"
_TOPK = f"{HERE}.router.fused_topk_with_score_function"
_SCORES = f"{HERE}.router.fused_compute_score_for_moe_aux_loss"
_AUX = f"{HERE}.router.fused_moe_aux_loss"
METHODS = tuple(f"{HERE}.{name}.forward" for name in ("Fp8Padding", "Fp8Unpadding"))


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- routers ---------------------------------------------------------------------------


def routed(
    logits: torch.Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    groups: tuple[int, int] | None = None,
    factor: float = 1.0,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and the mask of a router, token by token, in fp64."""
    probabilities = []
    for row in logits:
        scores = row.softmax(-1) if use_pre_softmax else row
        scores = row.sigmoid() if score_function == "sigmoid" else scores
        ranks = scores if expert_bias is None else scores + expert_bias
        experts = list(range(len(row)))
        if groups is not None:
            count, chosen = groups
            size = len(row) // count
            members = [experts[i * size : (i + 1) * size] for i in range(count)]
            best = topk // chosen
            sums = [float(ranks[group].detach().sort().values[-best:].sum()) for group in members]
            order = sorted(range(count), key=lambda i: -sums[i])[:chosen]
            experts = [expert for i in order for expert in members[i]]
        experts = sorted(experts, key=lambda i: -float(ranks[i].detach()))[:topk]
        taken = scores[experts]
        if score_function == "softmax" and not use_pre_softmax:
            taken = taken.softmax(-1)
        elif score_function == "sigmoid" and topk > 1:
            taken = taken / taken.sum()
        probabilities.append(torch.zeros_like(row).index_put((torch.tensor(experts),), taken))
    dense = torch.stack(probabilities)
    return dense * factor, dense != 0


_LOGITS = seeded(7, 8)
_BIAS = torch.linspace(-1.0, 1.0, 8)


def _is_routed(given: Given, topk: int, **settings: Any) -> None:
    """Probabilities, mask and gradient are those of the formula."""
    ours, theirs = _LOGITS.clone().requires_grad_(), _LOGITS.double().requires_grad_()
    probabilities, mask = router.fused_topk_with_score_function(
        **{"logits": ours, "topk": topk, **given}
    )
    expected, chosen = routed(theirs, topk, **settings)
    close(probabilities, expected)
    assert torch.equal(mask, chosen)
    dy = seeded(7, 8, seed=1)
    probabilities.backward(dy)
    expected.backward(dy.double())
    close(ours.grad, theirs.grad)


@sets(_TOPK, score_function="sigmoid")
def _sigmoids(given: Given) -> None:
    for topk in (1, 2, 8):
        _is_routed(given, topk, score_function="sigmoid")


@sets(_TOPK, use_pre_softmax=True)
def _softmax_of_all_experts(given: Given) -> None:
    for topk in (1, 2, 8):
        _is_routed(given, topk, use_pre_softmax=True)


@sets(_TOPK, topk=Of(3, instead=2))
def _experts_of_a_token(given: Given) -> None:
    for topk in (1, 2, 8):
        _is_routed({}, topk)
    _is_routed(given, 3)


@sets(_TOPK, scaling_factor=2.5)
def _scaled_probabilities(given: Given) -> None:
    _is_routed(given, 2, factor=2.5)


@sets(_TOPK, expert_bias=_BIAS)
def _a_bias_of_the_choice_alone(given: Given) -> None:
    own = {"score_function": "sigmoid"}
    for topk in (1, 2, 8):
        _is_routed(own | given, topk, score_function="sigmoid", expert_bias=_BIAS.double())


@sets(_TOPK, num_groups=Of(4, instead=2), group_topk=2)
def _experts_of_the_best_groups(given: Given) -> None:
    call = {"num_groups": 4, "group_topk": None} if "group_topk" not in given else {"num_groups": 4}
    if "num_groups" in given:
        call = {"group_topk": 2}
    _is_routed({**call, **given}, 4, groups=(4, 2))


@sets(_TOPK, logits=Of(_LOGITS, instead=2 * _LOGITS))
def _logits_of_the_router(given: Given) -> None:
    close(router.fused_topk_with_score_function(topk=2, **given)[0], routed(_LOGITS.double(), 2)[0])


@sets(
    _SCORES,
    logits=Of(_LOGITS, instead=2 * _LOGITS),
    topk=Of(3, instead=2),
    score_function=Of("sigmoid", instead="softmax"),
)
def _scores_of_all_experts(given: Given) -> None:
    for topk in (1, 8):
        _is_scored({"topk": topk, "score_function": "sigmoid"}, topk, "sigmoid")
    call = {"logits": _LOGITS, "topk": 3, "score_function": "sigmoid", **given}
    _is_scored(call, 3, "sigmoid")
    if "score_function" not in given:
        _is_scored({**call, "score_function": "softmax"}, 3, "softmax")


def _is_scored(call: Given, topk: int, score_function: str) -> None:
    """Mask, scores and gradient are those of the formula."""
    ours, theirs = _LOGITS.clone().requires_grad_(), _LOGITS.double().requires_grad_()
    logits = ours if call.get("logits", _LOGITS) is _LOGITS else call["logits"]
    mask, scores = router.fused_compute_score_for_moe_aux_loss(**{**call, "logits": logits})
    exact = theirs.sigmoid() if score_function == "sigmoid" else theirs.softmax(-1)
    exact = exact / exact.sum(-1, keepdim=True)
    close(scores, exact)
    assert torch.equal(mask, routed(_LOGITS.double(), topk)[1])
    dy = seeded(7, 8, seed=1)
    scores.backward(dy)
    exact.backward(dy.double())
    close(ours.grad, theirs.grad)


_AUX_CALL: Given = {
    "probs": _LOGITS.softmax(-1),
    "tokens_per_expert": torch.tensor([3, 1, 0, 4, 2, 1, 2, 1]),
    "total_num_tokens": 7,
    "num_experts": 8,
    "topk": 2,
    "coeff": 0.01,
}


@sets(
    _AUX,
    probs=Of(_AUX_CALL["probs"], instead=_LOGITS.sigmoid()),
    tokens_per_expert=Of(_AUX_CALL["tokens_per_expert"], instead=torch.arange(8)),
    total_num_tokens=Of(7, instead=14),
    num_experts=Of(8, instead=4),
    topk=Of(2, instead=1),
    coeff=Of(0.01, instead=0.02),
)
def _the_loss_that_balances_experts(given: Given) -> None:
    call = {**_AUX_CALL, **given}
    probs = call["probs"].clone().requires_grad_()
    loss = router.fused_moe_aux_loss(**{**call, "probs": probs})
    counts = _AUX_CALL["tokens_per_expert"].double()
    exact = (counts * _AUX_CALL["probs"].double().sum(0)).sum() * 0.01 * 8 / (2 * 7 * 7)
    assert_close(loss.double(), exact, atol=0.0, rtol=1e-5)
    loss.backward()
    assert_close(
        probs.grad.double(), (counts * 0.01 * 8 / (2 * 7 * 7)).expand(7, 8), rtol=1e-5, atol=0.0
    )


# -- rows of experts -------------------------------------------------------------------

TOKENS, OTHER_TOKENS = seeded(5, 6), seeded(5, 6, seed=1)
_MASK = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
_OTHER_MASK = _MASK.roll(1, 0)
_PROBS, _OTHER_PROBS = seeded(5, 3, seed=2).sigmoid(), seeded(5, 3, seed=3).sigmoid()
_PLACES = [(token, expert) for expert in range(3) for token in range(5) if _MASK[token, expert]]
_ROWS = torch.stack([TOKENS[token] for token, _ in _PLACES])


_ROW_MAP = te.moe_permute(TOKENS, _MASK)[1]
_OTHER_MAP = te.moe_permute(TOKENS, _OTHER_MASK)[1]


_DY_ROWS, _DY_TOKENS = seeded(7, 6, seed=4), seeded(5, 6, seed=5)


def _sums(weights: torch.Tensor | None = None, rows: torch.Tensor = _ROWS) -> torch.Tensor:
    """By token the sum of its rows, times its probabilities, in fp64."""
    sums = torch.zeros(5, 6, dtype=torch.float64)
    for row, (token, expert) in zip(rows.double(), _PLACES, strict=True):
        sums[token] += row * (1.0 if weights is None else float(weights[token, expert]))
    return sums


@sets(
    f"{HERE}.moe_permute",
    inp=Of(TOKENS, instead=OTHER_TOKENS),
    routing_map=Of(_MASK, instead=_OTHER_MASK),
)
def _copies_of_tokens_by_expert(given: Given) -> None:
    call = {"inp": TOKENS, "routing_map": _MASK, **given}
    tokens = call["inp"].clone().requires_grad_()
    rows, _ = te.moe_permute(**{**call, "inp": tokens})
    assert torch.equal(rows, _ROWS)
    rows.backward(_DY_ROWS)
    close(tokens.grad, _sums(rows=_DY_ROWS))


@sets(f"{HERE}.moe_permute", num_out_tokens=9)
def _more_rows_are_zeros(given: Given) -> None:
    rows, _ = te.moe_permute(TOKENS, _MASK, **given)
    assert torch.equal(rows, F.pad(_ROWS, (0, 0, 0, 2)))


@sets(f"{HERE}.moe_permute", map_type="index")
def _a_map_of_indices_is_refused(given: Given) -> None:
    refuses(lambda: te.moe_permute(TOKENS, _MASK, **given), "map_type='index'")


ignores(f"{HERE}.moe_permute", "no workspace is kept between calls", "max_token_num")


@sets(
    f"{HERE}.moe_permute_with_probs",
    inp=Of(TOKENS, instead=OTHER_TOKENS),
    probs=Of(_PROBS, instead=_OTHER_PROBS),
    routing_map=Of(_MASK, instead=_OTHER_MASK),
)
def _copies_with_their_probabilities(given: Given) -> None:
    call = {"inp": TOKENS, "probs": _PROBS, "routing_map": _MASK, **given}
    rows, probabilities, _ = te.moe_permute_with_probs(**call)
    assert torch.equal(rows, _ROWS)
    assert probabilities.tolist() == [float(_PROBS[place]) for place in _PLACES]


@sets(f"{HERE}.moe_permute_with_probs", num_out_tokens=9)
def _more_rows_have_no_probability(given: Given) -> None:
    rows, probabilities, _ = te.moe_permute_with_probs(TOKENS, _PROBS, _MASK, **given)
    assert torch.equal(rows, F.pad(_ROWS, (0, 0, 0, 2)))
    assert probabilities[7:].tolist() == [0.0, 0.0]


_COUNTS = _MASK.sum(0)


@sets(
    f"{HERE}.moe_permute_and_pad_with_probs",
    inp=Of(TOKENS, instead=OTHER_TOKENS),
    probs=Of(_PROBS, instead=_OTHER_PROBS),
    routing_map=Of(_MASK, instead=_MASK.roll(1, 0)),
    tokens_per_expert=Of(_COUNTS, instead=_COUNTS + 1),
    align_size=Of(4, instead=2),
)
def _copies_with_padding(given: Given) -> None:
    call = {"inp": TOKENS, "probs": _PROBS, "routing_map": _MASK, "tokens_per_expert": _COUNTS}
    rows, probabilities, _, offsets, sizes = te.moe_permute_and_pad_with_probs(
        **{**call, "align_size": 4, **given}
    )
    expected, weights = [], []
    for part, places in zip(
        _ROWS.split(_COUNTS.tolist()), _split(_PLACES, _COUNTS.tolist()), strict=True
    ):
        expected.append(F.pad(part, (0, 0, 0, 4 - len(part))))
        weights += [float(_PROBS[place]) for place in places] + [0.0] * (4 - len(part))
    assert torch.equal(rows, torch.cat(expected))
    assert probabilities.tolist() == weights
    assert offsets.tolist() == [0, 1, 3]
    assert sizes.tolist() == [4, 4, 4]


def _split(places: list[Any], sizes: list[int]) -> Iterator[list[Any]]:
    begin = 0
    for size in sizes:
        yield places[begin : begin + size]
        begin += size


@sets(
    f"{HERE}.moe_unpermute",
    inp=Of(_ROWS, instead=_ROWS + 1),
    row_id_map=Of(_ROW_MAP, instead=_OTHER_MAP),
    restore_shape=(5, 6),
)
def _sums_of_the_rows_of_a_token(given: Given) -> None:
    call = {"inp": _ROWS, "row_id_map": _ROW_MAP}
    if "restore_shape" not in given and given:
        call["restore_shape"] = (5, 6)  # type: ignore[assignment]
    close(te.moe_unpermute(**{**call, **given}), _sums())


@sets(f"{HERE}.moe_unpermute", merging_probs=_PROBS, probs=_PROBS)
def _weighted_sums(given: Given) -> None:
    rows, probs = (t.clone().requires_grad_() for t in (_ROWS, _PROBS))
    sums = te.moe_unpermute(rows, _ROW_MAP, restore_shape=(5, 6), **dict.fromkeys(given, probs))
    close(sums, _sums(_PROBS))
    sums.backward(_DY_TOKENS)
    dy = _DY_TOKENS.double()
    close(rows.grad, torch.stack([dy[place[0]] * _PROBS[place] for place in _PLACES]))
    of_probs = torch.zeros(5, 3, dtype=torch.float64)
    for row, place in zip(_ROWS.double(), _PLACES, strict=True):
        of_probs[place] = row @ dy[place[0]]
    close(probs.grad, of_probs)


@sets(f"{HERE}.moe_unpermute", map_type="index")
def _a_map_of_indices_is_refused_too(given: Given) -> None:
    refuses(
        lambda: te.moe_unpermute(_ROWS, _ROW_MAP, restore_shape=(5, 6), **given),
        "map_type='index'",
    )


ignores(f"{HERE}.moe_unpermute", "the map says which rows are padding", "pad_offsets")

_SIZES, _ORDER = torch.tensor([2, 0, 3]), torch.tensor([2, 0, 1])
_CHUNKS: Given = {
    "inp": Of(TOKENS, instead=OTHER_TOKENS),
    "split_sizes": Of(_SIZES, instead=torch.tensor([3, 0, 2])),
    "sorted_index": Of(_ORDER, instead=torch.tensor([0, 1, 2])),
}
_CHUNK_CALL: Given = {"inp": TOKENS, "split_sizes": _SIZES, "sorted_index": _ORDER}


@sets(f"{HERE}.moe_sort_chunks_by_index", **_CHUNKS)
def _chunks_in_another_order(given: Given) -> None:
    rows = te.moe_sort_chunks_by_index(**{**_CHUNK_CALL, **given})
    assert torch.equal(rows, torch.cat((TOKENS[2:], TOKENS[:2])))


_CHUNK_PROBS = torch.arange(5.0)


@sets(
    f"{HERE}.moe_sort_chunks_by_index_with_probs",
    **_CHUNKS,
    probs=Of(_CHUNK_PROBS, instead=_CHUNK_PROBS + 1),
)
def _chunks_with_their_probabilities(given: Given) -> None:
    call = {**_CHUNK_CALL, "probs": _CHUNK_PROBS, **given}
    rows, probabilities = te.moe_sort_chunks_by_index_with_probs(**call)
    assert torch.equal(rows, torch.cat((TOKENS[2:], TOKENS[:2])))
    assert probabilities.tolist() == [2.0, 3.0, 4.0, 0.0, 1.0]


_PADDED = torch.cat((TOKENS[:2], torch.zeros(2, 6), TOKENS[2:], torch.zeros(1, 6)))


@sets(f"{HERE}.Fp8Padding", num_gemms=Of(2, instead=3), align_size=4)
def _rows_of_padding(given: Given) -> None:
    options = {
        "num_gemms": 2,
        **({} if given == {} or "align_size" in given else {"align_size": 4}),
    }
    rows, sizes = te.Fp8Padding(**{**options, **given})(TOKENS, [2, 3])
    assert sizes == [4, 4]
    assert torch.equal(rows, _PADDED)
    assert torch.equal(te.Fp8Unpadding(**{**options, **given})(rows, [2, 3]), TOKENS)


@sets(
    f"{HERE}.Fp8Padding.forward",
    inp=Of(TOKENS, instead=OTHER_TOKENS),
    m_splits=Of([2, 3], instead=[3, 2]),
)
def _rows_that_get_padding(given: Given) -> None:
    rows, sizes = te.Fp8Padding(2, 4)(**{"inp": TOKENS, "m_splits": [2, 3], **given})
    assert sizes == [4, 4]
    assert torch.equal(rows, _PADDED)


@sets(
    f"{HERE}.Fp8Unpadding.forward",
    inp=Of(_PADDED, instead=2 * _PADDED),
    m_splits=Of([2, 3], instead=[3, 2]),
)
def _rows_that_lose_padding(given: Given) -> None:
    rows = te.Fp8Unpadding(2, 4)(**{"inp": _PADDED, "m_splits": [2, 3], **given})
    assert torch.equal(rows, TOKENS)
