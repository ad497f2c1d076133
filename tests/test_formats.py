"""The torch reference of every number format: bytes, scales, layouts, rounding, errors.

Three kinds of evidence: named blocks whose bytes are written out here, the
numpy definition of ``number_formats.py`` on random tensors and on every 16-bit
number, and properties that no definition may break.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import number_formats as ref
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import fuser
from fuser import formats
from fuser.errors import InputError
from fuser.formats import DType
from fuser.reference import block_scaling, fp8, fp8_scaling, mxfp8, nvfp4

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


# -- random tensors ------------------------------------------------------------------


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


# -- every way to quantize, by one signature -----------------------------------------


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
    "nvfp4": _nvfp4(),
    "nvfp4-2d": _nvfp4(two_dimensional=True),
    "nvfp4-hadamard": _nvfp4(hadamard=True),
    "nvfp4-stochastic": _nvfp4(stochastic=True, hadamard=True, seed=5, offset=3),
}
EVERY_QUANTIZER = pytest.mark.parametrize("name", QUANTIZERS)


# -- fuser/formats.py ----------------------------------------------------------------


def test_the_constants_are_those_of_the_formats() -> None:
    assert [dtype.max for dtype in (E4M3, E5M2, E2M1)] == [448.0, 57344.0, 6.0]
    assert [dtype.torch_dtype for dtype in (E4M3, E5M2, E2M1)] == [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
    ]
    assert sum(dtype.name.startswith(("kFloat8", "kFloat4")) for dtype in DType) == 3
    assert (formats.MXFP8_BLOCK, formats.FP8_BLOCK, formats.NVFP4_BLOCK) == (32, 128, 16)


def test_the_bytes_of_a_format_are_those_of_elements_and_scales_in_every_copy() -> None:
    n = 128 * 256
    for quantizer, scales in (
        (fuser.Float8CurrentScalingQuantizer(), 4),
        (fuser.Float8BlockQuantizer(block_scaling_dim=1), 4 * n // 128),
        (fuser.Float8BlockQuantizer(block_scaling_dim=2), 4 * n // 128**2),
        (fuser.MXFP8Quantizer(), n // 32),
    ):
        assert [quantizer.format.nbytes(n, copies) for copies in (1, 2)] == [
            n + scales,
            2 * (n + scales),
        ]
    assert fuser.NVFP4Quantizer().format.nbytes(n, 2) == 2 * (n // 2 + n // 16)
    assert fuser.NVFP4Quantizer().format.nbytes(5, 1) == 3 + 1


@pytest.mark.parametrize(
    ("n", "multiple", "quotient", "rounded"),
    [
        (0, 4, 0, 0),
        (1, 4, 1, 4),
        (4, 4, 1, 4),
        (5, 4, 2, 8),
        (127, 128, 1, 128),
        (257, 128, 3, 384),
    ],
)
def test_ceil_div_and_round_up(n: int, multiple: int, quotient: int, rounded: int) -> None:
    assert formats.ceil_div(n, multiple) == quotient
    assert formats.round_up(n, multiple) == rounded


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (formats.mxfp8_scale_shape(160, 288, False), (256, 12)),
        (formats.mxfp8_scale_shape(160, 288, True), (8, 384)),
        (formats.mxfp8_scale_shape(128, 128, False), (128, 4)),
        (formats.mxfp8_scale_shape(128, 128, True), (4, 128)),
        (formats.mxfp8_scale_shape(0, 64, False), (0, 4)),
        (formats.mxfp8_scale_shape(0, 64, True), (0, 128)),
        (formats.nvfp4_scale_shape(160, 288, False), (256, 20)),
        (formats.nvfp4_scale_shape(160, 288, True), (384, 12)),
        (formats.nvfp4_scale_shape(128, 64, False), (128, 4)),
        (formats.nvfp4_scale_shape(128, 64, True), (128, 8)),
        (formats.fp8_block_scale_shape(130, 257, False, 1), (3, 132)),
        (formats.fp8_block_scale_shape(130, 257, True, 1), (2, 260)),
        (formats.fp8_block_scale_shape(130, 257, False, 2), (2, 4)),
        (formats.fp8_block_scale_shape(130, 257, True, 2), (3, 4)),
        (formats.fp8_block_scale_shape(128, 640, False, 2), (1, 8)),
        (formats.fp8_block_scale_shape(128, 640, True, 2), (5, 4)),
        (formats.fp8_block_scale_shape(0, 5, False, 1), (1, 0)),
    ],
)
def test_scale_shapes(shape: tuple[int, int], expected: tuple[int, int]) -> None:
    assert shape == expected


def test_a_block_shape_that_does_not_exist_is_refused_by_its_number() -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(InputError, match=r"block_dim 3"):
        block_scaling.quantize(x, E4M3, block_dim=3)


@pytest.mark.parametrize(("m", "k"), [(64, 96), (0, 32), (32, 0), (0, 0)])
def test_multiples_pass_and_so_does_zero(m: int, k: int) -> None:
    formats.check_multiple("MXFP8", m, k, 32)


@pytest.mark.parametrize(
    ("m", "k", "dimension", "size"), [(33, 64, "M", 33), (64, 80, "K", 80), (1, 32, "M", 1)]
)
def test_a_size_that_is_no_multiple_is_a_sentence_with_the_dimension_its_size_and_the_multiple(
    m: int, k: int, dimension: str, size: int
) -> None:
    with pytest.raises(InputError, match=rf"^MXFP8 .*{dimension} .*\b32\b.*\b{size}\b.*\.$"):
        formats.check_multiple("MXFP8", m, k, 32)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("mxfp8", (48, 64), r"MXFP8.*M .*32.*48"),
        ("mxfp8-2d", (64, 48), r"MXFP8.*K .*32.*48"),
        ("nvfp4", (24, 64), r"NVFP4.*M .*16.*24"),
        ("nvfp4-2d", (64, 24), r"NVFP4.*K .*16.*24"),
    ],
)
def test_a_tensor_that_does_not_divide_into_blocks_is_refused(
    name: str, shape: tuple[int, int], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        QUANTIZERS[name](torch.ones(shape))


# -- casts ---------------------------------------------------------------------------


def every_sixteen_bit_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def around_midpoints(fmt: ref.SmallFloat) -> torch.Tensor:
    """Every midpoint between two neighbours, the fp32 below it, the one above, both signs."""
    middle = torch.from_numpy((fmt.values[:-1] + fmt.values[1:]) / 2).float()
    below = torch.nextafter(middle, torch.tensor(0.0))
    above = torch.nextafter(middle, torch.tensor(INF))
    x = torch.cat((below, middle, above))
    return torch.cat((x, -x))


@FLOAT8
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 149.33333])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
def test_every_sixteen_bit_number_casts_to_the_nearest_byte(
    dtype: DType, scale: float, source: torch.dtype
) -> None:
    x = every_sixteen_bit_number(source)
    factor = torch.tensor([scale])
    expected = NUMPY[dtype].encode(ref.product(fp32_of(x), factor.numpy()))
    assert same(fp8_scaling.cast(x, factor, dtype), expected)


@FLOAT8
def test_a_midpoint_casts_to_the_even_byte_and_its_neighbours_to_theirs(dtype: DType) -> None:
    x = around_midpoints(NUMPY[dtype])
    codes = fp8_scaling.cast(x, torch.ones(1), dtype)
    assert same(codes, NUMPY[dtype].encode(x.numpy()))
    below, middle, above = codes[: len(x) // 2].view(3, -1).int()
    assert torch.equal(above - below, torch.ones_like(below))
    assert not (middle & 1).any()


@FLOAT8
def test_a_cast_saturates_and_every_nan_becomes_one_byte(dtype: DType) -> None:
    x = torch.tensor([INF, -INF, FLT_MAX, -FLT_MAX, dtype.max * 1.0625, NAN, -NAN, 0.0, -0.0])
    largest = {E4M3: "7e", E5M2: "7b"}[dtype]
    negative = {E4M3: "fe", E5M2: "fb"}[dtype]
    expected = f"{largest}{negative}{largest}{negative}{largest}7f7f0080"
    assert same(fp8_scaling.cast(x, torch.ones(1), dtype), as_bytes(expected))


@FLOAT8
def test_every_finite_byte_decodes_to_its_value_and_casts_back(dtype: DType) -> None:
    fmt = NUMPY[dtype]
    codes = np.arange(256, dtype=np.uint8)
    finite = (codes & 0x7F) < len(fmt.values)
    data = torch.from_numpy(codes)
    values = fp8_scaling.dequantize(data, torch.ones(1), dtype, torch.float32)
    assert same(values[finite], fmt.decode(codes[finite]).astype(np.float32))
    assert torch.equal(fp8_scaling.cast(values, torch.ones(1), dtype)[finite], data[finite])
    rest = values[~finite]
    infinities = 2 if dtype is E5M2 else 0
    assert int(rest.isinf().sum()) == infinities
    assert int(rest.isnan().sum()) == len(rest) - infinities


def test_a_scale_broadcasts() -> None:
    x = Random(6, 10, seed=1).tensor()
    scale = torch.tensor([1.0, 2.0, 4.0, 8.0, 0.5, 3.0]).unsqueeze(1)
    expected = ref.E4M3.encode(ref.product(x.numpy(), scale.numpy()))
    assert same(fp8_scaling.cast(x, scale, E4M3), expected)


def test_e2m1_casts_every_bf16_number_and_every_midpoint_to_the_nearest_code() -> None:
    x = torch.cat((every_sixteen_bit_number(torch.bfloat16).float(), around_midpoints(ref.E2M1)))
    assert same(nvfp4.cast_e2m1(x), ref.E2M1.encode(x.numpy()))


def test_e2m1_ties_go_to_even_signs_stay_and_nan_is_six() -> None:
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, INF, 0.0, -0.0, -0.25, -5.0, -INF, NAN, -NAN]
    expected = "00 02 02 04 04 06 06 07 07 00 08 08 0e 0f 07 07"
    assert same(nvfp4.cast_e2m1(torch.tensor(x)), as_bytes(expected))


# -- scales --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amax", "options", "expected"),
    [
        (448.0, {}, 0x3F800000),  # 1
        (3.0, {}, 0x43155555),  # 149.33333
        (3.0, {"pow2": True}, 0x43000000),  # 128
        (0.0, {}, 0x3F800000),
        (INF, {}, 0x3F800000),
        (NAN, {}, 0x3F800000),
        (FLT_MAX, {}, 0x03E00001),  # 1.75 * 2^-120 (1 + 2^-24): seven eighths of a step above
        (2.0**-149, {}, 0x7F7FFFFF),  # FLT_MAX
        (2.0**-149, {"pow2": True}, 0x7F000000),  # 2^127
        (2.0**-149, {"when_infinite": 65504.0}, 0x477FE000),
        (2.0**-149, {"when_infinite": 65504.0, "pow2": True}, 0x47000000),  # 32768
        (2.0**-149, {"max_fp8": 57344.0, "eps": 1.0}, 0x47600000),
        (0.0, {"eps": 448.0}, 0x3F800000),
        (0.0, {"eps": 1.0}, 0x43E00000),  # 448
        (2.0, {"eps": 1.0}, 0x43600000),  # 224
        (NAN, {"eps": 1.0}, 0x3F800000),
        (INF, {"eps": 1.0}, 0x3F800000),
    ],
)
def test_the_scale_of_an_amax(amax: float, options: dict[str, Any], expected: int) -> None:
    defaults = {"max_fp8": 448.0, "pow2": False, "eps": 0.0, "when_infinite": FLT_MAX}
    scale = fp8.scale_from_amax(torch.tensor([amax]), **{**defaults, **options})
    assert bits(scale) == [expected]


positive_fp32 = st.integers(0, 0x7FC00000) | st.sampled_from(
    [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
)


@given(
    amaxes=st.lists(positive_fp32, min_size=1, max_size=40),
    max_fp8=st.sampled_from([448.0, 57344.0]),
    pow2=st.booleans(),
    eps=st.sampled_from([0.0, 1e-12, 1e-30, 0.3, 1e30]),
    when_infinite=st.sampled_from([FLT_MAX, 65504.0, ref.LARGEST_INPUT["bfloat16"]]),
)
@settings(max_examples=100, **deterministic)
def test_scales_equal_the_numpy_definition_for_any_fp32_amax(
    amaxes: list[int], max_fp8: float, pow2: bool, eps: float, when_infinite: float
) -> None:
    amax = ref.from_bits(np.array([amaxes], np.uint32))
    scale = fp8.scale_from_amax(torch.from_numpy(amax), max_fp8, pow2, eps, when_infinite)
    assert same(scale, ref.scale_from_amax(amax, max_fp8, pow2, eps, when_infinite))


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [
        (0.0, 0),
        (448.0, 127),
        (449.0, 128),
        (896.0, 128),
        (447.0, 127),
        (224.0, 126),
        (1.0, 119),  # 1 / 448 lies between 2^-9 and 2^-8
        (FLT_MAX, 247),
        (INF, 0xFE),
        (NAN, 0xFF),
        (448 * 2.0**-127, 0),  # the product is 0x00400000: 2^-127 itself
        (448 * 2.0**-127 * (1 + 2.0**-18), 1),
        (448 * 2.0**-126, 1),
        (448 * 2.0**-126 * (1 + 2.0**-18), 2),
        (2.0**-149, 0),
    ],
)
def test_the_exponent_of_an_amax(amax: float, exponent: int) -> None:
    assert mxfp8.e8m0_from_amax(torch.tensor([amax]), 1 / 448).tolist() == [exponent]


def test_an_exponent_never_rounds_up_to_that_of_nan() -> None:
    # 57344 * FLT_MAX is no amax, so the product is handed over as it is.
    assert mxfp8.e8m0_from_amax(torch.tensor([FLT_MAX, 2.0**127]), 1.0).tolist() == [0xFE, 0xFE]


@given(
    amaxes=st.lists(positive_fp32, min_size=1, max_size=40),
    max_fp8=st.sampled_from([448.0, 57344.0]),
)
@settings(max_examples=100, **deterministic)
def test_exponents_equal_the_numpy_definition_for_any_fp32_amax(
    amaxes: list[int], max_fp8: float
) -> None:
    amax = ref.from_bits(np.array([amaxes], np.uint32))
    got = mxfp8.e8m0_from_amax(torch.from_numpy(amax), 1 / max_fp8)
    assert same(got, ref.e8m0_from_amax(amax, max_fp8))


def test_every_exponent_has_its_multiplier() -> None:
    e8m0 = torch.arange(256, dtype=torch.uint8)
    multiplier = mxfp8.multiplier(e8m0)
    assert multiplier.dtype == torch.float32
    assert same(multiplier[:255], ref.multiplier(e8m0.numpy())[:255])
    assert math.isnan(multiplier[255])
    assert bits(multiplier[[0, 127, 253, 254]]) == [0x7F000000, 0x3F800000, 0x00800000, 0x00400000]


# -- named blocks --------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A block's first values and the value of all others; the bytes of both; its scale."""

    name: str
    values: tuple[float, ...]
    others: float
    data: str
    other_data: str
    scale: float

    def row(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.full((1, width), self.others, dtype=torch.float64)
        x[0, : len(self.values)] = torch.tensor(self.values, dtype=torch.float64)
        assert torch.equal(x.to(dtype).double().nan_to_num(), x.nan_to_num())
        return x.to(dtype)

    def bytes(self, width: int) -> np.ndarray:
        return as_bytes(self.data + self.other_data * (width - len(self.values)))[None]


def blocks(dtype: tuple[torch.dtype, ...], *cases: Block) -> Any:
    return [
        pytest.param(case, d, id=f"{case.name}-{str(d).removeprefix('torch.')}")
        for case in cases
        for d in dtype
    ]


WIDE = (torch.float32, torch.bfloat16)
# The smallest bf16 above 0, which fp32 holds too.
TINY = 2.0**-133

# Blocks of E4M3 under one fp32 scale, the same by tensor and by 128.
SUBNORMALS_E4M3 = Block(
    "smallest subnormal",
    (448, 2**-9, 2**-10, 1.5 * 2**-10, -(2**-9), 1.5 * 2**-9, 7 * 2**-9, 2**-6),
    2**-11,
    "7e 01 00 01 81 02 07 08",
    "00",
    1.0,
)
TIES_E4M3 = Block(
    "ties",
    (448, 17, 19, 21, 23, 25, 27, 29, 31, -17, -19),
    1.0625,
    "7e 58 5a 5a 5c 5c 5e 5e 60 d8 da",
    "38",
    1.0,
)
FP8_BLOCKS_E4M3 = (
    Block("all NaN", (), NAN, "", "7f", 1.0),
    Block("one NaN", (NAN, 1, -2, 0.5, 500), 3, "7f 38 c0 30 7e", "44", 1.0),
    Block("inf", (INF, -INF, 1, -2), 0.5, "7e fe 38 c0", "30", 1.0),
    Block("all zero", (), 0.0, "", "00", 1.0),
    SUBNORMALS_E4M3,
    Block("exact maximum", (1.75, -1.75, 0.875), 1.75 / 16, "7e fe 76", "5e", 2.0**-8),
    TIES_E4M3,
    Block("one outlier", (448 * 1024, 1024, 1, 2, 3, -1), 0.25, "7e 38 00 01 02 80", "00", 1024.0),
    Block("negative zero", (448, 0.0), -0.0, "7e 00", "80", 1.0),
    Block("all negative zero", (), -0.0, "", "80", 1.0),
)


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        *FP8_BLOCKS_E4M3,
        # The scale is FLT_MAX, and its inverse the subnormal 2^-128.
        Block("smallest input", (TINY, -TINY), 0.0, "10 90", "00", 2.0**-128),
        Block("no power of two", (3, -3, 1.5), 0.0, "7e fe 76", "00", 3 / 448),
    ),
)
def test_bytes_of_named_blocks_in_e4m3_with_current_scaling(
    block: Block, dtype: torch.dtype
) -> None:
    row, col, scale_inv = fp8_scaling.quantize_current(block.row(32, dtype), E4M3)
    assert same(row, block.bytes(32))
    assert same(col, block.bytes(32).T)
    assert same(scale_inv, np.array([block.scale], np.float32))


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        Block("all NaN", (), NAN, "", "7f", 1.0),
        Block("one NaN", (NAN, 1, -2, 0.5, 65536), 3, "7f 3c c0 38 7b", "42", 1.0),
        Block("inf", (INF, -INF, 1, -2), 0.5, "7b fb 3c c0", "38", 1.0),
        Block("all zero", (), 0.0, "", "00", 1.0),
        Block(
            "smallest subnormal",
            (57344, 2**-16, 2**-17, 1.5 * 2**-17, -(2**-16), 1.5 * 2**-16, 3 * 2**-16, 2**-14),
            2**-18,
            "7b 01 00 01 81 02 03 04",
            "00",
            1.0,
        ),
        Block("exact maximum", (1.75, -1.75, 0.875), 1.75 / 16, "7b fb 77", "6b", 2.0**-15),
        Block("ties", (57344, 9, 11, 13, 15, -9, -11), 1.125, "7b 48 4a 4a 4c c8 ca", "3c", 1.0),
        Block(
            "one outlier",
            (57344 * 1024, 1024, 2**-7, 2**-6, 3 * 2**-7, -(2**-7)),
            2**-9,
            "7b 3c 00 01 02 80",
            "00",
            1024.0,
        ),
        Block("negative zero", (57344, 0.0), -0.0, "7b 00", "80", 1.0),
        Block("all negative zero", (), -0.0, "", "80", 1.0),
        Block("smallest input", (TINY, -TINY), 0.0, "28 a8", "00", 2.0**-128),
    ),
)
def test_bytes_of_named_blocks_in_e5m2_with_current_scaling(
    block: Block, dtype: torch.dtype
) -> None:
    row, col, scale_inv = fp8_scaling.quantize_current(block.row(32, dtype), E5M2)
    assert same(row, block.bytes(32))
    assert same(col, block.bytes(32).T)
    assert same(scale_inv, np.array([block.scale], np.float32))


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        *FP8_BLOCKS_E4M3,
        Block("smallest input", (TINY, -TINY), 0.0, "08 88", "00", 2.0**-127),
        Block("no power of two", (3, -3, 1.5), 0.0, "7c fc 74", "00", 2.0**-7),
    ),
)
def test_bytes_of_named_blocks_of_128(block: Block, dtype: torch.dtype) -> None:
    x, expected = block.row(128, dtype), block.bytes(128)
    scale = np.array([[block.scale, 0, 0, 0]], np.float32)
    row, row_scale, _, _ = block_scaling.quantize(x, E4M3, block_dim=1)
    assert all_same((row, row_scale), (expected, scale))
    _, _, col, col_scale = block_scaling.quantize(x.T, E4M3, block_dim=1)
    assert all_same((col, col_scale), (expected, scale))
    both = block_scaling.quantize(x, E4M3, block_dim=2)
    assert all_same(both, (expected, scale, expected.T, scale))


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        Block("all NaN", (), NAN, "", "7f", 0xFF),
        Block("one NaN", (NAN, 1, -2), 3, "7f 7f 7f", "7f", 0xFF),
        # The multiplier is the subnormal 2^-127.
        Block(
            "inf", (INF, -INF, 1, -2, 2.0**127, -(2.0**127)), 0.5, "7e fe 00 80 38 b8", "00", 0xFE
        ),
        Block("all zero", (), 0.0, "", "00", 0),
        replace(SUBNORMALS_E4M3, scale=127),
        Block("smallest input", (TINY, -TINY), 0.0, "08 88", "00", 0),
        Block("exact maximum", (448, -448, 224), 28, "7e fe 76", "5e", 127),
        Block("past the maximum", (450, 448, -450), 28, "76 76 f6", "56", 128),
        replace(TIES_E4M3, scale=127),
        Block("one outlier", (2**20, 2, 4, 8, 12, -4, 4096), 1, "78 00 00 01 02 80 38", "00", 139),
        Block("negative zero", (448, 0.0), -0.0, "7e 00", "80", 127),
        Block("all negative zero", (), -0.0, "", "80", 0),
    ),
)
def test_bytes_of_named_mxfp8_blocks(block: Block, dtype: torch.dtype) -> None:
    check_mxfp8_block(block, dtype, E4M3)


