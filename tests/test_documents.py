"""README.md and ARCHITECTURE.md: their snippets run as printed, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import why_unavailable

import fuser
from fuser.cuda.launch import Kernel

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "examples/README.md")


def snippets(document: str, heading: str) -> list[str]:
    """The Python in a section of a document, up to the next heading of its rank or above."""
    rank = heading.partition(" ")[0]
    text = (ROOT / document).read_text(encoding="utf-8").split(f"\n{heading}\n")[1]
    section = re.split(rf"^#{{1,{len(rank)}}} ", text, flags=re.M)[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)


def names_after(*codes: str) -> dict[str, Any]:
    """The names that there are when all of the code has run."""
    names: dict[str, Any] = {"__name__": "snippet"}
    for code in codes:
        exec(compile(code, "snippet", "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_the_readmes_code_runs_and_prints_the_plan_that_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the printed plan is that of a machine without a GPU.")
    monkeypatch.chdir(tmp_path)
    names = names_after(*snippets("README.md", "## Use"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"```\n{capsys.readouterr().out}```\n" in text
    assert (tmp_path / "plan.svg").is_file()
    comment = f'"{names["plan"].forward[2].fusion}"'
    assert f"plan.forward[2].fusion  # step 2, of ops 2 to 4: {comment}" in text
    assert all(p.grad is not None for p in names["block"].parameters())


def test_the_op_and_the_fusion_that_architecture_adds_work() -> None:
    op = snippets("ARCHITECTURE.md", "## Adding an op")
    names = names_after(*op, *snippets("ARCHITECTURE.md", "## Adding a fusion"))
    model = names["model"]
    torch.nn.init.normal_(model[1].bias)
    x = torch.randn(3, 64, requires_grad=True)
    y = model(x)
    assert [step.fusion for step in model.plans[0].forward] == ["SquareBias"]
    torch.testing.assert_close(y, x * x + model[1].bias)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x)
    torch.testing.assert_close(model[1].bias.grad, torch.full((64,), 3.0))
    with torch.autocast("cpu", torch.bfloat16):
        (refusal,) = (r for r in model.plan(x).refusals if r.fusion == "SquareBias")
    assert refusal.reason.startswith("it computes in its input's dtype")


@pytest.mark.skipif(why_unavailable() is not None, reason=f"needs it: {why_unavailable()}")
def test_the_kernel_test_and_the_kernels_that_architecture_shows_work() -> None:
    test, kernels = snippets("ARCHITECTURE.md", "## Writing a kernel")
    names_after(test)["test_probe_writes_scale_times_x_plus_the_index"]()
    made = names_after(kernels)["instantiations"]()
    assert len(made) == 4
    assert all(isinstance(kernel, Kernel) for kernel in made)


def test_probe_has_the_lines_that_architecture_says() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    lines = {
        name: len((ROOT / "fuser" / name).read_text(encoding="utf-8").splitlines())
        for name in ("cuda/probe.py", "cuda/kernels/probe.cu")
    }
    counts = [int(n) for n in re.findall(r"`cuda/[\w/]*probe\.\w+`\s+\((\d+)(?: lines)?\)", text)]
    assert counts == list(lines.values())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_a_document_lead_to_files_and_headings(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = target.partition("#")
        there = (ROOT / document).parent / path if path else ROOT / document
        assert there.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, target


def test_the_names_that_a_script_of_te_ops_uses_are_here() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("### For users of te.ops\n")[1]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", table.split("\n### ")[0], re.M)
    assert rows[0] == ("there", "here")
    for there, here in rows[1:]:
        for name in re.findall(r"`(?:te\.|transformer_engine\.common\.)?(\w+)`", there):
            is_module = here == "`fuser.modules`"
            if here.startswith("not here"):
                assert not hasattr(fuser, name), name
            else:
                assert hasattr(fuser.modules if is_module else fuser, name), name
