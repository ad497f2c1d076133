"""The command line: plan, doctor, demo; what they print, draw and return."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import models as models_of_tests
import pytest
import torch
from address_graphs import on_cpu_graphs
from fresh import python

import fuser
from fuser import recipe as recipes
from fuser.__main__ import main
from fuser.cuda import module, pass_graphs
from fuser.cuda.module import Installation, Obstacle
from fuser.demo import train_lm
from fuser.errors import KernelUnavailable
from fuser.gemm import native as native_gemm
from fuser.plan.transformers import PRESETS
from fuser.precision.contexts import current_recipe
from fuser.report.model_layout import lay_out_model
from fuser.report.picture import Text
from fuser.testing import doctor

MODELS = '''
"""Models for the command line."""

import torch

import fuser

not_callable = 3


def mlp():
    return fuser.Sequential(fuser.Linear(16, 64), fuser.GELU(), fuser.Linear(64, 16))


def normed():
    return fuser.Sequential(fuser.RMSNorm((4, 8)))


def biased():
    return fuser.Sequential(fuser.Identity(), fuser.Bias(24))


def activation():
    return fuser.Sequential(fuser.GELU())


def with_inputs():
    model = fuser.Sequential(fuser.Linear(16, 16), fuser.AddExtraInput())
    return model, torch.empty(3, 16), torch.empty(3, 16)


def plain():
    return torch.nn.Sequential(torch.nn.Linear(4, 4))


def no_module():
    return 3


def refused():
    return fuser.Sequential(fuser.Linear(0, 4))


def broken():
    return {}["weights"]


def needs_an_argument(size):
    return fuser.Sequential(fuser.Linear(size, size))
'''


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of factories, in the current folder."""
    path = tmp_path / "command_line_models.py"
    path.write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield path
    sys.modules.pop("command_line_models", None)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that succeeds prints on stdout; it prints nothing on stderr."""
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence with which a command refuses."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.endswith(".\n")
    return captured.err.strip()


mlp = partial(models_of_tests.mlp, 16, 64)


# -- plan ---------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["command_line_models", "command_line_models.py"])
def test_plan_prints_the_plan_of_a_dotted_module_and_of_a_file(
    module: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "plan", f"{module}:mlp")
    assert text.strip() == str(mlp().plan(torch.empty(8192, 16, device="meta"), training=False))
    assert "ForwardLinearBiasActivation" in text


def test_plan_takes_a_path_to_a_file_elsewhere(
    models: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "neighbour_of_models.py").write_text("SIZE = 48\n")
    (folder / "torch.py").write_text(
        "import fuser\nfrom neighbour_of_models import SIZE\n"
        "def build(): return fuser.Sequential(fuser.Linear(SIZE, 2 * SIZE))\n"
    )
    assert "BasicLinear" in printed(capsys, "plan", f"{folder / 'torch.py'}:build")
    assert sys.modules["torch"] is torch


def test_training_plans_the_backward_of_a_model_after_another_layer(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "backward: nothing needs a gradient" in printed(
        capsys, "plan", "command_line_models:mlp"
    )
    text = printed(capsys, "plan", "command_line_models:mlp", "--training")
    x = torch.empty(8192, 16, device="meta", requires_grad=True)
    assert text.strip() == str(mlp().plan(x, training=True))


def test_json_is_the_plans_dict_and_nothing_else(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "plan", "command_line_models:mlp", "--training", "--json")
    x = torch.empty(8192, 16, device="meta", requires_grad=True)
    assert json.loads(text) == mlp().plan(x, training=True).to_dict()


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_draw_makes_the_file_and_says_where(
    suffix: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fuser.report.draw")
    text = printed(capsys, "plan", "command_line_models:mlp", "--draw", f"plan.{suffix}")
    assert text.endswith(f"Drawn into plan.{suffix}.\n")
    assert "BasicLinear" in (models.parent / f"plan.{suffix}").read_text(encoding="utf-8")


def test_draw_beside_json_leaves_stdout_to_the_json(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fuser.report.draw")
    assert main(["plan", "command_line_models:mlp", "--json", "--draw", "plan.svg"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ops"][0] == "BasicLinear"
    assert captured.err == "\nDrawn into plan.svg.\n"


def test_a_fresh_process_can_draw(models: Path) -> None:
    pytest.importorskip("fuser.report.draw")
    command = [sys.executable, "-m", "fuser", "plan", "command_line_models:mlp"]
    run = subprocess.run(
        [*command, "--draw", "plan.svg"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert (models.parent / "plan.svg").stat().st_size > 0


@pytest.mark.parametrize(
    ("factory", "shape"),
    [("mlp", (8192, 16)), ("normed", (8192, 4, 8)), ("biased", (8192, 24))],
)
def test_the_input_is_what_the_first_op_that_tells_takes(
    factory: str, shape: tuple[int, ...], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned_inputs(factory, monkeypatch) == [(shape, torch.float32)]


def test_a_factory_may_bring_its_inputs_and_input_replaces_the_first(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [((3, 16), torch.float32), ((3, 16), torch.float32)]
    assert planned_inputs("with_inputs", monkeypatch) == both
    both[0] = ((5, 16), torch.float32)
    assert planned_inputs("with_inputs", monkeypatch, "--input", "5x16") == both


def test_dtype_converts_the_model_and_its_inputs(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bf16 = torch.bfloat16
    assert planned_inputs("mlp", monkeypatch, "--dtype", "bfloat16") == [((8192, 16), bf16)]
    both = [((3, 16), bf16), ((3, 16), bf16)]
    assert planned_inputs("with_inputs", monkeypatch, "--dtype", "bfloat16") == both
    capsys.readouterr()
    assert "bfloat16 on" in printed(
        capsys, "plan", "command_line_models:mlp", "--dtype", "bfloat16"
    )


def planned_inputs(
    factory: str, monkeypatch: pytest.MonkeyPatch, *options: str
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the inputs for which the command plans; all weights are like them."""
    seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def plan(model: fuser.Sequential, *inputs: torch.Tensor, training: bool) -> SimpleNamespace:
        assert all(p.dtype == inputs[0].dtype for p in model.parameters())
        seen.extend((tuple(x.shape), x.dtype) for x in inputs)
        return SimpleNamespace()

    monkeypatch.setattr(fuser.Sequential, "plan", plan)
    assert main(["plan", f"command_line_models:{factory}", *options]) == 0
    monkeypatch.undo()
    return seen


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_a_model_is_planned_for_a_device_a_recipe_and_tokens(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", "h100", "--recipe", "current", "--tokens", "512", "--training")
    text = printed(capsys, "plan", "command_line_models:mlp", *options)
    x = torch.empty(512, 16, device="meta", requires_grad=True)
    with fuser.autocast(recipe=recipes.Float8CurrentScaling()):
        assert text.strip() == str(mlp().plan(x, device="h100"))
    assert "512 tokens on H100 (nominal rates)" in text


def test_any_module_is_planned_with_its_boxes(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "plan", "command_line_models:plain")
    x = torch.empty(8192, 4, device="meta")
    assert text.strip() == str(
        fuser.plan(torch.nn.Sequential(torch.nn.Linear(4, 4)), x, training=False)
    )
    assert "[Linear]" in text


def test_a_model_of_a_public_size_is_planned_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("plan", "--device", "h200", "--recipe", "current", "--tokens", "8192", "llama3-8b")
    text = printed(capsys, *argv)
    name = 'llama3-8b after fuser.convert(model, recipe="current")'
    assert text.startswith(f"Plan of {name}, 8.0 G parameters: no grad\n")
    # As convert makes it: a block is one pipeline; the first and last linears are not quantized.
    assert re.search(r"layers\.0-31 +32 +pipeline \d of DecoderLayer", text)
    for path in ("layers.0.self_attn.q_proj", "lm_head"):
        assert re.search(rf"^pipeline \d, {path}: .*no recipe$", text, re.M)
    assert re.search(r"layers\.0-31\.input_layernorm +32 +\[RMSNorm\]", text)
    assert "[Loss]" not in text
    assert "optimizer" not in text
    data = json.loads(printed(capsys, *argv, "--json", "--training"))
    assert (data["name"], data["device"]) == (name, "H200 (measured rates)")
    assert [part["place"] for part in data["parts"]][-2:] == ["loss", "optimizer"]
    # 16-bit weights, gradients and two moments, and what a step of 8192 tokens keeps.
    weights = 2 * PRESETS["llama3-8b"].parameters
    memory = data["memory"]
    assert memory["parameters"] == memory["gradients"] == pytest.approx(weights, rel=1e-3)
    assert memory["moments"] == 2 * memory["parameters"]
    assert weights < memory["kept"] < memory["at_once"] - 3 * weights + 1e9
    # A step of 8192 tokens of 8 billion weights is 0.42 PFLOP: below the peak of FP8 and of bf16.
    flops = sum(part["flops"] for part in data["parts"])
    assert flops == pytest.approx(8192 * PRESETS["llama3-8b"].flops_per_token, rel=0.05)
    assert 300e12 < flops / (data["microseconds"] / 1e6) < 1311e12
    assert data["microseconds"] < data["baselines"]["torch.compile"]


def test_a_plan_of_a_model_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    text = printed(capsys, "plan", "swiglu-blocks", "--device", "b200", "--draw", str(path))
    assert f"Drawn into {path}." in text
    assert ">8 \N{MULTIPLICATION SIGN}<" in path.read_text(encoding="utf-8")


def test_the_picture_compares_plain_torch_with_what_the_text_compares_it_with() -> None:
    pytest.importorskip("matplotlib")
    about = {"name": "M", "inputs": [], "parameters": 8, "training": False, "device": "H200"}
    times = {"microseconds": 4.0, "compiled_microseconds": 2.0}
    plain = {"torch eager": 6.0, "torch.compile": 5.0}
    picture = lay_out_model({**about, **times, "baselines": plain, "parts": []})
    words = [item.string.strip() for item in picture.items if isinstance(item, Text)]
    for name, drawn in {
        "as planned": ["4.0 us"],
        "torch eager": ["6.0 us", "1.50x"],
        "within torch.compile": ["2.0 us"],
        "torch.compile": ["5.0 us", "2.50x"],
    }.items():
        first = words.index(name) + 1
        assert words[first : first + len(drawn)] == drawn


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["command_line_models"], ["'command_line_models'", "MODULE:FACTORY", "llama3-8b"]),
        (["llama4"], ["'llama4'", "llama3-8b", "qwen3-30b-a3b", "mixtral-8x22b"]),
        (["llama3-8b", "--device", "tpu"], ["'tpu'", "h200, h100, a100, b200, rtx5090"]),
        (["llama3-8b", "--recipe", "fp7"], ["'fp7'", "current", "mxfp8"]),
        (["llama3-8b", "--tokens", "0"], ["--tokens is '0'", "1 or more"]),
        (["llama3-8b", "--tokens", "many"], ["--tokens is 'many'"]),
        (["llama3-8b", "--tokens", "8193"], ["8193 tokens", "8192", "llama3-8b"]),
        (["llama3-8b", "--input", "4x16"], ["--tokens"]),
        (["command_line_models:mlp", "--tokens", "4", "--input", "4x16"], ["--input 4x16"]),
        (["command_line_models:"], ["MODULE:FACTORY"]),
        (["nowhere_at_all:mlp"], ["no module 'nowhere_at_all'"]),
        (["fuser.nowhere:mlp"], ["no module 'fuser.nowhere'"]),
        (["nowhere.py:mlp"], ["no file 'nowhere.py'"]),
        (["command_line_models:nothing"], ["command_line_models has no 'nothing'"]),
        (["command_line_models:not_callable"], ["not_callable is of type int"]),
        (["command_line_models:no_module"], ["returned int", "returns a module"]),
        (["command_line_models:refused"], ["in_features=0"]),
        (["command_line_models:broken"], ["broken raised KeyError: 'weights'"]),
        (["command_line_models:needs_an_argument"], ["raised TypeError", "size"]),
        (["command_line_models:activation"], ["--input"]),
        (["command_line_models:mlp", "--input", "16x"], ["'16x'", "16x128"]),
        (["command_line_models:mlp", "--input", "0x16"], ["'0x16'"]),
        (["command_line_models:mlp", "--input", "4x15"], ["(4, 15)", "must be 16"]),
        (["command_line_models:mlp", "--dtype", "int8"], ["'int8'", "bfloat16"]),
        (["raising.py:mlp"], ["raising.py raised ValueError: no weights here"]),
        (["raising:mlp"], ["raising raised ValueError: no weights here"]),
        (["importing:mlp"], ["importing raised ModuleNotFoundError", "nowhere_at_all"]),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(
    argv: list[str], words: list[str], models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (models.parent / "raising.py").write_text("raise ValueError('no weights here')\n")
    (models.parent / "importing.py").write_text("import nowhere_at_all\n")
    assert main(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert all(word in captured.err for word in words), captured.err


def test_a_picture_of_an_unknown_kind_is_refused(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fuser.report.draw")
    assert main(["plan", "command_line_models:mlp", "--draw", "plan.docx"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "plan.docx" in captured.err
    assert not (models.parent / "plan.docx").exists()


def test_a_picture_in_no_folder_is_an_error_with_the_path(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plan", "command_line_models:mlp", "--draw", "missing/plan.svg"]) == 2
    sentence = "'missing/plan.svg' cannot be written: No such file or directory."
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["nothing"], ["plan"], ["plan", "a:b", "--bogus"], ["doctor", "--bogus"]]
)
def test_a_wrong_command_line_returns_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert "usage: fuser" in capsys.readouterr().err


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"fuser {fuser.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    assert all(command in text for command in ("demo", "plan", "doctor"))


# -- demo ---------------------------------------------------------------------------


def test_demo_hands_its_arguments_on_and_returns_what_the_demo_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    demo = mock.Mock(return_value=7)
    monkeypatch.setattr(train_lm, "main", demo)
    assert main(["demo", "--steps", "3", "--help", "-x"]) == 7
    demo.assert_called_once_with(["--steps", "3", "--help", "-x"], None)


TINY_DEMO = "demo --layers 1 --width 16 --heads 1 --context 16 --batch-size 2 --steps 3"


Run = tuple[subprocess.CompletedProcess[str], Path]


@pytest.fixture(scope="module")
def run_strictly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Runs a command once for several tests, with warnings as errors; also returns its folder."""

    @cache
    def run(command: str) -> Run:
        # From a folder of its own, as an installed package runs it.
        folder = tmp_path_factory.mktemp("run")
        words = ["-W", "error", "-m", "fuser", *command.split()]
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        if command.startswith("plan"):
            return python(words, paths, folder), folder
        # The demo starts itself again; and what torch does when it is imported counts, too.
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, **paths},
            capture_output=True,
            text=True,
            check=False,
        )
        return done, folder

    return run


@pytest.mark.parametrize("command", ["doctor", "plan llama3-8b --device h200", TINY_DEMO])
def test_a_command_warns_of_nothing(command: str, run_strictly: Callable[[str], Run]) -> None:
    run, folder = run_strictly(command)
    assert (run.returncode, run.stderr) == (0, "")
    if command == TINY_DEMO:
        assert (folder / "out" / "losses.csv").is_file()
        assert re.search(r"^This took \d+ s\.$", run.stdout, re.M)


# -- doctor -------------------------------------------------------------------------


def test_doctor_in_a_process_of_its_own_returns_0_and_ends_with_the_verdict(
    run_strictly: Callable[[str], Run],
) -> None:
    run, _ = run_strictly("doctor")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.strip().splitlines()
    assert lines[0] == f"fuser {fuser.__version__}"
    assert lines[-1].startswith("fuser runs here, on ")
    assert torch.__version__ in run.stdout
    for section in ("Versions", "Devices", "CUDA kernels", "Recipes", "To do"):
        assert section in lines
    if not torch.cuda.is_available():
        assert "CPU" in lines[-1]


def test_a_reader_that_has_enough_ends_the_program_without_a_traceback() -> None:
    command = [sys.executable, "-m", "fuser", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0


HOPPER = doctor.PresentDevice("cuda:0", "NVIDIA H200", (9, 0))
HEALTHY = doctor.Diagnosis(
    versions=(("python", "3.12.3"),),
    installation=Installation(
        "2.11.0+cu130", "13.0", 1, ("cupy-cuda13x",), cupy_version="14.2.0", cupy_cuda=13000
    ),
    devices=(doctor.PresentDevice("cpu", "x86_64"), HOPPER),
    obstacle=None,
    probe=doctor.ProbeResult(None, 71.0, 5.2),
    optional=(("matplotlib", "3.11.2"), ("tqdm", "4.70.1")),
    has_nvidia_driver=True,
)


def test_doctor_says_what_an_autocast_without_a_recipe_is() -> None:
    text = " ".join(str(doctor.diagnose()).split())
    assert "with recipe=None, is DelayedScaling();" in text
    with fuser.autocast(recipe=None):
        assert current_recipe() == recipes.DelayedScaling()
    assert recipes.DelayedScaling().fp8_format == recipes.Format.HYBRID


def test_a_healthy_gpu_machine_has_nothing_to_do() -> None:
    report = str(HEALTHY)
    assert HEALTHY.exit_status == 0
    assert "To do\n  nothing\n" in report
    assert "agree on CUDA: 13 and 13" in report
    assert "right values; first call 71 ms" in report
    assert report.endswith("on cuda:0 (NVIDIA H200), and CUDA kernels compile and run.")


@pytest.mark.parametrize(("torch_version", "is_named"), [("2.11.0+cu130", True), ("2.13.0", False)])
def test_doctor_names_a_torch_whose_graphs_have_wrong_gradients(
    torch_version: str, is_named: bool
) -> None:
    facts = dataclasses.replace(HEALTHY.installation, torch_version=torch_version)
    report = str(dataclasses.replace(HEALTHY, installation=facts))
    assert ("pytorch issue 180642" in report) == is_named
    assert "also with fullgraph=True" in report


def test_a_missing_cupy_is_no_failure_and_comes_with_the_command() -> None:
    diagnosis = dataclasses.replace(
        HEALTHY,
        installation=Installation("2.11.0+cu130", "13.0", 1),
        obstacle=Obstacle("CuPy is not installed.", ("pip install cupy-cuda13x",)),
        probe=None,
        optional=(("matplotlib", None), ("tqdm", None)),
    )
    report = str(diagnosis)
    assert diagnosis.exit_status == 0
    assert "CuPy and torch" not in report  # nothing to compare
    assert "\n  pip install cupy-cuda13x\n" in report
    assert "\n  pip install matplotlib   (optional: plans drawn as pictures)\n" in report
    assert report.endswith("with torch's kernels alone.")


def test_a_cupy_for_another_cuda_is_said_and_comes_with_the_commands() -> None:
    facts = dataclasses.replace(
        HEALTHY.installation, cupy_packages=("cupy-cuda12x",), cupy_cuda=12090
    )
    diagnosis = dataclasses.replace(
        HEALTHY, installation=facts, obstacle=module.obstacle(facts), probe=None
    )
    report = str(diagnosis)
    assert diagnosis.exit_status == 0
    assert "CuPy and torch disagree on CUDA: 12 and 13" in report
    assert "CuPy 14.2.0 is built for CUDA 12 and torch 2.11.0+cu130 for CUDA 13;" in report
    assert "\n  pip uninstall -y cupy-cuda12x\n  pip install cupy-cuda13x\n" in report
    assert report.endswith("with torch's kernels alone.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"probe": doctor.ProbeResult("StateError: probe.cu does not compile:\nline 3")},
            ["CUDA kernels do not work: StateError: probe.cu does not compile:"],
        ),
        (
            {"compile_failure": Obstacle("mxfp8.cu does not compile.")},
            ["mxfp8.cu does not compile. Torch does the work of kernels. Undo what was edited"],
        ),
        (
            {"installation": Installation("2.4.1+cu121", "12.1", 1)},
            ["torch 2.4.1+cu121 is too old", "2.11"],
        ),
    ],
)
def test_something_broken_returns_1_and_the_verdict_says_what(
    changes: dict[str, object], words: list[str]
) -> None:
    diagnosis = dataclasses.replace(HEALTHY, **changes)
    assert diagnosis.exit_status == 1
    verdict = str(diagnosis).splitlines()[-1]
    assert verdict.startswith("fuser does not run correctly here: ")
    assert all(word in verdict for word in words)


def test_a_kernel_that_does_not_compile_is_said_among_the_kernels() -> None:
    failed = dataclasses.replace(HEALTHY, compile_failure=Obstacle("mxfp8.cu does not compile."))
    assert "a launch\n  mxfp8.cu does not compile.\n" in str(failed)
    sources = ", ".join(doctor.one_of_each_source())
    assert f"one kernel of each of {sources} compiles" in " ".join(str(HEALTHY).split())
    assert {"block_scaling", "mxfp8", "pointwise"} <= set(doctor.one_of_each_source())


@pytest.mark.parametrize(
    ("is_on", "said"),
    [(True, "Passes that repeat are CUDA graphs; "), (False, "has turned their CUDA graphs off.")],
)
def test_the_doctor_says_whether_passes_are_graphs(
    is_on: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_graphs.Switch, "is_on", is_on)
    assert said in " ".join(str(HEALTHY).split())
    without_gpu = dataclasses.replace(HEALTHY, obstacle=Obstacle("no GPU."))
    assert "Passes that repeat" not in str(without_gpu)
    assert "Graphs of passes in" not in str(HEALTHY)


def test_the_doctor_of_a_process_says_what_memory_its_graphs_hold() -> None:
    graph = pass_graphs.PassGraphs(0)
    with on_cpu_graphs() as capturer:
        before, _ = doctor.diagnose().graphs
        capturer.added = 2_100_000
        for address in (1, 1, 2, 2):
            graph.run(list.clear, (address,), [])
        graphs = doctor.diagnose().graphs
    assert (graph.count, graphs) == (2, (before + 2, 4_200_000))
    report = dataclasses.replace(HEALTHY, graphs=(2, 4_200_000))
    sentence = "Graphs of passes in this process: 2, whose temporaries have 4.2 MB; model.plan(x)"
    assert sentence in " ".join(str(report).split())
    assert report.to_dict()["kernels"]["graphs"] == {"count": 2, "bytes": 4_200_000}


def test_the_doctor_compiles_a_kernel_of_every_source(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compiles(name: str, symbol: str, device: int) -> None:
        asked.append(name)
        if name == "normalization":
            module.disable_kernels(Obstacle("normalization.cu does not compile."))
            raise KernelUnavailable("")

    monkeypatch.setattr(module, "kernel", compiles)
    monkeypatch.setattr(module, "compile_failure", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert doctor.find_compile_failure() == Obstacle("normalization.cu does not compile.")
    sources = {path.stem for path in module.KERNELS.glob("*.cu")}
    assert sources == {*doctor.one_of_each_source(), "probe"}
    assert asked == list(doctor.one_of_each_source())[: len(asked)]
    assert asked[-1] == "normalization"


def test_an_old_torch_comes_with_the_command() -> None:
    old = dataclasses.replace(HEALTHY, installation=Installation("2.4.1+cu121", "12.1", 1))
    assert 'pip install "torch>=2.11"' in old.advice


def test_a_cpu_torch_on_a_machine_with_an_nvidia_driver_is_pointed_out() -> None:
    reason = Obstacle("torch 2.13.0+cpu is built without CUDA.")
    on_cpu = dataclasses.replace(
        HEALTHY,
        installation=Installation("2.13.0+cpu", None, 0),
        devices=HEALTHY.devices[:1],
        obstacle=reason,
        probe=None,
    )
    assert " ".join(on_cpu.advice) == reason.reason
    assert dataclasses.replace(on_cpu, has_nvidia_driver=False).advice == ()
    assert on_cpu.exit_status == 0


PLAIN = {"fp32", "fp16", "bf16"}
TENSORWISE = {"delayed", "current"}


@pytest.fixture
def cuda_13_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch built for CUDA 13, as far as the table of GEMMs is concerned."""
    monkeypatch.setattr(native_gemm, "torch_cuda", lambda: (13, 0))
    native_gemm.native_gemm.cache_clear()
    yield
    native_gemm.native_gemm.cache_clear()


def native(kind: str, rows: dict[str, doctor.RecipeSupport]) -> set[str]:
    """The recipes of which all products of a linear, or of experts, are native."""
    products = [f"{kind} {product}" for product in ("forward", "dgrad", "wgrad")]
    return {
        name for name, row in rows.items() if all(row.parts[p].status == "native" for p in products)
    }


@pytest.mark.parametrize(
    ("capability", "linears"),
    [
        (None, PLAIN),
        ((7, 5), {"fp32", "fp16"}),
        ((8, 0), PLAIN),
        ((8, 9), PLAIN | TENSORWISE),
        ((9, 0), PLAIN | TENSORWISE | {"rowwise", "block"}),
        ((10, 0), PLAIN | TENSORWISE),
    ],
)
def test_the_doctor_knows_which_products_are_native_on_an_architecture(
    capability: tuple[int, int] | None, linears: set[str], cuda_13_torch: None
) -> None:
    rows = doctor.support(capability, None)
    assert rows.keys() == PLAIN | recipes.NAMES.keys()
    assert native("linear", rows) == linears
    # What is not native in all products has a reason that names the device.
    device = "a CPU" if capability is None else f"compute capability {capability[0]}."
    for row in rows.values():
        for part, cell in row.parts.items():
            assert (cell.status == "native") == (cell.reason is None)
            assert part == "other ops" or cell.reason is None or cell.reason.startswith(device)


def test_the_doctor_speaks_of_the_cuda_that_is_here(
    cuda_13_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_gemm, "torch_cuda", lambda: (12, 8))
    assert native("linear", doctor.support((9, 0), None)) == PLAIN | TENSORWISE


@pytest.mark.parametrize(
    ("capability", "experts", "one_by_one"),
    [
        (None, PLAIN, PLAIN | {"rowwise"}),
        ((8, 0), PLAIN, PLAIN | recipes.NAMES.keys()),
        ((9, 0), PLAIN | TENSORWISE | {"block", "rowwise"}, {"fp32", "rowwise"}),
        ((10, 0), PLAIN, {"fp32", "rowwise"}),
    ],
)
def test_the_doctor_knows_how_experts_run_on_an_architecture(
    capability: tuple[int, int] | None,
    experts: set[str],
    one_by_one: set[str],
    cuda_13_torch: None,
) -> None:
    rows = doctor.support(capability, None)
    assert native("experts", rows) == experts
    assert {name for name, row in rows.items() if not row.is_grouped} == one_by_one


def test_a_refused_recipe_has_the_sentence_of_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = doctor.planned_kernels

    def refusing(kind: str, name: str, capability: tuple[int, int] | None) -> str:
        if (kind, name) == ("experts", "mxfp8"):
            raise fuser.InputError("No experts under mxfp8.")
        return planned(kind, name, capability)

    monkeypatch.setattr(doctor, "planned_kernels", refusing)
    report = str(dataclasses.replace(HEALTHY, devices=HEALTHY.devices[:1]))
    row = next(line.split() for line in report.splitlines() if line.startswith("  mxfp8  "))
    assert row[1:7] == ["emulated"] * 3 + ["refused"] * 3
    assert "  mxfp8; experts: No experts under mxfp8.\n" in report


def test_the_doctor_prints_its_values_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"].startswith(torch.__version__)
    assert found["verdict"].startswith("fuser runs here")
    assert found["recipes"]["cpu"].keys() == PLAIN | recipes.NAMES.keys()
    row = found["recipes"]["cpu"]["mxfp8"]
    products = [f"{kind} {p}" for kind in ("linear", "experts") for p in doctor.PRODUCTS]
    assert list(row) == [*products, "other ops", "experts at once"]
    reason = "a CPU has no products of quantized operands."
    assert row["experts wgrad"] == {"status": "emulated", "reason": reason}
    assert found["recipes"]["cpu"]["bf16"]["linear dgrad"] == {"status": "native", "reason": None}
    assert HEALTHY.to_dict()["recipes"].keys() == {"cpu", "cuda:0"}
    assert HEALTHY.to_dict()["kernels"]["are_available"]


def test_two_kinds_of_gpu_get_a_matrix_each_with_its_reasons(cuda_13_torch: None) -> None:
    blackwell = doctor.PresentDevice("cuda:1", "NVIDIA B200", (10, 0))
    report = str(dataclasses.replace(HEALTHY, devices=(*HEALTHY.devices, blackwell, HOPPER)))
    lines = report.splitlines()
    assert [line.split()[0] for line in lines if " forward " in line and " dgrad " in line] == [
        "sm_90",
        "sm_100",
    ]
    blocks = [line.split() for line in lines if line.startswith("  block  ")]
    assert blocks == [
        ["block", *["native"] * 6, "at", "once", "native"],
        ["block", *["emulated"] * 6, "at", "once", "native"],
    ]
    # What is native for linears and not for experts has a reason of its own.
    reason = "compute capability 10.0 has no grouped products of FP8 operands."
    assert f"  delayed, current; experts: {reason}" in lines
    assert "  mxfp8; linear, experts: compute capability 9.0 has no products of MXFP8" in report


@pytest.mark.parametrize("capability", [None, (7, 5), (9, 0), (10, 0)])
def test_the_report_is_at_most_100_columns_wide(
    capability: tuple[int, int] | None, cuda_13_torch: None
) -> None:
    devices = (
        doctor.PresentDevice("cpu", "x86_64"),
        doctor.PresentDevice("cuda:0", "a GPU", capability),
    )
    missing = module.obstacle(Installation("2.13.0+cpu", None, 0))
    for no_kernels in (None, missing):
        report = str(dataclasses.replace(HEALTHY, devices=devices, obstacle=no_kernels))
        assert max(map(len, report.splitlines())) <= 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_probe_reports_an_error_instead_of_raising_it() -> None:
    assert doctor.run_probe().error is not None


def test_the_time_of_a_launch_is_that_of_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one launch; the first call also waits for the device."""
    seconds, arange = 0.0, torch.arange

    def passes(more: float) -> None:
        nonlocal seconds
        seconds += more

    def probe(x: torch.Tensor, y: torch.Tensor, alpha: float) -> None:
        passes(3e-6)
        torch.add(x, x, alpha=alpha, out=y)

    def arange_on_the_cpu(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        return arange(size, dtype=dtype, device="cpu")

    monkeypatch.setattr(torch, "arange", arange_on_the_cpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: passes(0.5))
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: seconds)
    monkeypatch.setattr(doctor, "probe", probe)
    result = doctor.run_probe()
    assert result.error is None
    assert result.launch_us == pytest.approx(3.0)
    assert result.compile_ms == pytest.approx(500.003)
