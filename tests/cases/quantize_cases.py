"""Inputs for the quantize kernels, and their results against the references, bit for bit.

A *place* is where kernels run: the emulator (``tests/kernels``) or a GPU (``tests/gpu``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from emulator import emulated

from fuser import formats
from fuser.formats import DType, NumberFormat

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAN, INF = math.nan, math.inf

FLOAT8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda dtype: dtype.label)
COPIES = {"row": (True, False), "col": (False, True), "both": (True, True)}


# -- places -------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A device with kernels, and what must surround a launch there."""

    device: str
    around: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]]

    def launching(self, *written: torch.Tensor | None) -> AbstractContextManager[None]:
        """Inside, launchers run here, and must write all of ``written``."""
        return self.around([tensor for tensor in written if tensor is not None])

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype = torch.uint8, shift: int = 0
    ) -> torch.Tensor:
        """A poisoned output, ``shift`` elements behind where memory is aligned."""
        n = math.prod(shape)
        size = dtype.itemsize
        memory = torch.full(((n + shift) * size,), 0xA5, dtype=torch.uint8, device=self.device)
        return memory.view(dtype)[shift:].view(*shape)


EMULATOR = Place("cpu", lambda written: emulated(written=written))
GPU = Place("cuda", lambda written: nullcontext())


# -- inputs -------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """A matrix ``[m, k]`` as a value: what is in it, and how it lies in memory.

    ``layout``: ``contiguous``; ``shifted``, at an odd offset; ``rows``, the left part of a wider
    matrix, aligned; ``odd rows``, the same and not aligned.
    """

    m: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "contiguous"
    special: str = ""

    def __str__(self) -> str:
        words = (f"{self.m}x{self.k}", str(self.dtype)[6:], self.layout, self.special)
        return "-".join(word for word in words if word).replace(" ", "-")

    def on(self, place: Place) -> torch.Tensor:
        """The matrix there."""
        values = self.values()
        m, k = self.m, self.k
        extra = {"rows": -k % 16 + 16, "odd rows": 3}.get(self.layout, 0)
        shift = self.layout in ("shifted", "odd rows")
        memory = torch.full((m * (k + extra) + shift,), NAN, dtype=self.dtype, device=place.device)
        x = memory[int(shift) :].view(m, k + extra)[:, :k]
        x.copy_(values)
        return x

    def values(self) -> torch.Tensor:
        """The values, on the CPU: rows and columns of very different sizes, and what is special."""
        rng = np.random.default_rng([self.m, self.k, len(self.special)])
        x: np.ndarray[Any, Any] = rng.standard_normal((self.m, self.k))
        x *= 2.0 ** rng.integers(-6, 6, (self.m, 1))
        x *= 2.0 ** rng.integers(-6, 6, (1, self.k))
        small = 2.0 ** (-24 if self.dtype is torch.float16 else -133)
        if self.special == "zeros":
            x[:] = np.copysign(0.0, x)
        elif self.special == "subnormal":
            x = np.round(x) * small
        elif self.special == "tiny":
            x = rng.integers(-1, 2, x.shape) * small
        elif self.special == "huge":
            x = np.sign(x) * 2.0 ** (15 if self.dtype is torch.float16 else 127)
        elif self.special and x.size:
            where = rng.integers(x.size, size=1 + x.size // 4000)
            x.ravel()[where] = {"nan": NAN, "inf": -INF, "mixed": small}[self.special]
        return torch.from_numpy(x).to(self.dtype)


SPECIALS = ("zeros", "subnormal", "tiny", "mixed", "huge", "nan", "inf")

# Less than a tile, tails on each side, several tiles; every dtype and layout.
ODD = (
    Input(1, 1),
    Input(1, 300),
    Input(300, 1, torch.float32),
    Input(5, 7, torch.float16, "shifted"),
    Input(130, 257, torch.bfloat16),
    Input(129, 40, torch.float32),
    Input(20, 12, torch.float32),
    Input(16, 4, torch.float32, "rows"),
    Input(144, 136, torch.bfloat16, "rows"),
    Input(144, 136, torch.float32, "rows"),
    Input(50, 24, torch.float16, "odd rows"),
    Input(256, 128, torch.float16),
    Input(128, 256, torch.float32),
    Input(32, 160, torch.bfloat16, "shifted"),
)
# Multiples of 32, which MXFP8 needs.
WHOLE_BLOCKS = (
    Input(32, 32),
    Input(160, 288),
    Input(288, 160, torch.float16),
    Input(32, 160, torch.float32),
    Input(160, 32, torch.float32, "rows"),
    Input(64, 96, torch.bfloat16, "shifted"),
    Input(96, 64, torch.float16, "odd rows"),
    Input(256, 128, torch.bfloat16, "rows"),
)
# On a GPU.
BIG = (
    Input(4096, 1536),
    Input(2050, 3001, torch.float32),
    Input(1111, 4096, torch.float16, "rows"),
)
EMPTY = (Input(0, 128), Input(128, 0), Input(0, 0, torch.float32))


def special(m: int, k: int) -> list[Input]:
    """Every special content in every dtype."""
    return [Input(m, k, dtype, special=name) for dtype in DTYPES for name in SPECIALS]


# -- comparison ---------------------------------------------------------------


def assert_same(got: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    """Bit for bit; any NaN is equal to any other."""
    if expected is None:
        assert got is None, what
        return
    assert got is not None, what
    got, expected = got.cpu(), expected.cpu()
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    if got.numel() == 0:
        return
    differs = bits(got) != bits(expected)
    if got.is_floating_point():
        differs &= ~(got.isnan() & expected.isnan()).numpy()
    if differs.any():
        place = tuple(int(i) for i in np.argwhere(differs)[0])
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.size} differ, the first at {place}: "
            f"{got[place].item()!r}, not {expected[place].item()!r}"
        )


def bits(x: torch.Tensor) -> np.ndarray:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(words).numpy()


_NAMES = {"row": "_rowwise_data", "col": "_columnwise_data", "scale_inv": "_scale_inv"}
_NAMES |= {"row_amax": "_amax_rowwise", "col_amax": "_amax_columnwise"}
for _scale in ("scale", "scale_inv"):
    _NAMES |= {f"row_{_scale}": "_rowwise_scale_inv", f"col_{_scale}": "_columnwise_scale_inv"}


def buffers(**outputs: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Outputs by the names that a layout gives them."""
    return {_NAMES[name]: output for name, output in outputs.items()}


def fp8_format(dtype: DType = E4M3) -> NumberFormat:
    return NumberFormat("FP8", dtype)


def rows_format(dtype: DType = E4M3) -> NumberFormat:
    return NumberFormat("FP8 rowwise", dtype, formats.FP8_ROWS)


def block_format(dtype: DType, block_dim: int) -> NumberFormat:
    return NumberFormat("FP8 blocks", dtype, formats.FP8_BLOCKS[block_dim], 128**block_dim)


def mxfp8_format(dtype: DType, is_square: bool = False, is_swizzled: bool = False) -> NumberFormat:
    layout = formats.MXFP8_SWIZZLED if is_swizzled else formats.MXFP8
    return NumberFormat("MXFP8", dtype, layout, 32 ** (1 + is_square))


def nvfp4_format(is_square: bool = False) -> NumberFormat:
    return NumberFormat("NVFP4", DType.kFloat4E2M1, formats.NVFP4, 16 ** (1 + is_square))
