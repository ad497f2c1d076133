"""Rows of the arguments of the router, of permutations, and of dispatch and combine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from argument_checks import (
    BF16,
    FP32,
    TOLERANCES,
    agrees,
    agrees_quantized,
    in_fp64,
    leaves,
    near,
    rank_0_of_2,
    refuses,
    results,
    untyped,
)
from argument_rows import Of, sets
from oracles import random_tensor
from torch.testing import assert_close

import fuser
from fuser import moe

TOKENS, EXPERTS, K = 5, 4, 2
X = random_tensor((TOKENS, 6), BF16, 1)
PROBS = random_tensor((TOKENS, K), BF16, 2).abs() + 0.25
INDICES = torch.tensor([[1, 0], [3, 1], [-1, 1], [0, 3], [1, 0]])
OTHERS = INDICES.flip(0).contiguous()
CAPACITY = 6


def _assignments(
    indices: torch.Tensor,
    probs: torch.Tensor | None,
    capacity: int | None = None,
    drop_policy: str = "position",
) -> list[tuple[int, int, int]]:
    """Expert, token and choice of each row, in their order, by loops."""
    every = [
        (int(indices[t, j]), t, j)
        for t in range(len(indices))
        for j in range(indices.shape[1])
        if indices[t, j] >= 0
    ]
    if capacity is not None and len(every) > capacity:
        if drop_policy == "probs":
            assert probs is not None
            ranked = sorted(every, key=lambda each: -float(probs.detach()[each[1], each[2]]))
            every = [each for each in every if each in ranked[:capacity]]
        else:
            every = every[:capacity]
    return sorted(every, key=lambda each: each[0])


def _permuted(
    x: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor, experts: int, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Rows, split sizes, probabilities of rows, and ``inverse_map``, in plain torch."""
    x = x.reshape(-1, x.shape[-1])
    rows = _assignments(indices, probs, **options)
    capacity = options.get("capacity")
    unused = (indices.numel() if capacity is None else capacity) - len(rows)
    own = [x[t] for _, t, _ in rows]
    of_rows = [probs[t, j] for _, t, j in rows]
    inverse_map = torch.full(indices.shape, -1, dtype=torch.int32)
    for row, (_, t, j) in enumerate(rows):
        inverse_map[t, j] = row
    sizes = [sum(e == expert for e, _, _ in rows) for expert in range(experts)]
    return (
        torch.stack(own + unused * [x.new_zeros(x.shape[-1])]),
        torch.tensor(sizes, dtype=torch.int32),
        torch.stack(of_rows + unused * [probs.new_zeros(())]),
        inverse_map,
    )


# -- permute and unpermute --------------------------------------------------------------


