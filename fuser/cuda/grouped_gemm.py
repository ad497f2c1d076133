"""Launcher of products of groups of FP8 rows on Hopper: a kernel of TMA copies and wgmma.

Operands are FP8 bytes whose groups begin at multiples of 128 rows, or of 128 columns. InputError if
a tensor does not match its description.
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
_FORMATS = {DType.kFloat8E4M3.name: "kE4m3", DType.kFloat8E5M2.name: "kE5m2"}


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


class GroupedOperand(NamedTuple):
    """FP8 bytes ``[rows, depth]``, contiguous uint8, their format and fp32 scales.

    Scales of groups are ``[rows / 128]``, or ``[depth / 128]`` if the groups divide the depth;
    scales of blocks have the shapes of ``formats.fp8_block_scale_shape`` for a rowwise copy.
    """

    data: torch.Tensor
    dtype: DType
    scales: torch.Tensor


def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on a device."""
    backend = launches.backend
    return launches.kernel_refusal(device.type) is None and backend.has_wgmma(device)


def serves(sizes: tuple[int, ...], out_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel multiplies here, if these are the sizes of a weight."""
    return is_aligned(sizes) and out_dtype in ELEMENTS and has_kernel(device)


def is_aligned(sizes: tuple[int, ...]) -> bool:
    """Whether rows of these sizes are whole units of the copy engine."""
    return not any(size % ALIGNMENT for size in sizes)


def multiply_rows(
    a: GroupedOperand,
    b: GroupedOperand,
    padded_ends: torch.Tensor,
    tiles: torch.Tensor,
    sums: Sums,
    *,
    out: torch.Tensor,
    is_padded: bool,
    b_groups: str = "rows",
) -> torch.Tensor:
    """``out_g = a_g @ b_g.T`` for the rows of each group.

    ``a`` is ``[C, K]``, the rows of padded groups. ``b`` is the matrices of the groups, one after
    the other: ``[G N', K]`` with N' of at least N, or ``[N, G K']`` with K' of at least K if
    ``b_groups`` is ``"depth"``; rows and columns beyond N and K are zeros. ``padded_ends`` and
    ``tiles`` are as ``fuser.reference.grouped.group_tiles`` describes them. ``out`` is contiguous
    ``[C, N]`` if ``is_padded``, else the rows of groups without padding, ``[T, N]``; rows after the
    last group are left as they are.
    """
    has_rows = b_groups == "rows"
    size = b.data.shape[0 if has_rows else 1]
    if size % len(padded_ends) or a.data.shape[0] != GROUP_TILE * tiles.shape[0]:
        raise InputError(
            f"multiply_rows got {tuple(a.data.shape)} rows and {tuple(b.data.shape)} weights of "
            f"{len(padded_ends)} groups with {tiles.shape[0]} tiles."
        )
    return _multiply(a, b, padded_ends, tiles, sums, out, is_padded, not has_rows)


def multiply_depth(
    a: GroupedOperand,
    b: GroupedOperand,
    padded_ends: torch.Tensor,
    sums: Sums,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """``out[g] = a[:, columns of g] @ b[:, columns of g].T``; zeros for a group without columns.

    ``a`` and ``b`` are ``[M, C]`` and ``[N, C]``, transposed copies of padded groups, whose columns
    end at ``padded_ends``, int32 ``[G]``. ``out`` is contiguous ``[G, M, N]``.
    """
    groups, rows, columns = out.shape
    if (rows, columns) != (a.data.shape[0], b.data.shape[0]) or groups != len(padded_ends):
        raise InputError(
            f"multiply_depth got {tuple(a.data.shape)} and {tuple(b.data.shape)} for "
            f"{len(padded_ends)} groups of results {tuple(out.shape)}."
        )
    return _multiply(a, b, padded_ends, None, sums, out, False, False)


def _multiply(
    a: GroupedOperand,
    b: GroupedOperand,
    padded_ends: torch.Tensor,
    tiles: torch.Tensor | None,
    sums: Sums,
    out: torch.Tensor,
    is_padded: bool,
    divides_depth_of_b: bool,
) -> torch.Tensor:
    for name, operand in (("a", a), ("b", b)):
        data = operand.data
        check_buffer("grouped_gemm", f"{name}.data", data, torch.uint8, tuple(data.shape), 16)
    check_buffer("grouped_gemm", "out", out, out.dtype, tuple(out.shape), 16)
    products: torch.Tensor = torch.ops.fuser.multiply_groups(
        out,
        *(a.data, a.scales, b.data, b.scales, padded_ends, tiles),
        *(sums.value, a.dtype.name, b.dtype.name, is_padded, divides_depth_of_b),
    )
    return products


# An operation of torch, so that recorded passes and torch's tools observe it.
_operations = torch.library.Library("fuser", "FRAGMENT")  # type: ignore[no-untyped-call]
_operations.define(  # type: ignore[no-untyped-call]
    "multiply_groups(Tensor(a!) out, Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, "
    "Tensor padded_ends, Tensor? tiles, str sums, str a_format, str b_format, bool is_padded, "
    "bool divides_depth_of_b) -> Tensor(a!)"
)


def _launch(
    out: torch.Tensor,
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    padded_ends: torch.Tensor,
    tiles: torch.Tensor | None,
    sums: str,
    a_format: str,
    b_format: str,
    is_padded: bool,
    divides_depth_of_b: bool,
) -> torch.Tensor:
    """The operation; with tiles the groups divide the rows of ``a``, else the depth of both."""
    if 0 in (*out.shape, *a.shape, *b.shape):
        return out if tiles is not None else out.zero_()
    groups, rows, columns, b_scale_stride = len(padded_ends), 0, out.shape[-1], b_scales.shape[-1]
    b_steps = (0, 0)
    if tiles is None:
        rows = out.shape[1]
        count = ceil_div(rows, ROWS) * groups
    else:
        step = b.shape[1 if divides_depth_of_b else 0] // groups
        b_steps = (0, step) if divides_depth_of_b else (step, 0)
        count = tiles.shape[0]
        if sums in (Sums.FAST.value, Sums.SPLIT.value):
            b_scale_stride = step // FP8_BLOCK
    backend = launches.backend
    sizes = (groups, rows, columns, a.shape[1], *b_steps)
    strides = (a_scales.shape[-1], b_scale_stride, len(b_scales), is_padded)
    gemm = Struct((out, a_scales, b_scales, padded_ends, tiles, *map(int32, (*sizes, *strides))))
    blocks = min(backend.multiprocessors(out.device), count * ceil_div(columns, COLUMNS))
    maps = (Struct(backend.tensor_map(t, n)) for t, n in ((a, ROWS), (b, COLUMNS)))
    kernel = _kernel("kDepth" if tiles is None else "kRows", sums, a_format, b_format, out.dtype)
    kernel(Launch((blocks,), (THREADS,), _SHARED_BYTES), *maps, gemm)
    return out


_operations.impl("multiply_groups", _launch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_operations.impl("multiply_groups", lambda out, *_: out, "Meta")  # type: ignore[no-untyped-call]


@functools.cache
def _kernel(grouping: str, sums: str, a: str, b: str, out: torch.dtype) -> Kernel:
    formats = (f"fuser::Fp8::{_FORMATS[name]}" for name in (a, b))
    of = f"fuser::Grouping::{grouping}, fuser::Sums::{sums}, {', '.join(formats)}, {ELEMENTS[out]}"
    return Kernel("grouped_gemm", f"fuser_grouped_gemm<{of}>", has_tensor_maps=True)


def instantiations() -> list[Kernel]:
    """The kernels of the recipes."""
    e4m3, e5m2 = DType.kFloat8E4M3.name, DType.kFloat8E5M2.name
    return [
        _kernel(grouping, sums.value, a, e4m3, dtype)
        for sums in Sums
        for a in ((e4m3, e5m2) if sums in (Sums.FAST, Sums.SPLIT) else (e4m3,))
        for grouping in ("kRows", "kDepth")
        for dtype in (torch.bfloat16, torch.float16)
    ]
