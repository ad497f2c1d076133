"""The arithmetic of scales, in the emulator, which flushes subnormals elsewhere as a GPU does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import arithmetic_cases as cases
import emulator
import nvrtc
import pytest
import torch
from needs import needs_nvrtc
from paths import EMULATOR_KERNELS
from quantize_cases import FLOAT8, Place

from fuser.formats import DType


def around(written: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    return emulator.emulated(sources=EMULATOR_KERNELS, written=written)


EMULATOR = Place("cpu", around)


def test_sums_products_and_quotients_keep_subnormals() -> None:
    cases.check_arithmetic(EMULATOR)


def test_the_larger_of_two_pairs_of_halves() -> None:
    cases.check_max_u16x2(EMULATOR)


def test_every_byte_is_decoded() -> None:
    cases.check_decode(EMULATOR)


def test_codes_of_four_bits_are_right_for_every_input() -> None:
    cases.check_to_e2m1x8(EMULATOR)


@FLOAT8
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-41, 1e-3])
@pytest.mark.parametrize("when_infinite", [65504.0, 3.4028234663852886e38])
def test_scales_follow_from_any_amax(
    dtype: DType, pow2: bool, eps: float, when_infinite: float
) -> None:
    cases.check_scales(EMULATOR, dtype, pow2=pow2, eps=eps, when_infinite=when_infinite)


@needs_nvrtc
@pytest.mark.parametrize("capability", nvrtc.CAPABILITIES, ids=str)
def test_they_compile_without_local_memory(capability: tuple[int, int]) -> None:
    kernels = nvrtc.compiled(EMULATOR_KERNELS, "arithmetic", cases.SYMBOLS, capability)
    assert all(kernel.spill_bytes == kernel.stack_bytes == 0 for kernel in kernels)
