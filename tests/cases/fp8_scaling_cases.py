"""FP8 with one scale a tensor: each launcher against its reference, wherever kernels run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantize_cases import (
    COPIES,
    EMPTY,
    INF,
    NAN,
    ODD,
    Input,
    Place,
    assert_same,
    buffers,
    fp8_format,
    special,
)

from fuser.cuda import fp8_scaling
from fuser.formats import DType
from fuser.reference import fp8_scaling as reference

EVERY_INPUT = pytest.mark.parametrize("case", [*ODD, *EMPTY, *special(20, 40)], ids=str)
EVERY_COPY = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)

# Options of current scaling; ``amax`` replaces the input's.
SCALES: tuple[dict[str, Any], ...] = (
    {"pow2": True},
    {"eps": 3.0},
    {"eps": 1e-40, "amax": 0.0},
    {"eps": -1.0, "amax": 0.0},
    {"amax": 2.0**-149},
    {"amax": 3e38, "pow2": True},
    {"amax": INF},
    {"amax": NAN, "eps": 1.0},
)
# Lengths of histories and counts of tensors, of the states in one update.
STATES = (
    [(1, 1)],
    [(2, 3)],
    [(1024, 2)],
    [(257, 40), (256, 1)],
    [(16, 3), (1, 2), (5, 0), (300, 1), (16, 7)],
)


def outputs(
    place: Place, case: Input, copies: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Poisoned outputs; at odd offsets where the input is."""
    shift = int(case.layout in ("shifted", "odd rows"))
    row = place.empty((case.m, case.k), shift=shift) if copies[0] else None
    return row, place.empty((case.k, case.m), shift=shift) if copies[1] else None


def check_amax(place: Place, case: Input) -> None:
    x, out = case.on(place), torch.zeros(1, device=place.device)
    with place.launching():
        fp8_scaling.amax(x, out=out)
    assert_same(out, reference.amax(case.values()), "amax")


def check_current(
    place: Place,
    case: Input,
    dtype: DType,
    copies: tuple[bool, bool],
    *,
    pow2: bool = False,
    eps: float = 0.0,
    amax: float | None = None,
) -> None:
    """The amax is given; where a tile is all of the input, its kernel finds it as well."""
    x, values = case.on(place), case.values()
    largest = reference.amax(values) if amax is None else torch.tensor([amax])
    expected = reference.quantize_current(
        values,
        dtype,
        pow2=pow2,
        eps=eps,
        rowwise=copies[0],
        columnwise=copies[1],
        amax_value=largest,
    )
    finds = amax is None and fp8_scaling.is_one_tile(case.m, case.k)
    for given in (largest.to(place.device), None)[: 1 + finds]:
        row, col = outputs(place, case, copies)
        scale_inv = place.empty((1,), torch.float32)
        with place.launching(row, col, scale_inv):
            fp8_scaling.quantize(
                fp8_format(dtype),
                x,
                buffers(row=row, col=col, scale_inv=scale_inv),
                pow2=pow2,
                eps=eps,
                amax_value=given,
            )
        for name, got, wanted in zip(
            ("row", "col", "scale_inv"), (row, col, scale_inv), expected, strict=True
        ):
            assert_same(got, wanted, name)


def check_delayed(
    place: Place, case: Input, dtype: DType, copies: tuple[bool, bool], *, scale: float, seen: float
) -> None:
    """``seen`` is the amax that was recorded before."""
    x, values, scales = case.on(place), case.values(), torch.tensor([scale])
    row, col = outputs(place, case, copies)
    scale_inv = place.empty((1,), torch.float32)
    amax = torch.tensor([seen], device=place.device)
    with place.launching(row, col, scale_inv):
        fp8_scaling.quantize(
            fp8_format(dtype),
            x,
            buffers(row=row, col=col, scale_inv=scale_inv),
            scale=scales.to(place.device),
            recorded=amax,
        )
    *expected, newest = reference.quantize_delayed(
        values, scales, dtype, rowwise=copies[0], columnwise=copies[1]
    )
    wanted = (*expected, torch.maximum(newest, torch.tensor([seen])))
    names = ("row", "col", "scale_inv", "amax")
    for name, got, want in zip(names, (row, col, scale_inv, amax), wanted, strict=True):
        assert_same(got, want, name)


def check_transpose(place: Place, m: int, k: int, shift: int) -> None:
    memory = torch.randint(0, 256, (m * k + shift,), dtype=torch.uint8)
    data = memory.to(place.device)[shift:].view(m, k)
    out = place.empty((k, m), shift=shift)
    with place.launching(out):
        fp8_scaling.transpose(data, out=out)
    assert_same(out, reference.transpose(data.cpu()), "out")


def check_dequantize(
    place: Place, n: int, dtype: DType, out_dtype: torch.dtype, scale_inv: float, shift: int = 0
) -> None:
    """Every byte there is, in a row."""
    memory = torch.arange(n + shift).to(torch.uint8)
    data = memory.to(place.device)[shift:]
    out = place.empty((n,), out_dtype, shift)
    factor = torch.tensor([scale_inv])
    with place.launching(out):
        fp8_scaling.dequantize(data, factor.to(place.device), dtype, out_dtype, out=out)
    expected = reference.dequantize(data.cpu(), factor, dtype, out_dtype)
    assert_same(out, expected, "out")


def check_update(
    place: Place, sizes: list[tuple[int, int]], *, margin: int, algorithm: str
) -> None:
    """States of ``(length, count)``, with amaxes of every kind, in the history and beside it."""
    generator = torch.Generator().manual_seed(len(sizes))
    values = torch.tensor([0.0, 2.0**-149, 2.0**-140, 1e-3, 1.0, 448.0, 3e38, torch.inf, torch.nan])
    kinds = torch.tensor([4.0, 1.0, 1.0, 4.0, 4.0, 4.0, 2.0, 0.3, 0.3])
    states: list[tuple[Any, ...]] = []
    for length, count in sizes:
        which = torch.multinomial(kinds, length * count + 1, True, generator=generator)
        history = values[which[1:]].view(length, count)
        scale = torch.rand(count, generator=generator)
        largest = torch.tensor([448.0, 57344.0]).repeat(count)[:count]
        states.append((history, scale, largest, None))
        # Of ranks: other amaxes than those of row 0, and -1, with which nothing changes.
        which = torch.multinomial(kinds, count + 1, True, generator=generator)[1:]
        amaxes = torch.where(torch.rand(count, generator=generator) < 0.3, -1.0, values[which])
        states.append((history.clone(), scale.clone(), largest, amaxes))
    there = [
        [part if part is None else part.clone().to(place.device) for part in state]
        for state in states
    ]
    with place.launching():
        fp8_scaling.update_delayed(*zip(*there, strict=True), margin=margin, algorithm=algorithm)
    options: dict[str, Any] = {"margin": margin, "algorithm": algorithm}
    for state, (got_history, got_scale, *_) in zip(states, there, strict=True):
        history, scale, _, amaxes = state
        before = history.clone(), scale.clone()
        reference.update_delayed(*state, **options)
        if amaxes is not None:
            stays = amaxes == -1
            assert_same(history[:, stays], before[0][:, stays], "amax_history that stays")
            assert_same(scale[stays], before[1][stays], "scale that stays")
        assert_same(got_scale, scale, "scale")
        assert_same(got_history, history, "amax_history")
