"""The code in the documents runs as printed, and makes the plans and pictures that they show."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import RUN, python_blocks, read, snippets
from emulator import emulated, why_unavailable
from needs import needs_emulator

import fuser
from fuser.__main__ import main
from fuser.chain import STAGES
from fuser.cuda.launch import Kernel

# What these print is not in them.
PRINT_MORE = ("docs/memory.md", "docs/recipes.md", "docs/start.md")
# The block of a document that trains a model, and the name of the model.
TRAINED = {
    ("docs/experts.md", 0): "mlp",
    ("docs/experts.md", 1): "layer",
    ("docs/experts.md", 2): "spread",
    ("docs/low_precision.md", 0): "block",
    ("docs/sharded.md", 0): "model",
}


@dataclass(frozen=True)
class Ran:
    """What a Python block of a document made: names, the text on stdout, and files in a folder."""

    names: dict[str, Any]
    printed: str
    folder: Path


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Ran]:
    """Runs a block of a document alone, once for all tests that look at what came of it."""

    @functools.cache
    def run(document: str, block: int) -> Ran:
        folder, printed = tmp_path_factory.mktemp("document"), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(printed),
            warnings.catch_warnings(),
        ):
            patch.chdir(folder)
            names = names_after(python_blocks(read(document))[block])
        return Ran(names, printed.getvalue(), folder)

    return run


def names_after(code: str, **names: Any) -> dict[str, Any]:
    """The names that there are when the code has run in a module that has ``names``."""
    names = {"__name__": "snippet", **names}
    exec(compile(code, "snippet", "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:.* is emulated")
@pytest.mark.parametrize(
    ("document", "block"),
    [(name, i) for name in RUN for i in range(len(python_blocks(read(name))))],
)
def test_a_block_of_a_document_runs_alone_and_prints_what_the_document_has(
    document: str, block: int, ran: Callable[[str, int], Ran]
) -> None:
    code = python_blocks(read(document))[block]
    names, printed = ran(document, block).names, ran(document, block).printed
    if (document, block) in TRAINED:
        model = names[TRAINED[document, block]]
        assert all(p.grad is not None for p in model.parameters())
    if torch.cuda.is_available():
        pytest.skip("the printed plans are those of a machine without a GPU.")
    shown = read(document).split(f"```python\n{code}```\n")[1]
    if shown.startswith("\n```\n"):
        assert shown.removeprefix("\n```\n").split("```\n")[0] == printed
    elif printed and document not in PRINT_MORE:
        assert f"```\n{printed}```\n" in read(document)


def test_each_document_that_is_run_has_a_block() -> None:
    assert all(python_blocks(read(document)) for document in RUN)
    assert all(i < len(python_blocks(read(document))) for document, i in TRAINED)


def test_the_page_on_plans_names_a_step_of_its_plan_and_draws_it(
    ran: Callable[[str, int], Ran],
) -> None:
    page = ran("docs/plans.md", 0)
    assert (page.folder / "plan.svg").is_file()
    comment = f'"{page.names["plan"].forward[2].fusion}"'
    assert f"plan.forward[2].fusion  # step 2, of ops 2 to 4: {comment}" in read("docs/plans.md")


def test_the_plan_of_a_named_model_is_the_one_that_the_document_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = read("docs/plans.md")
    command, written = re.findall(
        r"^```\n\$ python -m fuser (.*?)\n(.*?)\n```", document, re.M | re.S
    )[0]
    drawn = tmp_path / "plan.svg"
    is_drawn = importlib.util.find_spec("matplotlib") is not None
    assert main([*command.split(), *["--draw", str(drawn)] * is_drawn]) == 0
    assert capsys.readouterr().out.startswith(f"{written}\n\npipeline 1")
    if is_drawn:
        texts = svg_texts(drawn.read_text(encoding="utf-8"))
        assert texts == svg_texts(read("docs/plan_model.svg"))


@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_the_notes_of_a_layer_of_experts_are_those_of_its_plan(
    ran: Callable[[str, int], Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = "docs/experts.md"
    layer, x, routing = (ran(document, 1).names[name] for name in ("layer", "x", "routing"))
    # As on the GPU that the page names.
    monkeypatch.setattr(fuser.GroupedLinear, "runs_at_once", lambda op, key: True)
    recipe = fuser.recipe.Float8CurrentScaling()
    with torch.autocast("cpu", torch.bfloat16), fuser.autocast(recipe=recipe):
        text = str(layer.plan(x, routing.expert_indices, routing.probs))
    (notes,) = re.findall(r"^notes\n.*?\n\n", text, re.M | re.S)
    assert f"```\n{notes.rstrip()}\n```\n" in read(document)


def test_the_generated_code_in_the_documents_is_what_runs() -> None:
    layers = (fuser.Linear(8, 16), fuser.GELU(), fuser.Linear(16, 8, bias=False))
    pipeline = fuser.OperationFuser(layers)
    pipeline(torch.ones(4, 8, requires_grad=True, device="cpu"))
    (run,) = pipeline._runs.values()
    (written,) = re.findall(r"^```text\n(.*?)^```", read("docs/dev/execution.md"), re.M | re.S)
    assert written.rstrip() == run.source.rstrip()


@pytest.mark.parametrize(
    ("document", "picture"),
    [("README.md", "docs/plan_small.svg"), ("docs/plans.md", "docs/plan.svg")],
)
@pytest.mark.filterwarnings("ignore:.* is emulated")
def test_the_picture_of_a_document_has_the_plan_that_the_document_prints(
    document: str, picture: str, tmp_path: Path, ran: Callable[[str, int], Ran]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the pictures are those of a machine without a GPU.")
    pytest.importorskip("matplotlib")
    assert re.search(rf"\]\([\w/]*{Path(picture).name}\)", read(document))
    names = ran(document, 0).names
    plan = names.get("plan") or names["model"].plan(names["x"])
    drawn = plan.draw(tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert svg_texts(drawn) == svg_texts(read(picture))


def svg_texts(svg: str) -> list[str]:
    """What is written in a picture."""
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


@pytest.fixture(scope="module")
def extending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names of all blocks of docs/extending.md, each run alone beside the files of the page."""
    text, stages = read("docs/extending.md"), dict(STAGES)
    folder = tmp_path_factory.mktemp("extending")
    files = re.findall(r"^```\w+\n((?://|#) (\w+\.\w+)\n.*?)^```", text, re.M | re.S)
    for source, name in files:
        (folder / name).write_text(source, encoding="utf-8")
    names: dict[str, Any] = {}
    registered: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for code in python_blocks(text):
            STAGES.clear()
            STAGES.update(stages)
            sys.modules.pop("my_stages", None)  # a block that needs the stage imports it
            name = "__main__" if code.startswith("# my_") else "snippet"
            names |= names_after(code, __name__=name, __file__=str(folder / "mine.py"))
            registered |= STAGES
        STAGES.update(registered)
        yield names
    for name in ("my_ops", "my_stages"):
        sys.modules.pop(name, None)
    STAGES.clear()
    STAGES.update(stages)


