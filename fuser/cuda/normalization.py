"""Launchers of RMSNorm, LayerNorm and L2 normalization over rows, forward and backward.

x has a dtype and y one: see :func:`takes`. Gradients have those of what they are gradients of.

Both passes can leave out their large output and write what it follows from, a few numbers a row:
:func:`norm_producer` and :func:`norm_backward_producer` then make its values, with the same bits,
inside the kernel that quantizes them. Where the scale must be known first, the pass that leaves the
output out measures its amax.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fuser.cuda.arguments import ELEMENTS, Producer, Struct, float32, int32, int64
from fuser.cuda.launch import Kernel, Launch, multiprocessors, shared_bytes
from fuser.cuda.operands import boolean
from fuser.errors import InputError

PARAMETER_TYPES = {None: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""The kernels' ``ParameterType``."""

DTYPE_PAIRS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)
"""The dtypes of x and y that there are kernels for."""


def takes(x_dtype: torch.dtype, y_dtype: torch.dtype) -> bool:
    """Whether there are kernels from an x to a y of these dtypes, and back.

    fp32, fp16 and bf16 go to the same, and fp32 to fp16 and bf16. An x of 16 bits has no y of
    another dtype: not bf16 to fp32, as fp32 parameters without autocast would have it.
    """
    return (x_dtype, y_dtype) in DTYPE_PAIRS


VECTOR_BYTES = 16
# Columns of a thread in a tile.
TILE_RUN = 8
# Rows and columns are ints in the kernels, and so are sums of them and of the grid's size.
MAX_SIZE = 2**29

# Four loads of 16 bytes a thread in flight, at up to 64 registers; rows of one warp or less share a
# block of 128 threads, longer ones have a block each, of which many run on a multiprocessor.
FORWARD_VECTORS = 4
FORWARD_THREADS = 128
# Threads that a row of 16-bit and of 32-bit elements can have: registers for 16384 columns.
FORWARD_ROW_THREADS = {2: 512, 4: 1024}
# With an amax each warp ends in an atomic on one address, so that a block takes several rows.
AMAX_BLOCKS_PER_MULTIPROCESSOR = 16

# Blocks that stay, one or two on a multiprocessor, so that their partial sums are few; each has up
# to four rows a thread on their way through shared memory. 512 threads have 128 registers each.
BACKWARD_THREADS = 256
BACKWARD_ROW_THREADS = 512
BACKWARD_VECTORS = (2, 4)
MAX_STAGES = 4
# What a kernel takes of a block's shared memory besides its stages, and the driver of each block.
STATIC_SHARED_BYTES = 1024
RESERVED_SHARED_BYTES = 1024


# -- forward ------------------------------------------------------------------


def rmsnorm(
    x: torch.Tensor,
    gamma: torch.Tensor,
    y: torch.Tensor | None,
    rstd: torch.Tensor | None,
    *,
    eps: float,
    zero_centered_gamma: bool = False,
    extra: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    y_dtype: torch.dtype | None = None,
) -> None:
    """``z = x + extra; rstd = rsqrt(mean(z^2) + eps); y = z * rstd * gamma``, for each row.

    Computes in fp32 from z as its dtype rounds it. Reads x and extra once and writes z and y once:
    2 bytes an element of 16 bits read and 2 written, with ``extra`` 4 and 4; without y 2 less. Rows
    of more than 16384 elements, and rows that are not aligned to 16 bytes, are read again for y or
    its amax, and by a LayerNorm for its variance.

    Parameters
    ----------
    x
        Read; [rows, columns], fp32, fp16 or bf16. Rows may be apart; elements of a row may not.
    gamma
        Read; [columns], contiguous, fp32, fp16 or bf16.
    y
        Written; like ``x``, contiguous, in a dtype that goes with it (:func:`takes`); None where
        nobody reads it: see :func:`norm_producer`.
    rstd
        Written; fp32, one a row; None where nobody needs it.
    eps
        Added to the mean of the squares.
    zero_centered_gamma
        Whether the gain is ``1 + gamma``.
    extra
        Read; like ``x``. None adds nothing.
    z
        Written, with an ``extra`` alone; like ``x``, contiguous; None where nobody needs it.
    amax
        One fp32 that becomes the larger of itself and of the magnitudes in y, written or not; None
        measures nothing. It must not be negative; NaN counts as larger than infinity.
    y_dtype
        The dtype of a y that is measured and not written; None is that of ``x``.

    Raises
    ------
    InputError
        If a dtype, shape or layout is another, or nothing would be written.
    """
    options = (eps, zero_centered_gamma)
    outputs = (y, y_dtype, z, None, rstd, amax)
    _forward("rmsnorm", "RMSNorm", x, extra, gamma, None, *outputs, *options)


