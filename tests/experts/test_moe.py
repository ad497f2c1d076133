"""fuser.moe: the router, and the permutation of tokens to rows sorted by expert, on a CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from said import holds, said

import fuser
from fuser.errors import InputError, InputTypeError
from fuser.moe import Permuted, Router, permute, unpermute

NAN, INF = math.nan, math.inf


def random_indices(tokens: int, choices: int, experts: int, dropped: float = 0.0) -> torch.Tensor:
    """Different experts for each token, the same at every call; some are -1."""
    generator = torch.Generator().manual_seed(tokens + 31 * choices + 7 * experts)
    order = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :choices]
    return order.masked_fill(torch.rand(order.shape, generator=generator) < dropped, -1)


def loop(expert_indices: torch.Tensor, experts: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Token and choice of each row, and the number of rows of each expert."""
    tokens, choices = expert_indices.shape
    rows: list[tuple[int, int]] = []
    sizes: list[int] = []
    for expert in range(experts):
        own = [
            (t, j) for t in range(tokens) for j in range(choices) if expert_indices[t, j] == expert
        ]
        rows += own
        sizes.append(len(own))
    return rows, sizes


def check_maps(permuted: Permuted, rows: list[tuple[int, int]], choices: int) -> None:
    """Both maps agree with the list of rows, and contain nothing else."""
    maps = (permuted.row_map, permuted.inverse_map, permuted.split_sizes)
    assert {each.dtype for each in maps} == {torch.int32}
    unused = permuted.row_map.shape[0] - len(rows)
    assert permuted.row_map.tolist() == [t * choices + j for t, j in rows] + [-1] * unused
    expected = torch.full_like(permuted.inverse_map, -1)
    for row, (t, j) in enumerate(rows):
        expected[t, j] = row
    assert torch.equal(permuted.inverse_map, expected)


CASES = [
    pytest.param(random_indices(13, 2, 5), 5, id="13x2"),
    pytest.param(random_indices(9, 1, 4), 4, id="one choice"),
    pytest.param(random_indices(40, 3, 6, dropped=0.3), 6, id="some dropped"),
    pytest.param(random_indices(4, 2, 64), 64, id="empty experts"),
    pytest.param(torch.full((6, 2), 3), 5, id="all in one expert"),
    pytest.param(torch.full((6, 2), -1), 5, id="all dropped"),
    pytest.param(torch.zeros(0, 2, dtype=torch.int64), 3, id="no tokens"),
    pytest.param(torch.zeros(1, 1, dtype=torch.int32), 1, id="one"),
    pytest.param(random_indices(5, 4, 1500).int(), 1500, id="1500 experts"),
]
EVERY_CASE = pytest.mark.parametrize(("indices", "experts"), CASES)


# -- permute and unpermute ----------------------------------------------------


@EVERY_CASE
@pytest.mark.parametrize("more", [0, 7])
def test_rows_are_those_of_a_loop_over_experts_and_tokens(
    indices: torch.Tensor, experts: int, more: int
) -> None:
    tokens, choices = indices.shape
    x, probs = torch.randn(tokens, 6), torch.rand(tokens, choices)
    capacity = tokens * choices + more if more else None
    permuted = permute(x, indices, probs, num_experts=experts, capacity=capacity)
    rows, sizes = loop(indices, experts)
    assert permuted.split_sizes.dtype == torch.int32
    assert permuted.split_sizes.tolist() == sizes
    assert permuted.x.shape == (tokens * choices + more, 6)
    check_maps(permuted, rows, choices)
    assert permuted.probs is not None
    for row, (t, j) in enumerate(rows):
        assert torch.equal(permuted.x[row], x[t])
        assert permuted.probs[row] == probs[t, j]
    assert not permuted.x[len(rows) :].any()
    assert not permuted.probs[len(rows) :].any()


