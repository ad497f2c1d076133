"""The kernels of groups of rows, in the emulator."""

from __future__ import annotations

from typing import Any

import emulator
import grouped_cases as cases
import kernel_instantiations
import pytest
import torch
from pipeline_kernels import SOURCES
from quantize_cases import EMULATOR, Place
from said import holds, said

from fuser.cuda import fp8_scaling, grouped, nvfp4
from fuser.errors import InputError
from fuser.formats import DType

pytestmark = pytest.mark.sampled(most=12)

# With kernels that the compile check does not know.
UNLISTED = Place("cpu", lambda written: emulator.emulated(written=written, sources=SOURCES))

emulator.prepare(
    *grouped.instantiations(),
    *(k for launcher in (fp8_scaling, nvfp4) for k in launcher.instantiations()),
    *kernel_instantiations.groups_into_stores(),
)


@cases.EVERY_SPLIT
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ends_are_the_references(splits: tuple[int, ...], dtype: torch.dtype) -> None:
    cases.check_ends(EMULATOR, splits, dtype)


@cases.EVERY_WIDTH
@cases.EVERY_DTYPE
@pytest.mark.parametrize("name", ["even", "empty at both ends", "none"])
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_after_the_last_group_become_zero(
    name: str, columns: int, dtype: torch.dtype, shift: int
) -> None:
    cases.check_tail(EMULATOR, cases.SPLITS[name], columns, dtype, shift)


@cases.EVERY_WIDTH
@cases.EVERY_DTYPE
@pytest.mark.parametrize("name", ["even", "empty at both ends", "none", "many groups"])
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
def test_biases_are_the_references(
    name: str, columns: int, dtype: torch.dtype, is_scaled: bool
) -> None:
    cases.check_bias(EMULATOR, cases.SPLITS[name], columns, dtype, is_scaled)
    cases.check_bias(EMULATOR, cases.SPLITS[name], columns, dtype, is_scaled, shift=1)


@cases.EVERY_SPLIT
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tiles_are_the_references(splits: tuple[int, ...], dtype: torch.dtype) -> None:
    cases.check_tiles(EMULATOR, splits, dtype)


@pytest.mark.parametrize(("size", "groups"), [(128, 3), (160, 40), (1, 5)])
def test_tiles_of_groups_of_one_size(size: int, groups: int) -> None:
    cases.check_tiles_of_one_size(EMULATOR, size, groups)


@cases.EVERY_DTYPE
@pytest.mark.parametrize("columns", [64, 37, 264])
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_of_padded_groups(columns: int, dtype: torch.dtype, shift: int) -> None:
    cases.check_padding(EMULATOR, columns, dtype, shift)


@cases.EVERY_DTYPE
@cases.EVERY_FLOAT8
@pytest.mark.parametrize("columns", [136, 37])
@pytest.mark.parametrize("is_delayed", [False, True], ids=["current", "delayed"])
@cases.EVERY_ORDER
def test_a_group_in_fp8_has_a_scale_of_its_own(
    columns: int, dtype: torch.dtype, to: DType, is_delayed: bool, between: int | None
) -> None:
    cases.check_grouped_fp8(EMULATOR, columns, dtype, to, is_delayed, between)


@cases.EVERY_DTYPE
@cases.EVERY_SCALING
def test_a_small_amax_of_a_group_counts_as_epsilon_and_scales_may_be_powers_of_two(
    dtype: torch.dtype, scaling: dict[str, Any]
) -> None:
    cases.check_grouped_fp8(EMULATOR, 136, dtype, DType.kFloat8E4M3, False, **scaling)
    for block_dim in (1, 2):
        cases.check_grouped_blocks(EMULATOR, dtype, block_dim, **scaling)


@cases.EVERY_DTYPE
@pytest.mark.parametrize("columns", [64, 37])
@pytest.mark.parametrize("between", [8, 1])
@pytest.mark.parametrize("choices", [1, 2, 7])
def test_tokens_by_index_are_the_rows_of_permute(
    columns: int, dtype: torch.dtype, between: int, choices: int
) -> None:
    cases.check_gathered_rows(EMULATOR, columns, dtype, between, choices)


@cases.EVERY_DTYPE
@cases.EVERY_ORDER
@pytest.mark.parametrize("block_dim", [1, 2])
def test_blocks_of_128_do_not_reach_over_the_end_of_a_group(
    dtype: torch.dtype, block_dim: int, between: int | None
) -> None:
    cases.check_grouped_blocks(EMULATOR, dtype, block_dim, between)


@cases.EVERY_DTYPE
@cases.EVERY_ORDER
def test_blocks_of_32_do_not_reach_over_the_end_of_a_group(
    dtype: torch.dtype, between: int | None
) -> None:
    cases.check_grouped_mxfp8(EMULATOR, dtype, between)


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [144, 16])
@cases.EVERY_DTYPE
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "Hadamard"])
@pytest.mark.parametrize("stochastic", [False, True], ids=["to nearest", "stochastic"])
@cases.EVERY_ORDER
def test_a_group_in_nvfp4_has_an_amax_of_its_own(
    columns: int, dtype: torch.dtype, hadamard: bool, stochastic: bool, between: int | None
) -> None:
    cases.check_grouped_nvfp4(EMULATOR, columns, dtype, hadamard, stochastic, between)


@pytest.mark.parametrize("columns", [64, 37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["rows", "padded rows"])
def test_an_activation_of_padded_groups_is_quantized_as_it_is_computed(
    columns: int, dtype: torch.dtype, is_backward: bool, is_padded: bool
) -> None:
    cases.check_chain_of_padded_groups(EMULATOR, columns, dtype, is_backward, is_padded)


@pytest.mark.parametrize("name", cases.WITH_SUMS)
@pytest.mark.parametrize("is_padded", [False, True], ids=["rows", "padded rows"])
def test_gradients_of_scales_and_biases_are_left_beside_a_quantized_gradient(
    name: str, is_padded: bool
) -> None:
    cases.check_sums_beside(EMULATOR, UNLISTED, name, torch.bfloat16, torch.bfloat16, is_padded)


@pytest.mark.parametrize(
    ("dtype", "of_scales"),
    [(torch.float16, torch.float32), (torch.float32, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("name", ["SwiGLU", "SwiGLU, 3 interleaved"])
def test_gradients_beside_have_dtypes_of_their_own(
    name: str, dtype: torch.dtype, of_scales: torch.dtype
) -> None:
    cases.check_sums_beside(EMULATOR, UNLISTED, name, dtype, of_scales)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"ends": torch.zeros(3, dtype=torch.int64)},
            said("grouped-takes-shape", "ends", None, holds("int32"), None, holds("int64")),
        ),
        (
            {"bias": torch.zeros(3, 5)},
            said("grouped-add-bias-contiguous", 3, 4, "torch.float32", (3, 5)),
        ),
        ({"scales": torch.zeros(4)}, said("grouped-takes-shape", "scales", (5,))),
        ({"out": torch.zeros(4, 5).t()}, said("grouped-contiguous-matrix-shape", None, (1, 5))),
        (
            {"out": torch.zeros(5, 4, dtype=torch.float64)},
            said("checks-float32-float16-bfloat16", None, "torch.float64"),
        ),
    ],
)
def test_what_a_launcher_cannot_take_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {
        "ends": torch.zeros(3, dtype=torch.int32),
        "bias": torch.zeros(3, 4),
        "scales": torch.zeros(5),
        "out": torch.zeros(5, 4),
    }
    with pytest.raises(InputError, match=words):
        grouped.add_bias(**(arguments | change))