@pytest.mark.parametrize(
    ("block", "dtype"),
    blocks(
        WIDE,
        Block("all NaN", (), NAN, "", "7f", 0xFF),
        Block("inf", (INF, -INF, 2.0**127), 0.5, "7b fb 3c", "00", 0xFE),
        Block("all zero", (), 0.0, "", "00", 0),
        Block("exact maximum", (57344, -57344, 9, 11), 1.125, "7b fb 48 4a", "3c", 127),
        Block("past the maximum", (57600, 57344), -9, "77 77", "c4", 128),
    ),
)
def test_bytes_of_named_mxfp8_blocks_in_e5m2(block: Block, dtype: torch.dtype) -> None:
    check_mxfp8_block(block, dtype, E5M2)


def check_mxfp8_block(block: Block, dtype: torch.dtype, fmt: DType) -> None:
    """The block as the first row and, turned, as the first column of a tensor of ones."""
    exponent = {E4M3: 127 - 8, E5M2: 127 - 15}[fmt]
    x = torch.ones(32, 32, dtype=dtype)
    x[0] = block.row(32, dtype)
    data = np.full((32, 32), 0x78, np.uint8)  # a one times 2^8 or 2^15
    data[0] = block.bytes(32)
    scale = np.zeros((128, 4), np.uint8)
    scale[:32, 0] = exponent
    scale[0, 0] = int(block.scale)
    row, row_scale, _, _ = mxfp8.quantize(x, fmt)
    assert all_same((row, row_scale), (data, scale))
    _, _, col, col_scale = mxfp8.quantize(x.T, fmt)
    assert all_same((col, col_scale), (data.T, scale.T))


