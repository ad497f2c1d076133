"""Launchers of RMSNorm, LayerNorm and L2 normalization over rows.

The forward can write only the statistics, a few numbers a row, and not y. :func:`norm_producer`
then computes y, with the same bits, inside the kernel that quantizes it. If the scale must be known
first, the pass without y also measures its amax.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fuser.cuda.arguments import ELEMENTS, Producer, Struct
from fuser.cuda.checks import boolean
from fuser.cuda.launch import Kernel, Launch, multiprocessors
from fuser.cuda.norm_common import (
    DTYPE_PAIRS,
    MAX_SIZE,
    are_aligned,
    check_tensor,
    check_y_dtype,
    checked_norm,
    checked_shape,
    fill_tiles,
    lacks,
    norm_types,
    parameter_type,
    partners_of,
    power_of_two,
    row_strides,
    sizes_of,
    tile_producer,
    vectors_of,
    whole_warps,
)
from fuser.errors import InputError

# A thread has four loads of 16 bytes in flight, with up to 64 registers. Rows of one warp or less
# share a block of 128 threads; longer rows have a block each, and many blocks run on a
# multiprocessor.
FORWARD_VECTORS = 4
FORWARD_THREADS = 128
# The most threads a row, by bytes of an element: with registers for 16384 columns.
FORWARD_ROW_THREADS = {2: 512, 4: 1024}
# A block that only measures y reads gamma once, for several rows.
MEASURING_BLOCKS_PER_MULTIPROCESSOR = 16

# -- launchers ----------------------------------------------------------------


class Forward(NamedTuple):
    """The tensors of a forward, ``struct Forward`` of the kernels; None for those not there.

    An RMSNorm has ``gamma``, a LayerNorm also ``beta`` and a mean, an L2 normalization no
    parameters.

    Read: ``x [rows, columns]``, fp32, fp16 or bf16, whose rows may be at any distance; ``extra``
    like it, or, if x is fp32, in the dtype of y, as under autocast; the parameters, ``[columns]``,
    contiguous, both in one dtype, fp32, fp16 or bf16.

    Written, contiguous: ``y``, like ``x``, in a dtype that kernels support for x
    (:func:`~fuser.cuda.norm_common.takes`), None if :func:`norm_producer` computes it; ``z``, like
    ``x``, only together with ``extra``; ``mean`` and ``rstd``, fp32, one number a row. ``amax``,
    one fp32, not negative, is raised to ``max |y|``, also if y is None; NaN counts as larger than
    infinity.
    """

    x: torch.Tensor
    extra: torch.Tensor | None = None
    gamma: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    y: torch.Tensor | None = None
    z: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None
    amax: torch.Tensor | None = None


def norm_forward(
    tensors: Forward,
    *,
    eps: float,
    zero_centered_gamma: bool = False,
    y_dtype: torch.dtype | None = None,
) -> None:
    """The norm of ``z = x + extra``, for each row.

    RMSNorm: ``rstd = rsqrt(mean(z^2) + eps); y = z * rstd * gamma``. LayerNorm: ``rstd = rsqrt(var
    + eps); y = (z - mean) * rstd * gamma + beta``; the kernel computes the mean first, then the
    variance from the differences to it. L2 normalization:
    ``rstd = rsqrt(sum(z^2) + eps); y = z * rstd``. The gain is ``1 + gamma`` if it is
    zero-centered. ``y_dtype`` is that of a y that is None.

    Computes in fp32 from z, rounded to its dtype. Reads x and extra once and writes z and y once:
    for elements of 16 bits that is 2 bytes read and 2 written, with ``extra`` 4 and 4, and without
    y 2 less; a sum of fp32 and 16 bits reads 6 and writes 6. The kernel reads rows of more than
    16384 elements, and rows that are not aligned to 16 bytes, again for y or its amax, and a
    LayerNorm also for its variance.
    """
    x, extra, gamma, beta, y, z, mean, rstd, amax = tensors
    function = "l2norm" if gamma is None else "rmsnorm" if beta is None else "layernorm"
    rows, columns = checked_shape(function, x)
    if y_dtype is None:
        check_tensor(function, "y", y, partners_of(x.dtype), x.shape)
        y_dtype = x.dtype if y is None else y.dtype
    else:
        check_y_dtype(function, x.dtype, y_dtype)
        check_tensor(function, "y", y, (y_dtype,), x.shape)
    addends = tuple(dict.fromkeys((x.dtype, y_dtype)))
    check_tensor(function, "extra", extra, addends, x.shape, is_spaced=True)
    check_tensor(function, "z", z, (x.dtype,), x.shape)
    norm = checked_norm(function, x, (("gamma", gamma), ("beta", beta)), mean, rstd, amax)
    if z is not None and extra is None:
        raise InputError(f"{function} writes z where it adds an extra; it got none.")
    if all(output is None for output in (y, z, mean, rstd, amax)):
        raise InputError(f"{function} got nothing to write: no y, z, mean, rstd or amax.")
    if rows == 0:
        return

    strides = row_strides(x, extra, None)
    is_aligned = are_aligned(columns, x, strides, extra, gamma, beta, y, z)
    most_blocks = MAX_SIZE
    if y is None and amax is not None:
        most_blocks = MEASURING_BLOCKS_PER_MULTIPROCESSOR * multiprocessors(x.device)
    extra_dtype = x.dtype if extra is None else extra.dtype
    kernel, launch = _forward_choice(
        *(norm, x.dtype, y_dtype, rows, columns, is_aligned, y is not None, extra_dtype),
        most_blocks,
    )
    flags = {"is_aligned": is_aligned, "zero_centered_gamma": zero_centered_gamma}
    kernel(launch, Struct(tensors), sizes_of(x, gamma, strides, launch, **flags, eps=eps))


def norm_producer(
    tensors: Forward, y_dtype: torch.dtype, *, zero_centered_gamma: bool = False
) -> Producer:
    """The producer of y in ``y_dtype``, with the bits that the forward writes.

    Reads x once: 2 bytes an element of 16 bits. Of ``tensors`` it reads x, which is the z of a
    forward that added, the parameters, and the statistics that the forward wrote.
    """
    name = "norm_producer"
    x, _, gamma, beta, _, _, mean, rstd, _ = tensors
    _, columns = checked_shape(name, x)
    check_y_dtype(name, x.dtype, y_dtype)
    norm = checked_norm(name, x, (("gamma", gamma), ("beta", beta)), mean, rstd)
    if mean is None and beta is not None:
        raise lacks(name, "beta", "mean")
    aligned = fill_tiles(columns, (x.stride(0),), x, gamma, beta)
    return tile_producer(
        "NormProducer",
        (norm_types(norm, x.dtype, y_dtype), parameter_type(gamma)),
        (x, gamma, beta, mean, rstd),
        (x.stride(0),),
        *(x, y_dtype),
        zero_centered_gamma=zero_centered_gamma,
        aligned=aligned,
    )


# -- kernels ------------------------------------------------------------------


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel of these launchers."""
    pairs = itertools.product(("RMSNorm", "LayerNorm"), DTYPE_PAIRS)
    flags = list(itertools.product((False, True), repeat=2))
    return tuple(
        _forward_kernel(n, x, y, *flag, extra)
        for n, (x, y) in pairs
        for flag in flags
        for extra in dict.fromkeys((x, y))
    )


