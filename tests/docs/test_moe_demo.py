"""The demo of mixtures of experts, examples/train_moe.py."""

from __future__ import annotations

import csv
import importlib
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from paths import EXAMPLES
from scripts import printed_by, refusal_by

sys.path.insert(0, str(EXAMPLES))
train_moe = importlib.import_module("train_moe")

TINY = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4"]
STEPS = 20


def run_main(out: Path, *arguments: str) -> str:
    return printed_by(train_moe.main, [*TINY, "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with the results, and what was printed."""
    out = tmp_path_factory.mktemp("moe")
    return out, run_main(out, "--steps", str(STEPS), "--learning-rate", "0.01")


def rows_of(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_both_runs_learn_and_agree(demo: tuple[Path, str]) -> None:
    losses = rows_of(demo[0] / "losses.csv")
    assert len(losses) == STEPS
    assert losses[0]["fuser"] == pytest.approx(math.log(256), abs=0.5)
    assert losses[-1]["fuser"] < losses[0]["fuser"] - 1
    for row in losses:
        assert row["fuser"] == pytest.approx(row["plain"], abs=1e-4)


def test_the_load_of_every_expert_is_written_for_every_report(demo: tuple[Path, str]) -> None:
    rows = rows_of(demo[0] / "experts.csv")
    assert [(row["step"], row["layer"]) for row in rows] == [
        (step, layer) for step in range(1, STEPS + 1) for layer in (0, 1)
    ]
    for row in rows:
        shares = [row[f"expert {i}"] for i in range(8)]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
    shown = re.findall(r"^  layer (\d)   ([\d.]+) and ([\d.]+)$", demo[1], re.M)
    last = [[100 * row[f"expert {i}"] for i in range(8)] for row in rows[-2:]]
    assert [(int(n), float(a), float(b)) for n, a, b in shown] == [
        (layer, round(max(shares), 1), round(min(shares), 1)) for layer, shares in enumerate(last)
    ]


def test_the_plan_names_the_grouped_linears(demo: tuple[Path, str]) -> None:
    assert re.search(r"0 GroupedLinear, 1 ScaledSwiGLU, 2 GroupedLinear", demo[1])
    assert "8 experts a layer, 2 for each token" in demo[1]


def test_pictures_are_drawn(demo: tuple[Path, str]) -> None:
    pytest.importorskip("matplotlib")
    out, printed = demo
    assert (out / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert f"\nWritten:\n  {out / 'experts.csv'}\n  {out / 'experts.png'}\n" in printed


def test_the_balancing_loss_evens_the_load_out(tmp_path: Path) -> None:
    spreads = {}
    for balance in ("0", "1"):
        out = tmp_path / balance
        run_main(out, "--steps", "40", "--no-compare", "--balance", balance)
        last = rows_of(out / "experts.csv")[-2:]
        shares = [row[f"expert {i}"] for row in last for i in range(8)]
        spreads[balance] = max(shares) - min(shares)
    assert spreads["1"] < 0.6 * spreads["0"]


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_experts_train_in_low_precision(tmp_path: Path) -> None:
    printed = run_main(tmp_path, "--steps", "3", "--no-compare", "--recipe", "mxfp8")
    assert "grouped quantize weight" in printed
    assert all(math.isfinite(row["fuser"]) for row in rows_of(tmp_path / "losses.csv"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--experts-per-token", "9"], "--experts-per-token is 9; it must be 1 to --experts 8"),
        (["--experts", "0"], "it must be 1 to --experts 0"),
        (["--balance", "-1"], "--balance is -1.0; it must not be negative"),
        (["--cuda-graph"], "--cuda-graph needs --device cuda; --device is cpu"),
        (["--width", "30", "--heads", "4"], "--width 30 does not give each"),
    ],
)
def test_bad_options_get_a_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal_by(train_moe.main, [*TINY, "--out", str(tmp_path), *arguments])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_the_experts_are_timed_as_cuda_graphs(tmp_path: Path) -> None:
    arguments = ["--steps", "3", "--device", "cuda", "--dtype", "bfloat16", "--cuda-graph"]
    printed = run_main(tmp_path, *arguments, "--no-compare")
    assert re.search(r"[\d.]+ ms launched, [\d.]+ ms as CUDA graphs; [\d.]+x", printed)
