"""The normalization kernels in the emulator, against fp64, plain torch and each other's bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulator import emulated, prepare
from emulator.backend import MAX_SHARED_BYTES
from normalization_cases import (
    BACKWARD_FEW,
    BACKWARD_PAIRED,
    BF16,
    CASES,
    F16,
    F32,
    Case,
    Recorder,
    Tensors,
    assert_close_as_torch,
    backward,
    check_dx_is_rounded_once,
    check_dx_is_written_in_16_bits_too,
    check_y_is_written_again,
    exact,
    forward,
    inputs_of,
    placed,
    plain,
    same_bits,
)
from said import holds, said

from fuser.cuda import normalization as launchers
from fuser.cuda import normalization_backward as backward_launchers
from fuser.cuda.launch import Kernel
from fuser.cuda.norm_common import takes, takes_addend
from fuser.cuda.normalization import Forward
from fuser.cuda.normalization_backward import Backward
from fuser.errors import InputError
from fuser.functional import normalization as functional
from fuser.functional.lazy import materialize


def running(
    written: Sequence[torch.Tensor], multiprocessors: int = 2
) -> AbstractContextManager[Any]:
    return emulated(written=written, multiprocessors=multiprocessors)


def kernels_of(cases: Sequence[Case]) -> tuple[Kernel, ...]:
    """The kernels that the cases launch, so that only they are compiled, and together."""
    recorder = Recorder()
    for case in cases:
        given = inputs_of(case)
        got = forward(case, given, recorder.running)
        forward(case, given, recorder.running, has_y=False)
        backward(case, given, got, recorder.running)
    return tuple(recorder.kernels)


prepare(*kernels_of(CASES))


# -- values -------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward_are_as_exact_as_torch(case: Case) -> None:
    given = inputs_of(case)
    truth, plain_torch = exact(case, given), plain(case, given)
    got = forward(case, given, running)
    assert_close_as_torch(got, plain_torch, truth)
    if case.adds:
        assert same_bits(got["z"], plain_torch["z"])
    grads = backward(case, {**given, "x": got.get("z", given["x"])}, got, running)
    assert_close_as_torch(grads, plain_torch, truth)


@pytest.mark.parametrize("multiprocessors", [1, 3])
@pytest.mark.parametrize("columns", [1040, 4104])
def test_blocks_that_take_many_rows_give_each_its_own(columns: int, multiprocessors: int) -> None:
    """More rows than the backward has on their way at a time, and than its blocks take evenly."""
    case = Case("rmsnorm", BF16, BF16, BF16, 23, columns, adds=True)
    given = inputs_of(case)
    truth, plain_torch = exact(case, given), plain(case, given)
    on = functools.partial(running, multiprocessors=multiprocessors)
    got = forward(case, given, on)
    grads = backward(case, {**given, "x": got["z"]}, got, on)
    assert_close_as_torch({**got, **grads}, plain_torch, truth)


def test_a_mean_far_from_zero_leaves_the_variance_exact() -> None:
    """The variance of values near 1000 is that of what differs from the mean."""
    case = Case("layernorm", F32, F32, F32, 4, 100)
    given = inputs_of(case)
    given["x"] = given["x"] + 1000
    got = forward(case, given, running)
    assert_close_as_torch(got, plain(case, given), exact(case, given))


# -- the same bits by other ways ----------------------------------------------

WAYS = (
    Case("rmsnorm", BF16, BF16, BF16, 5, 1040, adds=True, is_zero_centered=True),
    Case("layernorm", F32, BF16, F16, 5, 516, adds=True),
    Case("rmsnorm", F32, F16, F16, 5, 516, adds=True, extra=F16),
    Case("layernorm", BF16, BF16, BF16, 3, 8 * BACKWARD_PAIRED + 8, adds=True),
    Case("rmsnorm", BF16, BF16, BF16, 3, 8 * BACKWARD_FEW - 8, adds=True),
)
# Rows in registers, from shared memory, and in chunks.
ADDING = (
    Case("rmsnorm", BF16, BF16, BF16, 16, 512, adds=True),
    Case("rmsnorm", F16, F16, F32, 3, 8 * BACKWARD_FEW + 8, adds=True),
    Case("layernorm", BF16, BF16, F32, 40, 77, adds=True),
    Case("layernorm", F16, F16, F16, 16, 264, adds=True, is_zero_centered=True),
)


@pytest.mark.parametrize("place", [{"offset": 1}, {"spacing": 3}, {"spacing": 64}], ids=str)
@pytest.mark.parametrize("case", WAYS, ids=str)
def test_where_tensors_lie_changes_no_bit(case: Case, place: dict[str, int]) -> None:
    """Rows of more than a warp are summed in one order, vector by vector or element by element.

    The gradients of parameters are sums of rows, of which a block takes several at a time, or one
    if they are not aligned: those have other bits.
    """
    elsewhere = replace(case, **place)
    results = []
    for one in (case, elsewhere):
        given = inputs_of(one)
        got = forward(one, given, running)
        got |= backward(
            one, {**given, "x": placed(got["z"], one.spacing, one.offset)}, got, running
        )
        results.append(got)
    _, got = results
    plan = backward_launchers.backward_plan(case.columns, case.x.itemsize, MAX_SHARED_BYTES)
    if plan.rows > 1 and (elsewhere.spacing + elsewhere.offset) % 8:
        grads = {name: got.pop(name) for name in ("dgamma", "dbeta") if name in got}
        assert_close_as_torch(grads, plain(elsewhere, given), exact(elsewhere, given))
    assert all(same_bits(got[name], results[0][name]) for name in got)


@pytest.mark.parametrize("case", WAYS, ids=str)
def test_a_sum_that_is_normalized_is_the_one_of_torch(case: Case) -> None:
    given, alone = inputs_of(case), replace(case, adds=False)
    fused = forward(case, given, running)
    given["x"] = given["x"] + given["extra"]
    assert same_bits(fused.pop("z"), given["x"])
    unfused = forward(alone, {**given, "extra": None}, running)
    assert all(same_bits(fused[name], unfused[name]) for name in fused)


@pytest.mark.parametrize("case", ADDING, ids=str)
def test_a_gradient_that_is_added_is_rounded_with_the_sum(case: Case) -> None:
    check_dx_is_rounded_once(case, running)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.norm != "l2norm" and case.x is not case.y],
    ids=str,
)
def test_dx_is_written_in_16_bits_too(case: Case) -> None:
    check_dx_is_written_in_16_bits_too(case, running)


@pytest.mark.parametrize("case", [case for case in CASES if case.norm != "l2norm"], ids=str)
def test_y_is_written_again_beside_dx(case: Case) -> None:
    check_y_is_written_again(case, running)


def test_a_gradient_that_is_added_changes_no_bit_in_fp32_nor_of_the_parameters() -> None:
    """There is one rounding in fp32 either way."""
    case = WAYS[1]
    given, alone = {**inputs_of(case), "extra": None}, replace(case, adds=False)
    statistics = forward(alone, given, running)
    grads = backward(case, given, statistics, running)
    apart = backward(alone, {**given, "d_extra": None}, statistics, running)
    apart["dx"] = apart["dx"] + given["d_extra"]
    assert all(same_bits(grads[name], apart[name]) for name in grads)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_sums_keep_subnormals_and_signed_zeros(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    generator = torch.Generator().manual_seed(0)
    numbers = [(torch.rand(3, 64, generator=generator) - 0.5).mul(4 * tiny) for _ in range(2)]
    x, extra = (n.to(dtype) for n in numbers)
    x[0, :4] = torch.tensor([0.0, -0.0, -0.0, 1.0])
    extra[0, :4] = torch.tensor([-0.0, -0.0, 0.0, -1.0])
    case = Case("rmsnorm", dtype, dtype, F32, 3, 64, adds=True)
    got = forward(case, {"x": x, "extra": extra, "gamma": torch.ones(64)}, running)
    expected = x + extra
    assert expected.abs().max() < 4 * tiny
    assert (expected.abs()[expected != 0] < tiny).any()
    assert same_bits(got["z"], expected)


# -- what is optional ---------------------------------------------------------


@pytest.mark.parametrize("case", WAYS, ids=str)
def test_outputs_that_are_not_requested_are_not_written_and_change_nothing(case: Case) -> None:
    given = inputs_of(case)
    expected = forward(case, given, running)
    y = torch.empty_like(expected["y"])
    tensors = Forward(given["x"], given["extra"], given["gamma"], given.get("beta"), y)
    with running((y,)):
        launchers.norm_forward(tensors, eps=case.eps, zero_centered_gamma=case.is_zero_centered)
    assert same_bits(y, expected["y"])


@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_that_are_not_requested_are_not_written_and_change_nothing(offset: int) -> None:
    case = replace(WAYS[1], adds=False, offset=offset)
    given = inputs_of(case)
    got = forward(case, given, running)
    expected = backward(case, given, got, running)
    tensors = Backward(given["dy"], given["x"], given["gamma"], None, got["mean"], got["rstd"])
    dx, dgamma, dbeta = (torch.empty_like(t) for t in expected.values())
    with running((dx,)):
        backward_launchers.norm_backward(tensors._replace(dx=dx))
    with running((dgamma,)):
        workspace = torch.empty(backward_launchers.workspace_shape(given["x"], has_beta=True))
        summing = tensors._replace(workspace=workspace)
        backward_launchers.norm_backward(summing, dgamma=dgamma)
    with running((dbeta,)):
        backward_launchers.norm_backward(summing, dbeta=dbeta)
    with running(()):
        backward_launchers.norm_backward(tensors)
    assert same_bits(dx, expected["dx"])
    assert same_bits(dgamma, expected["dgamma"])
    assert same_bits(dbeta, expected["dbeta"])


@pytest.mark.parametrize(
    "case",
    [
        Case("rmsnorm", BF16, BF16, F32, 50, 136),
        Case("layernorm", F32, F16, F16, 5, 77, is_zero_centered=True),
        Case("layernorm", F32, F32, F32, 9, 64),
    ],
    ids=str,
)
def test_amax_is_the_largest_magnitude_of_y_or_what_it_was(case: Case) -> None:
    given = inputs_of(case)
    given["x"] += 10  # what a vector holds past the end of a row would come to more than y
    amax, larger = torch.zeros(1), torch.full((), 1e30)
    got = forward(case, given, running, amax)
    assert torch.equal(amax[0], got["y"].abs().max().float())
    forward(case, given, running, larger)
    assert larger == torch.tensor(1e30)
    given["x"][1, 2] = float("nan")
    forward(case, given, running, amax)
    assert amax.isnan().all()


def test_amax_sees_subnormals_of_fp16() -> None:
    case = Case("rmsnorm", F16, F16, F32, 2, 64)
    given = {**inputs_of(case), "gamma": torch.full((64,), 1e-7)}
    amax = torch.zeros(1)
    y = forward(case, given, running, amax)["y"]
    assert 0 < y.abs().max() < torch.finfo(F16).smallest_normal
    assert torch.equal(amax[0], y.abs().max().float())


# -- statistics without y or dx -----------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_statistics_are_those_that_come_with_y_and_with_dx(case: Case) -> None:
    """rstd, mean, z and the amax of y; gradients of parameters, means and the amax of dx."""
    given = inputs_of(case)
    amaxes = [torch.zeros(1) for _ in range(4)]
    expected = forward(case, given, running, amaxes[0])
    got = forward(case, given, running, amaxes[1], has_y=False)
    assert torch.equal(amaxes[0][0], expected.pop("y").abs().max().float())
    assert got.keys() == expected.keys()
    given["x"] = placed(got.get("z", given["x"]), case.spacing, case.offset)
    grads = backward(case, given, got, running, amaxes[2], has_means=True)
    without = backward(case, given, got, running, amaxes[3], has_dx=False, has_means=True)
    assert torch.equal(amaxes[2][0], grads.pop("dx").abs().max().float())
    assert without.keys() == grads.keys()
    got, expected = {**got, **without}, {**expected, **grads}
    assert all(same_bits(got[name], expected[name]) for name in expected)
    assert same_bits(amaxes[0], amaxes[1])
    assert same_bits(amaxes[2], amaxes[3])


@pytest.mark.parametrize(
    "case",
    [
        Case("rmsnorm", BF16, BF16, BF16, 70, 1032, is_zero_centered=True),
        Case("rmsnorm", F32, F16, F32, 9, 128),
        Case("rmsnorm", F16, F16, F32, 9, 128),
        Case("layernorm", BF16, BF16, F32, 70, 1032),
        Case("layernorm", F16, F16, F16, 9, 64),
        Case("l2norm", BF16, BF16, F32, 9, 128),
    ],
    ids=str,
)
def test_an_amax_without_y_is_right_however_much_of_y_was_looked_at(case: Case) -> None:
    """A row that cannot raise the amax is not normalized: whatever it was, it is as with y."""

    def measured(given: Tensors, before: torch.Tensor, has_y: bool) -> torch.Tensor:
        amax = before.clone()
        forward(case, given, running, amax, has_y=has_y)
        return amax

    given = inputs_of(case)
    largest = measured(given, torch.zeros(1), has_y=True)
    just_less = torch.nextafter(largest, torch.zeros(1))
    for before in (torch.zeros(1), 0.5 * largest, just_less, largest, 2 * largest):
        assert same_bits(measured(given, before, has_y=False), torch.maximum(before, largest))

    if case.y == F16 and case.norm == "rmsnorm":
        overflowing = {**given, "gamma": torch.full_like(given["gamma"], 6e4)}
        for value in (0.0, 65504.0, 1e30):
            assert measured(overflowing, torch.full((1,), value), has_y=False).isinf()
    tensors = [name for name in ("x", "gamma", "beta") if given.get(name) is not None]
    for name in tensors:
        for value in (float("inf"), float("-inf"), float("nan")):
            odd = {**given, name: given[name].clone()}
            odd[name].view(-1)[3] = value
            if name == "gamma":
                odd["x"] = odd["x"].clone()
                odd["x"][:, 3:5] = 0  # 0 times infinity
            for before in (torch.zeros(1), torch.full((1,), 6e4), torch.full((1,), torch.inf)):
                expected = measured(odd, before, has_y=True)
                assert same_bits(measured(odd, before, has_y=False), expected)


def test_an_amax_without_y_sees_small_values_far_from_the_mean() -> None:
    case = Case("layernorm", F16, F16, F32, 3, 64)
    given = inputs_of(case)
    given["x"][:] = -3
    given["x"].unflatten(1, (2, 4, 8))[:, :, 0] = 0.25  # all that one thread has of a row
    got, amax = torch.zeros(1), torch.zeros(1)
    y = forward(case, given, running, amax)["y"]
    got[0] = torch.nextafter(amax, torch.zeros(1))
    forward(case, given, running, got, has_y=False)
    assert got == amax == y.abs().max() == y.unflatten(1, (2, 4, 8))[:, :, 0].abs().max()


@pytest.mark.parametrize("columns", [1040, 31])
def test_means_alone_need_no_addition_and_no_gradient(columns: int) -> None:
    case = Case("layernorm", BF16, BF16, F32, 5, columns, adds=True)
    given = inputs_of(case)
    got = forward(case, given, running)
    expected = backward(case, given, got, running, has_means=True)["means"]
    means = torch.empty(5, 2)
    tensors = Backward(given["dy"], given["x"], given["gamma"], None, got["mean"], got["rstd"])
    # An addition of NaN, of another stride: it is not read.
    d_extra = torch.full((5, 2 * columns), float("nan"), dtype=BF16)[:, :columns]
    with running((means,)):
        backward_launchers.norm_backward(tensors._replace(d_extra=d_extra, means=means))
    assert same_bits(means, expected)


def test_means_are_those_of_the_formula() -> None:
    case = Case("layernorm", F32, F32, F32, 7, 300)
    given = inputs_of(case)
    got = forward(case, given, running)
    got |= backward(case, given, got, running, has_means=True)
    x_hat = (given["x"].double() - got["mean"]) * got["rstd"]
    d_hat = given["dy"].double() * given["gamma"]
    truth = torch.stack([(d_hat * x_hat).mean(-1), d_hat.mean(-1)], -1)
    torch.testing.assert_close(got["means"].double(), truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("x", [F32, F16, BF16])
@pytest.mark.parametrize("y", [F32, F16, BF16])
def test_kernels_take_an_x_and_a_y_of_one_dtype_or_an_fp32_x(
    x: torch.dtype, y: torch.dtype
) -> None:
    assert takes(x, y) == (x in (y, F32))
    rstd, out = torch.empty(3), torch.empty(3, 8, dtype=y)
    tensors = Forward(torch.randn(3, 8).to(x), gamma=torch.ones(8), y=out, rstd=rstd)
    if takes(x, y):
        with running((out, rstd)):
            launchers.norm_forward(tensors, eps=1e-5)
    else:
        with pytest.raises(InputError, match=said("norm-common-takes", None, "y")), emulated():
            launchers.norm_forward(tensors, eps=1e-5)


@pytest.mark.parametrize("y", [F32, F16, BF16])
@pytest.mark.parametrize("extra", [F32, F16, BF16])
@pytest.mark.parametrize("x", [F32, F16, BF16])
def test_a_sum_of_two_dtypes_is_normalized_to_the_one_of_16_bits(
    x: torch.dtype, extra: torch.dtype, y: torch.dtype
) -> None:
    """The table of what is added: one dtype, or fp32 and the dtype of y, in either order."""
    one_dtype = x is extra and x in (y, F32)
    mixed = (x is F32) != (extra is F32) and y in (x, extra) and y is not F32
    assert takes_addend(x, extra, y) == (one_dtype or mixed)


@pytest.mark.parametrize("half", [BF16, F16])
@pytest.mark.parametrize("columns", [64, 77])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("fp32_is", ["extra", "x"])
def test_an_fp32_residual_and_an_output_of_16_bits_are_added_as_torch_adds_them(
    norm: str, columns: int, half: torch.dtype, fp32_is: str
) -> None:
    """z has torch's bits, and y, rstd and mean those of the norm of z."""
    case = Case(norm, F32, half, F32, 5, columns, adds=True, extra=half)
    given = inputs_of(case)
    x, extra = given["x"], given["extra"]
    if fp32_is == "extra":
        x, extra = extra, x
    parameters = [given[name] for name in ("gamma", "beta") if name in given]
    options: dict[str, Any] = {"extra": extra, "wants_sum": True}
    with running(()):
        y, statistics, _ = functional.norm(x + extra, parameters, 1e-5, half)
        expected = (materialize(y), *statistics, x + extra)
        y, statistics, z = functional.norm(x, parameters, 1e-5, half, **options)
        assert z is not None
        found = (materialize(y), *statistics, z)
        y, _, no_sum = functional.norm(x, parameters, 1e-5, half, extra=extra)
        assert no_sum is None
        assert same_bits(materialize(y), expected[0])
    assert len(found) == len(expected)
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
    *_, of_torch = functional.norm(x, parameters, 1e-5, half, **options)
    assert of_torch is not None
    assert of_torch.dtype is F32
    assert same_bits(of_torch, z)


