"""The kernels of FP8 with one scale a row, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import rowwise_scaling_cases as cases
import torch
from quantize_cases import BIG, DTYPES, E5M2, FLOAT8, GPU, ODD, Input
from streams import check_replay, check_two_streams

from fuser.formats import DType
from fuser.tensors import Float8RowwiseQuantizer


@cases.EVERY_INPUT
@FLOAT8
def test_both_copies_are_the_references_bytes_and_scales(case: Input, dtype: DType) -> None:
    cases.check_quantize(GPU, case, dtype, (True, True))


@pytest.mark.parametrize("case", [*ODD, *BIG], ids=str)
@cases.EVERY_COPY
def test_either_copy_is_made_alone(case: Input, copies: tuple[bool, bool]) -> None:
    cases.check_quantize(GPU, case, E5M2, copies)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"pow2": True}, {"eps": 3.0}, {"eps": 1e-40}], ids=str)
@pytest.mark.parametrize("content", ["", "tiny", "mixed", "huge"])
def test_scales_of_every_kind(dtype: torch.dtype, options: dict[str, Any], content: str) -> None:
    case = Input(136, 144, dtype, special=content)
    cases.check_quantize(GPU, case, E5M2, (True, True), **options)


@pytest.mark.parametrize("case", [*ODD, *BIG, Input(160, 8, special="nan"), Input(0, 5)], ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("col", [False, True], ids=["row", "col"])
@FLOAT8
def test_both_copies_are_dequantized(
    case: Input, dtype: DType, out_dtype: torch.dtype, col: bool
) -> None:
    cases.check_dequantize(GPU, case, dtype, out_dtype, col=col)


def quantized(x: torch.Tensor) -> list[torch.Tensor]:
    """Both copies with their scales."""
    made = Float8RowwiseQuantizer().from_kernel(x)
    return [buffer for buffer in made.values() if buffer is not None]


def test_captured_launches_replay_over_new_values() -> None:
    check_replay(quantized, Input(300, 520))


def test_launches_are_on_torchs_current_stream() -> None:
    check_two_streams(quantized, Input(300, 520))