def test_the_page_on_extending_runs_and_its_kernels_run_in_the_emulator(
    extending: dict[str, Any],
) -> None:
    x = torch.randn(40, 64)
    with torch.autocast("cpu", torch.bfloat16):
        (refusal,) = (r for r in extending["model"].plan(x).refusals if r.fusion == "SquareBias")
    assert refusal.reason.startswith("it computes in its input's dtype")
    squares = fuser.Sequential(*(extending["Square"]() for _ in range(5)))
    squares.fusions = (extending["Powers"],)
    assert "it takes four squares at most" in squares.plan(x).refusals[0].reason
    if why_unavailable() is not None:
        pytest.skip(f"needs the emulator: {why_unavailable()}")
    for dtype in (torch.float32, torch.bfloat16):
        wide = x.to(dtype)
        with emulated():
            torch.testing.assert_close(extending["square"](wide), wide * wide)
    model = fuser.Sequential(extending["Tanh"](), fuser.ConstantScale(2.0), extending["Tanh2"]())
    with emulated():
        assert [step.fusion for step in model.plan(x).forward] == ["PointwiseChain"]
        torch.testing.assert_close(model(x), torch.tanh(2 * torch.tanh(x)))


def test_the_sentence_of_check_on_the_page_is_what_check_says(extending: dict[str, Any]) -> None:
    base: Any = extending["SquareBias"]

    class SquareBias(base):  # type: ignore[misc]
        def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
            basic_op_ctxs[0].save_for_backward(input_)
            return input_ * input_, [(), ()]

    bias = fuser.Bias(3, device="cpu")
    torch.nn.init.constant_(bias.bias, 1.5)
    with pytest.raises(AssertionError) as raised:
        fuser.testing.check(
            SquareBias([extending["Square"](), bias]), torch.tensor([[1.0, 0.5, -2.0]])
        )
    said = " ".join(read("docs/extending.md").split("```text\n")[1].split("```")[0].split())
    assert str(raised.value) == said


@needs_emulator
def test_the_kernel_test_and_the_kernels_of_contributing_work() -> None:
    test, kernels = snippets("CONTRIBUTING.md", "## Adding a kernel")
    names_after(test)["test_probe_writes_scale_times_x_plus_the_index"]()
    made = names_after(kernels)["instantiations"]()
    assert len(made) == 4
    assert all(isinstance(kernel, Kernel) for kernel in made)
