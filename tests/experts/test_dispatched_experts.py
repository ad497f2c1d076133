"""DispatchedExperts: the bits of the ops one by one, without a copy of the tokens."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulator import why_unavailable
from one_launch_experts import one_by_one
from pipeline_kernels import on_kernels
from said import sentence
from test_grouped_mlp import OVERRIDES, groups_at_once  # noqa: F401 - a fixture
from test_grouped_products import (  # noqa: F401 - a fixture, and marks
    PADDED,
    InFp64,
    at_once,
    pytestmark,
)

import fuser
from fuser import recipe as recipes
from fuser.basic_ops import grouped_products, moe
from fuser.cuda.grouped import group_tiles
from fuser.formats import tile_count
from fuser.functional import permutation
from fuser.functional.grouped import PaddedGroups
from fuser.fused_ops import DispatchedExperts, GroupedMLP
from fuser.gemm import grouped
from fuser.runtime import recorded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
G, K, F, TOKENS, CHOICES = 4, 32, 48, 90, 2
UNFUSED = tuple(f for f in fuser.FUSIONS if f not in (DispatchedExperts, GroupedMLP))
WITHOUT_GATHER = tuple(f for f in fuser.FUSIONS if f is not DispatchedExperts)
GATHERED = {
    name: make
    for name, make in OVERRIDES.items()
    if make() is not None and make().backward_override != "high_precision"
}
EVERY_RECIPE = pytest.mark.parametrize("make", GATHERED.values(), ids=GATHERED)
needs_emulator = pytest.mark.skipif(
    why_unavailable() is not None, reason=f"needs the emulator: {why_unavailable()}"
)


def layer(
    fusions: Any = fuser.FUSIONS,
    *,
    is_mlp: bool = True,
    features: int = K,
    dtype: torch.dtype = BF16,
    capacity: int | None = None,
    returns: bool = False,
    **options: Any,
) -> fuser.Sequential:
    """A layer of experts, of a grouped linear alone if not ``is_mlp``."""
    torch.manual_seed(0)
    options = {"bias": False, "dtype": dtype, "device": "cpu", **options}
    dispatch = fuser.MoeDispatch(G, capacity=capacity)
    for index, channel in enumerate(("sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=returns)
    up = fuser.GroupedLinear(G, features, 2 * F if is_mlp else features, **options)
    ops = [dispatch, up.set_extra_input_channel(0, "sizes")]
    if is_mlp:
        down = fuser.GroupedLinear(G, F, features, **options)
        ops += [fuser.ScaledSwiGLU(), down.set_extra_input_channel(0, "sizes")]
        ops[2].set_extra_input_channel(0, "probs")
    for op in ops[1::2]:
        if op.scale_bias:
            op.set_extra_input_channel(1, "probs")
    combine = fuser.MoeCombine().set_extra_input_channel(0, "rows")
    model = fuser.Sequential(*ops, combine, fusions=fusions)
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)
    return model


def routing(
    seed: int = 0, experts: int = G, dtype: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert indices, none of them 1 and some of them -1; and probabilities."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(TOKENS, experts, generator=generator)
    order[:, 1] = 2  # an expert without tokens
    indices = order.argsort(1)[:, :CHOICES]
    is_dropped = torch.rand(indices.shape, generator=generator) < 0.2
    probs = torch.rand(TOKENS, CHOICES, generator=generator) + 0.1
    return indices.masked_fill(is_dropped, -1).to(dtype), probs


def tokens(seed: int = 1, features: int = K, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, features, generator=generator).to(dtype)


def steps(
    model: fuser.Sequential,
    recipe: Any,
    x: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    count: int = 2,
) -> list[torch.Tensor]:
    """Output, all gradients and the state after each of some steps."""
    found = []
    for step in range(count):
        indices, probs = routing(step, dtype=index_dtype)
        given = tokens(step + 1, model[1].in_features) if x is None else x
        leaves = [given.detach().requires_grad_(), probs.requires_grad_()]
        model.zero_grad()
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y, *others = y if isinstance(y := model(leaves[0], indices, leaves[1]), tuple) else (y,)
        dy = tokens(step + 7, y.shape[1]).to(y.dtype)
        floating = [each for each in others if each.is_floating_point()]
        torch.autograd.backward([y, *floating], [dy, *(each.detach() for each in floating)])
        found += [y.detach(), *(each.detach() for each in others)]
        found += [leaf.grad for leaf in (*leaves, *model.parameters())]
        found += [value.clone() for value in model.state_dict().values()]
    return found


def steps_in_fp64(*args: Any) -> list[torch.Tensor]:
    """Of products and sums in fp64, which fusions may compute over other layouts."""
    with InFp64():
        return steps(*args)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype is other.dtype, place
        assert torch.equal(one, other), place
        assert one.isfinite().all()


def plan_of(model: fuser.Sequential, recipe: Any, x: torch.Tensor | None = None) -> Any:
    indices, probs = routing()
    x = tokens(features=model[1].in_features) if x is None else x
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        return model.plan(x.requires_grad_(), indices, probs.requires_grad_())


def is_gathered(model: fuser.Sequential, recipe: Any) -> bool:
    plan = plan_of(copy.deepcopy(model), recipe)
    steps = (plan.forward[0], plan.backward[-1])
    return all(step.fusion == "DispatchedExperts" for step in steps)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods of lazy rows that were called."""
    calls: list[str] = []
    for name in ("producer", "_from_reference", "_from_kernel"):
        method = getattr(permutation._GatheredRows, name)

        def counted(self: Any, method: Any = method, name: str = name) -> Any:
            calls.append(name)
            return method(self)

        monkeypatch.setattr(permutation._GatheredRows, name, counted)
    return calls


