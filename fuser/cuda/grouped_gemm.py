"""Launcher of products of groups of FP8 rows on Hopper: a kernel of TMA copies and wgmma.

Operands are FP8 bytes whose groups begin at multiples of 128 rows, or of 128 columns.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import torch

from fuser.cuda import launch as launches
from fuser.cuda.arguments import ELEMENTS, Struct, int32
from fuser.cuda.checks import check_buffer
from fuser.cuda.launch import Kernel, Launch
from fuser.errors import InputError
from fuser.formats import FP8_BLOCK, GROUP_TILE, DType, ceil_div

# As in fuser/gemm/sm90_grouped.cuh.
ROWS, COLUMNS, DEPTH, STAGES, THREADS = 128, 256, 128, 4, 384
_SHARED_BYTES = 1024 + STAGES * ((ROWS + COLUMNS) * (DEPTH + 4) + 2 * 8)
# TMA reads rows in units of 16 bytes.
ALIGNMENT = 16
_FORMATS = {DType.kFloat8E4M3: "kE4m3", DType.kFloat8E5M2: "kE5m2"}


class Sums(enum.Enum):
    """How sums are formed, by the name in the kernel."""

    FAST = "kFast"
    """By the tensor cores alone; each group has one scale."""
    SPLIT = "kSplit"
    """The sums of 128 products are added to others in fp32; each group has one scale."""
    BLOCKS_1D = "kBlocks1d"
    """As SPLIT, with scales of 1x128 elements."""
    BLOCKS_2D = "kBlocks2d"
    """As SPLIT, with scales of 1x128 elements of ``a`` and of 128x128 of ``b``."""


class Operand(NamedTuple):
    """FP8 bytes ``[rows, depth]``, contiguous uint8, their format and fp32 scales.

    Scales of groups are ``[rows / 128]``, or ``[depth / 128]`` if the groups divide the depth;
    scales of blocks have the shapes of ``formats.fp8_block_scale_shape`` for a rowwise copy.
    """

    data: torch.Tensor
    dtype: DType
    scales: torch.Tensor


def serves(sizes: tuple[int, ...], out_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel multiplies operands here whose unpadded sizes are these."""
    if out_dtype not in ELEMENTS or device.type != launches.backend.device_type:
        return False
    return not any(size % ALIGNMENT for size in sizes) and launches.backend.has_wgmma(device)


def multiply_rows(
    a: Operand,
    b: Operand,
    padded_ends: torch.Tensor,
    tiles: torch.Tensor,
    sums: Sums,
    *,
    out: torch.Tensor,
    is_padded: bool,
    b_groups: str = "rows",
) -> torch.Tensor:
    """``out_g = a_g @ b_g.T`` for the rows of each group.

    Parameters
    ----------
    a
        ``[C, K]``: the rows of padded groups.
    b
        The matrices of the groups, one after the other: ``[G N', K]`` with N' of at least N, or
        ``[N, G K']`` with K' of at least K if ``b_groups`` is ``"depth"``. Rows and columns beyond
        N and K are zeros.
    padded_ends, tiles
        Of the groups, as ``fuser.reference.grouped.group_tiles`` describes them.
    sums
        How sums are formed.
    out
        Written; contiguous ``[C, N]`` if ``is_padded``, else the rows of groups without padding,
        ``[T, N]``. Rows after the last group are left as they are.

    Raises
    ------
    InputError
        If a tensor does not match its description.
    """
    groups, columns, depth = len(padded_ends), out.shape[1], a.data.shape[1]
    if 0 in (*a.data.shape, columns):
        return out
    has_rows = b_groups == "rows"
    size = b.data.shape[0 if has_rows else 1]
    if size % groups or (a.data.shape[0] != GROUP_TILE * len(tiles)):
        raise InputError(
            f"multiply_rows got {tuple(a.data.shape)} rows and {tuple(b.data.shape)} weights of "
            f"{groups} groups with {len(tiles)} tiles."
        )
    step = size // groups
    scale_step = step // FP8_BLOCK if sums in (Sums.FAST, Sums.SPLIT) else b.scales.shape[-1]
    _launch(
        "kRows",
        sums,
        a,
        b,
        out,
        (padded_ends, tiles, int32(groups), int32(0), int32(columns), int32(depth)),
        (step if has_rows else 0, 0 if has_rows else step),
        scale_step,
        is_padded,
        ceil_div(columns, COLUMNS) * len(tiles),
    )
    return out


