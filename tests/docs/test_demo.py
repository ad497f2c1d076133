"""The demo, fuser/demo/train_lm.py: it learns, agrees with plain torch and says what it did."""

from __future__ import annotations

import contextlib
import csv
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import Terminal, printed_by, refusal_by

from fuser.demo import corpus as corpora
from fuser.demo import progress as reports
from fuser.demo import train_lm

TINY = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4"]
STEPS = 20
SAMPLE_BYTES = 60


def run_main(out: Path, *arguments: str) -> str:
    """What main() prints with a tiny model; it must succeed."""
    return printed_by(train_lm.main, [*TINY, "--out", str(out), *arguments])


def read_losses(out: Path) -> dict[str, list[float]]:
    with (out / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row.pop("step")) for row in rows] == list(range(1, len(rows) + 1))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = str(tmp_path_factory.mktemp("options"))
    return train_lm.parse([*TINY, "--steps", str(STEPS), "--out", out])


@pytest.fixture(scope="module")
def corpus() -> Any:
    return corpora.read_corpus(Path(corpora.sysconfig.get_path("stdlib")))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with the results of one comparison, and what was printed."""
    out = tmp_path_factory.mktemp("demo")
    return out, run_main(out, "--steps", str(STEPS), "--sample-bytes", str(SAMPLE_BYTES))


def test_both_runs_learn(demo: tuple[Path, str]) -> None:
    losses = read_losses(demo[0])
    assert list(losses) == ["fuser", "plain"]
    for run in losses.values():
        assert len(run) == STEPS
        assert all(map(math.isfinite, run))
        # Before training a byte costs about ln 256 = 5.5 nats.
        assert run[-1] < run[0] - 0.5


def test_fuser_is_as_close_to_float64_training_as_plain_torch_is(
    demo: tuple[Path, str], options: Any, corpus: Any
) -> None:
    # Same weights, batches and learning rates, so float64 is the truth that both
    # runs round. The bound is the other run's own error, plus one rounding of a loss.
    _, plain = train_lm.make_models(options)
    exact = train_lm.train("float64", plain.double(), corpus, options).losses
    losses = read_losses(demo[0])
    errors = {
        name: max(abs(a - b) for a, b in zip(run, exact, strict=True))
        for name, run in losses.items()
    }
    rounding = torch.finfo(torch.float32).eps * max(exact)
    assert errors["fuser"] <= 2 * errors["plain"] + rounding
    assert errors["plain"] < 1e-3, "float64 training followed other steps"


def test_largest_loss_difference_is_that_of_the_losses(demo: tuple[Path, str]) -> None:
    out, printed = demo
    losses = read_losses(out)
    differences = [abs(a - b) for a, b in zip(losses["fuser"], losses["plain"], strict=True)]
    step = differences.index(max(differences)) + 1
    expected = f"the training losses: {max(differences):.1e} nats/byte, at step {step}\n"
    assert expected in printed


def test_plan_and_progress_are_printed(demo: tuple[Path, str]) -> None:
    printed = demo[1]
    assert "Fusion plan of 8 ops: float32 on cpu, training" in printed
    assert "channel 'residual': op 0 to op 7" in printed
    for fusion in ("ForwardLinearBiasAdd", "BackwardActivationBias", "BackwardAddRMSNorm"):
        assert fusion in printed
    line = r"^ +\d+%  step +\d+  loss \d\.\d{4} +[\d,]+ tokens/s +\d+ s left$"
    assert len(re.findall(line, printed, re.M)) == train_lm.REPORTS + 4
    assert re.search(r"validation loss \d\.\d{4} nats/byte = \d\.\d{4} bits/byte", printed)


def test_on_a_cpu_the_end_shows_losses_and_the_plan_and_no_speed(demo: tuple[Path, str]) -> None:
    printed = demo[1]
    end = printed.partition("Results of 20 steps")[2]
    assert re.search(r"validation loss +\d\.\d{4} nats/byte before, \d\.\d{4} after", end)
    # What the plan of a block, printed at the start, says in its last lines of each side.
    sides = re.findall(
        r"^  (\d+) steps, ([\d.]+ kB) a token, ",
        printed,
        re.M,
    )
    for side, (steps, moved) in zip(("forward", "backward"), sides, strict=True):
        line = rf"{side} plan +{steps} steps instead of \d+, {re.escape(moved)} a token and block"
        assert re.search(line, end)
    assert "The first 20 steps with plain torch blocks" in end
    assert "A CPU shows the losses and the plan, not the speed" in end
    assert "tokens/s" not in end
    assert not re.search(r"\d\.\d\dx", end)


def test_on_a_gpu_the_end_shows_the_speed(
    options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    model, _ = train_lm.make_models(options)
    plan = train_lm.plan_of_one_block(model, options)
    runs = [
        train_lm.Run("fuser", [5.0, 4.0], [0.1, 0.1], {0: 5.5, 2: 4.0}, [1000.0, 3000.0]),
        train_lm.Run("plain", [5.0], [0.1], {}, [2000.0]),
    ]
    train_lm.print_results(runs, plan, replace(options, device="cuda"))
    printed = capsys.readouterr().out
    assert "Speed on a GPU: fuser 3,000 tokens/s, plain 2,000; 1.50x." in printed
    assert "A CPU" not in printed


def test_the_plain_run_takes_the_first_steps_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_lm, "COMPARED_STEPS", 7)
    printed = run_main(tmp_path, "--steps", str(STEPS), "--sample-bytes", "0")
    losses = read_losses(tmp_path)
    assert (len(losses["fuser"]), len(losses["plain"])) == (STEPS, 7)
    # At the learning rates of the whole run, so its losses are those of the first steps.
    assert losses["plain"] == pytest.approx(losses["fuser"][:7], abs=1e-5)
    assert "The first 7 steps with plain torch blocks" in printed
    # Validation of the plain run would add to the time and to nothing else.
    assert "validation" not in printed.partition("Training with plain")[2].partition("Results")[0]


def test_a_gpu_compares_speeds_over_a_fifth_of_the_steps(options: Any) -> None:
    assert train_lm.compared_steps(50, options) == 50
    assert train_lm.compared_steps(5000, options) == 100
    on_a_gpu = replace(options, device="cuda")
    assert train_lm.compared_steps(200, on_a_gpu) == 100
    assert train_lm.compared_steps(5000, on_a_gpu) == 1000


class Clock:
    """A clock on which every reading is later than the one before it, by ``tick`` seconds."""

    def __init__(self, tick: float) -> None:
        self.tick, self.now = tick, 0.0

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


@pytest.mark.parametrize("tick", [0.05, 0.5, 1000.0])
def test_steps_fit_into_the_seconds(
    tick: float, options: Any, corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(tick)
    monkeypatch.setattr(train_lm, "time", clock)
    in_time = replace(options, seconds=10.0)
    model, plain = train_lm.make_models(in_time)
    run = train_lm.train("fuser", model, corpus, in_time)
    # What is beyond the time is one step and the last validation.
    assert abs(clock.now - 10.0) < 20 * tick
    assert len(run.losses) == len(run.learning_rates) >= 1
    assert list(run.validation)[-1] == len(run.losses)
    if len(run.losses) > 1:
        assert run.learning_rates[-1] < 0.2 * options.learning_rate
        assert max(run.learning_rates) > 0.9 * options.learning_rate
    assert min(run.learning_rates) > 0
    again = train_lm.train("plain", plain, corpus, in_time, learning_rates=run.learning_rates[:5])
    assert again.losses == pytest.approx(run.losses[:5], abs=1e-5)


@pytest.mark.parametrize("tick", [0.1, 0.2])
def test_all_parts_of_the_demo_fit_into_the_time_that_it_says(
    tick: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(tick)
    monkeypatch.setattr(train_lm, "time", clock)
    printed = run_main(tmp_path, "--seconds", "20", "--sample-bytes", "2000")
    assert printed.startswith("This takes 20 s: training until second 15, then ")
    # What is beyond the time of a part is one step.
    assert clock.now < 20.0 + 4 * tick
    assert printed.endswith(f"This took {clock.now:.0f} s.\n")
    # Text and plain run end when their time is over, and neither is left out.
    text = re.search(r"continues 'def ' by (\d+) bytes", printed)
    assert text is not None
    assert 0 < int(text[1]) < 2000
    losses = read_losses(tmp_path)
    assert 0 < len(losses["plain"]) <= len(losses["fuser"])


def test_a_demo_of_steps_has_no_end_of_its_own() -> None:
    table = train_lm.Timetable(0.0, None)
    assert table.left(train_lm.COMPARED) == math.inf
    assert str(table) == "As long as --steps take: reports say how much time is left.\n"


def test_the_demo_takes_a_minute_by_default(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    assert train_lm.parse(out).seconds == 60.0
    assert train_lm.parse(["--seconds", "2.5", *out]).seconds == 2.5
    assert train_lm.parse(["--steps", "7", *out]).seconds is None
    assert train_lm.parse(["--steps", "7", *out]).steps == 7


def test_two_runs_of_the_demo_print_the_same_losses(demo: tuple[Path, str], tmp_path: Path) -> None:
    run_main(tmp_path, "--steps", str(STEPS), "--no-compare", "--sample-bytes", "0")
    assert read_losses(tmp_path) == {"fuser": read_losses(demo[0])["fuser"]}


def test_another_seed_gives_other_losses(demo: tuple[Path, str], tmp_path: Path) -> None:
    run_main(tmp_path, "--steps", "3", "--no-compare", "--sample-bytes", "0", "--seed", "1")
    assert read_losses(tmp_path)["fuser"][0] != read_losses(demo[0])["fuser"][0]


def test_pictures_are_drawn(demo: tuple[Path, str]) -> None:
    pytest.importorskip("matplotlib")
    out, printed = demo
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "plan.svg").read_text()
    names = ("losses.csv", "loss.png", "plan.svg")
    paths = "".join(f"  {out / name}\n" for name in names)
    assert f"\nWritten:\n{paths}" in printed


def test_both_losses_are_drawn_in_the_same_way_over_whole_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    fused, plain = train_lm.Run("fuser", [5.0, 4.5, 3.0, 2.0]), train_lm.Run("plain", [5.0, 4.0])
    train_lm.draw_losses(tmp_path / "loss.png", [fused, plain])
    ((panel, _),) = [figure.axes[:2] for figure in drawn]
    curves = {
        name: [list(line.get_ydata()) for line in panel.lines if line.get_color() == color]
        for name, color in (("fuser", "tab:blue"), ("plain", "tab:red"))
    }
    # Each has its losses and a mean over the same number of steps.
    assert curves["fuser"][:2] == [fused.losses, [4.75, 12.5 / 3, 9.5 / 3, 2.5]]
    assert curves["plain"] == [plain.losses, [4.5, 4.5]]
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert labels[:2] == ["fuser, 4 steps, smoothed", "plain, 2 steps, smoothed"]
    for axes in drawn[0].axes[:2]:
        assert axes.get_xlabel() == "step"
        assert all(float(tick).is_integer() for tick in axes.get_xticks())


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_only_the_pictures_are_missing(tmp_path: Path) -> None:
    printed = run_main(tmp_path, "--steps", "3", "--no-compare", "--sample-bytes", "0")
    assert "No loss.png and plan.svg: they need matplotlib; pip install matplotlib." in printed
    assert [path.name for path in tmp_path.iterdir()] == ["losses.csv"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_autocast_gives_the_float32_loss_up_to_its_own_rounding(
    dtype: str, demo: tuple[Path, str], tmp_path: Path
) -> None:
    exact = read_losses(demo[0])["fuser"][0]
    printed = run_main(tmp_path, "--steps", "3", "--dtype", dtype, "--sample-bytes", "4")
    assert f"autocast {dtype}" in printed
    rounding = torch.finfo(getattr(torch, dtype)).eps * exact
    for run in read_losses(tmp_path).values():
        assert run[0] == pytest.approx(exact, abs=rounding)
        assert all(map(math.isfinite, run))


def test_sample_continues_the_prompt_by_the_requested_bytes(options: Any) -> None:
    model, plain = train_lm.make_models(options)
    wanted = replace(options, prompt="déf ", sample_bytes=SAMPLE_BYTES)
    text = train_lm.sample(model, wanted)
    assert text.startswith("déf ".encode())
    assert len(text) == len("déf ".encode()) + SAMPLE_BYTES
    assert text == train_lm.sample(model, wanted)
    assert text != train_lm.sample(model, replace(wanted, seed=1))
    greedy = replace(wanted, temperature=0.0)
    assert train_lm.sample(model, greedy) == train_lm.sample(plain, replace(greedy, seed=1))


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.py").write_text(f"file_{number:02}")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.py").write_text("skipped")
    corpus = corpora.read_corpus(tmp_path)
    assert bytes(corpus.validation.tolist()) == b"file_00\nfile_10"
    training = [number for number in range(20) if number % 10]
    assert bytes(corpus.training.tolist()).split() == [b"file_%02d" % n for n in training]


def test_a_batch_pairs_each_byte_with_the_next() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    taken, following = train_lm.windows(text, torch.tensor([0, 95]), context=4)
    assert taken.tolist() == [[0, 1, 2, 3], [95, 96, 97, 98]]
    assert following.tolist() == [[1, 2, 3, 4], [96, 97, 98, 99]]


def test_learning_rate_rises_then_falls_to_a_tenth(options: Any) -> None:
    rates = [train_lm.learning_rate(step / STEPS, options) for step in range(1, STEPS + 1)]
    peak = options.learning_rate
    assert rates[:2] == pytest.approx([peak / 2, peak])
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] == pytest.approx(peak / 10)
    assert 0 < train_lm.learning_rate(0.0, options) < rates[0]


def show_progress() -> str:
    shown = Terminal()
    with contextlib.redirect_stdout(shown):
        progress = train_lm.Progress("fuser")
        progress.advanced(0.25)
        progress.reported(12, 2.5, 1000.0)
        progress.validated(12, 2.5)
        progress.close()
    return shown.getvalue()


def test_a_terminal_gets_a_bar() -> None:
    pytest.importorskip("tqdm")
    shown = show_progress()
    assert re.search(r" 25%.* left, step 12, loss 2\.500, 1,000 tokens/s", shown)
    assert "validation loss 2.5000 nats/byte = 3.6067 bits/byte" in shown


def test_a_terminal_without_tqdm_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert "   25%  step    12  loss 2.5000       1,000 tokens/s      0 s left\n" in show_progress()


def test_the_time_left_follows_from_the_time_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reports, "time", Clock(10.0))
    progress = train_lm.Progress("fuser")
    progress.advanced(0.25)
    progress.reported(12, 2.5, 1000.0)
    assert "  30 s left\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--width", "30", "--heads", "4"], "--width 30 does not give each of --heads 4 the same"),
        (["--width", "12", "--heads", "4"], "--width 12 does not give each of --heads 4 the same"),
        (["--steps", "0"], "--steps is 0; it must be at least 1."),
        (["--seconds", "0"], "--seconds is 0; it must be positive and finite."),
        (["--seconds", "-3"], "--seconds is -3; it must be positive and finite."),
        (["--seconds", "nan"], "--seconds is nan; it must be positive and finite."),
        (["--seconds", "soon"], "argument --seconds: invalid float value: 'soon'"),
        (["--seconds", "9", "--steps", "3"], "--steps: not allowed with argument --seconds"),
        (["--batch-size", "-1"], "--batch-size is -1; it must be at least 1."),
        (["--learning-rate", "nan"], "--learning-rate is nan; it must be positive and finite."),
        (["--temperature", "-1"], "--temperature is -1.0; it must be finite and not negative."),
        (["--sample-bytes", "-1"], "--sample-bytes is -1; it must not be negative."),
        (["--seed", str(2**64)], "--seed is 18446744073709551616; it must fit into 64 bits."),
        (["--prompt", ""], "--prompt is empty; the model continues at least one byte."),
        (["--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--out", __file__], "is no folder and cannot become one"),
    ],
)
def test_a_bad_option_gives_one_sentence(arguments: list[str], sentence: str) -> None:
    assert sentence in refusal_by(train_lm.main, arguments)


def test_help_names_the_script_and_gives_no_default_to_what_switches_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuser/__main__.py", "demo", "--help"])
    with pytest.raises(SystemExit):
        train_lm.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "usage: python -m fuser demo " in text
    assert "--no-compare skip the plain run --" in text
    assert train_lm.parse([]).compare
    assert not train_lm.parse(["--no-compare"]).compare


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    sentence = refusal_by(train_lm.main, ["--device", "cuda"])
    assert "--device is cuda, but torch sees no CUDA device." in sentence


def test_a_machine_without_sources_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path))
    assert train_lm.main([*TINY, "--out", str(tmp_path)]) == 1
    assert f"The Python sources under {tmp_path} hold 1 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "override"),
    [("mxfp8", "dequantized"), ("nvfp4", "none"), ("delayed", "none"), ("block", "high_precision")],
)
def test_it_learns_in_low_precision(tmp_path: Path, recipe: str, override: str) -> None:
    arguments = ["--recipe", recipe, "--override", override, "--steps", "20", "--sample-bytes", "5"]
    printed = run_main(tmp_path, *arguments)
    losses = read_losses(tmp_path)
    assert sum(losses["fuser"][-5:]) < sum(losses["fuser"][:5])
    # Quantized, so not the plain run's losses; near them all the same.
    assert losses["fuser"] != losses["plain"]
    assert abs(losses["fuser"][-1] - losses["plain"][-1]) < 0.5
    assert "emulated" in printed


def test_an_override_without_a_recipe_that_takes_one_is_a_sentence(
    tmp_path: Path,
) -> None:
    arguments = [*TINY, "--out", str(tmp_path), "--override", "dequantized"]
    sentence = refusal_by(train_lm.main, arguments)
    assert "--override dequantized does not go with --recipe none" in sentence
