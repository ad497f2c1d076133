"""What the tests of number formats share: random tensors, every way to quantize, comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import number_formats as ref
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from fuser.formats import DType
from fuser.reference import block_scaling, fp8_scaling, mxfp8, nvfp4, rowwise_scaling

E4M3, E5M2, E2M1 = DType.kFloat8E4M3, DType.kFloat8E5M2, DType.kFloat4E2M1
NUMPY = {E4M3: ref.E4M3, E5M2: ref.E5M2}
FLOAT8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda dtype: dtype.name)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF, FLT_MAX = math.nan, math.inf, ref.FLT_MAX

deterministic: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow],
}

# A test that uses what is None fails at once; tests need not narrow it first.
Outputs = dict[str, Any]


def same(got: torch.Tensor | None, expected: np.ndarray) -> bool:
    """Whether a tensor is contiguous and has these bytes, shape and dtype."""
    assert got is not None
    assert got.is_contiguous()
    found = got.numpy()
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    return found.tobytes() == np.ascontiguousarray(expected).tobytes()


def all_same(got: tuple[torch.Tensor | None, ...], expected: tuple[np.ndarray, ...]) -> bool:
    return all(same(g, e) for g, e in zip(got, expected, strict=True))


def identical(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and same(a, b.numpy())


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), np.uint8)


def fp32_of(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy()


def bits(x: torch.Tensor) -> list[int]:
    return [b & 0xFFFFFFFF for b in x.contiguous().view(torch.int32).flatten().tolist()]


# -- random tensors ----------------------------------------------------------------------


@dataclass(frozen=True)
class Random:
    """A random tensor ``[m, k]`` as a value, so that a failing example prints as one line.

    Rows and columns spread over ``spread`` powers of two below ``2^exponent``;
    ``coarse`` leaves five significant bits, so that ties occur.
    """

    m: int
    k: int
    dtype: torch.dtype = torch.float32
    exponent: int = 0
    spread: int = 4
    coarse: bool = False
    special: str = ""
    seed: int = 0

    def tensor(self) -> torch.Tensor:
        rng = np.random.default_rng(self.seed)
        x = rng.standard_normal((self.m, self.k))
        x *= 2.0 ** rng.uniform(-self.spread, 0, (self.m, 1))
        x *= 2.0 ** rng.uniform(-self.spread, 0, (1, self.k))
        if self.coarse:
            mantissa, exponent = np.frexp(x)
            x = np.ldexp(np.round(mantissa * 32) / 32, exponent)
        x = np.ldexp(x, self.exponent // 9 if self.dtype is torch.float16 else self.exponent)
        if self.special == "zeros":
            x[rng.random(self.m) < 0.3] *= 0.0
            x[:, rng.random(self.k) < 0.3] *= 0.0
        elif self.special and x.size:
            where = rng.integers(x.size, size=1 + x.size // 2000)
            x.ravel()[where] = {"nan": NAN, "inf": -INF, "tiny": 2.0**-149}[self.special]
        return torch.from_numpy(x).to(self.dtype)


def randoms(multiple: int = 1, largest: int = 160, finite: bool = False) -> st.SearchStrategy:
    sizes = st.integers(1, max(1, largest // multiple)).map(lambda n: n * multiple)
    specials = ["", "", "", "zeros", "tiny"] + ([] if finite else ["nan", "inf"])
    wide = st.integers(-20, 20) if finite else st.integers(-150, 120)
    return st.builds(
        Random,
        m=sizes,
        k=sizes,
        dtype=st.sampled_from(DTYPES),
        exponent=st.integers(-4, 4) | wide,
        spread=st.sampled_from((0, 3, 12)),
        coarse=st.booleans(),
        special=st.sampled_from(specials),
        seed=st.integers(0, 2**32 - 1),
    )


# -- every way to quantize, with the same arguments ---------------------------------------------


def _current(x: torch.Tensor, **asked: bool) -> Outputs:
    row, col, scale_inv = fp8_scaling.quantize_current(x, E4M3, **asked)
    return {"row": row, "col": col, "scale_inv": scale_inv}


def _current_pow2(x: torch.Tensor, **asked: bool) -> Outputs:
    row, col, scale_inv = fp8_scaling.quantize_current(x, E5M2, pow2=True, **asked)
    return {"row": row, "col": col, "scale_inv": scale_inv}


def _delayed(x: torch.Tensor, **asked: bool) -> Outputs:
    scale = torch.full((1,), 3.0, device=x.device)
    row, col, scale_inv, amax = fp8_scaling.quantize_delayed(x, scale, E4M3, **asked)
    return {"row": row, "col": col, "scale_inv": scale_inv, "amax": amax}


def _mxfp8(two_dimensional: bool) -> Callable[..., Outputs]:
    def quantize(x: torch.Tensor, **asked: bool) -> Outputs:
        out = mxfp8.quantize(x, E4M3, two_dimensional=two_dimensional, **asked)
        return dict(zip(("row", "row_scale", "col", "col_scale"), out, strict=True))

    return quantize


def _block(block_dim: int) -> Callable[..., Outputs]:
    def quantize(x: torch.Tensor, **asked: bool) -> Outputs:
        out = block_scaling.quantize(x, E4M3, block_dim=block_dim, pow2=False, **asked)
        return dict(zip(("row", "row_scale", "col", "col_scale"), out, strict=True))

    return quantize


def _rowwise(x: torch.Tensor, **asked: bool) -> Outputs:
    out = rowwise_scaling.quantize(x, E4M3, **asked)
    return dict(zip(("row", "row_scale", "col", "col_scale"), out, strict=True))


def _nvfp4(**options: Any) -> Callable[..., Outputs]:
    def quantize(x: torch.Tensor, **asked: bool) -> Outputs:
        names = ("row", "row_scale", "row_amax", "col", "col_scale", "col_amax")
        return dict(zip(names, nvfp4.quantize(x, **options, **asked), strict=True))

    return quantize


QUANTIZERS: dict[str, Callable[..., Outputs]] = {
    "current": _current,
    "current-pow2": _current_pow2,
    "delayed": _delayed,
    "mxfp8": _mxfp8(False),
    "mxfp8-2d": _mxfp8(True),
    "block-1d": _block(1),
    "block-2d": _block(2),
    "rowwise": _rowwise,
    "nvfp4": _nvfp4(),
    "nvfp4-2d": _nvfp4(two_dimensional=True),
    "nvfp4-hadamard": _nvfp4(hadamard=True),
    "nvfp4-stochastic": _nvfp4(stochastic=True, hadamard=True, seed=5, offset=3),
}
EVERY_QUANTIZER = pytest.mark.parametrize("name", QUANTIZERS)


# -- named blocks ------------------------------------------------------------------------


WIDE = (torch.float32, torch.bfloat16)
# The smallest bf16 above 0, which fp32 holds too.
TINY = 2.0**-133


# -- layouts -----------------------------------------------------------------------------


class MetaOnly(TorchFunctionMode):
    """Refuses a call that takes or returns a tensor of another device than ``meta``.

    There a tensor has no values, so that reading one raises too: what runs
    here waits for no GPU and copies nothing to it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in (*args, *(kwargs or {}).values(), out):
            for item in value if isinstance(value, list | tuple) else (value,):
                assert not isinstance(item, torch.Tensor) or item.is_meta, func
        return out


