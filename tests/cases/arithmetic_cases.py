"""``kernels/arithmetic.cu`` against numpy and the definitions of the formats, wherever it runs."""

from __future__ import annotations

import number_formats
import numpy as np
import torch
from emulator.conversions import hard_inputs
from number_formats import E2M1, E4M3, E5M2
from quantize_cases import Place, assert_same

from fuser.cuda.arguments import float32, int32, int64
from fuser.cuda.checks import bits_of
from fuser.cuda.launch import Kernel, Launch
from fuser.formats import DType
from fuser.reference import fp8_scaling, mxfp8

THREADS = 256
SYMBOLS = tuple(
    f"fuser_{name}" for name in ("arithmetic", "max_u16x2", "decode", "to_e2m1x8", "scales")
)
ARITHMETIC, MAX_U16X2, DECODE, TO_E2M1X8, SCALES = (Kernel("arithmetic", s) for s in SYMBOLS)


def launch(n: int) -> Launch:
    return Launch((-(-n // THREADS),), (THREADS,))


def operands() -> tuple[np.ndarray, np.ndarray]:
    """Pairs of which many have a subnormal result, operand or both; zeros, infinities, NaNs."""
    rng = np.random.default_rng(1)
    n = 20_000
    bits = rng.integers(0, 2**32, (2, n), dtype=np.uint32)
    bits[0, : n // 4] &= 0x807FFFFF  # subnormals
    bits[1, n // 8 : n // 2] &= 0x9FFFFFFF  # below 2^-63
    bits[1, n // 2 : 3 * n // 4] = bits[0, n // 2 : 3 * n // 4] ^ 0x80000003
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 1.0, 3e38], np.float32)
    grid = np.stack(np.meshgrid(special, special)).reshape(2, -1)
    a, b = np.concatenate([number_formats.from_bits(bits), grid], axis=1)
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def check_arithmetic(place: Place) -> None:
    a, b = operands()
    x, y = (torch.from_numpy(part).to(place.device) for part in (a, b))
    outputs = [place.empty((a.size,), torch.float32) for _ in range(5)]
    with place.launching(*outputs):
        ARITHMETIC(launch(a.size), x, y, *outputs, int64(a.size))
    with np.errstate(all="ignore"):
        wanted = {
            "sum": a + b,
            "product": a * b,
            "quotient": a / b,
            "product of a magnitude": np.abs(a) * b,
            "reciprocal": np.float32(1) / b,
        }
    for (name, expected), got in zip(wanted.items(), outputs, strict=True):
        assert_same(got, torch.from_numpy(expected), name)
        nans = got.cpu()[torch.from_numpy(np.isnan(expected))].view(torch.int32)
        assert (nans == 0x7FFFFFFF).all(), f"{name}: {nans}"


def check_max_u16x2(place: Place) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 2**16, (2, 2000), dtype=np.uint16)
    b[:100] = a[:100]
    words = [torch.from_numpy(part.view(np.int32)).to(place.device) for part in (a, b)]
    out = place.empty((1000,), torch.int32)
    with place.launching(out):
        MAX_U16X2(launch(1000), *words, out, int64(1000))
    assert np.array_equal(out.cpu().numpy().view(np.uint16), np.maximum(a, b))


def check_decode(place: Place) -> None:
    outputs = [place.empty((256,), torch.float32) for _ in range(2)]
    with place.launching(*outputs):
        DECODE(Launch((1,), (THREADS,)), *outputs)
    every = torch.arange(256, dtype=torch.uint8)
    for dtype, got in zip((torch.float8_e4m3fn, torch.float8_e5m2), outputs, strict=True):
        assert_same(got, every.view(dtype).float(), str(dtype))
    assert {E4M3.max, E5M2.max} <= {out.nan_to_num(posinf=0).max().item() for out in outputs}


def check_to_e2m1x8(place: Place) -> None:
    x = hard_inputs()
    x[x.isnan()] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for in_units in (False, True):
        x = x[x.abs() < 7] if in_units else x
        x = x[: x.numel() // 8 * 8]
        codes = place.empty((x.numel() // 8,), torch.int32)
        count = codes.numel()
        with place.launching(codes):
            TO_E2M1X8(launch(count), x.to(place.device), codes, int64(count), int32(in_units))
        words = codes.cpu().numpy().view(np.uint32)
        got = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(np.uint8).ravel()
        expected = E2M1.encode(x.numpy())
        wrong = np.flatnonzero(got != expected)
        assert wrong.size == 0, f"{x[wrong[0]]}: {got[wrong[0]]}, not {expected[wrong[0]]}"


def check_scales(
    place: Place, dtype: DType, *, pow2: bool, eps: float, when_infinite: float
) -> None:
    """Around every power of two and every multiple of ``max`` by one, subnormal ones too."""
    powers = np.ldexp(1.0, np.arange(-149, 128))
    near = np.concatenate([powers, powers * dtype.max, [0.0, np.inf]])
    with np.errstate(over="ignore"):
        bits = number_formats.bits_of(near.astype(np.float32))
    below = np.maximum(bits, 1) - 1
    bits = np.concatenate([below, bits, bits + 1, [0x7FC00000, 0x7FFFFFFF]]).astype(np.uint32)
    amax = torch.from_numpy(number_formats.from_bits(bits).copy())
    n = amax.numel()
    scale, multiplier = (place.empty((n,), torch.float32) for _ in range(2))
    e8m0 = place.empty((n,))
    with place.launching(scale, e8m0, multiplier):
        SCALES(
            launch(n),
            amax.to(place.device),
            scale,
            e8m0,
            multiplier,
            int64(n),
            float32(dtype.max),
            float32(when_infinite),
            bits_of(eps),
            int32(pow2),
        )
    wanted = fp8_scaling.scale_from_amax(amax, dtype.max, pow2, eps, when_infinite)
    assert_same(scale, wanted, "scale")
    exponents = mxfp8.e8m0_from_amax(amax, 1.0 / dtype.max)
    assert_same(e8m0, exponents, "e8m0")
    assert_same(multiplier, mxfp8.multiplier(exponents), "multiplier")
