"""The kernels of FP8 with one scale a tensor, on a GPU."""

from __future__ import annotations

from typing import Any

import fp8_scaling_cases as cases
import pytest
import torch
from quantize_cases import (
    BIG,
    COPIES,
    DTYPES,
    E4M3,
    E5M2,
    FLOAT8,
    GPU,
    NAN,
    Input,
    assert_same,
    buffers,
    fp8_format,
)
from streams import check_replay, check_two_streams

from fuser.cuda import fp8_scaling
from fuser.formats import DType
from fuser.reference import fp8_scaling as reference


@cases.EVERY_INPUT
def test_amax_is_the_largest_magnitude_and_a_nan_wins(case: Input) -> None:
    cases.check_amax(GPU, case)


@pytest.mark.parametrize("case", BIG, ids=str)
def test_amax_of_a_big_tensor(case: Input) -> None:
    cases.check_amax(GPU, case)


@cases.EVERY_INPUT
@cases.EVERY_COPY
@FLOAT8
def test_current_scaling_gives_the_references_bytes(
    case: Input, copies: tuple[bool, bool], dtype: DType
) -> None:
    cases.check_current(GPU, case, dtype, copies)


@pytest.mark.parametrize("case", BIG, ids=str)
@cases.EVERY_COPY
@FLOAT8
def test_current_scaling_of_a_big_tensor(
    case: Input, copies: tuple[bool, bool], dtype: DType
) -> None:
    cases.check_current(GPU, case, dtype, copies, pow2=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@cases.EVERY_COPY
@pytest.mark.parametrize("options", cases.SCALES, ids=str)
def test_scales_of_every_kind(
    dtype: torch.dtype, copies: tuple[bool, bool], options: dict[str, Any]
) -> None:
    cases.check_current(GPU, Input(24, 40, dtype), E5M2, copies, **options)


@pytest.mark.parametrize("case", [*cases.ODD, *BIG, Input(0, 3)], ids=str)
@pytest.mark.parametrize("copies", [*COPIES.values(), (False, False)], ids=str)
@FLOAT8
@pytest.mark.parametrize(("scale", "seen"), [(3.0, 0.0), (2.0**-140, 1e30), (3e38, NAN)])
def test_delayed_scaling_casts_with_the_given_scale_and_records_the_amax(
    case: Input, copies: tuple[bool, bool], dtype: DType, scale: float, seen: float
) -> None:
    cases.check_delayed(GPU, case, dtype, copies, scale=scale, seen=seen)


@pytest.mark.parametrize(
    ("m", "k", "shift"),
    [(1, 1, 0), (130, 257, 0), (144, 136, 0), (144, 136, 1), (0, 5, 0), (4096, 3072, 0)],
)
def test_a_transpose_moves_every_byte(m: int, k: int, shift: int) -> None:
    cases.check_transpose(GPU, m, k, shift)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@FLOAT8
@pytest.mark.parametrize("scale_inv", [0.37, 2.0**-140, 3e38])
@pytest.mark.parametrize(("n", "shift"), [(256, 0), (261, 0), (256, 1), (10**6 + 3, 0), (0, 0)])
def test_every_byte_is_dequantized(
    n: int, dtype: DType, out_dtype: torch.dtype, scale_inv: float, shift: int
) -> None:
    cases.check_dequantize(GPU, n, dtype, out_dtype, scale_inv, shift)


@pytest.mark.parametrize("margin", [0, 2, -3])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("sizes", [*cases.STATES, [(4, 2)] * 100], ids=str)
def test_delayed_scales_of_several_states_are_updated_in_one_launch(
    sizes: list[tuple[int, int]], algorithm: str, margin: int
) -> None:
    cases.check_update(GPU, sizes, margin=margin, algorithm=algorithm)


# -- streams and sizes ----------------------------------------------------------


def quantized(x: torch.Tensor) -> list[torch.Tensor]:
    """amax, both copies in its scale, and the values back."""
    m, k = x.shape
    amax = torch.zeros(1, device=x.device)
    row, col = GPU.empty((m, k)), GPU.empty((k, m))
    scale_inv, back = GPU.empty((1,), torch.float32), torch.empty_like(x)
    fp8_scaling.amax(x, out=amax)
    outputs = buffers(row=row, col=col, scale_inv=scale_inv)
    fp8_scaling.quantize(fp8_format(), x, outputs, amax_value=amax)
    fp8_scaling.dequantize(row, scale_inv, E4M3, x.dtype, out=back)
    return [amax, row, col, scale_inv, back]


def test_captured_launches_replay_over_new_values() -> None:
    check_replay(quantized, Input(300, 520))


def test_launches_are_on_torchs_current_stream() -> None:
    check_two_streams(quantized, Input(300, 520))


def test_more_elements_than_an_int_counts() -> None:
    m, k = 2**16 + 128, 2**15
    x = torch.randn(m, 128, device="cuda", dtype=torch.bfloat16).repeat(1, k // 128)
    x[-1, -1] = 100.0
    amax, row, col, scale_inv, back = quantized(x)
    assert amax.item() == 100.0
    expected = reference.quantize_current(x[-128:], E4M3, amax_value=amax)
    assert_same(row[-128:], expected[0], "row")
    assert_same(col[:, -128:].contiguous(), expected[1], "col")
    values = reference.dequantize(row[-128:], scale_inv, E4M3, torch.bfloat16)
    assert_same(back[-128:], values, "back")
    turned = torch.empty_like(col)
    fp8_scaling.transpose(row, out=turned)
    assert torch.equal(turned, col)
