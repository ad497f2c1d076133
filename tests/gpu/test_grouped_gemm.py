"""The kernel of grouped FP8 products on a GPU, against fp32 products of each group."""

from __future__ import annotations

import pytest
import torch

from fuser.cuda import grouped_gemm
from fuser.cuda.grouped_gemm import GroupedOperand, Sums
from fuser.formats import DType, ceil_div, round_up
from fuser.functional.grouped import PaddedGroups, padded_groups

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
CODES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUDA = torch.device("cuda", 0)
SPLITS = {
    "some": (100, 0, 300, 1, 700, 0),
    "large": (3000, 2000, 1, 2500),
    "none": (0, 0),
    "one": (128,),
}
EVERY_SPLIT = pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
EVERY_SUM = pytest.mark.parametrize("sums", Sums, ids=lambda sums: sums.name)
pytestmark = pytest.mark.skipif(
    not grouped_gemm.has_kernel(torch.device("cuda")), reason="the kernel is for Hopper"
)


def groups_of(splits: tuple[int, ...], more: int = 0) -> PaddedGroups:
    sizes = torch.tensor(splits, dtype=torch.int32, device=CUDA)
    return padded_groups(sizes, len(splits), sum(splits) + more, CUDA)


def codes(rows: int, columns: int, dtype: DType) -> torch.Tensor:
    return torch.randn(rows, columns, device=CUDA).mul_(4).to(CODES[dtype]).view(torch.uint8)


def decoded(data: torch.Tensor, dtype: DType) -> torch.Tensor:
    return data.view(CODES[dtype]).float()


def random_scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device=CUDA) + 0.5


def scaled_tiles(groups: PaddedGroups) -> torch.Tensor:
    """The scale of the group of each tile; NaN after the last group, where nothing is read."""
    group = groups.tiles[:, 0].long()
    nan = torch.full(group.shape, torch.nan, device=CUDA)
    return torch.where(group < 0, nan, random_scales(len(groups.ends))[group.clamp(min=0)])