# 16 elements are 8 bytes, so blocks are written out in full; ``scale`` is the E4M3 byte.
NVFP4_BLOCKS = {
    "all NaN": ([NAN] * 16, "77" * 8, 0x7F, NAN),
    "one NaN": ([1, NAN, *[-2] * 14], "77" * 8, 0x7F, NAN),
    "inf": ([1, INF, *[-2] * 14], "77" * 8, 0x7F, INF),
    "all zero": ([0.0] * 16, "00" * 8, 0x00, 0.0),
    "negative zero": ([-0.0] * 16, "88" * 8, 0x00, 0.0),
    # The block's scale rounds to 3 * 2^-9, and the factor of its elements is held at FLT_MAX.
    "smallest input": ([TINY, -TINY, *[0.0] * 14], "80" + "00" * 7, 0x03, TINY),
    "smallest subnormal": (
        [6, 0.5, 0.251953125, 0.25, -0.5, -0.25, *[0.125] * 10],
        "17 01 89 00 00 00 00 00",
        0x7E,
        6.0,
    ),
    "exact maximum": (
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
        "10 32 54 76 98 ba dc fe",
        0x7E,
        6.0,
    ),
    "ties": (
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5],
        "07 22 44 66 8f aa cc ee",
        0x7E,
        6.0,
    ),
    # 1024 is one step of the block, so ones vanish.
    "one outlier": (
        [6144, 1, 256, 258, 512, -768, 1024, 3072, *[-1] * 8],
        "07 10 a1 52 88 88 88 88",
        0x7E,
        6144.0,
    ),
}


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", NVFP4_BLOCKS)
def test_bytes_of_named_nvfp4_blocks(name: str, dtype: torch.dtype) -> None:
    values, data, scale_byte, amax = NVFP4_BLOCKS[name]
    x = torch.tensor([values] * 16, dtype=torch.float64).to(dtype)
    assert torch.equal(x.double().nan_to_num(), torch.tensor([values] * 16).double().nan_to_num())
    packed = as_bytes(data)[None].repeat(16, axis=0)
    scale = np.zeros((128, 4), np.uint8)
    scale[:16, 0] = scale_byte
    row, row_scale, amax_row, *_ = nvfp4.quantize(x)
    assert all_same((row, row_scale), (packed, scale))
    *_, col, col_scale, amax_col = nvfp4.quantize(x.T)
    assert all_same((col, col_scale), (packed, scale))
    row, row_scale, amax_2d, *_ = nvfp4.quantize(x, two_dimensional=True)
    assert all_same((row, row_scale), (packed, scale))
    for got in (amax_row, amax_col, amax_2d):
        assert got.dtype == torch.float32
        assert np.array_equal(got.numpy(), np.array([amax]), equal_nan=True)


