"""Parameters that are DTensors: tensor parallel on two ranks, and with FSDP2 on four."""

from __future__ import annotations

import dtensor_cases
import dtensor_mesh_cases
import pytest
import torch.distributed as dist
from ranks import run_cases, selected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pytest.TempPathFactory:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    return tmp_path_factory


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest, folder: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of every selected case on two ranks, from one start of the processes."""
    names = selected(request, "test_on_two_ranks", dtensor_cases.CASES)
    return run_cases("dtensor_cases", names, 2, folder.mktemp("two"))


@pytest.fixture(scope="module")
def errors_of_four(
    request: pytest.FixtureRequest, folder: pytest.TempPathFactory
) -> dict[str, str]:
    """The errors of every selected case on four ranks."""
    names = selected(request, "test_on_four_ranks", dtensor_mesh_cases.CASES)
    return run_cases("dtensor_mesh_cases", names, 4, folder.mktemp("four"))


@pytest.mark.parametrize("case", dtensor_cases.CASES)
def test_on_two_ranks(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]


@pytest.mark.parametrize("case", dtensor_mesh_cases.CASES)
def test_on_four_ranks(case: str, errors_of_four: dict[str, str]) -> None:
    assert not errors_of_four[case], errors_of_four[case]
