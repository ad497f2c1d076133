"""The normalization kernels on a GPU: the emulator's cases and large ones, graphs and streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from normalization_cases import (
    BF16,
    CASES,
    F16,
    F32,
    GPU_CASES,
    Case,
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
from streams import SLEEP_CYCLES

from fuser.cuda import normalization as launchers
from fuser.cuda import normalization_backward as backward_launchers

MODEL = Case("rmsnorm", BF16, BF16, BF16, 513, 4096, adds=True)


@contextmanager
def running(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Outputs begin as NaN, so that one that is not written is not close to anything."""
    for tensor in written:
        tensor.fill_(float("nan"))
    yield


def both(case: Case, given: Tensors) -> Tensors:
    """Forward, and the backward of its z."""
    got = forward(case, given, running)
    return got | backward(case, {**given, "x": got.get("z", given["x"])}, got, running)


@pytest.mark.parametrize("case", CASES + GPU_CASES, ids=str)
def test_forward_and_backward_are_as_exact_as_torch(case: Case) -> None:
    given = inputs_of(case, "cuda")
    got, plain_torch = both(case, given), plain(case, given)
    assert_close_as_torch(got, plain_torch, exact(case, given))
    if case.adds:
        assert same_bits(got["z"], plain_torch["z"])


@pytest.mark.parametrize(
    "case", [case for case in GPU_CASES if case.adds and case.x is not F32], ids=str
)
def test_a_gradient_that_is_added_is_rounded_with_the_sum(case: Case) -> None:
    check_dx_is_rounded_once(case, running, "cuda")


@pytest.mark.parametrize(
    "case",
    [case for case in CASES + GPU_CASES if case.norm != "l2norm" and case.x is not case.y],
    ids=str,
)
def test_dx_is_written_in_16_bits_too(case: Case) -> None:
    check_dx_is_written_in_16_bits_too(case, running, "cuda")