# -- what is not finite, and what is empty ------------------------------------


@pytest.mark.parametrize("case", [replace(WAYS[0], columns=64), WAYS[1]], ids=str)
def test_a_row_that_is_not_finite_spoils_no_other(case: Case) -> None:
    given = inputs_of(case)
    expected = forward(case, given, running)
    grads = backward(case, {**given, "x": expected["z"]}, expected, running)["dx"]
    given["x"][1, 5] = float("nan")
    given["x"][3, 7] = float("inf")
    got = forward(case, given, running)
    dx = backward(case, {**given, "x": got["z"]}, got, running)["dx"]
    truth = plain(case, given)
    for name in ("y", "rstd"):
        assert torch.equal(got[name].isnan(), truth[name].isnan())
    for row in (0, 2, 4):
        assert same_bits(got["y"][row], expected["y"][row])
        assert same_bits(dx[row], grads[row])


def test_rows_of_zeros_are_normalized_to_zeros() -> None:
    case = Case("layernorm", BF16, BF16, F32, 3, 72)
    given = inputs_of(case)
    given["x"].zero_()
    got = forward(case, given, running)
    assert torch.equal(got["y"], given["beta"].bfloat16().expand(3, -1))
    assert torch.equal(got["rstd"], torch.full((3, 1), case.eps).rsqrt())


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "l2norm"])
def test_without_rows_nothing_runs_and_gradients_of_parameters_are_zero(norm: str) -> None:
    case = Case(norm, BF16, BF16, F32, 0, 64)
    given = inputs_of(case)
    got = forward(case, given, running)
    grads = backward(case, given, got, running)
    assert grads.pop("dx").shape == (0, 64)
    assert all(torch.equal(grad, torch.zeros(64)) for grad in grads.values())


