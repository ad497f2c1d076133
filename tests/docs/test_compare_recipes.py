"""examples/compare_recipes.py: every recipe and override is run fairly and reported as measured."""

from __future__ import annotations

import contextlib
import csv
import math
import statistics
import sys
from itertools import groupby
from pathlib import Path

import pytest
from once import made_once
from paths import EXAMPLES
from scripts import Terminal, printed_by, refusal_by

import fuser

sys.path.append(str(EXAMPLES))

import compare_recipes

from fuser.demo import train_lm

SIZES = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4"]
STEPS = 12
TINY = [*SIZES, "--steps", str(STEPS)]
OVERRIDES = ("none", "high_precision", "dequantized")
RUNS = [
    ("bf16", ""),
    ("bf16, plain torch", ""),
    *(("current", override) for override in OVERRIDES),
    ("delayed", "none"),
    *((name, override) for name in ("block", "mxfp8", "nvfp4") for override in OVERRIDES),
]


def run_main(out: Path, *arguments: str) -> str:
    """What main() prints with a tiny model; it must succeed."""
    return printed_by(compare_recipes.main, [*TINY, "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with the results of all runs, and what was printed: made by one worker for all."""

    def compare(out: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_lm, "VALIDATION_BATCHES", 2)  # of 16, to be fast
            (out / "printed").write_text(run_main(out))

    out = made_once(tmp_path_factory, "comparison", compare)
    return out, (out / "printed").read_text()


@pytest.fixture(scope="module")
def rows(comparison: tuple[Path, str]) -> dict[tuple[str, str], dict[str, str]]:
    with (comparison[0] / "recipes.csv").open(newline="") as file:
        return {(row["recipe"], row["override"]): row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def losses(comparison: tuple[Path, str]) -> dict[tuple[str, str], list[float]]:
    """The training loss of every step, by run."""
    with (comparison[0] / "recipes_losses.csv").open(newline="") as file:
        header, *steps = csv.reader(file)
    assert header[1:] == [" ".join(run).rstrip() for run in RUNS]
    columns = list(zip(*(map(float, step) for step in steps), strict=True))
    return dict(zip(RUNS, map(list, columns[1:]), strict=True))


def test_there_is_a_row_for_whatever_a_recipe_accepts(
    rows: dict[tuple[str, str], dict[str, str]],
) -> None:
    assert list(rows) == RUNS
    compared = [train_lm.RECIPES[name] for name in compare_recipes.COLORS]
    accepting = [cls for cls in compared if cls.accepts_backward_override]
    assert len(RUNS) == 2 + 1 + 3 * len(accepting)
    for row in rows.values():
        assert 0 < float(row["MB held"]) <= float(row["MB at peak"])
        assert int(row["tokens/s"]) > 0
        assert row["dtype"] == "bfloat16"
        assert row["steps"] == str(STEPS)


def test_the_rows_are_what_the_losses_say(
    rows: dict[tuple[str, str], dict[str, str]], losses: dict[tuple[str, str], list[float]]
) -> None:
    tail = math.ceil(STEPS / 10)
    reference = statistics.fmean(losses["bf16", ""][-tail:])
    for run, row in rows.items():
        mean = statistics.fmean(losses[run][-tail:])
        assert float(row["training loss"]) == pytest.approx(mean, abs=6e-5)
        assert float(row["training - bf16"]) == pytest.approx(mean - reference, abs=6e-5)
        difference = float(row["validation loss"]) - float(rows["bf16", ""]["validation loss"])
        assert float(row["validation - bf16"]) == pytest.approx(difference, abs=2e-4)


def test_the_unquantized_run_is_the_demo_s(
    losses: dict[tuple[str, str], list[float]], tmp_path: Path
) -> None:
    arguments = [*TINY, "--dtype", "bfloat16", "--sample-bytes", "0", "--out", str(tmp_path)]
    assert train_lm.main(arguments) == 0
    with (tmp_path / "losses.csv").open(newline="") as file:
        demo = list(csv.DictReader(file))
    assert losses["bf16", ""] == [float(step["fuser"]) for step in demo]
    assert losses["bf16, plain torch", ""] == [float(step["plain"]) for step in demo]


def test_an_override_changes_backward_alone(
    losses: dict[tuple[str, str], list[float]],
) -> None:
    # The first loss comes before any backward: forward's bytes decide it.
    for recipe, group in groupby(RUNS[2:], key=lambda run: run[0]):
        runs = [losses[run] for run in group]
        assert len({run[0] for run in runs}) == 1, recipe
        assert len({tuple(run) for run in runs}) == len(runs), recipe
        assert runs[0][0] != losses["bf16", ""][0], recipe


def test_every_run_learns(losses: dict[tuple[str, str], list[float]]) -> None:
    for run in losses.values():
        assert all(map(math.isfinite, run))
        assert sum(run[-4:]) < sum(run[:4]) - 0.3


def test_the_table_is_printed_and_written(comparison: tuple[Path, str]) -> None:
    out, printed = comparison
    report = (out / "recipes.md").read_text()
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(RUNS)
    assert len({len(line) for line in table}) == 1
    assert "\n".join(table) in report
    assert "every allocation and free of torch's CPU allocator" in report
    assert (out / "recipes.png").read_bytes().startswith(b"\x89PNG")
    assert "15/15 nvfp4 dequantized: validation loss " in printed


def test_a_subset_of_recipes_in_another_dtype(tmp_path: Path) -> None:
    printed = run_main(tmp_path, "--recipes", "delayed", "--dtype", "float32", "--steps", "2")
    table = [line.split("|")[1].strip() for line in printed.splitlines() if line[:2] == "| "]
    assert table[2:] == ["fp32", "fp32, plain torch", "delayed"]
    assert "training - fp32" in printed


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_only_the_picture_is_missing(tmp_path: Path) -> None:
    printed = run_main(tmp_path, "--recipes", "delayed", "--steps", "1")
    assert "No recipes.png: drawing it needs matplotlib; pip install matplotlib." in printed
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"recipes.csv", "recipes.md", "recipes_losses.csv"}


def test_a_terminal_gets_one_bar_over_all_runs() -> None:
    pytest.importorskip("tqdm")
    shown = Terminal()
    with contextlib.redirect_stdout(shown):
        progress = compare_recipes.AllRuns(runs=2, steps=1)
        for name in ("mxfp8 none", "nvfp4 none"):
            progress.start(name)
            progress.advanced(1.0)
            progress.reported(1, 2.5, 1000.0)
            progress.validated(1, 2.25)
            progress.close()
    assert "1/2 mxfp8 none: validation loss 2.2500" in shown.getvalue()
    assert "nvfp4 none: 100%" in shown.getvalue()
    assert "2/2 [" in shown.getvalue()
    assert "loss 2.500, 1,000 tokens/s" in shown.getvalue()


def test_an_override_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(fuser.recipe.BACKWARD_OVERRIDE_VARIABLE, "dequantized")
    message = refusal_by(compare_recipes.main, TINY)
    assert "NVTE_BACKWARD_OVERRIDE is dequantized, which would put that override into" in message


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1."),
        (["--recipes", "none"], "argument --recipes: invalid choice: 'none'"),
        (["--width", "30", "--heads", "4"], "--width 30 does not give each of --heads 4 the same"),
    ],
)
def test_a_bad_option_gives_one_sentence(arguments: list[str], sentence: str) -> None:
    assert sentence in refusal_by(compare_recipes.main, arguments)
