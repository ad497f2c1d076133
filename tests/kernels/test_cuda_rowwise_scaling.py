"""The kernels of FP8 with one scale a row, in the emulator."""

from __future__ import annotations

from typing import Any

import emulator
import pytest
import rowwise_scaling_cases as cases
import torch
from quantize_cases import DTYPES, E4M3, E5M2, EMULATOR, FLOAT8, Input, buffers, rows_format
from said import holds, said

from fuser.cuda import rowwise_scaling
from fuser.errors import InputError
from fuser.formats import DType

emulator.prepare(*rowwise_scaling.instantiations())


@cases.EVERY_INPUT
def test_both_copies_are_the_references_bytes_and_scales(case: Input) -> None:
    cases.check_quantize(EMULATOR, case, E4M3, (True, True))


@pytest.mark.parametrize("case", [Input(130, 257), Input(16, 24, torch.float32)], ids=str)
@cases.EVERY_COPY
def test_either_copy_is_made_alone(case: Input, copies: tuple[bool, bool]) -> None:
    cases.check_quantize(EMULATOR, case, E5M2, copies)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"pow2": True}, {"eps": 3.0}, {"eps": 1e-40}], ids=str)
@pytest.mark.parametrize("content", ["", "tiny"])
def test_scales_of_every_kind(dtype: torch.dtype, options: dict[str, Any], content: str) -> None:
    case = Input(24, 40, dtype, special=content)
    cases.check_quantize(EMULATOR, case, E5M2, (True, True), **options)


@pytest.mark.parametrize("case", [Input(0, 130), Input(130, 0)], ids=str)
def test_rows_and_columns_without_elements_have_the_scale_of_the_smallest_amax(case: Input) -> None:
    cases.check_quantize(EMULATOR, case, E4M3, (True, True), eps=2.0)


@pytest.mark.parametrize(
    "case",
    [
        Input(130, 257),
        Input(144, 136, torch.float32),
        Input(24, 21),
        Input(21, 24),
        Input(16, 24, torch.bfloat16, "shifted"),
        Input(160, 8, special="nan"),
        Input(0, 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("col", [False, True], ids=["row", "col"])
@FLOAT8
def test_both_copies_are_dequantized(
    case: Input, dtype: DType, out_dtype: torch.dtype, col: bool
) -> None:
    cases.check_dequantize(EMULATOR, case, dtype, out_dtype, col=col)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"row": None},
            said(
                "checks-without-copy-data",
                holds("row-wise FP8 "),
                "_rowwise_scale_inv",
                "_rowwise_data",
            ),
        ),
        (
            {"row_scale_inv": None},
            said(
                "checks-without-copy-data",
                holds("row-wise FP8 "),
                "_rowwise_data",
                "_rowwise_scale_inv",
            ),
        ),
        (
            {"row_scale_inv": torch.zeros(4)},
            said(
                "checks-needs-contiguous-strides",
                holds("row-wise FP8 "),
                holds("rowwise_scale_inv"),
                None,
                (5,),
            ),
        ),
        (
            {"row_amax": None},
            said("rowwise-scaling-copy-without-amax", holds("row-wise FP8 "), "row"),
        ),
        (
            {"row_amax": torch.zeros(16)},
            said("checks-needs-contiguous-strides", holds("row-wise FP8 "), "row_amax", None, (5,)),
        ),
        (
            {"dtype": DType.kFloat4E2M1},
            said("checks-elements-e4m3-e5m2", holds("row-wise FP8 "), "E2M1"),
        ),
    ],
)
def test_what_a_launcher_cannot_take_is_refused(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(5, 16),
        "dtype": E4M3,
        "row_amax": torch.zeros(5),
        "row": torch.zeros(5, 16, dtype=torch.uint8),
        "row_scale_inv": torch.zeros(5),
    }
    arguments.update(change)
    x, dtype, amax = (arguments.pop(name) for name in ("x", "dtype", "row_amax"))
    with pytest.raises(InputError, match=words):
        rowwise_scaling.quantize(rows_format(dtype), x, buffers(**arguments), row_amax=amax)
