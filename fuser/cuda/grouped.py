"""Launchers of groups of consecutive rows: the functions of ``fuser.reference.grouped``.

Group g has the rows from ``ends[g - 1]`` up to ``ends[g]`` of a matrix ``[rows, columns]``. Padded,
it starts at a multiple of 128 rows, ``padded_ends[g - 1]``. InputError if a tensor does not match
its description; matrices are contiguous.
"""

from __future__ import annotations

import functools

import torch

from fuser.cuda.arguments import ELEMENTS, Producer, Struct, int32
from fuser.cuda.checks import boolean, check_buffer, check_element, is_aligned
from fuser.cuda.launch import TILE, Kernel, Launch
from fuser.cuda.tiled import as_producer, launch_decoder, loads
from fuser.errors import InputError
from fuser.formats import ceil_div, tile_count

THREADS = 256
# Blocks that write zeros: a few for each multiprocessor of the largest GPU.
TAIL_BLOCKS = 512
# A block that adds sums of tiles.
SUM_COLUMNS, SUM_SHARES = 32, 8
INDICES = {torch.int32: "int", torch.int64: "long long"}
_VECTOR_BYTES = 16
_WORDS = {2: "unsigned short", 4: "unsigned", _VECTOR_BYTES: "uint4"}


def group_ends(split_sizes: torch.Tensor, rows: int, *, out: torch.Tensor) -> None:
    """Write where each group ends, int32 ``[G]``, from the sizes of the groups, int32 or int64.

    A size below zero counts as zero, and no group ends after the last of ``rows``, less than 2^31.
    """
    _check_vector("split_sizes", split_sizes, tuple(INDICES), split_sizes.shape)
    _check_vector("out", out, (torch.int32,), split_sizes.shape)
    kernel = _kernel("group_ends", INDICES[split_sizes.dtype])
    kernel(Launch((1,), (32,)), split_sizes, out, int32(len(out)), int32(rows))


