"""benchmarks/: timing, rows, results and charts of what is timed, tried on a CPU."""

from __future__ import annotations

import csv
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import emulated
from paths import BENCHMARKS

import fuser
from fuser.cuda.launch import Kernel
from fuser.formats import FP8_BLOCKS, MXFP8, NVFP4, DType, NumberFormat

sys.path.append(str(BENCHMARKS))

import charts
import evidence
import host_overhead
import kernel_cases
import kernels
import model_steps
import pipelines
import timing
import whole_models

ON_CPU = ["--device", "cpu", "--no-compile", "--rounds", "1"]
SMALL = ["--tokens", "128", "--hidden", "128", "--intermediate", "128"]
E4M3 = DType.kFloat8E4M3
NAME = operator.attrgetter("name")
BY_NAME = {case.name: case for case in kernels.CASES}


# -- timing -------------------------------------------------------------------


class Time:
    """A clock that stands still but for the calls that it makes, each of a given duration."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.log: list[str] = []

    def call(self, name: str, durations: Iterator[float]) -> Callable[[], None]:
        def run() -> None:
            self.seconds += next(durations)
            self.log.append(name)

        return run

    def clock(self) -> timing.HostClock:
        return timing.HostClock(lambda: self.seconds)


def test_a_timing_has_the_median_and_the_20th_and_80th_percentile() -> None:
    shuffled = [4.0, 1.0, 5.0, 3.0, 2.0]
    assert timing.Timing.of(shuffled) == timing.Timing(3.0, pytest.approx(1.8), pytest.approx(4.2))
    assert timing.Timing.of([7.0]) == timing.Timing(7.0, 7.0, 7.0)


def test_neither_the_preparing_call_nor_the_first_round_counts() -> None:
    time = Time()
    slow_first = itertools.chain([100.0, 50.0], itertools.repeat(2.0))
    results = timing.measure([{"a": time.call("a", slow_first)}], time.clock(), rounds=5)
    assert results == {"a": timing.Timing(2.0, 2.0, 2.0)}


def test_every_round_runs_each_variant_once_in_another_order() -> None:
    time = Time()
    calls = {name: time.call(name, itertools.repeat(1.0)) for name in "abc"}
    timing.measure([calls], time.clock(), rounds=29)
    prepared, rounds = time.log[:3], time.log[3:]
    assert prepared == ["a", "b", "c"]
    orders = ["".join(rounds[i : i + 3]) for i in range(0, 90, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) == 6


def test_a_run_goes_over_all_input_sets_and_the_result_is_of_one_call() -> None:
    time = Time()
    durations = (1.0, 2.0, 6.0)
    sets = [{"a": time.call(f"set {d}", itertools.repeat(d))} for d in durations]
    results = timing.measure(sets, time.clock(), passes=4, rounds=2)
    assert results == {"a": timing.Timing(3.0, 3.0, 3.0)}
    once_over = [f"set {d}" for d in durations]
    assert time.log == once_over * (1 + 4 * 3)


def test_the_time_of_the_host_is_that_of_one_call_that_returns_from_an_idle_device() -> None:
    time = Time()
    waits: list[int] = []

    class Device(timing.DeviceClock):
        prepare, sample = timing.HostClock.prepare, timing.HostClock.sample

        def wait(self) -> None:
            waits.append(len(time.log))

    first = [3.0] * (1 + 2 * 3)  # the preparing call and the rounds, of two passes
    calls = {"a": time.call("a", itertools.chain(first, itertools.repeat(0.5)))}
    device = Device()
    device.now = lambda: time.seconds
    results = timing.measure([calls], device, passes=2, rounds=2)
    assert results == {"a": timing.Timing(3.0, 3.0, 3.0)}
    (result,) = results.values()
    assert isinstance(result, timing.Timing)
    assert result.host == 0.5
    assert waits == [7, *range(7, 7 + 2 * timing.HOST_ROUNDS + 1, 2)]
    on_cpu = timing.measure([{"a": time.call("a", itertools.repeat(2.0))}], time.clock(), rounds=1)
    assert [each.host for each in on_cpu.values() if isinstance(each, timing.Timing)] == [2.0]


def test_a_variant_that_fails_says_why_and_the_others_are_timed() -> None:
    time = Time()

    def fails() -> None:
        raise RuntimeError("\nno kernel for 7 rows\nmore of it")

    calls = {"bad": fails, "good": time.call("good", itertools.repeat(1.0))}
    results = timing.measure([calls], time.clock(), rounds=2)
    assert results["bad"] == timing.Failure("RuntimeError: no kernel for 7 rows")
    assert results["good"] == timing.Timing(1.0, 1.0, 1.0)


def test_input_sets_together_move_several_times_the_l2() -> None:
    cache = 60 * 2**20
    for nbytes in (1e6, 7.3e7, 1.2e8, 2.4e8, 1e9):
        count = timing.sets_beyond(cache, nbytes)
        assert count * nbytes >= timing.L2_MULTIPLE * cache
        assert count == 2 or (count - 1) * nbytes < timing.L2_MULTIPLE * cache
    assert timing.sets_beyond(cache, 10) == timing.MOST_SETS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_on_a_gpu_calls_are_replayed_as_a_graph_and_what_cannot_be_captured_runs_as_it_is() -> None:
    x = torch.ones(2**24, device="cuda")
    calls = {"captured": lambda: x.mul_(1.0), "reads": lambda: float(x.sum())}
    results = timing.measure([calls, calls], timing.clock("cuda"), rounds=3)
    found = {n: r.method for n, r in results.items() if isinstance(r, timing.Timing)}
    assert found == {"captured": "graph", "reads": "not captured"}


# -- rows ---------------------------------------------------------------------


@pytest.mark.sampled(most=12, are_alike=True)
@pytest.mark.parametrize("case", [c for c in kernels.CASES if c.columns != 8192], ids=NAME)
def test_a_row_of_the_table_launches_kernels(
    case: kernel_cases.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    launch = Kernel.__call__

    def spy(kernel: Kernel, *args: object) -> None:
        launched.append(kernel.symbol)
        launch(kernel, *args)

    monkeypatch.setattr(Kernel, "__call__", spy)
    rows, columns = (8, case.columns or 0) if case.rows else (128, 128)
    with emulated():
        call = case.make(kernels.Inputs(rows, columns, torch.bfloat16, "cpu", seed=0))["fuser"]
        launched.clear()
        call()
    assert launched


def test_bytes_of_a_row_are_those_read_and_those_of_the_format_that_is_written() -> None:
    m = k = 4096
    inputs = kernels.Inputs(m, k, torch.bfloat16, "cpu", seed=0)
    for name, reads, copies, number_format in (
        ("FP8 current row", 4, 1, NumberFormat("FP8", E4M3)),
        ("FP8 current row+col", 4, 2, NumberFormat("FP8", E4M3)),
        ("FP8 delayed row+col", 2, 2, NumberFormat("FP8", E4M3)),
        ("FP8 1x128 row+col", 2, 2, NumberFormat("FP8 1x128", E4M3, FP8_BLOCKS[1], 128)),
        ("FP8 128x128 row+col", 2, 2, NumberFormat("FP8 128x128", E4M3, FP8_BLOCKS[2], 128**2)),
        ("MXFP8 row+col", 2, 2, NumberFormat("MXFP8", E4M3, MXFP8, 32)),
        ("NVFP4 row", 4, 1, NumberFormat("NVFP4", DType.kFloat4E2M1, NVFP4, 16)),
        ("NVFP4 row+col", 4, 2, NumberFormat("NVFP4", DType.kFloat4E2M1, NVFP4, 16)),
    ):
        case = BY_NAME[name]
        expected = reads * m * k + number_format.nbytes((m, k), ("rowwise", "columnwise")[:copies])
        # A scale a tensor is left out of the formulas.
        assert m * k * case.per_element(case.moves, inputs) == pytest.approx(expected, abs=8), name


def test_every_row_runs_on_a_cpu_and_its_results_survive_the_csv(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    kernels.main([*ON_CPU, "--out", str(path)])
    rows = evidence.read(path)
    run = kernels.Run("cpu", torch.bfloat16)
    expected = {(case.name, *map(str, run.shape(case))) for case in kernels.CASES}
    assert {(r["row"], r["rows"], r["columns"]) for r in rows} == expected
    assert [row for row in rows if row["failure"]] == []
    for row in rows:
        assert 0 < float(row["p20"]) <= float(row["us"]) <= float(row["p80"])
        rate = float(row["bytes"]) / float(row["us"]) / 1e3
        assert float(row["GB/s"]) == pytest.approx(rate, rel=0.01, abs=0.06)
        assert (row["dtype"], row["torch"]) == ("bfloat16", torch.__version__)


def test_a_row_that_fails_is_printed_and_the_next_one_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(_: kernel_cases.Inputs) -> Any:
        raise fuser.InputError("The kernel does not compile.")

    broken = kernel_cases.Case("broken", cannot, "b", "1")
    monkeypatch.setattr(kernels, "CASES", (broken, BY_NAME["GELU"]))
    kernels.main(ON_CPU)
    lines = capsys.readouterr().out.splitlines()
    assert any("broken" in line and "does not compile" in line for line in lines)
    assert any(line.startswith("GELU") and "FAILED" not in line for line in lines)


def test_the_table_is_as_wide_as_its_rows_and_speaks_of_a_copy_on_a_gpu_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernels.main([*ON_CPU, "--only", "^SwiGLU backward|^GELU$"])
    header, *lines = capsys.readouterr().out.splitlines()[3:8]
    assert not any(what in header for what in ("of copy", "target"))
    end = header.index("moves") + len("moves")
    assert [line[:end].split("  ")[-1].strip() for line in lines] == [
        *("5*b", "2*b", "3*b + 4", "3*b + 4 + 16/128")
    ]
    on_gpu = kernels.Table.of(kernels.CASES, kernels.Run("cuda", torch.bfloat16)).header()
    assert "of copy" in on_gpu
    assert "target" in on_gpu


def test_given_columns_are_those_of_every_row_and_rows_that_become_the_same_run_once() -> None:
    run = kernels.Run("cuda", torch.bfloat16, columns=1024)
    shapes = [(case.name, *run.shape(case)) for case in kernels.distinct(kernels.CASES, run)]
    assert shapes.count(("RMSNorm", 16384, 1024)) == 1
    assert len(shapes) == len(set(shapes)) == len(BY_NAME)
    assert ("delayed update, 100 tensors", 1024, 100) in shapes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing has this name"], "matches no row"),
        (["--rows", "0"], "--rows is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kernels.main([*ON_CPU, *arguments])
    assert said in capsys.readouterr().err


# -- pipelines ----------------------------------------------------------------


@pytest.mark.parametrize("name", list(pipelines.BLOCKS))
def test_a_block_is_the_same_function_in_every_library(name: str) -> None:
    block, sizes = pipelines.BLOCKS[name], pipelines.Sizes(16, 32, 64)
    options = {"device": "cpu", "dtype": torch.float32}
    ours, theirs = block.as_ops(fuser, sizes, options), block.as_torch(sizes, options)
    with torch.no_grad():
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.copy_(own.normal_())
    x = torch.randn(sizes.tokens, sizes.hidden)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    assert block.flop(sizes, 1) == sum(2 * sizes.tokens * p.numel() for p in matrices)


@functools.cache
def pipeline_rows(folder: Path) -> list[dict[str, str]]:
    path = folder / "pipelines.csv"
    pipelines.main([*ON_CPU, *SMALL, "--out", str(path)])
    return evidence.read(path)


@pytest.mark.filterwarnings("ignore:.*is emulated:UserWarning")
def test_every_variant_of_every_block_has_a_result_for_both_passes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rows = pipeline_rows(tmp_path_factory.getbasetemp())
    assert [row for row in rows if row["failure"]] == []
    found = {(row["block"], row["pass"], row["variant"]) for row in rows}
    titles = [block.title for block in pipelines.BLOCKS.values()]
    names = ["torch eager bf16", *(f"fuser {r}" for r in ("bf16", *pipelines.USUAL))]
    assert found == set(itertools.product(titles, pipelines.PASSES, names))
    for row in rows:
        assert 0 < float(row["p20"]) <= float(row["ms"]) <= float(row["p80"])
        # A CPU has no FP8 product to be a ceiling.
        assert (row["floor ms"] != "") == (row["recipe"] == "bf16")


@pytest.mark.filterwarnings("ignore:.*is emulated:UserWarning")
def test_a_profile_lists_what_a_step_runs(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--device", "cpu", *SMALL, "--blocks", "gelu"]
    pipelines.main([*small, "--profile", "current"])
    out = capsys.readouterr().out
    # Two linears, each with a forward, a dgrad and a wgrad GEMM.
    line = next(line for line in out.splitlines() if line.endswith("  aten::mm"))
    assert line.split()[2] == "6"


def test_graphs_on_a_cpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pipelines.main([*ON_CPU, "--graph"])
    assert "--graph captures CUDA graphs; --device is cpu" in capsys.readouterr().err


# -- charts -------------------------------------------------------------------


def test_charts_of_kernels_show_every_row_of_the_csv_and_say_what_failed(tmp_path: Path) -> None:
    path, chart = tmp_path / "kernels.csv", tmp_path / "kernels.svg"
    kernels.main([*ON_CPU, "--only", "^GELU|^SwiGLU$", "--out", str(path)])
    failed = "SwiGLU,256,256"
    lines = path.read_text().splitlines()
    fuser_line = next(i for i, line in enumerate(lines) if failed in line and ",fuser," in line)
    start = lines[fuser_line].index(",fuser,")
    lines[fuser_line] = lines[fuser_line][:start] + ",fuser,,,,,,,it does not compile"
    path.write_text("\n".join(lines))
    charts.main([str(path), "-o", str(chart)])
    drawn = chart.read_text()
    assert all(f"<!-- {label} -->" in drawn for label in ("GELU", "SwiGLU", "failed", "eager"))
    assert "cold in L2" not in drawn
    assert "diamond" not in drawn
    assert drawn.count("TB/s   ") == 1


@pytest.mark.filterwarnings("ignore:.*is emulated:UserWarning")
def test_charts_of_pipelines_have_a_panel_for_each_block_and_pass(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    pipeline_rows(folder)
    chart = folder / "pipelines.svg"
    charts.main([str(folder / "pipelines.csv"), "-o", str(chart)])
    drawn = chart.read_text()
    for block, pass_ in itertools.product(pipelines.BLOCKS.values(), pipelines.PASSES):
        assert f"<!-- {block.title}, {pass_} -->" in drawn
    assert drawn.count("<!-- fuser 128-block -->") == 4


def broken_change(model: torch.nn.Module) -> torch.nn.Module:
    raise ZeroDivisionError("division by zero")


def test_whole_models_have_a_panel_each_and_a_variant_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocabulary": 256, "layers": 1, "width": 64, "hidden": 96, "context": 16}
    monkeypatch.setattr(whole_models, "SMALL", {**whole_models.SMALL, **sizes})
    monkeypatch.setattr(model_steps, "WARM_UP", 1)
    broken = whole_models.variant(broken_change)
    monkeypatch.setitem(whole_models.VARIANTS, "torchao float8, compiled", broken)
    out, chart = tmp_path / "models.csv", tmp_path / "models.svg"
    variants = ["torch eager", "torchao float8, compiled", "fuser current, launched"]
    options = [
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--losses",
        "2",
        "--seeds",
        "2",
        "--variants",
        *variants,
    ]
    whole_models.main([*options, "--out", str(out), "--chart", str(chart)])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["1B"] * 3 + ["8B"] * 3
    for eager, failed, ours in (rows[:3], rows[3:]):
        assert "division by zero" in failed["failure"]
        assert float(ours["loss"]) == pytest.approx(float(eager["loss"]), abs=0.05)
        first, second = map(float, eager["losses"].split(", "))
        assert first != second
        assert float(eager["loss"]) == pytest.approx((first + second) / 2, abs=1e-3)
        rate = float(ours["tokens/s"]) / float(eager["tokens/s"])
        assert float(ours["/ eager"]) == pytest.approx(rate, abs=2e-3)
    drawn = chart.read_text()
    assert drawn.count("<!-- failed -->") == 2
    assert all(f"<!-- Llama, {model} -->" in drawn for model in ("1B", "8B"))
    charts.main([str(out), "-o", str(chart), "--only", "8B"])
    assert "<!-- Llama, 1B -->" not in chart.read_text()


def test_a_csv_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit):
        charts.main([str(path), "-o", str(tmp_path / "other.png")])
    assert "has no rows of kernels.py, pipelines.py or whole_models.py" in capsys.readouterr().err


def test_a_csv_that_is_not_there_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        charts.main([str(tmp_path / "missing.csv"), "-o", str(tmp_path / "other.png")])
    assert "missing.csv cannot be read: No such file or directory." in capsys.readouterr().err


# -- host time ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is emulated:UserWarning")
@pytest.mark.parametrize("recipe", [None, *host_overhead.RECIPES])
def test_the_host_time_of_every_recipe_can_be_measured(
    recipe: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "host.csv"
    given = ["--rounds", "2", "--count", "1", "--out", str(out)]
    host_overhead.main([*given, *(["--recipe", recipe] if recipe else [])])
    captured = capsys.readouterr()
    assert "forward, no grad, rounds: 2" in captured.err
    rows = evidence.read(out)
    assert [row["what"] for row in rows] == ["forward, no grad", "forward + backward"]
    for row in rows:
        assert row["recipe"] == (recipe or "none")
        ratio = float(row["fuser us"]) / float(row["nn.Sequential us"])
        assert ratio > 0
        assert f"{row['ratio']:>7}" in captured.out
