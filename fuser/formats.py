"""Number formats and block geometry: constants, shapes and paddings; no tensors.

``M`` is the product of a tensor's leading dimensions and ``K`` its last one. Rowwise blocks run
along K, columnwise blocks along M.
"""

from __future__ import annotations

import enum
import functools
import math
from typing import Literal, NamedTuple

import torch

from fuser.errors import InputError

MXFP8_BLOCK = 32
FP8_BLOCK = 128
NVFP4_BLOCK = 16
BlockScalingDim = Literal[1, 2]
"""FP8 blocks of 1x128 or of 128x128 elements."""
GROUP_TILE = 128
"""Padded groups of rows have whole tiles of this many rows, so no two groups share a block."""
# Signs of the random Hadamard transform: if bit i is set, element i of every 16 changes sign.
HADAMARD_SIGNS = 0xD7E8

# Scales of MXFP8 and NVFP4 are padded to whole tiles of 128 rows and 4 blocks, which block-scaled
# tensor cores read at once. fp32 scales of FP8 blocks are padded to 16 bytes, which are 4 scales.
SCALE_TILE_ROWS = 128
SCALE_TILE_BLOCKS = 4
FP8_BLOCK_SCALE_ALIGNMENT = 4


class DType(enum.Enum):
    """An element type: the types of quantized data, and unquantized types.

    ``torch_dtype`` is the dtype as which torch views its bytes. torch has no arithmetic for E2M1;
    its ``torch_dtype`` is that of the storage: uint8, two values in a byte, the low nibble first.
    """

    kByte = ("uint8", None, torch.uint8)
    kInt32 = ("int32", None, torch.int32)
    kInt64 = ("int64", None, torch.int64)
    kFloat32 = ("float32", None, torch.float32)
    kFloat16 = ("float16", None, torch.float16)
    kBFloat16 = ("bfloat16", None, torch.bfloat16)
    kFloat8E4M3 = ("E4M3", 448.0, torch.float8_e4m3fn)
    kFloat8E5M2 = ("E5M2", 57344.0, torch.float8_e5m2)
    kFloat4E2M1 = ("E2M1", 6.0, torch.uint8)

    def __init__(self, label: str, largest: float | None, torch_dtype: torch.dtype) -> None:
        self.label = label
        self._largest = largest
        self.torch_dtype = torch_dtype

    @property
    def max(self) -> float:
        """The largest finite value of a type of quantized data.

        Raises
        ------
        InputError
            If it is an unquantized type.
        """
        if self._largest is None:
            quantized = ", ".join(dtype.name for dtype in DType if dtype._largest is not None)
            raise InputError(
                f"DType.{self.name} is a plain type, and no tensor is quantized to it; the "
                f"formats are {quantized}."
            )
        return self._largest

    # Enum's own `__hash__` is a slow Python function; plans and launches are looked up by formats.
    __hash__ = object.__hash__


def check_fp8_dtype(name: str, dtype: DType) -> None:
    """Raise if ``dtype`` is not an element type of the quantizer ``name``."""
    if dtype not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        raise InputError(
            f"{name} got fp8_dtype {dtype}; it must be DType.kFloat8E4M3 or DType.kFloat8E5M2."
        )