def layernorm(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    y: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    *,
    eps: float,
    zero_centered_gamma: bool = False,
    extra: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    y_dtype: torch.dtype | None = None,
) -> None:
    """``z = x + extra; y = (z - mean) * rstd * gamma + beta``, ``rstd = rsqrt(var + eps)``.

    The mean comes first and the variance is that of the differences from it. Otherwise as
    :func:`rmsnorm`.

    Parameters
    ----------
    x, gamma, y, rstd, eps, zero_centered_gamma, extra, z, amax, y_dtype
        As in :func:`rmsnorm`.
    beta
        Read; like ``gamma``, in its dtype.
    mean
        Written; fp32, one a row; None where nobody needs it.

    Raises
    ------
    InputError
        If a dtype, shape or layout is another, or nothing would be written.
    """
    options = (eps, zero_centered_gamma)
    outputs = (y, y_dtype, z, mean, rstd, amax)
    _forward("layernorm", "LayerNorm", x, extra, gamma, beta, *outputs, *options)


def l2norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    rnorm: torch.Tensor | None,
    *,
    eps: float,
    amax: torch.Tensor | None = None,
    y_dtype: torch.dtype | None = None,
) -> None:
    """``rnorm = rsqrt(sum(x^2) + eps); y = x * rnorm``, for each row; as :func:`rmsnorm` otherwise.

    Parameters
    ----------
    x, y, amax, y_dtype
        As in :func:`rmsnorm`.
    rnorm
        Written; fp32, one a row; None where nobody needs it.
    eps
        Added to the sum of the squares.

    Raises
    ------
    InputError
        If a dtype, shape or layout is another, or nothing would be written.
    """
    outputs = (y, y_dtype, None, None, rnorm, amax)
    _forward("l2norm", "RMSNorm", x, None, None, None, *outputs, eps, False)


def norm_producer(
    x: torch.Tensor,
    rstd: torch.Tensor,
    y_dtype: torch.dtype,
    *,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    zero_centered_gamma: bool = False,
) -> Producer:
    """The values of y in ``y_dtype``, with the bits that the forward writes.

    With a ``mean`` it is :func:`layernorm`, otherwise :func:`rmsnorm` and without ``gamma``
    :func:`l2norm`. Reads x once, 2 bytes an element of 16 bits.

    Parameters
    ----------
    x
        Read; as in :func:`rmsnorm`, or its z.
    rstd, mean
        Read; as the forward wrote them.
    y_dtype
        A dtype that goes with that of ``x`` (:func:`takes`).
    gamma, beta, zero_centered_gamma
        As in the forward.

    Raises
    ------
    InputError
        If a dtype, shape or layout is another, or one of mean, beta and gamma is missing.
    """
    what = "norm_producer"
    rows, columns = _checked_shape(what, x)
    _check_y_dtype(what, x.dtype, y_dtype)
    norm = _checked_norm(what, columns, gamma, mean, (("gamma", gamma), ("beta", beta)))
    if (mean is None) != (beta is None):
        there, missing = ("beta", "mean") if mean is None else ("mean", "beta")
        raise InputError(f"{what} got {there} without {missing}; a LayerNorm has both.")
    _check(what, "mean", mean, (torch.float32,), rows)
    _check(what, "rstd", rstd, (torch.float32,), rows)
    aligned = _fill_tiles(columns, (x.stride(0),), x, gamma, beta)
    types = (f"fuser::{norm}", ELEMENTS[x.dtype], ELEMENTS[y_dtype], _parameter_type(gamma))
    tensors = (x, gamma, beta, mean, rstd)
    offset = float32(float(zero_centered_gamma))
    return Producer(
        f"fuser::NormProducer<{', '.join(types)}, {boolean(aligned)}>",
        Struct((*tensors, int64(x.stride(0)), offset)),
        *(rows, columns, y_dtype, aligned),
    )


