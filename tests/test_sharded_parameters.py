"""Quantized parameters under ``fully_shard`` (FSDP2), on two ranks of a CPU, and on four."""

from __future__ import annotations

import pytest
import sharded_cases
import torch.distributed as dist
from ranks import run_cases


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of every case, from one start of two processes."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    folder = tmp_path_factory.mktemp("ranks")
    return run_cases("sharded_cases", tuple(sharded_cases.CASES), 2, folder)


@pytest.mark.parametrize("case", sharded_cases.CASES)
def test_on_two_ranks(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]
