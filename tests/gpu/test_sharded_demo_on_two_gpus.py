"""The commands of ``make demo-sharded`` on two GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from scripts import EXAMPLES, torchrun

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, here {torch.cuda.device_count()}."
)
GIVEN = ["--device", "cuda", "--dtype", "bfloat16", "--steps", "6"]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("-m", ["fuser", "demo", "--fsdp", "quantized", "--recipe", "current"]),
        ("-m", ["fuser", "demo", "--tp", "2", "--sp"]),
        (EXAMPLES / "train_moe.py", ["--ep", "2"]),
    ],
    ids=["fsdp", "tp", "ep"],
)
def test_a_demo_trains_as_plain_torch(
    script: Path | str, arguments: list[str], tmp_path: Path
) -> None:
    run = torchrun(script, [*arguments, *GIVEN, "--out", str(tmp_path)])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 ranks" in run.stdout
    assert re.search(r"sent in a step .*[\d.]+ [kM]B", run.stdout)
    largest = re.search(r"largest difference of the training losses: (\S+) nats", run.stdout)
    assert largest is not None
    assert float(largest[1]) < 0.1
