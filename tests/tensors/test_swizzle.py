"""Swizzled scales: the formula, its inverse, tiles that are refused."""

from __future__ import annotations

from collections.abc import Callable

import number_formats as ref
import numpy as np
import pytest
import torch
from format_cases import as_bytes, identical, same
from said import said

from fuser.errors import InputError
from fuser.reference import mxfp8


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (384, 4), (128, 20), (0, 4)], ids=str)
def test_swizzle_follows_its_formula_and_unswizzle_undoes_it(shape: tuple[int, int]) -> None:
    scale = torch.from_numpy(np.random.default_rng(16).integers(0, 256, shape).astype(np.uint8))
    swizzled = mxfp8.swizzle(scale)
    assert same(swizzled, ref.swizzle(scale.numpy()))
    assert same(mxfp8.unswizzle(swizzled), scale.numpy())
    assert same(mxfp8.swizzle(mxfp8.unswizzle(scale)), scale.numpy())


def test_swizzle_of_a_view_is_that_of_its_copy() -> None:
    scale = torch.arange(2**11).to(torch.uint8).view(4, 512).T
    assert identical(mxfp8.swizzle(scale), mxfp8.swizzle(scale.contiguous()))
    assert identical(mxfp8.unswizzle(scale), mxfp8.unswizzle(scale.contiguous()))


def test_the_first_bytes_of_a_swizzled_tile_are_rows_0_32_64_and_96() -> None:
    scale = torch.zeros(128, 8, dtype=torch.uint8)
    for n, r in enumerate((0, 32, 64, 96, 1)):
        scale[r, :4] = torch.arange(1, 5) + 16 * n
    scale[0, 4] = 0xFF
    flat = mxfp8.swizzle(scale).flatten()
    head = as_bytes("01020304 11121314 21222324 31323334 41424344")
    assert same(flat[:20], head)
    assert flat[512] == 0xFF  # the tile beside it


@pytest.mark.parametrize("shape", [(64, 4), (128, 6)], ids=str)
@pytest.mark.parametrize("function", [mxfp8.swizzle, mxfp8.unswizzle])
def test_scales_that_are_no_whole_tiles_are_refused_with_their_shape(
    function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int]
) -> None:
    with pytest.raises(InputError, match=said("mxfp8-scales-swizzled-tiles", None, None, *shape)):
        function(torch.zeros(shape, dtype=torch.uint8))