@EVERY_CASE
@pytest.mark.parametrize("with_probs", [False, True])
def test_unpermute_adds_the_rows_of_each_token(
    indices: torch.Tensor, experts: int, with_probs: bool
) -> None:
    tokens, choices = indices.shape
    permuted = permute(torch.randn(tokens, 3), indices, num_experts=experts)
    y, probs = torch.randn(tokens * choices, 5), torch.rand(tokens, choices)
    out = unpermute(y, permuted, probs=probs if with_probs else None)
    expected = torch.zeros(tokens, 5, dtype=torch.float64)
    for row, (t, j) in enumerate(loop(indices, experts)[0]):
        expected[t] += y[row].double() * (probs[t, j].double() if with_probs else 1.0)
    assert out.shape == (tokens, 5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


@EVERY_CASE
def test_gradients_are_those_of_finite_differences(indices: torch.Tensor, experts: int) -> None:
    if indices.shape[0] > 13:
        indices = indices[:8]
    tokens, choices = indices.shape
    torch.manual_seed(1)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(tokens, choices, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, choices, dtype=torch.float64, requires_grad=True)

    def layer(x: torch.Tensor, probs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        permuted = permute(x, indices, probs, num_experts=experts, capacity=tokens * choices + 2)
        assert permuted.probs is not None
        y = permuted.x.sin() * permuted.probs[:, None] + permuted.x
        return unpermute(y, permuted, probs=weights) + unpermute(y.cos(), permuted)

    assert torch.autograd.gradcheck(layer, (x, probs, weights))


@pytest.mark.parametrize("width", [1, 4])
def test_without_rows_every_token_is_zero(width: int) -> None:
    x, indices = torch.ones(3, width), torch.zeros(3, 2, dtype=torch.int64)
    permuted = permute(x, indices, num_experts=1, capacity=0)
    assert permuted.x.shape == (0, width)
    assert torch.equal(unpermute(permuted.x, permuted), torch.zeros(3, width))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    indices = random_indices(50, 4, 8, dropped=0.1)
    permuted = permute(torch.zeros(50, 1), indices, num_experts=8)
    y, probs = torch.randn(200, 33).to(dtype), torch.rand(50, 4)
    out = unpermute(y, permuted, probs=probs)
    assert out.dtype == dtype
    wide = torch.zeros(50, 33)
    for j in range(4):
        row = permuted.inverse_map[:, j]
        term = y[row.clamp(min=0)].float() * probs[:, j, None]
        wide = torch.where((row >= 0)[:, None], wide + term, wide)
    assert torch.equal(out, wide.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_in_low_precision_are_those_of_a_gather(dtype: torch.dtype) -> None:
    indices, torch_probs = random_indices(40, 3, 6, dropped=0.3), torch.rand(40, 3)
    x = torch.randn(40, 64).to(dtype).requires_grad_()
    probs = torch_probs.clone().requires_grad_()
    permuted = permute(x, indices, num_experts=6)
    out = unpermute(permuted.x, permuted, probs=probs)
    dout = torch.randn_like(out)
    out.backward(dout)
    x64 = x.detach().double().requires_grad_()
    probs64 = torch_probs.double().requires_grad_()
    dense = x64 * (probs64 * (indices >= 0)).sum(1, keepdim=True)
    dense.backward(dout.double())
    assert x.grad is not None
    assert probs.grad is not None
    assert (x.grad.dtype, probs.grad.dtype) == (dtype, torch.float32)
    rtol = 2 ** -(6 if dtype == torch.bfloat16 else 20)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=rtol, atol=rtol)
    torch.testing.assert_close(probs.grad.double(), probs64.grad, rtol=1e-5, atol=1e-5)


def test_nothing_in_unused_rows_reaches_a_result_or_a_gradient() -> None:
    indices = random_indices(20, 2, 4, dropped=0.4)
    used = int((indices >= 0).sum())
    results = []
    for poison in (0.0, NAN, INF):
        torch.manual_seed(0)
        x = torch.randn(20, 8, requires_grad=True)
        probs = torch.rand(20, 2, requires_grad=True)
        weights = torch.rand(20, 2, requires_grad=True)
        permuted = permute(x, indices, probs, num_experts=4, capacity=50)
        assert permuted.probs is not None
        assert not permuted.x[used:].any()
        tail = (torch.arange(50) >= used)[:, None]
        y = (permuted.x * permuted.probs[:, None]).exp()
        y = torch.where(tail, poison, y)
        out = unpermute(y, permuted, probs=weights)
        # What an expert's backward leaves in the gradients of unused rows does not count either.
        dx, dprobs, dweights, dy = torch.autograd.grad(
            out.sum(), (x, probs, weights, y), retain_graph=True
        )
        assert not dy[used:].any()
        dirty = torch.where(tail, poison, torch.randn(50, 8))
        dx_dirty, dprobs_dirty = torch.autograd.grad(
            (permuted.x, permuted.probs), (x, probs), (dirty, dirty[:, 0].contiguous())
        )
        results.append((out, dx, dprobs, dweights, dx_dirty, dprobs_dirty))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))
    assert all(tensor.isfinite().all() for tensor in results[0])


