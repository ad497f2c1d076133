"""Experts on two GPUs, over NCCL: the bits of one GPU that has all tokens; as a CUDA graph."""

from __future__ import annotations

from typing import Any

import expert_parallel_cases as experts
import pytest
import torch
from ranks import RANKS, results_of
from test_expert_parallel import assert_equal, checked

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < RANKS,
    reason=f"needs {RANKS} GPUs, here {torch.cuda.device_count()}.",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return results_of(experts.cases_on_gpus, folder, backend="nccl")


@pytest.mark.parametrize("name", experts.cases_on_gpus())
def test_experts_on_two_gpus_have_the_bits_of_one(results: dict[str, list[Any]], name: str) -> None:
    assert_equal(checked(results, name))