@functools.cache
def _forward_kernel(
    norm: str, x: torch.dtype, y: torch.dtype, in_registers: bool, writes: bool, extra: torch.dtype
) -> Kernel:
    flags = f"{boolean(in_registers)}, {boolean(writes)}"
    added = "" if extra is x else f", {ELEMENTS[extra]}"
    return Kernel("normalization", f"fuser_norm<{norm_types(norm, x, y)}, {flags}{added}>")


# -- launches -----------------------------------------------------------------


@dataclass(frozen=True)
class ForwardPlan:
    """The layout of a forward kernel: ``lanes`` threads a row and ``rows`` rows a block.

    A row fits the registers if each thread has at most ``FORWARD_VECTORS`` vectors of 16 bytes.
    Otherwise the kernel reads it in chunks of one vector a thread.
    """

    lanes: int
    rows: int
    fits_registers: bool


@functools.cache
def forward_plan(columns: int, element_bytes: int) -> ForwardPlan:
    """The layout for rows of ``columns``. It determines the order of sums."""
    vectors = vectors_of(columns, element_bytes)
    share = -(-vectors // FORWARD_VECTORS)
    if share <= 32:
        # At least 64 adjacent bytes of a row, for whole sectors of memory.
        lanes = max(power_of_two(share), min(4, power_of_two(vectors)))
    else:
        lanes = min(whole_warps(share), FORWARD_ROW_THREADS[element_bytes])
    return ForwardPlan(
        lanes=lanes,
        rows=max(1, FORWARD_THREADS // lanes) if lanes <= 32 else 1,
        fits_registers=vectors <= lanes * FORWARD_VECTORS,
    )


@functools.lru_cache(maxsize=1024)
def _forward_choice(
    norm: str,
    x: torch.dtype,
    y: torch.dtype,
    rows: int,
    columns: int,
    is_aligned: bool,
    writes: bool,
    extra: torch.dtype,
    most_blocks: int,
) -> tuple[Kernel, Launch]:
    plan = forward_plan(columns, x.itemsize)
    kernel = _forward_kernel(norm, x, y, is_aligned and plan.fits_registers, writes, extra)
    blocks = min(-(-rows // plan.rows), most_blocks)
    return kernel, Launch((blocks,), (plan.lanes, plan.rows))