# -- backward -----------------------------------------------------------------


def rmsnorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    dgamma: torch.Tensor | None,
    workspace: torch.Tensor | None,
    *,
    zero_centered_gamma: bool = False,
    d_extra: torch.Tensor | None = None,
    means: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    """The gradients of :func:`rmsnorm`: with ``x_hat = x * rstd`` and ``d_hat = dy * gamma``,

    ``dx = (d_hat - x_hat * mean(d_hat * x_hat)) * rstd + d_extra`` and ``dgamma = sum(dy * x_hat)``
    over the rows. dx is rounded to its dtype before and after ``d_extra`` is added, as it is where
    another op adds it. dgamma is summed in fp32 in an order that depends on the shape and the
    number of multiprocessors alone.

    Reads dy, x and d_extra once and writes dx once: 6 bytes an element of 16 bits, with ``d_extra``
    8, and besides writes and reads the workspace; without dx 2 less, and 2 more less without its
    amax, which d_extra is read for. Rows of more than 16384 elements of 16 bits or 8192 of 32, and
    rows that are not aligned to 16 bytes, are read twice.

    Parameters
    ----------
    dy
        Read; [rows, columns]; the dtype of y. Rows may be apart; elements of a row may not.
    x
        Read; likewise, the dtype of the forward's x, or its z.
    gamma
        Read; as in the forward.
    rstd
        Read; as the forward wrote it.
    dx
        Written; like ``x``, contiguous; None where nobody reads it: see
        :func:`norm_backward_producer`.
    dgamma
        Written; [columns], contiguous, fp32, fp16 or bf16; None where nobody needs it.
    workspace
        Written and read; fp32, contiguous, of :func:`workspace_shape`; None without dgamma.
    zero_centered_gamma
        Whether the gain is ``1 + gamma``.
    d_extra
        Read; like ``x``. None adds nothing.
    means
        Written; fp32 ``[rows, 1]``, contiguous: ``mean(d_hat * x_hat)``. None where nobody needs
        it.
    amax
        One fp32 that becomes the larger of itself and of the magnitudes in dx, written or not; None
        measures nothing. As in the forward.

    Raises
    ------
    InputError
        If a dtype, shape or layout is another.
    """
    tensors = (dy, x, gamma, None, rstd, d_extra, dx, workspace, means, amax)
    _backward("rmsnorm_backward", "RMSNorm", *tensors, zero_centered_gamma, (dgamma,))


def layernorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    dgamma: torch.Tensor | None,
    dbeta: torch.Tensor | None,
    workspace: torch.Tensor | None,
    *,
    zero_centered_gamma: bool = False,
    d_extra: torch.Tensor | None = None,
    means: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    """The gradients of :func:`layernorm`: ``x_hat = (x - mean) * rstd``, ``d_hat = dy * gamma``,

    ``dx = (d_hat - mean(d_hat) - x_hat * mean(d_hat * x_hat)) * rstd + d_extra``, ``dgamma =
    sum(dy * x_hat)`` and ``dbeta = sum(dy)``; otherwise as :func:`rmsnorm_backward`.

    Parameters
    ----------
    dy, x, gamma, rstd, dx, dgamma, workspace, zero_centered_gamma, d_extra, amax
        As in :func:`rmsnorm_backward`.
    mean
        Read; as the forward wrote it.
    dbeta
        Written; like ``dgamma``, in its dtype; None where nobody needs it.
    means
        Written; fp32 ``[rows, 2]``, contiguous: ``mean(d_hat * x_hat)`` and ``mean(d_hat)``. None
        where nobody needs it.

    Raises
    ------
    InputError
        If a dtype, shape or layout is another.
    """
    tensors = (dy, x, gamma, mean, rstd, d_extra, dx, workspace, means, amax)
    _backward("layernorm_backward", "LayerNorm", *tensors, zero_centered_gamma, (dgamma, dbeta))


