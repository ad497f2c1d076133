"""Pointwise chains into quantized stores, one kernel, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import chain_store_cases as cases
import pytest
import torch
from chain_store_cases import CHAINS, STORES, Store, check, made, sized
from pointwise_cases import Case
from quantize_cases import DTYPES, GPU

ALL_STORES = pytest.mark.parametrize(
    "store", [*STORES, cases.NVFP4_TRANSFORMED, cases.ROW_ALONE], ids=str
)
EVERY_CHAIN = pytest.mark.parametrize(
    "case",
    [*CHAINS.values(), cases.ERF, cases.TWO_HALVES],
    ids=[*CHAINS, "gelu_erf", "bias_swiglu"],
)
EVERY_SIDE = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@EVERY_CHAIN
@EVERY_SIDE
@ALL_STORES
@EVERY_DTYPE
@pytest.mark.parametrize("odd", [False, True], ids=["even", "odd"])
def test_a_chain_into_a_store_gives_the_bytes_of_both_in_turn(
    case: Case, backward: bool, store: Store, dtype: torch.dtype, odd: bool
) -> None:
    case = replace(case, dtype=dtype)
    check(sized(case, store, odd=odd), store, GPU, backward=backward)
    check(sized(case, store, odd=odd, large=True), store, GPU, backward=backward)


@pytest.mark.parametrize("name", ["bias_gelu", "bias_swiglu"])
def test_sums_are_the_same_every_time(name: str) -> None:
    case = {**CHAINS, "bias_swiglu": cases.TWO_HALVES}[name]
    seen = []
    for _ in range(3):
        one = made(sized(case, STORES[2], large=True), GPU, True)
        STORES[2].run(GPU, one.producer, *one.values.shape)
        assert one.sums is not None
        seen.append(one.sums)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
