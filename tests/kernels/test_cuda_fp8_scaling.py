"""The kernels of FP8 with one scale a tensor, in the emulator."""

from __future__ import annotations

from typing import Any

import emulator
import fp8_scaling_cases as cases
import pytest
import torch
from quantize_cases import COPIES, DTYPES, E4M3, E5M2, EMULATOR, FLOAT8, Input, buffers, fp8_format
from said import holds, said

from fuser.cuda import fp8_scaling
from fuser.cuda.tiled import as_producer
from fuser.errors import InputError
from fuser.formats import DType

emulator.prepare(*fp8_scaling.instantiations())


@cases.EVERY_INPUT
def test_amax_is_the_largest_magnitude_and_a_nan_wins(case: Input) -> None:
    cases.check_amax(EMULATOR, case)


@cases.EVERY_INPUT
@cases.EVERY_COPY
def test_current_scaling_gives_the_references_bytes(case: Input, copies: tuple[bool, bool]) -> None:
    cases.check_current(EMULATOR, case, E4M3, copies)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@cases.EVERY_COPY
@pytest.mark.parametrize("options", cases.SCALES, ids=str)
def test_e5m2_with_scales_of_every_kind(
    dtype: torch.dtype, copies: tuple[bool, bool], options: Any
) -> None:
    cases.check_current(EMULATOR, Input(24, 40, dtype), E5M2, copies, **options)


@pytest.mark.parametrize(
    "case", [Input(130, 257), Input(24, 40, torch.float32), Input(0, 3)], ids=str
)
@pytest.mark.parametrize("copies", [*COPIES.values(), (False, False)], ids=str)
@FLOAT8
@pytest.mark.parametrize(("scale", "seen"), [(3.0, 0.0), (2.0**-140, 1e30), (3e38, 2.0**-149)])
def test_delayed_scaling_casts_with_the_given_scale_and_records_the_amax(
    case: Input, copies: tuple[bool, bool], dtype: DType, scale: float, seen: float
) -> None:
    cases.check_delayed(EMULATOR, case, dtype, copies, scale=scale, seen=seen)


@pytest.mark.parametrize("case", [Input(24, 40, dtype, special="nan") for dtype in DTYPES], ids=str)
@cases.EVERY_COPY
def test_delayed_scaling_records_a_nan(case: Input, copies: tuple[bool, bool]) -> None:
    cases.check_delayed(EMULATOR, case, E4M3, copies, scale=1.0, seen=5.0)


@pytest.mark.parametrize(
    ("m", "k", "shift"),
    [
        *((1, 1, 0), (130, 257, 0), (144, 136, 0), (144, 136, 1)),
        *((8, 8, 0), (16, 8, 0), (16, 12, 0), (0, 5, 0)),
    ],
)
def test_a_transpose_moves_every_byte(m: int, k: int, shift: int) -> None:
    cases.check_transpose(EMULATOR, m, k, shift)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@FLOAT8
@pytest.mark.parametrize("scale_inv", [0.37, 2.0**-140, 3e38])
@pytest.mark.parametrize(("n", "shift"), [(256, 0), (261, 0), (256, 1), (8192 + 264, 0), (0, 0)])
def test_every_byte_is_dequantized(
    n: int, dtype: DType, out_dtype: torch.dtype, scale_inv: float, shift: int
) -> None:
    cases.check_dequantize(EMULATOR, n, dtype, out_dtype, scale_inv, shift)


@pytest.mark.parametrize("margin", [0, 2, -3])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("sizes", cases.STATES, ids=str)
def test_delayed_scales_of_several_states_are_updated_in_one_launch(
    sizes: list[tuple[int, int]], algorithm: str, margin: int
) -> None:
    cases.check_update(EMULATOR, sizes, margin=margin, algorithm=algorithm)


@pytest.mark.parametrize("count", [4, 5, 96, 97])
def test_states_are_updated_if_they_fill_a_launch_and_if_there_are_more(count: int) -> None:
    cases.check_update(EMULATOR, [(4, 2)] * count, margin=0, algorithm="max")


