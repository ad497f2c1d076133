"""The demos under torchrun: results on several ranks, output, refusals and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sharded_demo_cases
import sharded_demo_mesh_cases
import torch.distributed as dist
from ranks import run_cases
from scripts import on_ranks, printed_by, refusal_by, torchrun
from sharded_demo_cases import train_lm, train_moe


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of every case on two ranks, from one start of the processes."""
    cases = tuple(sharded_demo_cases.CASES)
    return run_cases("sharded_demo_cases", cases, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def errors_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of every case on four ranks."""
    cases = tuple(sharded_demo_mesh_cases.CASES)
    return run_cases("sharded_demo_mesh_cases", cases, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("case", sharded_demo_cases.CASES)
def test_on_two_ranks(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]


@pytest.mark.parametrize("case", sharded_demo_mesh_cases.CASES)
def test_on_four_ranks(case: str, errors_of_four: dict[str, str]) -> None:
    assert not errors_of_four[case], errors_of_four[case]


# -- torchrun -------------------------------------------------------------------------


TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4"]
# The second rank dies in its fifth step.
DYING = """
import os, sys
from fuser.demo import train_lm

step, steps = train_lm.training_step, []

def dying(*args):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 5:
        os._exit(3)
    return step(*args)

train_lm.training_step = dying
sys.exit(train_lm.main())
"""


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")
def test_only_the_first_rank_prints_the_sharding_and_the_results(tmp_path: Path) -> None:
    arguments = ["--tp", "2", "--sp", "--fsdp", "--steps", "2", "--sample-bytes", "3"]
    run = torchrun("-m", ["fuser", "demo", *TINY, *arguments, "--out", str(tmp_path)])
    assert (run.returncode, run.stderr) == (0, "")
    text = run.stdout
    for once in (
        "2 ranks: 1 data parallel x 2 tensor and sequence parallel\n",
        "  windows of a step     2 of 4 on each rank\n",
        "  feed-forward blocks   column and row parallel over 2 ranks\n",
        "  other parameters      sharded over 2 ranks, fully_shard\n",
        "all-gather input (2 ranks: 128 B/token)",
        "Training with fuser feed-forward blocks:\n",
        "Training with plain feed-forward blocks:\n",
        "The first 2 steps with plain torch blocks",
        f"\nWritten:\n  {tmp_path / 'losses.csv'}\n",
    ):
        assert text.count(once) >= 1, once
        assert text.count(once) == 1 or "all-gather" in once
    assert re.search(r"^  2 ranks           [\d,]+ tokens/s together", text, re.M)
    assert re.search(r"^  sent in a step    all-gather [\d.]+ kB, .*reduce-scatter", text, re.M)
    # Beside the plain run, which repeats the losses on the same ranks.
    largest = re.search(r"largest difference of the training losses: (\S+) nats", text)
    assert largest is not None
    assert float(largest[1]) < 1e-5


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")
def test_a_rank_that_dies_ends_the_run_and_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    script, saved = tmp_path / "dying.py", tmp_path / "saved"
    script.write_text(DYING)
    options = ["--steps", "8", "--sample-bytes", "0", "--out", str(tmp_path)]
    arguments = [*TINY, *options, "--fsdp", "--checkpoint", str(saved)]
    status, said = on_ranks(script, arguments, tmp_path)
    assert status != 0
    assert "exit code 3" in said  # of the rank, and the other was ended
    assert [path.name for path in saved.iterdir()] == ["step-4"]
    again = ["--resume", str(saved), "--checkpoint", str(saved)]
    printed = printed_by(train_lm.main, [*TINY, *options, *again])
    assert "step     4  validation loss" in printed
    assert "Results of 4 steps" in printed
    assert "No run with plain torch blocks" in printed
    assert "this run went on after step 4." in printed
    assert [path.name for path in saved.iterdir()] == ["step-8"]
    assert (tmp_path / "losses.csv").read_text().splitlines()[1].startswith("5,")


# -- options --------------------------------------------------------------------------


def under_torchrun(monkeypatch: pytest.MonkeyPatch, size: int, rank: int = 0) -> None:
    """Variables as torchrun sets them."""
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


REFUSED: list[tuple[int, list[str], str]] = [
    (1, ["--tp", "2"], "--tp 2 takes a multiple of 2 ranks, and this run has 1; torchrun"),
    (2, ["--tp", "3"], "--tp 3 takes a multiple of 3 ranks, and this run has 2; torchrun"),
    (2, ["--tp", "0"], "--tp is 0; it must be at least 1."),
    (2, ["--sp"], "--sp shares rows among tensor parallel ranks, and --tp is 1."),
    (1, ["--fsdp"], "--fsdp shards over ranks, and this run has 1; torchrun"),
    (2, ["--fsdp", "--tp", "2"], "2 ranks with --tp 2 have the same; add --sp, or start 4 ranks."),
    (4, ["--batch-size", "6"], "--batch-size 6 gives 4 ranks different numbers of windows."),
    (2, ["--tp", "2", "--width", "20"], "--width 20 makes 60 hidden features in blocks of 4"),
    (2, ["--fsdp", "quantized"], "--fsdp quantized does not go with --recipe none."),
    (
        2,
        ["--fsdp", "quantized", "--recipe", "delayed"],
        "--fsdp quantized does not go with --recipe delayed.",
    ),
    (2, ["--dtype", "float16"], "--dtype float16 scales the loss by a state"),
    (1, ["--resume", "nowhere"], "--resume nowhere has no checkpoint"),
]


@pytest.mark.parametrize(("size", "arguments", "sentence"), REFUSED)
def test_options_that_do_not_fit_the_ranks_are_an_error_of_the_first_rank(
    size: int,
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    under_torchrun(monkeypatch, size)
    arguments = [*TINY, "--out", str(tmp_path), *arguments]
    assert sentence in refusal_by(train_lm.main, arguments)
    under_torchrun(monkeypatch, size, rank=1)
    with pytest.raises(SystemExit) as stopped:
        train_lm.main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ep", "2", "--experts", "5"], "--ep 2 does not divide --experts 5."),
        (["--ep", "4"], "--ep 4 takes a multiple of 4 ranks, and this run has 2"),
        (["--ep", "2", "--recipe", "delayed"], "--recipe delayed does not go with --ep 2"),
        (["--cuda-graph"], "--cuda-graph is for one process, and this run has 2."),
        (["--fsdp", "quantized"], "argument --fsdp: invalid choice: 'quantized'"),
    ],
)
def test_options_that_do_not_fit_a_mixture_are_an_error(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_torchrun(monkeypatch, 2)
    assert sentence in refusal_by(train_moe.main, [*TINY, "--out", str(tmp_path), *arguments])


def test_checkpoints_of_another_run_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    options = [*TINY, "--out", str(tmp_path), "--checkpoint", str(tmp_path)]
    assert f"--checkpoint {tmp_path} has step-4 of another run" in refusal_by(
        train_lm.main, options
    )
    again = ["--resume", str(tmp_path), "--steps", "4"]
    assert f"--resume {tmp_path} is after 4 steps, and --steps is 4." in refusal_by(
        train_lm.main, [*options, *again]
    )
