"""The texts of the documents: links have targets, names exist, the README is short."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from documents import DOCUMENTS, RUN, python_blocks, read
from paths import ROOT

import fuser

LINES_OF_README = 120
WIDTH_OF_README = 838  # pixels that GitHub gives a picture
# What the examples write.
FILES_OF_EXAMPLES = ("experts.csv", "losses.csv", "recipes.csv", "recipes_losses.csv")


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= LINES_OF_README


def test_the_files_of_a_number_format_are_those_that_contributing_counts() -> None:
    section = read("CONTRIBUTING.md").split("\n## Adding a number format\n")[1].split("\n## ")[0]
    files = re.findall(r"^\| \d \| `([^`]+)`", section, flags=re.M)
    assert "A format is three files below `fuser/`" in section
    assert len(files) == 3
    further = re.findall(r"^\| [^|`]+ \| `([^`]+)`", section, flags=re.M)
    assert all((ROOT / "fuser" / name).is_file() for name in (*files, *further))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_document_with_python_is_run(document: str) -> None:
    of_libraries = ("docs/lightning.md", "docs/peft.md", "docs/torchtitan.md", "docs/trl.md")
    others = ("CONTRIBUTING.md", "docs/extending.md", "docs/parallel.md")
    tested = (*RUN, *others, *of_libraries)
    assert not python_blocks(read(document)) or document in tested


def test_the_picture_of_the_readme_is_legible_on_its_page() -> None:
    svg = read("docs/plan_small.svg")
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+) ', svg)
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
    assert min(sizes) * WIDTH_OF_README / float(width) >= 8


def test_probe_has_the_lines_that_contributing_says() -> None:
    text = read("CONTRIBUTING.md")
    lines = {
        name: len((ROOT / "fuser" / name).read_text(encoding="utf-8").splitlines())
        for name in ("cuda/probe.py", "cuda/kernels/probe.cu")
    }
    counts = [int(n) for n in re.findall(r"`cuda/[\w/]*probe\.\w+`\s+\((\d+)(?: lines)?\)", text)]
    assert counts == list(lines.values())


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", text, re.M):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(anchor)
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_a_document_lead_to_files_and_headings(document: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(document)):
        if target.startswith("https://"):
            continue
        # Pages of the repository's host: a badge is the state of a workflow.
        if target.startswith("../../actions/workflows/"):
            target = f".github/{target.removeprefix('../../actions/').removesuffix('/badge.svg')}"
        path, _, heading = target.partition("#")
        there = (ROOT / document).parent / path if path else ROOT / document
        assert there.exists(), target
        if heading:
            assert heading in anchors(there.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_files_that_a_document_names_exist(document: str) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", read(document), flags=re.M | re.S)
    files = [f"/{path}" for path in all_files()]
    for name in re.findall(r"`([\w./]+\.(?:py|cu|cuh|cpp|csv|svg))`", text):
        is_on_the_page = f"# {name}\n" in read(document)
        if name not in FILES_OF_EXAMPLES and not is_on_the_page:
            assert any(file.endswith(f"/{name}") for file in files), name


@pytest.mark.parametrize(
    "document",
    [
        *("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/dev/decisions.md"),
        *(f"docs/dev/{name}.md" for name in ("execution", "precision", "inspection")),
        *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/dev/wings/*.md"))),
    ],
)
def test_names_that_a_document_about_the_code_uses_are_in_the_code(document: str) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", read(document), flags=re.M | re.S)
    for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text):
        if Path(name).suffix not in (".py", ".cu", ".cuh", ".csv", ".svg"):
            assert set(name.split(".")) <= words_of_the_code(), name


@functools.cache
def words_of_the_code() -> frozenset[str]:
    """Every word in the sources of the library and its tests."""
    sources = (path for path in all_files() if Path(path).suffix in (".py", ".cu", ".cuh"))
    return frozenset(
        word
        for source in sources
        if source not in ("tests/docs/test_documents.py", "tests/docs/test_document_code.py")
        for word in re.findall(r"\w+", read(source))
    )


@functools.cache
def all_files() -> tuple[str, ...]:
    """Every file of the library, its tests and its benchmarks, relative to the repository."""
    folders = ("fuser", "tests", "benchmarks", "examples", "docs")
    below = (path for folder in folders for path in (ROOT / folder).rglob("*.*"))
    return tuple(path.relative_to(ROOT).as_posix() for path in (ROOT / "setup.py", *below))


@pytest.mark.parametrize(
    ("document", "heading"),
    [("README.md", "## te.ops"), ("docs/te_ops.md", "# For users of te.ops")],
)
def test_the_names_that_a_script_of_te_ops_uses_are_here(document: str, heading: str) -> None:
    table = f"\n{read(document)}".split(f"\n{heading}\n")[1].split("\n## ")[0]
    first, *rows = re.findall(r"^\| (.*?) \| (.*?) \|$", table, re.M)
    assert first in [("there", "here"), ("te.ops", "fuser")]
    assert len(rows) >= 5
    for there, here in rows:
        for name in re.findall(r"`(?:te\.|transformer_engine\.common\.)?(\w+)`", there):
            is_module = here == "`fuser.modules`"
            if here.startswith("not here"):
                assert not hasattr(fuser, name), name
            else:
                assert hasattr(fuser.modules if is_module else fuser, name), name
