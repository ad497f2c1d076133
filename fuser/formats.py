"""Number formats and block geometry: constants, shapes and paddings; no tensors.

``M`` is the product of a tensor's leading dimensions and ``K`` its last one. Rowwise blocks run
along K, columnwise blocks along M.
"""

from __future__ import annotations

import enum
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
    """Raise if ``dtype`` is not an element type of the quantizer ``name``.

    Raises
    ------
    InputError
        If ``dtype`` is neither E4M3 nor E5M2.
    """
    if dtype not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        raise InputError(
            f"{name} got fp8_dtype {dtype}; it must be DType.kFloat8E4M3 or DType.kFloat8E5M2."
        )


class NumberFormat(NamedTuple):
    """The format of a quantized tensor: its elements, and how many of them share a scale.

    ``name`` is the name of the format, with its block geometry if there are several.
    ``block_size`` is the number of elements that share a scale of ``scale_bytes``
    bytes; 0 if the whole tensor shares one, or, with ``has_row_scales``, each row of
    a copy: a row of the tensor in the rowwise copy, a column of it in the columnwise
    copy. Data is padded with zeros to multiples
    of ``multiple`` in both dimensions.
    """

    name: str
    element: DType
    block_size: int = 0
    scale_bytes: int = 4
    multiple: int = 1
    has_row_scales: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.element.label}"

    @property
    def has_one_scale(self) -> bool:
        """Whether the whole tensor has one scale."""
        return not (self.block_size or self.has_row_scales)

    def nbytes(self, shape: tuple[int, ...], copies: tuple[str, ...]) -> int:
        """Bytes of copies of a tensor ``[..., K]``: elements and scales, without padding.

        ``copies`` has ``"rowwise"``, ``"columnwise"`` or both.
        """
        bits = 4 if self.element is DType.kFloat4E2M1 else 8
        data = ceil_div(math.prod(shape) * bits, 8)
        return sum(data + self._scales(shape, copy) * self.scale_bytes for copy in copies)

    def _scales(self, shape: tuple[int, ...], copy: str) -> int:
        if self.has_row_scales:
            return shape[-1] if copy == "columnwise" else math.prod(shape[:-1])
        return ceil_div(math.prod(shape), self.block_size) if self.block_size else 1

    def pads(self, shape: tuple[int, ...]) -> bool:
        """Whether quantizing pads a tensor ``[..., K]`` of this shape."""
        multiple = self.multiple
        return math.prod(shape[:-1]) % multiple != 0 or shape[-1] % multiple != 0


def ceil_div(n: int, divisor: int) -> int:
    """``n / divisor``, rounded up."""
    return -(-n // divisor)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``n``."""
    return ceil_div(n, multiple) * multiple


def padded_shape(m: int, k: int, multiple: int) -> tuple[int, int]:
    """``[m, k]`` padded to whole blocks: both sizes rounded up to a multiple."""
    return round_up(m, multiple), round_up(k, multiple)


def mxfp8_scale_shape(m: int, k: int, columnwise: bool) -> tuple[int, int]:
    """Shape of the padded E8M0 scales of an MXFP8 tensor ``[m, k]``.

    Rowwise ``[M, K / 32]``, columnwise ``[M / 32, K]``, each padded to whole tiles.
    """
    if columnwise:
        blocks = ceil_div(m, MXFP8_BLOCK)
        return round_up(blocks, SCALE_TILE_BLOCKS), round_up(k, SCALE_TILE_ROWS)
    return round_up(m, SCALE_TILE_ROWS), round_up(ceil_div(k, MXFP8_BLOCK), SCALE_TILE_BLOCKS)


def nvfp4_scale_shape(m: int, k: int, columnwise: bool) -> tuple[int, int]:
    """Shape of the padded E4M3 scales of an NVFP4 tensor ``[m, k]``.

    Rowwise ``[M, K / 16]``; columnwise, where the data is stored transposed, ``[K, M / 16]``; each
    padded to whole tiles.
    """
    if columnwise:
        m, k = k, m
    return round_up(m, SCALE_TILE_ROWS), round_up(ceil_div(k, NVFP4_BLOCK), SCALE_TILE_BLOCKS)


def fp8_block_scale_shape(m: int, k: int, columnwise: bool, block_dim: int) -> tuple[int, int]:
    """Shape of the padded fp32 ``scale_inv`` of a tensor ``[m, k]`` in FP8 blocks of 128.

    ``block_dim`` 1 (blocks of 1x128): rowwise ``[K / 128, M]``, columnwise ``[M / 128, K]``, so
    that scales of neighbouring blocks in the other dimension are adjacent in memory. ``block_dim``
    2 (128x128): rowwise ``[M / 128, K / 128]``, columnwise the transpose. The second dimension is
    padded.

    Raises
    ------
    InputError
        If ``block_dim`` is neither 1 nor 2.
    """
    if block_dim not in (1, 2):
        raise InputError(f"FP8 block scaling got block_dim {block_dim}; it must be 1 or 2.")
    if columnwise:
        m, k = k, m
    blocks = ceil_div(k, FP8_BLOCK)
    if block_dim == 1:
        return blocks, round_up(m, FP8_BLOCK_SCALE_ALIGNMENT)
    return ceil_div(m, FP8_BLOCK), round_up(blocks, FP8_BLOCK_SCALE_ALIGNMENT)


def check_multiple(what: str, m: int, k: int, multiple: int) -> None:
    """Raise if a matrix ``[m, k]`` does not consist of whole blocks; quantizers pad it first.

    Raises
    ------
    InputError
        If M or K is not a multiple of ``multiple``; ``what`` names the format.
    """
    for name, where, size in (("M", "leading dimensions", m), ("K", "last dimension", k)):
        if size % multiple:
            raise InputError(
                f"{what} needs {name} (the {where}) to be a multiple of {multiple}; "
                f"got {name} = {size} of a tensor [{m}, {k}]."
            )


def tile_count(rows: int, groups: int, size: int | None = None) -> int:
    """The most tiles that groups of altogether ``rows`` rows can have, or all have of one size."""
    if size is not None:
        return groups * -(-size // GROUP_TILE)
    return min(rows, (rows + (GROUP_TILE - 1) * groups) // GROUP_TILE)