def test_groups_of_one_tile_need_an_amax() -> None:
    outputs = buffers(row=torch.zeros(128, 64, dtype=torch.uint8), scale_inv=one())
    tiles = torch.zeros(1, 4, dtype=torch.int32)
    x = as_producer("a test", torch.zeros(128, 64))
    with pytest.raises(InputError, match=said("fp8-scaling-matrix-needs-no", None, [128, 64])):
        fp8_scaling.quantize(fp8_format(), x, outputs, tiles=tiles)


# -- refusals -----------------------------------------------------------------


def one() -> torch.Tensor:
    return torch.ones(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"x": torch.zeros(4, 8, dtype=torch.float64)},
            said("checks-float32-float16-bfloat16", "FP8 quantize", "torch.float64"),
        ),
        ({"x": torch.zeros(8, 4).t()}, r"element by element; got strides \(1, 4\) of .* \[4, 8\]"),
        (
            {"x": torch.zeros(129, 8), "amax_value": None},
            said("fp8-scaling-matrix-needs-no", "FP8 quantize", [129, 8]),
        ),
        ({"x": torch.zeros(4, 8, 1)}, said("checks-matrix-m-k", "FP8 quantize", (4, 8, 1))),
        ({"dtype": DType.kFloat4E2M1}, said("checks-elements-e4m3-e5m2", "FP8 quantize", "E2M1")),
        (
            {"row": torch.zeros(8, 4, dtype=torch.uint8)},
            said("checks-needs-contiguous-strides", "FP8 quantize", "_rowwise_data", None, (4, 8)),
        ),
        (
            {"col": torch.zeros(4, 8, dtype=torch.uint8)},
            said(
                "checks-needs-contiguous-strides", "FP8 quantize", "_columnwise_data", None, (8, 4)
            ),
        ),
        (
            {"row": torch.zeros(4, 8)},
            said(
                "checks-needs-contiguous-strides",
                "FP8 quantize",
                None,
                "torch.uint8",
                None,
                "torch.float32",
            ),
        ),
        (
            {"scale_inv": torch.zeros(2)},
            said("checks-needs-contiguous-strides", "FP8 quantize", holds("scale_inv"), None, (1,)),
        ),
        (
            {"amax_value": torch.zeros(1, dtype=torch.bfloat16)},
            said(
                "checks-needs-contiguous-strides",
                "FP8 quantize",
                "an amax or scale",
                "torch.float32",
            ),
        ),
    ],
)
def test_a_launcher_refuses_tensors_that_it_does_not_support(
    change: dict[str, Any], words: str
) -> None:
    row = torch.zeros(change.get("x", torch.zeros(4, 8)).shape[:2], dtype=torch.uint8)
    arguments = {"x": torch.zeros(4, 8), "dtype": E4M3, "amax_value": one()}
    arguments |= {"row": row, "scale_inv": one(), **change}
    x, dtype, amax = (arguments.pop(name) for name in ("x", "dtype", "amax_value"))
    with pytest.raises(InputError, match=words):
        fp8_scaling.quantize(fp8_format(dtype), x, buffers(**arguments), amax_value=amax)


@pytest.mark.parametrize(
    ("histories", "algorithm", "words"),
    [
        ([torch.zeros(4, 1)], "median", said("fp8-scaling-algorithm-max-most", "'median'")),
        ([torch.zeros(4, 1)] * 2, "max", said("fp8-scaling-histories-scales-maxima", 2, 1, 1, 1)),
        (
            [torch.zeros(4, 2)],
            "max",
            said("checks-needs-contiguous-strides", None, "a scale", None, (2,)),
        ),
        (
            [torch.zeros(1, 4).t()[:, :1][::2]],
            "max",
            said("checks-needs-contiguous-strides", None, "an amax history"),
        ),
    ],
)
def test_states_that_do_not_fit_are_refused(
    histories: list[torch.Tensor], algorithm: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        fp8_scaling.update_delayed(histories, [one()], [one()], algorithm=algorithm)
