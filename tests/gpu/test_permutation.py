"""The permutation by expert on a GPU: against the reference, in CUDA graphs, without a wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import permutation_cases as cases
import pytest
import torch
from permutation_cases import Routing
from quantize_cases import GPU, Input, assert_same

import fuser
from fuser.cuda import permutation as kernels
from fuser.cuda.launch import kernels_support
from fuser.moe import Router, permute, unpermute

WITH_PROBS = pytest.mark.parametrize("with_probs", [False, True], ids=["sum", "weighted"])
WITH_DOT = pytest.mark.parametrize("with_dot", [False, True], ids=["dy", "dy and dprobs"])

# Sizes of models: several blocks that sort, rows of several blocks, 64 and 256 experts.
BIG = (
    (Routing(3000, 2, 8, kind="full"), Input(0, 4096)),
    (Routing(2048, 8, 64), Input(0, 2048)),
    (Routing(1031, 6, 256, 1000), Input(0, 1408, torch.float32)),
    (Routing(16384, 8, 1024, -20000, "outside"), Input(0, 64, torch.float16)),
    (Routing(8192, 1, 128, kind="one"), Input(0, 1000)),
)
EVERY_BIG = pytest.mark.parametrize(("routing", "like"), BIG, ids=str)


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, a call that waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("routing", [*cases.SORTS, *(routing for routing, _ in BIG)], ids=str)
def test_assignments_are_sorted_by_expert_and_then_by_token(routing: Routing) -> None:
    cases.check_sort(GPU, routing)


@cases.EVERY_MOVE
@cases.EVERY_MATRIX
def test_tokens_are_copied_to_the_rows_of_their_experts(routing: Routing, like: Input) -> None:
    cases.check_permute(GPU, routing, like)


@WITH_PROBS
@cases.EVERY_MOVE
@cases.EVERY_MATRIX
def test_the_rows_of_a_token_are_added(routing: Routing, like: Input, with_probs: bool) -> None:
    cases.check_unpermute(GPU, routing, like, with_probs)


@WITH_DOT
@cases.EVERY_MOVE
@cases.EVERY_MATRIX
def test_the_gradients_of_rows_and_probabilities_are_the_references(
    routing: Routing, like: Input, with_dot: bool
) -> None:
    cases.check_unpermute_backward(GPU, routing, like, with_dot)


@EVERY_BIG
def test_large_sizes_give_the_references_bits(routing: Routing, like: Input) -> None:
    cases.check_permute(GPU, routing, like)
    cases.check_unpermute(GPU, routing, like, True)
    cases.check_unpermute_backward(GPU, routing, like, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capacity", [9000, 12345, 14000])
def test_a_gpu_gives_the_results_and_gradients_of_a_cpu(dtype: torch.dtype, capacity: int) -> None:
    routing = Routing(4096, 3, 40)
    torch.manual_seed(0)
    x, probs = torch.randn(4096, 520).to(dtype), torch.rand(4096, 3)
    arguments = (routing.indices(), probs, 40, capacity)
    expected = cases.layer(x, *arguments)
    on_gpu = cases.layer(x.cuda(), routing.indices().cuda(), probs.cuda(), 40, capacity)
    for number, (a, b) in enumerate(zip(on_gpu, expected, strict=True)):
        assert_same(a, b, f"result {number}")


def test_kernels_run() -> None:
    assert kernels_support(torch.zeros(1, device="cuda", dtype=torch.bfloat16))
    assert len(kernels.instantiations()) == 31


@pytest.mark.parametrize("policy", ["position", "probs"])
@pytest.mark.parametrize("capacity", [None, 1500, 3000])
def test_a_captured_step_is_replayed_with_other_indices_and_nothing_waits(
    capacity: int | None, policy: str
) -> None:
    tokens, choices, experts = 1024, 2, 16
    rows = tokens * choices if capacity is None else capacity
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(tokens, choices, device="cuda", requires_grad=True)
    indices = torch.zeros(tokens, choices, dtype=torch.int64, device="cuda")

    def step() -> list[torch.Tensor]:
        permuted = permute(
            x, indices, probs, num_experts=experts, capacity=rows, drop_policy=policy
        )
        assert permuted.probs is not None
        y = permuted.x * permuted.probs[:, None].to(x.dtype)
        out = unpermute(y, permuted, probs=probs)
        grads = torch.autograd.grad(out, (x, probs), torch.ones_like(out))
        return [permuted.x, permuted.split_sizes, permuted.row_map, out, *grads]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles
        with no_waits():
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for kind in ("random", "outside", "one", "none"):
        indices.copy_(Routing(tokens, choices, experts, kind=kind).indices(seed=5))
        graph.replay()
        for number, (a, b) in enumerate(zip(captured, step(), strict=True)):
            assert_same(a, b, f"{kind}, result {number}")


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [False, True])
def test_a_router_is_captured_and_nothing_waits(score: str, norm: bool) -> None:
    router = Router(
        *(256, 64, 4), score=score, norm_topk_prob=norm, aux_loss_coefficient=0.1, device="cuda"
    )
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> list[torch.Tensor]:
        routing = router(x)
        loss = routing.probs.square().sum() + routing.load_balancing_loss
        return [*routing, *torch.autograd.grad(loss, (x, router.weight))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        with no_waits():
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        for number, (a, b) in enumerate(zip(captured, step(), strict=True)):
            assert_same(a.detach(), b.detach(), f"result {number}")


@pytest.mark.parametrize("form", ["functions", "one pipeline"])
def test_a_captured_layer_of_experts_is_replayed_with_other_tokens_and_nothing_waits(
    form: str,
) -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("each group has its own product here")
    tokens, hidden, inner, experts = 512, 256, 384, 16
    options = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    router = Router(hidden, experts, 4, aux_loss_coefficient=0.01, device="cuda")
    up = fuser.GroupedLinear(experts, hidden, 2 * inner, **options)
    act, down = fuser.ScaledSwiGLU(), fuser.GroupedLinear(experts, inner, hidden, **options)
    dispatch, combine = fuser.MoeDispatch(experts, capacity=5 * tokens), fuser.MoeCombine()
    if form == "functions":
        mlp = fuser.Sequential(up, act, down)
    else:
        for index, channel in enumerate(("sizes", "probs", "rows")):
            dispatch.set_extra_output_channel(index, channel, output_to_caller=channel == "sizes")
        for op, channel in ((up, "sizes"), (act, "probs"), (down, "sizes"), (combine, "rows")):
            op.set_extra_input_channel(0, channel)
        mlp = fuser.Sequential(dispatch, up, act, down, combine)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    leaves = [x, *router.parameters(), *mlp.parameters()]

    def step() -> list[torch.Tensor]:
        routing = router(x)
        given = (x, routing.expert_indices, routing.probs)
        if form == "functions":
            permuted = permute(*given, num_experts=experts, capacity=5 * tokens)
            sizes = permuted.split_sizes
            out = unpermute(mlp(permuted.x, sizes, permuted.probs, sizes), permuted)
        else:
            out, sizes = mlp(*given)
        loss = routing.load_balancing_loss
        grads = torch.autograd.grad((out, loss), leaves, (dout, torch.ones_like(loss)))
        return [out.detach(), sizes, *grads]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
        with no_waits():
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(5):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        assert int(captured[1].sum()) == 4 * tokens
        for number, (a, b) in enumerate(zip(captured, step(), strict=True)):
            assert_same(a, b, f"result {number}")


def test_a_router_chooses_the_experts_of_a_cpu_and_of_equal_logits_the_first() -> None:
    router = Router(64, 300, 3, device="cpu", dtype=torch.float32)
    x = torch.randn(100, 64)
    on_cpu = router(x)
    on_gpu = router.cuda()(x.cuda())
    torch.testing.assert_close(on_gpu.probs.cpu(), on_cpu.probs, rtol=1e-3, atol=1e-4)
    equal = router(torch.zeros(5, 64, device="cuda"))
    assert equal.expert_indices.tolist() == [[0, 1, 2]] * 5


def test_indices_outside_of_the_experts_are_dropped() -> None:
    indices = torch.tensor([[0, 7], [2**32, -5], [1, 4]], device="cuda")
    permuted = permute(torch.ones(3, 8, device="cuda"), indices, num_experts=4)
    assert permuted.split_sizes.tolist() == [1, 1, 0, 0]
    assert permuted.inverse_map.tolist() == [[0, -1], [-1, -1], [1, -1]]
    assert permuted.x.sum(1).tolist() == [8, 8, 0, 0, 0, 0]