def test_a_quiet_nvfp4_block_beside_a_loud_one_rounds_its_scale_and_saturates() -> None:
    # 1 wants the scale 448 / 6144 = 0.0729, gets 0.0703 (0x19), and 1 / 0.0703 of it is past 6.
    x = torch.tensor([[6144.0] * 16 + [1.0] * 16] * 16)
    row, row_scale, *_ = nvfp4.quantize(x)
    scale = np.zeros((128, 4), np.uint8)
    scale[:16] = [0x7E, 0x19, 0, 0]
    assert all_same((row, row_scale), (np.full((16, 16), 0x77, np.uint8), scale))


# -- random tensors: torch equals numpy ----------------------------------------------


def largest_of(dtype: torch.dtype) -> float:
    return ref.LARGEST_INPUT[str(dtype).removeprefix("torch.")]


@given(
    x=randoms(),
    pow2=st.booleans(),
    fmt=st.sampled_from((E4M3, E5M2)),
    eps=st.sampled_from([0.0, 1e-3]),
)
@settings(max_examples=150, **deterministic)
def test_current_scaling_equals_the_numpy_definition(
    x: Random, pow2: bool, fmt: DType, eps: float
) -> None:
    t = x.tensor()
    got = fp8_scaling.quantize_current(t, fmt, pow2=pow2, eps=eps)
    codes, scale_inv = ref.quantize_current(fp32_of(t), NUMPY[fmt], pow2, eps)
    assert all_same(got, (codes, codes.T, scale_inv))
    assert np.array_equal(fp8_scaling.amax(t).numpy(), [np.abs(fp32_of(t)).max()], equal_nan=True)


@given(x=randoms(largest=40), pow2=st.booleans(), factor=st.sampled_from([0.0, 0.3, 1.0, 7.0]))
@settings(max_examples=20, **deterministic)
def test_a_reduced_amax_replaces_the_tensors_own(x: Random, pow2: bool, factor: float) -> None:
    t = x.tensor()
    amax = fp8_scaling.amax(t) * factor
    got = fp8_scaling.quantize_current(t, E4M3, pow2=pow2, amax_value=amax)
    codes, scale_inv = ref.quantize_current(fp32_of(t), ref.E4M3, pow2, amax=amax.numpy())
    assert all_same(got, (codes, codes.T, scale_inv))


def test_each_copy_of_nvfp4_takes_the_amax_that_was_reduced_for_it() -> None:
    x, amaxes = Random(32, 48, seed=9).tensor(), torch.tensor([100.0, 3000.0])
    both = nvfp4.quantize(x, hadamard=True, amax_value=amaxes)
    for part, amax in ((slice(0, 3), amaxes[:1]), (slice(3, 6), amaxes[1:])):
        alone = nvfp4.quantize(x, hadamard=True, amax_value=amax)
        assert all(map(torch.equal, both[part], alone[part]))
        assert torch.equal(both[part][2], amax)


def test_eps_is_the_least_amax_of_the_tensor_and_of_every_block() -> None:
    x = torch.tensor([[2.0**-18] * 128 + [2.0] * 128])
    row, _, scale_inv = fp8_scaling.quantize_current(x[:, :128], E4M3, eps=0.25, pow2=True)
    assert same(row, np.full((1, 128), 0x02, np.uint8))  # 2^-18 * 2^10
    assert same(scale_inv, np.array([2.0**-10], np.float32))
    row, row_scale, _, _ = block_scaling.quantize(x, E4M3, block_dim=1, eps=0.25)
    assert same(row, np.array([[0x02] * 128 + [0x78] * 128], np.uint8))
    expected = np.zeros((2, 4), np.float32)
    expected[:, 0] = 2.0**-10, 2.0**-7
    assert same(row_scale, expected)


@given(
    x=randoms(largest=300),
    fmt=st.sampled_from((E4M3, E4M3, E5M2)),
    block_dim=st.sampled_from((1, 2)),
    pow2=st.booleans(),
    eps=st.sampled_from([0.0, 0.0, 1e-3]),
)
@settings(max_examples=150, **deterministic)
def test_block_scaling_equals_the_numpy_definition(
    x: Random, fmt: DType, block_dim: int, pow2: bool, eps: float
) -> None:
    t = x.tensor()
    got = block_scaling.quantize(t, fmt, block_dim=block_dim, pow2=pow2, eps=eps)
    largest = largest_of(x.dtype)
    expected = ref.fp8_block_buffers(fp32_of(t), NUMPY[fmt], block_dim, pow2, eps, largest)
    assert all_same(got, expected)


@pytest.mark.parametrize(
    ("dtype", "scale_bits"),
    [
        # Half of 2^-128 rounds away; 1 / FLT_MAX and 1 / (the largest bf16) differ.
        (torch.float32, 0x00200000),
        (torch.bfloat16, 0x00202020),
    ],
    ids=str,
)
def test_a_scale_that_overflows_is_the_largest_number_of_the_inputs_dtype(
    dtype: torch.dtype, scale_bits: int
) -> None:
    x = torch.full((1, 1), TINY, dtype=dtype)
    _, row_scale, _, col_scale = block_scaling.quantize(x, E4M3, block_dim=1, pow2=False)
    assert bits(row_scale)[0] == bits(col_scale)[0] == scale_bits


@given(
    x=randoms(multiple=32),
    fmt=st.sampled_from((E4M3, E5M2)),
    two_dimensional=st.booleans(),
)
@settings(max_examples=150, **deterministic)
def test_mxfp8_equals_the_numpy_definition(x: Random, fmt: DType, two_dimensional: bool) -> None:
    t = x.tensor()
    got = mxfp8.quantize(t, fmt, two_dimensional=two_dimensional)
    assert all_same(got, ref.mxfp8_buffers(fp32_of(t), NUMPY[fmt], two_dimensional))


@given(
    x=randoms(multiple=16, largest=96),
    two_dimensional=st.booleans(),
    hadamard=st.booleans(),
    random_signs=st.booleans(),
    factor=st.none() | st.sampled_from([0.0, 1.0, 0.5, 3.0]),
)
@settings(max_examples=150, **deterministic)
def test_nvfp4_equals_the_numpy_definition(
    x: Random, two_dimensional: bool, hadamard: bool, random_signs: bool, factor: float | None
) -> None:
    t = x.tensor()
    values = fp32_of(t)
    amax = None if factor is None else fp8_scaling.amax(t) * factor
    how = {"two_dimensional": two_dimensional, "hadamard": hadamard, "random_signs": random_signs}
    got = nvfp4.quantize(t, **how, amax_value=amax)
    reduced = None if amax is None else amax.numpy()
    turned = np.ascontiguousarray(values.T)
    if hadamard:
        turned = ref.hadamard(turned, SIGN_MASK if random_signs else 0)
    row = ref.nvfp4_copy(values, two_dimensional, reduced)
    col = ref.nvfp4_copy(turned, two_dimensional, reduced)
    for copy, expected in ((got[:3], row), (got[3:], col)):
        assert all_same(copy[:2], expected[:2])
        assert np.array_equal(copy[2].numpy(), expected[2], equal_nan=True)


@given(
    x=randoms(multiple=16, largest=64),
    seed=st.integers(0, 2**63 - 1),
    offset=st.integers(0, 9) | st.integers(0, 2**40),
)
@settings(max_examples=30, **deterministic)
def test_stochastic_nvfp4_equals_the_numpy_definition(x: Random, seed: int, offset: int) -> None:
    t = x.tensor()
    values = fp32_of(t)
    got = nvfp4.quantize(t, stochastic=True, seed=seed, offset=offset)
    turned = np.ascontiguousarray(values.T)
    for stream, (copy, rows) in enumerate(((got[:2], values), (got[3:5], turned))):
        words = ref.random_words(seed, offset, rows.shape, stream)
        assert all_same(copy, ref.nvfp4_copy(rows, words=words)[:2])


# -- layouts -------------------------------------------------------------------------


@EVERY_QUANTIZER
@pytest.mark.parametrize("shape", [(96, 160), (32, 32)])
def test_one_copy_alone_has_the_bytes_that_it_has_beside_the_other(
    name: str, shape: tuple[int, int]
) -> None:
    x = Random(*shape, dtype=torch.bfloat16, seed=3).tensor()
    both = QUANTIZERS[name](x)
    for asked, other in (("row", "col"), ("col", "row")):
        alone = QUANTIZERS[name](x, rowwise=asked == "row", columnwise=asked == "col")
        for key, expected in both.items():
            if key.startswith(other):
                assert alone[key] is None
            else:
                assert identical(alone[key], expected)


@EVERY_QUANTIZER
def test_the_input_is_left_alone_and_no_output_shares_its_memory(name: str) -> None:
    x = Random(32, 64, seed=4).tensor()
    before = x.clone()
    outputs = [out for out in QUANTIZERS[name](x).values() if out is not None]
    memory = [out.untyped_storage().data_ptr() for out in outputs]
    assert len(set(memory)) == len(memory)
    for out in outputs:
        out.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["current", "current-pow2", "delayed", "block-2d"])
