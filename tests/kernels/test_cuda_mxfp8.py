"""The kernels of MXFP8, in the emulator."""

from __future__ import annotations

from typing import Any

import emulator
import mxfp8_cases as cases
import pytest
import torch
from quantize_cases import DTYPES, E4M3, E5M2, EMULATOR, FLOAT8, Input, buffers, mxfp8_format
from said import holds, said

from fuser.cuda import mxfp8
from fuser.errors import InputError
from fuser.formats import DType

emulator.prepare(*mxfp8.instantiations())


@cases.EVERY_INPUT
@cases.EVERY_DIM
def test_both_copies_are_the_references_bytes_and_scales(
    case: Input, two_dimensional: bool
) -> None:
    cases.check_quantize(
        EMULATOR, case, E4M3, (True, True), two_dimensional=two_dimensional, swizzled=False
    )


@pytest.mark.parametrize("case", [Input(160, 288), Input(32, 64, torch.float32)], ids=str)
@cases.EVERY_COPY
@cases.EVERY_DIM
@cases.EVERY_ORDER
def test_either_copy_is_made_alone_with_scales_in_either_order(
    case: Input, copies: tuple[bool, bool], two_dimensional: bool, swizzled: bool
) -> None:
    cases.check_quantize(
        EMULATOR, case, E5M2, copies, two_dimensional=two_dimensional, swizzled=swizzled
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("content", ["tiny", "mixed", "huge", "nan"])
def test_e5m2_of_hard_values(dtype: torch.dtype, content: str) -> None:
    cases.check_quantize(
        EMULATOR,
        Input(64, 96, dtype, special=content),
        E5M2,
        (True, True),
        two_dimensional=False,
        swizzled=False,
    )


@pytest.mark.parametrize(
    "case",
    [
        Input(160, 288),
        Input(64, 96, torch.float32, special="mixed"),
        Input(64, 32, torch.bfloat16, "shifted"),
        Input(32, 64, special="nan"),
        Input(0, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
@FLOAT8
def test_both_copies_are_dequantized(
    case: Input, dtype: DType, out_dtype: torch.dtype, columnwise: bool
) -> None:
    cases.check_dequantize(EMULATOR, case, dtype, out_dtype, columnwise=columnwise)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
def test_every_exponent_is_dequantized(out_dtype: torch.dtype, columnwise: bool) -> None:
    cases.check_every_scale(EMULATOR, out_dtype, columnwise=columnwise)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"x": torch.zeros(32, 48)},
            said("formats-needs-multiple-pad", "MXFP8", "K", None, 32, "K", 48),
        ),
        (
            {"col": torch.zeros(32, 64, dtype=torch.uint8)},
            said("checks-without-copy-data", holds("MXFP8 "), "_columnwise_data"),
        ),
        (
            {"row_scale": torch.zeros(32, 2, dtype=torch.uint8)},
            said("checks-needs-contiguous-strides", None, holds("e_scale_inv"), None, (128, 4)),
        ),
        (
            {"row_scale": torch.zeros(513, dtype=torch.uint8)[1:].view(128, 4)},
            said("checks-needs-multiple-bytes", None, None, 16),
        ),
        ({"dtype": DType.kFloat4E2M1}, said("checks-elements-e4m3-e5m2", holds("MXFP8 "), "E2M1")),
    ],
)
def test_a_launcher_refuses_tensors_that_it_does_not_support(
    change: dict[str, Any], words: str
) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(32, 64),
        "dtype": E4M3,
        "row": torch.zeros(32, 64, dtype=torch.uint8),
        "row_scale": torch.zeros(128, 4, dtype=torch.uint8),
    }
    arguments.update(change)
    x, dtype = arguments.pop("x"), arguments.pop("dtype")
    with pytest.raises(InputError, match=words):
        mxfp8.quantize(mxfp8_format(dtype), x, buffers(**arguments))
