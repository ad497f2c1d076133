"""The kernels of NVFP4, in the emulator."""

from __future__ import annotations

from typing import Any

import emulator
import nvfp4_cases as cases
import pytest
import torch
from nvfp4_cases import Options
from quantize_cases import DTYPES, EMULATOR, Input, buffers, nvfp4_format
from said import holds, said

from fuser.cuda import nvfp4
from fuser.errors import InputError

emulator.prepare(*nvfp4.instantiations())


@cases.EVERY_INPUT
def test_both_copies_are_the_references_bytes_and_scales(case: Input) -> None:
    cases.check_quantize(EMULATOR, case, Options())


@pytest.mark.parametrize("case", [Input(48, 80), Input(16, 144, torch.float32)], ids=str)
@cases.EVERY_KIND
@cases.EVERY_COPY
def test_either_copy_is_made_alone_in_every_kind(
    case: Input, options: Options, copies: tuple[bool, bool]
) -> None:
    cases.check_quantize(EMULATOR, case, options, copies)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("content", ["tiny", "mixed", "huge", "nan", "inf", "zeros"])
@pytest.mark.parametrize("options", cases.KINDS[1:3], ids=str)
def test_hard_values_in_squares_and_transformed(
    dtype: torch.dtype, content: str, options: Options
) -> None:
    cases.check_quantize(EMULATOR, Input(32, 48, dtype, special=content), options)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 2**40 - 5])
@pytest.mark.parametrize("layout", ["contiguous", "shifted"])
def test_stochastic_rounding_uses_the_references_words_at_every_offset(
    offset: int, layout: str
) -> None:
    case = Input(32, 48, torch.bfloat16, layout)
    cases.check_quantize(EMULATOR, case, Options(stochastic=True, seed=3, offset=offset))


@pytest.mark.parametrize("amax", cases.AMAXES, ids=str)
def test_amaxes_that_are_not_the_tensors(amax: tuple[float, ...]) -> None:
    cases.check_quantize(EMULATOR, Input(32, 48), Options(), amax=amax)


@pytest.mark.parametrize("random_signs", [True, False])
@cases.EVERY_INPUT
def test_the_amaxes_of_a_tensor_and_of_its_transform(case: Input, random_signs: bool) -> None:
    cases.check_hadamard_amax(EMULATOR, case, random_signs)


@pytest.mark.parametrize(
    "case",
    [
        Input(144, 272),
        Input(64, 96, torch.bfloat16, "shifted"),
        Input(32, 64, special="nan"),
        Input(0, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
def test_both_copies_are_dequantized(case: Input, out_dtype: torch.dtype, columnwise: bool) -> None:
    cases.check_dequantize(EMULATOR, case, out_dtype, columnwise=columnwise)


@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("amax", [3.0, 2.0**-135])
def test_every_byte_is_dequantized_under_every_scale(
    out_dtype: torch.dtype, columnwise: bool, amax: float
) -> None:
    cases.check_every_byte(EMULATOR, out_dtype, columnwise=columnwise, amax=amax)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"col_amax": torch.zeros(2)},
            said("checks-needs-contiguous-strides", None, "_amax_columnwise", None, (1,)),
        ),
        (
            {"x": torch.zeros(16, 24)},
            said("formats-needs-multiple-pad", "NVFP4", "K", None, 16, "K", 24),
        ),
        ({"amax_value": torch.zeros(3)}, said("nvfp4-takes-two-amaxes", None, (3,))),
        ({"offset": -1}, said("nvfp4-offset-into-random", None, -1)),
        (
            {"row_scale": None},
            said(
                "checks-without-copy-data", holds("NVFP4 "), "_rowwise_data", "_rowwise_scale_inv"
            ),
        ),
        (
            {"row": torch.zeros(16, 32, dtype=torch.uint8)},
            said("checks-needs-contiguous-strides", None, "_rowwise_data", None, (16, 16)),
        ),
    ],
)
def test_a_launcher_refuses_tensors_that_it_does_not_support(
    change: dict[str, Any], words: str
) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(16, 32),
        "offset": 0,
        "amax_value": torch.ones(1),
        "row": torch.zeros(16, 16, dtype=torch.uint8),
        "row_scale": torch.zeros(128, 4, dtype=torch.uint8),
    }
    arguments.update(change)
    x, amax, offset = (arguments.pop(name) for name in ("x", "amax_value", "offset"))
    with pytest.raises(InputError, match=words):
        nvfp4.quantize(nvfp4_format(), x, buffers(**arguments), amax, offset=offset)
