"""A model with experts on 2 x 2 ranks: expert parallel, tensor parallel and FSDP2."""

from __future__ import annotations

import mesh_experts_cases
import pytest
from ranks import run_cases, selected


@pytest.fixture(scope="module")
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The errors of every selected case, from one start of the processes."""
    names = selected(request, "test_on_four_ranks", mesh_experts_cases.CASES)
    return run_cases("mesh_experts_cases", names, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", mesh_experts_cases.CASES)
def test_on_four_ranks(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]
