"""Quantized grouped linears: all groups at once give what a loop over the groups gives.

On a CPU the loop runs; here both run, with torch's product of groups in bf16.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_launch_experts import one_by_one
from pipeline_kernels import on_kernels
from products_in_fp64 import InFp64
from said import said
from test_grouped_linear import (
    BF16,
    FP16,
    LAYOUTS,
    MODES,
    RECIPES,
    SPLITS,
    K,
    N,
    T,
    assert_close,
    made,
    poisoned,
    run,
    stacked,
    values,
)
from test_grouped_linear import G as GROUPS

import fuser
from fuser import recipe as recipes
from fuser.basic_ops import grouped_loop
from fuser.errors import InputError
from fuser.gemm import grouped
from fuser.recipe import BACKWARD_OVERRIDES

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")
PADDED = {
    name: make
    for name, make in RECIPES.items()
    if isinstance(
        make(),
        (
            recipes.Float8CurrentScaling,
            recipes.DelayedScaling,
            recipes.Float8BlockScaling,
            recipes.MXFP8BlockScaling,
            recipes.NVFP4BlockScaling,
        ),
    )
}
EVERY_RECIPE = pytest.mark.parametrize("make", PADDED.values(), ids=PADDED)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, narrow products of groups are one call of torch."""

    one_by_one(monkeypatch)

    def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
        return dtype in (FP16, BF16)

    return lambda: monkeypatch.setattr(grouped, "has_grouped_mm", has_grouped_mm)


