"""Launchers of the permutation by expert: the functions of ``fuser.reference.permutation``.

The maps ``row_map`` and ``inverse_map`` are those of the reference. A kernel reads and writes only
rows that exist, whatever is in ``inverse_map``; every -1 of ``row_map`` must be after all
other numbers, as :func:`sort_by_expert` writes it. ``x``, ``y`` and ``dout`` are fp32, fp16 or
bf16, with adjacent elements in a row. InputError if a tensor does not match its description.
"""

from __future__ import annotations

import functools
import math

import torch

from fuser.cuda.arguments import ELEMENTS, Producer, Struct, int32, int64
from fuser.cuda.checks import boolean, check_buffer, check_element, check_matrix, is_aligned
from fuser.cuda.launch import Kernel, Launch
from fuser.cuda.tiled import as_producer
from fuser.errors import InputError
from fuser.formats import ceil_div

THREADS = 256
WARP = 32
WARPS = THREADS // WARP
MAX_GRID_Y = 65535

MAX_EXPERTS = 1024
"""More would not fit the 48 KB of shared memory that every block has: 40 bytes an expert."""
MAX_ASSIGNMENTS = 2**31 - 2**16

# One block sorts so many assignments alone, 16 for a thread, and saves a launch.
SINGLE_BLOCK = 4096
# Assignments of a block otherwise. Each block reads the counts of all blocks, so there are not more
# than MAX_BLOCKS: with 256 experts these are 128 KB, from L2.
CHUNK = 1024
MAX_BLOCKS = 128

# Tokens of a thread in fuser_permute: 64 bytes in flight.
TOKENS = 4
VECTOR_BYTES = 16
DOT_COLUMNS = 8

INDICES = {torch.int32: "int", torch.int64: "long long"}
# C++ types of 16, 4 and 2 bytes: a row is moved in the widest that fits its place.
WORDS = {16: "uint4", 4: "unsigned", 2: "unsigned short"}

# -- launchers ----------------------------------------------------------------


