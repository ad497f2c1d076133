"""What a shard of a quantized parameter knows, without ranks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import every_format as formats
import oracles
import pytest
import torch

import fuser
from fuser.recipe import MXFP8BlockScaling
from fuser.tensors import loading, stack_quantizer
from fuser.tensors.base import recipe_of_gathering
from fuser.tensors.sharding import Sharding
from fuser.tensors.stacks import matrices


def test_a_copy_of_a_shard_has_reads_of_its_own() -> None:
    """A backward of the copy does not say what that of the original reads."""
    original = Sharding(None, 4, True, backward_reads={"columnwise"})
    again = copy.deepcopy(original)
    assert (again.rows, again.is_exact, again.ranks) == (4, True, 1)
    assert again.backward_reads == set()
    again.backward_reads.add("rowwise")
    assert original.backward_reads == {"columnwise"}


K = 96


class Group:
    """Two ranks, of which this is the first."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def values(rows: int, seed: int = 1) -> torch.Tensor:
    return oracles.random_tensor((rows, K), torch.float32, seed)


def shard(quantizer: Any, rows: int = 64, used: int = 48, group: Any = None) -> Any:
    """A shard of ``used`` rows, and padding after them."""
    made = quantizer(values(rows))
    made._sharding = Sharding(group, used, True)
    return made


@pytest.mark.parametrize("name", formats.QUANTIZERS)
def test_zeros_like_a_shard_are_one_with_its_copies(name: str) -> None:
    made = shard(formats.QUANTIZERS[name])
    made.update_usage(columnwise_usage=False)
    zeros = made.new_zeros((32, K))
    assert zeros._sharding is made._sharding
    assert (zeros._has("rowwise"), zeros._has("columnwise")) == (True, False)
    assert not zeros.dequantize().any()
    assert made.quantize_(values(64, seed=2))._sharding is zeros._sharding


def test_a_write_to_a_shard_reduces_its_amax_over_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, reduced = Group(), []

    def all_reduce(amax: torch.Tensor, op: Any, group: Any) -> None:
        reduced.append(group)
        amax.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    made, x = shard(formats.QUANTIZERS["current"], group=group), values(64, seed=2)
    made.copy_(x)
    assert reduced == [group]
    assert torch.equal(made._scale_inv, 2 * formats.QUANTIZERS["current"](x)._scale_inv)


def test_bytes_of_a_shard_without_its_padding_are_copied() -> None:
    made, x = shard(formats.QUANTIZERS["current"]), values(48, seed=2)
    source = fuser.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1))(x)
    made[:48].copy_(source)
    assert made._scale_inv.item() == 0.5
    assert torch.equal(made.dequantize()[:48], source.dequantize())
    before = made.dequantize()[32:48]
    made[:32].copy_(100 * x[:32])  # one scale for these and the rows after them
    torch.testing.assert_close(made.dequantize()[32:48], before, rtol=2**-3, atol=1.0)
    error = (made.dequantize()[:32] - 100 * x[:32]).norm() / (100 * x[:32]).norm()
    assert error < 0.05


def test_a_load_knows_a_whole_shard_by_its_first_buffer_and_rows() -> None:
    made, other = (shard(formats.QUANTIZERS["current"]) for _ in range(2))
    first = made._memory()[0]
    for value, expected in (
        (made, True),
        (made[:48], True),
        (made[:32], False),
        (made[16:], False),
        (other, False),
        (other[:48], False),
        (values(48), False),
    ):
        assert loading._is_whole(value, first) is expected


def test_a_gathered_weight_has_the_recipe_under_which_it_is_gathered() -> None:
    weight, recipe = formats.QUANTIZERS["mxfp8"](values(64)), MXFP8BlockScaling()
    assert recipe_of_gathering(values(64)) is recipe_of_gathering(weight) is None
    weight._gathering = SimpleNamespace(recipe=recipe)
    assert recipe_of_gathering(weight) is recipe


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_matrices_of_a_gathered_stack_are_gathered(name: str) -> None:
    quantizer = stack_quantizer(formats.QUANTIZERS[name], 128)
    assert quantizer is not None
    stack = quantizer(values(256).view(2, 128, K))
    stack._gathering = SimpleNamespace(complete=lambda usage: False)
    for matrix in matrices(stack):
        assert isinstance(matrix, fuser.QuantizedTensor)
        assert matrix._gathering is stack._gathering