# -- launches -----------------------------------------------------------------


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_plans_cover_every_row_with_blocks_that_gpus_can_run(element_bytes: int) -> None:
    for columns in (*range(1, 700), *range(701, 40000, 331), 2**20):
        forward_plan = launchers.forward_plan(columns, element_bytes)
        vectors = -(-columns * element_bytes // 16)
        threads = forward_plan.lanes * forward_plan.rows
        assert threads % 32 == 0
        assert threads <= (512 if element_bytes == 2 else 1024)
        assert forward_plan.lanes % 32 == 0 or 32 % forward_plan.lanes == 0
        assert forward_plan.fits_registers == (vectors <= 4 * forward_plan.lanes)
        assert forward_plan.fits_registers == (columns <= 16384)
        for shared in (99 * 1024, 163 * 1024, 227 * 1024):
            plan = backward_launchers.backward_plan(columns, element_bytes, shared)
            assert plan.lanes * plan.rows % 32 == 0
            blocks = plan.blocks_per_multiprocessor if plan.fits_registers else 1
            assert blocks * plan.lanes * plan.rows <= plan.threads
            assert blocks == 1 or plan.prefetch_depth(48, shared) >= 2
            assert plan.threads == 512 or plan.vectors == 2
            assert plan.lanes % 32 == 0 or 32 % plan.lanes == 0
            assert plan.fits_registers == (vectors <= plan.vectors * plan.lanes)
            assert plan.fits_registers == (columns <= 16384 * 2 // element_bytes)
            for vector_bytes in (24, 32, 40, 48):
                used = plan.prefetch_depth(vector_bytes, shared) * plan.slot_bytes(vector_bytes)
                assert used + 512 <= shared
                assert blocks * (used + 512 + 1024) <= shared + 1024


def test_on_an_h200_the_backward_has_rows_on_their_way_in_all_its_shared_memory() -> None:
    """In bf16 with an addition, in KiB a multiprocessor; some 32 must be in flight."""
    shared = 227 * 1024
    found = {}
    for columns in (1024, 2048, 4096, 8192, 16384):
        plan = backward_launchers.backward_plan(columns, 2, shared)
        block = plan.prefetch_depth(48, shared) * plan.slot_bytes(48) // 1024
        found[columns] = (plan.blocks_per_multiprocessor, block)
    assert found == {
        1024: (2, 96),
        2048: (2, 96),
        4096: (2, 96),
        8192: (1, 192),
        16384: (1, 192),
    }


def test_the_workspace_is_small_beside_the_tensors() -> None:
    x = torch.empty(16384, 4096, dtype=BF16, device="meta")
    with emulated(multiprocessors=132):
        shape = backward_launchers.workspace_shape(x, has_beta=True)
    assert shape == (2, 264, 4096)


# -- bad input ----------------------------------------------------------------


def call(**changes: Any) -> None:
    """A LayerNorm forward with something else in place of a good argument."""
    good: dict[str, Any] = {name: torch.zeros(4, 16) for name in ("x", "y", "extra", "z")}
    good |= {name: torch.zeros(16) for name in ("gamma", "beta")}
    good |= {name: torch.zeros(4) for name in ("mean", "rstd")}
    good |= {"amax": torch.zeros(1), **changes}
    y_dtype = good.pop("y_dtype", None)
    with emulated():
        launchers.norm_forward(Forward(**good), eps=1e-5, y_dtype=y_dtype)


def call_backward(**changes: Any) -> None:
    good: dict[str, Any] = {name: torch.zeros(4, 16) for name in ("dy", "x", "dx", "d_extra")}
    good |= {name: torch.zeros(16) for name in ("gamma", "dgamma", "dbeta")}
    good |= {name: torch.zeros(4) for name in ("mean", "rstd")}
    good["beta"] = None
    with emulated():
        good["workspace"] = torch.zeros(
            backward_launchers.workspace_shape(good["x"], has_beta=True)
        )
        good |= changes
        grads = {name: good.pop(name) for name in ("dgamma", "dbeta")}
        backward_launchers.norm_backward(Backward(**good), **grads)


def test_good_arguments_are_taken() -> None:
    """The arguments that the tests of refusals change one by one: with these, all is written."""
    torch.manual_seed(0)
    x, extra, dy, d_extra = torch.randn(4, 4, 16)
    gamma, beta = torch.randn(2, 16)
    y, z, dx = (torch.full((4, 16), float("nan")) for _ in range(3))
    mean, rstd = (torch.full((4,), float("nan")) for _ in range(2))
    amax = torch.zeros(1)
    given = {"gamma": gamma, "beta": beta, "mean": mean, "rstd": rstd}
    call(x=x, extra=extra, y=y, z=z, amax=amax, **given)
    leaf, gain, shift = (
        t.double().detach().requires_grad_() for t in (x.double() + extra, gamma, beta)
    )
    exact = torch.nn.functional.layer_norm(leaf, (16,), gain, shift, 1e-5)
    torch.testing.assert_close(y.double(), exact.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(z, x + extra)
    assert torch.equal(amax, y.abs().max()[None])
    dgamma, dbeta = (torch.full((16,), float("nan")) for _ in range(2))
    given = {"gamma": gamma, "mean": mean, "rstd": rstd, "dgamma": dgamma, "dbeta": dbeta}
    call_backward(dy=dy, x=z, dx=dx, d_extra=d_extra, **given)
    exact.backward(dy.double())
    assert leaf.grad is not None
    found = (dx.double(), dgamma.double(), dbeta.double())
    for one, wanted in zip(found, (leaf.grad + d_extra, gain.grad, shift.grad), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"x": torch.zeros(4, 16).double()},
            said("norm-common-shape-rows-columns", None, None, "float64"),
        ),
        (
            {"x": torch.zeros(64)},
            said("norm-common-shape-rows-columns", None, None, "float32", (64,)),
        ),
        (
            {"x": torch.zeros(4, 0)},
            said("norm-common-shape-rows-columns", None, None, "float32", (4, 0)),
        ),
        (
            {"x": torch.zeros(16, 4).t()},
            said(
                "norm-common-takes",
                None,
                "x",
                None,
                None,
                holds(" side by side"),
                None,
                None,
                (1, 4),
            ),
        ),
        (
            {"y": torch.zeros(4, 15)},
            said(
                "norm-common-takes",
                None,
                "y",
                "float32 or bfloat16 or float16",
                "of shape (4",
                holds("16)"),
            ),
        ),
        (
            {"y": torch.zeros(4, 32)[:, :16]},
            said(
                "norm-common-takes",
                None,
                "y",
                None,
                None,
                holds(" contiguous"),
                None,
                None,
                (32, 1),
            ),
        ),
        (
            {"x": torch.zeros(4, 16).half(), "extra": None, "z": None},
            said("norm-common-takes", None, "y", "float16", None, None, "float32"),
        ),
        (
            {"extra": torch.zeros(4, 16).half()},
            said("norm-common-takes", None, "extra", "float32", None, None, "float16"),
        ),
        (
            {"y": torch.zeros(4, 16).half(), "extra": torch.zeros(4, 16).bfloat16()},
            said("norm-common-takes", None, "extra", holds("flo", " or")),
        ),
        (
            {"x": torch.zeros(4, 16).half(), "y": torch.zeros(4, 16).half(), "z": None},
            said("norm-common-takes", None, "extra", "float16", None, None, "float32"),
        ),
        ({"extra": None}, said("normalization-writes-where-adds")),
        (
            {"gamma": torch.zeros(15)},
            said("norm-common-takes", None, "gamma", None, "of shape (16,)", None, None, (15,)),
        ),
        (
            {"gamma": torch.zeros(16).half()},
            said("norm-common-dtype", None, "gamma in float16 and beta in float32"),
        ),
        (
            {"rstd": torch.zeros(5)},
            said("norm-common-takes", None, "rstd", "float32", "4 elements", "contiguous"),
        ),
        (
            {"mean": torch.zeros(4).half()},
            said("norm-common-takes", None, "mean", "float32", None, None, "float16"),
        ),
        (
            {"amax": torch.zeros(2)},
            said("norm-common-takes", None, "amax", "float32", "1 elements"),
        ),
        (
            {"y_dtype": torch.float16},
            said("norm-common-takes", None, "y", "float16", None, None, "float32"),
        ),
        (
            {"y_dtype": torch.float64},
            said("norm-common-makes-y-x", None, holds("float32 or "), "float32", "float64"),
        ),
        (dict.fromkeys(("y", "z", "mean", "rstd", "amax")), said("normalization-nothing-write-no")),
        ({"gamma": None}, said("normalization-without-layer-norm", "l2norm", "mean", "gamma")),
        ({"beta": None}, said("normalization-without-layer-norm", "rmsnorm", "mean", "beta")),
    ],
)
def test_a_forward_with_other_tensors_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dy": torch.zeros(4, 15)},
            said("norm-common-takes", None, "dy", None, "of shape (4", holds("16)")),
        ),
        (
            {"dy": torch.zeros(1).expand(4, 16)},
            said(
                "norm-common-takes",
                None,
                "dy",
                None,
                None,
                holds(" side by side"),
                None,
                None,
                (0, 0),
            ),
        ),
        (
            {"dx": torch.zeros(4, 16).half()},
            said("norm-common-takes", None, "dx", "float32", None, None, "float16"),
        ),
        (
            {"d_extra": torch.zeros(4, 8)},
            said("norm-common-takes", None, "d_extra", None, "of shape (4", holds("16)")),
        ),
        (
            {"dbeta": torch.zeros(16).half()},
            said("norm-common-dtype", None, "dgamma in float32 and dbeta in float16"),
        ),
        ({"workspace": None}, said("normalization-backward-sums-parameters-gradients")),
        (
            {"workspace": torch.zeros(1, 1, 16)},
            said("norm-common-takes", None, "workspace", "float32", "of shape (2", holds("1, 16)")),
        ),
        (
            {"rstd": torch.zeros(3)},
            said("norm-common-takes", None, "rstd", "float32", "4 elements"),
        ),
        (
            {"means": torch.zeros(4)},
            said("norm-common-takes", None, "means", "float32", "of shape (4", holds("2)")),
        ),
        (
            {"amax": torch.zeros(1).half()},
            said("norm-common-takes", None, "amax", "float32", None, None, "float16"),
        ),
        (
            {"rounded_dx": torch.zeros(4, 16).half()},
            said("norm-common-takes", None, "rounded_dx", "float32", None, None, "float16"),
        ),
        (
            {"rounded_dx": torch.zeros(4, 16)},
            said(
                "normalization-backward-rounded-more-bits", None, "dx in float32 and dy in float32"
            ),
        ),
        (
            {
                "dy": torch.zeros(4, 16).half(),
                "rounded_dx": torch.zeros(4, 16).half(),
                "dx": None,
            },
            said("normalization-backward-rounded-more-bits", None, "no dx"),
        ),
        (
            {"y": torch.zeros(4, 16).half()},
            said("norm-common-takes", None, "y", "float32", None, None, "float16"),
        ),
        (
            {"y": torch.zeros(4, 16), "dx": None},
            said("normalization-backward-writes-gamma-layer", None, "gamma"),
        ),
        (
            {"y": torch.zeros(4, 16), "dx": None, "beta": torch.zeros(16)},
            said("normalization-backward-writes-gamma-layer", None, "gamma, beta"),
        ),
        (
            {"y": torch.zeros(4, 16)},
            said("normalization-backward-writes-gamma-layer", None, "dx, gamma"),
        ),
        (
            {"gamma": None},
            said("normalization-without-layer-norm", "l2norm_backward", "mean", "gamma"),
        ),
        (
            {"mean": None},
            said("normalization-without-layer-norm", "rmsnorm_backward", "dbeta", "mean"),
        ),
        (
            {"gamma": None, "mean": None, "dbeta": None, "rstd": torch.zeros(3)},
            said("norm-common-takes", "l2norm_backward", "rstd"),
        ),
        (
            {"mean": None, "dbeta": None, "rstd": torch.zeros(3)},
            said("norm-common-takes", "rmsnorm_backward", "rstd"),
        ),
        (
            {"rstd": torch.zeros(3)},
            said("norm-common-takes", "layernorm_backward", "rstd"),
        ),
    ],
)
def test_a_backward_with_other_tensors_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call_backward(**changes)


