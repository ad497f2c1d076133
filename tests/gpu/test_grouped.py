"""Grouped linears on a GPU: kernels, products in one launch, captures."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import grouped_cases as cases
import pytest
import torch
from quantize_cases import GPU
from said import said
from test_grouped_linear import (
    LAYOUTS,
    MODES,
    RECIPES,
    SPLITS,
    G,
    K,
    N,
    T,
    assert_close,
    expected,
    made,
    poisoned,
    run,
    values,
)

import fuser
from fuser import recipe as recipes
from fuser.formats import DType
from fuser.recipe import Format

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@cases.EVERY_SPLIT
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ends_are_the_references(splits: tuple[int, ...], dtype: torch.dtype) -> None:
    cases.check_ends(GPU, splits, dtype)


@cases.EVERY_WIDTH
@cases.EVERY_DTYPE
@cases.EVERY_SPLIT
@pytest.mark.parametrize("shift", [0, 1])
def test_tails_and_biases_are_the_references(
    splits: tuple[int, ...], columns: int, dtype: torch.dtype, shift: int
) -> None:
    cases.check_tail(GPU, splits, columns, dtype, shift)
    for is_scaled in (False, True):
        cases.check_bias(GPU, splits, columns, dtype, is_scaled, shift)


@cases.EVERY_SPLIT
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tiles_are_the_references(splits: tuple[int, ...], dtype: torch.dtype) -> None:
    cases.check_tiles(GPU, splits, dtype)


@pytest.mark.parametrize(("size", "groups"), [(128, 3), (160, 40), (1, 5)])
def test_tiles_of_groups_of_one_size(size: int, groups: int) -> None:
    cases.check_tiles_of_one_size(GPU, size, groups)


@cases.EVERY_DTYPE
@pytest.mark.parametrize("columns", [64, 37, 264, 2056])
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_of_padded_groups(columns: int, dtype: torch.dtype, shift: int) -> None:
    cases.check_padding(GPU, columns, dtype, shift)


@cases.EVERY_DTYPE
@cases.EVERY_FLOAT8
@pytest.mark.parametrize("columns", [136, 37, 2056])
@pytest.mark.parametrize("is_delayed", [False, True], ids=["current", "delayed"])
@cases.EVERY_ORDER
def test_a_group_in_fp8_has_a_scale_of_its_own(
    columns: int, dtype: torch.dtype, to: DType, is_delayed: bool, between: int | None
) -> None:
    cases.check_grouped_fp8(GPU, columns, dtype, to, is_delayed, between)


@cases.EVERY_DTYPE
@cases.EVERY_SCALING
def test_a_small_amax_of_a_group_counts_as_epsilon_and_scales_may_be_powers_of_two(
    dtype: torch.dtype, scaling: dict[str, Any]
) -> None:
    cases.check_grouped_fp8(GPU, 136, dtype, DType.kFloat8E4M3, False, **scaling)
    for block_dim in (1, 2):
        cases.check_grouped_blocks(GPU, dtype, block_dim, **scaling)


@cases.EVERY_DTYPE
@pytest.mark.parametrize("columns", [64, 37])
@pytest.mark.parametrize("between", [8, 1])
@pytest.mark.parametrize("choices", [1, 2, 7])
def test_tokens_by_index_are_the_rows_of_permute(
    columns: int, dtype: torch.dtype, between: int, choices: int
) -> None:
    cases.check_gathered_rows(GPU, columns, dtype, between, choices)


@cases.EVERY_DTYPE
@cases.EVERY_ORDER
def test_blocks_do_not_reach_over_the_end_of_a_group(
    dtype: torch.dtype, between: int | None
) -> None:
    for block_dim in (1, 2):
        cases.check_grouped_blocks(GPU, dtype, block_dim, between)
    cases.check_grouped_mxfp8(GPU, dtype, between)


@cases.EVERY_DTYPE
@pytest.mark.parametrize("name", cases.WITH_SUMS)
def test_gradients_of_scales_and_biases_beside_a_quantized_gradient(
    name: str, dtype: torch.dtype
) -> None:
    for of_scales in (dtype, torch.float32):
        cases.check_sums_beside(GPU, GPU, name, dtype, of_scales)
    cases.check_sums_beside(GPU, GPU, name, dtype, dtype, is_padded=False)


@pytest.mark.parametrize("columns", [144, 16])
@cases.EVERY_DTYPE
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "Hadamard"])
@pytest.mark.parametrize("stochastic", [False, True], ids=["to nearest", "stochastic"])
@cases.EVERY_ORDER
def test_a_group_in_nvfp4_has_an_amax_of_its_own(
    columns: int, dtype: torch.dtype, hadamard: bool, stochastic: bool, between: int | None
) -> None:
    cases.check_grouped_nvfp4(GPU, columns, dtype, hadamard, stochastic, between)


@pytest.mark.parametrize("columns", [64, 37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["rows", "padded rows"])
def test_an_activation_of_padded_groups_is_quantized_as_it_is_computed(
    columns: int, dtype: torch.dtype, is_backward: bool, is_padded: bool
) -> None:
    cases.check_chain_of_padded_groups(GPU, columns, dtype, is_backward, is_padded)


def is_one_launch() -> bool:
    return torch.cuda.get_device_capability()[0] in (9, 10)


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_equals_a_loop_of_linears(
    dtype: torch.dtype, mode: dict[str, bool], layout: dict[str, bool], splits: tuple[int, ...]
) -> None:
    """Three times: recorded, and repeated. Rows after the last group have NaN in them."""
    op = made(dtype, **mode, **layout)
    x, dy = values(T, K, seed=1, dtype=dtype), values(T, N, seed=2, dtype=dtype)
    scales = values(T, seed=3, dtype=dtype) if op.scale_bias else None
    exact = {n: t.cuda() for n, t in expected(op, x, dy, splits, scales).items()}
    op, count = op.cuda(), sum(splits)
    x, dy = (poisoned(t, count).cuda() for t in (x, dy))
    scales = None if scales is None else poisoned(scales, count).cuda()
    for _ in range(4):
        found = run(op, x, dy, splits, scales)
        assert_close(found, exact, {FP32: 1e-5, BF16: 0.01, FP16: 0.002}[dtype])
        for name in ("y", "dx", "dscales"):
            assert name not in found or not found[name][count:].any()


@pytest.mark.parametrize("sizes", [(20, 36), (33, 7)], ids=str)
def test_sizes_that_are_no_whole_vectors(sizes: tuple[int, int]) -> None:
    k, n = sizes
    op = fuser.GroupedLinear(3, k, n, dtype=BF16, device="cuda")
    x = torch.randn(50, k, dtype=BF16, device="cuda", requires_grad=True)
    splits = torch.tensor([20, 0, 17], device="cuda")
    y = op(x, splits)
    dy = torch.randn_like(y)
    y.backward(dy)
    for g, rows in ((0, slice(0, 20)), (2, slice(20, 37))):
        weight = getattr(op, f"weight{g}")
        assert torch.allclose(y[rows], x[rows] @ weight.t(), atol=0.05, rtol=0.02)
        assert torch.allclose(x.grad[rows], dy[rows] @ weight, atol=0.05, rtol=0.02)
        assert torch.allclose(weight.grad, dy[rows].t() @ x[rows], atol=0.2, rtol=0.02)
    assert not y[37:].any()
    assert not op.weight1.grad.any()


def test_inputs_of_every_layout() -> None:
    op = fuser.GroupedLinear(G, K, N, dtype=BF16, device="cuda")
    x = torch.randn(T, K, dtype=BF16, device="cuda")
    splits = torch.tensor(SPLITS["first empty"], device="cuda")
    wanted = op(x, splits)
    wide = torch.randn(T, 3 * K, dtype=BF16, device="cuda")
    wide[:, 1 : K + 1] = x
    memory = torch.empty(T * K + 1, dtype=BF16, device="cuda")
    for given in (
        x.t().contiguous().t(),
        wide[:, 1 : K + 1],
        memory[1:].view(T, K).copy_(x),
    ):
        assert torch.equal(op(given, splits), wanted)
    one = x[:1].expand(T, K)
    assert torch.equal(op(one, splits), op(one.contiguous(), splits))


def experts(dtype: torch.dtype = BF16) -> fuser.Sequential:
    options: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    return fuser.Sequential(
        fuser.GroupedLinear(G, K, 2 * N, **options),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(G, N, K, scale_bias=True, **options),
    )


def some_splits(seed: int) -> list[int]:
    rng = random.Random(seed)
    places = sorted(rng.randint(0, T) for _ in range(G))
    return [b - a for a, b in zip([0, *places], places, strict=False)]


AT_ONCE = {
    "bf16": None,
    "current": recipes.Float8CurrentScaling(),
    "current, E4M3": recipes.Float8CurrentScaling(fp8_format=Format.E4M3),
    "delayed": recipes.DelayedScaling(),
    "128-block": recipes.Float8BlockScaling(),
    "MXFP8": recipes.MXFP8BlockScaling(),
    "NVFP4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "current, high precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
    "128-block, dequantized": recipes.Float8BlockScaling(backward_override="dequantized"),
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", AT_ONCE.values(), ids=AT_ONCE)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@EVERY_RECIPE
def test_split_sizes_are_not_read_on_the_host(recipe: Any) -> None:
    if not is_one_launch():
        pytest.skip("each group has its own product here")
    model = experts()
    x = torch.randn(T, K, dtype=BF16, device="cuda", requires_grad=True)
    scales = torch.rand(T, dtype=BF16, device="cuda", requires_grad=True)
    dy = torch.randn(T, K, dtype=BF16, device="cuda")
    splits = torch.tensor(some_splits(0), device="cuda")
    for i in range(5):
        if i == 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x, splits, scales, splits, scales)
            y.backward(dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:.* is emulated")
@EVERY_RECIPE
def test_replays_with_other_splits_equal_eager_calls_bit_by_bit(recipe: Any) -> None:
    if not is_one_launch():
        pytest.skip("each group has its own product here")
    if recipe is not None and recipe.delayed():
        pytest.skip("scales change from step to step; the next test compares steps")
    model = experts()
    x = torch.randn(T, K, dtype=BF16, device="cuda", requires_grad=True)
    scales = torch.rand(T, dtype=BF16, device="cuda", requires_grad=True)
    dy = torch.randn(T, K, dtype=BF16, device="cuda")
    splits = torch.tensor(some_splits(0), dtype=torch.int32, device="cuda")
    leaves = [x, scales, *model.parameters()]

    def step() -> list[torch.Tensor]:
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, splits, scales, splits, scales)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(100):
        splits.copy_(torch.tensor(some_splits(seed)))
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        for found, wanted in zip(captured, step(), strict=True):
            assert torch.equal(found, wanted)


def arguments(seed: int) -> tuple[torch.Tensor, ...]:
    """Arguments of experts: other values and split sizes for each seed, and larger values.

    The scales of the activation and of the bias are two tensors: a graph returns the whole gradient
    of a tensor for every place in which it is passed.
    """
    torch.manual_seed(seed)
    like: dict[str, Any] = {"dtype": BF16, "device": "cuda"}
    x = torch.randn(T, K, **like) * 2.0 ** (seed - 3)
    scales, bias_scales = (torch.rand(T, **like) for _ in range(2))
    splits = torch.tensor(some_splits(seed), device="cuda")
    given = (x, splits, scales, splits, bias_scales)
    return tuple(t.requires_grad_() if t.is_floating_point() else t for t in given)


def training_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, recipe: Any, seed: int
) -> list[torch.Tensor]:
    """The output and all gradients of one step."""
    given = arguments(seed)
    dy = torch.randn(T, K, dtype=BF16, device="cuda")
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(*given)
    y.backward(dy)
    leaves = [t for t in (*given, *model.parameters()) if t.requires_grad]
    found = [y.detach().clone(), *(leaf.grad.clone() for leaf in leaves)]
    optimizer.step()
    optimizer.zero_grad()
    return found


def assert_equal(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        assert torch.isfinite(other).all()
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@EVERY_RECIPE
def test_make_graphed_callables_takes_a_mixture_of_experts(recipe: Any) -> None:
    """A graphed and an eager model take the same steps from the same state.

    Under delayed scaling each step quantizes with the scales that the steps before have left, so
    neither the runs before the capture nor the capture may leave an amax.
    """
    if not is_one_launch():
        pytest.skip("each group has its own product here")
    model, plain = experts(), experts()
    plain.load_state_dict(model.state_dict())
    graphed = fuser.make_graphed_callables(model, arguments(0), recipe=recipe)
    of_graphed, of_plain = (
        torch.optim.SGD(each.parameters(), lr=0.01) for each in (graphed, plain)
    )
    for seed in range(6):
        found = training_step(graphed, of_graphed, recipe, seed)
        assert_equal(found, training_step(plain, of_plain, recipe, seed))
    assert_equal(graphed.state_dict().values(), plain.state_dict().values())
    if recipe is not None and recipe.delayed():
        for op in (graphed[0], graphed[2]):
            assert all((state.scale != 1).any() for state in op._delayed.values())


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("size", [(K, N), (256, 384)], ids=str)
@EVERY_RECIPE
def test_groups_at_once_give_what_a_loop_gives(
    recipe: Any, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the rounding of other products."""
    if not is_one_launch():
        pytest.skip("each group has its own product here")
    torch.manual_seed(0)
    op = fuser.GroupedLinear(G, *size, dtype=BF16, device="cuda")
    x = torch.randn(900, size[0], dtype=BF16, device="cuda")
    dy = torch.randn(900, size[1], dtype=BF16, device="cuda")
    splits = (300, 0, 77, 500)
    other = copy.deepcopy(op)
    found = run(op, x, dy, splits, recipe=recipe)
    monkeypatch.setattr(fuser.GroupedLinear, "check_device_splits", True)
    exact = {n: t.double() for n, t in run(other, x, dy, splits, recipe=recipe).items()}
    assert_close(found, exact, 0.01)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("rows", [0, 20])
