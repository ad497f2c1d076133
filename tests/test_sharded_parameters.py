"""Quantized parameters under ``fully_shard`` (FSDP2), on two ranks and on four."""

from __future__ import annotations

import hsdp_cases
import pytest
import sharded_cases
from ranks import run_cases


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of every case on two ranks, from one start of the processes."""
    return run_cases("sharded_cases", tuple(sharded_cases.CASES), 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def errors_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of every case on four ranks."""
    return run_cases("hsdp_cases", tuple(hsdp_cases.CASES), 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", sharded_cases.CASES)
def test_on_two_ranks(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]


@pytest.mark.parametrize("case", hsdp_cases.CASES)
def test_on_four_ranks(case: str, errors_of_four: dict[str, str]) -> None:
    assert not errors_of_four[case], errors_of_four[case]