def l2norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rnorm: torch.Tensor,
    dx: torch.Tensor | None,
    *,
    means: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    """``dx = (dy - x_hat * sum(dy * x_hat)) * rnorm`` with ``x_hat = x * rnorm``.

    Parameters
    ----------
    dy, x, dx, amax
        As in :func:`rmsnorm_backward`.
    rnorm
        Read; as the forward wrote it.
    means
        Written; fp32 ``[rows, 1]``, contiguous: ``sum(dy * x_hat)``. None where nobody needs it.

    Raises
    ------
    InputError
        If a dtype, shape or layout is another.
    """
    tensors = (dy, x, None, None, rnorm, None, dx, None, means, amax)
    _backward("l2norm_backward", "RMSNorm", *tensors, False, ())


def norm_backward_producer(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    means: torch.Tensor,
    *,
    gamma: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    d_extra: torch.Tensor | None = None,
    zero_centered_gamma: bool = False,
) -> Producer:
    """The values of dx in the dtype of x, with the bits that the backward writes.

    With a ``mean`` it is :func:`layernorm_backward`, otherwise :func:`rmsnorm_backward` and without
    ``gamma`` :func:`l2norm_backward`. Reads dy, x and d_extra once: 4 bytes an element of 16 bits,
    with ``d_extra`` 6.

    Parameters
    ----------
    dy, x, gamma, mean, rstd, d_extra, zero_centered_gamma
        As in the backward.
    means
        Read; as the backward wrote them.

    Raises
    ------
    InputError
        If a dtype, shape or layout is another, or a mean comes without gamma.
    """
    what = "norm_backward_producer"
    rows, columns = _checked_shape(what, x)
    _check(what, "dy", dy, _partners(x.dtype), x.shape, is_spaced=True)
    _check(what, "d_extra", d_extra, (x.dtype,), x.shape, is_spaced=True)
    norm = _checked_norm(what, columns, gamma, mean, (("gamma", gamma),))
    _check(what, "mean", mean, (torch.float32,), rows)
    _check(what, "rstd", rstd, (torch.float32,), rows)
    _check(what, "means", means, (torch.float32,), (rows, 1 + (mean is not None)))
    strides = _strides(x, d_extra, dy)
    aligned = _fill_tiles(columns, strides, x, dy, d_extra, gamma)
    types = (f"fuser::{norm}", ELEMENTS[x.dtype], ELEMENTS[dy.dtype], _parameter_type(gamma))
    flags = (boolean(d_extra is not None), boolean(aligned))
    tensors = (dy, x, gamma, mean, rstd, means, d_extra)
    offset = float32(float(zero_centered_gamma))
    return Producer(
        f"fuser::NormBackwardProducer<{', '.join((*types, *flags))}>",
        Struct((*tensors, *map(int64, strides), offset)),
        *(rows, columns, x.dtype, aligned),
    )


def workspace_shape(x: torch.Tensor, *, has_beta: bool) -> tuple[int, int, int]:
    """The shape of the fp32 workspace in which a backward sums gradients of parameters.

    Parameters
    ----------
    x
        The backward's, for its shape, dtype and device.
    has_beta
        Whether it is a LayerNorm's.
    """
    rows, columns = x.shape
    device = (shared_bytes(x.device), multiprocessors(x.device))
    return 1 + has_beta, _backward_blocks(rows, columns, x.element_size(), *device), columns


