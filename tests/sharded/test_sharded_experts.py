"""Experts under ``fully_shard`` (FSDP2) on two ranks: plain weights, and quantized ones."""

from __future__ import annotations

import all_sharded_experts_cases as experts
import pytest
from ranks import run_cases, selected


@pytest.fixture(scope="module")
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The errors of every selected case, from one start of the processes."""
    cases = selected(request, "test_on_two_ranks", experts.CASES)
    return run_cases(experts.__name__, cases, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.sampled
@pytest.mark.parametrize("case", experts.CASES)
def test_on_two_ranks(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]