OF_LAYERS: dict[str, dict[str, Any]] = {
    "an MLP": {},
    "a linear": {"is_mlp": False},
    "unused rows": {"capacity": 200},
    "dropped rows": {"capacity": 100},
    "no rows": {"capacity": 0},
    "biases": {"bias": True},
    "odd features": {"features": 36, "is_mlp": False},
    "one weight": {"single_grouped_weight": True},
    "outputs for the caller": {"returns": True},
    "fp16": {"dtype": FP16},
}


@pytest.mark.sampled
@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("options", OF_LAYERS.values(), ids=OF_LAYERS)
@EVERY_RECIPE
def test_bits_are_those_of_the_ops(make: Callable[[], Any], options: dict[str, Any]) -> None:
    model = layer(**options)
    assert is_gathered(model, make())
    fusions = WITHOUT_GATHER if options.get("bias") else UNFUSED
    other = layer(fusions, **options)
    assert_equal(steps_in_fp64(model, make()), steps_in_fp64(other, make()))


OF_TOKENS: dict[str, Callable[[], torch.Tensor]] = {
    "three dimensions": lambda: tokens().view(9, 10, K),
    "columns apart": lambda: tokens(features=2 * K)[:, ::2],
    "rows apart": lambda: tokens(features=K + 3)[:, 1 : K + 1],
    "fp32": lambda: tokens(dtype=FP32),
}


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("make_x", OF_TOKENS.values(), ids=OF_TOKENS)
@pytest.mark.parametrize("is_mlp", [True, False], ids=["MLP", "linear"])
def test_bits_of_other_tokens_are_those_of_the_ops(
    make_x: Callable[[], torch.Tensor], index_dtype: torch.dtype, is_mlp: bool
) -> None:
    """Tokens in fp32 are cast before they are read by index, and not after."""
    recipe = recipes.Float8CurrentScaling()
    found = [
        steps_in_fp64(layer(f, is_mlp=is_mlp), recipe, make_x(), index_dtype)
        for f in (fuser.FUSIONS, UNFUSED)
    ]
    assert_equal(*found)


