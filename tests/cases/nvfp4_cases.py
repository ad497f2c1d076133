"""NVFP4: each launcher against its reference, wherever kernels run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from quantize_cases import (
    COPIES,
    INF,
    NAN,
    WHOLE_BLOCKS,
    Input,
    Place,
    assert_same,
    buffers,
    nvfp4_format,
    special,
)

from fuser.cuda import nvfp4
from fuser.formats import nvfp4_scale_shape
from fuser.reference import nvfp4 as reference

EMPTY = (Input(0, 64), Input(64, 0))
HALF_BLOCKS = (Input(16, 16), Input(144, 272), Input(48, 80, torch.float16, "rows"))
EVERY_INPUT = pytest.mark.parametrize(
    "case", [*WHOLE_BLOCKS, *HALF_BLOCKS, *EMPTY, *special(48, 80)], ids=str
)
EVERY_COPY = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)


@dataclass(frozen=True)
class Options:
    """How to quantize."""

    two_dimensional: bool = False
    hadamard: bool = False
    random_signs: bool = True
    stochastic: bool = False
    seed: int = 0
    offset: int = 0

    def __str__(self) -> str:
        plain = vars(Options())
        given = (f"{name}={value}" for name, value in vars(self).items() if value != plain[name])
        return "-".join(given) or "plain"


KINDS = (
    Options(),
    Options(two_dimensional=True),
    Options(hadamard=True),
    Options(stochastic=True, seed=2**63 + 12345),
    Options(hadamard=True, stochastic=True, seed=-7, offset=2**34 + 8),
    Options(hadamard=True, two_dimensional=True),
    Options(hadamard=True, random_signs=False),
)
EVERY_KIND = pytest.mark.parametrize("options", KINDS, ids=str)
# An amax that reduction over a group made larger, one for each copy, and what breaks encoding.
AMAXES = ((1e3,), (5.0, 7.0), (0.0,), (2.0**-149,), (2.0**-120,), (3e38,), (INF,), (NAN, 1.0))


def amaxes_of(values: torch.Tensor, hadamard: bool, random_signs: bool = True) -> torch.Tensor:
    """Of both copies, by the reference."""
    *_, row, _, _, col = reference.quantize(values, hadamard=hadamard, random_signs=random_signs)
    assert row is not None
    assert col is not None
    return torch.cat((row, col))


def check_hadamard_amax(place: Place, case: Input, random_signs: bool) -> None:
    x, out = case.on(place), torch.zeros(2, device=place.device)
    with place.launching():
        nvfp4.hadamard_amax(x, random_signs=random_signs, out=out)
    assert_same(out, amaxes_of(case.values(), True, random_signs), "amax")


def check_quantize(
    place: Place,
    case: Input,
    options: Options,
    copies: tuple[bool, bool] = (True, True),
    amax: tuple[float, ...] | None = None,
) -> None:
    x, values = case.on(place), case.values()
    m, k = case.m, case.k
    own = amaxes_of(values, options.hadamard, options.random_signs)
    amaxes = own if amax is None else torch.tensor(amax)
    shift = int(case.layout in ("shifted", "odd rows"))
    row = row_scale = row_amax = col = col_scale = col_amax = None
    if copies[0]:
        row_amax = place.empty((1,), torch.float32) if m * k else None
        row = place.empty((m, k // 2), shift=shift)
        row_scale = place.empty(nvfp4_scale_shape(m, k, False))
    if copies[1]:
        col_amax = place.empty((1,), torch.float32) if m * k else None
        col = place.empty((k, m // 2), shift=shift)
        col_scale = place.empty(nvfp4_scale_shape(m, k, True))
    outputs = (row, row_scale, row_amax, col, col_scale, col_amax)
    with place.launching(*outputs):
        nvfp4.quantize(
            nvfp4_format(options.two_dimensional),
            x,
            buffers(
                row=row,
                row_scale=row_scale,
                row_amax=row_amax,
                col=col,
                col_scale=col_scale,
                col_amax=col_amax,
            ),
            amaxes.to(place.device),
            **{k: v for k, v in vars(options).items() if k != "two_dimensional"},
        )
    expected = reference.quantize(
        values, rowwise=copies[0], columnwise=copies[1], amax_value=amaxes, **vars(options)
    )
    names = ("row", "row_scale", "row_amax", "col", "col_scale", "col_amax")
    for name, got, want in zip(names, outputs, expected, strict=True):
        if m * k or not name.endswith("amax"):
            assert_same(got, want, name)


def check_dequantize(
    place: Place, case: Input, out_dtype: torch.dtype, *, columnwise: bool
) -> None:
    """Of a copy of ``case``; at odd offsets where the input is."""
    copy = reference.quantize(case.values(), rowwise=not columnwise, columnwise=columnwise)
    data, scale, amax = copy[3:] if columnwise else copy[:3]
    assert data is not None
    assert scale is not None
    assert amax is not None
    check_dequantize_of(place, data, scale, amax, out_dtype, columnwise, case.layout == "shifted")


def check_every_byte(
    place: Place, out_dtype: torch.dtype, *, columnwise: bool, amax: float
) -> None:
    """Every byte of data under every scale."""
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.zeros(nvfp4_scale_shape(256, 512, False), dtype=torch.uint8)
    scale[:256, :32] = torch.arange(256, dtype=torch.uint8)[:, None]
    check_dequantize_of(place, data, scale, torch.tensor([amax]), out_dtype, columnwise)


def check_dequantize_of(
    place: Place,
    data: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    out_dtype: torch.dtype,
    columnwise: bool,
    shift: int = 0,
) -> None:
    rows, columns = data.shape[0], 2 * data.shape[1]
    there = place.empty(data.shape, shift=shift).copy_(data)
    out = place.empty((columns, rows) if columnwise else (rows, columns), out_dtype, shift)
    with place.launching(out):
        nvfp4.dequantize(
            there,
            scale.to(place.device),
            amax.to(place.device),
            out_dtype,
            columnwise=columnwise,
            out=out,
        )
    expected = reference.dequantize(data, scale, amax, out_dtype, columnwise=columnwise)
    assert_same(out, expected, "out")
