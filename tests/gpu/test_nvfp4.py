"""The kernels of NVFP4, on a GPU."""

from __future__ import annotations

import nvfp4_cases as cases
import pytest
import torch
from nvfp4_cases import Options
from quantize_cases import (
    DTYPES,
    GPU,
    WHOLE_BLOCKS,
    Input,
    assert_same,
    buffers,
    nvfp4_format,
    special,
)
from streams import check_replay, check_two_streams

from fuser.cuda import nvfp4
from fuser.formats import nvfp4_scale_shape
from fuser.reference import nvfp4 as reference

BIG = (
    Input(2048, 1552),
    Input(1040, 2032, torch.float32),
    Input(1136, 2048, torch.float16, "rows"),
)


@cases.EVERY_INPUT
@cases.EVERY_KIND
def test_both_copies_are_the_references_bytes_and_scales(case: Input, options: Options) -> None:
    cases.check_quantize(GPU, case, options)


@pytest.mark.parametrize("case", [*WHOLE_BLOCKS, *BIG], ids=str)
@cases.EVERY_KIND
@cases.EVERY_COPY
def test_either_copy_is_made_alone_in_every_kind(
    case: Input, options: Options, copies: tuple[bool, bool]
) -> None:
    cases.check_quantize(GPU, case, options, copies)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 2**40 - 5])
@pytest.mark.parametrize("layout", ["contiguous", "shifted"])
def test_stochastic_rounding_uses_the_references_words_at_every_offset(
    offset: int, layout: str
) -> None:
    case = Input(160, 96, torch.bfloat16, layout)
    cases.check_quantize(GPU, case, Options(stochastic=True, seed=3, offset=offset))


@pytest.mark.parametrize("amax", cases.AMAXES, ids=str)
@pytest.mark.parametrize("case", [Input(32, 48), *special(32, 48)], ids=str)
def test_amaxes_that_are_not_the_tensors(case: Input, amax: tuple[float, ...]) -> None:
    cases.check_quantize(GPU, case, Options(), amax=amax)


@pytest.mark.parametrize("random_signs", [True, False])
@cases.EVERY_INPUT
def test_the_amaxes_of_a_tensor_and_of_its_transform(case: Input, random_signs: bool) -> None:
    cases.check_hadamard_amax(GPU, case, random_signs)


@pytest.mark.parametrize(
    "case", [*WHOLE_BLOCKS, *BIG, Input(32, 64, special="nan"), Input(0, 64)], ids=str
)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
def test_both_copies_are_dequantized(case: Input, out_dtype: torch.dtype, columnwise: bool) -> None:
    cases.check_dequantize(GPU, case, out_dtype, columnwise=columnwise)


@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "col"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("amax", [3.0, 2.0**-135])
def test_every_byte_is_dequantized_under_every_scale(
    out_dtype: torch.dtype, columnwise: bool, amax: float
) -> None:
    cases.check_every_byte(GPU, out_dtype, columnwise=columnwise, amax=amax)


# -- streams and sizes --------------------------------------------------------


def quantized(x: torch.Tensor) -> list[torch.Tensor]:
    """Both copies with their amaxes and scales, and the values of the columnwise one."""
    m, k = x.shape
    amaxes = torch.zeros(2, device=x.device)
    row, row_scale = GPU.empty((m, k // 2)), GPU.empty(nvfp4_scale_shape(m, k, False))
    col, col_scale = GPU.empty((k, m // 2)), GPU.empty(nvfp4_scale_shape(m, k, True))
    back = torch.empty_like(x)
    nvfp4.hadamard_amax(x, out=amaxes)
    nvfp4.quantize(
        nvfp4_format(),
        x,
        buffers(row=row, row_scale=row_scale, col=col, col_scale=col_scale),
        amaxes,
        hadamard=True,
        stochastic=True,
        seed=11,
    )
    nvfp4.dequantize(col, col_scale, amaxes[1:], x.dtype, columnwise=True, out=back)
    return [amaxes, row, row_scale, col, col_scale, back]


def test_captured_launches_replay_over_new_values() -> None:
    check_replay(quantized, Input(288, 544))


def test_launches_are_on_torchs_current_stream() -> None:
    check_two_streams(quantized, Input(288, 544))


def test_more_elements_than_an_int_counts() -> None:
    m, k = 2**16 + 128, 2**15
    x = torch.randn(m, 128, device="cuda", dtype=torch.bfloat16).repeat(1, k // 128)
    amaxes, row, row_scale, col, col_scale, _ = quantized(x)
    last = x[-128:]
    kind = {"hadamard": True, "stochastic": True, "seed": 11, "amax_value": amaxes}
    # The words of the last rows: those of the elements from their first one on.
    first = (m - 128) * k
    wanted = reference.quantize(last, columnwise=False, offset=first, **kind)
    assert_same(row[-128:], wanted[0], "row")
    assert_same(row_scale[-128:], wanted[1], "row_scale")
    # Stochastic bytes of a few columns, each at its own place; scales need no words.
    for column in (0, 1, k - 16):
        part = last[:, column : column + 16]
        offset = column * m + m - 128
        one = reference.quantize(part, rowwise=False, offset=offset, **kind)
        assert one[3] is not None
        assert one[4] is not None
        assert_same(col[column : column + 1, -64:].contiguous(), one[3][:1], "col")
        assert_same(col_scale[column : column + 1, -8:].contiguous(), one[4][:1], "col_scale")
