"""Grouped linears whose FP8 products one kernel computes, in the emulator."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulator import emulated
from one_launch_experts import one_by_one
from said import said
from test_grouped_linear import assert_close, run
from test_grouped_linear import values as random_values

import fuser
from fuser import gemm
from fuser import recipe as recipes
from fuser.cuda import grouped_gemm
from fuser.cuda import launch as launching
from fuser.cuda.launch import Kernel
from fuser.formats import NumberFormat
from fuser.gemm import grouped
from fuser.gemm.quantized_groups import sums_of

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")
BF16, FP16 = torch.bfloat16, torch.float16
RECIPES: dict[str, Callable[[], Any]] = {
    "current": recipes.Float8CurrentScaling,
    "current, E4M3": lambda: recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3),
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=2),
    "128-block": recipes.Float8BlockScaling,
    "1D weights": lambda: recipes.Float8BlockScaling(w_block_scaling_dim=1),
    "2D inputs": lambda: recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels run in the emulator as on Hopper; the symbols of grouped products."""
    found: list[str] = []
    monkeypatch.setattr(grouped, "has_grouped_mm", lambda device, dtype: dtype in (BF16, FP16))
    with emulated(multiprocessors=3):
        runs = launching.backend.run

        def noted(kernel: Kernel, *args: Any) -> None:
            if kernel.module == "grouped_gemm":
                found.append(kernel.symbol)
            runs(kernel, *args)

        monkeypatch.setattr(launching.backend, "emulates_wgmma", True)
        monkeypatch.setattr(launching.backend, "run", noted)
        yield found


