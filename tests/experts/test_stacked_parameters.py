"""Grouped linears whose quantized weights are one parameter, against separate ones."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import oracles
import pytest
import torch
from other_sums import assert_equal_sums
from pipeline_kernels import on_kernels
from said import said
from sharded_models import RECIPES
from test_grouped_quantized_parameters import OVERRIDES, SIZES, G, K, launches, run

import fuser
from fuser import StateError
from fuser.errors import InputError
from fuser.gemm import grouped, matmul
from fuser.tensors import QuantizedTensor, stack_quantizer

__all__ = ["launches"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

N = 256
REFUSED = ("rowwise", "delayed", "nvfp4 4over6")
STACKED = [name for name in RECIPES if name not in REFUSED]


def pair(recipe: Any, n: int = N, **options: Any) -> tuple[Any, Any]:
    """An op with one quantized weight, and one with separate ones of the same values."""
    made = []
    for is_one in (True, False):
        torch.manual_seed(0)
        with fuser.quantized_model_init(recipe=recipe, **options):
            made.append(
                fuser.GroupedLinear(G, K, n, dtype=torch.bfloat16, single_grouped_weight=is_one)
            )
    return made[0], made[1]


def separate(op: Any) -> list[Any]:
    return [getattr(op, f"weight{g}") for g in range(G)]


def assert_alike(stacked: dict[str, Any], found: dict[str, Any]) -> None:
    for name in ("y", "dx"):
        assert torch.equal(stacked[name], found[name]), name
    assert torch.equal(stacked["weight"], torch.stack([found[f"weight{g}"] for g in range(G)]))


def assert_values(op: Any, other: Any) -> None:
    """The values of both copies, of which ``dequantize`` reads one, are those of ``other``."""
    for own, each in zip(op.weight, separate(other), strict=True):
        for usage in ("rowwise", "columnwise"):
            if each._has(usage):
                one, two = own.with_usage(usage), each.with_usage(usage)
                assert torch.equal(one.dequantize(), two.dequantize()), usage


# -- steps ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", STACKED)
def test_a_step_has_the_bits_of_separate_weights(name: str, override: str | None) -> None:
    recipe = RECIPES[name](**({"backward_override": override} if override else {}))
    stacked, other = pair(recipe)
    assert isinstance(stacked.weight, QuantizedTensor)
    assert_values(stacked, other)
    assert_alike(run(stacked, recipe), run(other, recipe))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("name", STACKED)
def test_outside_autocast_and_under_another_recipe(name: str) -> None:
    stacked, other = pair(RECIPES[name]())
    for recipe in (None, RECIPES["mxfp8"](), RECIPES["current"](), RECIPES["rowwise"]()):
        assert_alike(run(stacked, recipe), run(other, recipe))


@pytest.mark.parametrize("name", ["current", "blocks of 128x128", "nvfp4"])
def test_a_step_on_kernels_has_the_bits_of_separate_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "has_grouped_mm", lambda device, dtype: True)
    stacked, other = pair(RECIPES[name](), 128)
    with on_kernels():
        assert_alike(run(stacked, RECIPES[name]()), run(other, RECIPES[name]()))


@pytest.mark.parametrize("name", STACKED)
def test_an_optimizer_writes_the_bytes_of_separate_weights(name: str) -> None:
    stacked, other = pair(RECIPES[name]())
    for op in (stacked, other):
        optimizer = torch.optim.AdamW(op.parameters(), lr=0.05)
        for _ in range(2):
            run(op, RECIPES[name]())
            optimizer.step()
    assert_values(stacked, other)


def test_a_stack_that_was_changed_between_forward_and_backward_is_an_error() -> None:
    for is_one_launch in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_one_launch:
                patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: True)
            op, _ = pair(RECIPES["mxfp8"]())
            x = oracles.random_tensor((sum(SIZES), K), torch.bfloat16, 1).requires_grad_()
            with fuser.autocast(recipe=RECIPES["mxfp8"]()):
                y = op(x, torch.tensor(SIZES))
            with torch.no_grad():
                op.weight[2].mul_(2.0)
            with pytest.raises((RuntimeError, StateError), match=r"in ?place"):
                y.sum().backward()


# -- the tensor -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STACKED)
def test_a_view_of_a_matrix_has_its_values_and_writes_it_alone(name: str) -> None:
    stacked, other = pair(RECIPES[name]())
    weight, expected = stacked.weight.detach(), separate(other)
    fresh = 3 * oracles.random_tensor((N, K), torch.bfloat16, 5)
    weight[1].copy_(fresh)
    with torch.no_grad():
        expected[1].copy_(fresh)
    assert_values(stacked, other)
    values = torch.stack([each.dequantize() for each in expected])
    for found, own in (
        (weight[1].t(), values[1].t()),
        (weight[1][:128], values[1][:128]),
        (weight[1][128:].clone(), values[1][128:]),
        (weight[1][3:17], values[1][3:17]),
        (weight[2, :, 3:5], values[2, :, 3:5]),
        (weight[1:3], values[1:3]),
        (weight.flatten(0, 1), values.flatten(0, 1)),
        (weight.split(2)[1], values[2:]),
        (weight.transpose(1, 2), values.transpose(1, 2)),
        (weight.clone(), values),
        (weight.float().bfloat16(), values),
    ):
        plain = found.dequantize() if isinstance(found, QuantizedTensor) else found
        torch.testing.assert_close(plain + 0, own, rtol=0, atol=0)


@pytest.mark.parametrize("name", STACKED)
def test_a_write_to_a_part_of_a_matrix_leaves_the_scales_of_others(name: str) -> None:
    """The part is of another size, so that the scale of its matrix changes."""
    stacked, _ = pair(RECIPES[name]())
    weight = stacked.weight.detach()
    before = weight.dequantize()
    part = weight[1][:128].clone()
    for target in (weight[1][:128], part):
        target.mul_(64.0)
        torch.testing.assert_close(target.dequantize(), 64 * before[1, :128], rtol=0.2, atol=0.2)
    for numbers in ("_scale_inv", "_amax_rowwise"):  # those that all rows of a matrix share
        of_tiles = getattr(weight, numbers, None)
        if of_tiles is not None:
            assert torch.equal(*of_tiles.view(G, 2).t())
    torch.testing.assert_close(weight.dequantize()[2], before[2], rtol=0.13, atol=0.01)
    torch.testing.assert_close(weight.dequantize()[1, 128:], before[1, 128:], rtol=0.5, atol=0.9)


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4 of 1x16"])
def test_a_write_to_a_part_of_a_matrix_writes_the_bytes_of_separate_weights(name: str) -> None:
    stacked, other = pair(RECIPES[name]())
    weight, weights = stacked.weight.detach(), [each.detach() for each in separate(other)]
    for write in (
        lambda w: w[1][:128].mul_(5.0),
        lambda w: w[2][3:17].mul_(5.0),
        lambda w: w[0][:, 3:5].mul_(5.0),
        lambda w: w[1].t()[:16].mul_(5.0),
        lambda w: w[1].diagonal().fill_(2.0),
        lambda w: w[3][5, 7].fill_(9.0),
        lambda w: torch._foreach_mul_([w[1][:128], w[1][200:]], 3.0),
    ):
        write(weight)
        write(weights)
        assert_values(stacked, other)


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_rows_that_begin_inside_a_matrix_are_copied_by_value(name: str) -> None:
    """They have the scales of two matrices."""
    weight = pair(RECIPES[name]())[0].weight.detach()
    weight[0].mul_(50.0)
    rows = weight.flatten(0, 1)[128:384]
    for source in (rows, rows.clone(), pickle.loads(pickle.dumps(rows))):
        target = pair(RECIPES[name]())[0].weight.detach()
        target[0].copy_(source)
        assert torch.equal(
            target[0].dequantize(), weight._quantizer.alone()(rows.dequantize()).dequantize()
        )


@pytest.mark.parametrize("name", STACKED)
def test_new_zeros_of_a_stack(name: str) -> None:
    weight = pair(RECIPES[name]())[0].weight.detach()
    for shape in ((2, N, K), (N // 2, K), (5, K), (0, N, K), (3,)):
        assert not weight.new_zeros(shape).float().any()


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_copies_states_and_initial_values(name: str) -> None:
    recipe = RECIPES[name]()
    op, _ = pair(recipe, preserve_high_precision_init_val=True)
    values = op.weight.get_high_precision_init_val()
    assert torch.allclose(op.weight.dequantize().cpu(), values, rtol=0.3, atol=0.02)
    expected = run(op, recipe)
    other, _ = pair(recipe)
    with torch.no_grad():
        other.weight.zero_()
    other.load_state_dict(op.state_dict())
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op)), other):
        found = run(twin, recipe)
        assert all(torch.equal(found[each], expected[each]) for each in expected)


def test_a_stack_on_meta_is_quantized_when_it_is_initialised() -> None:
    recipe = RECIPES["current"]()
    for is_explicit in (True, False):
        with fuser.quantized_model_init(recipe=recipe):
            op = fuser.GroupedLinear(
                G, K, N, device="meta", dtype=torch.bfloat16, single_grouped_weight=True
            )
        parameters = list(op.parameters())
        if is_explicit:
            op.reset_parameters()
        run(op, recipe)
        assert isinstance(op.weight, fuser.Float8Tensor)
        assert all(a is b for a, b in zip(parameters, op.parameters(), strict=True))


@pytest.mark.parametrize("rows", [3 * N, 2 * N + 128])
@pytest.mark.parametrize("name", ["current", "nvfp4", "nvfp4 of 1x16"])
def test_kernels_write_the_bytes_of_the_matrices(name: str, rows: int) -> None:
    weight = pair(RECIPES[name]())[0].weight
    x = oracles.random_tensor((rows, K), torch.bfloat16, 3) * torch.arange(1, rows + 1)[:, None]
    quantizer = weight._quantizer.with_usage(rowwise=True, columnwise=True)
    expected = quantizer(x)
    with on_kernels():
        found = quantizer(x)
    for name, buffer in expected.buffers().items():
        assert torch.equal(getattr(found, name), buffer), name
    alone = quantizer.alone()(x[2 * N :])
    assert torch.equal(found[2 * N :].dequantize(), alone.dequantize())


# -- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "n"), [("delayed", N), ("rowwise", N), ("mxfp8", 192)])
def test_formats_and_sizes_without_stacks_are_refused(name: str, n: int) -> None:
    recipe = RECIPES[name]()
    with fuser.quantized_model_init(recipe=recipe):
        with pytest.raises(InputError) as raised:
            fuser.GroupedLinear(G, K, n, single_grouped_weight=True)
        fuser.GroupedLinear(G, K, n)
    sentence = str(raised.value)
    assert f"GroupedLinear({G}, {K}, {n})" in sentence
    assert type(recipe).__name__ in sentence
    assert re.search(said("grouped-quantized-weights-made-inside-model", None, None, 128), sentence)


def test_a_stack_of_parts_of_tiles_is_refused() -> None:
    quantizer = stack_quantizer(fuser.Float8CurrentScalingQuantizer(), N)
    assert quantizer is not None
    with pytest.raises(InputError, match=said("stacks-matrices-rows-takes", None, 256, 100, 128)):
        quantizer(torch.zeros(100, K))


def test_matrices_that_cut_blocks_are_multiplied_by_group() -> None:
    """A user's own parameter, of blocks of 128 rows."""
    recipe = RECIPES["blocks of 128x128"]()
    op = fuser.GroupedLinear(G, K, 100, dtype=torch.bfloat16, single_grouped_weight=True)
    plain = copy.deepcopy(op)
    whole = fuser.Float8BlockQuantizer()(op.weight.detach())
    op.weight = torch.nn.Parameter(whole)
    with torch.no_grad():
        plain.weight.copy_(whole.dequantize())
    found, expected = run(op, recipe), run(plain, recipe)
    for name in expected:  # the products of the plain weights have padding
        assert_equal_sums(found[name], expected[name], name)


