"""Pointwise chains in the emulator: values and gradients, special values, layouts, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pointwise_cases as cases
import pytest
import torch
from emulator import emulated, prepare
from oracles import under
from paths import EMULATOR_KERNELS
from pointwise_cases import Case, activation, tensors_of
from pointwise_instantiations import (
    BIAS_GELU,
    EVERYTHING,
    LINEAR,
    SWIGLU,
    TWO_HALVES,
    instantiations,
)
from said import holds, said

from fuser.chain import Stage
from fuser.cuda import pointwise as launcher
from fuser.cuda.arguments import ELEMENTS, Producer, Struct, int32, int64
from fuser.cuda.launch import Kernel, tiles
from fuser.cuda.pointwise import pointwise, pointwise_backward, workspace_size
from fuser.errors import InputError, InputTypeError
from fuser.reference import chain as reference
from fuser.reference.dropout import philox

prepare(*instantiations())

INFINITY = float("inf")


# -- values -------------------------------------------------------------------


@pytest.mark.parametrize("case", cases.ACTIVATION_CASES, ids=str)
def test_every_activation_is_as_exact_as_torchs(case: Case) -> None:
    cases.check(case, emulated)


@pytest.mark.parametrize("case", cases.DTYPE_CASES, ids=str)
def test_every_dtype_and_shape_is_as_exact_as_torch(case: Case) -> None:
    cases.check(case, emulated)


@pytest.mark.parametrize("case", cases.CHAIN_CASES, ids=str)
def test_chains_and_gradients_of_operands_are_as_exact_as_torch(case: Case) -> None:
    cases.check(case, emulated)


@pytest.mark.parametrize("case", cases.INTERLEAVED_CASES, ids=str)
def test_gate_and_linear_part_may_be_interleaved(case: Case) -> None:
    cases.check(case, emulated)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_erf_gelu_is_exact_far_below_zero(dtype: torch.dtype) -> None:
    cases.check_erf_gelu(dtype, emulated)


# -- bits ---------------------------------------------------------------------


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal, with NaN equal to NaN; zeros may differ in sign."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=0, equal_nan=True, msg=under(name)
        )


@pytest.mark.parametrize(
    "case",
    [
        Case(SWIGLU, 5, 64, torch.float32),
        Case(SWIGLU, 3, 2056, torch.bfloat16),
        Case(BIAS_GELU, 70, 24, torch.float16, wanted=(0,), saved=1),
        Case(EVERYTHING, 5, 1048, torch.bfloat16, wanted=(0, 2, 4)),
        Case(EVERYTHING, 9, 1048, torch.float32, wanted=(0, 2, 4)),
        Case(EVERYTHING, 130, 16, torch.bfloat16, wanted=(0, 2, 4)),
    ],
    ids=str,
)
def test_misaligned_views_give_the_same_bits(case: Case) -> None:
    aligned = cases.run_kernels(case, tensors_of(case), emulated)
    other = cases.misaligned(case)
    assert_same_bits(cases.run_kernels(other, tensors_of(other), emulated), aligned)


@pytest.mark.parametrize("name", ["relu", "srelu", "reglu", "sreglu"])
def test_what_needs_no_approximation_has_the_references_bits(name: str) -> None:
    case = Case((activation(name),), 9, 40, spread=100.0)
    t = tensors_of(case)
    assert_same_bits(cases.run_kernels(case, t, emulated), cases.run_plain(case, t))


def test_a_linear_chain_has_the_references_bits_and_mask() -> None:
    case = Case(LINEAR, 7, 64, wanted=(0, 3))
    t = tensors_of(case)
    actual, plain = cases.run_kernels(case, t, emulated), cases.run_plain(case, t)
    del actual["grad 0"], plain["grad 0"]  # sums in another order
    assert_same_bits(actual, plain)


def test_a_chain_gives_the_bits_of_its_stages_one_by_one() -> None:
    case = Case(TWO_HALVES, 5, 48, wanted=(1,))
    t = tensors_of(case)
    together = cases.run_kernels(case, t, emulated)
    silu, _, geglu, relu = ((stage,) for stage in TWO_HALVES)
    extra = t.operands[1]
    assert extra is not None
    a, c = torch.empty_like(t.x), torch.empty_like(t.y)
    with emulated(written=(a, c)):
        pointwise(silu, t.x, [None], a)
        b = a + extra
        pointwise(geglu, b, [None], c)
    d_c = reference.backward(relu, t.dy, c, [None])[0]
    d_b, d_x = torch.empty_like(b), torch.empty_like(t.x)
    with emulated(written=(d_b, d_x)):
        pointwise_backward(geglu, d_c, b, [None], d_b, [None])
        pointwise_backward(silu, d_b, t.x, [None], d_x, [None])
    assert_same_bits(together, {"output": torch.relu(c), "dx": d_x, "grad 1": d_b})


def test_sums_over_rows_are_the_same_in_many_steps_and_over_all_three_axes_of_a_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(BIAS_GELU, 700, 8, wanted=(0,), saved=1)
    t = tensors_of(case)
    exact = cases.run_exact(case, t)["grad 0"]
    monkeypatch.setattr(launcher, "MAX_GRID_Y", 2)
    monkeypatch.setattr(launcher, "THREADS", 32)
    for threads in (2**17, 40, 1):
        monkeypatch.setattr(launcher, "MIN_SUMMING_THREADS", threads)
        launcher._launch.cache_clear()
        t = tensors_of(case)
        actual = cases.run_kernels(case, t, emulated)
        torch.testing.assert_close(actual["grad 0"].double(), exact, rtol=2**-8, atol=2**-4)
        assert_same_bits(
            {"dx": actual["dx"]}, {"dx": cases.run_kernels(case, tensors_of(case), emulated)["dx"]}
        )
    launcher._launch.cache_clear()


# -- special values -----------------------------------------------------------

SPECIAL = (
    *(float("nan"), INFINITY, -INFINITY, 0.0, -0.0, 1e-39, -1e-39, 1e-30, 1e30, -1e30),
    *(30.0, -30.0, 87.0, -87.0, 88.5, -88.5, 1e4, -1e4, 0.3, -0.3, 1.5, -1.5, 3.0, -7.0),
)


def special_tensors(case: Case) -> cases.Tensors:
    """Every special value as gate, as linear part and as gradient, beside random values."""
    t = tensors_of(case)
    special = torch.tensor(SPECIAL).to(case.dtype)
    t.x[0, : len(SPECIAL)] = special
    t.x[1, -len(SPECIAL) :] = special
    t.dy[2, : len(SPECIAL)] = special
    return t


@pytest.mark.parametrize("name", cases.ACTIVATIONS)
def test_special_values_come_out_as_in_torch_or_nearer_to_the_truth(name: str) -> None:
    case = Case((activation(name),), 3, 32)
    t = special_tensors(case)
    actual, plain, exact = (
        cases.run_kernels(case, t, emulated),
        cases.run_plain(case, t),
        cases.run_exact(case, t),
    )
    for key in ("output", "dx"):
        a, p, e = (results[key].double() for results in (actual, plain, exact))
        # NaN and infinity as in torch, or as in fp64: erf of a vector on a CPU has NaN at infinity.
        for is_special in (torch.isnan, torch.isinf):
            differs = is_special(a) != is_special(p)
            assert torch.equal(is_special(a)[differs], is_special(e)[differs]), key
        # Values that torch rounds to bf16 once are off by 2^-9 of themselves at most; and below
        # 2^-120 nothing counts.
        allowed = 2 * (p - e).abs() + 2**-8 * e.abs() + 2**-120
        cancelled = (e == 0) & (a.abs() < 2**-50)  # in fp64, as sigmoid(x) (1 - sigmoid(x)) does
        off = p.isfinite() & ((a - e).abs() > allowed) & ~cancelled
        assert not off.any(), (key, off.nonzero(), a[off], p[off], e[off])


@pytest.mark.parametrize("name", ["relu", "srelu", "reglu", "sreglu"])
def test_the_relu_family_keeps_subnormals_and_infinite_gradients(name: str) -> None:
    case = Case((activation(name),), 3, 32)
    t = special_tensors(case)
    assert_same_bits(cases.run_kernels(case, t, emulated), cases.run_plain(case, t))


# -- amax ---------------------------------------------------------------------


def amaxes(t: cases.Tensors, before: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """What forward and backward make of an amax that holds ``before``."""
    of_y, of_dx = torch.full((1,), before), torch.full((), before)
    with emulated(written=(t.y, t.dx)):
        pointwise(BIAS_GELU, t.x, t.operands, t.y, of_y)
        pointwise_backward(
            *(BIAS_GELU, t.dy, t.x, [None, None], t.dx, t.grads, t.workspace, of_dx), saved=1
        )
    return of_y[0], of_dx


@pytest.mark.parametrize("shape", [(3, 40), (70, 2056)], ids=str)
def test_an_amax_is_that_of_the_rounded_values(shape: tuple[int, int]) -> None:
    t = tensors_of(Case(BIAS_GELU, *shape, wanted=(0,)))
    of_y, of_dx = amaxes(t)
    assert of_y == t.y.abs().max()
    assert of_dx == t.dx.abs().max()


def test_an_amax_is_only_raised_and_sees_nan_and_subnormals() -> None:
    t = tensors_of(Case(BIAS_GELU, 3, 40, wanted=(0,)))
    assert [a.item() for a in amaxes(t, 1e9)] == [1e9, 1e9]
    t.dy.fill_(0.0)
    t.dy[1, 7] = 1e-38
    t.x.fill_(1e4)  # where the derivative is 1
    assert amaxes(t)[1] == t.dx[1, 7] > 0
    t.dy[1, 7] = float("nan")
    t.x[2, 3] = float("nan")
    assert all(a.isnan() for a in amaxes(t, INFINITY))


def test_an_amax_is_the_same_where_the_values_are_not_written() -> None:
    t = tensors_of(Case(BIAS_GELU, 70, 24, wanted=(0,)))
    of_y, of_dx = amaxes(t)
    alone = torch.zeros(2)
    with emulated():
        pointwise(BIAS_GELU, t.x, t.operands, None, alone[:1])
        arguments = (BIAS_GELU, t.dy, t.x, [None, None], None, t.grads, t.workspace, alone[1:])
        pointwise_backward(*arguments, saved=1)
    assert of_y > 0
    assert torch.equal(alone, torch.stack([of_y, of_dx]))


def test_gradients_of_operands_are_the_same_where_dx_is_not_written() -> None:
    t, other = (tensors_of(Case(BIAS_GELU, 70, 24, wanted=(0,), saved=1)) for _ in range(2))
    with emulated(written=(t.dx, t.grads[0], other.grads[0])):
        for dx, one in ((t.dx, t), (None, other)):
            arguments = (BIAS_GELU, one.dy, one.x, [None, None], dx, one.grads, one.workspace)
            pointwise_backward(*arguments, saved=1)
    assert t.grads[0] is not None
    assert other.grads[0] is not None
    assert torch.equal(other.grads[0], t.grads[0])


def test_writing_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=said("pointwise-chain-neither-nothing")):
        pointwise(SWIGLU, BF16, [None], None)
    with pytest.raises(InputError, match=said("pointwise-backward-dx-gradient")):
        pointwise_backward(SWIGLU, BF16[:, :8], BF16, [None], None, [None])
    with pytest.raises(InputError, match=said("pointwise-gated-takes-two", "x", 15)):
        pointwise(SWIGLU, BF16[:, :15], [None], None, torch.zeros(1))


def test_an_output_that_the_gradients_do_not_need_is_refused() -> None:
    t = tensors_of(Case(LINEAR, 4, 8))
    for stages, saved, operands in ((LINEAR, 0, t.operands), (LINEAR[:1], 0, t.operands[:1])):
        with pytest.raises(InputError, match=said("pointwise-saved-does-not")):
            pointwise_backward(
                *(stages, t.dy, None, operands, t.dx, [None] * len(stages)), saved=saved, y=t.y
            )
    t = tensors_of(Case(SWIGLU, 4, 8))
    for y in (t.x, t.y[:2], t.y.float(), t.y.T.contiguous().T):
        with pytest.raises(InputError, match="y is torch"):
            pointwise_backward(SWIGLU, t.dy, t.x, [None], t.dx, [None], y=y)


# -- layouts ------------------------------------------------------------------


def test_inputs_may_be_rows_of_a_wider_matrix_or_one_row_expanded() -> None:
    case = Case(SWIGLU, 5, 32)
    t = tensors_of(case)
    expected = cases.run_plain(case, t)
    for pad in (8, 5):
        wide = torch.zeros(5, 64 + pad, dtype=case.dtype)
        wide[:, :64] = t.x
        actual = cases.run_kernels(case, replace(t, x=wide[:, :64]), emulated)
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-10)
    t = replace(t, x=t.x[:1].expand(5, -1), dy=t.dy[:1].expand(5, -1))
    actual = cases.run_kernels(case, t, emulated)
    assert all(torch.equal(value, value[:1].expand(5, -1)) for value in actual.values())


def test_leading_dimensions_are_rows() -> None:
    case = Case(BIAS_GELU, 6, 16)
    t = tensors_of(case)
    y = torch.empty(2, 3, 16, dtype=case.dtype)
    with emulated(written=(y, t.y)):
        pointwise(BIAS_GELU, t.x.view(2, 3, 16), t.operands, y)
        pointwise(BIAS_GELU, t.x, t.operands, t.y)
    assert torch.equal(y.view(6, 16), t.y)


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0, 0)], ids=str)
def test_nothing_has_gradients_of_zero(shape: tuple[int, int]) -> None:
    case = Case(EVERYTHING, *shape, wanted=(0, 2, 4))
    t = tensors_of(case)
    for grad in t.grads:
        if grad is not None:
            grad.fill_(7.0)
    results = cases.run_kernels(case, t, emulated)
    assert not any(value.any() for value in results.values())
    assert results["grad 0"].shape == (2 * shape[1],)
    assert results["grad 2"].shape == (shape[0],)


# -- dropout ------------------------------------------------------------------


def test_philox_gives_the_published_words() -> None:
    """Known answers of the authors' library, for 7 and for 10 rounds."""
    zeros = torch.zeros(1, dtype=torch.int64)
    ones = zeros - 1
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    low, high, key = (
        torch.tensor([_int64(b << 32 | a)]) for a, b in zip(pi[::2], pi[1::2], strict=True)
    )
    for rounds, counter, expected in (
        (7, (zeros, zeros, zeros), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, (ones, ones, ones), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (7, (low, high, key), (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        (10, (zeros, zeros, zeros), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, (ones, ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (10, (low, high, key), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = philox(*counter, rounds=rounds)
        assert tuple(word.item() for word in words) == expected


def _int64(unsigned: int) -> int:
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def test_the_mask_follows_the_seed_and_keeps_the_asked_share() -> None:
    case = Case(LINEAR, 64, 1024)
    kept = []
    for seed in (0, 0, 1):
        t = tensors_of(case, 0)
        t.x.fill_(3.0)
        t.operands = [torch.zeros_like(t.operands[0]), torch.tensor([seed, 5]), None, t.y * 0]
        with emulated(written=(t.y,)):
            pointwise(LINEAR, t.x, t.operands, t.y)
        kept.append(t.y != 0)
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])
    # 65536 draws at p = 0.3: a standard deviation is 0.0018.
    assert all(abs(k.float().mean() - 0.7) < 0.009 for k in kept)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_dropout_may_keep_everything_or_nothing(p: float) -> None:
    bias, _, scale, add = LINEAR
    stages = (bias, Stage("dropout", (p,)), scale, add)
    case = Case(stages, 5, 64, wanted=(0, 3))
    t = tensors_of(case)
    actual, plain = cases.run_kernels(case, t, emulated), cases.run_plain(case, t)
    del actual["grad 0"], plain["grad 0"]
    assert_same_bits(actual, plain)


# -- producers for tiles ------------------------------------------------------


def patches(producer: Producer) -> torch.Tensor:
    """What a producer produces, by tiles."""
    y = torch.empty(producer.columns, producer.rows, dtype=producer.dtype)
    store = f"fuser::TransposedStore<{ELEMENTS[producer.dtype]}, false>"
    kernel = Kernel("patches", f"fuser_tiled<{producer.type}, {store}>")
    launch = tiles(producer.rows, producer.columns)
    sizes = (int64(producer.rows), int32(producer.columns))
    with emulated(written=(y,), sources=EMULATOR_KERNELS):
        kernel(launch, producer.argument, Struct((y,)), *sizes)
    return y.t()


@pytest.mark.parametrize(
    "case",
    [
        Case(SWIGLU, 5, 40, torch.float32),
        Case(SWIGLU, 5, 43, torch.float32),
        Case((activation("swiglu", 8),), 9, 64),
        Case((activation("swiglu", 3),), 9, 27),
        Case(BIAS_GELU, 17, 72, torch.float16, wanted=(0,), saved=1),
        Case(BIAS_GELU, 17, 75, torch.float16, wanted=(0,), saved=1),
        Case(EVERYTHING, 9, 40, wanted=(0, 2, 4)),
        Case(EVERYTHING, 9, 41, wanted=(0, 2, 4)),
    ],
    ids=str,
)
def test_producers_give_tiles_the_values_that_the_kernels_write(case: Case) -> None:
    t = tensors_of(case)
    expected = cases.run_kernels(case, t, emulated)
    size = (case.rows, case.columns)
    forward = launcher.forward_producer(case.stages, t.x, t.operands, *size)
    assert torch.equal(patches(forward), expected["output"])
    x = reference.forward(case.stages[: case.saved], t.x, t.operands[: case.saved])
    backward = launcher.backward_producer(case.stages, t.dy, x, t.operands, *size, case.saved)
    assert torch.equal(patches(backward), expected["dx"])


def test_a_producer_takes_vectors_where_tiles_can() -> None:
    for columns, is_aligned in ((40, True), (36, False), (44, False)):
        t = tensors_of(Case(SWIGLU, 5, columns, torch.float32))
        producer = launcher.forward_producer(SWIGLU, t.x, [None], 5, columns)
        assert producer.type.endswith(", true>") is is_aligned


# -- what is refused ----------------------------------------------------------

BF16 = torch.zeros(4, 16, dtype=torch.bfloat16)
COLUMNS = torch.zeros(16, 4, dtype=torch.bfloat16).mT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sine", ()), said("chain-stage", "'sine'", holds("bias, constant_scale"))),
        (("situglu", (4.0,)), said("chain-stage-scalars-takes", "situglu", (4.0,), 2)),
        (("gelu", (), 8), said("chain-interleave-gated-take", "gelu", 8)),
        (("swiglu", (), 0), said("chain-glu-interleave-size", "swiglu", 0)),
        (("bias", (), None, True), said("chain-scaled-true-only")),
        (("dropout", (1.5,)), said("chain-dropout-p-between", 1.5)),
    ],
)
def test_a_stage_that_does_not_exist_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Stage(*arguments)


@pytest.mark.parametrize(
    ("stages", "x", "operands", "y", "words"),
    [
        ((), BF16, [], BF16, said("chain-more-most-gated")),
        (SWIGLU * 2, BF16, [None] * 2, BF16, said("chain-more-most-gated")),
        (SWIGLU, BF16.double(), [None], BF16, said("chain-chains-take-float32")),
        (
            SWIGLU,
            BF16,
            [None],
            BF16,
            said("chain-rows-columns", "x", None, 4, 32, "torch.bfloat16"),
        ),
        (
            SWIGLU,
            BF16,
            [None],
            BF16.float(),
            said("pointwise-contiguous", "y", holds("torch.float32 of shape ")),
        ),
        (SWIGLU, BF16, [BF16], BF16[:, :8].clone(), said("chain-takes-no-operand", 0, "swiglu")),
        (
            (activation("swiglu", 3),),
            BF16,
            [None],
            BF16[:, :8].clone(),
            said("chain-blocks-do-not", 3, 8),
        ),
        (BIAS_GELU, BF16, [None, None], BF16, said("chain-stage-no-operand", 0, "bias")),
        (
            BIAS_GELU,
            BF16,
            [BF16[0, :8], None],
            BF16,
            said(
                "chain-contiguous-elements",
                holds("operand of stage 0, bias,"),
                holds((8,)),
                16,
                holds("torch.bfl"),
            ),
        ),
        (
            (Stage("bias"), Stage("add_extra_input")),
            BF16,
            [BF16[0], BF16[:3]],
            BF16,
            said(
                "chain-contiguous-elements",
                holds("operand of stage 1, add_extra_input,"),
                holds((3, 16)),
                64,
            ),
        ),
        (BIAS_GELU, BF16.t(), [BF16[0], None], BF16, said("chain-rows-columns", None, None, 4, 16)),
        (BIAS_GELU, COLUMNS, [BF16[0], None], BF16, said("chain-contiguous-matrix-rows")),
        (BIAS_GELU, BF16, [BF16[0], None], COLUMNS, said("pointwise-contiguous", "y")),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    stages: tuple[Stage, ...],
    x: torch.Tensor,
    operands: list[torch.Tensor | None],
    y: torch.Tensor,
    words: str,
) -> None:
    with pytest.raises((InputError, InputTypeError), match=words):
        pointwise(stages, x, operands, y)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, said("chain-backward-reads-input")),
        ({"dy": BF16[:2]}, said("chain-rows-columns", "dy", None, 4, 16)),
        ({"workspace": None}, said("pointwise-workspace-elements-more", "None")),
        (
            {"workspace": torch.zeros(3)},
            said("pointwise-workspace-elements-more", holds("torch.float32 of shape (3,)")),
        ),
        ({"grads": [None, BF16]}, said("chain-no-operand-gradient", 1, "gelu")),
        (
            {"grads": [BF16, None]},
            said("chain-contiguous-elements", "The gradient of stage 0, bias,", None, 16),
        ),
        ({"saved": 2}, said("chain-saved-activation-before", 2)),
        ({"grads": [None]}, said("chain-stages-operands-gradients", 2, 2)),
        ({"amax": torch.zeros(2)}, said("pointwise-amax-element-float32")),
        ({"operands": [None, None], "saved": 0}, said("chain-stage-no-operand", 0, "bias")),
    ],
)
def test_a_backward_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {
        "dy": BF16,
        "x": BF16,
        "operands": [BF16[0], None],
        "dx": torch.empty_like(BF16),
        "grads": [BF16[0].clone(), None],
        "workspace": torch.zeros(100_000),
        "saved": 1,
        **change,
    }
    with pytest.raises((InputError, InputTypeError), match=words):
        pointwise_backward(BIAS_GELU, **arguments)


def test_the_workspace_is_small_beside_what_is_read_and_written() -> None:
    rows, columns = 16384, 14336
    moved = 3 * 2 * rows * columns
    assert 8 * workspace_size(BIAS_GELU, rows, columns, torch.bfloat16, (True, False)) < moved / 45
    assert 8 * workspace_size((Stage("bias"),), rows, columns, torch.bfloat16, (True,)) < moved / 90
    assert workspace_size(SWIGLU, rows, columns, torch.bfloat16, (False,)) == 0