@EVERY_RECIPE
def test_no_group_has_a_row(recipe: Any, rows: int) -> None:
    """Gradients are zeros, whatever memory held before."""
    if not is_one_launch():
        pytest.skip("each group has its own product here")
    model = experts()
    splits = torch.zeros(G, dtype=torch.int32, device="cuda")
    scales = torch.rand(rows, dtype=BF16, device="cuda")
    for _ in range(4):
        poison = [torch.full((n,), float("nan"), device="cuda") for n in (1, 8, 64, 512, 4096)]
        del poison
        x = torch.randn(rows, K, dtype=BF16, device="cuda", requires_grad=True)
        model.zero_grad(set_to_none=True)
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, splits, scales, splits, scales)
        y.backward(torch.randn_like(y))
        assert not y.any()
        assert not x.grad.any()
        for param in model.parameters():
            assert torch.equal(param.grad, torch.zeros_like(param))


def test_sizes_are_checked_under_a_recipe_if_that_is_asked() -> None:
    model = experts()
    x = torch.randn(T, K, dtype=BF16, device="cuda")
    scales = torch.rand(T, dtype=BF16, device="cuda")
    fitting, wild = (torch.tensor(s, device="cuda") for s in ([T, 0, 0, 0], [T, 1, 0, 0]))
    with fuser.autocast(recipe=recipes.Float8CurrentScaling()):
        model(x, fitting, scales, fitting, scales)
        model[0].check_device_splits = model[2].check_device_splits = True
        for _ in range(3):
            with pytest.raises(ValueError, match=said("grouped-sum-more-rows", T + 1, T)):
                model(x, wild, scales, wild, scales)