def test_a_dropped_probability_may_be_nan() -> None:
    indices = torch.tensor([[0, -1], [-1, -1]])
    probs = torch.tensor([[0.5, NAN], [NAN, INF]], requires_grad=True)
    x = torch.tensor([[1.0, 2.0], [NAN, NAN]], requires_grad=True)
    permuted = permute(x, indices, probs, num_experts=2)
    out = unpermute(permuted.x, permuted, probs=probs)
    assert out.tolist() == [[0.5, 1.0], [0.0, 0.0]]
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert probs.grad is not None
    assert probs.grad.tolist() == [[3.0, 0.0], [0.0, 0.0]]


def test_tokens_may_have_more_dimensions_and_any_strides() -> None:
    indices = random_indices(12, 2, 4)
    wide = torch.randn(3, 4, 20)
    for x in (wide, wide[..., ::2], wide.transpose(0, 1).contiguous().transpose(0, 1)):
        expected = permute(x.reshape(12, -1).clone(), indices, num_experts=4)
        permuted = permute(x, indices.t().contiguous().t(), num_experts=4)
        assert torch.equal(permuted.x, expected.x)
        y = torch.randn(permuted.x.shape[1], 24).t()
        assert torch.equal(unpermute(y, permuted), unpermute(y.contiguous(), permuted))


# -- capacity -----------------------------------------------------------------


def test_position_drops_the_last_tokens() -> None:
    indices = torch.tensor([[1, 0], [-1, 1], [2, 0], [0, 2]])
    x = torch.arange(4.0)[:, None]
    permuted = permute(x, indices, num_experts=3, capacity=4)
    # Assignments 0, 1, 3 and 4 remain: experts 1, 0, 1 and 2.
    assert permuted.split_sizes.tolist() == [1, 2, 1]
    assert permuted.row_map.tolist() == [1, 0, 3, 4]
    assert permuted.inverse_map.tolist() == [[1, 0], [-1, 2], [3, -1], [-1, -1]]
    assert permuted.x.flatten().tolist() == [0, 0, 1, 2]


def test_probs_drops_the_lowest_probabilities_and_of_equal_ones_the_last() -> None:
    indices = torch.tensor([[1, 0], [-1, 1], [2, 0], [0, 2]])
    probs = torch.tensor([[0.1, 0.9], [9.0, 0.5], [0.5, 0.5], [0.7, -INF]])
    options: dict[str, Any] = {"num_experts": 3, "drop_policy": "probs"}
    x = torch.arange(4.0)[:, None]
    permuted = permute(x, indices, probs, capacity=4, **options)
    assert permuted.row_map.tolist() == [1, 6, 3, 4]
    assert permuted.split_sizes.tolist() == [2, 1, 1]
    assert permuted.probs is not None
    torch.testing.assert_close(permuted.probs, torch.tensor([0.9, 0.7, 0.5, 0.5]))
    whole = permute(x, indices, probs, capacity=7, **options)
    assert whole.split_sizes.tolist() == [3, 2, 2]


@pytest.mark.parametrize("policy", ["position", "probs"])
@pytest.mark.parametrize("capacity", [0, 1, 17, 59, 60, 61])
def test_split_sizes_agree_with_the_rows_that_there_are(capacity: int, policy: str) -> None:
    indices = random_indices(20, 3, 7, dropped=0.2)
    kept = min(capacity, int((indices >= 0).sum()))
    x, probs = torch.randn(20, 4), torch.rand(20, 3)
    permuted = permute(x, indices, probs, num_experts=7, capacity=capacity, drop_policy=policy)
    assert permuted.x.shape == (capacity, 4)
    assert int(permuted.split_sizes.sum()) == kept
    remaining = indices.masked_fill(permuted.inverse_map < 0, -1)
    assert int((remaining >= 0).sum()) == kept
    rows, sizes = loop(remaining, 7)
    assert permuted.split_sizes.tolist() == sizes
    check_maps(permuted, rows, 3)
    assert all(torch.equal(permuted.x[row], x[t]) for row, (t, _) in enumerate(rows))
    if kept < int((indices >= 0).sum()) and policy == "probs" and kept:
        dropped = (indices >= 0) & (permuted.inverse_map < 0)
        assert probs[dropped].max() <= probs[permuted.inverse_map >= 0].min()


