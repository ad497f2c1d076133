"""The kernels of FP8 in blocks of 128, in the emulator."""

from __future__ import annotations

from typing import Any

import block_scaling_cases as cases
import emulator
import pytest
import torch
from quantize_cases import DTYPES, E4M3, E5M2, EMULATOR, FLOAT8, Input, block_format, buffers
from said import holds, said

from fuser.cuda import block_scaling
from fuser.errors import InputError
from fuser.formats import DType

emulator.prepare(*block_scaling.instantiations())


@cases.EVERY_INPUT
@cases.EVERY_DIM
def test_both_copies_are_the_references_bytes_and_scales(case: Input, block_dim: int) -> None:
    cases.check_quantize(EMULATOR, case, E4M3, (True, True), block_dim=block_dim)


@pytest.mark.parametrize("case", [Input(130, 257), Input(16, 24, torch.float32)], ids=str)
@cases.EVERY_COPY
@cases.EVERY_DIM
def test_either_copy_is_made_alone(case: Input, copies: tuple[bool, bool], block_dim: int) -> None:
    cases.check_quantize(EMULATOR, case, E5M2, copies, block_dim=block_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{"pow2": False}, {"pow2": False, "eps": 3.0}, {"eps": 1e-40}], ids=str
)
@pytest.mark.parametrize("content", ["", "tiny"])
@cases.EVERY_DIM
def test_scales_of_every_kind(
    dtype: torch.dtype, options: dict[str, Any], content: str, block_dim: int
) -> None:
    case = Input(24, 40, dtype, special=content)
    cases.check_quantize(EMULATOR, case, E5M2, (True, True), block_dim=block_dim, **options)


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
@cases.EVERY_DIM
def test_both_copies_are_dequantized(
    case: Input, dtype: DType, out_dtype: torch.dtype, block_dim: int, col: bool
) -> None:
    cases.check_dequantize(EMULATOR, case, dtype, out_dtype, block_dim=block_dim, col=col)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"row": None},
            said(
                "checks-without-copy-data",
                holds("FP8 block "),
                "_rowwise_scale_inv",
                "_rowwise_data",
            ),
        ),
        (
            {"row_scale_inv": None},
            said(
                "checks-without-copy-data",
                holds("FP8 block "),
                "_rowwise_data",
                "_rowwise_scale_inv",
            ),
        ),
        (
            {"row_scale_inv": torch.zeros(1, 5)},
            said(
                "checks-needs-contiguous-strides",
                holds("FP8 block "),
                holds("rowwise_scale_inv"),
                None,
                (1, 8),
            ),
        ),
        (
            {"dtype": DType.kFloat4E2M1},
            said("checks-elements-e4m3-e5m2", holds("FP8 block "), "E2M1"),
        ),
    ],
)
def test_a_launcher_refuses_tensors_that_it_does_not_support(
    change: dict[str, Any], words: str
) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(5, 16),
        "dtype": E4M3,
        "row": torch.zeros(5, 16, dtype=torch.uint8),
        "row_scale_inv": torch.zeros(1, 8),
    }
    arguments.update(change)
    x, dtype = arguments.pop("x"), arguments.pop("dtype")
    with pytest.raises(InputError, match=words):
        block_scaling.quantize(block_format(dtype, 1), x, buffers(**arguments))