@pytest.mark.sampled
@pytest.mark.parametrize("splits", [(40, 0, 130, 3), (0, 0, 0, 0)], ids=["some", "none"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_equals_the_dequantized_one(
    name: str,
    dtype: torch.dtype,
    splits: tuple[int, ...],
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if dtype is FP16 and name not in ("current", "128-block"):
        pytest.skip("the dtype changes the results alone")
    rows, n, k = 180, 144, 272  # the last rows belong to no group
    torch.manual_seed(0)
    op = fuser.GroupedLinear(4, k, n, dtype=dtype)
    x, dy = (random_values(rows, size, seed=size, dtype=dtype) for size in (k, n))
    x[sum(splits) :] = dy[sum(splits) :] = torch.nan
    given: dict[str, Any] = {"x": x, "dy": dy, "splits": splits}
    other = copy.deepcopy(op)
    found = run(op, **given, recipe=RECIPES[name]())
    if sum(splits):
        # A 2D input has no product with 1D weights.
        of_rows = 1 if name == "2D inputs" else 2
        is_block = name in ("128-block", "1D weights", "2D inputs")
        assert sum("kRows" in symbol for symbol in launched) == of_rows
        assert sum("kDepth" in symbol for symbol in launched) == 1
        # Forward under current and delayed scaling asks for no split accumulator.
        assert ("Blocks" in launched[0]) == is_block
        assert ("kFast" in launched[0]) != is_block
        assert sum("kE5m2" in symbol for symbol in launched) == 2 * (name in ("current", "delayed"))
    monkeypatch.setattr(launching.backend, "emulates_wgmma", False)
    launched.clear()
    again = run(other, **given, recipe=RECIPES[name]())
    assert not launched
    assert_close(found, {key: value.double() for key, value in again.items()}, 6e-3)
    assert not found["y"][sum(splits) :].any()
    assert not found["dx"][sum(splits) :].any()


SPLITS_OF_GEMMS = list(itertools.product((False, True), repeat=3))


def with_accumulators(is_split: tuple[bool, ...]) -> recipes.Float8CurrentScaling:
    """A recipe whose forward, dgrad and wgrad have these split accumulators."""
    names = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
    params = [recipes.MMParams(use_split_accumulator=split) for split in is_split]
    return recipes.Float8CurrentScaling(**dict(zip(names, params, strict=True)))


@pytest.mark.parametrize("is_split", SPLITS_OF_GEMMS, ids=str)
def test_each_product_has_the_accumulator_that_the_recipe_gives_it(
    is_split: tuple[bool, ...], launched: list[str]
) -> None:
    op = fuser.GroupedLinear(4, 64, 32, dtype=BF16, device="cpu")
    x, dy = (random_values(10, size, seed=size, dtype=BF16) for size in (64, 32))
    given: dict[str, Any] = {"x": x, "dy": dy, "splits": (7, 0, 2, 1)}
    run(op, **given, recipe=with_accumulators(is_split))
    assert ["kRows" in symbol for symbol in launched] == [True, True, False]
    assert ["kFast" not in symbol for symbol in launched] == list(is_split)
    assert ["kSplit" in symbol for symbol in launched] == list(is_split)


@pytest.mark.parametrize("is_split", SPLITS_OF_GEMMS, ids=str)
def test_each_product_of_the_loop_has_it_too(
    is_split: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, set[bool]] = {}

    def noted(name: str, product: Any, *args: Any, is_split: bool) -> Any:
        found.setdefault(name, set()).add(is_split)
        return product(*args, is_split=is_split)

    for name in ("quantized_linear", "quantized_dgrad", "quantized_wgrad"):
        monkeypatch.setattr(gemm, name, functools.partial(noted, name, getattr(gemm, name)))
    one_by_one(monkeypatch)
    op = fuser.GroupedLinear(4, 64, 32, dtype=BF16, device="cpu")
    x, dy = (random_values(10, size, seed=size, dtype=BF16) for size in (64, 32))
    run(op, x=x, dy=dy, splits=(7, 0, 2, 1), recipe=with_accumulators(is_split))
    assert found == {
        "quantized_linear": {is_split[0]},
        "quantized_dgrad": {is_split[1]},
        "quantized_wgrad": {is_split[2]},
    }


@pytest.mark.parametrize(("n", "k"), [(144, 264), (136, 272)])
def test_sizes_that_the_copy_engine_does_not_read_are_dequantized(
    n: int, k: int, launched: list[str]
) -> None:
    op = fuser.GroupedLinear(4, k, n, dtype=BF16)
    x, dy = (random_values(40, size, seed=size, dtype=BF16) for size in (k, n))
    run(op, x=x, dy=dy, splits=(30, 0, 8, 2), recipe=recipes.Float8CurrentScaling())
    assert not launched


def test_a_kernel_that_does_not_compile_is_replaced(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise fuser.errors.KernelUnavailable("it does not compile")

    monkeypatch.setattr(grouped_gemm, "_kernel", fails)
    op = fuser.GroupedLinear(4, 64, 32, dtype=BF16)
    x, dy = (random_values(40, size, seed=size, dtype=BF16) for size in (64, 32))
    found = run(op, x=x, dy=dy, splits=(30, 0, 8, 2), recipe=recipes.Float8CurrentScaling())
    exact = run(op, x=x, dy=dy, splits=(30, 0, 8, 2))
    assert_close(found, {key: value.double() for key, value in exact.items()}, 0.1)


def test_formats_that_the_kernel_does_not_take() -> None:
    fp8 = fuser.DType.kFloat8E4M3
    tensor, rows = NumberFormat("FP8", fp8), NumberFormat("FP8 rowwise", fp8)
    block, square = NumberFormat("FP8 1x128", fp8), NumberFormat("FP8 128x128", fp8)
    mxfp8 = NumberFormat("MXFP8", fp8)
    for pair in ((tensor, rows), (rows, rows), (square, block), (tensor, block), (mxfp8, mxfp8)):
        assert sums_of(*pair, True) is None


def test_operands_that_do_not_match_are_refused() -> None:
    data, scales = torch.zeros(256, 64, dtype=torch.uint8), torch.ones(2)
    operand = grouped_gemm.GroupedOperand(data, fuser.DType.kFloat8E4M3, scales)
    ends = torch.tensor([128, 256], dtype=torch.int32)
    tiles = torch.zeros(3, 4, dtype=torch.int32)
    out = torch.empty(256, 128)
    how = grouped_gemm.Sums.FAST
    with pytest.raises(
        fuser.InputError, match=said("grouped-gemm-rows-weights-tiles", (256, 64), None, 2, 3)
    ):
        grouped_gemm.multiply_rows(operand, operand, ends, tiles, how, out=out, is_padded=True)
    with pytest.raises(
        fuser.InputError,
        match=said("grouped-gemm-multiply-depth-results", None, None, 2, (3, 256, 256)),
    ):
        grouped_gemm.multiply_depth(operand, operand, ends, how, out=torch.empty(3, 256, 256))
