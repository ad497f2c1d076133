"""Quantized parameters under ``fully_shard`` (FSDP2), on two ranks of a CPU, and on four."""

from __future__ import annotations

import hsdp_cases
import pytest
import sharded_cases
import torch.distributed as dist
from ranks import run_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pytest.TempPathFactory:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    return tmp_path_factory


@pytest.fixture(scope="module")
def errors(folder: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of every case on two ranks, from one start of the processes."""
    return run_cases("sharded_cases", tuple(sharded_cases.CASES), 2, folder.mktemp("two"))


@pytest.fixture(scope="module")
def errors_of_four(folder: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of every case on four ranks."""
    return run_cases("hsdp_cases", tuple(hsdp_cases.CASES), 4, folder.mktemp("four"))


@pytest.mark.parametrize("case", sharded_cases.CASES)
def test_on_two_ranks(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]


@pytest.mark.parametrize("case", hsdp_cases.CASES)
def test_on_four_ranks(case: str, errors_of_four: dict[str, str]) -> None:
    assert not errors_of_four[case], errors_of_four[case]
