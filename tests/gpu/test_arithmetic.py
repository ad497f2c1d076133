"""The arithmetic of scales on a GPU: bit for bit, under -ftz=true."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import arithmetic_cases as cases
import pytest
from paths import EMULATOR_KERNELS
from quantize_cases import FLOAT8, GPU

from fuser.cuda import module
from fuser.formats import DType

SOURCE = EMULATOR_KERNELS / "arithmetic.cu"


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of the tests among fuser's own."""
    copy = tmp_path / "kernels"
    shutil.copytree(module.KERNELS, copy)
    shutil.copy(SOURCE, copy)
    monkeypatch.setattr(module, "KERNELS", copy)
    caches = (module.function, module.kernel, module._compiled)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_sums_products_and_quotients_keep_subnormals() -> None:
    cases.check_arithmetic(GPU)


def test_the_larger_of_two_pairs_of_halves() -> None:
    cases.check_max_u16x2(GPU)


def test_every_byte_is_decoded() -> None:
    cases.check_decode(GPU)


def test_codes_of_four_bits_are_right_for_every_input() -> None:
    cases.check_to_e2m1x8(GPU)


@FLOAT8
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-41, 1e-3])
@pytest.mark.parametrize("when_infinite", [65504.0, 3.4028234663852886e38])
def test_scales_follow_from_any_amax(
    dtype: DType, pow2: bool, eps: float, when_infinite: float
) -> None:
    cases.check_scales(GPU, dtype, pow2=pow2, eps=eps, when_infinite=when_infinite)