def of_rows(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of 1x128, and one for each element."""
    scales = random_scales(ceil_div(columns, 128), round_up(rows, 4))
    return scales, scales.repeat_interleave(128, 0)[:columns, :rows].t()


def of_blocks(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of 128x128, and one for each element."""
    scales = random_scales(ceil_div(rows, 128), round_up(ceil_div(columns, 128), 4))
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    return scales, spread[:, :columns]


def check(found: torch.Tensor, exact: torch.Tensor, sums: Sums) -> None:
    error = (found.float() - exact).norm() / exact.norm().clamp(min=1e-9)
    rounding = {BF16: 2e-3, FP16: 3e-4, FP32: 1e-6}[found.dtype]
    # The tensor cores' own sums have fewer bits than fp32.
    assert error <= rounding + (2e-3 if sums is Sums.FAST else 3e-4), error


@EVERY_SPLIT
@EVERY_SUM
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("b_groups", ["rows", "depth"])
@pytest.mark.parametrize(("n", "k"), [(336, 272), (2064, 1040)])
def test_rows_of_each_group_times_its_matrix(
    n: int, k: int, b_groups: str, dtype: torch.dtype, sums: Sums, splits: tuple[int, ...]
) -> None:
    has_rows, has_blocks = b_groups == "rows", "BLOCKS" in sums.name
    groups, count = groups_of(splits, more=50), len(splits)
    is_padded = dtype is FP16
    rows, n_step, k_step = groups.padded_rows, round_up(n, 128), round_up(k, 128)
    a_format = E4M3 if has_blocks else E5M2
    a = codes(rows, k, a_format)
    b = codes(count * n_step, k, E4M3) if has_rows else codes(n, count * k_step, E4M3)
    if not has_rows:
        b.view(n, count, k_step)[:, :, k:] = 0
    left, right = decoded(a, a_format), decoded(b, E4M3)
    if has_blocks:
        a_scales, spread = of_rows(rows, k)
        left = left * spread
        b_scales, spread = (of_rows if sums is Sums.BLOCKS_1D else of_blocks)(*b.shape)
        right = right * spread
    else:
        a_scales, own = scaled_tiles(groups), random_scales(count)
        left = left * a_scales.repeat_interleave(128)[:, None]
        b_scales = own.repeat_interleave((n_step if has_rows else k_step) // 128)
        spread = own.repeat_interleave(n_step if has_rows else k_step)
        right = right * (spread[:, None] if has_rows else spread)
    out = torch.full((rows if is_padded else groups.rows, n), 7.0, dtype=dtype, device=CUDA)
    expected = torch.full(out.shape, 7.0, device=CUDA)
    grouped_gemm.multiply_rows(
        GroupedOperand(a, a_format, a_scales),
        GroupedOperand(b, E4M3, b_scales),
        groups.padded_ends,
        groups.tiles,
        sums,
        out=out,
        is_padded=is_padded,
        b_groups=b_groups,
    )
    begin = first = 0
    for g, (end, last) in enumerate(
        zip(groups.padded_ends.tolist(), groups.ends.tolist(), strict=True)
    ):
        matrix = right[g * n_step :][:n] if has_rows else right[:, g * k_step :][:, :k]
        height = end - begin if is_padded else last - first
        place = begin if is_padded else first
        expected[place : place + height] = left[begin : begin + height] @ matrix.t()
        begin, first = end, last
    check(out, expected, sums)


@EVERY_SPLIT
@EVERY_SUM
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("m", "n"), [(272, 336), (1040, 2064)])
def test_columns_of_each_group(
    m: int, n: int, dtype: torch.dtype, sums: Sums, splits: tuple[int, ...]
) -> None:
    groups, has_blocks = groups_of(splits, more=50), "BLOCKS" in sums.name
    a_format = E4M3 if has_blocks else E5M2
    a, b = codes(m, groups.padded_rows, a_format), codes(n, groups.padded_rows, E4M3)
    left, right = decoded(a, a_format), decoded(b, E4M3)
    if has_blocks:
        a_scales, of_a = of_rows(*a.shape)
        b_scales, of_b = (of_rows if sums is Sums.BLOCKS_1D else of_blocks)(*b.shape)
    else:
        a_scales, b_scales = scaled_tiles(groups), scaled_tiles(groups)
        of_a, of_b = (scales.repeat_interleave(128) for scales in (a_scales, b_scales))
    left, right = left * of_a, right * of_b
    out = torch.full((len(splits), m, n), 7.0, dtype=dtype, device=CUDA)
    of_left, of_right = GroupedOperand(a, a_format, a_scales), GroupedOperand(b, E4M3, b_scales)
    grouped_gemm.multiply_depth(of_left, of_right, groups.padded_ends, sums, out=out)
    begin = 0
    for product, end in zip(out, groups.padded_ends.tolist(), strict=True):
        check(product, left[:, begin:end] @ right[:, begin:end].t(), sums)
        begin = end


@EVERY_SUM
def test_the_bits_of_a_row_do_not_depend_on_other_rows(sums: Sums) -> None:
    n, k, has_blocks = 512, 2048, "BLOCKS" in sums.name
    b = codes(2 * n, k, E4M3)
    scales = of_rows if sums is Sums.BLOCKS_1D else of_blocks
    b_scales = scales(2 * n, k)[0] if has_blocks else random_scales(2).repeat_interleave(n // 128)
    row = codes(1, k, E4M3)
    row_scales = random_scales(k // 128)
    found = []
    for splits, place in (((0, 1), 0), ((500, 300), 700), ((0, 4000), 3999)):
        groups = groups_of(splits)
        a = codes(groups.padded_rows, k, E4M3)
        padded = place if splits[0] == 0 else place - splits[0] + 512
        a[padded] = row
        if has_blocks:
            a_scales = random_scales(k // 128, len(a))
            a_scales[:, padded] = row_scales
        else:
            a_scales = torch.full((len(a) // 128,), 0.75, device=CUDA)
        out = torch.zeros(sum(splits), n, dtype=BF16, device=CUDA)
        grouped_gemm.multiply_rows(
            GroupedOperand(a, E4M3, a_scales),
            GroupedOperand(b, E4M3, b_scales),
            groups.padded_ends,
            groups.tiles,
            sums,
            out=out,
            is_padded=False,
        )
        found.append(out[place])
    assert found[0].any()
    assert all(torch.equal(each, found[0]) for each in found)