def sort_by_expert(
    expert_indices: torch.Tensor,
    split_sizes: torch.Tensor,
    row_map: torch.Tensor,
    inverse_map: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    """Write the split sizes and the maps of a stable sort by expert.

    Integer atomics in shared memory count; every place follows from the counts, so the result does
    not depend on the order of threads. One launch up to 4096 assignments, two above.

    ``expert_indices`` are int32 or int64 ``[T, k]``, contiguous; an index outside of the experts,
    of which there are 1 to 1024, drops its assignment. ``counts``, int32 of the shape
    :func:`counts_shape`, are overwritten.
    """
    name = "sort_by_expert"
    index = INDICES.get(expert_indices.dtype)
    if index is None:
        raise InputError(f"{name} takes indices of int32 and int64, not {expert_indices.dtype}.")
    tokens, choices = _check_indices(name, expert_indices)
    check_buffer(name, "expert_indices", expert_indices, expert_indices.dtype, (tokens, choices))
    experts, rows = split_sizes.numel(), row_map.numel()
    check_buffer(name, "split_sizes", split_sizes, torch.int32, (experts,))
    check_buffer(name, "row_map", row_map, torch.int32, (rows,))
    check_buffer(name, "inverse_map", inverse_map, torch.int32, (tokens, choices))
    if not 1 <= experts <= MAX_EXPERTS:
        raise InputError(f"{name} takes 1 to {MAX_EXPERTS} experts, not {experts}.")
    count = tokens * choices
    if count > MAX_ASSIGNMENTS:
        raise InputError(f"{name} takes up to {MAX_ASSIGNMENTS} assignments, not {count}.")
    shape = counts_shape(count, experts)
    if (counts is None) != (shape is None):
        raise InputError(f"{name} of {count} assignments needs counts of shape {shape}.")
    if shape is not None:
        check_buffer(name, "counts", counts, torch.int32, shape)
    blocks, chunk = _chunks(count)
    if counts is not None:
        launch = Launch((blocks,), (THREADS,), 4 * experts)
        of_chunks = (int32(count), int32(experts), int32(chunk))
        _kernel("count_experts", index)(launch, expert_indices, counts, *of_chunks)
    launch = Launch((blocks,), (THREADS,), 4 * (WARPS + 2) * experts)
    outputs = (split_sizes, row_map, inverse_map)
    sizes = (int32(count), int32(experts), int32(chunk), int32(rows))
    _kernel("sort_by_expert", index)(launch, expert_indices, counts, *outputs, *sizes)


def counts_shape(assignments: int, experts: int) -> tuple[int, int] | None:
    """The shape of the workspace of :func:`sort_by_expert`; None if it needs none."""
    blocks, _ = _chunks(assignments)
    return (blocks, experts) if blocks > 1 else None


def permute(
    x: torch.Tensor, row_map: torch.Tensor, inverse_map: torch.Tensor, y: torch.Tensor
) -> None:
    """Write ``y[inverse_map[t, j]] = x[t]``, and 0 into the rows of ``y`` without an assignment.

    Moves the bytes of ``x [T, hidden]`` once and those of ``y [rows, hidden]``, contiguous, once.
    """
    name = "permute"
    tokens, columns = check_matrix(name, x)
    check_element(name, x)
    rows, choices = _check_maps(name, row_map, inverse_map, tokens)
    check_buffer(name, "y", y, x.dtype, (rows, columns))
    size, row_bytes, stride_bytes = x.element_size(), columns * x.element_size(), _stride_bytes(x)
    word = next(
        width
        for width in (*WORDS, size)
        if row_bytes % width == stride_bytes % width == 0 and is_aligned(x, width)
        if is_aligned(y, width)
    )
    launch = _launch(max(tokens, 1), row_bytes // word, TOKENS, is_empty=rows == 0)
    sizes = (int32(tokens), int32(choices), int32(rows), int32(row_bytes // word))
    _kernel("permute", WORDS[word], TOKENS)(
        launch, x, row_map, inverse_map, y, *sizes, int64(stride_bytes // word)
    )


def gathered_rows(x: torch.Tensor, row_map: torch.Tensor, choices: int) -> Producer:
    """The producer of the rows that :func:`permute` writes, which reads them by ``row_map``.

    Its numbers are below ``T * choices``, of ``choices`` experts of a token. Rows of a negative
    number are zeros, wherever they are.
    """
    name = "gathered_rows"
    loaded = as_producer(name, x)
    rows = row_map.numel()
    check_buffer(name, "row_map", row_map, torch.int32, (rows,))
    if choices < 1:
        raise InputError(f"{name} takes a positive number of choices; got {choices}.")
    return Producer(
        gathers(ELEMENTS[x.dtype], loaded.is_aligned),
        Struct((*loaded.argument.fields, row_map, int32(choices))),
        rows,
        *loaded[3:],
    )


def gathers(element: str, aligned: bool) -> str:
    """The C++ type of the producer that reads rows of that element by an index."""
    return f"fuser::GatheredProducer<{element}, {boolean(aligned)}>"


def unpermute(
    y: torch.Tensor, inverse_map: torch.Tensor, probs: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write ``out[t] = sum over j of y[inverse_map[t, j]] * probs[t, j]``, in fp32.

    Reads the rows of y in use once, and no others. The sum is in the order of j and begins with 0;
    every product and every sum is rounded to nearest. ``probs`` are fp32 ``[T, k]``, 1 if None;
    ``out [T, hidden]`` is contiguous, in the dtype of y.
    """
    name = "unpermute"
    rows, columns = check_matrix(name, y)
    element = check_element(name, y)
    tokens, choices = _check_indices(name, inverse_map)
    check_buffer(name, "inverse_map", inverse_map, torch.int32, (tokens, choices))
    check_buffer(name, "probs", probs, torch.float32, (tokens, choices))
    check_buffer(name, "out", out, y.dtype, (tokens, columns))
    vector = VECTOR_BYTES // y.element_size()
    aligned = columns % vector == 0 and _rows_are_aligned(y) and is_aligned(out, VECTOR_BYTES)
    launch = _launch(tokens, ceil_div(columns, vector), 1, is_empty=False)
    sizes = (int32(tokens), int32(choices), int32(rows), int32(columns))
    _kernel("unpermute", element, boolean(probs is not None), boolean(aligned))(
        launch, y, inverse_map, probs, out, *sizes, int64(y.stride(0))
    )


def unpermute_backward(
    dout: torch.Tensor,
    y: torch.Tensor | None,
    row_map: torch.Tensor,
    inverse_map: torch.Tensor,
    probs: torch.Tensor,
    dy: torch.Tensor,
    dprobs: torch.Tensor | None,
) -> None:
    """Write the gradients of the inputs of :func:`unpermute`.

    Reads dout, and y if dprobs are wanted, and writes dy, each once; a token's row of dout is read
    k times, mostly from caches. ``dy`` is 0 in rows without an assignment; ``probs`` and ``dprobs``
    are fp32 ``[T, k]``.
    """
    name = "unpermute_backward"
    tokens, columns = check_matrix(name, dout)
    element = check_element(name, dout)
    rows, choices = _check_maps(name, row_map, inverse_map, tokens)
    check_buffer(name, "probs", probs, torch.float32, (tokens, choices))
    check_buffer(name, "dy", dy, dout.dtype, (rows, columns))
    check_buffer(name, "dprobs", dprobs, torch.float32, (tokens, choices))
    if (y is None) != (dprobs is None):
        raise InputError(f"{name} needs both y and dprobs, or neither.")
    if y is not None and (y.dtype != dout.dtype or check_matrix(name, y) != (rows, columns)):
        raise InputError(
            f"{name} needs y of shape {(rows, columns)} in {dout.dtype}; got {tuple(y.shape)} in "
            f"{y.dtype}."
        )
    aligned = (
        columns % DOT_COLUMNS == 0
        and _rows_are_aligned(dout)
        and (y is None or _rows_are_aligned(y))
        and is_aligned(dy, VECTOR_BYTES)
    )
    count = tokens * choices
    blocks = ceil_div(max(count, 1), WARPS) if rows or dprobs is not None else 0
    sizes = (int32(count), int32(choices), int32(rows), int32(columns))
    strides = (int64(dout.stride(0)), int64(0 if y is None else y.stride(0)))
    _kernel("unpermute_backward", element, boolean(y is not None), boolean(aligned))(
        Launch((blocks,), (THREADS,)),
        *(dout, y, row_map, inverse_map, probs, dy, dprobs),
        *sizes,
        *strides,
    )


# -- kernels ------------------------------------------------------------------


@functools.cache
def _kernel(name: str, *arguments: object) -> Kernel:
    return Kernel("permutation", f"fuser_{name}<{', '.join(map(str, arguments))}>")


def instantiations() -> tuple[Kernel, ...]:
    """Every kernel of these launchers."""
    by_index, by_flags = ("count_experts", "sort_by_expert"), ("unpermute", "unpermute_backward")
    flags = ("false", "true")
    types = [(e, a, b) for e in ELEMENTS.values() for a in flags for b in flags]
    return (
        *(_kernel(name, index) for name in by_index for index in INDICES.values()),
        *(_kernel("permute", word, TOKENS) for word in WORDS.values()),
        *(_kernel(name, *arguments) for name in by_flags for arguments in types),
    )


# -- launches -----------------------------------------------------------------


def _chunks(assignments: int) -> tuple[int, int]:
    """The number of blocks that sort, and the assignments of each."""
    blocks = 1
    if assignments > SINGLE_BLOCK:
        blocks = min(ceil_div(assignments, CHUNK), MAX_BLOCKS)
    chunk = ceil_div(max(assignments, 1), blocks * THREADS) * THREADS
    return max(1, ceil_div(assignments, chunk)), chunk


@functools.lru_cache(maxsize=1024)
def _launch(tokens: int, vectors: int, tokens_of_thread: int, is_empty: bool) -> Launch:
    """Threads of ``each`` tokens and one of ``vectors`` of a row."""
    if is_empty or tokens == 0 or vectors == 0:
        return Launch((0,), (THREADS,))
    x = min(1 << (vectors - 1).bit_length(), THREADS)
    if x == THREADS:  # the fewest idle threads
        x = ceil_div(vectors, ceil_div(vectors, THREADS) * WARP) * WARP
    y = THREADS // x
    chunks = ceil_div(tokens, y * tokens_of_thread)
    z = ceil_div(chunks, MAX_GRID_Y)
    return Launch((ceil_div(vectors, x), ceil_div(chunks, z), z), (x, y))


# -- checks -------------------------------------------------------------------


def _check_indices(name: str, indices: torch.Tensor) -> tuple[int, int]:
    if indices.dim() != 2:
        raise InputError(f"{name} takes one row a token, [T, k]; got {tuple(indices.shape)}.")
    tokens, choices = indices.shape
    return tokens, choices


def _check_maps(
    name: str, row_map: torch.Tensor, inverse_map: torch.Tensor, tokens: int
) -> tuple[int, int]:
    rows, choices = row_map.numel(), _check_indices(name, inverse_map)[1]
    check_buffer(name, "row_map", row_map, torch.int32, (rows,))
    check_buffer(name, "inverse_map", inverse_map, torch.int32, (tokens, choices))
    return rows, choices


def _stride_bytes(x: torch.Tensor) -> int:
    return x.stride(0) * x.element_size()


def _rows_are_aligned(x: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    return math.gcd(x.data_ptr(), _stride_bytes(x)) % VECTOR_BYTES == 0
