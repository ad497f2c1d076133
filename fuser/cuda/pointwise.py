"""Launchers of pointwise chains: forward, backward, and producers for tiled kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fuser.chain import Stages
from fuser.cuda.arguments import ELEMENTS, TILE_RUN, Producer, Struct, int32, int64
from fuser.cuda.chain import Tensors, TypedChain, chain_of, described, scale_dtypes_of
from fuser.cuda.checks import boolean, check_buffer, check_element, check_matrix
from fuser.cuda.launch import TILE, Kernel, Launch
from fuser.errors import InputError, KernelUnavailable
from fuser.formats import ceil_div
from fuser.torch_private import size_hint

THREADS = 256
# Threads of a block in a row: 2 KB.
MAX_BLOCK_X = 128
WARP = 32
MAX_GRID_Y = 65535
# The sums over rows have one fp32 for each column of a block, written and read. A block of eight
# rows at a time has fewer than one of two rows, so a thread needs few rows and the GPU many blocks:
# in the last round of blocks it is partly idle. 64 rows of a block are 2% of the bytes of
# bias + GELU. A thread has 8 rows, or 4 if an H200 had less than 4000 threads a multiprocessor.
MAX_SUMMING_BLOCK_X = WARP
MAX_SUMMED_ROWS = 8
MIN_SUMMING_THREADS = 2**19

# -- launchers ----------------------------------------------------------------


def pointwise(
    stages: Stages,
    x: torch.Tensor,
    operands: Tensors,
    y: torch.Tensor | None,
    amax: torch.Tensor | None = None,
) -> None:
    """Write ``y = stages(x)``; every stage is rounded to the dtype of ``x``.

    Bytes an element of y: those of y, of one element of x (two before a gated stage), and of each
    extra input.

    ``x`` is fp32, fp16 or bf16, ``[..., columns]``, or ``[..., 2 * columns]`` before a gated stage,
    of which there is at most one; contiguous, or a matrix of contiguous rows. ``operands`` has one
    entry a stage, contiguous: of ``"bias"`` ``[width]`` in the dtype of x, for an output of that
    width; of ``"add_extra_input"`` as many elements as the stage's output, in the dtype of x; of
    ``"dropout"`` two int64 from torch's generator, on the device, which with the index of an
    element determine the mask; of a scaled activation one scale a row, fp32, fp16 or bf16. ``y`` is
    contiguous, in the dtype of x, and shares no memory with an input; None if only ``amax``, one
    fp32, at least 0, is raised to ``max |y|`` of the rounded values. NaN is above infinity.
    """
    chain = chain_of(stages, x.dtype, scale_dtypes_of(stages, operands))
    if y is None and amax is None:
        raise InputError(f"The chain {stages} got neither y nor amax; there is nothing to write.")
    rows, columns = _sizes("x", x, chain.halves) if y is None else _matrix("y", y, chain.dtype)
    inputs = chain.forward_inputs(x, operands, rows, columns)
    _check_amax(amax)
    is_aligned = chain.is_aligned(inputs, chain.widest, y)
    vector = chain.widest if is_aligned else 1
    kernel = forward_kernel(chain, vector, amax is not None)
    launch = _launch(rows, columns, chain.widest, vector, chain.forward_rows, MAX_BLOCK_X)
    kernel(launch, inputs.struct(chain), y, amax, np.uint32(rows))


def pointwise_backward(
    stages: Stages,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    operands: Tensors,
    dx: torch.Tensor | None,
    grads: Tensors,
    workspace: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    *,
    saved: int = 0,
    y: torch.Tensor | None = None,
) -> None:
    """Write the gradients of the input of ``stages`` and of their operands.

    The kernel recomputes the stages from ``saved`` on, before which none is an activation. It
    rounds the gradient of every stage to the dtype of ``dy``, and sums over rows or columns in
    fp32, in an order that depends only on the shape.

    Bytes an element of dy: those of dy, of the one or two elements of x and of dx, of each extra
    input before an activation, of each gradient of an extra input, and of ``y``.

    ``x`` is the input of ``stages[saved]``; None if no stage is an activation. ``operands`` are as
    in :func:`pointwise`; a bias or an extra input may be None if the kernel does not add it again:
    before ``saved``, or without an activation after it. ``dx`` is contiguous and shares no memory
    with an input; None if only ``amax``, raised to ``max |dx|``, or gradients are wanted. ``grads``
    has one entry a stage, contiguous, None if no gradient is wanted: of a bias ``[width]`` in the
    dtype of dy, of an extra input or of scales in their shape and dtype. ``workspace`` is
    :func:`workspace_size` contiguous fp32, None if that is 0. ``y`` is the chain's output, with the
    bits of :func:`pointwise`, if :func:`writes_output`; contiguous, in memory that may be that of
    dy. None does not write it.
    """
    has_grad = tuple(grad is not None for grad in grads)
    chain = chain_of(stages, dy.dtype, scale_dtypes_of(stages, operands), has_grad, saved)
    if y is not None and not chain.writes_output:
        raise InputError(f"The backward of {stages}, saved={saved}, does not read what y needs.")
    if dx is None and amax is None and not any(has_grad):
        raise InputError(
            f"The backward of {stages} got neither dx nor amax nor a gradient to write."
        )
    if dx is None:
        rows, columns = _sizes("dy", dy, 1)
    else:
        _matrix("dx", dx, chain.dtype)
        rows, columns = _sizes("dx", dx, chain.halves)
    if y is not None and _matrix("y", y, chain.dtype) != (rows, columns):
        raise InputError(f"y is {described(y)}; it has {rows} rows of {columns} columns.")
    inputs = chain.backward_inputs(dy, x, operands, rows, columns)
    chain.check_grads(grads, operands, rows, columns)
    _check_amax(amax)

    others = (dx, y, workspace, *chain.elementwise(grads))
    is_aligned = chain.is_aligned(inputs, chain.widest, *others)
    vector = chain.widest if is_aligned else 1
    parts = _parts(chain, rows, columns, vector)
    _check_workspace(workspace, sum(part.count * part.size for part in parts))
    outputs = list(grads)
    begin = 0
    for part in parts:
        if workspace is not None:
            outputs[part.stage] = workspace.view(-1).narrow(0, begin, part.count * part.size)
        begin += part.count * part.size

    kernel = backward_kernel(chain, vector, amax is not None, y is not None)
    steps = _steps(chain, rows, columns)
    launch = _backward_launch(chain, rows, columns, vector)
    kernel(launch, inputs.struct(chain, outputs), dx, y, amax, np.uint32(rows), int32(steps))
    for part in parts:
        grad, of_grad = grads[part.stage], outputs[part.stage]
        assert grad is not None
        assert of_grad is not None
        kernel = sum_kernel(grad.dtype, part.fan)
        try:
            kernel(_sum_launch(part.size), of_grad, grad, int32(part.count), int64(part.size))
        except KernelUnavailable:
            if y is None:
                raise
            # A caller cannot begin again with torch: y may have overwritten dy.
            grad.copy_(of_grad.view(part.count, part.size).sum(0).view(grad.shape))


def writes_output(
    stages: Stages, dtype: torch.dtype, operands: Tensors, grads: Tensors, saved: int = 0
) -> bool:
    """Whether :func:`pointwise_backward` can write ``y`` too: it reads all that y needs.

    Not so if a bias or an extra input is added after the last activation, or without one.
    """
    has_grad = tuple(grad is not None for grad in grads)
    return chain_of(stages, dtype, scale_dtypes_of(stages, operands), has_grad, saved).writes_output


def workspace_size(
    stages: Stages, rows: int, columns: int, dtype: torch.dtype, has_grad: Sequence[bool]
) -> int:
    """The size of the workspace of :func:`pointwise_backward`, in fp32 elements.

    ``rows`` and ``columns`` are those of the chain's output; ``has_grad`` says for each stage
    whether the gradient of its operand is wanted.
    """
    chain = chain_of(stages, dtype, (torch.float32,) * len(stages), tuple(has_grad))
    parts = _parts(chain, size_hint(rows), size_hint(columns), 1)
    return sum(part.count * part.size for part in parts)


def forward_producer(
    stages: Stages, x: torch.Tensor, operands: Tensors, rows: int, columns: int
) -> Producer:
    """The producer of the values that :func:`pointwise` writes, ``[rows, columns]``.

    The arguments are those of :func:`pointwise`, and a tiled kernel reads the same bytes.
    """
    rows, columns = size_hint(rows), size_hint(columns)
    chain = chain_of(stages, x.dtype, scale_dtypes_of(stages, operands))
    inputs = chain.forward_inputs(x, operands, rows, columns)
    is_aligned = chain.is_aligned(inputs, TILE_RUN)
    name = forward_producer_type(chain, is_aligned)
    return Producer(name, inputs.struct(chain), rows, columns, chain.dtype, is_aligned)


def backward_producer(
    stages: Stages,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    operands: Tensors,
    rows: int,
    columns: int,
    saved: int = 0,
    sums: torch.Tensor | None = None,
    row_parts: torch.Tensor | None = None,
) -> Producer:
    """The producer of the values of ``dx`` that :func:`pointwise_backward` writes.

    Two gradients are left in parts by every tiled kernel with this producer, and :func:`sum_parts`
    adds them: that of a bias before the chain, the ``sums`` of dx over the rows of each tile, and
    that of the scales of one activation, its ``row_parts``. A kernel that looks for amaxes alone
    takes the producer's ``alone``, which writes neither. With a gated stage, dx has two columns for
    each column of dy; the kernel reads dy twice, the second time mostly from L2.

    ``rows`` and ``columns`` are those of the chain's output. ``sums`` and ``row_parts`` are
    contiguous fp32 of :func:`sums_shape` and :func:`row_parts_shape`. In padded groups a row of
    sums belongs to a tile; those of tiles after the last group, and parts of rows that belong to no
    group, are not written.
    """
    rows, columns = size_hint(rows), size_hint(columns)
    scale_dtypes = scale_dtypes_of(stages, operands)
    chain = chain_of(stages, dy.dtype, scale_dtypes, (False,) * len(stages), saved)
    inputs = chain.backward_inputs(dy, x, operands, rows, columns)
    is_aligned = chain.is_aligned(inputs, TILE_RUN)
    wide = chain.halves * columns

    def writing(chain: TypedChain, outputs: Tensors, sums: torch.Tensor | None) -> Producer:
        name = backward_producer_type(chain, sums is not None, is_aligned)
        argument = Struct((*inputs.struct(chain, outputs).fields, sums, int64(rows)))
        return Producer(name, argument, rows, wide, chain.dtype, is_aligned)

    alone = writing(chain, (None,) * len(stages), None)
    if sums is None and row_parts is None:
        return alone
    shape = sums_shape(rows, wide)
    check_buffer("backward_producer", "sums", sums, torch.float32, shape)
    if row_parts is not None:
        if sum(stage.is_scaled for stage in stages) != 1:
            raise InputError(f"Parts of rows are of the scales of one stage; got {stages}.")
        shape = row_parts_shape(stages, rows, columns)
        check_buffer("backward_producer", "row_parts", row_parts, torch.float32, shape)
        has_grad = tuple(stage.is_scaled for stage in stages)
        chain = chain_of(stages, dy.dtype, scale_dtypes, has_grad, saved)
    return writing(chain, (row_parts,) * len(stages), sums)._replace(alone=alone)


def sums_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the sums that tiled kernels write, for dx of ``[rows, columns]``."""
    return ceil_div(rows, TILE), columns