def both(
    at_once: Callable[[], None], op: fuser.GroupedLinear, recipe: Any, **given: Any
) -> list[list[dict[str, Any]]]:
    """Three steps by the loop, and the same steps at once; with the state after each."""
    found = []
    for is_at_once in (False, True):
        if is_at_once:
            at_once()
        own, steps = copy.deepcopy(op), []
        for _ in range(3):
            with InFp64():
                results = run(own, recipe=recipe, **given)
            state = {k: v.clone() for k, v in own.state_dict().items() if k not in results}
            steps.append({**{n: t.clone() for n, t in results.items()}, **state})
        found.append(steps)
    return found


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@EVERY_RECIPE
def test_bits_are_those_of_the_loop(
    make: Callable[[], Any], splits: tuple[int, ...], at_once: Callable[[], None]
) -> None:
    count = sum(splits)
    x, dy = (poisoned(values(T, n, seed=seed, dtype=BF16), count) for n, seed in ((K, 1), (N, 2)))
    loop, once = both(at_once, made(BF16), make(), x=x, dy=dy, splits=splits)
    for expected, found in zip(loop, once, strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def in_e4m3(values: torch.Tensor, dims: tuple[int, ...], params: recipes.QParams) -> torch.Tensor:
    """Values in fp64 as E4M3 has them, with one scale for all along ``dims``; by torch alone."""
    amax = values.float().abs().amax(dims, keepdim=True)
    scale = 448 / amax.clamp(min=params.amax_epsilon)
    scale = torch.exp2(torch.floor(torch.log2(scale))) if params.power_2_scale else scale
    return (values.float() * scale).to(torch.float8_e4m3fn).double() / scale.double()


@pytest.mark.parametrize("has_powers", [False, True], ids=["any scale", "powers of two"])
@pytest.mark.parametrize("role", ["fwd_inp", "fwd_weight", "bwd_grad"])
@pytest.mark.parametrize("how", ["one by one", "at once", "kernels"])
@pytest.mark.parametrize("name", ["current", "block"])
def test_the_parameters_of_each_role_hold_for_each_group(
    name: str, how: str, role: str, has_powers: bool, at_once: Callable[[], None]
) -> None:
    """Of a role, an epsilon far above all amaxes, so that most of its bits are lost."""
    params = {each: recipes.QParams() for each in ("fwd_inp", "fwd_weight", "bwd_grad")}
    params[role] = recipes.QParams(power_2_scale=has_powers, amax_epsilon=3000.0)
    make: Any = RECIPES[name]
    recipe = make(
        fp8_format=recipes.Format.E4M3, **{f"fp8_quant_{k}": v for k, v in params.items()}
    )
    op, splits = made(BF16, bias=False), SPLITS["first empty"]
    x, dy = values(T, K, seed=1, dtype=BF16), values(T, N, seed=2, dtype=BF16)
    if how != "one by one":
        at_once()
    with on_kernels() if how == "kernels" else contextlib.nullcontext():
        found = run(op, x, dy, splits, recipe=recipe)
    whole, start = (0, 1), 0
    row, column = (whole, whole) if name == "current" else ((1,), (0,))
    for g, size in enumerate(splits):
        rows, start = slice(start, start + size), start + size
        if not size:
            continue
        weight = in_e4m3(getattr(op, f"weight{g}").detach(), whole, params["fwd_weight"])
        x_row, x_column = (in_e4m3(x[rows], dims, params["fwd_inp"]) for dims in (row, column))
        dy_row, dy_column = (in_e4m3(dy[rows], dims, params["bwd_grad"]) for dims in (row, column))
        exact = {"y": x_row @ weight.t(), "dx": dy_row @ weight, "dw": dy_column.t() @ x_column}
        own = {"y": found["y"][rows], "dx": found["dx"][rows], "dw": found["dw"][g]}
        assert_close(own, exact, 2**-7)  # dequantized to bf16, and rounded to it


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@EVERY_RECIPE
def test_every_bias_and_layout(
    make: Callable[[], Any],
    mode: dict[str, bool],
    layout: dict[str, bool],
    at_once: Callable[[], None],
) -> None:
    op = made(FP16, **mode, **layout)
    given = {
        "x": values(T, K, seed=1, dtype=FP16),
        "dy": values(T, N, seed=2, dtype=FP16),
        "splits": SPLITS["sum below the rows"],
        "scales": values(T, seed=3, dtype=FP16) if op.scale_bias else None,
    }
    loop, once = both(at_once, op, make(), **given)
    for expected, found in zip(loop, once, strict=True):
        for name, value in expected.items():
            if name in ("db", "dscales"):  # sums in another order
                assert torch.allclose(found[name], value, rtol=0.01, atol=0.01), name
            else:
                assert torch.equal(found[name], value), name


@pytest.mark.parametrize("frozen", ["input", "weights", "one weight"])
@pytest.mark.parametrize("override", [None, *BACKWARD_OVERRIDES])
@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling, recipes.MXFP8BlockScaling])
def test_what_is_frozen_gets_no_gradient(
    recipe: Any, override: str | None, frozen: str, at_once: Callable[[], None]
) -> None:
    at_once()
    op = made(BF16, bias=False)
    x = values(T, K, seed=1, dtype=BF16).requires_grad_(frozen != "input")
    for g in range(GROUPS):
        getattr(op, f"weight{g}").requires_grad_(
            frozen == "input" or (frozen != "weights" and g > 0)
        )
    splits = torch.tensor(SPLITS["even"])
    with fuser.autocast(recipe=recipe(backward_override=override)):
        y = op(x, splits)
    y.sum().backward()
    assert (x.grad is None) == (frozen == "input")
    for g in range(GROUPS):
        weight = getattr(op, f"weight{g}")
        assert (weight.grad is None) == (not weight.requires_grad)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((30, 3, 0, 0), said("grouped-sum-more-rows", 33, 6, "30, 3, 0, 0")),
        ((6, 0, 0, 1), said("grouped-sum-more-rows", 7, 6)),
        ((6, -1, 0, 1), said("grouped-split-not-negative", "6, -1, 0, 1")),
    ],
)
@pytest.mark.parametrize("recipe", [None, *PADDED.values()], ids=["none", *PADDED])
def test_sizes_on_the_host_that_do_not_fit_are_refused_where_none_is_read(
    recipe: Any, sizes: tuple[int, ...], words: str, at_once: Callable[[], None]
) -> None:
    at_once()
    op, x = made(BF16), values(6, K, seed=1, dtype=BF16)
    with fuser.autocast(enabled=recipe is not None, recipe=recipe and recipe()):
        for _ in range(2):
            with pytest.raises(InputError, match=words):
                op(x, torch.tensor(sizes))
            assert op(x, torch.tensor([3, 0, 1, 2])).isfinite().all()


