"""Pointwise chains into quantized stores, one kernel, in the emulator."""

from __future__ import annotations

from dataclasses import replace

import chain_store_cases as cases
import emulator
import kernel_instantiations
import pointwise_instantiations
import pytest
import torch
from chain_store_cases import CHAINS, ONE_STORE, STORES, Store, check, made, sized
from pointwise_cases import Case
from quantize_cases import DTYPES, EMULATOR, buffers, fp8_format
from said import holds, said

from fuser.cuda import fp8_scaling, pointwise
from fuser.errors import InputError

pytestmark = pytest.mark.sampled(most=12)

emulator.prepare(
    *pointwise_instantiations.instantiations(), *kernel_instantiations.chains_into_stores()
)

EVERY_CHAIN = pytest.mark.parametrize("case", CHAINS.values(), ids=CHAINS)
EVERY_SIDE = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
EVERY_STORE = pytest.mark.parametrize("store", STORES, ids=str)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.sampled
@EVERY_CHAIN
@EVERY_SIDE
@EVERY_STORE
@EVERY_DTYPE
def test_a_chain_into_a_store_gives_the_bytes_of_both_in_turn(
    case: Case, backward: bool, store: Store, dtype: torch.dtype
) -> None:
    check(sized(replace(case, dtype=dtype), store), store, EMULATOR, backward=backward)


@EVERY_CHAIN
@EVERY_SIDE
@EVERY_STORE
def test_odd_shapes_and_misaligned_views_give_them_too(
    case: Case, backward: bool, store: Store
) -> None:
    check(sized(case, store, odd=True), store, EMULATOR, backward=backward)


@EVERY_CHAIN
@EVERY_SIDE
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_odd_shapes_give_them_in_every_dtype(
    case: Case, backward: bool, dtype: torch.dtype
) -> None:
    odd = sized(replace(case, dtype=dtype), ONE_STORE, odd=True)
    check(odd, ONE_STORE, EMULATOR, backward=backward)


@EVERY_SIDE
@EVERY_STORE
def test_the_erf_gelu_goes_into_every_store(store: Store, backward: bool) -> None:
    check(sized(cases.ERF, store), store, EMULATOR, backward=backward)


@EVERY_SIDE
def test_rows_that_no_column_store_can_align_are_still_read_by_vectors(backward: bool) -> None:
    case = replace(CHAINS["swiglu"], rows=37, columns=72)
    assert made(case, EMULATOR, backward).producer.is_aligned
    check(case, ONE_STORE, EMULATOR, backward=backward)


@EVERY_SIDE
@pytest.mark.parametrize("columns", [16, 48, 128, 136, 320])
def test_the_halves_of_dx_may_lie_in_any_tiles(columns: int, backward: bool) -> None:
    case = replace(CHAINS["swiglu"], rows=16, columns=columns)
    check(case, ONE_STORE, EMULATOR, backward=backward)


@EVERY_SIDE
def test_a_bias_before_two_lines_gets_sums_of_both(backward: bool) -> None:
    check(sized(cases.TWO_HALVES, ONE_STORE), ONE_STORE, EMULATOR, backward=backward)


@EVERY_SIDE
def test_nvfp4_with_a_transform_and_random_words_takes_chains_too(backward: bool) -> None:
    store = cases.NVFP4_TRANSFORMED
    check(sized(CHAINS["swiglu"], store), store, EMULATOR, backward=backward)


@EVERY_SIDE
def test_a_rowwise_copy_alone_is_made_from_a_chain(backward: bool) -> None:
    case = sized(CHAINS["swiglu"], cases.ROW_ALONE)
    check(case, cases.ROW_ALONE, EMULATOR, backward=backward)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)], ids=str)
def test_a_chain_of_nothing_leaves_a_scale(shape: tuple[int, int]) -> None:
    case = replace(CHAINS["swiglu"], rows=shape[0], columns=shape[1])
    check(case, cases.ROW_ALONE, EMULATOR, backward=False)


def test_a_producer_that_leaves_sums_has_one_beside_it_that_leaves_none() -> None:
    """For kernels that look for amaxes alone."""
    case = replace(CHAINS["bias_gelu"], rows=300, columns=16)
    dy = x = torch.zeros(300, 16, dtype=case.dtype)
    given = (case.stages, dy, x, [None, None], 300, 16)
    plain = pointwise.backward_producer(*given, saved=1)
    summing = pointwise.backward_producer(*given, saved=1, sums=torch.zeros(3, 16))
    assert plain.alone is None
    assert summing.alone is not None
    assert summing.alone.type == plain.type != summing.type


# -- what is refused ----------------------------------------------------------


def test_sums_need_one_row_a_tile() -> None:
    case = replace(CHAINS["bias_gelu"], rows=300, columns=16)
    dy = x = torch.zeros(300, 16, dtype=case.dtype)
    assert pointwise.sums_shape(300, 16) == (3, 16)
    with pytest.raises(
        InputError, match=said("checks-needs-contiguous-strides", None, "sums", None, (3, 16))
    ):
        pointwise.backward_producer(
            case.stages, dy, x, [None, None], 300, 16, saved=1, sums=torch.zeros(2, 16)
        )
    with pytest.raises(
        InputError, match=said("checks-needs-contiguous-strides", None, "out", None, (16,))
    ):
        pointwise.sum_parts(torch.zeros(3, 16), torch.zeros(15))


def test_outputs_of_another_shape_than_the_producers_are_refused() -> None:
    x = torch.zeros(4, 32)
    producer = pointwise.forward_producer(cases.SWIGLU, x, [None], 4, 16)
    outputs = buffers(row=torch.zeros(4, 32, dtype=torch.uint8), scale_inv=torch.ones(1))
    with pytest.raises(
        InputError,
        match=said(
            "checks-needs-contiguous-strides", "FP8 quantize", holds("rowwise_data"), None, (4, 16)
        ),
    ):
        fp8_scaling.quantize(fp8_format(), producer, outputs, amax_value=torch.ones(1))