def row_parts_shape(stages: Stages, rows: int, columns: int) -> tuple[int, int]:
    """The shape of the parts of the gradient of scales that tiled kernels write.

    ``rows`` and ``columns`` are those of the chain's output. A tile of dx has a part for each row
    if columns of the gate are in it.
    """
    gated = next((stage for stage in stages if stage.is_gated), None)
    wide = columns if gated is None else 2 * columns - (gated.interleave or columns)
    return ceil_div(wide, TILE), rows


def sum_parts(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``out[i] = sum over k of parts[k, i]``, in fp32; the order depends only on the shape.

    ``parts`` are contiguous fp32 ``[count, size]``, ``out`` is contiguous fp32, fp16 or bf16.
    """
    count, size = check_matrix("sum_parts", parts)
    check_buffer("sum_parts", "parts", parts, torch.float32, (count, size))
    check_buffer("sum_parts", "out", out, out.dtype, (size,))
    check_element("sum_parts", out)
    sum_kernel(out.dtype, 1)(_sum_launch(size), parts, out, int32(count), int64(size))


def forward_producer_type(chain: TypedChain, aligned: bool) -> str:
    """The C++ type of :func:`forward_producer`."""
    return f"fuser::PointwiseProducer<{chain.type}, {boolean(aligned)}>"


def backward_producer_type(chain: TypedChain, with_sums: bool, aligned: bool) -> str:
    """The C++ type of :func:`backward_producer`."""
    flags = f"{boolean(with_sums)}, {boolean(aligned)}"
    return f"fuser::PointwiseBackwardProducer<{chain.type}, {flags}>"


# -- kernels ------------------------------------------------------------------


@dataclass(frozen=True)
class _Parts:
    """Partial sums of a stage, ``[count, size]``; groups of ``fan`` neighbours are added first."""

    stage: int
    count: int
    size: int
    fan: int


def forward_kernel(chain: TypedChain, vector: int, with_amax: bool) -> Kernel:
    """``fuser_pointwise`` over vectors of ``vector`` elements."""
    return _kernel("fuser_pointwise", chain.type, chain.forward_rows, vector, with_amax)


def backward_kernel(chain: TypedChain, vector: int, with_amax: bool, with_output: bool) -> Kernel:
    """``fuser_pointwise_backward`` over vectors of ``vector`` elements."""
    rows, flags = chain.backward_rows, (with_amax, with_output)
    return _kernel("fuser_pointwise_backward", chain.type, rows, vector, *flags)


def _steps(chain: TypedChain, rows: int, columns: int) -> int:
    """How often a thread of backward processes ``backward_rows`` rows."""
    if not chain.sums_rows:
        return 1
    most, least = MAX_SUMMED_ROWS, MIN_SUMMING_THREADS
    if not chain.reads_input:
        most, least = 4 * most, least // 4  # a third of the bytes or less, and as many sums
    vectors = -(-columns // chain.widest)
    return max(1, min(rows * vectors // least, most) // chain.backward_rows)


def _parts(chain: TypedChain, rows: int, columns: int, vector: int) -> list[_Parts]:
    """The partial sums of backward; those that are read by vectors come first."""
    assert chain.wanted is not None
    over_rows, over_columns = [], []
    launch = _backward_launch(chain, rows, columns, vector)
    (x, y, z), threads_x = launch.grid, launch.block[0]
    for i, stage in enumerate(chain.stages):
        if not chain.wanted[i]:
            continue
        if stage.name == "bias":
            over_rows.append(_Parts(i, y * z, chain.width(i, columns), 1))
        elif stage.is_scaled:
            count = x * threads_x // min(threads_x, WARP)
            over_columns.append(_Parts(i, count, rows, chain.widest // vector))
    return over_rows + over_columns


@functools.lru_cache(maxsize=4096)
def _kernel(name: str, chain: str, rows: int, vector: int, *flags: bool) -> Kernel:
    arguments = ", ".join((chain, str(rows), str(vector), *map(boolean, flags)))
    return Kernel("pointwise", f"{name}<{arguments}>")


@functools.lru_cache(maxsize=64)
def sum_kernel(dtype: torch.dtype, fan: int) -> Kernel:
    return Kernel("pointwise", f"fuser_sum_parts<{ELEMENTS[dtype]}, {fan}>")


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel of no chain; ``tests/pointwise_instantiations.py`` has some chains."""
    fans = [(dtype, 1) for dtype in ELEMENTS] + [(torch.float32, 4), (torch.float32, 8)]
    return tuple(sum_kernel(*fan) for fan in fans)


# -- launches -----------------------------------------------------------------


def _backward_launch(chain: TypedChain, rows: int, columns: int, vector: int) -> Launch:
    rows_of_thread = chain.backward_rows * _steps(chain, rows, columns)
    most_x = MAX_SUMMING_BLOCK_X if chain.sums_rows else MAX_BLOCK_X
    return _launch(rows, columns, chain.widest, vector, rows_of_thread, most_x)


@functools.lru_cache(maxsize=4096)
def _launch(
    rows: int, columns: int, widest: int, vector: int, rows_of_thread: int, most_x: int
) -> Launch:
    """Threads of ``each`` rows and ``vector`` columns.

    The block is always that of ``widest`` columns a thread. So vectors of 1 and of ``widest``
    columns have the same rows in a thread, and add them in the same order.
    """
    vectors = max(1, -(-columns // widest))
    if vectors < WARP:
        x = 1 << (vectors - 1).bit_length()
    else:
        blocks = -(-vectors // most_x)
        x = -(-vectors // (blocks * WARP)) * WARP
    y = THREADS // x
    chunks = -(-rows // (y * rows_of_thread))
    z = -(-chunks // MAX_GRID_Y)
    return Launch((-(-columns // (vector * x)), -(-chunks // max(1, z)), z), (x, y))


@functools.lru_cache(maxsize=4096)
def _sum_launch(size: int) -> Launch:
    return Launch((-(-size // WARP),), (WARP, 8))


# -- tensors ------------------------------------------------------------------


def _matrix(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and columns of an output."""
    if tensor.dtype != dtype or tensor.dim() == 0 or not tensor.is_contiguous():
        raise InputError(f"{name} is {described(tensor)}; it is contiguous {dtype}.")
    return math.prod(tensor.shape[:-1]), tensor.shape[-1]


def _sizes(name: str, tensor: torch.Tensor, halves: int) -> tuple[int, int]:
    """Rows and columns of an output that is not written, from an input with ``halves`` halves."""
    if tensor.dim() == 0:
        raise InputError(f"{name} is {described(tensor)}; it has rows of columns.")
    if tensor.shape[-1] % halves:
        raise InputError(f"{name} has {tensor.shape[-1]} columns; a gated stage takes two halves.")
    return math.prod(tensor.shape[:-1]), tensor.shape[-1] // halves


def _check_amax(amax: torch.Tensor | None) -> None:
    if amax is not None and (amax.dtype != torch.float32 or amax.numel() != 1):
        raise InputError(f"amax is {described(amax)}; it is one element of float32.")


def _check_workspace(workspace: torch.Tensor | None, size: int) -> None:
    if size and (
        workspace is None
        or workspace.dtype != torch.float32
        or workspace.numel() < size
        or not workspace.is_contiguous()
    ):
        raise InputError(
            f"The workspace is {described(workspace)}; it is contiguous float32 of {size} "
            "elements or more."
        )
