"""The bits of a row of a grouped linear depend on that row and its expert alone, on a CPU.

A product is torch's, which may add in another order for another number of rows. Where it does,
there is nothing to test: bits then differ without fuser too.
"""

from __future__ import annotations

import functools
from typing import Any

import every_format as formats
import oracles
import pytest
import torch

import fuser
from fuser import recipe as recipes

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

EXPERTS, K, N = 3, 64, 96
BF16 = torch.bfloat16
# Those in which the values of a row have scales of their own.
OF_ROWS: dict[str, Any] = {
    "none": None,
    "rowwise": recipes.Float8RowwiseScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "block": recipes.Float8BlockScaling,
}
# Those with one scale for all rows of a group, or of a block of rows.
OF_GROUPS: dict[str, Any] = {
    "current": recipes.Float8CurrentScaling,
    "nvfp4": functools.partial(recipes.NVFP4BlockScaling, disable_stochastic_rounding=True),
    "block of rows": functools.partial(
        recipes.Float8BlockScaling,
        x_block_scaling_dim=2,
        w_block_scaling_dim=1,
        use_f32_scales=True,  # a power of two hides another scale, until values underflow
    ),
}
Result = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def product_depends_on_rows(dtype: torch.dtype) -> bool:
    """Whether torch's product of a row has other bits beside other rows, on this machine."""
    weight, row = (oracles.random_tensor(shape, dtype, 1) for shape in ((N, K), (1, K)))
    found = []
    for rows in (1, 2, 3, 7, 8, 20, 64, 127, 200):
        x = oracles.random_tensor((rows, K), dtype, rows)
        x[rows // 2] = row
        found.append((x @ weight.t())[rows // 2])
    return not all(torch.equal(each, found[0]) for each in found)


def batches() -> list[tuple[tuple[int, ...], int, int]]:
    """Split sizes, rows after the last group, and the place of the row among those of expert 1."""
    return [
        ((0, 1, 0), 0, 0),
        ((0, 2, 5), 0, 1),
        ((40, 1, 0), 3, 0),
        ((7, 20, 1), 0, 11),
        ((1, 64, 64), 9, 63),
        ((130, 200, 3), 0, 140),
    ]


def row_of_each(op: fuser.GroupedLinear, recipe: Any, dtype: torch.dtype) -> list[Result]:
    """Output and gradient of one row of expert 1, in every batch."""
    row, gradient = (oracles.random_tensor((size,), dtype, 5) for size in (K, N))
    found = []
    for seed, (sizes, more, place) in enumerate(batches()):
        rows, at = sum(sizes) + more, sizes[0] + place
        # The others have other magnitudes in each batch.
        x = oracles.random_tensor((rows, K), dtype, seed) * 4 ** (seed - 2)
        dy = oracles.random_tensor((rows, N), dtype, seed + 50) * 4 ** (2 - seed)
        x[at], dy[at] = row, gradient
        x.requires_grad_()
        with fuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = op(x, torch.tensor(sizes))
        y.backward(dy)
        found.append((y[at].detach(), x.grad[at]))
    return found


def are_same(results: list[Result], which: int) -> bool:
    return all(torch.equal(result[which], results[0][which]) for result in results)


def made(dtype: torch.dtype = BF16) -> fuser.GroupedLinear:
    return oracles.randomize(fuser.GroupedLinear(EXPERTS, K, N, dtype=dtype, device="cpu"))


def skip_if_products_differ(dtype: torch.dtype) -> None:
    if product_depends_on_rows(dtype):
        pytest.skip(f"torch's product of {dtype} depends on the number of rows here.")


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"], ids=str)
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_row_with_scales_of_its_own_has_the_same_bits_in_every_batch(
    name: str, override: str | None
) -> None:
    skip_if_products_differ(BF16)
    if name == "none" and override is not None:
        pytest.skip("without a recipe there is no override.")
    recipe = OF_ROWS[name] and OF_ROWS[name](backward_override=override)
    results = row_of_each(made(), recipe, BF16)
    assert are_same(results, 0)
    assert are_same(results, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_without_a_recipe_so_has_a_row_of_other_dtypes_where_torchs_product_allows(
    dtype: torch.dtype,
) -> None:
    skip_if_products_differ(dtype)
    results = row_of_each(made(dtype), None, dtype)
    assert are_same(results, 0)
    assert are_same(results, 1)


def test_in_fp32_a_row_has_the_same_bits_if_no_sum_is_rounded() -> None:
    """So what depends on the number of rows in fp32 is torch's order of sums alone."""
    op = made(torch.float32)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.mul_(8).round_()
    rounded = lambda *shape: (8 * oracles.random_tensor(shape, torch.float32, 1)).round()  # noqa: E731
    found = []
    for sizes, more, place in batches():
        x = rounded(sum(sizes) + more, K)
        x[sizes[0] + place] = rounded(K)
        found.append(op(x, torch.tensor(sizes))[sizes[0] + place].detach())
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_one_scale_for_many_rows_gives_a_row_other_bits_in_other_batches(name: str) -> None:
    """What docs/experts.md says; a backward in high precision quantizes no gradient."""
    skip_if_products_differ(BF16)
    results = row_of_each(made(), OF_GROUPS[name](), BF16)
    assert not are_same(results, 0)
    results = row_of_each(made(), OF_GROUPS[name](backward_override="high_precision"), BF16)
    assert are_same(results, 1)


def test_blocks_of_many_rows_of_the_gradient_change_the_input_gradient_alone() -> None:
    skip_if_products_differ(BF16)
    dims = {"grad_block_scaling_dim": 2, "w_block_scaling_dim": 1}
    recipe = recipes.Float8BlockScaling(**dims, use_f32_scales=True)
    results = row_of_each(made(), recipe, BF16)
    assert are_same(results, 0)
    assert not are_same(results, 1)


def test_under_delayed_scaling_a_row_depends_on_earlier_steps_and_not_on_its_batch() -> None:
    skip_if_products_differ(BF16)
    op, recipe = made(), recipes.DelayedScaling(amax_history_len=2)
    row_of_each(op, recipe, BF16)
    row = oracles.random_tensor((K,), BF16, 5)
    found = []
    for seed, (sizes, more, place) in enumerate(batches()):
        x = oracles.random_tensor((sum(sizes) + more, K), BF16, seed) * 4 ** (seed - 2)
        x[sizes[0] + place] = row
        with torch.no_grad(), fuser.autocast(recipe=recipe):
            found.append(op(x, torch.tensor(sizes))[sizes[0] + place])
    assert all(torch.equal(each, found[0]) for each in found)


def test_every_recipe_is_in_one_of_the_tables() -> None:
    assert {*OF_ROWS, *OF_GROUPS, "delayed"} >= formats.RECIPES.keys()


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_token_of_a_layer_of_experts_has_the_same_bits_in_every_batch(name: str) -> None:
    skip_if_products_differ(BF16)
    options: dict[str, Any] = {"dtype": BF16, "device": "cpu"}
    up = oracles.randomize(fuser.GroupedLinear(EXPERTS, K, 2 * K, **options))
    down = oracles.randomize(fuser.GroupedLinear(EXPERTS, K, K, **options))
    dispatch = fuser.MoeDispatch(EXPERTS)
    for index, channel in enumerate(("sizes", "probs", "rows")):
        dispatch.set_extra_output_channel(index, channel, output_to_caller=False)
    layer = fuser.Sequential(
        dispatch,
        up.set_extra_input_channel(0, "sizes"),
        fuser.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        down.set_extra_input_channel(0, "sizes"),
        fuser.MoeCombine().set_extra_input_channel(0, "rows"),
    )
    token, gradient = (oracles.random_tensor((K,), BF16, seed) for seed in (5, 6))
    found = []
    for seed, tokens in enumerate((1, 2, 9, 50, 333)):
        generator = torch.Generator().manual_seed(seed)
        indices = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :2]
        probs = torch.rand(tokens, 2, generator=generator)
        x = oracles.random_tensor((tokens, K), BF16, seed) * 4 ** (seed - 2)
        dy = oracles.random_tensor((tokens, K), BF16, seed + 50)
        at = tokens // 2
        x[at], dy[at], indices[at] = token, gradient, torch.tensor([2, 0])
        probs[at] = torch.tensor([0.7, 0.2])
        x.requires_grad_()
        probs.requires_grad_()
        with fuser.autocast(
            enabled=OF_ROWS[name] is not None, recipe=OF_ROWS[name] and OF_ROWS[name]()
        ):
            y = layer(x, indices, probs)
        y.backward(dy)
        found.append((y[at].detach(), x.grad[at], probs.grad[at]))
    for result in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, found[0], strict=True))
