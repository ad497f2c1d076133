"""Launchers of the gradients of RMSNorm, LayerNorm and L2 normalization over rows.

The backward can write only the means, a few numbers a row, and not dx.
:func:`norm_backward_producer` then computes dx, with the same bits, inside the kernel that
quantizes it. If the scale must be known first, the pass without dx also measures its amax.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fuser.cuda.arguments import ELEMENTS, Producer, Struct, int32
from fuser.cuda.checks import boolean
from fuser.cuda.launch import Kernel, Launch, multiprocessors, shared_bytes
from fuser.cuda.norm_common import (
    DTYPE_PAIRS,
    VECTOR_BYTES,
    are_aligned,
    check_parameters,
    check_statistics,
    check_tensor,
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
from fuser.errors import InputError, KernelUnavailable

# Persistent blocks, one or two on a multiprocessor, so that there are few partial sums. A thread
# prefetches up to four rows into shared memory. 512 threads have 128 registers each, 640 have 96:
# two vectors a thread need no more, but a LayerNorm in 16 bits then takes up to 11% longer.
BACKWARD_THREADS = 256
FEW_THREADS, MANY_THREADS = 512, 640
BACKWARD_VECTORS = (2, 4)
MAX_PREFETCH_DEPTH = 4
# Shared memory of a block that is not for prefetched rows: of the kernel, and of the driver.
STATIC_SHARED_BYTES = 1024
RESERVED_SHARED_BYTES = 1024

# -- launchers ----------------------------------------------------------------


class Backward(NamedTuple):
    """The tensors of a backward, ``struct Backward`` of the kernels; None for those not there.

    An RMSNorm has ``gamma``, a LayerNorm also ``mean``, an L2 normalization neither.

    Read: ``dy [rows, columns]``, in the dtype of y; ``x``, the forward's, or its z; ``d_extra``,
    like ``x``; rows of these may be at any distance. The parameters and statistics of the forward,
    ``beta`` only with ``y``.

    Written, contiguous: ``dx``, like ``x``, None if :func:`norm_backward_producer` computes it;
    ``rounded_dx``, only together with ``dx``: like it, rounded to the dtype of ``dy``, which has 16
    bits where x is fp32, 2 bytes an element; ``y``, only together with ``dx`` and if
    :func:`writes_output`: the output of the forward with the bits that it writes, in the dtype of
    ``dy``, whose memory it may have, 2 bytes an element of 16 bits. It and ``dx`` are at multiples
    of 16 bytes. ``means``, fp32 ``[rows, 1]``: ``mean(d_hat * x_hat)``; of a LayerNorm
    ``[rows, 2]``, with ``mean(d_hat)``; of an L2 normalization the sum.

    Both: ``workspace``, fp32 of :func:`workspace_shape`, None without gradients of parameters;
    ``amax``, one fp32, not negative, raised to ``max |dx|``, also if dx is None; NaN counts as
    larger than infinity.
    """

    dy: torch.Tensor
    x: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor
    d_extra: torch.Tensor | None = None
    dx: torch.Tensor | None = None
    rounded_dx: torch.Tensor | None = None
    y: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    means: torch.Tensor | None = None
    amax: torch.Tensor | None = None


def norm_backward(
    tensors: Backward,
    *,
    dgamma: torch.Tensor | None = None,
    dbeta: torch.Tensor | None = None,
    zero_centered_gamma: bool = False,
) -> None:
    """The gradients of :func:`~fuser.cuda.normalization.norm_forward`.

    With ``x_hat = (x - mean) * rstd`` and ``d_hat = dy * gamma`` the gradient of a LayerNorm is
    ``dx = (d_hat - mean(d_hat) - x_hat * mean(d_hat * x_hat)) * rstd + d_extra``. Of an RMSNorm the
    means of x and of d_hat are 0. An L2 normalization has no gamma either, and the sum of
    ``d_hat * x_hat``. Over the rows, ``dgamma = sum(dy * x_hat)`` and ``dbeta = sum(dy)``:
    ``[columns]``, contiguous, fp32, fp16 or bf16, both in one dtype; None is not written.

    The kernel adds ``d_extra`` in fp32 and rounds the sum to the dtype of dx: one rounding, where a
    separate addition would round twice. It sums dgamma and dbeta in fp32, in an order that depends
    only on the shape and the number of multiprocessors.

    Reads dy, x and d_extra once and writes dx once: 6 bytes an element of 16 bits, with ``d_extra``
    8. It also writes and reads the workspace. Without dx it moves 2 bytes less, and with neither dx
    nor amax it does not read d_extra, another 2 bytes less. The kernel reads rows twice if they
    have more than 16384 elements of 16 bits or 8192 of 32, or are not aligned to 16 bytes.
    """
    dy, x, gamma, beta, mean, _, d_extra, dx, rounded_dx, y, workspace, means, amax = tensors
    norm = "RMSNorm" if mean is None else "LayerNorm"
    function = "l2norm_backward" if gamma is None else f"{norm.lower()}_backward"
    grads = (dgamma,) if mean is None else (dgamma, dbeta)
    if dbeta is not None and mean is None:
        raise lacks(function, "dbeta", "mean")
    rows, columns = _checked(function, tensors)
    check_parameters(function, columns, tuple(zip(("dgamma", "dbeta"), grads, strict=False)))
    device = (shared_bytes(x.device), multiprocessors(x.device))
    blocks = _backward_blocks(rows, columns, x.element_size(), *device)
    param_grads = [grad for grad in grads if grad is not None]
    partials = workspace if param_grads else None
    if param_grads:
        if workspace is None:
            raise InputError(f"{function} sums parameters' gradients in a workspace; it got none.")
        shape = (len(grads), blocks, columns)
        check_tensor(function, "workspace", workspace, (torch.float32,), shape)

    if dx is None and amax is None:
        d_extra = None
    if rows > 0 and (param_grads or any(output is not None for output in (dx, means, amax))):
        strides = row_strides(x, d_extra, dy)
        written = (dx, rounded_dx, y)
        is_aligned = are_aligned(columns, x, strides, dy, gamma, beta, d_extra, *written)
        dtypes, sizes = (x.dtype, dy.dtype), (rows, columns)
        kernel, launch, depth = _backward_choice(
            norm, *dtypes, *sizes, is_aligned, d_extra is not None, y is not None, *device
        )
        tensors = tensors._replace(d_extra=d_extra, workspace=partials)
        flags = {"is_aligned": is_aligned, "zero_centered_gamma": zero_centered_gamma}
        sizes_of_rows = sizes_of(x, gamma, strides, launch, **flags, prefetch_depth=depth)
        kernel(launch, Struct(tensors), sizes_of_rows)
    if param_grads:
        kernel = _gradients_kernel(param_grads[0].dtype)
        launch = _gradients_launch(columns, len(grads), blocks)
        try:
            kernel(launch, partials, dgamma, dbeta, int32(blocks), int32(columns))
        except KernelUnavailable:
            if y is None or partials is None:
                raise
            # A caller cannot begin again with torch: y may have overwritten dy.
            for grad, part in zip(grads, partials, strict=True):
                if grad is not None:
                    grad.copy_(part.sum(0))


def _checked(function: str, tensors: Backward) -> tuple[int, int]:
    """Check the tensors but the workspace, and return the rows and columns of x."""
    dy, x, gamma, beta, mean, rstd, d_extra, dx, rounded_dx, y, _, means, amax = tensors
    if mean is not None and gamma is None:
        raise lacks(function, "mean", "gamma")
    rows, columns = checked_shape(function, x)
    check_tensor(function, "dy", dy, partners_of(x.dtype), x.shape, is_spaced=True)
    check_tensor(function, "d_extra", d_extra, (x.dtype,), x.shape, is_spaced=True)
    check_tensor(function, "dx", dx, (x.dtype,), x.shape)
    check_tensor(function, "rounded_dx", rounded_dx, (dy.dtype,), x.shape)
    if rounded_dx is not None and (dx is None or dy.dtype is x.dtype):
        said = [str(dtype).removeprefix("torch.") for dtype in (x.dtype, dy.dtype)]
        had = "no dx" if dx is None else f"dx in {said[0]} and dy in {said[1]}"
        raise InputError(
            f"{function} writes rounded_dx beside a dx of more bits than dy has; it got {had}."
        )
    check_tensor(function, "y", y, (dy.dtype,), x.shape)
    if y is not None:
        if dx is None or gamma is None or (mean is None) is not (beta is None):
            has = [
                name for name, t in (("dx", dx), ("gamma", gamma), ("beta", beta)) if t is not None
            ]
            raise InputError(
                f"{function} writes y beside dx, from gamma and, of a LayerNorm, beta; of these it "
                f"got {', '.join(has) or 'none'}."
            )
        are_outputs_aligned = are_aligned(columns, x, (), dx, rounded_dx, y)
        if not are_outputs_aligned or not writes_output(dy, x, gamma, beta, d_extra):
            raise InputError(f"{function} cannot write y too, for rows of {columns} {x.dtype}.")
    check_parameters(function, columns, (("gamma", gamma), ("beta", beta)))
    check_statistics(function, rows, mean, rstd, amax)
    check_tensor(function, "means", means, (torch.float32,), (rows, 1 + (mean is not None)))
    return rows, columns


def norm_backward_producer(tensors: Backward, *, zero_centered_gamma: bool = False) -> Producer:
    """The producer of dx in the dtype of x, with the bits that the backward writes.

    Reads dy, x and d_extra once: 4 bytes an element of 16 bits, with ``d_extra`` 6. Of ``tensors``
    it reads what the backward reads, beta apart, and the means that it wrote.
    """
    name = "norm_backward_producer"
    dy, x, gamma, _, mean, rstd, d_extra, *_, means, _ = tensors
    rows, columns = checked_shape(name, x)
    check_tensor(name, "dy", dy, partners_of(x.dtype), x.shape, is_spaced=True)
    check_tensor(name, "d_extra", d_extra, (x.dtype,), x.shape, is_spaced=True)
    norm = checked_norm(name, x, (("gamma", gamma),), mean, rstd)
    check_tensor(name, "means", means, (torch.float32,), (rows, 1 + (mean is not None)))
    strides = row_strides(x, d_extra, dy)
    aligned = fill_tiles(columns, strides, x, dy, d_extra, gamma)
    adds = boolean(d_extra is not None)
    return tile_producer(
        "NormBackwardProducer",
        (norm_types(norm, x.dtype, dy.dtype), parameter_type(gamma), adds),
        (dy, x, gamma, mean, rstd, means, d_extra),
        strides,
        *(x, x.dtype),
        zero_centered_gamma=zero_centered_gamma,
        aligned=aligned,
    )


def writes_output(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    d_extra: torch.Tensor | None = None,
) -> bool:
    """Whether the backward of these tensors can write y too.

    It reads each row once then: the rows are aligned to 16 bytes and fit the registers, of a
    LayerNorm in 16 bits together with beta.
    """
    columns = x.shape[1]
    plan = backward_plan(columns, x.element_size(), shared_bytes(x.device))
    norm = "RMSNorm" if beta is None else "LayerNorm"
    if not plan.fits_registers or not _has_room(norm, x.dtype, plan.vectors, plan.threads):
        return False
    return are_aligned(columns, x, row_strides(x, d_extra, dy), dy, gamma, beta, d_extra)


def _has_room(norm: str, x: torch.dtype, vectors: int, threads: int) -> bool:
    """Whether a kernel that writes y too keeps its data in registers."""
    is_small = (vectors, threads) == (BACKWARD_VECTORS[0], FEW_THREADS)
    return norm == "RMSNorm" or x.itemsize == 4 or is_small


def workspace_shape(x: torch.Tensor, *, has_beta: bool) -> tuple[int, int, int]:
    """The shape of the fp32 workspace for the partial sums of the parameters' gradients.

    ``x`` is that of the backward; ``has_beta`` says whether the norm is a LayerNorm.
    """
    rows, columns = x.shape
    device = (shared_bytes(x.device), multiprocessors(x.device))
    return 1 + has_beta, _backward_blocks(rows, columns, x.element_size(), *device), columns


# -- kernels ------------------------------------------------------------------


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel of these launchers."""
    pairs = itertools.product(("RMSNorm", "LayerNorm"), DTYPE_PAIRS)
    few, many = BACKWARD_VECTORS
    kernels = ((few, FEW_THREADS), (few, MANY_THREADS), (many, FEW_THREADS))
    chunks = ((None, FEW_THREADS), (None, MANY_THREADS))
    backward = [
        _backward_kernel(norm, *pair, *sizes, with_output)
        for norm, pair in pairs
        for sizes in (*kernels, *chunks)
        for with_output in (False, True)
        if not with_output or (sizes in kernels and _has_room(norm, pair[0], *sizes))
    ]
    return (*backward, *(_gradients_kernel(dtype) for dtype in ELEMENTS))