# -- dequantize --------------------------------------------------------------------------


Dequantize = Callable[[torch.dtype], torch.Tensor]


def dequantizers(name: str, out: Outputs) -> dict[str, Dequantize]:
    """Rowwise and columnwise dequantization of a quantizer's outputs, each to ``[M, K]``."""
    row, col = out["row"], out["col"]
    if "scale_inv" in out:
        fmt, scale_inv = E5M2 if name == "current-pow2" else E4M3, out["scale_inv"]
        return {
            "row": lambda to: fp8_scaling.dequantize(row, scale_inv, fmt, to),
            "col": lambda to: fp8_scaling.dequantize(col, scale_inv, fmt, to).T.contiguous(),
        }
    row_scale, col_scale = out["row_scale"], out["col_scale"]
    if name.startswith("mxfp8"):
        return {
            "row": lambda to: mxfp8.dequantize(row, row_scale, E4M3, to, columnwise=False),
            "col": lambda to: mxfp8.dequantize(col, col_scale, E4M3, to, columnwise=True),
        }
    if name.startswith("block"):
        dim = int(name[6])
        return {
            "row": lambda to: block_scaling.dequantize(
                row, row_scale, E4M3, to, block_dim=dim, columnwise=False
            ),
            "col": lambda to: block_scaling.dequantize(
                col, col_scale, E4M3, to, block_dim=dim, columnwise=True
            ),
        }
    if name == "rowwise":
        return {
            "row": lambda to: rowwise_scaling.dequantize(
                row, row_scale, E4M3, to, columnwise=False
            ),
            "col": lambda to: rowwise_scaling.dequantize(col, col_scale, E4M3, to, columnwise=True),
        }
    row_amax, col_amax = out["row_amax"], out["col_amax"]
    return {
        "row": lambda to: nvfp4.dequantize(row, row_scale, row_amax, to, columnwise=False),
        "col": lambda to: nvfp4.dequantize(col, col_scale, col_amax, to, columnwise=True),
    }


# -- delayed scaling ---------------------------------------------------------------------


amaxes = st.sampled_from([0.0, 0.0, 2.0**-140, 2.0**-119, INF, FLT_MAX]) | st.floats(
    0, 1e6, width=32, allow_subnormal=False
)


# -- NVFP4: Hadamard transform -----------------------------------------------------------


# Of NVIDIA's implementation: bit i set, element i of every 16 changes its sign.
SIGN_MASK = 0xD7E8
