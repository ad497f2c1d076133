"""benchmarks/ of several ranks, tried on two of them over gloo."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch.distributed as dist
from paths import BENCHMARKS
from scripts import on_ranks

SCRIPTS = {
    "sharded.py": ["--recipes", "current", "--rounds", "1", "--layers", "1", "--no-compile"],
    "data_parallel.py": ["--rounds", "2"],
    "expert_parallel.py": ["--rounds", "1"],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_of_ranks_writes_a_time_for_each_variant(script: str, tmp_path: Path) -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    out = tmp_path / "rows.csv"
    arguments = ["--device", "cpu", "--out", str(out), *SCRIPTS[script]]
    status, printed = on_ranks(BENCHMARKS / script, arguments, tmp_path)
    assert status == 0, printed
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    time = next(name for name in rows[0] if name in ("ms", "step ms"))
    assert len({row["variant"] for row in rows}) > 1
    assert all(float(row[time]) > 0 and not row.get("failure") for row in rows)