def test_a_stack_of_other_matrices_is_refused() -> None:
    op, _ = pair(RECIPES["current"]())
    halves = fuser.GroupedLinear(2 * G, K, N // 2, single_grouped_weight=True, bias=False)
    doubles = fuser.GroupedLinear(G // 2, K, 2 * N, single_grouped_weight=True, bias=False)
    for other in (halves, doubles):
        other.weight = torch.nn.Parameter(op.weight.detach().view(other.weight.shape))
        x = torch.ones(8, K, dtype=torch.bfloat16)
        sizes = torch.full((other.num_groups,), 1)
        for recipe in (None, RECIPES["current"]()):
            with (
                pytest.raises(
                    InputError,
                    match=said(
                        "grouped-parameters-quantized-each-rows",
                        None,
                        None,
                        256,
                        other.out_features,
                    ),
                ),
                fuser.autocast(enabled=recipe is not None, recipe=recipe),
            ):
                other(x, sizes)


def test_a_linear_multiplies_a_matrix_of_a_stack_by_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A native GEMM would read the scale of the first 128 rows for all."""
    weight = pair(RECIPES["current"]())[0].weight.detach()
    alone = fuser.Float8CurrentScalingQuantizer()(weight[1].dequantize())
    monkeypatch.setattr(matmul, "native_gemm", lambda *formats_and_architecture: "native")
    assert matmul._native(alone, alone) is not None
    assert matmul._native(alone, weight[1]) is None
    assert matmul._native(weight[:2].flatten(0, 1), alone) is None


def test_a_tensor_with_one_scale_for_all_groups_is_multiplied_by_group() -> None:
    """A user's own parameter: its matrices share a scale."""
    op, _ = pair(RECIPES["current"]())
    values = op.weight.dequantize()
    whole = fuser.Float8CurrentScalingQuantizer()(values)
    op.weight = torch.nn.Parameter(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: True)
        found = run(op, RECIPES["current"]())
    plain = fuser.GroupedLinear(G, K, N, dtype=torch.bfloat16, single_grouped_weight=True)
    with torch.no_grad():
        plain.weight.copy_(whole.dequantize())
    plain.bias0.data.zero_()
    expected = run(plain, None)
    error = (found["y"] - expected["y"]).float().norm() / expected["y"].float().norm()
    assert error < 0.1