@pytest.mark.parametrize("is_at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("override", [None, *BACKWARD_OVERRIDES])
def test_biases_alone_get_their_gradients(
    override: str | None, is_at_once: bool, at_once: Callable[[], None]
) -> None:
    if is_at_once:
        at_once()
    op, dy = made(BF16), values(T, N, seed=2, dtype=BF16)
    for g in range(GROUPS):
        getattr(op, f"weight{g}").requires_grad_(False)
    splits = SPLITS["first empty"]
    with fuser.autocast(recipe=recipes.MXFP8BlockScaling(backward_override=override)):
        y = op(values(T, K, seed=1, dtype=BF16), torch.tensor(splits))
    y.backward(dy)
    for g, rows in enumerate(dy.float().split(splits)):
        bias = getattr(op, f"bias{g}")
        torch.testing.assert_close(bias.grad.float(), rows.sum(0), rtol=0.01, atol=0.05)


@pytest.mark.parametrize("override", BACKWARD_OVERRIDES)
def test_overrides_save_what_they_say(override: str, at_once: Callable[[], None]) -> None:
    """The operands themselves, or their rowwise copies."""
    at_once()
    op, saved = made(BF16, bias=False, single_grouped_weight=True), []
    x = values(T, K, seed=1, dtype=BF16).requires_grad_()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        fuser.autocast(recipe=recipes.Float8CurrentScaling(backward_override=override)),
    ):
        op(x, torch.tensor(SPLITS["even"]))
    kept = [tensor for tensor in saved if tensor.dtype is BF16]
    assert len(kept) == 2
    for tensor in kept:
        if override == "high_precision":
            assert type(tensor) in (torch.Tensor, torch.nn.Parameter)
            assert tensor.shape in ((T, K), (GROUPS, N, K))
        else:
            assert tensor._has("rowwise")
            assert not tensor._has("columnwise")


@EVERY_RECIPE
def test_recipes_that_quantize_all_groups_multiply_them_at_once(
    make: Callable[[], Any], at_once: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once()
    monkeypatch.setattr(grouped_loop.LoopedProduct, "forward", None)  # that of one by one
    op = made(BF16)
    x, dy = values(T, K, seed=1, dtype=BF16), values(T, N, seed=2, dtype=BF16)
    assert run(op, x, dy, SPLITS["even"], recipe=make())["y"].any()


def test_other_recipes_run_group_by_group(
    at_once: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once()
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None)  # no product of all groups
    op = made(BF16)
    x, dy = values(T, K, seed=1, dtype=BF16), values(T, N, seed=2, dtype=BF16)
    results = run(op, x, dy, SPLITS["even"], recipe=recipes.Float8RowwiseScaling())
    weight, bias = stacked(op, "weight"), stacked(op, "bias").double()
    ends = list(itertools.accumulate(SPLITS["even"], initial=0))
    for g, (start, end) in enumerate(itertools.pairwise(ends)):
        rows = slice(start, end)
        exact = {
            "y": rowwise_fp8(x[rows]) @ rowwise_fp8(weight[g]).t() + bias[g],
            "dx": rowwise_fp8(dy[rows]) @ rowwise_fp8(weight[g].t()).t(),
            "dw": rowwise_fp8(dy[rows].t()) @ rowwise_fp8(x[rows].t()).t(),
            "db": dy[rows].double().sum(0),
        }
        of_group = {name: t[rows] if name in ("y", "dx") else t[g] for name, t in results.items()}
        assert_close(of_group, exact, 0.01)


def rowwise_fp8(matrix: torch.Tensor) -> torch.Tensor:
    """The values of a matrix in E4M3 with a scale for each row, in fp64."""
    scale = 448 / matrix.float().abs().amax(1, keepdim=True)
    return (matrix.float() * scale).to(torch.float8_e4m3fn).double() / scale.double()


@pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES)
def test_all_quantizers_are_those_one_by_one(make: Callable[[], Any]) -> None:
    """In training, in evaluation, and of an op that chooses its own."""

    class Chooses(fuser.GroupedLinear):
        def get_quantizer(self, mode: str, index: int, *args: Any) -> Any:
            return fuser.MXFP8Quantizer()

    for cls in (fuser.GroupedLinear, Chooses):
        op = cls(GROUPS, K, N, dtype=BF16, device="cpu")
        with fuser.autocast(recipe=make()):
            for mode in ("forward", "backward"):
                count = op.num_quantizers(mode)
                one_by_one = [op.quantizer_value(mode, index) for index in range(count)]
                assert op.quantizer_values(mode) == one_by_one
                assert len(one_by_one) == count
