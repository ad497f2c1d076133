"""GroupedLinear against a loop of fp64 linears."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from typing import Any

import every_format as formats
import oracles
import pytest
import torch
from pipeline_kernels import on_kernels
from products_in_fp64 import InFp64
from said import holds, said
from torch.nn.utils import prune

import fuser
from fuser import recipe as recipes
from fuser.basic_ops.grouped_linear import check_equal_sizes
from fuser.errors import InputError, StateError
from fuser.recipe import BACKWARD_OVERRIDES

G, K, N, T = 4, 32, 48, 96
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPLITS = {
    "even": (24, 24, 24, 24),
    "first empty": (0, 40, 30, 26),
    "last empty": (50, 3, 43, 0),
    "all in one": (0, 0, 96, 0),
    "all empty": (0, 0, 0, 0),
    "one row each": (1, 1, 1, 1),
    "sum below the rows": (10, 0, 33, 20),
}
LAYOUTS = {
    "separate": {},
    "one weight": {"single_grouped_weight": True},
    "one of each": {"single_grouped_weight": True, "single_grouped_bias": True},
}
MODES = {
    "no bias": {"bias": False},
    "bias": {},
    "scaled bias": {"scale_bias": True},
}


def values(*shape: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return oracles.random_tensor(shape, dtype, seed)


def made(dtype: torch.dtype = FP32, **options: Any) -> fuser.GroupedLinear:
    op = fuser.GroupedLinear(G, K, N, dtype=dtype, device="cpu", **options)
    return oracles.randomize(op)


def stacked(op: fuser.GroupedLinear, what: str, attribute: str = "data") -> torch.Tensor:
    """Weights ``[G, N, K]``, or biases ``[G, N]``, or their gradients."""
    if hasattr(op, what):
        stack: torch.Tensor = getattr(getattr(op, what), attribute)
        return stack
    return torch.stack([getattr(getattr(op, f"{what}{g}"), attribute) for g in range(G)])


def poisoned(x: torch.Tensor, count: int) -> torch.Tensor:
    """``x`` with NaN and infinities in the rows from ``count``."""
    x = x.clone()
    x[count::2] = float("nan")
    x[count + 1 :: 2] = float("inf")
    return x


def expected(
    op: fuser.GroupedLinear, x: Any, dy: Any, splits: tuple[int, ...], scales: Any = None
) -> dict[str, torch.Tensor]:
    """Output and gradients in fp64; zeros where a row belongs to no group."""
    x, dy, count = x.double(), dy.double(), sum(splits)
    weight = stacked(op, "weight").double()
    bias = stacked(op, "bias").double() if op.has_bias else torch.zeros(G, N).double()
    factors = torch.ones(len(x)).double() if scales is None else scales.double()
    y, dx, dscales = torch.zeros(len(x), N).double(), torch.zeros_like(x), torch.zeros(len(x))
    dw, db = torch.zeros_like(weight), torch.zeros_like(bias)
    start, dscales = 0, dscales.double()
    for g, size in enumerate(splits):
        rows = slice(start, start + size)
        y[rows] = x[rows] @ weight[g].t() + factors[rows, None] * bias[g]
        dx[rows] = dy[rows] @ weight[g]
        dw[g] = dy[rows].t() @ x[rows]
        db[g] = (factors[rows, None] * dy[rows]).sum(0)
        dscales[rows] = dy[rows] @ bias[g]
        start += size
    assert start == count
    found = {"y": y, "dx": dx, "dw": dw}
    if op.has_bias:
        found["db"] = db
    return found if scales is None else {**found, "dscales": dscales}


def run(
    op: fuser.GroupedLinear,
    x: torch.Tensor,
    dy: torch.Tensor,
    splits: tuple[int, ...],
    scales: torch.Tensor | None = None,
    recipe: Any = None,
) -> dict[str, Any]:
    leaves = [x.clone().requires_grad_()]
    extras = [torch.tensor(splits, device=x.device)]
    if scales is not None:
        leaves.append(scales.clone().requires_grad_())
        extras.append(leaves[1])
    op.zero_grad(set_to_none=True)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = op(leaves[0], *extras)
    y.backward(dy)
    found = {"y": y.detach(), "dx": leaves[0].grad, "dw": stacked(op, "weight", "grad")}
    if op.has_bias:
        found["db"] = stacked(op, "bias", "grad")
    return found if scales is None else {**found, "dscales": leaves[1].grad}


def assert_close(found: dict[str, Any], exact: dict[str, Any], bound: float) -> None:
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        error = (found[name].double() - value).norm()
        assert error <= bound * value.norm(), (name, error / value.norm())


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_equals_a_loop_of_linears(
    dtype: torch.dtype, mode: dict[str, bool], layout: dict[str, bool], splits: tuple[int, ...]
) -> None:
    """Rows after the last group have NaN and infinities in them, which reach nothing."""
    op = made(dtype, **mode, **layout)
    x, dy = values(T, K, seed=1, dtype=dtype), values(T, N, seed=2, dtype=dtype)
    scales = values(T, seed=3, dtype=dtype) if op.scale_bias else None
    exact = expected(op, x, dy, splits, scales)
    count = sum(splits)
    x, dy = poisoned(x, count), poisoned(dy, count)
    found = run(op, x, dy, splits, None if scales is None else poisoned(scales, count))
    assert_close(found, exact, {FP32: 1e-6, BF16: 0.01, FP16: 0.002}[dtype])
    for name in ("y", "dx", "dscales"):
        assert name not in found or not found[name][count:].any()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layout", [{}, {"single_grouped_bias": True}], ids=str)
def test_the_gradient_of_scales_is_summed_in_fp32(
    layout: dict[str, bool], dtype: torch.dtype
) -> None:
    """Of 512 products of 16 bits, which are exact in fp32; scales in fp32 get it unrounded."""
    wide, splits = 512, SPLITS["sum below the rows"]
    op = fuser.GroupedLinear(G, K, wide, dtype=dtype, device="cpu", scale_bias=True, **layout)
    oracles.randomize(op)
    dy, scales = values(T, wide, seed=2, dtype=dtype), values(T, seed=3).requires_grad_()
    op(values(T, K, seed=1, dtype=dtype), torch.tensor(splits), scales).backward(dy)
    of_rows = stacked(op, "bias").double().repeat_interleave(torch.tensor(splits), 0)
    products = dy[: sum(splits)].double() * of_rows
    error = (scales.grad[: sum(splits)].double() - products.sum(-1)).abs()
    assert scales.grad.dtype is FP32
    assert (error <= 2**-20 * products.abs().sum(-1)).all()
    assert not scales.grad[sum(splits) :].any()


RECIPES: dict[str, Any] = dict(formats.RECIPES)
RECIPES["nvfp4"] = functools.partial(recipes.NVFP4BlockScaling, disable_stochastic_rounding=True)


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize("splits", [SPLITS["first empty"], SPLITS["sum below the rows"]], ids=str)
@pytest.mark.parametrize("override", [None, *BACKWARD_OVERRIDES], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_under_a_recipe_each_group_equals_a_linear_of_its_own(
    name: str, override: str | None, splits: tuple[int, ...]
) -> None:
    if override is not None and RECIPES[name] is recipes.DelayedScaling:
        pytest.skip("delayed scaling has no override")
    options = {} if override is None else {"backward_override": override}
    recipe = RECIPES[name](**options)
    op = made(BF16, bias=False)
    count = sum(splits)
    x, dy = values(T, K, seed=1, dtype=BF16), values(T, N, seed=2, dtype=BF16)
    with InFp64():
        found = run(op, poisoned(x, count), poisoned(dy, count), splits, recipe=recipe)
    start = 0
    for g, size in enumerate(splits):
        rows = slice(start, start + size)
        start += size
        if not size:
            assert not found["dw"][g].any()
            continue
        alone = fuser.BasicLinear(K, N, dtype=BF16, device="cpu")
        with torch.no_grad():
            alone.weight.copy_(stacked(op, "weight")[g])
        part = x[rows].clone().requires_grad_()
        with InFp64(), fuser.autocast(recipe=recipe):
            y = alone(part)
            y.backward(dy[rows])
        assert torch.equal(found["y"][rows], y)
        assert torch.equal(found["dx"][rows], part.grad)
        assert torch.equal(found["dw"][g], alone.weight.grad)
    assert not found["y"][count:].any()
    assert not found["dx"][count:].any()


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_linear_before_it_gives_an_unquantized_tensor_that_is_quantized_once_a_group() -> None:
    model = oracles.randomize(
        fuser.Sequential(
            fuser.BasicLinear(K, K, dtype=BF16, device="cpu"),
            fuser.GELU(),
            fuser.GroupedLinear(G, K, N, bias=False, dtype=BF16, device="cpu"),
        )
    )
    x = values(T, K, seed=1, dtype=BF16)
    splits = SPLITS["first empty"]
    with fuser.autocast(recipe=recipes.Float8CurrentScaling()):
        plan = model.plan(x, torch.tensor(splits))
        y = model(x, torch.tensor(splits))
        middle = model[:2](x)
        grouped = model[2](middle, torch.tensor(splits))
    assert torch.equal(y, grouped)
    assert plan.forward[1].emits is None
    assert plan.forward[2].kernel == (
        "grouped quantize input, grouped quantize weight, grouped mm of 4 (emulated)"
    )


def test_a_mixture_of_experts_trains() -> None:
    splits = torch.tensor(SPLITS["first empty"])
    model = fuser.Sequential(
        fuser.GroupedLinear(G, K, 2 * N, bias=False, device="cpu"),
        fuser.ScaledSwiGLU(),
        fuser.GroupedLinear(G, N, K, bias=False, device="cpu"),
    )
    x, target = values(T, K, seed=1), values(T, K, seed=2)
    scales = torch.full((T,), 0.5, requires_grad=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss = (model(x, splits, scales, splits) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert scales.grad is not None


# -- split sizes of two ops ---------------------------------------------------------


def up_and_down(*between: Any, groups: int = G) -> fuser.Sequential:
    return fuser.Sequential(
        fuser.GroupedLinear(G, K, N, device="cpu"),
        *between,
        fuser.GroupedLinear(groups, N, K, device="cpu"),
    )


def test_two_grouped_linears_of_an_expert_must_get_the_same_sizes() -> None:
    model, x = up_and_down(fuser.ScaledSReLU(), fuser.Bias(N, device="cpu")), values(T, K, seed=1)
    scales = torch.ones(T)
    sizes, others = torch.tensor(SPLITS["even"]), torch.tensor(SPLITS["first empty"])
    y = model(x, sizes, scales, sizes)
    assert torch.equal(model(x, sizes, scales, sizes.int()), y)
    for _ in range(3):
        with pytest.raises(
            InputError,
            match=said("shared-sizes-grouped-mlp-ops", 0, 3, "24, 24, 24, 24", "0, 40, 30, 26"),
        ):
            model(x, sizes, scales, others)
    with pytest.raises(InputError, match=said("recipe-takes", None, "split sizes of shape (3,)")):
        model(x, sizes, scales, sizes[:3])
    assert torch.equal(model(x, sizes, scales, sizes), y)


def test_split_sizes_on_another_device_are_not_read_to_be_compared() -> None:
    model, x = up_and_down(), values(T, K, seed=1).to("meta")
    sizes, others = torch.tensor(SPLITS["even"]), torch.tensor(SPLITS["first empty"])
    model.to("meta").plan(x, sizes.to("meta"), others.to("meta"))
    check_equal_sizes((0, 1), sizes.to("meta"), others.to("meta"))
    check_equal_sizes((0, 1), sizes, others.to("meta"))


def test_other_groups_are_allowed_after_other_ops_and_in_other_numbers() -> None:
    x, sizes, others = values(T, K, seed=1), torch.tensor([24] * 4), torch.tensor([0, 40, 30, 26])
    for between in (fuser.Linear(N, N, device="cpu"), fuser.Reshape((T, N))):
        assert up_and_down(between)(x, sizes, others).shape == (T, K)
    assert up_and_down(groups=2)(x, sizes, torch.tensor([50, 46])).shape == (T, K)


# -- parameters -------------------------------------------------------------------


def test_separate_weights_are_views_of_one_buffer_also_after_a_move() -> None:
    op = made()
    for moved in (op, op.to(BF16), copy.deepcopy(op).to(FP32)):
        weights = [getattr(moved, f"weight{g}") for g in range(G)]
        steps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(weights)}
        assert steps == {N * K * weights[0].element_size()}
        assert all(w.is_leaf and w.requires_grad for w in weights)


def test_weights_that_are_no_neighbours_give_the_same() -> None:
    op, other = made(), made()
    for g in range(G):
        setattr(other, f"weight{g}", torch.nn.Parameter(getattr(op, f"weight{g}").detach().clone()))
    for name in ("bias0", "bias1", "bias2", "bias3"):
        getattr(other, name).data.copy_(getattr(op, name))
    x, dy, splits = values(T, K, seed=1), values(T, N, seed=2), SPLITS["even"]
    found, wanted = run(other, x, dy, splits), run(op, x, dy, splits)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_state_dict_has_the_original_names(layout: dict[str, bool]) -> None:
    op = made(**layout)
    weights = ["weight"] if "single_grouped_weight" in layout else [f"weight{g}" for g in range(G)]
    biases = ["bias"] if "single_grouped_bias" in layout else [f"bias{g}" for g in range(G)]
    assert [name for name in op.state_dict() if name != "_extra_state"] == weights + biases
    other = made(**layout)
    other.load_state_dict(op.state_dict())
    assert all(map(torch.equal, op.parameters(), other.parameters()))


def test_weights_are_initialised_as_linears_are() -> None:
    torch.manual_seed(3)
    op = fuser.GroupedLinear(G, K, N, device="cpu")
    torch.manual_seed(3)
    for g in range(G):
        assert torch.equal(getattr(op, f"weight{g}"), torch.nn.Linear(K, N, bias=False).weight)
    torch.manual_seed(3)
    assert torch.equal(
        fuser.GroupedLinear(G, K, N, device="cpu", single_grouped_weight=True).weight,
        stacked(op, "weight"),
    )


def test_parameters_on_meta_are_allocated_at_the_first_forward() -> None:
    op = fuser.GroupedLinear(G, K, N, device="meta")
    with torch.device("cpu"):
        y = op(values(T, K, seed=1), torch.tensor(SPLITS["even"]))
    assert y.abs().sum() > 0


def test_a_frozen_expert_has_no_gradient_and_frozen_weights_save_no_input() -> None:
    op = made(bias=False)
    op.weight1.requires_grad_(False)
    x = values(T, K, seed=1).requires_grad_()
    splits = torch.tensor(SPLITS["even"])
    op(x, splits).sum().backward()
    assert op.weight1.grad is None
    assert op.weight0.grad is not None
    op.requires_grad_(False)
    saved: list[torch.Tensor] = []

    def kept_by_autograd(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(kept_by_autograd, lambda t: t):
        op(x, splits)
    assert all(t.shape != x.shape for t in saved if t is not None)


# -- main_grad, and gradients later ---------------------------------------------------


@pytest.mark.parametrize("layout", [LAYOUTS["separate"], LAYOUTS["one weight"]], ids=str)
@pytest.mark.parametrize("recipe", [None, recipes.MXFP8BlockScaling()], ids=["none", "mxfp8"])
@pytest.mark.parametrize("is_delayed", [False, True], ids=["now", "delayed"])
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_weight_gradients_add_up_in_main_grad(
    layout: dict[str, bool], recipe: Any, is_delayed: bool
) -> None:
    plainly = made(BF16, bias=False, **layout)
    options = {"accumulate_into_main_grad": True, "delay_wgrad_compute": is_delayed}
    op = made(BF16, bias=False, **layout, **options)
    x, dy = values(T, K, seed=1, dtype=BF16), values(T, N, seed=2, dtype=BF16)
    splits = torch.tensor(SPLITS["first empty"])
    wanted = run(plainly, x, dy, SPLITS["first empty"], recipe=recipe)["dw"]
    for parameter in op.parameters():
        parameter.main_grad = torch.ones(parameter.shape)
        parameter.grad_added_to_main_grad = False
    for _ in range(2):
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = op(x, splits)
        y.backward(dy)
    if is_delayed:
        assert all(bool((p.main_grad == 1).all()) for p in op.parameters())
        op.backward_dw()
        op.backward_dw()
        with pytest.raises(StateError, match=said("grouped-wgrad-linear-backward-dw")):
            op.backward_dw()
    grads = stacked(op, "weight", "main_grad")
    assert torch.allclose(grads - 1, 2 * wanted.float(), rtol=1e-5, atol=1e-3)
    assert all(p.grad_added_to_main_grad for p in op.parameters())


def test_main_grad_may_be_overwritten_and_stand_ins_zeroed() -> None:
    op = made(bias=False, accumulate_into_main_grad=True)
    for p in op.parameters():
        p.main_grad = torch.full(p.shape, 7.0)
        p.overwrite_main_grad = p.grad_added_to_main_grad = p.zero_out_wgrad = True
    x, dy, splits = values(T, K, seed=1), values(T, N, seed=2), SPLITS["even"]
    exact = expected(op, x, dy, splits)["dw"]
    assert not run(op, x, dy, splits)["dw"].any()
    assert torch.allclose(stacked(op, "weight", "main_grad").double(), exact, rtol=1e-4, atol=1e-3)


def test_a_frozen_first_expert_leaves_the_others_their_main_grad() -> None:
    op = made(bias=False, accumulate_into_main_grad=True)
    op.weight0.requires_grad_(False)
    for p in op.parameters():
        p.main_grad = torch.zeros(p.shape)
    op(values(T, K, seed=1), torch.tensor(SPLITS["even"])).sum().backward()
    assert not op.weight0.main_grad.any()
    assert op.weight1.main_grad.any()
    assert op.weight1.grad is None


def test_a_main_grad_that_cannot_be_viewed_is_refused_before_any_is_changed() -> None:
    op = made(bias=False, accumulate_into_main_grad=True)
    for p in op.parameters():
        p.main_grad = torch.zeros(p.shape)
    op.weight2.main_grad = torch.zeros(K, N).t().reshape(N, K)[:, : K - 1]
    x = values(T, K, seed=1)
    with pytest.raises(
        InputError, match=said("main-grad-grouped-adds-strides", "weight2", (48, 32), (48, 31))
    ):
        op(x, torch.tensor(SPLITS["even"])).sum().backward()
    assert not op.weight0.main_grad.any()


def test_delayed_gradients_without_main_grad_go_into_grad_and_call_hooks() -> None:
    op, plainly = made(delay_wgrad_compute=True), made()
    x, dy = values(T, K, seed=1), values(T, N, seed=2)
    called = []
    op.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    exact = run(plainly, x, dy, SPLITS["even"])
    op(x, torch.tensor(SPLITS["even"])).backward(dy)
    assert op.weight0.grad is None
    assert torch.equal(stacked(op, "bias", "grad"), exact["db"])
    op.backward_dw()
    assert torch.equal(stacked(op, "weight", "grad"), exact["dw"])
    op(x, torch.tensor(SPLITS["even"])).backward(dy)
    op.backward_dw()
    assert torch.equal(stacked(op, "weight", "grad"), 2 * exact["dw"])
    assert called == [1, 1]
    plainly.backward_dw()  # nothing to do


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_a_copy_calls_no_hooks_of_the_original(copied: Any) -> None:
    op = made(delay_wgrad_compute=True)
    CALLED.clear()
    op.register_wgrad_accumulation_and_reduce_hooks(note_call)
    other = copied(op)
    other(values(T, K, seed=1), torch.tensor(SPLITS["even"])).backward(values(T, N, seed=2))
    other.backward_dw()
    assert other.weight0.grad is not None
    assert not CALLED
    op(values(T, K, seed=1), torch.tensor(SPLITS["even"])).backward(values(T, N, seed=2))
    op.backward_dw()
    assert CALLED == [1]


CALLED: list[int] = []


def note_call() -> None:
    """A hook that can be copied and pickled."""
    CALLED.append(1)


@pytest.mark.parametrize("options", [{}, {"accumulate_into_main_grad": True}], ids=str)
def test_gradients_that_are_left_come_in_the_order_of_their_backwards(
    options: dict[str, bool],
) -> None:
    """And each comes once: two backwards of other values, against fp64."""
    op, x = made(bias=False, delay_wgrad_compute=True, **options), values(T, K, seed=1)
    for parameter in op.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    attribute, total = "main_grad" if options else "grad", torch.zeros(G, N, K).double()
    gradients = [values(T, N, seed=seed) for seed in (2, 3, 4)]
    for dy in gradients:
        op(x, torch.tensor(SPLITS["first empty"])).backward(dy)
    for dy in gradients:
        op.backward_dw()
        total += expected(op, x, dy, SPLITS["first empty"])["dw"]
        assert torch.allclose(stacked(op, "weight", attribute).double(), total, atol=1e-3)
    with pytest.raises(StateError, match=said("grouped-wgrad-linear-backward-dw")):
        op.backward_dw()


def test_delayed_gradients_are_asked_for_before_the_first_call() -> None:
    op, delayed = made(), made()
    delayed.delay_wgrad_compute = True
    x, dy = values(T, K, seed=1), values(T, N, seed=2)
    exact = run(op, x, dy, SPLITS["even"])["dw"]
    with pytest.raises(StateError, match=said("grouped-wgrad-delay-compute-set", None, True)):
        op.delay_wgrad_compute = True
    assert torch.equal(run(op, x, dy, SPLITS["even"])["dw"], exact), "the next call works"
    copied = copy.deepcopy(op)
    copied.delay_wgrad_compute = True
    for other in (delayed, copied):
        for parameter in other.parameters():
            parameter.grad = None
        other(x, torch.tensor(SPLITS["even"])).backward(dy)
        assert other.weight0.grad is None
        other.backward_dw()
        assert torch.equal(stacked(other, "weight", "grad"), exact)


def leaving(**options: Any) -> tuple[fuser.GroupedLinear, fuser.GroupedLinear]:
    """An op that leaves weight gradients to ``backward_dw``, and one like it that does not."""
    op = made(delay_wgrad_compute=True, **options)
    return op, made(**options)


def test_an_input_with_a_gradient_leaves_no_graph_behind() -> None:
    op, plainly = leaving(bias=False)
    x, dy, splits = values(T, K, seed=1), values(T, N, seed=2), torch.tensor(SPLITS["even"])
    before = torch.nn.Linear(K, K)
    wanted = run(plainly, before(x).detach(), dy, SPLITS["even"])["dw"]
    op(before(x), splits).backward(dy)
    op.backward_dw()
    assert torch.equal(stacked(op, "weight", "grad"), wanted)
    assert not op.weight0.grad.requires_grad


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_frozen_biases_and_weights_do_not_change_what_is_left(layout: dict[str, bool]) -> None:
    op, plainly = leaving(**layout)
    for name, parameter in op.named_parameters():
        parameter.requires_grad_("bias" not in name and name != "weight1")
    x, dy = values(T, K, seed=1), values(T, N, seed=2)
    wanted = run(plainly, x, dy, SPLITS["even"])["dw"]
    op(x, torch.tensor(SPLITS["even"])).backward(dy)
    op.backward_dw()
    for g in range(G) if "single_grouped_weight" not in layout else ():
        grad = getattr(op, f"weight{g}").grad
        assert grad is None if g == 1 else torch.equal(grad, wanted[g])
    assert not hasattr(op, "weight") or torch.equal(op.weight.grad, wanted)


def test_gradients_are_left_only_for_leaves_that_a_backward_accumulates_into() -> None:
    op, plainly = leaving(bias=False)
    x, dy, splits = values(T, K, seed=1), values(T, N, seed=2), torch.tensor(SPLITS["even"])
    probe = values(T, K, seed=3).requires_grad_()
    torch.autograd.grad(op(probe, splits), probe, dy)  # does not ask for the weights
    given = {n: p.detach().clone().requires_grad_() for n, p in op.named_parameters()}
    torch.func.functional_call(op, given, (x, splits)).backward(dy)
    op.backward_dw()
    wanted = run(plainly, x, dy, SPLITS["even"])["dw"]
    assert all(torch.equal(given[f"weight{g}"].grad, wanted[g]) for g in range(G))
    assert op.weight0.grad is None
    for g in range(G):
        prune.identity(op, f"weight{g}")
    op(x, splits).backward(dy)  # computed weights get their gradients at once
    assert all(torch.equal(getattr(op, f"weight{g}_orig").grad, wanted[g]) for g in range(G))
    with pytest.raises(StateError, match=said("grouped-wgrad-linear-backward-dw")):
        op.backward_dw()


def test_left_gradients_are_added_in_place_and_in_the_weights_dtype() -> None:
    op, plainly = leaving(bias=False)
    x, dy, splits = values(T, K, seed=1), values(T, N, seed=2), torch.tensor(SPLITS["even"])
    flat = torch.zeros(G, N, K)
    for g in range(G):
        getattr(op, f"weight{g}").grad = flat[g]
        getattr(op, f"weight{g}").grad_added_to_main_grad = False
    wanted = run(plainly, x, dy, SPLITS["even"])["dw"]
    op(x, splits).backward(dy)
    op.backward_dw()
    assert torch.equal(flat, wanted)
    op.zero_grad(set_to_none=True)
    with torch.autocast("cpu", BF16):
        y = op(x, splits)
    y.backward(dy.to(BF16))
    op.backward_dw()
    assert op.weight0.grad.dtype is FP32
    assert torch.allclose(stacked(op, "weight", "grad"), wanted, rtol=0.02, atol=0.5)


def test_a_missing_main_grad_is_refused_before_any_is_changed() -> None:
    for options in ({}, {"delay_wgrad_compute": True}):
        op = made(bias=False, accumulate_into_main_grad=True, **options)
        for g in (0, 1, 3):
            getattr(op, f"weight{g}").main_grad = torch.zeros(N, K)
            getattr(op, f"weight{g}").overwrite_main_grad = True
        y = op(values(T, K, seed=1), torch.tensor(SPLITS["even"]))
        step = y.sum().backward
        if options:
            step()
            step = op.backward_dw
        with pytest.raises(StateError, match=said("main-grad-accumulates-weight-into", (48, 32))):
            step()
        assert not op.weight0.main_grad.any()
        if options:
            op.weight2.main_grad = torch.zeros(N, K)
            op.backward_dw()  # nothing is lost
            assert op.weight2.main_grad.any()


def test_a_transposed_main_grad_is_refused() -> None:
    op = made(bias=False, accumulate_into_main_grad=True)
    for p in op.parameters():
        p.main_grad = torch.zeros(K, N)
    with pytest.raises(
        InputError, match=said("main-grad-grouped-adds-strides", None, None, (32, 48))
    ):
        op(values(T, K, seed=1), torch.tensor(SPLITS["even"])).sum().backward()


def test_recorded_backwards_leave_gradients_each_time() -> None:
    op = made(BF16, bias=False, single_grouped_weight=True, delay_wgrad_compute=True)
    x, dy = values(T, K, seed=1, dtype=BF16), values(T, N, seed=2, dtype=BF16)
    with on_kernels():
        for _ in range(5):
            op(x, torch.tensor(SPLITS["even"])).backward(dy)
            op.backward_dw()
    wanted = run(made(BF16, bias=False), x, dy, SPLITS["even"])["dw"]
    assert torch.allclose(op.weight.grad.float(), 5 * wanted.float(), rtol=0.05, atol=0.5)


# -- changes in place, and memory that others hold ------------------------------------


def changed_in_place() -> dict[str, Any]:
    def moved(op: fuser.GroupedLinear) -> fuser.GroupedLinear:
        return copy.deepcopy(op).to("cpu")

    def on_meta(op: fuser.GroupedLinear) -> fuser.GroupedLinear:
        other = fuser.GroupedLinear(G, K, N, bias=False, device="meta")
        with torch.device("cpu"):
            other(values(T, K, seed=1), torch.tensor(SPLITS["even"]))
        return other

    return {"made": lambda op: op, "moved": moved, "on meta": on_meta, "copied": copy.deepcopy}


@pytest.mark.parametrize("name", changed_in_place())
def test_a_weight_that_changes_before_the_backward_is_noticed(name: str) -> None:
    op = changed_in_place()[name](made(bias=False))
    x = values(T, K, seed=1).requires_grad_()
    y = op(x, torch.tensor(SPLITS["even"]))
    with torch.no_grad():
        op.weight2.mul_(3)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        y.backward(values(T, N, seed=2))


@pytest.mark.parametrize("changed", ["weight0", "weight2", "bias0", "bias3"])
@pytest.mark.parametrize("name", ["made", "moved", "copied"])
def test_every_parameter_that_a_backward_reads_is_watched(name: str, changed: str) -> None:
    """Weights, and biases, which the gradient of scales reads; their versions may differ."""
    op = changed_in_place()[name](made(scale_bias=True))
    with torch.no_grad():
        op.weight1.add_(0)
        op.bias1.add_(0)
    leaves = [values(T, K, seed=1).requires_grad_(), values(T, seed=3).requires_grad_()]
    y = op(leaves[0], torch.tensor(SPLITS["even"]), leaves[1])
    with torch.no_grad():
        getattr(op, changed).mul_(3)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        y.backward(values(T, N, seed=2))
    assert all(tensor.grad is None for tensor in (*leaves, *op.parameters()))


def test_parameters_stay_where_others_see_them() -> None:
    op, flat = made(bias=False), torch.randn(G, N, K).flip(0)
    for g in range(G):  # neighbours, in another order
        getattr(op, f"weight{g}").data = flat[G - 1 - g]
    op.to("cpu")
    flat.zero_()
    assert not any(p.any() for p in op.parameters())
    assert all(p.is_shared() for p in copy.deepcopy(made()).share_memory().parameters())


def test_loaded_weights_beside_biases_on_meta_are_kept() -> None:
    op, other = made(), fuser.GroupedLinear(G, K, N, device="meta")
    weights = {name: value for name, value in op.state_dict().items() if "weight" in name}
    other.load_state_dict(weights, strict=False, assign=True)
    with torch.device("cpu"):
        other(values(T, K, seed=1), torch.tensor(SPLITS["even"]))
    assert torch.equal(stacked(other, "weight"), stacked(op, "weight"))
    assert not other.bias0.any()


def test_weights_of_another_dtype_in_the_buffer_are_read_as_they_are() -> None:
    op, x = made(BF16, bias=False), values(T, K, seed=1, dtype=BF16)
    op.weight1.data = op.weight1.data.view(FP16).fill_(0.5)
    y = op(x, torch.tensor(SPLITS["even"]))
    wanted = x[24:48].sum(1, keepdim=True).expand(24, N) / 2
    torch.testing.assert_close(y[24:48], wanted, rtol=0.02, atol=0.05)


def test_separate_memory_under_an_autocast_of_another_dtype() -> None:
    op = copy.deepcopy(made(FP16))
    with torch.autocast("cpu", BF16):
        y = op(values(T, K, seed=1), torch.tensor(SPLITS["even"]))
    assert y.dtype is BF16


# -- buffers of the caller --------------------------------------------------------------


def test_buffers_of_the_caller_get_the_output_and_the_gradient() -> None:
    op = made()
    model = fuser.Sequential(op)
    x = values(T, K, seed=1).requires_grad_()
    dy, splits = values(T, N, seed=2), SPLITS["first empty"]
    wanted = run(op, x.detach(), dy, splits)
    buffers = {"output": torch.full((T, N), 7.0), "grad_input": torch.full((T, K), 7.0)}
    y = model(x, torch.tensor(splits), op_kwargs={op: buffers})
    assert y.data_ptr() == buffers["output"].data_ptr()
    assert torch.equal(y, wanted["y"])
    y.backward(dy)
    assert torch.equal(buffers["grad_input"], wanted["dx"])
    assert torch.equal(x.grad, wanted["dx"])


def test_an_output_buffer_may_be_used_in_every_step() -> None:
    op, buffer = made(), torch.zeros(T, N)
    model = fuser.Sequential(op)
    for _ in range(3):
        x = values(T, K, seed=1).requires_grad_()
        kwargs = {op: {"output": buffer}}
        y = model(x, torch.tensor(SPLITS["even"]), op_kwargs=kwargs)
        y.sum().backward()
        assert not buffer.requires_grad


def test_buffers_in_the_memory_of_what_is_read_are_refused() -> None:
    op = fuser.GroupedLinear(G, K, K, device="cpu")
    model, splits = fuser.Sequential(op), torch.tensor(SPLITS["even"])
    x = values(T, K, seed=1)
    for name in ("output", "grad_input"):
        with pytest.raises(InputError, match=said("grouped-linear-memory-give-own", name)):
            model(x, splits, op_kwargs={op: {name: x.view(T, K)}})
    dy = values(T, K, seed=2)
    y = model(x.requires_grad_(), splits, op_kwargs={op: {"grad_input": dy.view(T, K)}})
    with pytest.raises(InputError, match=said("grouped-linear-grad-memory-gradient")):
        y.backward(dy)


@pytest.mark.parametrize(
    ("buffer", "sentence"),
    [
        (
            torch.zeros(T, N + 1),
            said("grouped-linear-shape-strides-contiguous", "output", "(96", holds("49)")),
        ),
        (
            torch.zeros(T, N, dtype=BF16),
            said(
                "grouped-linear-shape-strides-contiguous",
                None,
                None,
                holds("torch.bfloat16"),
                "cpu",
                None,
                None,
                holds(" torch.float32"),
                "cpu",
            ),
        ),
        (
            torch.zeros(N, T).t(),
            said("grouped-linear-shape-strides-contiguous", None, None, None, None, (1, 96)),
        ),
        (torch.zeros(T, N, requires_grad=True), said("grouped-linear-requires-gradient-detach")),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused_and_unchanged(
    buffer: torch.Tensor, sentence: str
) -> None:
    op = made()
    model, x = fuser.Sequential(op), values(T, K, seed=1)
    with pytest.raises(InputError, match=sentence):
        model(x, torch.tensor(SPLITS["even"]), op_kwargs={op: {"output": buffer}})
    assert not buffer.detach().any()
    assert model(x, torch.tensor(SPLITS["even"])).any()


# -- bad input --------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple[tuple[Any, ...], dict[str, bool], str]]:
    x, even = values(T, K, seed=1), torch.tensor(SPLITS["even"])
    scale = {"scale_bias": True}
    return {
        "more than the rows": (
            (x, torch.tensor([50, 50, 0, 1])),
            {},
            said("grouped-sum-more-rows", 101, 96, "50, 50, 0, 1"),
        ),
        "negative": (
            (x, torch.tensor([50, -3, 0, 1])),
            {},
            said("grouped-split-not-negative", "50, -3, 0, 1"),
        ),
        "number of groups": (
            (x, even[:3]),
            {},
            said("grouped-linear-split-each-groups", None, (3,)),
        ),
        "sizes whose sum overflows": (
            (x, torch.tensor([2**62, 2**62, 2**63 - 1, 1])),
            {},
            said("grouped-sum-more-rows", None, 96),
        ),
        "floating": (
            (x, even.float()),
            {},
            said("grouped-linear-split-sizes-integers", None, "torch.float32"),
        ),
        "features": (
            (x[:, :16], even),
            {},
            said("grouped-linear-shape-last-dimension", None, (96, 16), 32),
        ),
        "scales": (
            (x, even, torch.ones(T - 1)),
            scale,
            said("grouped-linear-scales-scale-per", None, (95,), (96, 32)),
        ),
        "integer scales": (
            (x, even, torch.ones(T, dtype=torch.int32)),
            scale,
            said("graph-extra-input-takes", None, "torch.int32"),
        ),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_input_gets_a_sentence_and_the_next_call_works(name: str) -> None:
    arguments, options, sentence = bad_calls()[name]
    op = made(**options)
    good = (values(T, K, seed=1), torch.tensor(SPLITS["even"]), *[torch.ones(T)] * op.scale_bias)
    for _ in range(2):
        with pytest.raises(InputError, match=sentence):
            op(*arguments)
        assert op(*good).shape == (T, N)


@pytest.mark.parametrize("name", ["num_groups", "in_features", "out_features"])
def test_sizes_are_positive(name: str) -> None:
    sizes = {"num_groups": G, "in_features": K, "out_features": N, name: 0}
    with pytest.raises(InputError, match=said("parameters-positive", None, name, 0)):
        fuser.GroupedLinear(**sizes)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_split_sizes_have_any_integer_dtype(dtype: torch.dtype) -> None:
    op, x = made(), values(2, T // 2, K, seed=1)
    y = op(x, torch.tensor(SPLITS["first empty"], dtype=dtype))
    assert y.shape == (2, T // 2, N)
    exact = expected(op, x.view(T, K), torch.zeros(T, N), SPLITS["first empty"])["y"]
    assert torch.allclose(y.view(T, N).double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sizes_that_a_caller_writes_over_are_those_of_the_forward(
    layout: dict[str, bool], dtype: torch.dtype
) -> None:
    x, dy, splits = values(T, K, seed=1), values(T, N, seed=2), SPLITS["last empty"]
    exact = expected(op := made(**layout), x, dy, splits)
    leaf, sizes = x.clone().requires_grad_(), torch.tensor(splits, dtype=dtype)
    y = op(leaf, sizes)
    sizes.copy_(torch.tensor(SPLITS["all in one"]))
    y.backward(dy)
    found = {"y": y.detach(), "dx": leaf.grad}
    found |= {"dw": stacked(op, "weight", "grad"), "db": stacked(op, "bias", "grad")}
    assert_close(found, exact, 1e-5)
