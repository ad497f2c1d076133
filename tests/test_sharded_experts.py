"""Experts under ``fully_shard`` (FSDP2) on two ranks: plain weights, and quantized ones."""

from __future__ import annotations

import pytest
import sharded_experts_cases
import sharded_quantized_experts_cases
import sharded_stacked_experts_cases
from ranks import run_cases

MODULES = (
    sharded_experts_cases,
    sharded_quantized_experts_cases,
    sharded_stacked_experts_cases,
)


@pytest.fixture(scope="module")
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The errors of every selected case, from one start of the processes for each module."""
    names = [item.name for item in request.session.items if item.path == request.path]
    found: dict[str, str] = {}
    for module in MODULES:
        cases = tuple(case for case in module.CASES if f"test_on_two_ranks[{case}]" in names)
        if cases:
            found |= run_cases(module.__name__, cases, 2, tmp_path_factory.mktemp("two"))
    return found


@pytest.mark.parametrize("case", [case for module in MODULES for case in module.CASES])
def test_on_two_ranks(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]