# -- kernels ------------------------------------------------------------------


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel that these launchers may ask for."""
    pairs = list(itertools.product(("RMSNorm", "LayerNorm"), DTYPE_PAIRS))
    flags = list(itertools.product((False, True), repeat=2))
    forward = [_forward_kernel(n, *p, *flag) for n, p in pairs for flag in flags]
    backward = [_backward_kernel(n, *p, v) for n, p in pairs for v in (*BACKWARD_VECTORS, None)]
    return (*forward, *backward, *(_gradients_kernel(dtype) for dtype in ELEMENTS))


@functools.cache
def _forward_kernel(
    norm: str, x: torch.dtype, y: torch.dtype, in_registers: bool, writes: bool
) -> Kernel:
    flags = f"{boolean(in_registers)}, {boolean(writes)}"
    types = f"fuser::{norm}, {ELEMENTS[x]}, {ELEMENTS[y]}"
    return Kernel("normalization", f"fuser_norm<{types}, {flags}>")


@functools.cache
def _backward_kernel(norm: str, x: torch.dtype, dy: torch.dtype, vectors: int | None) -> Kernel:
    types = f"fuser::{norm}, {ELEMENTS[x]}, {ELEMENTS[dy]}"
    if vectors is None:
        return Kernel("normalization_backward", f"fuser_norm_backward_in_chunks<{types}>")
    return Kernel("normalization_backward", f"fuser_norm_backward<{types}, {vectors}>")


@functools.cache
def _gradients_kernel(dtype: torch.dtype) -> Kernel:
    return Kernel("normalization_backward", f"fuser_norm_parameter_gradients<{ELEMENTS[dtype]}>")


# -- launches -----------------------------------------------------------------


@dataclass(frozen=True)
class ForwardPlan:
    """How a forward kernel takes rows: ``lanes`` threads a row, ``rows`` of them in a block.

    In registers a row fits ``FORWARD_VECTORS`` vectors of 16 bytes a thread; otherwise it is read
    in chunks of one vector a thread.
    """

    lanes: int
    rows: int
    fits_registers: bool


@functools.cache
def forward_plan(columns: int, element_bytes: int) -> ForwardPlan:
    """How the forward takes rows of ``columns``, which decides the order of its sums."""
    vectors = _vectors(columns, element_bytes)
    share = -(-vectors // FORWARD_VECTORS)
    if share <= 32:
        # At least 64 bytes of a row side by side, for whole sectors of memory.
        lanes = max(_power_of_two(share), min(4, _power_of_two(vectors)))
    else:
        lanes = min(_whole_warps(share), FORWARD_ROW_THREADS[element_bytes])
    return ForwardPlan(
        lanes=lanes,
        rows=max(1, FORWARD_THREADS // lanes) if lanes <= 32 else 1,
        fits_registers=vectors <= lanes * FORWARD_VECTORS,
    )


@dataclass(frozen=True)
class BackwardPlan:
    """How a backward kernel takes rows: ``lanes`` threads a row, ``rows`` of them in a block.

    In registers a row fits ``vectors`` vectors of 16 bytes a thread; otherwise a block takes one
    row at a time, in chunks of one vector a thread.
    """

    vectors: int
    lanes: int
    rows: int
    blocks_per_multiprocessor: int
    fits_registers: bool

    def blocks(self, rows: int, multiprocessors: int) -> int:
        """How many blocks share ``rows``: as many as run at once, at most."""
        return min(-(-rows // self.rows), multiprocessors * self.blocks_per_multiprocessor)

    def stage_bytes(self, vector_bytes: int) -> int:
        """Shared memory of one row a thread, for ``vector_bytes`` of all tensors read together."""
        return self.vectors * self.lanes * self.rows * vector_bytes

    def stages(self, vector_bytes: int, shared: int) -> int:
        """How many rows a thread has on their way, with ``shared`` bytes a block at most."""
        each = (shared + RESERVED_SHARED_BYTES) // self.blocks_per_multiprocessor
        free = each - RESERVED_SHARED_BYTES - STATIC_SHARED_BYTES
        return min(max(free // self.stage_bytes(vector_bytes), 1), MAX_STAGES)


@functools.cache
def backward_plan(columns: int, element_bytes: int, shared: int) -> BackwardPlan:
    """How the backward takes rows of ``columns`` on a device with ``shared`` bytes a block."""
    vectors = _vectors(columns, element_bytes)
    few, many = BACKWARD_VECTORS
    each = few if vectors <= few * BACKWARD_ROW_THREADS else many
    share = -(-vectors // each)
    lanes = min(_whole_warps(share), BACKWARD_ROW_THREADS)
    if share <= 32:
        lanes = _power_of_two(share)
    rows = max(1, BACKWARD_THREADS // lanes)
    fits = vectors <= lanes * each
    # Two blocks where their registers, and two stages of each in shared memory, have room.
    stage_bytes = each * lanes * rows * 3 * VECTOR_BYTES
    two = lanes * rows <= BACKWARD_THREADS and 4 * stage_bytes <= shared
    return BackwardPlan(each, lanes, rows, 2 if two or not fits else 1, fits)


@functools.lru_cache(maxsize=1024)
def _forward_choice(
    norm: str,
    x: torch.dtype,
    y: torch.dtype,
    rows: int,
    columns: int,
    is_aligned: bool,
    writes: bool,
    most_blocks: int,
) -> tuple[Kernel, Launch]:
    plan = forward_plan(columns, x.itemsize)
    kernel = _forward_kernel(norm, x, y, is_aligned and plan.fits_registers, writes)
    blocks = min(-(-rows // plan.rows), most_blocks)
    return kernel, Launch((blocks,), (plan.lanes, plan.rows))


@functools.lru_cache(maxsize=1024)
def _backward_choice(
    norm: str,
    x: torch.dtype,
    dy: torch.dtype,
    rows: int,
    columns: int,
    is_aligned: bool,
    has_extra: bool,
    shared: int,
    multiprocessors: int,
) -> tuple[Kernel, Launch, int]:
    """The kernel, its launch and the number of stages."""
    plan = backward_plan(columns, x.itemsize, shared)
    blocks = plan.blocks(rows, multiprocessors)
    if not is_aligned or not plan.fits_registers:
        return _backward_kernel(norm, x, dy, None), Launch((blocks,), (max(plan.lanes, 32), 1)), 0
    vector_bytes = VECTOR_BYTES * (1 + has_extra) + VECTOR_BYTES * dy.itemsize // x.itemsize
    stages = plan.stages(vector_bytes, shared)
    shared_of_block = stages * plan.stage_bytes(vector_bytes)
    launch = Launch((blocks,), (plan.lanes, plan.rows), shared_of_block)
    return _backward_kernel(norm, x, dy, plan.vectors), launch, stages


@functools.lru_cache(maxsize=1024)
def _backward_blocks(
    rows: int, columns: int, element_bytes: int, shared: int, multiprocessors: int
) -> int:
    return backward_plan(columns, element_bytes, shared).blocks(rows, multiprocessors)


@functools.lru_cache(maxsize=256)
def _gradients_launch(columns: int, kinds: int, partials: int) -> Launch:
    return Launch((-(-columns // 32), kinds), (32, min(max(partials, 1), 32)))


@functools.lru_cache(maxsize=1024)
def _sizes(
    x_stride: int,
    extra_stride: int,
    dy_stride: int,
    rows: int,
    columns: int,
    lanes: int,
    stages: int,
    x: torch.dtype,
    parameter: torch.dtype | None,
    is_aligned: bool,
    zero_centered_gamma: bool,
    eps: float,
) -> Struct:
    """The kernels' ``Sizes``. Without parameters it is an L2 normalization: a sum, a gain of 1."""
    has_parameters = parameter is not None
    return Struct(
        (
            *(int64(x_stride), int64(extra_stride), int64(dy_stride)),
            *(
                int32(rows),
                int32(columns),
                int32(_vectors(columns, x.itemsize, lanes)),
                int32(stages),
            ),
            *(int32(PARAMETER_TYPES[parameter]), int32(is_aligned)),
            float32(1.0 if zero_centered_gamma or not has_parameters else 0.0),
            float32(1.0 / columns if has_parameters else 1.0),
            float32(eps),
        )
    )