@functools.cache
def _backward_kernel(
    norm: str, x: torch.dtype, dy: torch.dtype, vectors: int | None, threads: int, with_output: bool
) -> Kernel:
    types = norm_types(norm, x, dy)
    if vectors is None:
        return Kernel(
            "normalization_backward", f"fuser_norm_backward_in_chunks<{types}, {threads}>"
        )
    arguments = f"{types}, {vectors}, {threads}, {boolean(with_output)}"
    return Kernel("normalization_backward", f"fuser_norm_backward<{arguments}>")


@functools.cache
def _gradients_kernel(dtype: torch.dtype) -> Kernel:
    return Kernel("normalization_backward", f"fuser_norm_parameter_gradients<{ELEMENTS[dtype]}>")


# -- launches -----------------------------------------------------------------


@dataclass(frozen=True)
class BackwardPlan:
    """The layout of a backward kernel: ``lanes`` threads a row and ``rows`` rows a block.

    A row fits the registers if each thread has at most ``vectors`` vectors of 16 bytes. Otherwise a
    block processes one row at a time, in chunks of one vector a thread.
    """

    vectors: int
    lanes: int
    rows: int
    blocks_per_multiprocessor: int
    fits_registers: bool

    @property
    def threads(self) -> int:
        """The most threads that the kernel is compiled for: as few as are enough."""
        used = self.lanes * self.rows * self.blocks_per_multiprocessor
        return MANY_THREADS if self.fits_registers and used > FEW_THREADS else FEW_THREADS

    def blocks(self, rows: int, multiprocessors: int) -> int:
        """The number of blocks for ``rows``: at most as many as run at once."""
        return min(-(-rows // self.rows), multiprocessors * self.blocks_per_multiprocessor)

    def slot_bytes(self, vector_bytes: int) -> int:
        """Shared memory of one row a thread; ``vector_bytes``: one vector of every tensor read."""
        return self.vectors * self.lanes * self.rows * vector_bytes

    def prefetch_depth(self, vector_bytes: int, shared: int) -> int:
        """The number of rows that a thread prefetches, with at most ``shared`` bytes a block."""
        shared_of_block = (shared + RESERVED_SHARED_BYTES) // self.blocks_per_multiprocessor
        free = shared_of_block - RESERVED_SHARED_BYTES - STATIC_SHARED_BYTES
        return min(max(free // self.slot_bytes(vector_bytes), 1), MAX_PREFETCH_DEPTH)


@functools.cache
def backward_plan(columns: int, element_bytes: int, shared: int) -> BackwardPlan:
    """The layout for rows of ``columns`` on a device with ``shared`` bytes a block."""
    vectors = vectors_of(columns, element_bytes)
    few, many = BACKWARD_VECTORS
    vectors_of_thread = few if vectors <= few * MANY_THREADS else many
    share = -(-vectors // vectors_of_thread)
    lanes = min(whole_warps(share), MANY_THREADS if vectors_of_thread == few else FEW_THREADS)
    if share <= 32:
        lanes = power_of_two(share)
    rows = max(1, BACKWARD_THREADS // lanes)
    fits = vectors <= lanes * vectors_of_thread
    # Two blocks if their registers fit, and two slots of each fit shared memory.
    slot_bytes = vectors_of_thread * lanes * rows * 3 * VECTOR_BYTES
    two = 2 * lanes * rows <= MANY_THREADS and 4 * slot_bytes <= shared
    return BackwardPlan(vectors_of_thread, lanes, rows, 2 if two or not fits else 1, fits)


@functools.lru_cache(maxsize=1024)
def _backward_choice(
    norm: str,
    x: torch.dtype,
    dy: torch.dtype,
    rows: int,
    columns: int,
    is_aligned: bool,
    has_extra: bool,
    with_output: bool,
    shared: int,
    multiprocessors: int,
) -> tuple[Kernel, Launch, int]:
    """The kernel, its launch and the prefetch depth."""
    plan = backward_plan(columns, x.itemsize, shared)
    blocks = plan.blocks(rows, multiprocessors)
    if not is_aligned or not plan.fits_registers:
        launch = Launch((blocks,), (max(plan.lanes, 32), 1))
        return _backward_kernel(norm, x, dy, None, plan.threads, False), launch, 0
    vector_bytes = VECTOR_BYTES * (1 + has_extra) + VECTOR_BYTES * dy.itemsize // x.itemsize
    depth = plan.prefetch_depth(vector_bytes, shared)
    shared_of_block = depth * plan.slot_bytes(vector_bytes)
    launch = Launch((blocks,), (plan.lanes, plan.rows), shared_of_block)
    kernel = _backward_kernel(norm, x, dy, plan.vectors, plan.threads, with_output)
    return kernel, launch, depth


@functools.lru_cache(maxsize=1024)
def _backward_blocks(
    rows: int, columns: int, element_bytes: int, shared: int, multiprocessors: int
) -> int:
    return backward_plan(columns, element_bytes, shared).blocks(rows, multiprocessors)


@functools.lru_cache(maxsize=256)
def _gradients_launch(columns: int, kinds: int, partials: int) -> Launch:
    return Launch((-(-columns // 32), kinds), (32, min(max(partials, 1), 16)))
