"""Pointwise chains on a GPU: the emulator's cases, larger ones, streams, graphs, many elements."""

from __future__ import annotations

from dataclasses import replace

import oracles
import pointwise_cases as cases
import pytest
import torch
from pointwise_cases import Case, activation, tensors_of
from pointwise_instantiations import BIAS_GELU, EVERYTHING, LINEAR, SWIGLU
from streams import SLEEP_CYCLES

from fuser.chain import ACTIVATIONS, Stage
from fuser.cuda.pointwise import pointwise, pointwise_backward, workspace_size
from fuser.reference import chain as reference

LARGE = tuple(
    Case(stages, rows, columns, dtype, wanted=wanted)
    for dtype in cases.DTYPES
    for rows, columns in ((4096, 4096), (1000, 11008), (33, 4097))
    for stages, wanted in ((SWIGLU, ()), (BIAS_GELU, (0,)), (EVERYTHING, (0, 2, 4)))
)


@pytest.mark.parametrize(
    "case",
    [*cases.ACTIVATION_CASES, *cases.DTYPE_CASES, *cases.CHAIN_CASES, *cases.INTERLEAVED_CASES],
    ids=str,
)
def test_chains_are_as_exact_as_torch(case: Case) -> None:
    cases.check(case, device="cuda")
    cases.check(cases.misaligned(case), device="cuda")


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_chains_are_as_exact_as_torch(case: Case) -> None:
    cases.check(case, device="cuda", seeds=1)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_erf_gelu_is_exact_far_below_zero(dtype: torch.dtype) -> None:
    cases.check_erf_gelu(dtype, device="cuda")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_approximations_hold_over_the_whole_range(name: str, dtype: torch.dtype) -> None:
    """Where the emulator has the host's exp and a true quotient, the GPU approximates both."""
    stage = activation(name)
    for spread in (1e-3, 1.0, 10.0):
        cases.check(Case((stage,), 64, 4096, dtype, spread=spread), device="cuda", seeds=1)
    x = torch.linspace(-100, 100, 1 << 20, device="cuda").to(dtype)
    if stage.is_gated:
        x = torch.cat([x, torch.ones_like(x)])
    y = torch.empty(x.numel() // (1 + stage.is_gated), device="cuda", dtype=dtype)
    pointwise((stage,), x, [None], y)
    plain = reference.forward((stage,), x, [None]).double()
    exact = oracles.formula_of(stage)(x.double())
    # Each element by itself: twice as wrong as torch, or off by what fp32 arithmetic is. A
    # reciprocal below 2^-126 is 0, and it is multiplied by up to 200 here.
    allowed = 2 * (plain - exact).abs() + 2**-19 * exact.abs() + 200 * 2**-126
    assert ((y.double() - exact).abs() <= allowed).all()


def same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_chain_gives_the_bits_of_its_stages_one_by_one(dtype: torch.dtype) -> None:
    """Nothing is contracted across stages: fp32 shows it."""
    case = Case(EVERYTHING, 70, 264, dtype, wanted=(0, 2, 4))
    t = tensors_of(case, device="cuda")
    together = cases.run_kernels(case, t)
    inputs = [t.x]
    for i, (stage, operand) in enumerate(zip(case.stages, t.operands, strict=True)):
        y = torch.empty(case.rows, case.width(i), dtype=dtype, device="cuda")
        pointwise((stage,), inputs[-1], [operand], y)
        inputs.append(y)
    same_bits(together, {"output": inputs[-1]})
    dy = t.dy
    for i in reversed(range(len(case.stages))):
        grad = torch.empty_like(g) if (g := t.grads[i]) is not None else None
        alone = (case.stages[i],)
        size = workspace_size(alone, case.rows, case.width(i), dtype, [grad is not None])
        workspace = torch.empty(size, device="cuda")
        dx = torch.empty_like(inputs[i])
        pointwise_backward(alone, dy, inputs[i], [t.operands[i]], dx, [grad], workspace)
        if grad is not None and case.stages[i].name != "bias":
            same_bits(together, {f"grad {i}": grad})
        dy = dx
    same_bits(together, {"dx": dy})


@pytest.mark.parametrize("case", [replace(c, rows=300) for c in cases.CHAIN_CASES[:8]], ids=str)
def test_results_are_the_same_every_time_and_at_any_alignment(case: Case) -> None:
    first = cases.run_kernels(case, tensors_of(case, device="cuda"))
    for other in (case, cases.misaligned(case)):
        same_bits(cases.run_kernels(other, tensors_of(other, device="cuda")), first)


def test_a_linear_chain_has_torchs_bits_and_the_references_mask() -> None:
    case = Case(LINEAR, 257, 1032, wanted=(3,))
    t = tensors_of(case, device="cuda")
    same_bits(cases.run_kernels(case, t), cases.run_plain(case, t))


def test_what_lies_around_the_outputs_is_left_alone() -> None:
    case = Case(BIAS_GELU, 37, 40, wanted=(0,))
    t = tensors_of(case, device="cuda")
    whole = torch.full((3, 37, 40), float("nan"), dtype=case.dtype, device="cuda")
    pointwise(BIAS_GELU, t.x, t.operands, whole[1])
    assert whole[0].isnan().all()
    assert whole[2].isnan().all()
    assert not whole[1].isnan().any()


def test_an_amax_is_that_of_the_rounded_values() -> None:
    case = Case(BIAS_GELU, 2000, 2056)
    t = tensors_of(case, device="cuda")
    of_y, of_dx = torch.zeros(2, 1, device="cuda")
    pointwise(BIAS_GELU, t.x, t.operands, t.y, of_y)
    pointwise_backward(BIAS_GELU, t.dy, t.x, t.operands, t.dx, t.grads, None, of_dx)
    assert of_y == t.y.abs().max()
    assert of_dx == t.dx.abs().max()


def test_more_than_two_to_the_31_elements() -> None:
    rows, columns = 2**17 + 3, 2**14
    if torch.cuda.mem_get_info()[0] < 5 * 2 * rows * columns:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_()
    y = torch.empty_like(x)
    pointwise((Stage("relu"),), x, [None], y)
    assert torch.equal(y[-1000:], x[-1000:].relu())
    assert torch.equal(y[:1000], x[:1000].relu())
    pointwise_backward((Stage("relu"),), y, x, [None], (dx := torch.empty_like(x)), [None])
    assert torch.equal(dx[-1000:], y[-1000:])


def test_chains_run_on_torchs_current_stream() -> None:
    case = Case(BIAS_GELU, 512, 512, wanted=(0,))
    expected = cases.run_kernels(case, tensors_of(case, device="cuda"))
    streams = [torch.cuda.Stream() for _ in range(2)]
    ts = [tensors_of(case, device="cuda") for _ in streams]
    values = ts[0].x.clone()
    torch.cuda.synchronize()
    for stream, t in zip(streams, ts, strict=True):
        t.x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            t.x.copy_(values)
            cases.run_kernels(case, t)
    torch.cuda.synchronize()
    for t in ts:
        same_bits(cases.named(t.y, t.dx, t.grads), expected)


def test_a_captured_chain_replays_over_new_values_and_new_masks() -> None:
    case = Case(LINEAR, 64, 256, wanted=(0, 3))
    t = tensors_of(case, device="cuda")
    cases.run_kernels(case, t)  # compiles
    seed = t.operands[1]
    assert seed is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seed.random_()
        pointwise(LINEAR, t.x, t.operands, t.y)
        pointwise_backward(LINEAR, t.dy, None, t.operands, t.dx, t.grads, t.workspace)
    seen = []
    for _ in range(2):
        t.x.normal_()
        graph.replay()
        same_bits({"output": t.y, "dx": t.dx}, cases.run_plain(replace(case, wanted=()), t))
        seen.append(seed.clone())
    assert not torch.equal(*seen)
