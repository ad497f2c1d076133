"""The site: it is built without a warning, and has every document and every public name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import commands
import figures
import formats_picture
import kernels_picture
import pytest
import rooms_picture
from once import made_once
from paths import ROOT
from rooms import ROOMS

import fuser

MODULES = ("", ".recipe", ".modules", ".moe", ".distributed", ".inspection", ".testing")
# Not classes or functions of their own.
NO_ENTRY = {
    *("__version__", "distributed", "modules", "moe", "ops", "recipe", "testing"),
    # other names of what the page has
    *("AmaxAlgorithm", "BACKWARD_OVERRIDES", "BACKWARD_OVERRIDE_VARIABLE", "BackwardOverride"),
    *("NAMES", "RECIPES"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; its notebooks have run."""
    for tool in ("sphinx", "myst_nb"):
        pytest.importorskip(tool, reason="Sphinx builds the site: pip install -e .[docs]")

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
        command += ["-c", "docs/site", ".", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "site", build)


def test_the_site_has_every_document(site: Path) -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"]
    for name in ("README.md", "AGENTS.md"):  # what a host of repositories shows
        documents.remove(ROOT / name)
    assert len(documents) > 20
    for document in documents:
        page = (site / document.relative_to(ROOT)).with_suffix(".html")
        assert page.is_file(), document
    assert "docs/index.html" in (site / "index.html").read_text(encoding="utf-8")


def test_every_public_name_has_an_entry_in_the_reference(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    entries = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    names = {name for kind, found in entries.items() if kind.startswith("py:") for name in found}
    for module in MODULES:
        path = f"fuser{module}"
        for name in importlib.import_module(path).__all__:
            if name not in NO_ENTRY:
                assert {f"{path}.{name}", f"fuser.{name}"} & names, f"{path}.{name}"


def test_the_reference_shows_what_users_call_and_no_internal_class(site: Path) -> None:
    """Members are those that a page names; bases are those that can be imported."""
    from sphinx.util.inventory import InventoryFile

    entries = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    shown = {name for kind, found in entries.items() if kind.startswith("py:") for name in found}
    assert {
        "fuser.Sequential.plan",
        "fuser.LoRALinear.from_linear",
        "fuser.BasicOperation.op_forward",
        "fuser.FusionPlan.draw",
        "fuser.QuantizedTensor.dequantize",
    } <= shown
    for name in (
        "BasicLinear.op_forward",
        "GroupedLinear.runs_at_once",
        "Quantizer.is_repeatable",
        "OperationContext.keeps_source",
        "BasicOperation.context_constants",
        "FusionPlan.gap_labels",
    ):
        assert f"fuser.{name}" not in shown
    classes = [name for name in fuser.__all__ if isinstance(getattr(fuser, name), type)]
    assert len(classes) > 80
    for page in (site / "docs" / "reference").glob("*.html"):
        text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
        for bases in re.findall(r"^Bases: (.*)$", text, re.M):
            assert not re.search(r"\b_|ChangeableQuantizer|LoRAAdapters", bases), (page, bases)


def test_printed_plans_scroll_in_the_column(site: Path) -> None:
    text = (site / "docs" / "plans.html").read_text(encoding="utf-8")
    assert re.search(r'class="highlight-text .*\n?.*Plan of llama3-8b', text)
    css = (site / "_static" / "site.css").read_text(encoding="utf-8")
    (rule,) = re.findall(r"^[^{}]*\.highlight-text pre[^{}]*{([^}]*)}", css, re.M)
    assert "overflow-x: auto" in rule


def test_pages_show_what_the_library_and_the_results_say(site: Path) -> None:
    def text(page: str) -> str:
        return (site / page).read_text(encoding="utf-8")

    assert "another shape must keep the length and the number of rows." in text(
        "docs/troubleshooting.html"
    )
    assert "benchmarks/results/peers_h200.csv" in text("docs/numbers.html")
    assert "usage: fuser plan" in text("docs/reference/command_line.html")


def test_notebooks_have_run_and_show_their_plan_and_curves(site: Path) -> None:
    def page(name: str) -> str:
        return (site / "docs" / "notebooks" / f"{name}.html").read_text(encoding="utf-8")

    pipeline, convert = page("pipeline"), page("convert")
    assert "Fusion plan of 6 ops" in pipeline
    assert pipeline.count("<img") >= 3  # two plans, one curve
    assert "SNR dB" in pipeline
    assert "fuser.convert: 21 modules run pipelines" in convert
    assert re.search(r"torch eager .* ms, 1\.\d+x this plan", convert)
    assert "<img" in convert
    for text in (pipeline, convert):
        assert "Traceback" not in text
        assert "Warning" not in re.sub("EmulationWarning", "", text)
    downloads = {path.name for path in (site / "_downloads").rglob("*.ipynb")}
    assert downloads == {"pipeline.ipynb", "convert.ipynb"}


def test_a_table_of_figures_has_the_medians_of_its_file() -> None:
    caption, lines = figures.table("peers_h200.csv", "variant", "block", ["ms"], None)
    assert caption.startswith("NVIDIA H200, torch 2.11")
    assert lines[0] == ["ms, block", "Linear-GELU-Linear", "RMSNorm-Linear-SwiGLU-Linear-add"]
    assert ["fuser delayed", "4.931", "7.497"] in lines
    with pytest.raises(KeyError):
        figures.table("peers_h200.csv", "variant", None, ["seconds"], None)
    with pytest.raises(ValueError, match="no lines where way=flown"):
        figures.table("peers_steps_h200.csv", "variant", "way", ["ms"], "way=flown")


def test_the_picture_of_formats_is_that_of_its_script() -> None:
    picture = formats_picture.picture()
    assert formats_picture.PICTURE.read_text(encoding="utf-8") == picture
    for text in ("largest 448<", "largest 57344<", "largest 6<", "MXFP8: 1 x 32"):
        assert text in picture


def test_the_picture_of_kernels_is_that_of_its_script() -> None:
    picture = kernels_picture.picture()
    assert kernels_picture.PICTURE.read_text(encoding="utf-8") == picture
    pairs = kernels_picture.kernels()
    assert {producer for producer, _, _ in pairs} == {row[0] for row in kernels_picture.PRODUCERS}
    assert {store for _, store, _ in pairs} == {row[0] for row in kernels_picture.STORES}
    assert ("NormProducer", "Mxfp8Store", False) in pairs
    assert ("NormProducer", "Mxfp8Store", True) not in pairs


def test_the_picture_of_rooms_is_that_of_its_script_and_has_all_rooms() -> None:
    picture = rooms_picture.picture()
    assert rooms_picture.PICTURE.read_text(encoding="utf-8") == picture
    assert set(rooms_picture.WHAT) == {room.name for room in ROOMS}


def test_a_command_prints_what_the_program_prints() -> None:
    assert commands.output("fuser --version") == f"fuser {fuser.__version__}\n"
    for command in ("fuser", "fuser demo", "fuser scale"):
        assert f"{command} [-h]" in commands.output(f"{command} --help")
    for command in ("fuser fly", "fuser demo --steps none"):
        with pytest.raises(ValueError, match="status 2"):
            commands.output(command)
