"""Constants, sizes and shapes of the number formats, and sizes that are refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import every_format
import pytest
import torch
from format_cases import E2M1, E4M3, E5M2, QUANTIZERS
from said import said

import fuser
from fuser import formats
from fuser.errors import InputError
from fuser.formats import DType
from fuser.reference import block_scaling


def test_the_constants_are_those_of_the_formats() -> None:
    assert [dtype.max for dtype in (E4M3, E5M2, E2M1)] == [448.0, 57344.0, 6.0]
    assert [dtype.torch_dtype for dtype in (E4M3, E5M2, E2M1)] == [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
    ]
    assert sum(dtype.name.startswith(("kFloat8", "kFloat4")) for dtype in DType) == 3
    assert (formats.MXFP8_BLOCK, formats.FP8_BLOCK, formats.NVFP4_BLOCK) == (32, 128, 16)


def test_the_bytes_of_a_format_are_those_of_elements_and_scales_in_every_copy() -> None:
    shape, n, both = (2, 64, 256), 128 * 256, ("rowwise", "columnwise")
    for quantizer, scales in (
        (fuser.Float8CurrentScalingQuantizer(), 4),
        (fuser.Float8BlockQuantizer(block_scaling_dim=1), 4 * n // 128),
        (fuser.Float8BlockQuantizer(block_scaling_dim=2), 4 * n // 128**2),
        (fuser.MXFP8Quantizer(), n // 32),
    ):
        for copies in (both[:1], both[1:], both):
            assert quantizer.format.nbytes(shape, copies) == len(copies) * (n + scales)
    assert fuser.NVFP4Quantizer().format.nbytes(shape, both) == 2 * (n // 2 + n // 16)
    assert fuser.NVFP4Quantizer().format.nbytes((5,), both[:1]) == 3 + 1


def test_a_scale_a_row_is_one_of_each_row_in_one_copy_and_of_each_column_in_the_other() -> None:
    number_format = fuser.Float8RowwiseQuantizer().format
    shape, n = (2, 64, 256), 128 * 256
    assert number_format.nbytes(shape, ("rowwise",)) == n + 4 * 128
    assert number_format.nbytes(shape, ("columnwise",)) == n + 4 * 256
    assert number_format.nbytes(shape, ("rowwise", "columnwise")) == 2 * n + 4 * (128 + 256)


@pytest.mark.parametrize("quantizer", every_format.QUANTIZERS.values(), ids=every_format.QUANTIZERS)
def test_the_bytes_of_a_format_are_those_of_its_buffers_where_nothing_is_padded(
    quantizer: Any,
) -> None:
    shape = (512, 1024)
    made = quantizer(torch.zeros(shape))
    buffers = {n: b for n, b in made.buffers().items() if b is not None and "amax" not in n}
    nbytes = sum(buffer.nbytes for buffer in buffers.values())
    shared = 4 * ("_scale_inv" in buffers)  # counted with each copy
    assert quantizer.format.nbytes(shape, ("rowwise", "columnwise")) == nbytes + shared


@pytest.mark.parametrize(
    ("n", "multiple", "quotient", "rounded"),
    [
        (0, 4, 0, 0),
        (1, 4, 1, 4),
        (4, 4, 1, 4),
        (5, 4, 2, 8),
        (127, 128, 1, 128),
        (257, 128, 3, 384),
    ],
)
def test_ceil_div_and_round_up(n: int, multiple: int, quotient: int, rounded: int) -> None:
    assert formats.ceil_div(n, multiple) == quotient
    assert formats.round_up(n, multiple) == rounded


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (formats.mxfp8_scale_shape(160, 288, False), (256, 12)),
        (formats.mxfp8_scale_shape(160, 288, True), (8, 384)),
        (formats.mxfp8_scale_shape(128, 128, False), (128, 4)),
        (formats.mxfp8_scale_shape(128, 128, True), (4, 128)),
        (formats.mxfp8_scale_shape(0, 64, False), (0, 4)),
        (formats.mxfp8_scale_shape(0, 64, True), (0, 128)),
        (formats.nvfp4_scale_shape(160, 288, False), (256, 20)),
        (formats.nvfp4_scale_shape(160, 288, True), (384, 12)),
        (formats.nvfp4_scale_shape(128, 64, False), (128, 4)),
        (formats.nvfp4_scale_shape(128, 64, True), (128, 8)),
        (formats.fp8_block_scale_shape(130, 257, False, 1), (3, 132)),
        (formats.fp8_block_scale_shape(130, 257, True, 1), (2, 260)),
        (formats.fp8_block_scale_shape(130, 257, False, 2), (2, 4)),
        (formats.fp8_block_scale_shape(130, 257, True, 2), (3, 4)),
        (formats.fp8_block_scale_shape(128, 640, False, 2), (1, 8)),
        (formats.fp8_block_scale_shape(128, 640, True, 2), (5, 4)),
        (formats.fp8_block_scale_shape(0, 5, False, 1), (1, 0)),
    ],
)
def test_scale_shapes(shape: tuple[int, int], expected: tuple[int, int]) -> None:
    assert shape == expected


def test_a_block_shape_that_does_not_exist_is_refused_by_its_number() -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(InputError, match=said("formats-block-scaling-dim", 3)):
        block_scaling.quantize(x, E4M3, block_dim=3)


@pytest.mark.parametrize(("m", "k"), [(64, 96), (0, 32), (32, 0), (0, 0)])
def test_multiples_pass_and_so_does_zero(m: int, k: int) -> None:
    formats.check_multiple("MXFP8", m, k, 32)


@pytest.mark.parametrize(
    ("m", "k", "dimension", "size"), [(33, 64, "M", 33), (64, 80, "K", 80), (1, 32, "M", 1)]
)
def test_a_size_that_is_no_multiple_is_a_sentence_with_the_dimension_its_size_and_the_multiple(
    m: int, k: int, dimension: str, size: int
) -> None:
    with pytest.raises(
        InputError,
        match=said("formats-needs-multiple-pad", "MXFP8", dimension, None, 32, None, size),
    ):
        formats.check_multiple("MXFP8", m, k, 32)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("mxfp8", (48, 64), said("formats-needs-multiple-pad", "MXFP8", "M", None, 32, None, 48)),
        (
            "mxfp8-2d",
            (64, 48),
            said("formats-needs-multiple-pad", "MXFP8", "K", None, 32, None, 48),
        ),
        ("nvfp4", (24, 64), said("formats-needs-multiple-pad", "NVFP4", "M", None, 16, None, 24)),
        (
            "nvfp4-2d",
            (64, 24),
            said("formats-needs-multiple-pad", "NVFP4", "K", None, 16, None, 24),
        ),
    ],
)
def test_a_tensor_that_does_not_divide_into_blocks_is_refused(
    name: str, shape: tuple[int, int], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        QUANTIZERS[name](torch.ones(shape))


def test_a_copy_of_a_layout_is_the_layout() -> None:
    for layout in (formats.FP8, formats.FP8_BLOCKS[2], formats.NVFP4.of_groups):
        assert copy.deepcopy(layout) is copy.copy(layout) is layout
        assert pickle.loads(pickle.dumps(layout)) is layout