def test_the_columnwise_copy_is_the_transpose_of_the_rowwise_bytes(name: str) -> None:
    x = Random(131, 262, seed=5).tensor()
    out = QUANTIZERS[name](x)
    assert out["row"].shape == (131, 262)
    assert torch.equal(out["col"], out["row"].T)
    assert torch.equal(fp8.transpose(out["row"]), out["col"])
    assert fp8.transpose(out["row"]).is_contiguous()
    if name == "block-2d":
        assert torch.equal(out["col_scale"][:, :2], out["row_scale"][:, :3].T)


@pytest.mark.parametrize("name", ["block-1d", "block-2d", "nvfp4", "nvfp4-2d"])
def test_a_transposed_columnwise_copy_is_the_rowwise_copy_of_the_transpose(name: str) -> None:
    x = Random(160, 272, seed=6).tensor()
    col, row = QUANTIZERS[name](x), QUANTIZERS[name](x.T)
    for key in ("", "_scale", "_amax"):
        if f"col{key}" in col:
            assert identical(col[f"col{key}"], row[f"row{key}"])


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-2d"])
def test_the_columnwise_mxfp8_copy_keeps_the_shape_and_is_that_of_the_transpose(name: str) -> None:
    x = Random(160, 96, seed=7).tensor()
    col, row = QUANTIZERS[name](x), QUANTIZERS[name](x.T)
    assert col["col"].shape == (160, 96)
    assert identical(col["col"].T.contiguous(), row["row"])
    assert identical(col["col_scale"].T.contiguous(), row["row_scale"])


def test_columnwise_blocks_of_128_and_of_32_are_not_the_rowwise_bytes_turned() -> None:
    x = Random(256, 256, spread=12, seed=8).tensor()
    row, _, col, _ = mxfp8.quantize(x, E4M3)
    assert not identical(row, col)
    row, _, col, _ = block_scaling.quantize(x, E4M3, block_dim=1)
    assert not identical(row, col.T.contiguous())


@pytest.mark.parametrize(("name", "size"), [("mxfp8-2d", 32), ("nvfp4-2d", 16), ("block-2d", 128)])
def test_a_two_dimensional_block_has_one_scale_and_both_copies_have_the_same_values(
    name: str, size: int
) -> None:
    x = Random(256, 384, spread=12, seed=9).tensor()
    out = QUANTIZERS[name](x)
    row, row_scale, col, col_scale = (out[key] for key in ("row", "row_scale", "col", "col_scale"))
    if name == "mxfp8-2d":
        assert torch.equal(row, col)
        by_row = row_scale[:256, :12].reshape(8, 32, 12)
        by_col = col_scale[:8, :384].reshape(8, 12, 32)
        assert torch.equal(by_row, by_row[:, :1].expand_as(by_row))
        assert torch.equal(by_col, by_row[:, 0, :, None].expand_as(by_col))
        assert len(by_row.unique()) > 1
    elif name == "nvfp4-2d":
        by_row = row_scale[:256, :24].reshape(16, 16, 24)
        by_col = col_scale[:384, :16].reshape(24, 16, 16)
        assert torch.equal(by_row, by_row[:, :1].expand_as(by_row))
        assert torch.equal(by_col, by_row[:, :1].permute(2, 1, 0).expand_as(by_col))
        assert len(by_row.unique()) > 1
        assert np.array_equal(ref.unpacked(col.numpy()), ref.unpacked(row.numpy()).T)
    else:
        assert torch.equal(row, col.T)
        assert torch.equal(row_scale[:, :3], col_scale[:, :2].T)
    # What lies outside of a block has no say in it.
    inside = x[size : 2 * size, size : 2 * size]
    if name == "nvfp4-2d":
        alone, *_ = nvfp4.quantize(inside, two_dimensional=True, amax_value=out["row_amax"])
        assert identical(alone, row[16:32, 8:16].contiguous())
    else:
        alone = QUANTIZERS[name](inside)["row"]
        assert identical(alone, row[size : 2 * size, size : 2 * size].contiguous())


@pytest.mark.parametrize("block_dim", [1, 2])
def test_an_edge_block_uses_its_valid_elements_only(block_dim: int) -> None:
    x = Random(131, 259, seed=10).tensor()
    x[:128] *= 1000
    x[:, :256] *= 1000
    row, row_scale, col, _ = block_scaling.quantize(x, E4M3, block_dim=block_dim)
    corner = block_scaling.quantize(x[128:, 256:], E4M3, block_dim=block_dim)
    assert identical(corner[0], row[128:, 256:].contiguous())
    assert identical(corner[2], col[256:, 128:].contiguous())
    last = (slice(2, 3), slice(128, 131)) if block_dim == 1 else (slice(1, 2), slice(2, 3))
    assert torch.equal(row_scale[last], corner[1][:1, : last[1].stop - last[1].start])
    assert int((row_scale[last] == 0).sum()) == 0


@EVERY_QUANTIZER
def test_padding_is_zero_though_fresh_memory_is_not(name: str) -> None:
    x = Random(32, 96, seed=11).tensor() + 0.5
    clean = QUANTIZERS[name](x)
    torch.use_deterministic_algorithms(True)  # and fill what torch.empty returns with NaN
    try:
        assert torch.empty(1).isnan().all()
        poisoned = QUANTIZERS[name](x)
    finally:
        torch.use_deterministic_algorithms(False)
    for key, expected in clean.items():
        assert identical(poisoned[key], expected)
    valid = {
        "mxfp8": ((32, 3), (1, 96)),
        "block-1d": ((1, 32), (1, 96)),
        "block-2d": ((1, 1), (1, 1)),
        "nvfp4": ((32, 6), (96, 2)),
    }
    for key, (rows, columns) in zip(
        ("row_scale", "col_scale"),
        valid.get(name, valid.get(name.split("-")[0], ())),
        strict=False,
    ):
        scale = poisoned[key]
        assert scale[:rows, :columns].all()
        assert int(scale.count_nonzero()) == rows * columns


@EVERY_QUANTIZER
@pytest.mark.parametrize("view", ["transposed", "every other", "expanded", "slice"])
def test_a_non_contiguous_input_gives_the_same_bytes(name: str, view: str) -> None:
    x = {
        "transposed": Random(96, 64, seed=12).tensor().T,
        "every other": Random(128, 192, seed=12).tensor()[::2, ::2],
        "expanded": Random(64, 1, seed=12).tensor().expand(64, 96),
        "slice": Random(64, 99, seed=12).tensor()[:, 3:],
    }[view]
    assert not x.is_contiguous()
    expected = QUANTIZERS[name](x.contiguous())
    for key, got in QUANTIZERS[name](x).items():
        assert identical(got, expected[key])