@pytest.mark.usefixtures("groups_at_once")
def test_bits_under_autocast_are_those_of_the_ops() -> None:
    found = []
    for fusions in (fuser.FUSIONS, UNFUSED):
        with torch.autocast("cpu", BF16):
            model, x = layer(fusions, dtype=FP32), tokens(dtype=FP32)
            found.append(steps_in_fp64(model, recipes.MXFP8BlockScaling(), x))
    assert_equal(*found)


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("is_mlp", [True, False], ids=["MLP", "linear"])
def test_biases_that_are_scaled_have_the_bits_of_the_ops(is_mlp: bool) -> None:
    """The probabilities have gradients from up to three ops, which are added in one order."""
    options: dict[str, Any] = {"bias": True, "scale_bias": True, "is_mlp": is_mlp}
    recipe = recipes.MXFP8BlockScaling()
    fused, alone = (steps_in_fp64(layer(f, **options), recipe) for f in (fuser.FUSIONS, UNFUSED))
    assert len(fused) == len(alone)
    for one, other in zip(fused, alone, strict=True):
        # Sums of rows have other rows of zeros in between.
        assert torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("frozen", ["x", "probs", "up", "down", "x and probs", "all"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    found = []
    for fusions in (fuser.FUSIONS, UNFUSED):
        model = layer(fusions)
        for name, place in (("up", 1), ("down", 3)):
            model[place].requires_grad_(frozen not in (name, "all"))
        indices, probs = routing()
        x = tokens().requires_grad_("x" not in frozen and frozen != "all")
        probs.requires_grad_("probs" not in frozen and frozen != "all")
        with InFp64():
            with fuser.autocast(recipe=recipes.Float8CurrentScaling()):
                y = model(x, indices, probs)
            if y.requires_grad:
                y.backward(tokens(7))
        found.append([y.detach(), x.grad, probs.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_emulator)])
def test_groups_of_the_caller_may_have_rows_without_a_token(kernels: bool) -> None:
    """Sizes that are not those of the dispatch; rows without an assignment are zeros."""
    found = []
    for fusions in (fuser.FUSIONS, WITHOUT_GATHER):
        options = {"bias": False, "dtype": BF16, "device": "cpu"}
        torch.manual_seed(0)
        dispatch = fuser.MoeDispatch(G, capacity=210)
        dispatch.set_extra_output_channel(1, "probs", output_to_caller=False)
        model = fuser.Sequential(
            dispatch,
            fuser.GroupedLinear(G, K, 2 * F, **options),
            fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
            fuser.GroupedLinear(G, F, K, **options),
            fusions=fusions,
        )
        (indices, probs), sizes = routing(), torch.tensor([20, 150, 0, 35])
        x, probs = tokens().requires_grad_(), probs.requires_grad_()
        recipe = recipes.Float8CurrentScaling()
        with on_kernels() if kernels else contextlib.nullcontext():
            for _ in range(3):
                model.zero_grad()
                x.grad = probs.grad = None
                with fuser.autocast(recipe=recipe):
                    y, *others = model(x, indices, probs, sizes, sizes)
                y.backward(torch.ones_like(y))
                found_now = [y.detach(), *others, x.grad, probs.grad]
        assert int(others[0].sum()) < 205
        found.append([*found_now, *(p.grad for p in model.parameters())])
    assert_equal(*found)


@pytest.mark.usefixtures("groups_at_once")
def test_buffers_of_the_caller_are_used() -> None:
    found = []
    for fusions in (fuser.FUSIONS, UNFUSED):
        model = layer(fusions, is_mlp=False, capacity=200)
        (indices, probs), x = routing(), tokens().requires_grad_()
        out, grad = (torch.empty(200, K, dtype=BF16) for _ in range(2))
        kwargs = {1: {"output": out, "grad_input": grad}}
        with fuser.autocast(recipe=recipes.Float8CurrentScaling()):
            y = model(x, indices, probs, op_kwargs=kwargs)
        y.backward(tokens(7))
        assert out.any()
        assert grad.any()
        found.append([y.detach(), x.grad, out, grad])
    assert_equal(*found)


@pytest.mark.usefixtures("groups_at_once")
def test_sizes_that_are_read_run_the_experts_one_after_the_other() -> None:
    """Set after the plan was made."""
    found = []
    for fusions in (fuser.FUSIONS, UNFUSED):
        model = layer(fusions)
        steps(model, recipes.MXFP8BlockScaling())
        model[1].check_device_splits = True
        found.append(steps(model, recipes.MXFP8BlockScaling()))
    assert_equal(*found)


@pytest.mark.usefixtures("groups_at_once")
def test_weights_of_the_first_microbatch_are_kept() -> None:
    found = []
    for firsts in ((True, False), (None, None)):
        model = layer()
        for first in firsts:
            (indices, probs), x = routing(), tokens().requires_grad_()
            kwargs = {i: {"is_first_microbatch": first} for i in (1, 3)}
            with fuser.autocast(recipe=recipes.MXFP8BlockScaling()):
                y = model(x, indices, probs, op_kwargs=kwargs)
            y.backward(tokens(7))
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert_equal(*found)


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    found = []
    for is_checkpointed in (False, True):
        (indices, probs), x, model = routing(), tokens().requires_grad_(), layer()
        with fuser.autocast(recipe=recipes.Float8CurrentScaling()):
            if is_checkpointed:
                y = fuser.checkpoint(model, x, indices, probs, use_reentrant=reentrant)
            else:
                y = model(x, indices, probs)
            y.backward(tokens(7))
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert_equal(*found)


# -- on kernels -----------------------------------------------------------------------


@pytest.mark.sampled
@needs_emulator
@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("options", [{}, {"features": 36, "is_mlp": False}], ids=str)
@EVERY_RECIPE
def test_on_kernels_the_quantizer_reads_tokens_by_index(
    make: Callable[[], Any], options: dict[str, Any], gathers: list[str]
) -> None:
    """And no kernel writes their rows, unless the format pads columns."""
    features = options.get("features", K)
    found = []
    for fusions in (fuser.FUSIONS, WITHOUT_GATHER):
        model = layer(fusions, **options)
        with on_kernels():
            # Rows that are apart, so that vectors are not aligned, and a call that is repeated.
            x = tokens(features=features + 3)[:, 1 : features + 1]
            found.append(steps(model, make(), x, count=3))
    assert_equal(*found)
    assert "producer" in gathers or features == 36
    assert "_from_reference" not in gathers
    assert "_from_kernel" not in gathers or features == 36


def launched(
    split_sizes: torch.Tensor | int, groups: int, rows: int, device: torch.device
) -> PaddedGroups:
    """As ``padded_groups`` on a GPU."""
    one_size = None if isinstance(split_sizes, torch.Tensor) else split_sizes
    tiles = torch.empty(tile_count(rows, groups, one_size), 4, dtype=torch.int32, device=device)
    ends, padded_ends = (torch.empty(groups, dtype=torch.int32, device=device) for _ in range(2))
    group_tiles(split_sizes, rows, ends=ends, padded_ends=padded_ends, tiles=tiles)
    return PaddedGroups(ends, padded_ends, tiles, rows)


@needs_emulator
@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("capacity", [None, 200])
@pytest.mark.parametrize(
    "make", [recipes.Float8CurrentScaling, recipes.Float8BlockScaling, recipes.MXFP8BlockScaling]
)
def test_recorded_passes_follow_the_routing_of_each_call(
    make: Callable[[], Any], capacity: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where neither indices nor sizes are read."""
    monkeypatch.setattr(moe, "check_values", lambda *args: None)
    monkeypatch.setattr(moe, "_check_rows", lambda *args: None)
    played: list[int] = []
    play = recorded._played

    def counted(*args: Any) -> Any:
        played.append(1)
        return play(*args)

    monkeypatch.setattr(recorded, "_played", counted)
    found = [steps(layer(UNFUSED, capacity=capacity), make(), count=5)]

    def groups_of(sizes: torch.Tensor, x: Any, **_: Any) -> grouped.Groups:
        padded = launched(sizes, len(sizes), x.shape[0], x.device)
        return grouped.Groups(padded.ends, None, padded)

    monkeypatch.setattr(grouped_products, "padded_groups", launched)
    monkeypatch.setattr(grouped, "groups_of", groups_of)
    with on_kernels():
        found.append(steps(layer(capacity=capacity), make(), count=5))
    assert len(played) == 6  # forwards and backwards of the last three steps
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.3)


# -- plans ----------------------------------------------------------------------------


@pytest.mark.usefixtures("groups_at_once")
def test_the_plan_names_the_fusion_and_moves_fewer_bytes() -> None:
    recipe = recipes.Float8CurrentScaling()
    plan, without = (plan_of(layer(f), recipe) for f in (fuser.FUSIONS, WITHOUT_GATHER))
    assert plan.forward[0].ops == plan.backward[-1].ops == (0, 1, 2, 3)
    kernels = plan.forward[0].kernel.split(", ")
    assert kernels[:3] == ["sort by expert", "permute probs", "grouped permute+quantize input"]
    before = ", ".join(step.kernel for step in without.forward[:2]).split(", ")
    assert len(kernels) == len(before) - 1
    # The rows are not read again; what is saved for backward is counted in both.
    saved = sum(step.bytes_per_token for step in without.forward)
    saved -= sum(step.bytes_per_token for step in plan.forward)
    assert saved >= CHOICES * K * BF16.itemsize
    assert [step.kernel for step in plan.backward[1:]] == [
        ", ".join(step.kernel for step in without.backward[1:])
    ]
    notes = [note.text for note in plan.notes if note.fusion == "DispatchedExperts"]
    assert notes == [
        "Quantizes the experts' input from the tokens, by index: the rows are not copied.",
        "Finds and pads the groups once: rows stay padded between the products.",
    ]


@pytest.mark.usefixtures("groups_at_once")
def test_a_linear_alone_is_dispatched_too() -> None:
    plan = plan_of(layer(is_mlp=False), recipes.MXFP8BlockScaling())
    assert plan.forward[0].fusion == plan.backward[-1].fusion == "DispatchedExperts"
    assert plan.forward[0].ops == (0, 1)
    assert plan.backward[-1].kernel.endswith("unpermute, unpermute probs")


def reasons(model: fuser.Sequential, recipe: Any) -> set[str]:
    refusals = plan_of(model, recipe).refusals
    return {refusal.reason for refusal in refusals if refusal.fusion == "DispatchedExperts"}


@pytest.mark.usefixtures("groups_at_once")
@pytest.mark.parametrize("is_mlp", [True, False], ids=["MLP", "linear"])
def test_it_refuses_if_the_rows_are_read_in_memory(is_mlp: bool) -> None:
    model = layer(is_mlp=is_mlp)
    assert reasons(copy.deepcopy(model), None) == {
        sentence("dispatched-experts-without-recipe-product")
    }
    exact = recipes.MXFP8BlockScaling(backward_override="high_precision")
    assert reasons(copy.deepcopy(model), exact) == {
        sentence("dispatched-experts-weight-gradients-read")
    }
    assert reasons(copy.deepcopy(model), recipes.Float8RowwiseScaling()) == {
        sentence("dispatched-experts-under-each-group", "Float8RowwiseScaling")
    }
    model[1].requires_grad_(False)
    assert reasons(copy.deepcopy(model), exact) == set()
    assert is_gathered(model, exact)
    found = steps_of_frozen(model, exact)
    model = layer(UNFUSED, is_mlp=is_mlp)
    model[1].requires_grad_(False)
    assert_equal(found, steps_of_frozen(model, exact))


def steps_of_frozen(model: fuser.Sequential, recipe: Any) -> list[Any]:
    (indices, probs), x = routing(), tokens().requires_grad_()
    with InFp64():
        with fuser.autocast(recipe=recipe):
            y = model(x, indices, probs)
        y.backward(tokens(7))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def test_the_ops_run_where_each_group_is_quantized_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one(monkeypatch)
    found = reasons(layer(), recipes.MXFP8BlockScaling())
    assert found == {sentence("dispatched-experts-under-each-group", "MXFP8BlockScaling")}


@pytest.mark.usefixtures("groups_at_once")
def test_an_evaluation_is_dispatched_too() -> None:
    for is_mlp in (True, False):
        model, alone = layer(is_mlp=is_mlp), layer(UNFUSED, is_mlp=is_mlp)
        for recipe in (make() for make in GATHERED.values()):
            with torch.no_grad(), fuser.autocast(recipe=recipe):
                y, other = (each(tokens(), *routing()) for each in (model, alone))
                assert torch.equal(y, other)
                plan = model.plan(tokens(), *routing(), training=False)
            assert plan.forward[0].fusion == "DispatchedExperts"
            assert not any("do not cover" in refusal.reason for refusal in plan.refusals)