def ceil_div(n: int, divisor: int) -> int:
    """``n / divisor``, rounded up."""
    return -(-n // divisor)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``n``."""
    return ceil_div(n, multiple) * multiple


def padded_shape(m: int, k: int, multiple: int) -> tuple[int, int]:
    """``[m, k]`` padded to whole blocks: both sizes rounded up to a multiple."""
    return round_up(m, multiple), round_up(k, multiple)


class Size(NamedTuple):
    """The size of one dimension of a buffer of a tensor ``[M, K]``.

    The blocks of ``unit`` rows in M, or of ``unit`` columns in K, rounded up to a multiple of
    ``padding``.
    """

    of: Literal["M", "K"]
    unit: int = 1
    padding: int = 1


class Buffer(NamedTuple):
    """One buffer of a quantized tensor ``[M, K]``.

    ``sizes`` are those of its dimensions; without any it has one value, of the whole tensor.
    ``usage`` is the copy that it belongs to; None: both. Kernels write it at a multiple of
    ``alignment`` bytes.
    """

    usage: Literal["rowwise", "columnwise"] | None
    sizes: tuple[Size, ...] = ()
    dtype: torch.dtype = torch.uint8
    alignment: int = 1

    def shape(self, m: int, k: int) -> tuple[int, ...]:
        """The shape in a tensor ``[m, k]``."""
        return tuple(
            -(-(m if of == "M" else k) // (unit * padding)) * padding
            for of, unit, padding in self.sizes
        ) or (1,)


class Layout:
    """The buffers of a quantized tensor ``[M, K]``, by name.

    Tensors are allocated, checked, cut into views, sharded, gathered and grouped by it. M and K
    are first rounded up to multiples of ``multiple``.

    ``rowwise`` and ``columnwise`` are the names of the buffers of each copy, in the same order, the
    data first; ``shared`` those of both copies. ``rows`` has for each buffer the dimension that
    indexes rows, and the number of rows that share an entry; a buffer that is not there belongs to
    all rows. ``scope`` says which rows scales belong to: those of ``"blocks"``, the whole
    ``"tensor"``, or ``"groups"`` of rows, which start at multiples of 128.
    """

    def __init__(
        self, buffers: dict[str, Buffer], multiple: int = 1, scope: str | None = None
    ) -> None:
        self.buffers = buffers
        self.multiple = multiple
        self.rowwise = tuple(n for n, buffer in buffers.items() if buffer.usage == "rowwise")
        self.columnwise = tuple(n for n, buffer in buffers.items() if buffer.usage == "columnwise")
        self.shared = tuple(n for n, buffer in buffers.items() if buffer.usage is None)
        self.rows = {
            name: (dim, size.unit)
            for name, buffer in buffers.items()
            for dim, size in enumerate(buffer.sizes)
            if size.of == "M"
        }
        self.scope = scope or ("blocks" if self.rows.keys() == buffers.keys() else "tensor")
        _LAYOUTS[self._contents()] = self

    def _contents(self) -> tuple[tuple[tuple[str, Buffer], ...], int, str]:
        return tuple(self.buffers.items()), self.multiple, self.scope

    def __reduce__(self) -> tuple[object, ...]:
        # A copy is the same object: layouts are compared by identity, which is fast.
        return _known, self._contents()

    def shapes(self, m: int, k: int) -> dict[str, tuple[int, ...]]:
        """The shape of each buffer of a tensor ``[m, k]``."""
        m, k = padded_shape(m, k, self.multiple)
        return {name: buffer.shape(m, k) for name, buffer in self.buffers.items()}

    def unpadded_columns(self, k: int) -> dict[str, int]:
        """By buffer with padding in the dimension of columns: its size there without padding."""
        k = round_up(k, self.multiple)
        return {
            name: ceil_div(k, size.unit)
            for name, buffer in self.buffers.items()
            for size in buffer.sizes
            if size.of == "K" and size.padding > 1
        }

    @functools.cached_property
    def of_groups(self) -> Layout:
        """The layout of groups of rows: a value of the whole tensor becomes one for 128 rows."""
        if self.scope == "blocks":
            return self
        tiles = (Size("M", GROUP_TILE),)
        buffers = (
            (name, buffer if buffer.sizes else buffer._replace(sizes=tiles))
            for name, buffer in self.buffers.items()
        )
        return _known(tuple(buffers), self.multiple, "groups")


def buffers_for_kernels(
    layout: Layout, m: int, k: int
) -> tuple[tuple[str, Buffer, tuple[int, ...]], ...]:
    """Name, description and shape of each buffer of a tensor ``[m, k]``; for every launch."""
    try:
        return _known_buffers(layout, m, k)
    except TypeError:  # symbolic sizes have no hash
        return _known_buffers.__wrapped__(layout, m, k)


@functools.lru_cache(maxsize=1024)
def _known_buffers(
    layout: Layout, m: int, k: int
) -> tuple[tuple[str, Buffer, tuple[int, ...]], ...]:
    shapes = layout.shapes(m, k)
    return tuple((name, buffer, shapes[name]) for name, buffer in layout.buffers.items())


_LAYOUTS: dict[tuple[object, ...], Layout] = {}


def _known(buffers: tuple[tuple[str, Buffer], ...], multiple: int, scope: str) -> Layout:
    """The one layout of these contents."""
    return _LAYOUTS.get((buffers, multiple, scope)) or Layout(dict(buffers), multiple, scope)


def _layout(
    rowwise: tuple[Size, ...],
    columnwise: tuple[Size, ...],
    rowwise_scales: tuple[Size, ...],
    columnwise_scales: tuple[Size, ...],
    dtype: torch.dtype,
    multiple: int = 1,
    **others: Buffer,
) -> Layout:
    """The layout of copies that have scales of their own."""
    buffers = {
        "_rowwise_data": Buffer("rowwise", rowwise),
        "_columnwise_data": Buffer("columnwise", columnwise),
        "_rowwise_scale_inv": Buffer("rowwise", rowwise_scales, dtype, 16),
        "_columnwise_scale_inv": Buffer("columnwise", columnwise_scales, dtype, 16),
    }
    return Layout(buffers | others, multiple)


_M, _K = Size("M"), Size("K")

FP8 = Layout(
    {
        "_rowwise_data": Buffer("rowwise", (_M, _K)),
        "_columnwise_data": Buffer("columnwise", (_K, _M)),
        "_scale_inv": Buffer(None, dtype=torch.float32),
    }
)
"""FP8 with one scale a tensor: ``[M, K]``, and transposed ``[K, M]``."""

FP8_ROWS = _layout((_M, _K), (_K, _M), (_M,), (_K,), torch.float32)
"""FP8 with one scale a row of a copy: ``[M]`` and ``[K]``."""

FP8_BLOCKS: dict[int, Layout] = {
    1: _layout(
        (_M, _K),
        (_K, _M),
        (Size("K", FP8_BLOCK), Size("M", padding=FP8_BLOCK_SCALE_ALIGNMENT)),
        (Size("M", FP8_BLOCK), Size("K", padding=FP8_BLOCK_SCALE_ALIGNMENT)),
        torch.float32,
    ),
    2: _layout(
        (_M, _K),
        (_K, _M),
        (Size("M", FP8_BLOCK), Size("K", FP8_BLOCK, FP8_BLOCK_SCALE_ALIGNMENT)),
        (Size("K", FP8_BLOCK), Size("M", FP8_BLOCK, FP8_BLOCK_SCALE_ALIGNMENT)),
        torch.float32,
    ),
}
"""FP8 in blocks of 1x128 and of 128x128. Scales of 1x128 are ``[K / 128, M]`` and ``[M / 128, K]``,
so that scales of neighbouring blocks in the other dimension are adjacent in memory."""

_MXFP8_SCALES = (
    (Size("M", padding=SCALE_TILE_ROWS), Size("K", MXFP8_BLOCK, SCALE_TILE_BLOCKS)),
    (Size("M", MXFP8_BLOCK, SCALE_TILE_BLOCKS), Size("K", padding=SCALE_TILE_ROWS)),
)
MXFP8 = _layout((_M, _K), (_M, _K), *_MXFP8_SCALES, torch.uint8, MXFP8_BLOCK)
"""MXFP8: no copy is transposed; E8M0 scales ``[M, K / 32]`` and ``[M / 32, K]``."""

MXFP8_SWIZZLED = _layout(
    (_M, _K), (_M, _K), _MXFP8_SCALES[0], _MXFP8_SCALES[1][::-1], torch.uint8, MXFP8_BLOCK
)
"""As MXFP8, with the columnwise scales transposed: how block-scaled tensor cores read scales."""

NVFP4 = _layout(
    (_M, Size("K", 2)),
    (_K, Size("M", 2)),
    (Size("M", padding=SCALE_TILE_ROWS), Size("K", NVFP4_BLOCK, SCALE_TILE_BLOCKS)),
    (Size("K", padding=SCALE_TILE_ROWS), Size("M", NVFP4_BLOCK, SCALE_TILE_BLOCKS)),
    torch.uint8,
    NVFP4_BLOCK,
    _amax_rowwise=Buffer("rowwise", dtype=torch.float32),
    _amax_columnwise=Buffer("columnwise", dtype=torch.float32),
)
"""NVFP4: two elements a byte, transposed in the columnwise copy; E4M3 scales ``[M, K / 16]`` and
``[K, M / 16]``; the amax of each copy."""


NVFP4_ROWS = Layout(
    {
        **NVFP4.buffers,
        "_amax_rowwise": Buffer("rowwise", (_M,), torch.float32),
        "_amax_columnwise": Buffer("columnwise", (_K,), torch.float32),
    },
    NVFP4_BLOCK,
)
"""As NVFP4, with an amax for each row of a copy: ``[M]`` and ``[K]``."""

UNQUANTIZED = Layout(
    {
        "_rowwise_data": Buffer("rowwise", (_M, _K), torch.float32),
        "_columnwise_data": Buffer("columnwise", (_M, _K), torch.float32),
    }
)
"""Values as they are, for both copies; their dtype may be another one."""

HYBRID = Layout(dict(NVFP4.buffers))
"""The names of the buffers of copies in two formats; which there are, and their shapes, depend on
the formats (:func:`hybrid_layout`)."""


def names_of_copy(layout: Layout, usage: str) -> tuple[str, ...]:
    """The buffers that the ``"rowwise"`` or the ``"columnwise"`` copy consists of, data first."""
    names = layout.rowwise if usage == "rowwise" else layout.columnwise
    return names + layout.shared


def unquantized_format(dtype: torch.dtype | None = None) -> NumberFormat:
    """The format of values as they are, or rounded to a dtype."""
    name = "unquantized" if dtype is None else f"unquantized {dtype}"
    return NumberFormat(name, DType.kFloat32, UNQUANTIZED, has_kernel=False)


@functools.lru_cache(maxsize=256)
def hybrid_layout(rowwise: Layout, columnwise: Layout) -> Layout:
    """The layout of a rowwise copy of one layout, and a columnwise copy of another."""
    buffers: dict[str, Buffer] = {}
    copies: tuple[tuple[Literal["rowwise", "columnwise"], Layout], ...]
    copies = (("rowwise", rowwise), ("columnwise", columnwise))
    for usage, layout in copies:
        for slot, name in zip(
            names_of_copy(HYBRID, usage), names_of_copy(layout, usage), strict=False
        ):
            buffers[slot] = layout.buffers[name]._replace(usage=usage)
    multiple = max(rowwise.multiple, columnwise.multiple)  # powers of two
    return _known(tuple(buffers.items()), multiple, "tensor")


def hybrid_format(rowwise: NumberFormat, columnwise: NumberFormat) -> NumberFormat:
    """The format of tensors whose copies are in two formats."""
    return NumberFormat(
        f"{rowwise} / {columnwise}",
        DType.kFloat32,
        hybrid_layout(rowwise.layout, columnwise.layout),
        has_kernel=False,
        parts=(rowwise, columnwise),
    )


class NumberFormat(NamedTuple):
    """The format of a quantized tensor: its elements, where they and their scales are stored.

    ``name`` is the name of the format, with its block geometry if there are several.
    ``block_size`` is the number of elements that share a scale; 0 if ``layout`` alone says so.
    If ``has_kernel`` is False, torch quantizes to it on every device. The ``element`` of values
    that are not quantized, and of copies in two formats, is a plain type; ``parts`` are the formats
    of a rowwise and a columnwise copy in two.
    """

    name: str
    element: DType
    layout: Layout = FP8
    block_size: int = 0
    has_kernel: bool = True
    parts: tuple[NumberFormat, NumberFormat] | None = None

    def __str__(self) -> str:
        is_plain = self.is_unquantized or self.parts is not None
        return self.name if is_plain else f"{self.name} {self.element.label}"

    @property
    def is_unquantized(self) -> bool:
        """Whether these are values as they are."""
        return self.layout is UNQUANTIZED

    def of(self, usage: str) -> NumberFormat:
        """The format of the ``"rowwise"`` or the ``"columnwise"`` copy."""
        return self if self.parts is None else self.parts[usage == "columnwise"]

    @property
    def multiple(self) -> int:
        """Data is padded with zeros to multiples of this number in both dimensions."""
        return self.layout.multiple

    @property
    def has_one_scale(self) -> bool:
        """Whether the whole tensor has one scale."""
        return bool(self.layout.shared)

    def nbytes(self, shape: tuple[int, ...], copies: tuple[str, ...]) -> int:
        """Bytes of copies of a tensor ``[..., K]``: elements and scales, without padding.

        ``copies`` has ``"rowwise"``, ``"columnwise"`` or both.
        """
        m, k = math.prod(shape[:-1]), shape[-1]
        total = 0
        for copy in copies:
            # Square blocks of MXFP8 and NVFP4 store their scale once for each row.
            for name in names_of_copy(self.layout, copy)[:2]:
                buffer = self.layout.buffers[name]
                counts = (ceil_div(m if of == "M" else k, unit) for of, unit, _ in buffer.sizes)
                total += math.prod(counts) * buffer.dtype.itemsize
        return total

    def pads(self, shape: tuple[int, ...]) -> bool:
        """Whether quantizing pads a tensor ``[..., K]`` of this shape."""
        multiple = self.multiple
        return math.prod(shape[:-1]) % multiple != 0 or shape[-1] % multiple != 0


def mxfp8_scale_shape(m: int, k: int, columnwise: bool) -> tuple[int, ...]:
    """Shape of the padded E8M0 scales of an MXFP8 tensor ``[m, k]``."""
    return scale_shape(MXFP8, m, k, columnwise)


def nvfp4_scale_shape(m: int, k: int, columnwise: bool) -> tuple[int, ...]:
    """Shape of the padded E4M3 scales of an NVFP4 tensor ``[m, k]``."""
    return scale_shape(NVFP4, m, k, columnwise)


def fp8_block_scale_shape(m: int, k: int, columnwise: bool, block_dim: int) -> tuple[int, ...]:
    """Shape of the padded fp32 ``scale_inv`` of a tensor ``[m, k]`` in FP8 blocks of 128."""
    return scale_shape(fp8_blocks(block_dim), m, k, columnwise)


def scale_shape(layout: Layout, m: int, k: int, columnwise: bool) -> tuple[int, ...]:
    """Shape of the scales of a copy that has its own, of a tensor ``[m, k]``."""
    name = (layout.columnwise if columnwise else layout.rowwise)[1]
    return layout.buffers[name].shape(m, k)


def fp8_blocks(block_dim: int) -> Layout:
    """The layout of FP8 in blocks of 1x128 (``block_dim`` 1) or 128x128 (2)."""
    layout = FP8_BLOCKS.get(block_dim)
    if layout is None:
        raise InputError(f"FP8 block scaling got block_dim {block_dim}; it must be 1 or 2.")
    return layout


def check_multiple(format_name: str, m: int, k: int, multiple: int) -> None:
    """Raise if a matrix ``[m, k]`` does not consist of whole blocks; quantizers pad it first."""
    for name, where, size in (("M", "leading dimensions", m), ("K", "last dimension", k)):
        if size % multiple:
            raise InputError(
                f"{format_name} needs {name} (the {where}) to be a multiple of {multiple}; "
                f"got {name} = {size} of a tensor [{m}, {k}]."
                " Pad the tensor."
            )


def tile_count(rows: int, groups: int, size: int | None = None) -> int:
    """The most tiles that groups of altogether ``rows`` rows can have, or all have of one size."""
    if size is not None:
        return groups * -(-size // GROUP_TILE)
    least = min if isinstance(rows, int) else torch.sym_min  # without a guard on symbolic rows
    return least(rows, (rows + (GROUP_TILE - 1) * groups) // GROUP_TILE)