@EVERY_QUANTIZER
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
def test_an_empty_tensor_has_empty_data_and_scales_of_the_right_shape(
    name: str, shape: tuple[int, int]
) -> None:
    m, k = shape
    out = QUANTIZERS[name](torch.empty(m, k, dtype=torch.bfloat16))
    shapes = {key: None if t is None else tuple(t.shape) for key, t in out.items()}
    if name.startswith("nvfp4"):
        assert (shapes["row"], shapes["col"]) == ((m, k // 2), (k, m // 2))
        assert shapes["row_scale"] == formats.nvfp4_scale_shape(m, k, False)
        assert shapes["col_scale"] == formats.nvfp4_scale_shape(m, k, True)
        assert (shapes["row_amax"], shapes["col_amax"]) == ((1,), (1,))
    elif name.startswith("mxfp8"):
        assert (shapes["row"], shapes["col"]) == ((m, k), (m, k))
        assert shapes["row_scale"] == formats.mxfp8_scale_shape(m, k, False)
        assert shapes["col_scale"] == formats.mxfp8_scale_shape(m, k, True)
    elif name.startswith("block"):
        dim = int(name[6])
        assert (shapes["row"], shapes["col"]) == ((m, k), (k, m))
        assert shapes["row_scale"] == formats.fp8_block_scale_shape(m, k, False, dim)
        assert shapes["col_scale"] == formats.fp8_block_scale_shape(m, k, True, dim)
    else:
        assert (shapes["row"], shapes["col"]) == ((m, k), (k, m))
        scale_inv = ref.quotient(1, 3.0 if name == "delayed" else 1.0).reshape(1)
        assert same(out["scale_inv"], scale_inv)
    for key, tensor in out.items():
        if key.endswith("amax"):
            assert same(tensor, np.zeros(1, np.float32))
        elif key.endswith("_scale"):
            assert not tensor.any()


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


@EVERY_QUANTIZER
def test_quantizing_reads_nothing_back_from_the_device(name: str) -> None:
    x = Random(32, 64, dtype=torch.bfloat16, seed=13).tensor()
    on_meta = x.to("meta")
    with MetaOnly():
        out = QUANTIZERS[name](on_meta)
        values = [dequantize(torch.bfloat16) for dequantize in dequantizers(name, out).values()]
    for key, tensor in QUANTIZERS[name](x).items():
        assert out[key].shape == tensor.shape
        assert out[key].dtype == tensor.dtype
    assert [tuple(value.shape) for value in values] == [(32, 64)] * 2


# -- dequantize ----------------------------------------------------------------------

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
    row_amax, col_amax = out["row_amax"], out["col_amax"]
    return {
        "row": lambda to: nvfp4.dequantize(row, row_scale, row_amax, to, columnwise=False),
        "col": lambda to: nvfp4.dequantize(col, col_scale, col_amax, to, columnwise=True),
    }


def units(name: str, out: Outputs, copy: str, shape: tuple[int, int]) -> np.ndarray:
    """What a code of 1 stands for, for each element of ``[M, K]``, in fp32."""
    if "scale_inv" in out:
        return np.broadcast_to(out["scale_inv"].numpy(), shape)
    m, k = shape
    scale = out[f"{copy}_scale"].numpy()
    turned = copy == "col"
    if name.startswith("mxfp8"):
        rows, columns = (32, 1) if turned else (1, 32)
        scale = scale[: m // rows, : k // columns]
        factor = ref.fp32(np.ldexp(1.0, scale.astype(np.int64) - 127))
        return ref.spread(np.where(scale == 255, np.float32(NAN), factor), rows, columns, shape)
    stored = (k, m) if turned else (m, k)
    if name == "block-1d":
        unit = ref.spread(scale.T, 1, 128, stored)
    elif name == "block-2d":
        unit = ref.spread(scale, 128, 128, stored)
    else:
        amax = out[f"{copy}_amax"].numpy()
        factor = ref.product(ref.product(ref.E4M3.decode(scale), amax), ref.quotient(1, 2688.0))
        unit = ref.spread(factor, 1, 16, stored)
    return unit.T if turned else unit


@EVERY_QUANTIZER
@given(x=randoms(multiple=32, largest=160, finite=True))
@settings(max_examples=20, **deterministic)
def test_dequantize_multiplies_once_in_fp32_and_rounds_once(name: str, x: Random) -> None:
    t = x.tensor()
    out = QUANTIZERS[name](t)
    for copy, dequantize in dequantizers(name, out).items():
        codes = out[copy].numpy()
        fmt = ref.E5M2 if name == "current-pow2" else ref.E4M3
        if name.startswith("nvfp4"):
            fmt, codes = ref.E2M1, ref.unpacked(codes)
        values = fmt.decode(codes)
        if copy == "col" and not name.startswith("mxfp8"):
            values = values.T
        expected = ref.product(values, units(name, out, copy, (x.m, x.k)))
        got = dequantize(torch.float32)
        assert same(got, expected)
        for dtype in (torch.bfloat16, torch.float16):
            rounded = dequantize(dtype)
            assert rounded.is_contiguous()
            assert torch.equal(rounded, got.to(dtype))


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name != "nvfp4-stochastic"])
@given(x=randoms(multiple=32, largest=160, finite=True))
@settings(max_examples=20, **deterministic)
def test_a_dequantized_value_is_within_half_a_step_of_the_input(name: str, x: Random) -> None:
    t = x.tensor()
    if name == "delayed":
        t = t.clamp(-149, 149)  # which its scale of 3 brings below 448
    out = QUANTIZERS[name](t)
    exact = t.double().numpy()
    for copy, dequantize in dequantizers(name, out).items():
        wanted = exact
        if name == "nvfp4-hadamard" and copy == "col":
            wanted = nvfp4.hadamard_transform(t.float().T).T.double().numpy()
        unit = units(name, out, copy, (x.m, x.k)).astype(np.float64)
        if name.startswith("nvfp4"):
            # A fifth: 5 lies between 4 and 6. The block's scale may be off by half of E4M3's
            # smallest step, and six such steps are what its largest element can miss.
            amax = float(out[f"{copy}_amax"])
            slack = 6 * 2.0**-10 * amax / 2688
            bound = np.maximum(np.abs(wanted) / 5, unit / 4) + slack
        else:
            fmt = ref.E5M2 if name == "current-pow2" else ref.E4M3
            relative = 2.0 ** -(fmt.mantissa_bits + 1)
            bound = np.maximum(np.abs(wanted) * relative, unit * fmt.values[1] / 2)
        error = np.abs(dequantize(torch.float32).double().numpy() - wanted)
        assert (error <= bound * (1 + 2.0**-18)).all()


def maxima_everywhere(tile: int, dtype: DType) -> torch.Tensor:
    """A tensor in which every block of every format holds the format's maximum times 2^n.

    ``n`` differs between tiles of ``tile x tile``.
    """
    rng = np.random.default_rng(14)
    x = rng.uniform(-1, 1, (256, 256))
    i, j = np.indices(x.shape)
    x[(i + j) % 16 == 0] = 1
    tiles = rng.integers(-20, 20, (256 // tile, 256 // tile))
    return torch.from_numpy(np.ldexp(x, ref.spread(tiles, tile, tile, x.shape)) * dtype.max).float()


@pytest.mark.parametrize("out_dtype", WIDE, ids=str)
@FLOAT8
def test_quantizing_what_was_dequantized_gives_the_same_bytes_with_power_of_two_scales(
    dtype: DType, out_dtype: torch.dtype
) -> None:
    x = maxima_everywhere(256, dtype)
    row, _, scale_inv = fp8_scaling.quantize_current(x, dtype, pow2=True)
    again = fp8_scaling.dequantize(row, scale_inv, dtype, out_dtype)
    assert identical(fp8_scaling.quantize_current(again, dtype, pow2=True)[0], row)

    for two_dimensional in (False, True):
        check_round_trip(
            maxima_everywhere(32, dtype),
            partial(mxfp8.quantize, dtype=dtype, two_dimensional=two_dimensional),
            partial(mxfp8.dequantize, dtype=dtype, out_dtype=out_dtype),
        )
    for block_dim in (1, 2):
        check_round_trip(
            maxima_everywhere(128, dtype),
            partial(block_scaling.quantize, dtype=dtype, block_dim=block_dim),
            partial(
                block_scaling.dequantize, dtype=dtype, out_dtype=out_dtype, block_dim=block_dim
            ),
        )


def check_round_trip(
    x: torch.Tensor, quantize: Callable[..., Any], dequantize: Callable[..., torch.Tensor]
) -> None:
    """Each copy, dequantized and quantized again, has the same data and the same scales."""
    first = quantize(x)
    for at, columnwise in ((0, False), (2, True)):
        data, scale = first[at : at + 2]
        again = quantize(dequantize(data, scale, columnwise=columnwise))
        assert identical(again[at], data)
        assert identical(again[at + 1], scale)


@pytest.mark.parametrize("name", ["current-pow2", "mxfp8", "mxfp8-2d"])
@given(x=randoms(multiple=32, largest=128, finite=True))
@settings(max_examples=20, **deterministic)
def test_quantizing_twice_changes_no_value_with_power_of_two_scales(name: str, x: Random) -> None:
    # Bytes may change: a block whose largest byte is half the maximum gets half the scale.
    once = dequantizers(name, QUANTIZERS[name](x.tensor()))
    for copy, dequantize in once.items():
        values = dequantize(torch.float32)
        twice = dequantizers(name, QUANTIZERS[name](values))[copy]
        assert torch.equal(twice(torch.float32), values)


def test_the_least_exponent_dequantizes_by_a_subnormal_and_the_last_to_nan() -> None:
    data = torch.full((32, 32), 0x38, dtype=torch.uint8)  # 1.0
    scale = torch.zeros(128, 4, dtype=torch.uint8)
    scale[:32, 0] = torch.arange(224, 256)
    scale[0, 0], scale[1, 0] = 0, 1
    x = mxfp8.dequantize(data, scale, E4M3, torch.float32, columnwise=False)
    assert bits(x[:4, 0]) == [0x00400000, 0x00800000, 226 << 23, 227 << 23]
    assert bits(x[30, :1]) == [0x7F000000]
    assert x[31].isnan().all()
    column = mxfp8.dequantize(data, scale.T.contiguous(), E4M3, torch.float32, columnwise=True)
    assert same(column, x.T.contiguous().numpy())


@EVERY_QUANTIZER
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
def test_an_empty_tensor_dequantizes_to_an_empty_one(name: str, shape: tuple[int, int]) -> None:
    out = QUANTIZERS[name](torch.empty(shape))
    for dequantize in dequantizers(name, out).values():
        x = dequantize(torch.bfloat16)
        assert tuple(x.shape) == shape
        assert x.dtype == torch.bfloat16


@EVERY_QUANTIZER
def test_a_nan_in_the_input_is_a_nan_in_what_comes_back(name: str) -> None:
    x = Random(64, 64, seed=15).tensor()
    x[5, 40] = NAN
    for dequantize in dequantizers(name, QUANTIZERS[name](x)).values():
        values = dequantize(torch.float32)
        if name == "nvfp4-hadamard" or name == "nvfp4-stochastic":
            assert values.isnan().any()
        else:
            assert values[5, 40].isnan()
        if name.startswith("mxfp8"):
            # The NaN stays in its block.
            assert not values[32:].isnan().any()
            assert not values[:, :32].isnan().any()


# -- swizzle -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (384, 4), (128, 20), (0, 4)], ids=str)
def test_swizzle_follows_its_formula_and_unswizzle_undoes_it(shape: tuple[int, int]) -> None:
    scale = torch.from_numpy(np.random.default_rng(16).integers(0, 256, shape).astype(np.uint8))
    swizzled = mxfp8.swizzle(scale)
    assert same(swizzled, ref.swizzle(scale.numpy()))
    assert same(mxfp8.unswizzle(swizzled), scale.numpy())
    assert same(mxfp8.swizzle(mxfp8.unswizzle(scale)), scale.numpy())


def test_swizzle_of_a_view_is_that_of_its_copy() -> None:
    scale = torch.arange(2**11).to(torch.uint8).view(4, 512).T
    assert identical(mxfp8.swizzle(scale), mxfp8.swizzle(scale.contiguous()))
    assert identical(mxfp8.unswizzle(scale), mxfp8.unswizzle(scale.contiguous()))


def test_the_first_bytes_of_a_swizzled_tile_are_rows_0_32_64_and_96() -> None:
    scale = torch.zeros(128, 8, dtype=torch.uint8)
    for n, r in enumerate((0, 32, 64, 96, 1)):
        scale[r, :4] = torch.arange(1, 5) + 16 * n
    scale[0, 4] = 0xFF
    flat = mxfp8.swizzle(scale).flatten()
    head = as_bytes("01020304 11121314 21222324 31323334 41424344")
    assert same(flat[:20], head)
    assert flat[512] == 0xFF  # the tile beside it


@pytest.mark.parametrize("shape", [(64, 4), (128, 6)], ids=str)
@pytest.mark.parametrize("function", [mxfp8.swizzle, mxfp8.unswizzle])
def test_scales_that_are_no_whole_tiles_are_refused_with_their_shape(
    function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int]
) -> None:
    with pytest.raises(InputError, match=rf"\[{shape[0]}, {shape[1]}\]"):
        function(torch.zeros(shape, dtype=torch.uint8))


# -- delayed scaling -----------------------------------------------------------------


@given(
    x=randoms(largest=60),
    scale=st.sampled_from([1.0, 3.0, 2.0**-126, FLT_MAX, 149.33333]),
    fmt=st.sampled_from((E4M3, E5M2)),
)
@settings(max_examples=40, **deterministic)
def test_a_delayed_cast_uses_the_given_scale_and_measures_the_amax(
    x: Random, scale: float, fmt: DType
) -> None:
    t = x.tensor()
    held = torch.tensor([scale])
    row, col, scale_inv, amax = fp8_scaling.quantize_delayed(t, held, fmt)
    codes = NUMPY[fmt].encode(ref.product(fp32_of(t), held.numpy()))
    assert all_same((row, col, scale_inv), (codes, codes.T, ref.quotient(1, held.numpy())))
    assert amax.dtype == torch.float32
    assert np.array_equal(amax.numpy(), [np.abs(fp32_of(t)).max()], equal_nan=True)
    assert held.item() == torch.tensor(scale).item()


amaxes = st.sampled_from([0.0, 0.0, 2.0**-140, 2.0**-119, INF, FLT_MAX]) | st.floats(
    0, 1e6, width=32, allow_subnormal=False
)


@given(
    steps=st.lists(st.tuples(amaxes, amaxes, amaxes), min_size=1, max_size=12),
    length=st.integers(1, 5),
    margin=st.integers(-1, 3),
    algorithm=st.sampled_from(["max", "most_recent"]),
    as_tensor=st.booleans(),
)
@settings(max_examples=100, **deterministic)
def test_delayed_scales_follow_the_loop_of_their_definition(
    steps: list[tuple[float, float, float]],
    length: int,
    margin: int,
    algorithm: str,
    as_tensor: bool,
) -> None:
    largest = [448.0, 57344.0, 448.0] if as_tensor else [448.0] * 3
    max_fp8 = torch.tensor(largest) if as_tensor else 448.0
    history, scale = torch.zeros(length, 3), torch.tensor([1.0, 2.0, 5.0])
    found: list[list[tuple[float, list[float]]]] = [[], [], []]
    for step in steps:
        history[0] = torch.tensor(step)
        result = fp8_scaling.update_delayed(
            history, scale, max_fp8, margin=margin, algorithm=algorithm
        )
        assert result is None
        for n in range(3):
            found[n].append((scale[n].item(), sorted(history[:, n].tolist())))
            if step[n] != 0:
                assert history[0, n] == 0
    for n, start in enumerate((1.0, 2.0, 5.0)):
        own = [step[n] for step in steps]
        assert found[n] == ref.delayed_scale_loop(own, length, largest[n], start, margin, algorithm)


def test_a_history_that_is_full_forgets_its_oldest_amax() -> None:
    history, scale = torch.zeros(3, 1), torch.ones(1)
    seen = []
    for amax in (64.0, 4.0, 2.0, 1.0, 0.0, 0.0, 1.0):
        history[0] = amax
        fp8_scaling.update_delayed(history, scale, 448.0)
        seen.append(448.0 / scale.item())
    assert seen == [64, 64, 64, 4, 2, 2, 2]


def test_the_newest_amax_goes_to_the_end_of_the_history_and_the_others_move_up() -> None:
    history, scale = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.ones(1)
    fp8_scaling.update_delayed(history, scale, 448.0)
    assert history.flatten().tolist() == [0.0, 3.0, 4.0, 1.0]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_nan_amax_leaves_the_scale_and_falls_out_of_the_history(algorithm: str) -> None:
    history, scale = torch.zeros(2, 2), torch.tensor([3.0, 3.0])
    history[0] = torch.tensor([NAN, 1.0])
    fp8_scaling.update_delayed(history, scale, 448.0, algorithm=algorithm)
    assert scale.tolist() == [3.0, 448.0]
    for _ in range(2):
        history[0] = 2.0
        fp8_scaling.update_delayed(history, scale, 448.0, algorithm=algorithm)
    assert scale.tolist() == [224.0, 224.0]
    assert not history.isnan().any()


def test_an_unknown_amax_algorithm_is_refused_with_the_two_known_ones() -> None:
    with pytest.raises(InputError, match=r"'mean'.*'max'.*'most_recent'"):
        fp8_scaling.update_delayed(torch.zeros(2, 1), torch.ones(1), 448.0, algorithm="mean")


def test_updating_delayed_scales_reads_nothing_back_from_the_device() -> None:
    history, scale = torch.zeros(2, 3, device="meta"), torch.ones(3, device="meta")
    max_fp8 = torch.full((3,), 448.0, device="meta")
    with MetaOnly():
        fp8_scaling.update_delayed(history, scale, max_fp8)
        fp8_scaling.update_delayed(history, scale, 448.0, margin=1, algorithm="most_recent")


# -- NVFP4: Hadamard transform -------------------------------------------------------


# Of NVIDIA's implementation: bit i set, element i of every 16 changes its sign.
SIGN_MASK = 0xD7E8
NEGATIVE = (3, 5, 6, 7, 8, 9, 10, 12, 14, 15)


@pytest.mark.parametrize("random_signs", [True, False])
def test_the_hadamard_transform_is_orthonormal_and_its_inverse_undoes_it_exactly(
    random_signs: bool,
) -> None:
    identity = torch.eye(16)
    # Row i is the image of unit vector i.
    matrix = nvfp4.hadamard_transform(identity, random_signs)
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25))
    assert torch.equal(matrix @ matrix.T, identity)
    assert torch.equal(nvfp4.inverse_hadamard_transform(matrix, random_signs), identity)
    assert torch.equal(nvfp4.inverse_hadamard_transform(identity, random_signs), matrix.T)
    # Sums of 16 of these, in quarters, have the 8 bits of bf16.
    x = torch.from_numpy(np.random.default_rng(17).integers(-9, 9, (5, 48))).to(torch.bfloat16)
    y = nvfp4.hadamard_transform(x, random_signs)
    assert y.dtype == torch.float32
    assert torch.equal(nvfp4.inverse_hadamard_transform(y, random_signs), x.float())
    assert torch.equal(y.square().sum(-1), x.float().square().sum(-1))


