"""Normalizations into every store on a GPU: the bits of row kernel and store, and large sizes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import norm_store_cases as cases
import pytest
import torch
from norm_store_cases import BLOCKS, LARGE, ODD, STORES
from normalization_cases import Case

from fuser.cuda import module


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of the tests among fuser's own."""
    copy = tmp_path / "kernels"
    shutil.copytree(module.KERNELS, copy)
    shutil.copy(cases.SOURCES / f"{cases.SOURCE}.cu", copy)
    monkeypatch.setattr(module, "KERNELS", copy)
    caches = (module.function, module.kernel, module._compiled)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@contextmanager
def running(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Outputs begin as what no kernel here writes everywhere."""
    for tensor in written:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0xA5)
    yield


@pytest.mark.parametrize("case", BLOCKS + LARGE, ids=str)
@pytest.mark.parametrize("store", STORES)
def test_a_store_gets_the_bits_of_the_row_kernels(store: str, case: Case) -> None:
    cases.check_store(store, case, running, running, "cuda")


@pytest.mark.parametrize("case", BLOCKS + ODD + LARGE, ids=str)
def test_producers_make_the_bits_of_the_row_kernels(case: Case) -> None:
    cases.check_values(case, running, running, "cuda")


@pytest.mark.parametrize("case", ODD, ids=str)
def test_a_store_gets_the_bits_of_rows_of_any_size(case: Case) -> None:
    for store in cases.ANY:
        cases.check_store(store, case, running, running, "cuda")