class MixtureOfExperts(torch.nn.Module):
    """A router, the permutation, experts, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = fuser.moe.Router(K, G, 2, device="cuda")
        self.experts = experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routing = self.router(x)
        rows = fuser.moe.permute(x, routing.expert_indices, routing.probs, num_experts=G)
        scales = rows.probs.to(x.dtype)
        splits = rows.split_sizes
        y = self.experts(rows.x, splits, scales, splits, scales)
        return fuser.moe.unpermute(y, rows)


def test_a_whole_layer_is_captured_with_its_router() -> None:
    if not is_one_launch():
        pytest.skip("each group has its own product here")
    torch.manual_seed(0)
    layer, plain = MixtureOfExperts(), MixtureOfExperts()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(T, K, dtype=BF16, device="cuda", requires_grad=True)
    graphed = fuser.make_graphed_callables(layer, (x,))
    for seed in range(5):
        torch.manual_seed(seed)
        given = torch.randn(T, K, dtype=BF16, device="cuda", requires_grad=True)
        other = given.detach().clone().requires_grad_()
        dy = torch.randn(T, K, dtype=BF16, device="cuda")
        found, wanted = graphed(given), plain(other)
        assert torch.equal(found, wanted)
        found.backward(dy)
        wanted.backward(dy)
        assert torch.equal(given.grad, other.grad)
        for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
            ours.grad = theirs.grad = None


def dispatched(fusions: Any = fuser.FUSIONS) -> fuser.Sequential:
    """A layer of experts as one pipeline, with unused rows."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"bias": False, "dtype": BF16, "device": "cuda"}
    dispatch = fuser.MoeDispatch(G, capacity=3 * T)
    for index, channel in enumerate(("sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    return fuser.Sequential(
        dispatch,
        fuser.GroupedLinear(G, K, 2 * N, **options).set_extra_input_channel(0, "sizes"),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        fuser.GroupedLinear(G, N, K, **options).set_extra_input_channel(0, "sizes"),
        fuser.MoeCombine().set_extra_input_channel(0, "rows"),
        fusions=fusions,
    )


class DispatchedMixture(torch.nn.Module):
    """A router, and the rest of the layer as one pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.router = fuser.moe.Router(K, G, 2, device="cuda")
        self.experts = dispatched()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routing = self.router(x)
        return self.experts(x, routing.expert_indices, routing.probs)


def some_routing(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert indices, of which some are -1, and probabilities."""
    torch.manual_seed(seed)
    indices = torch.rand(T, G).argsort(1)[:, :2].masked_fill(torch.rand(T, 2) < 0.2, -1)
    return indices.cuda(), torch.rand(T, 2).cuda()


@pytest.mark.filterwarnings("ignore:.* is emulated")
@EVERY_RECIPE
def test_tokens_that_are_quantized_by_index_have_the_bits_of_permuted_rows(recipe: Any) -> None:
    """Five times: recorded, and repeated."""
    if not is_one_launch():
        pytest.skip("each group has its own product here")
    found = []
    for fusions in (
        fuser.FUSIONS,
        tuple(f for f in fuser.FUSIONS if f.__name__ != "DispatchedExperts"),
    ):
        model, results = dispatched(fusions), []
        for seed in range(5):
            indices, probs = some_routing(seed)
            wide = torch.randn(T, K + 3, dtype=BF16, device="cuda")
            leaves = [wide[:, 1 : K + 1].requires_grad_(), probs.requires_grad_()]
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(leaves[0], indices, leaves[1])
            dy = torch.randn(T, K, dtype=BF16, device="cuda")
            results += [y, *torch.autograd.grad(y, [*leaves, *model.parameters()], dy)]
        found.append(results)
    assert_equal(*found)


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_layer_whose_tokens_are_quantized_by_index_is_captured_with_its_router() -> None:
    """Replays equal eager calls, with other tokens and other routings."""
    if not is_one_launch():
        pytest.skip("each group has its own product here")
    recipe = recipes.Float8CurrentScaling()
    torch.manual_seed(0)
    layer = DispatchedMixture()
    x = torch.randn(T, K, dtype=BF16, device="cuda", requires_grad=True)
    indices, probs = some_routing(0)
    with fuser.autocast(recipe=recipe):
        plan = layer.experts.plan(x, indices, probs.requires_grad_())
    assert plan.forward[0].fusion == plan.backward[-1].fusion == "DispatchedExperts"
    plain = DispatchedMixture()
    plain.load_state_dict(layer.state_dict())
    graphed = fuser.make_graphed_callables(layer, (x,), recipe=recipe)
    for seed in range(5):
        torch.manual_seed(seed)
        given = torch.randn(T, K, dtype=BF16, device="cuda", requires_grad=True)
        other = given.detach().clone().requires_grad_()
        dy = torch.randn(T, K, dtype=BF16, device="cuda")
        results = []
        for model, tokens in ((graphed, given), (plain, other)):
            with fuser.autocast(recipe=recipe):
                y = model(tokens)
            y.backward(dy)
            results.append([y.detach().clone(), tokens.grad, *(p.grad for p in model.parameters())])
        assert_equal(*results)
        for each in (layer, plain):
            each.zero_grad()


def test_a_rows_bits_depend_on_that_row_and_its_expert_alone() -> None:
    if not is_one_launch():
        pytest.skip("each group has its own product here")
    op = fuser.GroupedLinear(8, 512, 768, bias=False, dtype=BF16, device="cuda")
    row = torch.randn(1, 512, dtype=BF16, device="cuda")
    found = []
    for count in (1, 7, 64, 200, 1000, 5000):
        x = torch.randn(8 * count, 512, dtype=BF16, device="cuda")
        x[3 * count + count // 2] = row
        splits = torch.full((8,), count, device="cuda")
        found.append(op(x, splits)[3 * count + count // 2])
    assert all(torch.equal(one, found[0]) for one in found)


def test_sizes_on_the_host_are_taken_and_checked() -> None:
    op = fuser.GroupedLinear(G, K, N, dtype=BF16, device="cuda")
    x = torch.randn(T, K, dtype=BF16, device="cuda")
    splits = torch.tensor(SPLITS["first empty"])
    assert torch.equal(op(x, splits), op(x, splits.cuda()))
    with pytest.raises(ValueError, match=said("grouped-sum-more-rows", 101, 96)):
        op(x, torch.tensor([50, 50, 0, 1]))


def test_sizes_on_the_gpu_that_do_not_fit_overrun_nothing() -> None:
    op = fuser.GroupedLinear(G, K, N, dtype=BF16, device="cuda")
    x = torch.randn(T, K, dtype=BF16, device="cuda")
    wild = torch.tensor([50, -7, 2**40, 9], device="cuda")
    fitting = torch.tensor([50, 0, T - 50, 0], device="cuda")
    if is_one_launch():
        assert torch.equal(op(x, wild), op(x, fitting))
    op.check_device_splits = True
    with pytest.raises(
        ValueError, match=said("grouped-split-not-negative", "50, -7, 1099511627776, 9")
    ):
        op(x, wild)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_give_what_the_cpu_gives(name: str) -> None:
    """Within the rounding of the products."""
    recipe, splits = RECIPES[name](), SPLITS["sum below the rows"]
    x, dy = values(T, K, seed=1, dtype=BF16), values(T, N, seed=2, dtype=BF16)
    op = made(BF16)
    wanted = {n: t.double() for n, t in run(op, x, dy, splits, recipe=recipe).items()}
    op = made(BF16).cuda()
    found = run(op, x.cuda(), dy.cuda(), splits, recipe=recipe)
    assert_close({n: t.cpu() for n, t in found.items()}, wanted, 0.02)