def multiply_depth(
    a: Operand, b: Operand, padded_ends: torch.Tensor, sums: Sums, *, out: torch.Tensor
) -> torch.Tensor:
    """``out[g] = a[:, columns of g] @ b[:, columns of g].T``; zeros for a group without columns.

    Parameters
    ----------
    a, b
        ``[M, C]`` and ``[N, C]``: transposed copies of padded groups.
    padded_ends
        Where the columns of each group end, int32 ``[G]``.
    sums
        How sums are formed.
    out
        Written; contiguous ``[G, M, N]``.

    Raises
    ------
    InputError
        If a tensor does not match its description.
    """
    groups, rows, columns = out.shape
    if (rows, columns) != (a.data.shape[0], b.data.shape[0]) or groups != len(padded_ends):
        raise InputError(
            f"multiply_depth got {tuple(a.data.shape)} and {tuple(b.data.shape)} for "
            f"{len(padded_ends)} groups of results {tuple(out.shape)}."
        )
    if 0 in (*a.data.shape, rows, columns):
        return out.zero_()
    _launch(
        "kDepth",
        sums,
        a,
        b,
        out,
        (padded_ends, None, int32(groups), int32(rows), int32(columns), int32(0)),
        (0, 0),
        b.scales.shape[-1],
        False,
        ceil_div(rows, ROWS) * ceil_div(columns, COLUMNS) * groups,
    )
    return out


def _launch(
    grouping: str,
    sums: Sums,
    a: Operand,
    b: Operand,
    out: torch.Tensor,
    places: tuple[object, ...],
    b_steps: tuple[int, int],
    b_scale_stride: int,
    is_padded: bool,
    tiles: int,
) -> None:
    backend = launches.backend
    for name, operand in (("a", a), ("b", b)):
        data = operand.data
        check_buffer("grouped_gemm", f"{name}.data", data, torch.uint8, tuple(data.shape))
    check_buffer("grouped_gemm", "out", out, out.dtype, tuple(out.shape))
    kernel = _kernel(grouping, sums, a.dtype, b.dtype, out.dtype)
    gemm = Struct(
        (
            *(out, a.scales, b.scales, *places, *map(int32, b_steps)),
            *(int32(a.scales.shape[-1]), int32(b_scale_stride), int32(len(b.scales))),
            int32(is_padded),
        )
    )
    blocks = min(backend.multiprocessors(out.device), tiles)
    kernel(
        Launch((blocks,), (THREADS,), _SHARED_BYTES),
        Struct(backend.tensor_map(a.data, ROWS)),
        Struct(backend.tensor_map(b.data, COLUMNS)),
        gemm,
    )


@functools.cache
def _kernel(grouping: str, sums: Sums, a: DType, b: DType, out: torch.dtype) -> Kernel:
    arguments = (
        f"fuser::Grouping::{grouping}",
        f"fuser::Sums::{sums.value}",
        f"fuser::Fp8::{_FORMATS[a]}",
        f"fuser::Fp8::{_FORMATS[b]}",
        ELEMENTS[out],
    )
    return Kernel(
        "grouped_gemm", f"fuser_grouped_gemm<{', '.join(arguments)}>", has_tensor_maps=True
    )


def instantiations() -> list[Kernel]:
    """The kernels of the recipes."""
    e4m3, e5m2 = DType.kFloat8E4M3, DType.kFloat8E5M2
    by_sums = {
        Sums.FAST: ((e4m3, e4m3), (e5m2, e4m3)),
        Sums.SPLIT: ((e4m3, e4m3), (e5m2, e4m3)),
        Sums.BLOCKS_1D: ((e4m3, e4m3),),
        Sums.BLOCKS_2D: ((e4m3, e4m3),),
    }
    return [
        _kernel(grouping, sums, a, b, dtype)
        for sums, formats in by_sums.items()
        for a, b in formats
        for grouping in ("kRows", "kDepth")
        for dtype in (torch.bfloat16, torch.float32)
        if grouping == "kRows" or sums is not Sums.BLOCKS_2D
    ]