def group_tiles(
    split_sizes: torch.Tensor | int,
    rows: int,
    *,
    ends: torch.Tensor,
    padded_ends: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """Write where groups end, also if they are padded to whole tiles, and the rows of each tile.

    ``split_sizes`` are as in :func:`group_ends`, or one size of all groups. ``ends`` and
    ``padded_ends`` are int32 ``[G]``; ``tiles`` are int32 ``[n, 4]``, as the reference's
    ``group_tiles`` describes them, of n = ``tile_count(rows, G)`` tiles, or
    ``tile_count(rows, G, size)``. ``rows`` with padding are less than 2^31.
    """
    groups = len(ends)
    sizes = split_sizes if isinstance(split_sizes, torch.Tensor) else None
    if sizes is not None:
        _check_vector("split_sizes", sizes, tuple(INDICES), (groups,))
    _check_vector("ends", ends, (torch.int32,), (groups,))
    _check_vector("padded_ends", padded_ends, (torch.int32,), (groups,))
    count = tile_count(rows, groups, None if sizes is not None else int(split_sizes))
    check_buffer("group_tiles", "tiles", tiles, torch.int32, (count, 4))
    int32(rows + (TILE - 1) * groups)  # the last end
    kernel = _kernel("group_tiles", "int" if sizes is None else INDICES[sizes.dtype])
    size = int32(0 if isinstance(split_sizes, torch.Tensor) else split_sizes)
    shape = Launch((1,), (THREADS,))
    kernel(shape, sizes, size, ends, padded_ends, tiles, int32(groups), int32(rows), int32(count))


def padded_rows(producer: Producer, tiles: torch.Tensor, *, is_padded: bool = False) -> Producer:
    """The producer of the rows of padded groups, from one of the same rows without padding.

    ``is_padded``: the rows of ``producer`` are padded too, and what is in their padding is not
    read. Kernels leave the tiles after the last group as they are.
    """
    alone = producer.alone
    return Producer(
        f"fuser::GroupedProducer<{producer.type}>",
        Struct((*producer.argument.fields, tiles, int32(is_padded))),
        tiles.shape[0] * TILE,
        producer.columns,
        producer.dtype,
        producer.is_aligned,
        None if alone is None else padded_rows(alone, tiles, is_padded=is_padded),
    )


def pad(x: torch.Tensor, tiles: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write the padded rows of ``x`` to ``out [128 n, columns]``, up to the last group.

    Moves ``2 b`` bytes an element. ``tiles`` are int32 ``[n, 4]``.
    """
    producer = padded_rows(as_producer("pad", x), tiles)
    check_buffer("pad", "out", out, x.dtype, (producer.rows, producer.columns))
    if producer.is_aligned and not is_aligned(out, _VECTOR_BYTES):
        raise InputError("pad takes an output whose address is a multiple of 16 bytes.")
    launch_decoder(
        Kernel("grouped_fp8", f"fuser_tiled_rows<{producer.type}>"),
        producer.argument,
        out,
        producer.rows,
        producer.columns,
        False,
    )


def unpad(
    padded: torch.Tensor, ends: torch.Tensor, padded_ends: torch.Tensor, *, out: torch.Tensor
) -> None:
    """Write the rows of groups from those of padded groups; zeros after the last group.

    Moves ``2 b`` bytes an element. ``ends`` and ``padded_ends`` are int32 ``[G]``.
    """
    rows, columns, _, width = _matrix(out)
    check_buffer("unpad", "padded", padded, out.dtype, (len(padded), columns))
    _check_vector("ends", ends, (torch.int32,), ends.shape)
    _check_vector("padded_ends", padded_ends, (torch.int32,), ends.shape)
    if not is_aligned(padded, _VECTOR_BYTES):
        width = 1
    kernel = _kernel("unpad", _WORDS[width * out.element_size()])
    launch = Launch((rows if columns else 0,), (THREADS,))
    kernel(launch, padded, out, ends, padded_ends, int32(len(ends)), int32(columns // width))


def zero_tail(ends: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write zeros into the rows of ``out``, contiguous, after the last group."""
    rows, columns, element, width = _matrix(out)
    _check_vector("ends", ends, (torch.int32,), ends.shape)
    launch = Launch((min(rows, TAIL_BLOCKS) if columns else 0,), (THREADS,))
    kernel = _kernel("zero_tail", element, width)
    kernel(launch, out, ends, int32(len(ends)), int32(rows), int32(columns))


def add_bias(
    ends: torch.Tensor, bias: torch.Tensor, scales: torch.Tensor | None, *, out: torch.Tensor
) -> None:
    """Add to each row of ``out`` the bias of its group, times the scale of the row.

    Rows after the last group become zero. Reads and writes ``out``, contiguous, once. ``bias`` is
    ``[G, columns]``, and ``scales``, 1 if None, are ``[rows]``, in the dtype of ``out``, to which
    the product of both is rounded.
    """
    rows, columns, element, width = _matrix(out)
    _check_vector("ends", ends, (torch.int32,), ends.shape)
    if bias.shape != (len(ends), columns) or bias.dtype != out.dtype or not bias.is_contiguous():
        raise InputError(
            f"add_bias takes a contiguous bias [{len(ends)}, {columns}] of {out.dtype}; got "
            f"{tuple(bias.shape)} of {bias.dtype} with strides {bias.stride()}."
        )
    if scales is not None:
        _check_vector("scales", scales, (out.dtype,), (rows,))
    if not is_aligned(bias, _VECTOR_BYTES):
        width = 1
    kernel = _kernel("grouped_bias", element, width, boolean(scales is not None))
    launch = Launch((rows if columns else 0,), (THREADS,))
    kernel(launch, out, bias, scales, ends, int32(len(ends)), int32(columns))


def sum_groups(parts: torch.Tensor, padded_ends: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write the sums over the tiles of each group, in fp32, in an order that the sizes determine.

    ``parts``, contiguous fp32 ``[tiles, columns]`` of each 128 padded rows, are read up to the last
    group; ``out`` is fp32, fp16 or bf16 ``[G, columns]``, and has zeros for groups without rows.
    """
    groups, (tiles, columns) = len(padded_ends), parts.shape
    _check_vector("padded_ends", padded_ends, (torch.int32,), padded_ends.shape)
    check_buffer("sum_groups", "parts", parts, torch.float32, (tiles, columns))
    check_buffer("sum_groups", "out", out, out.dtype, (groups, columns))
    launch = Launch((ceil_div(columns, SUM_COLUMNS), groups), (SUM_COLUMNS, SUM_SHARES))
    kernel = _kernel("sum_groups", check_element("sum_groups", out))
    kernel(launch, parts, out, padded_ends, int32(columns))


def _matrix(out: torch.Tensor) -> tuple[int, int, str, int]:
    """Rows, columns, the C++ name of an element, and the elements that a thread takes at once."""
    element = check_element("grouped", out)
    if out.dim() != 2 or not out.is_contiguous():
        raise InputError(
            f"grouped takes a contiguous matrix; got shape {tuple(out.shape)} with strides "
            f"{out.stride()}."
        )
    rows, columns = out.shape
    width = _VECTOR_BYTES // out.element_size()
    if columns % width or not is_aligned(out, _VECTOR_BYTES):
        width = 1
    return rows, columns, element, width


def _check_vector(
    name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    is_vector = (x.dim() == 1 and x.numel() > 0) or (x.dim() == 1 and shape == (0,))
    if not is_vector or tuple(x.shape) != tuple(shape) or x.dtype not in dtypes:
        raise InputError(
            f"grouped takes {name} of shape {tuple(shape)} in {' or '.join(map(str, dtypes))}; got "
            f"{tuple(x.shape)} of {x.dtype}."
        )
    if not x.is_contiguous():
        raise InputError(f"grouped takes contiguous {name}; got strides {x.stride()}.")


# -- kernels --------------------------------------------------------------------


@functools.cache
def _kernel(name: str, *arguments: object) -> Kernel:
    return Kernel("grouped", f"fuser_{name}<{', '.join(map(str, arguments))}>")


def instantiations() -> list[Kernel]:
    """Every kernel of this module."""
    kernels = [_kernel(name, i) for i in INDICES.values() for name in ("group_ends", "group_tiles")]
    kernels += [_kernel("unpad", word) for word in _WORDS.values()]
    kernels += [_kernel("sum_groups", element) for element in ELEMENTS.values()]
    for element in ELEMENTS.values():
        for aligned in (False, True):
            producer = f"fuser::GroupedProducer<{loads(element, aligned)}>"
            kernels.append(Kernel("grouped_fp8", f"fuser_tiled_rows<{producer}>"))
    for dtype, element in ELEMENTS.items():
        for width in (1, _VECTOR_BYTES // dtype.itemsize):
            kernels.append(_kernel("zero_tail", element, width))
            kernels += [_kernel("grouped_bias", element, width, flag) for flag in ("false", "true")]
    return kernels
