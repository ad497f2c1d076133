"""Normalizations into every store, in the emulator: the bits of row kernel and store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import norm_store_cases as cases
import pytest
import torch
from emulator import emulated, prepare
from kernel_instantiations import instantiations
from needs import needs_nvrtc
from norm_store_cases import BLOCKS, ODD, STORES
from normalization_cases import BF16, F32, Case, inputs_of
from nvrtc import CAPABILITIES, compiled

from fuser.cuda import module
from fuser.cuda import normalization as launchers

pytestmark = pytest.mark.sampled(most=12)

EVERY_STORE = cases.kernels_of(list(STORES), BLOCKS)
ONE_STORE = cases.kernels_of(["1x128"], ODD)
prepare(*EVERY_STORE, *ONE_STORE, *cases.kernels_of([None], ODD))

HOPPER = (9, 0)


def running(written: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    return emulated(written=written)


def running_own(written: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    return emulated(written=written, sources=cases.SOURCES)


@pytest.mark.parametrize("case", BLOCKS, ids=str)
@pytest.mark.parametrize("store", STORES)
def test_a_store_gets_the_bits_of_the_row_kernels(store: str, case: Case) -> None:
    cases.check_store(store, case, running, running_own)


@pytest.mark.parametrize("case", ODD, ids=str)
def test_producers_make_the_bits_of_the_row_kernels(case: Case) -> None:
    cases.check_values(case, running, running_own)
    cases.check_store("1x128", case, running, running_own)


def test_without_rows_or_with_none_past_a_tile_nothing_is_made() -> None:
    case = Case("rmsnorm", BF16, BF16, F32, 0, 64)
    for _, made in cases.two_passes(case, running):
        assert cases.values(made, running_own).shape == (0, 64)


@pytest.mark.parametrize(
    ("columns", "change", "is_aligned"),
    [
        (64, {}, True),
        (60, {}, False),
        (64, {"offset": 1}, False),
        (64, {"spacing": 8}, True),
        (64, {"spacing": 4}, False),
    ],
)
def test_a_producer_takes_vectors_where_tiles_can(
    columns: int, change: dict[str, int], is_aligned: bool
) -> None:
    case = Case("rmsnorm", BF16, BF16, F32, 3, columns, **change)
    given = inputs_of(case)
    tensors = launchers.Forward(given["x"], gamma=given["gamma"], rstd=torch.ones(3))
    made = launchers.norm_producer(tensors, BF16)
    assert made.is_aligned is is_aligned
    assert made.type.endswith(", true>") is is_aligned


@needs_nvrtc
@pytest.mark.parametrize("capability", CAPABILITIES, ids=module.arch_name)
def test_producers_and_stores_keep_their_data_in_registers(capability: tuple[int, int]) -> None:
    """All of them on Hopper; the other architectures share them out among themselves.

    Those that the library has too are compiled by test_compile.py.
    """
    known = {symbol for symbols in instantiations().values() for symbol in symbols}
    symbols = sorted(
        symbol
        for symbol in {kernel.symbol for kernel in EVERY_STORE + ONE_STORE}
        if symbol.replace("fuser_norm_store<", "fuser_tiled<") not in known
    )
    others = [other for other in CAPABILITIES if other != HOPPER]
    if capability != HOPPER:
        symbols = symbols[others.index(capability) :: len(others)]
    kernels = compiled(cases.SOURCES, cases.SOURCE, symbols, capability)
    assert not [str(k) for k in kernels if k.spill_bytes or k.stack_bytes]