def test_gradients_of_dropped_tokens_are_zero() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    permuted = permute(x, torch.tensor([[0], [1], [0], [1]]), num_experts=2, capacity=3)
    unpermute(permuted.x, permuted).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1, 1, 1, 0]


# -- a layer ------------------------------------------------------------------


@pytest.mark.parametrize("where", ["in the experts", "in unpermute"])
def test_a_layer_of_experts_equals_a_loop_over_tokens(where: str) -> None:
    torch.manual_seed(0)
    router = Router(8, 5, 2, aux_loss_coefficient=0.01, device="cpu", dtype=torch.float32)
    weights = torch.randn(5, 8, 8, requires_grad=True)
    x = torch.randn(3, 7, 8, requires_grad=True)

    def layer() -> torch.Tensor:
        routing = router(x)
        permuted = permute(x, routing.expert_indices, routing.probs, num_experts=5)
        parts = permuted.x.split(permuted.split_sizes.tolist())
        y = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
        if where == "in the experts":
            assert permuted.probs is not None
            out = unpermute(y * permuted.probs[:, None], permuted)
        else:
            out = unpermute(y, permuted, probs=routing.probs)
        return out.square().sum() + routing.load_balancing_loss

    def plain() -> torch.Tensor:
        logits = x.view(21, 8) @ router.weight.t()
        scores = logits.softmax(-1)
        values, indices = scores.topk(2)
        probs = values / values.sum(-1, keepdim=True)
        out = torch.einsum("th,tkhd,tk->td", x.view(21, 8), weights[indices], probs)
        loads = torch.nn.functional.one_hot(indices, 5).sum((0, 1)) / 42
        return out.square().sum() + 0.01 * 5 * (loads * scores.mean(0)).sum()

    leaves = (x, weights, router.weight)
    got, expected = layer(), plain()
    torch.testing.assert_close(got, expected)
    for a, b in zip(
        torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("capacity", [None, 60])
def test_a_grouped_mlp_between_permute_and_unpermute_equals_a_loop_over_tokens(
    capacity: int | None,
) -> None:
    experts, hidden, inner = 5, 16, 24
    torch.manual_seed(0)
    router = Router(hidden, experts, 2, device="cpu", dtype=torch.float32)
    up = fuser.GroupedLinear(
        experts, hidden, 2 * inner, bias=False, device="cpu", single_grouped_weight=True
    )
    down = fuser.GroupedLinear(
        experts, inner, hidden, bias=False, device="cpu", single_grouped_weight=True
    )
    mlp = fuser.Sequential(up, fuser.ScaledSwiGLU(), down)
    x = torch.randn(20, hidden, requires_grad=True)

    def layer() -> torch.Tensor:
        routing = router(x)
        permuted = permute(
            x, routing.expert_indices, routing.probs, num_experts=experts, capacity=capacity
        )
        y = mlp(permuted.x, permuted.split_sizes, permuted.probs, permuted.split_sizes)
        return unpermute(y, permuted)

    def plain() -> torch.Tensor:
        values, indices = (x @ router.weight.t()).softmax(-1).topk(2)
        probs = values / values.sum(-1, keepdim=True)
        both = torch.einsum("th,tkoh->tko", x, up.weight[indices])
        gate, linear = both.chunk(2, -1)
        inside = torch.nn.functional.silu(gate) * linear * probs[..., None]
        return torch.einsum("tki,tkhi->th", inside, down.weight[indices])

    leaves = (x, router.weight, up.weight, down.weight)
    dout = torch.randn(20, hidden)
    got, expected = layer(), plain()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(
        torch.autograd.grad(got, leaves, dout),
        torch.autograd.grad(expected, leaves, dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_shapes_do_not_depend_on_values_and_no_value_is_read() -> None:
    """Tensors on meta have no values, so reading one is an error."""
    router = Router(8, 5, 2, aux_loss_coefficient=0.1, device="meta")
    x = torch.empty(3, 7, 8, device="meta", requires_grad=True)
    routing = router(x)
    for capacity, policy in ((None, "position"), (50, "position"), (30, "position"), (30, "probs")):
        permuted = permute(
            *(x, routing.expert_indices, routing.probs),
            num_experts=5,
            capacity=capacity,
            drop_policy=policy,
        )
        rows = 42 if capacity is None else capacity
        assert permuted.x.shape == (rows, 8)
        out = unpermute(permuted.x, permuted, probs=routing.probs)
        assert out.shape == (21, 8)
        (dx,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert dx.shape == x.shape


def test_a_compiled_function_may_call_all_three() -> None:
    router = Router(8, 4, 2, device="cpu")

    def layer(x: torch.Tensor) -> torch.Tensor:
        routing = router(x * 2)
        permuted = permute(x + 1, routing.expert_indices, num_experts=4)
        return unpermute(permuted.x.sin(), permuted, probs=routing.probs) * 3

    x = torch.randn(6, 8)
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))


# -- router -------------------------------------------------------------------


def logits_of(router: Router, x: torch.Tensor) -> torch.Tensor:
    return x.double() @ router.weight.detach().double().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_probabilities_and_loss_are_those_of_the_formulas(
    dtype: torch.dtype, score: str, norm: bool, top_k: int
) -> None:
    torch.manual_seed(0)
    router = Router(
        *(16, 6, top_k),
        score=score,
        norm_topk_prob=norm,
        aux_loss_coefficient=0.1,
        device="cpu",
        dtype=dtype,
    )
    x = torch.randn(2, 10, 16).to(dtype)
    routing = router(x)
    logits = logits_of(router, x.view(20, 16))
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    values, indices = scores.topk(top_k)
    if norm:
        values = values / values.sum(-1, keepdim=True)
    assert torch.equal(routing.expert_indices, indices)
    assert routing.probs.dtype == routing.load_balancing_loss.dtype == torch.float32
    torch.testing.assert_close(routing.probs.double(), values, rtol=1e-5, atol=1e-6)
    if score == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    loads = torch.bincount(indices.view(-1), minlength=6) / indices.numel()
    loss = 0.1 * 6 * (loads * scores.mean(0)).sum()
    torch.testing.assert_close(routing.load_balancing_loss.double(), loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [False, True])
def test_gradients_of_the_router_are_those_of_finite_differences(score: str, norm: bool) -> None:
    torch.manual_seed(0)
    router = Router(5, 6, 2, score=score, norm_topk_prob=norm, aux_loss_coefficient=0.5)
    router = router.cpu().double()
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def outputs(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert weight is router.weight
        return router(x)[1:]

    assert torch.autograd.gradcheck(outputs, (x, router.weight))


def test_equal_load_gives_the_coefficient_as_loss() -> None:
    router = Router(4, 4, 1, aux_loss_coefficient=0.25, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    routing = router(torch.eye(4).repeat(3, 1))
    assert sorted(routing.expert_indices.flatten().tolist()) == sorted([0, 1, 2, 3] * 3)
    torch.testing.assert_close(routing.load_balancing_loss, torch.tensor(0.25))


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    router = Router(4, 300, 3, device="cpu", dtype=torch.float32)
    assert router(torch.zeros(5, 4)).expert_indices.tolist() == [[0, 1, 2]] * 5
    with torch.no_grad():
        router.weight.copy_(torch.where(torch.arange(300)[:, None] % 100 == 50, 1.0, 0.0))
    assert router(torch.ones(1, 4)).expert_indices.tolist() == [[50, 150, 250]]


def test_the_router_computes_in_fp32_under_autocast_and_keeps_gradients_in_their_dtypes() -> None:
    router = Router(32, 8, 2, device="cpu", dtype=torch.bfloat16, aux_loss_coefficient=1.0)
    x = torch.randn(6, 32).bfloat16().requires_grad_()
    plain = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x)
        assert all(torch.equal(a, b) for a, b in zip(plain, routing, strict=True))
        (routing.probs[:, 0].sum() + routing.load_balancing_loss).backward()
    assert x.grad is not None
    assert router.weight.grad is not None
    inside = [x.grad.clone(), router.weight.grad.clone()]
    x.grad = router.weight.grad = None
    (plain.probs[:, 0].sum() + plain.load_balancing_loss).backward()
    assert x.grad.dtype == router.weight.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, inside[0])
    assert torch.equal(router.weight.grad, inside[1])


def test_a_router_without_tokens_or_without_a_loss() -> None:
    router = Router(8, 4, 2, aux_loss_coefficient=1.0, device="cpu")
    x = torch.zeros(0, 8, requires_grad=True)
    routing = router(x)
    assert routing.expert_indices.shape == routing.probs.shape == (0, 2)
    assert routing.load_balancing_loss == 0
    routing.probs.sum().backward()
    assert router.weight.grad is not None
    assert not router.weight.grad.any()
    silent = Router(8, 4, 2, device="cpu")
    for x in (torch.randn(3, 8), torch.full((3, 8), NAN)):
        loss = silent(x).load_balancing_loss
        assert loss == 0
        assert not loss.requires_grad  # nothing is computed for it


def test_a_router_is_a_module() -> None:
    router = Router(8, 4, 2, score="sigmoid", device="cpu", dtype=torch.float32)
    assert list(router.state_dict()) == ["weight"]
    assert "num_experts=4, top_k=2, score='sigmoid'" in repr(router)
    made = Router(8, 4, 2, device="meta").to_empty(device="cpu")
    made.reset_parameters()
    made.load_state_dict(router.state_dict())
    assert torch.equal(made.weight, router.weight)
    assert 0 < float(router.weight.detach().abs().max()) <= 8**-0.5


def test_the_weight_of_a_router_is_initialised_as_that_of_a_linear_of_torch() -> None:
    torch.manual_seed(0)
    router = Router(8, 4, 2, device="cpu", dtype=torch.float32)
    torch.manual_seed(0)
    assert torch.equal(router.weight, torch.nn.Linear(8, 4, bias=False, device="cpu").weight)


# -- refusals -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"expert_indices": torch.tensor([[0, 1], [2, 4], [9, 0]])},
            said("routing-token-choice-0", None, 4, 1, 1, 3),
        ),
        (
            {"expert_indices": torch.tensor([[0, 1], [2, 3], [-2, 0]])},
            said("routing-token-choice-0", None, -2, 2),
        ),
        (
            {"expert_indices": torch.zeros(3, 2)},
            said("routing-indices-int32-int64", None, "torch.float32"),
        ),
        (
            {"expert_indices": torch.zeros(4, 2, dtype=torch.int64)},
            said("routing-indices-k-because", None, 3, 3, (4, 2)),
        ),
        (
            {"expert_indices": torch.zeros(3, dtype=torch.int64)},
            said("routing-indices-k-because", None, 3, None, (3,)),
        ),
        (
            {"expert_indices": torch.zeros(3, 0, dtype=torch.int64)},
            said("routing-indices-k-because", None, None, None, (3, 0)),
        ),
        (
            {"expert_indices": torch.zeros(3, 2, dtype=torch.int64, device="meta")},
            said("routing-move-other", None, "expert_indices", "meta", "x", "cpu"),
        ),
        (
            {"x": torch.zeros(3, 4, dtype=torch.int32)},
            said("routing-float64-float32-float16", None, "x", "torch.int32"),
        ),
        ({"x": torch.tensor(1.0)}, said("permutation-x-shape-scalar")),
        ({"probs": torch.zeros(3, 3)}, said("routing-probs-shape-each", None, (3, 2), (3, 3))),
        (
            {"probs": torch.zeros(3, 2, dtype=torch.int64)},
            said("routing-float64-float32-float16", None, "probs"),
        ),
        (
            {"probs": torch.zeros(3, 2, device="meta")},
            said("routing-move-other", None, "probs", "meta", "the rows", "cpu"),
        ),
        ({"num_experts": 0}, said("routing-it-is-to", None, "num_experts", 0, 1)),
        ({"capacity": -1}, said("routing-it-is-to", None, "capacity", -1, 0)),
        ({"capacity": 2**31}, said("routing-it-is-to", None, "capacity", 2147483648)),
        ({"drop_policy": "last"}, said("routing-drop-policy-position", None, "'last'")),
        ({"drop_policy": "probs"}, said("permutation-drop-policy-probs")),
    ],
)
def test_permute_refuses_what_does_not_fit(change: dict[str, Any], words: str) -> None:
    arguments = {
        "x": torch.zeros(3, 4),
        "expert_indices": torch.tensor([[0, 1], [2, 3], [-1, 0]]),
        "num_experts": 4,
    }
    with pytest.raises(InputError, match=words):
        permute(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 4.0}, said("routing-takes-int", None, "num_experts", 4.0)),
        ({"num_experts": True}, said("routing-takes-int", None, "num_experts", True)),
        ({"capacity": torch.tensor(4)}, said("routing-takes-int", None, "capacity", "tensor(4)")),
        (
            {"x": fuser.MXFP8Quantizer(fuser.DType.kFloat8E4M3)(torch.ones(32, 32))},
            said("routing-plain-tensor-call", None, "x", "MXFP8Tensor"),
        ),
        ({"x": [[1.0, 2.0]]}, said("routing-plain-tensor-call", None, "x", "list")),
    ],
)
def test_permute_refuses_wrong_types(change: dict[str, Any], words: str) -> None:
    arguments = {"x": torch.zeros(3, 4), "num_experts": 4}
    with pytest.raises(InputTypeError, match=words):
        permute(**{**arguments, "expert_indices": torch.zeros(3, 1, dtype=torch.int64), **change})