def _check_permute(given: dict[str, Any], with_probs: bool = True, **expected: Any) -> None:
    """The result, and gradients, of the given arguments are those of the expected ones."""
    own = {"x": X, "expert_indices": INDICES, "num_experts": EXPERTS, **expected, **given}
    expected = {"x": X, "expert_indices": INDICES, "num_experts": EXPERTS, **expected}
    for dtype, tolerance in TOLERANCES.items():
        x, probs = leaves([own["x"].to(dtype), PROBS.to(dtype)])
        if with_probs:
            own["probs"] = probs

        def run(x: torch.Tensor, own: dict[str, Any] = own) -> tuple[torch.Tensor, ...]:
            permuted = moe.permute(**{**own, "x": x})
            assert (permuted.probs is not None) is with_probs
            of_rows = (permuted.probs,) if with_probs else ()
            return (permuted.x, permuted.split_sizes, *of_rows, permuted.inverse_map)

        def plain(x: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            names = ("capacity", "drop_policy")
            options = {name: expected[name] for name in names if name in expected}
            indices, experts = expected["expert_indices"], expected["num_experts"]
            y, sizes, of_rows, inverse_map = _permuted(x, indices, probs, experts, **options)
            return (y, sizes, *((of_rows,) if with_probs else ()), inverse_map)

        wanted = [x, probs] if with_probs else [x]
        actual = results(run, [x], wanted)
        tensors = in_fp64([expected["x"].to(dtype), probs])
        exact = results(plain, tensors, tensors[: len(wanted)])
        assert actual.keys() == exact.keys()
        for name in exact:
            near(actual[name], exact[name], tolerance, name=name)


@sets(
    "fuser.moe.permute",
    x=Of(X, instead=2 * X),
    expert_indices=Of(INDICES, instead=OTHERS),
    num_experts=Of(EXPERTS, instead=EXPERTS + 1),
)
def _rows_of_tokens(given: dict[str, Any]) -> None:
    _check_permute(given)
    _check_permute(given, with_probs=False)
    _check_permute(given, with_probs=False, capacity=12)


@sets("fuser.moe.permute", capacity=CAPACITY)
def _capacity_of_rows(given: dict[str, Any]) -> None:
    own = {"expert_indices": INDICES, "num_experts": EXPERTS, **given}
    assert moe.permute(X, **own).x.shape == (CAPACITY, 6)
    for capacity in (CAPACITY, 1, 0, 12):
        more = {"capacity": capacity} if given else given
        permuted = moe.permute(X, **{**own, **more})
        exact = _permuted(X, INDICES, PROBS, EXPERTS, capacity=capacity) if capacity else None
        assert len(permuted.x) == capacity
        if exact is not None:
            assert_close(permuted.x, exact[0])
            assert torch.equal(permuted.inverse_map, exact[3])
    _check_permute({**given}, with_probs=True, capacity=CAPACITY)


@sets("fuser.moe.permute", drop_policy="probs")
def _rows_of_low_probability_are_dropped(given: dict[str, Any]) -> None:
    own = {"drop_policy": "position", **given}
    _check_permute(own, capacity=CAPACITY, drop_policy="probs")
    _check_permute(own, capacity=12, drop_policy="probs")
    refuses(lambda: moe.permute(X, INDICES, num_experts=EXPERTS, drop_policy="probs"), "no probs")


@sets("fuser.moe.permute", probs=PROBS)
def _probabilities_of_rows(given: dict[str, Any]) -> None:
    for probs in (PROBS, PROBS.double()):
        own = {"probs": probs} if given else given
        permuted = moe.permute(X, INDICES, num_experts=EXPERTS, **own)
        assert permuted.probs is not None
        assert_close(permuted.probs, _permuted(X, INDICES, probs, EXPERTS)[2])
    _check_permute({}, with_probs=True)


def _check_unpermute(given: dict[str, Any], weights: torch.Tensor | None) -> None:
    rows = random_tensor((INDICES.numel(), 3), BF16, 5)
    permuted = moe.permute(X, INDICES, num_experts=EXPERTS)
    for dtype, tolerance in TOLERANCES.items():
        own = {"y": rows, "permuted": permuted, **given}
        (y,) = leaves([own["y"].to(dtype)])
        probs = None
        if own.get("probs") is not None:
            (probs,) = leaves([own["probs"].to(dtype)])

        def plain(y: torch.Tensor, *probs: torch.Tensor) -> torch.Tensor:
            tokens = [y.new_zeros(3) for _ in range(TOKENS)]
            for row, (_, t, j) in enumerate(_assignments(INDICES, None)):
                tokens[t] = tokens[t] + y[row] * (probs[0][t, j] if probs else 1.0)
            return torch.stack(tokens)

        def run(y: torch.Tensor, *_: Any, own: dict[str, Any] = own, probs: Any = probs) -> Any:
            return moe.unpermute(y, own["permuted"], probs=probs)

        wanted = [y] if weights is None else [y, *([] if probs is None else [probs])]
        actual = results(run, [y], wanted)
        tensors = in_fp64([rows.to(dtype), *([] if weights is None else [weights.to(dtype)])])
        exact = results(plain, tensors, tensors)
        assert actual.keys() == exact.keys()
        for name in exact:
            near(actual[name], exact[name], tolerance, name=name)


ROWS = random_tensor((INDICES.numel(), 3), BF16, 5)


@sets(
    "fuser.moe.unpermute",
    y=Of(ROWS, instead=2 * ROWS),
    permuted=Of(
        moe.permute(X, INDICES, num_experts=EXPERTS),
        instead=moe.permute(X, OTHERS, num_experts=EXPERTS),
    ),
)
def _sums_of_rows(given: dict[str, Any]) -> None:
    _check_unpermute(given, None)
    _check_unpermute({"probs": PROBS, **given}, PROBS)


@sets("fuser.moe.unpermute", probs=PROBS)
def _weights_of_rows(given: dict[str, Any]) -> None:
    _check_unpermute(given, PROBS)


# -- MoeDispatch and MoeCombine ---------------------------------------------------------


def _dispatch(given: dict[str, Any], **options: Any) -> Any:
    own = {"num_experts": EXPERTS, **{n: v for n, v in options.items() if n != "drop_policy"}}

    def formula(x: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor) -> Any:
        return _permuted(x, indices, probs, EXPERTS, **options)

    inputs = (X, INDICES, PROBS)
    agrees(untyped(fuser.MoeDispatch, **{**own, **given}), formula, *inputs)
    agrees_quantized(untyped(fuser.MoeDispatch, **{**own, **given}), formula, *inputs)


@sets("fuser.MoeDispatch", num_experts=Of(EXPERTS, instead=EXPERTS + 1))
def _experts_of_a_dispatch(given: dict[str, Any]) -> None:
    _dispatch(given)


@sets("fuser.MoeDispatch", capacity=CAPACITY)
def _capacity_of_a_dispatch(given: dict[str, Any]) -> None:
    op = fuser.MoeDispatch(EXPERTS, **given)
    _, sizes, _, inverse_map = op(X, INDICES, PROBS)
    assert int(sizes.sum()) == CAPACITY
    assert int((inverse_map >= 0).sum()) == CAPACITY
    _dispatch(given, capacity=CAPACITY)
    for capacity in (1, 12):
        _dispatch({}, capacity=capacity)


@sets("fuser.MoeDispatch", drop_policy="probs")
def _dropped_rows_of_a_dispatch(given: dict[str, Any]) -> None:
    for capacity in (CAPACITY, 1):
        _dispatch(given, capacity=capacity, drop_policy="probs")


EVERY_RANK = "the group of all ranks"
"""Stands for a group that there is only while the check runs."""
# Of four experts on two ranks, rank 0 has the first two.
NEAR = torch.tensor([[1, 0], [0, 1], [-1, 1], [0, 1], [1, 0]])


def _of_two_ranks(x: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows by expert, and of one expert first the rows of this rank; sizes; probabilities."""
    rows: list[torch.Tensor] = []
    of_rows: list[torch.Tensor] = []
    sizes = []
    for expert in range(2):
        own = [(t, j) for e, t, j in _assignments(NEAR, None) if e == expert]
        rows += [x[t] for t, _ in own] + [x[t].detach() for t, _ in own]
        of_rows += [probs[t, j] for t, j in own] + [probs[t, j].detach() for t, j in own]
        sizes.append(2 * len(own))
    return torch.stack(rows), torch.tensor(sizes), torch.stack(of_rows)


@sets("fuser.MoeDispatch", expert_parallel_group=EVERY_RANK)
def _ranks_of_a_dispatch(given: dict[str, Any]) -> None:
    with rank_0_of_2():
        own = {"expert_parallel_group": torch.distributed.group.WORLD} if given else given
        op = fuser.MoeDispatch(EXPERTS, **own)
        assert op.num_local_experts == 2
        plan = str(fuser.Sequential(op).plan(X.float(), NEAR, PROBS.float()))
        assert "4 experts on 2 ranks, 2 on each" in " ".join(plan.split())
        for dtype, tolerance in TOLERANCES.items():
            x, probs = leaves([X.to(dtype), PROBS.to(dtype)])
            op = fuser.MoeDispatch(EXPERTS, **own)
            actual = results(lambda x, probs, op=op: op(x, NEAR, probs)[:3], [x, probs], [x, probs])
            tensors = in_fp64([x, probs])
            exact = results(_of_two_ranks, tensors, tensors)
            for name in exact:
                near(actual[name], exact[name], tolerance, name=name)
        refuses(lambda: fuser.MoeDispatch(3, **own), "3")


@sets("fuser.MoeCombine", expert_parallel_group=EVERY_RANK)
def _ranks_of_a_combine(given: dict[str, Any]) -> None:
    with rank_0_of_2():
        everyone = torch.distributed.group.WORLD
        own = {"expert_parallel_group": everyone} if given else given
        for factor, dtype in _factors():
            dispatch = fuser.MoeDispatch(EXPERTS, expert_parallel_group=everyone)
            for index, channel in enumerate(("sizes", "probs", "rows")):
                dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
            model = fuser.Sequential(
                dispatch,
                fuser.ConstantScale(factor),
                fuser.MoeCombine(**own).set_extra_input_channel(0, "rows"),
            )
            x, probs = leaves([X.to(dtype), PROBS.to(dtype)])
            count = (NEAR >= 0).sum(1, keepdim=True)
            actual = results(lambda x, m=model, p=probs: m(x, NEAR, p), [x], [x])
            (x64,) = in_fp64([x])
            exact = results(lambda x, f=factor, n=count: f * n * x, [x64], [x64])
            for name in exact:
                near(actual[name], exact[name], TOLERANCES[dtype], name=name)


def _factors() -> Iterator[tuple[float, torch.dtype]]:
    yield from ((1.0, FP32), (3.0, FP32), (-1.0, BF16))


# -- Router -----------------------------------------------------------------------------


def _routed(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    top_k: int = 2,
    score: str = "softmax",
    norm_topk_prob: bool = True,
    aux_loss_coefficient: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts, probabilities and loss, by the formulas of the papers."""
    logits = x @ weight.T
    chosen = logits.topk(top_k).indices
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    probs = scores.gather(1, chosen)
    if norm_topk_prob:
        probs = probs / probs.sum(-1, keepdim=True)
    shares = scores / scores.sum(-1, keepdim=True)
    experts = weight.shape[0]
    loads = torch.stack([(chosen == e).double().mean() for e in range(experts)])
    loss = aux_loss_coefficient * experts * (loads * shares.mean(0)).sum()
    return chosen, probs, loss


def _check_router(given: dict[str, Any], top_k: int, **expected: Any) -> None:
    for dtype in TOLERANCES:
        sizes = {"hidden": 6, "num_experts": EXPERTS, "top_k": top_k, "dtype": dtype}
        router = moe.Router(**{**sizes, **given})
        with torch.no_grad():
            router.weight.copy_(random_tensor((EXPERTS, 6), dtype, 4))
        (x,) = leaves([X.to(dtype)])
        routing = router(x)
        tensors = in_fp64([x, router.weight])
        chosen, probs, loss = _routed(*tensors, top_k=top_k, **expected)
        assert torch.equal(routing.expert_indices, chosen)
        near(routing.probs, probs, TOLERANCES[FP32])
        near(routing.load_balancing_loss, loss, TOLERANCES[FP32])
        grad = random_tensor(probs.shape, FP32, 5)
        (routing.load_balancing_loss + (routing.probs * grad).sum()).backward()
        (loss + (probs * grad.double()).sum()).backward()
        for leaf, exact in ((x, tensors[0]), (router.weight, tensors[1])):
            size = float(exact.grad.norm())
            assert float((leaf.grad.double() - exact.grad).norm()) <= TOLERANCES[dtype] * (
                size + 0.1  # it may be zero
            )


@sets(
    "fuser.moe.Router",
    hidden=Of(6, instead=5),
    num_experts=Of(EXPERTS, instead=3),
    top_k=Of(2, instead=1),
)
def _sizes_of_a_router(given: dict[str, Any]) -> None:
    assert tuple(
        moe.Router(**{"hidden": 6, "num_experts": 4, "top_k": 2, **given}).weight.shape
    ) == (
        4,
        6,
    )
    _check_router(given, 2)
    if "top_k" not in given:
        _check_router(given, 1)
        _check_router(given, EXPERTS)


def _row_of_a_router(**argument: Any) -> None:
    @sets("fuser.moe.Router", **argument)
    def probabilities_of_a_router(given: dict[str, Any]) -> None:
        for top_k in (EXPERTS, 2, 1):
            _check_router(given, top_k, **argument)
            if "norm_topk_prob" in argument or "aux_loss_coefficient" in argument:
                _check_router({"score": "sigmoid", **given}, top_k, score="sigmoid", **argument)
            if "score" in argument:
                own = {"norm_topk_prob": False, "aux_loss_coefficient": 0.5}
                _check_router({**own, **given}, top_k, **own, **argument)


_row_of_a_router(score="sigmoid")
_row_of_a_router(norm_topk_prob=False)
_row_of_a_router(aux_loss_coefficient=0.5)


@sets("fuser.moe.Router", device="meta")
def _device_of_a_router(given: dict[str, Any]) -> None:
    router = moe.Router(6, 4, 2, **given)
    assert router.weight.is_meta
    assert router(torch.empty(3, 6, device="meta")).probs.shape == (3, 2)
    router.to_empty(device="cpu").reset_parameters()
    assert float(router.weight.detach().abs().max()) <= 6**-0.5
    assert float(router.weight.detach().std()) > 0.1


@sets("fuser.moe.Router", dtype=BF16)
def _dtype_of_a_router(given: dict[str, Any]) -> None:
    router = moe.Router(6, 4, 2, **given)
    assert router.weight.dtype is BF16
    (x,) = leaves([X])
    routing = router(x)
    assert routing.probs.dtype is FP32  # products are in fp32 all the same
    near(
        routing.probs,
        _routed(x.double(), router.weight.detach().double())[1],
        TOLERANCES[FP32],
    )