@pytest.mark.parametrize("random_signs", [True, False])
def test_the_hadamard_transform_has_the_signs_of_its_mask_and_mixes_groups_of_16_only(
    random_signs: bool,
) -> None:
    matrix = nvfp4.hadamard_transform(torch.eye(16), random_signs).T
    signs = [-1.0 if random_signs and i in NEGATIVE else 1.0 for i in range(16)]
    assert [i for i in range(16) if formats.HADAMARD_SIGNS >> i & 1] == list(NEGATIVE)
    sylvester = [[(-1.0) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)]
    assert torch.equal(matrix, torch.tensor(sylvester) * torch.tensor(signs))
    x = torch.zeros(2, 48)
    x[1, 20] = 4.0
    y = nvfp4.hadamard_transform(x, random_signs)
    assert torch.equal(y[1, 16:32], matrix[:, 4] * 4)
    assert int(y.count_nonzero()) == 16


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-140, 100))
@settings(max_examples=20, **deterministic)
def test_the_hadamard_transform_adds_in_its_documented_order_and_rounds_to_bf16(
    seed: int, exponent: int
) -> None:
    x = Random(7, 64, exponent=exponent, seed=seed).tensor()
    found = nvfp4.hadamard_transform(x)
    assert same(found, ref.hadamard(x.numpy(), SIGN_MASK))
    assert torch.equal(found.bfloat16().float(), found)
    exact = (x.double().view(-1, 16) @ nvfp4.hadamard_transform(torch.eye(16)).double()).view(7, 64)
    size = x.double().abs().view(-1, 16).sum(-1).max() * 2.0**-23
    rounding = exact.abs() * 2.0**-8 + 2.0**-134
    assert ((found.double() - exact).abs() <= size + rounding).all()


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("random_signs", [True, False])
def test_transformed_bytes_are_those_of_a_matrix_product(
    dtype: torch.dtype, random_signs: bool
) -> None:
    """Written from the formulas, with the sums in another order."""
    x = Random(512, 256, dtype, spread=1, seed=23).tensor()
    got = nvfp4.quantize(x, hadamard=True, random_signs=random_signs)
    turned = np.ascontiguousarray(fp32_of(x).T)
    col = ref.nvfp4_copy(ref.hadamard_by_matrix(turned, SIGN_MASK if random_signs else 0))
    row = ref.nvfp4_copy(fp32_of(x))
    assert all_same(got[:2], row[:2])
    assert same(got[4], col[1])
    assert np.array_equal(got[5].numpy(), col[2])
    # Sums of 16-bit elements of like magnitudes are exact in fp32, in any order; of fp32 elements
    # they are not, and a sum that lies beside the middle of two bf16 numbers may go either way.
    differ = np.count_nonzero(ref.unpacked(got[3].numpy()) != ref.unpacked(col[0]))
    assert differ <= (2e-4 * x.numel() if dtype is torch.float32 else 0)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_the_columnwise_copy_under_hadamard_is_that_of_the_tensor_transformed_along_m(
    dtype: torch.dtype,
) -> None:
    x = torch.from_numpy(np.random.default_rng(18).integers(-9, 9, (64, 48))).to(dtype)
    plain, mixed = nvfp4.quantize(x), nvfp4.quantize(x, hadamard=True)
    for a, b in zip(plain[:3], mixed[:3], strict=True):
        assert identical(a, b)
    transformed = nvfp4.quantize(nvfp4.hadamard_transform(x.T), columnwise=False)
    for a, b in zip(transformed[:3], mixed[3:], strict=True):
        assert identical(a, b)
    assert not identical(plain[3], mixed[3])


