"""Tests outside ``tests/gpu`` run on the CPU, also on a machine that has a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if GPU_TESTS in request.path.parents or not torch.cuda.is_available():
        yield
        return
    with torch.device("cpu"):
        yield
