"""GroupedTensor: each group has the bytes of a tensor of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from said import said

import fuser
from fuser.errors import InputError
from fuser.formats import DType
from fuser.tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8RowwiseQuantizer,
    GroupedTensor,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

T, K = 300, 96
SPLITS = {
    "some": (130, 0, 7, 128, 20),
    "all empty": (0, 0, 0, 0, 0),
    "all in one": (0, 0, 0, 300, 0),
    "one row each": (1, 1, 1, 1, 1),
}
EVERY_SPLIT = pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)


def delayed() -> list[Float8Quantizer]:
    scales = [1.0, 3.0, 0.5, 7.0, 100.0]
    return [Float8Quantizer(torch.tensor([scale]), torch.tensor([2.5])) for scale in scales]


QUANTIZERS = {
    "current": lambda: Float8CurrentScalingQuantizer(),
    "current, E5M2, powers of two": lambda: Float8CurrentScalingQuantizer(
        DType.kFloat8E5M2, force_pow_2_scales=True
    ),
    "current, epsilon": lambda: Float8CurrentScalingQuantizer(amax_epsilon=30.0),  # of some groups
    "delayed": delayed,
    "1x128": lambda: Float8BlockQuantizer(block_scaling_dim=1),
    "128x128": lambda: Float8BlockQuantizer(block_scaling_dim=2),
    "1x128, epsilon": lambda: Float8BlockQuantizer(block_scaling_dim=1, amax_epsilon=5.0),
    "MXFP8": lambda: MXFP8Quantizer(),
    "NVFP4": lambda: NVFP4Quantizer(),
    "NVFP4, 16x16": lambda: NVFP4Quantizer(with_2d_quantization=True),
    "NVFP4, Hadamard": lambda: NVFP4Quantizer(with_rht=True),
    "MXFP8, 32x32": lambda: MXFP8Quantizer(with_2d_quantization=True),
}
EVERY_FORMAT = pytest.mark.parametrize("name", QUANTIZERS)


def rows(dtype: torch.dtype = torch.float32, count: int = T) -> torch.Tensor:
    """Rows of very different sizes; those from ``count`` on are NaN."""
    x = torch.randn(T, K, generator=torch.Generator().manual_seed(0))
    x *= torch.exp2(torch.arange(T) % 9 - 4.0)[:, None]
    x[count:] = float("nan")
    return x.to(dtype)


@pytest.mark.sampled(most=16)
@EVERY_SPLIT
@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_member_has_the_buffers_of_the_group_alone(
    name: str, splits: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, given, alone = rows(dtype, sum(splits)), QUANTIZERS[name](), QUANTIZERS[name]()
    made = GroupedTensor.quantize(x, torch.tensor(splits), given)
    assert (made.shape, made.dtype, made.device) == (x.shape, dtype, x.device)
    values, start = made.dequantize(), 0
    for g, (member, size) in enumerate(zip(made.members(), splits, strict=True)):
        quantizer = alone[g] if isinstance(alone, Sequence) else alone
        group, start = slice(start, start + size), start + size
        wanted = quantizer(x[group])
        assert type(member) is type(wanted)
        if size:  # an empty tensor's scale is not defined
            for buffer, expected in wanted.buffers().items():
                assert torch.equal(getattr(member, buffer), expected), (g, buffer)
        assert torch.equal(values[group], wanted.dequantize())
        if isinstance(alone, Sequence):
            assert given[g].amax == alone[g].amax
    assert not values[start:].any()


@EVERY_FORMAT
def test_the_quantizer_of_all_groups_is_that_of_one_for_later_writes(name: str) -> None:
    given = QUANTIZERS[name]()
    if isinstance(given, Sequence):
        pytest.skip("each group has its own")
    made = GroupedTensor.quantize(rows(), torch.tensor(SPLITS["some"]), given)
    assert made.padded._quantizer.unbound() == given


@EVERY_FORMAT
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
def test_one_copy(name: str, usage: str) -> None:
    def with_usage(quantizer: Quantizer) -> Quantizer:
        return quantizer.with_usage(**{u: u == usage for u in ("rowwise", "columnwise")})

    given = QUANTIZERS[name]()
    one = [*map(with_usage, given)] if isinstance(given, Sequence) else with_usage(given)
    x, sizes = rows(), torch.tensor(SPLITS["some"])
    made, both = (GroupedTensor.quantize(x, sizes, q) for q in (one, QUANTIZERS[name]()))
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}[usage]
    both.update_usage(**{f"{other}_usage": False})
    assert not made.padded._has(other)
    for found, expected in zip(made.members(), both.members(), strict=True):
        assert found.buffers().keys() == expected.buffers().keys()
        for buffer, value in expected.buffers().items():
            assert (value is None) == (found.buffers()[buffer] is None)
            if value is not None:
                assert torch.equal(found.buffers()[buffer], value)
    assert torch.equal(made.dequantize(), both.dequantize())


def test_sizes_that_do_not_fit_end_at_the_last_row() -> None:
    made = GroupedTensor.quantize(rows(), torch.tensor([200, -5, 400]), MXFP8Quantizer())
    assert [len(member) for member in made.members()] == [200, 0, 100]


def test_it_is_a_public_name_and_says_what_it_is() -> None:
    made = fuser.GroupedTensor.quantize(rows(), torch.tensor([3, 4]), MXFP8Quantizer())
    words = repr(made)
    assert words.startswith("GroupedTensor(shape=(300, 96), dtype=torch.float32, groups=2, MXFP8")


def test_no_rows_at_all() -> None:
    made = GroupedTensor.quantize(torch.empty(0, K), torch.tensor([0, 0]), MXFP8Quantizer())
    assert made.dequantize().shape == (0, K)
    assert [member.shape for member in made.members()] == [(0, K), (0, K)]


@pytest.mark.parametrize(
    ("x", "sizes", "quantizer", "words"),
    [
        (torch.ones(2, 3, 4), [1], MXFP8Quantizer(), said("grouped-shape-split-sizes", (2, 3, 4))),
        (
            torch.ones(4, 4),
            [[1]],
            MXFP8Quantizer(),
            said("grouped-shape-split-sizes", None, (1, 1)),
        ),
        (
            torch.ones(4, 4),
            [1],
            Float8RowwiseQuantizer(),
            said("grouped-quantizes-groups-launch", "Float8RowwiseQuantizer"),
        ),
        (
            torch.ones(4, 4),
            [1, 1],
            Float8Quantizer(),
            said("grouped-quantizes-groups-launch", None, None, 2),
        ),
    ],
)
def test_refusals(x: torch.Tensor, sizes: list[int], quantizer: Quantizer, words: str) -> None:
    with pytest.raises(InputError, match=words):
        GroupedTensor.quantize(x, torch.tensor(sizes), quantizer)