X, ROW, COLUMN = torch.zeros(4, 16), torch.zeros(4), torch.zeros(16)
NORM = {"gamma": COLUMN, "beta": COLUMN, "mean": ROW}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"x": X.t()},
            said(
                "norm-common-takes",
                None,
                "x",
                None,
                None,
                holds(" side by side"),
                None,
                None,
                (1, 16),
            ),
        ),
        (
            {"y_dtype": torch.float64},
            said("norm-common-makes-y-x", None, None, "float32", "float64"),
        ),
        (
            {"x": X.half(), "y_dtype": torch.float32},
            said("norm-common-makes-y-x", None, "float16", "float16"),
        ),
        ({"rstd": COLUMN}, said("norm-common-takes", None, "rstd", "float32", "4 elements")),
        ({"mean": None}, said("normalization-without-layer-norm", None, "beta", "mean")),
        ({"beta": None}, said("normalization-without-layer-norm", None, "mean", "beta")),
        ({"gamma": None}, said("normalization-without-layer-norm", None, "mean", "gamma")),
        (
            {"gamma": COLUMN.half()},
            said("norm-common-dtype", None, "gamma in float16 and beta in float32"),
        ),
    ],
)
def test_a_producer_of_y_with_other_tensors_is_refused(changes: dict[str, Any], words: str) -> None:
    changes = {"y_dtype": torch.float32, **changes}
    dtype = changes.pop("y_dtype")
    good = Forward(X, rstd=ROW, **NORM)
    assert launchers.norm_producer(good, torch.float32).columns == 16
    with pytest.raises(InputError, match=words):
        launchers.norm_producer(good._replace(**changes), dtype)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dy": X.double()},
            said("norm-common-takes", None, "dy", holds("float32 or "), None, None, "float64"),
        ),
        (
            {"means": ROW},
            said("norm-common-takes", None, "means", "float32", "of shape (4", holds("2)")),
        ),
        (
            {"mean": None},
            said("norm-common-takes", None, "means", "float32", "of shape (4", holds("1)")),
        ),
        ({"gamma": None}, said("normalization-without-layer-norm", None, "mean", "gamma")),
        (
            {"d_extra": X.half()},
            said("norm-common-takes", None, "d_extra", "float32", None, None, "float16"),
        ),
    ],
)
def test_a_producer_of_dx_with_other_tensors_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    good = Backward(X, X, COLUMN, None, ROW, ROW, means=torch.zeros(4, 2))
    assert backward_launchers.norm_backward_producer(good).columns == 16
    with pytest.raises(InputError, match=words):
        backward_launchers.norm_backward_producer(good._replace(**changes))