def test_unpermute_refuses_what_does_not_fit() -> None:
    permuted = permute(torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), num_experts=1)
    for y in (torch.zeros(5, 4), torch.zeros(6)):
        with pytest.raises(InputError, match=said("permutation-unpermute-y-rows", 6)):
            unpermute(y, permuted)
    with pytest.raises(InputError, match=said("routing-probs-shape-each", None, (3, 2), (6,))):
        unpermute(torch.zeros(6, 4), permuted, probs=torch.zeros(6))
    with pytest.raises(
        InputError, match=said("routing-move-other", None, "y", "meta", "the maps", "cpu")
    ):
        unpermute(torch.zeros(6, 4, device="meta"), permuted)
    with pytest.raises(
        InputError, match=said("routing-float64-float32-float16", None, "y", "torch.int32")
    ):
        unpermute(torch.zeros(6, 4, dtype=torch.int32), permuted)
    with pytest.raises(
        InputTypeError, match=said("permutation-unpermute-permuted-returned", "tuple")
    ):
        unpermute(torch.zeros(6, 4), tuple(permuted))


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((8, 4, 5), {}, said("router-top-k-num", 5, 4)),
        ((8, 0, 1), {}, said("parameters-positive", None, "num_experts", 0)),
        ((8, 4, 2), {"score": "tanh"}, said("router-score-softmax-sigmoid", "'tanh'")),
        ((8, 4, 2), {"aux_loss_coefficient": -1.0}, said("router-aux-loss-coefficient", -1.0)),
        ((8, 4, 2), {"aux_loss_coefficient": NAN}, said("router-aux-loss-coefficient", "nan")),
        (
            (8, 4, 2),
            {"dtype": torch.int8},
            said("parameters-float32-float16-bfloat16", "torch.int8"),
        ),
    ],
)
def test_a_router_refuses_values_that_do_not_fit(
    sizes: tuple[int, int, int], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        Router(*sizes, **options)


def test_a_router_refuses_a_size_that_is_no_int_and_an_input_that_does_not_fit() -> None:
    with pytest.raises(InputTypeError, match=said("routing-takes-int", None, "top_k", holds(2.0))):
        Router(8, 4, 2.0)
    router = Router(8, 4, 2, device="cpu")
    for x, words in (
        (torch.zeros(3, 7), said("router-takes", 8, (3, 7))),
        (torch.tensor(0.0), said("router-takes", 8, ())),
        (
            torch.zeros(3, 8, dtype=torch.int64),
            said("router-float32-float16-bfloat16", "torch.int64"),
        ),
        (torch.zeros(3, 8, device="meta"), said("router-x-weight-move", "meta", "cpu")),
    ):
        with pytest.raises(InputError, match=words):
            router(x)