def _vectors(columns: int, element_bytes: int, threads: int = 1) -> int:
    """How many vectors each of a row's threads has, at most."""
    return -(-columns * element_bytes // (VECTOR_BYTES * threads))


def _whole_warps(threads: int) -> int:
    """``threads`` up to a multiple of 32."""
    return -(-threads // 32) * 32


def _power_of_two(n: int) -> int:
    """The least power of two from ``n`` on."""
    return 1 << (n - 1).bit_length()


# -- launching ----------------------------------------------------------------


def _forward(
    function: str,
    norm: str,
    x: torch.Tensor,
    extra: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    y: torch.Tensor | None,
    y_dtype: torch.dtype | None,
    z: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    amax: torch.Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
) -> None:
    rows, columns = _checked_shape(function, x)
    _check(function, "extra", extra, (x.dtype,), x.shape, is_spaced=True)
    if y_dtype is None:
        _check(function, "y", y, _partners(x.dtype), x.shape)
        y_dtype = x.dtype if y is None else y.dtype
    else:
        _check_y_dtype(function, x.dtype, y_dtype)
        _check(function, "y", y, (y_dtype,), x.shape)
    _check(function, "z", z, (x.dtype,), x.shape)
    _check_parameters(function, columns, (("gamma", gamma), ("beta", beta)))
    _check(function, "mean", mean, (torch.float32,), rows)
    _check(function, "rstd", rstd, (torch.float32,), rows)
    _check(function, "amax", amax, (torch.float32,), 1)
    if z is not None and extra is None:
        raise InputError(f"{function} writes z where it adds an extra; it got none.")
    if all(output is None for output in (y, z, mean, rstd, amax)):
        raise InputError(f"{function} got nothing to write: no y, z, mean, rstd or amax.")
    if rows == 0:
        return

    strides = _strides(x, extra, None)
    is_aligned = _are_aligned(columns, x, strides, extra, gamma, beta, y, z)
    most_blocks = MAX_SIZE
    if amax is not None:
        most_blocks = AMAX_BLOCKS_PER_MULTIPROCESSOR * multiprocessors(x.device)
    sizes = (rows, columns)
    kernel, launch = _forward_choice(
        norm, x.dtype, y_dtype, *sizes, is_aligned, y is not None, most_blocks
    )
    tensors = Struct((x, extra, gamma, beta, y, z, mean, rstd, amax))
    dtype = None if gamma is None else gamma.dtype
    kernel(
        launch,
        tensors,
        _sizes(
            *(*strides, *sizes, launch.block[0], 0, x.dtype, dtype),
            *(is_aligned, zero_centered_gamma, eps),
        ),
    )


def _backward(
    function: str,
    norm: str,
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    d_extra: torch.Tensor | None,
    dx: torch.Tensor | None,
    workspace: torch.Tensor | None,
    means: torch.Tensor | None,
    amax: torch.Tensor | None,
    zero_centered_gamma: bool,
    grads: tuple[torch.Tensor | None, ...],
) -> None:
    rows, columns = _checked_shape(function, x)
    _check(function, "dy", dy, _partners(x.dtype), x.shape, is_spaced=True)
    _check(function, "d_extra", d_extra, (x.dtype,), x.shape, is_spaced=True)
    _check(function, "dx", dx, (x.dtype,), x.shape)
    _check_parameters(function, columns, (("gamma", gamma),))
    _check_parameters(function, columns, tuple(zip(("dgamma", "dbeta"), grads, strict=False)))
    _check(function, "mean", mean, (torch.float32,), rows)
    _check(function, "rstd", rstd, (torch.float32,), rows)
    _check(function, "means", means, (torch.float32,), (rows, 1 + (norm == "LayerNorm")))
    _check(function, "amax", amax, (torch.float32,), 1)
    device = (shared_bytes(x.device), multiprocessors(x.device))
    blocks = _backward_blocks(rows, columns, x.element_size(), *device)
    wanted = [grad for grad in grads if grad is not None]
    partials = workspace if wanted else None
    if wanted:
        if workspace is None:
            raise InputError(f"{function} sums parameters' gradients in a workspace; it got none.")
        shape = (len(grads), blocks, columns)
        _check(function, "workspace", workspace, (torch.float32,), shape)

    if dx is None and amax is None:
        d_extra = None
    if rows > 0 and (wanted or any(output is not None for output in (dx, means, amax))):
        strides = _strides(x, d_extra, dy)
        is_aligned = _are_aligned(columns, x, strides, dy, gamma, d_extra, dx)
        dtypes, sizes = (x.dtype, dy.dtype), (rows, columns)
        kernel, launch, stages = _backward_choice(
            norm, *dtypes, *sizes, is_aligned, d_extra is not None, *device
        )
        tensors = Struct((dy, x, gamma, mean, rstd, d_extra, dx, partials, means, amax))
        dtype = None if gamma is None else gamma.dtype
        kernel(
            launch,
            tensors,
            _sizes(
                *(*strides, *sizes, launch.block[0], stages, x.dtype, dtype),
                *(is_aligned, zero_centered_gamma, 0.0),
            ),
        )
    if wanted:
        dgamma, dbeta = (*grads, None)[:2]
        kernel = _gradients_kernel(wanted[0].dtype)
        launch = _gradients_launch(columns, len(grads), blocks)
        kernel(launch, partials, dgamma, dbeta, int32(blocks), int32(columns))


def _strides(
    x: torch.Tensor, extra: torch.Tensor | None, dy: torch.Tensor | None
) -> tuple[int, int, int]:
    """From row to row, as the kernels' ``Sizes`` begin; 0 for a tensor that is not there."""
    return (
        x.stride(0),
        0 if extra is None else extra.stride(0),
        0 if dy is None else dy.stride(0),
    )


def _are_aligned(
    columns: int, x: torch.Tensor, strides: tuple[int, ...], *others: torch.Tensor | None
) -> bool:
    """Whether every row of all tensors begins at a vector of x's elements and has whole ones."""
    address = x.data_ptr()
    for tensor in others:
        if tensor is not None:
            address |= tensor.data_ptr()
    elements = columns
    for stride in strides:
        elements |= stride
    return address % VECTOR_BYTES == 0 and elements * x.element_size() % VECTOR_BYTES == 0


def _fill_tiles(columns: int, strides: tuple[int, ...], *tensors: torch.Tensor | None) -> bool:
    """Whether a tile's threads may read 8 elements at a time everywhere."""
    addresses = (tensor.data_ptr() for tensor in tensors if tensor is not None)
    return all(size % TILE_RUN == 0 for size in (columns, *strides)) and all(
        address % VECTOR_BYTES == 0 for address in addresses
    )


# -- checks -------------------------------------------------------------------


def _checked_shape(function: str, x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of x."""
    if x.dtype not in ELEMENTS or x.dim() != 2 or max(x.shape) > MAX_SIZE or x.shape[1] == 0:
        raise InputError(
            f"{function} takes x of shape [rows, columns], with columns, up to {MAX_SIZE} of each, "
            f"in fp32, fp16 or bf16; got {_shown(x)}."
        )
    _check(function, "x", x, (x.dtype,), x.shape, is_spaced=True)
    return x.shape[0], x.shape[1]


def _check_y_dtype(function: str, x: torch.dtype, y: torch.dtype) -> None:
    if not takes(x, y):
        partners = " or ".join(map(_name, _partners(x)))
        raise InputError(f"{function} makes y in {partners} from x in {_name(x)}; got {_name(y)}.")


def _checked_norm(
    function: str,
    columns: int,
    gamma: torch.Tensor | None,
    mean: torch.Tensor | None,
    parameters: Sequence[tuple[str, torch.Tensor | None]],
) -> str:
    """The norm of a producer, in C++."""
    _check_parameters(function, columns, parameters)
    if mean is not None and gamma is None:
        raise InputError(f"{function} got mean without gamma; a LayerNorm has both.")
    return "RMSNorm" if mean is None else "LayerNorm"


def _parameter_type(gamma: torch.Tensor | None) -> str:
    return "fuser::NoParameters" if gamma is None else ELEMENTS[gamma.dtype]


def _check_parameters(
    function: str, columns: int, named: Sequence[tuple[str, torch.Tensor | None]]
) -> None:
    """Parameters have any dtype, all of them the same."""
    for name, tensor in named:
        _check(function, name, tensor, tuple(ELEMENTS), (columns,))
    dtypes = {name: tensor.dtype for name, tensor in named if tensor is not None}
    if len(set(dtypes.values())) > 1:
        said = " and ".join(f"{name} in {_name(dtype)}" for name, dtype in dtypes.items())
        raise InputError(f"{function} got {said}; they must have one dtype.")


def _check(
    function: str,
    name: str,
    tensor: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...] | int,
    is_spaced: bool = False,
) -> None:
    """``shape`` may be a number of elements; rows of a tensor that ``is_spaced`` may be apart."""
    if tensor is None:
        return
    has_shape = tensor.shape == shape or tensor.numel() == shape
    has_layout = tensor.is_contiguous() or (is_spaced and tensor.stride(-1) == 1)
    if tensor.dtype not in dtypes or not has_shape or not has_layout:
        layout = "the elements of a row side by side" if is_spaced else "contiguous"
        raise InputError(
            f"{function} takes {name} in {' or '.join(map(_name, dtypes))}, "
            f"{f'{shape} elements' if isinstance(shape, int) else f'of shape {tuple(shape)}'}, "
            f"{layout}; got {_shown(tensor)}."
        )


def _partners(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes that y can have for an x of ``dtype``."""
    return tuple(y for x, y in DTYPE_PAIRS if x == dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
