"""Quantized parameters under ``fully_shard`` (FSDP2), on two ranks and on four."""

from __future__ import annotations

import hsdp_cases
import pytest
import sharded_cases
from ranks import run_cases, selected


@pytest.fixture(scope="module")
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The errors of every selected case on two ranks, from one start of the processes."""
    cases = selected(request, "test_on_two_ranks", sharded_cases.CASES)
    return run_cases("sharded_cases", cases, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def errors_of_four(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The errors of every selected case on four ranks."""
    cases = selected(request, "test_on_four_ranks", hsdp_cases.CASES)
    return run_cases("hsdp_cases", cases, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.sampled
@pytest.mark.parametrize("case", sharded_cases.CASES)
def test_on_two_ranks(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]


@pytest.mark.sampled
@pytest.mark.parametrize("case", hsdp_cases.CASES)
def test_on_four_ranks(case: str, errors_of_four: dict[str, str]) -> None:
    assert not errors_of_four[case], errors_of_four[case]
