"""Groups of rows: each launcher against its reference, wherever kernels run."""

from __future__ import annotations

import pytest
import torch
from quantize_cases import Place, assert_same

from fuser.cuda import grouped
from fuser.reference import grouped as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 50
SPLITS = {
    "even": (25, 25),
    "empty at both ends": (0, 20, 0, 3, 0),
    "one": (7,),
    "none": (0, 0, 0),
    "too many": (30, 0, 40, 5),
    "negative": (10, -4, 6),
    "as many as possible": (2**31 - 1, 2**31 - 1, 2**31 - 1),
    "many groups": tuple(i % 3 for i in range(70)),
}
EVERY_SPLIT = pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
# Whole vectors of 16 bytes, no whole vectors, more than a block takes at once, and none.
EVERY_WIDTH = pytest.mark.parametrize("columns", [64, 37, 2056, 4100, 0])


def check_ends(place: Place, splits: tuple[int, ...], dtype: torch.dtype) -> None:
    sizes = torch.tensor(splits, dtype=dtype)
    out = place.empty((len(splits),), torch.int32)
    with place.launching(out):
        grouped.group_ends(sizes.to(place.device), ROWS, out=out)
    total, expected = 0, []
    for size in splits:
        total = min(ROWS, total + max(size, 0))
        expected.append(total)
    assert out.tolist() == expected == reference.group_ends(sizes, ROWS).tolist()


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def written(place: Place, values: torch.Tensor, shift: int) -> torch.Tensor:
    """A copy there, ``shift`` elements after an aligned address."""
    return place.empty(values.shape, values.dtype, shift).copy_(values)


def check_tail(
    place: Place, splits: tuple[int, ...], columns: int, dtype: torch.dtype, shift: int = 0
) -> None:
    values = matrix(ROWS, columns, dtype, 1)
    values[-1:] = float("nan")
    out = written(place, values, shift)
    ends = reference.group_ends(torch.tensor(splits), ROWS)
    with place.launching():
        grouped.zero_tail(ends.to(place.device), out=out)
    assert_same(out, reference.zero_tail(ends, values.clone()), "rows")


def check_bias(
    place: Place,
    splits: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
    is_scaled: bool,
    shift: int = 0,
) -> None:
    """Rows after the last group, and their scales, are NaN."""
    ends = reference.group_ends(torch.tensor(splits), ROWS)
    values, scales = matrix(ROWS, columns, dtype, 1), matrix(1, ROWS, dtype, 2)[0]
    bias = matrix(len(splits), columns, dtype, 3)
    after = reference.is_after(ends, ROWS)
    values[after] = scales[after] = float("nan")
    factors = scales if is_scaled else None
    out = written(place, values, shift)
    given = None if factors is None else factors.to(place.device)
    with place.launching():
        grouped.add_bias(ends.to(place.device), written(place, bias, 2 * shift), given, out=out)
    assert_same(out, reference.add_bias(ends, bias, factors, values.clone()), "sum")