@pytest.mark.parametrize(
    "case", [case for case in CASES + GPU_CASES if case.norm != "l2norm"], ids=str
)
def test_y_is_written_again_beside_dx(case: Case) -> None:
    check_y_is_written_again(case, running, "cuda")


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("place", [{"offset": 1}, {"spacing": 3}, {"spacing": 64}], ids=str)
def test_where_tensors_lie_changes_no_bit(norm: str, place: dict[str, int]) -> None:
    case = replace(MODEL, norm=norm, rows=300)
    expected = both(case, inputs_of(case, "cuda"))
    elsewhere = replace(case, **place)
    got = both(elsewhere, inputs_of(elsewhere, "cuda"))
    assert all(same_bits(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_every_run_gives_the_same_bits(norm: str) -> None:
    case = replace(MODEL, norm=norm, rows=20000, columns=1024)
    given = inputs_of(case, "cuda")
    expected = both(case, given)
    for _ in range(3):
        got = both(case, given)
        assert all(same_bits(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_sums_of_16_bits_are_torchs_for_every_number(dtype: torch.dtype) -> None:
    """Every element once as x and thirty times as extra; subnormals and infinities too."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    generator = torch.Generator("cuda").manual_seed(0)
    others = [torch.randperm(2**16, device="cuda", generator=generator) for _ in range(30)]
    x = every.view(dtype).expand(30, -1).reshape(-1, 64)
    extra = torch.stack([every[order] for order in others]).view(dtype).reshape(-1, 64)
    case = Case("rmsnorm", dtype, dtype, F32, x.shape[0], 64, adds=True)
    given = {"x": x, "extra": extra, "gamma": torch.ones(64, device="cuda")}
    z, expected = forward(case, given, running)["z"], x + extra
    number = ~expected.isnan()
    assert torch.equal(z.isnan(), ~number)
    assert same_bits(z[number], expected[number])


@pytest.mark.parametrize("columns", [64, 4096])
def test_amax_is_the_largest_magnitude_of_y(columns: int) -> None:
    case = replace(MODEL, rows=100_000 if columns == 64 else 5000, columns=columns)
    given, amax = inputs_of(case, "cuda"), torch.zeros(1, device="cuda")
    y = forward(case, given, running, amax)["y"]
    assert torch.equal(amax[0], y.abs().max().float())


@pytest.mark.parametrize("columns", [64, 4096])
def test_an_amax_above_fp16s_range_hides_no_overflow(columns: int) -> None:
    case = Case("rmsnorm", F16, F16, F32, 3000, columns)
    given = inputs_of(case, "cuda")
    given["gamma"].fill_(1.0)
    given["gamma"][-1] = 1e6
    for before in (0.0, 65504.0, 1e30):
        amax = torch.full((1,), before, device="cuda")
        forward(case, given, running, amax, has_y=False)
        assert amax.isinf()


@pytest.mark.parametrize("case", CASES + GPU_CASES, ids=str)
def test_statistics_are_those_that_come_with_y_and_with_dx(case: Case) -> None:
    """rstd, mean, z and the amax of y; gradients of parameters, means and the amax of dx."""
    given = inputs_of(case, "cuda")
    amaxes = [torch.zeros(1, device="cuda") for _ in range(4)]
    expected = forward(case, given, running, amaxes[0])
    got = forward(case, given, running, amaxes[1], has_y=False)
    assert torch.equal(amaxes[0][0], expected.pop("y").abs().max().float())
    given["x"] = placed(got.get("z", given["x"]), case.spacing, case.offset)
    grads = backward(case, given, got, running, amaxes[2], has_means=True)
    without = backward(case, given, got, running, amaxes[3], has_dx=False, has_means=True)
    assert torch.equal(amaxes[2][0], grads.pop("dx").abs().max().float())
    got, expected = {**got, **without}, {**expected, **grads}
    assert all(same_bits(got[name], expected[name]) for name in expected)
    assert same_bits(amaxes[0], amaxes[1])
    assert same_bits(amaxes[2], amaxes[3])


def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    rows, columns = 2**20 + 3, 2048
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free memory")
    x = torch.randn(rows, columns, dtype=BF16, device="cuda")
    gamma = torch.randn(columns, device="cuda")
    y, rstd = torch.empty_like(x), torch.empty(rows, device="cuda")
    launchers.norm_forward(launchers.Forward(x, gamma=gamma, y=y, rstd=rstd), eps=1e-5)
    dx, dgamma = torch.empty_like(x), torch.empty_like(gamma)
    workspace = torch.empty(backward_launchers.workspace_shape(x, has_beta=False), device="cuda")
    read = (y, x, gamma, None, None, rstd)
    tensors = backward_launchers.Backward(*read, dx=dx, workspace=workspace)
    backward_launchers.norm_backward(tensors, dgamma=dgamma)
    case = Case("rmsnorm", BF16, BF16, F32, 100, columns)
    last = {"x": x[-100:], "dy": y[-100:], "gamma": gamma}
    got = {"y": y[-100:], "rstd": rstd[-100:, None], "dx": dx[-100:]}
    assert_close_as_torch(got, plain(case, last), exact(case, last))
    x_hat = (x[i : i + 2**16].double() * rstd[i : i + 2**16, None] for i in range(0, rows, 2**16))
    parts = (y[i * 2**16 : (i + 1) * 2**16].double() * part for i, part in enumerate(x_hat))
    torch.testing.assert_close(dgamma.double(), sum(p.sum(0) for p in parts), rtol=1e-5, atol=1e-2)


def test_forward_and_backward_are_captured_and_replayed() -> None:
    given = inputs_of(MODEL, "cuda")
    both(MODEL, given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = both(MODEL, given)
    for seed in (1, 2):
        for name, tensor in inputs_of(MODEL, "cuda", seed).items():
            given[name].copy_(tensor)
        graph.replay()
        expected = both(MODEL, given)
        assert all(same_bits(got[name], expected[name]) for name in expected)


def test_forward_runs_on_one_stream_and_backward_on_another() -> None:
    given = inputs_of(MODEL, "cuda")
    expected = both(MODEL, given)
    late = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(SLEEP_CYCLES)
        for name, tensor in given.items():
            late[name].copy_(tensor)
        got = forward(MODEL, late, running)
    assert not first.query()  # no launch waited
    second.wait_stream(first)
    with torch.cuda.stream(second):
        got |= backward(MODEL, {**late, "x": got["z"]}, got, running)
    second.synchronize()
    assert all(same_bits(got[name], expected[name]) for name in expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_go_to_the_tensors_device() -> None:
    expected = both(MODEL, inputs_of(MODEL, "cuda:0"))
    got = both(MODEL, inputs_of(MODEL, "cuda:1"))
    assert torch.cuda.current_device() == 0
    assert all(same_bits(got[name].cuda(0), expected[name]) for name in expected)