def test_an_outlier_does_less_harm_to_its_block_under_hadamard() -> None:
    x = Random(16, 64, spread=0, seed=19).tensor()
    x[3] *= 40
    errors = []
    for hadamard in (False, True):
        *_, col, scale, amax = nvfp4.quantize(x, hadamard=hadamard)
        back = nvfp4.dequantize(col, scale, amax, torch.float32, columnwise=True)
        if hadamard:
            back = nvfp4.inverse_hadamard_transform(back.T).T
        # The outlier's own error is that of its size; the others' is what it does to them.
        others = [i for i in range(16) if i != 3]
        errors.append(((back - x)[others] == -x[others]).float().mean().item())
    assert errors[1] < errors[0] / 4  # the share of elements that were lost altogether


# -- NVFP4: stochastic rounding ------------------------------------------------------

# One of each interval of E2M1, of both signs, beside values that it holds exactly.
BETWEEN = [0.125, 0.8, 1.1, -1.75, 2.25, 3.9, -4.5, 5.9, -0.3, 0.0, -0.0, 0.5, -3.0, 1e-3, 1.999]


def draws(rows: int, **options: Any) -> np.ndarray:
    """Codes ``[rows, 15]`` of BETWEEN, in blocks whose factor is 1."""
    x = torch.tensor([[6.0, *BETWEEN]] * rows)
    row, scale, *_ = nvfp4.quantize(x, columnwise=False, stochastic=True, **options)
    assert scale[:rows, 0].eq(0x7E).all()
    codes = ref.unpacked(row.numpy())
    assert (codes[:, 0] == 7).all()
    return codes[:, 1:]


def test_stochastic_rounding_is_unbiased_over_seeds_and_reaches_both_neighbours_only() -> None:
    rows, seeds = 512, 64
    codes = np.concatenate([draws(rows, seed=seed) for seed in range(seeds)])
    values = ref.E2M1.decode(codes)
    grid = np.concatenate((-ref.E2M1.values[::-1], ref.E2M1.values))
    for n, x in enumerate(torch.tensor(BETWEEN).double().tolist()):
        floor, ceiling = grid[grid <= x].max(), grid[grid >= x].min()
        assert set(values[:, n]) == {floor, ceiling}
        # Hoeffding: a mean of N draws from [floor, ceiling] is off by more with chance 1e-9.
        bound = (ceiling - floor) * math.sqrt(math.log(2 / 1e-9) / (2 * rows * seeds))
        assert abs(values[:, n].mean() - x) <= bound + 2.0**-24


def test_one_seed_draws_its_elements_independently() -> None:
    rows = 4096
    up = ref.E2M1.decode(draws(rows, seed=20)[:, :8])
    up = up == up.max(axis=0)
    correlation = np.corrcoef(up.T) - np.eye(8)
    neighbours = [np.corrcoef(up[:-1, n], up[1:, n])[0, 1] for n in range(8)]
    # Six standard deviations of the correlation of independent draws.
    assert np.abs(correlation).max() < 6 / math.sqrt(rows)
    assert np.abs(neighbours).max() < 6 / math.sqrt(rows)


def test_equal_seeds_round_equally_and_other_seeds_and_offsets_do_not() -> None:
    first = draws(64, seed=7)
    assert np.array_equal(draws(64, seed=7), first)
    assert np.array_equal(draws(64, seed=7, offset=0), first)
    others = [{"seed": 8}, {"seed": 7 + 2**32}, {"seed": 7, "offset": 1}]
    others += [{"seed": 7, "offset": 16}, {"seed": 7, "offset": 2**34}]
    for other in others:
        assert not np.array_equal(draws(64, **other), first)


def test_an_offset_skips_elements() -> None:
    assert np.array_equal(draws(64, seed=7)[16:], draws(48, seed=7, offset=16 * 16))


def test_the_copies_of_a_tensor_round_independently() -> None:
    # A symmetric tensor: with one stream both copies would be the same.
    x = Random(64, 64, seed=21).tensor()
    row, _, _, col, _, _ = nvfp4.quantize(x + x.T, stochastic=True, seed=1)
    assert not identical(row, col)


def test_values_that_e2m1_holds_do_not_change_under_stochastic_rounding() -> None:
    x = torch.from_numpy(ref.E2M1.decode(np.arange(256, dtype=np.uint8) % 16)).float()
    expected = nvfp4.quantize(x.view(16, 16))
    for a, b in zip(nvfp4.quantize(x.view(16, 16), stochastic=True), expected, strict=True):
        assert identical(a, b)


def test_philox_has_the_known_answers() -> None:
    # Random123's: counter, key, result.
    ones = 0xFFFFFFFF
    assert ref.philox_4x32_10((0, 0, 0, 0), (0, 0)) == (
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8
    )  # fmt: skip
    assert ref.philox_4x32_10((ones,) * 4, (ones, ones)) == (
        0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD
    )  # fmt: skip
    # Digits of pi.
    assert ref.philox_4x32_10(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    ) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize(
    ("seed", "offset", "stream"),
    [
        (0, 0, 0),
        (1, 3, 1),
        (2**32 + 5, 2**34 - 7, 0),
        (2**63 - 1, 4 * (2**32 - 1), 1),
        (0xFFFFFFFF, 2**40 + 2, 0xFFFFFFFF),
        (-1, 1, 0),
    ],
)
def test_random_words_are_those_of_philox(seed: int, offset: int, stream: int) -> None:
    shape = torch.Size((3, 5))
    words = nvfp4.random_words(seed, offset, shape, stream, torch.device("cpu"))
    assert same(words, ref.random_words(seed, offset, tuple(shape), stream))
    if (seed, offset, stream) == (0, 0, 0):
        assert words[0, :4].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
