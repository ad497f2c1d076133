"""Sentences and names: three habits that make text hard to read, counted, with a limit each.

A limit is the count of the day it was set, and only ever becomes smaller.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from paths import ROOT

# What a variable holds says more than that it was found.
LIMITS_OF_NAMES = {"made": 53, "found": 70, "wanted": 20, "told": 2}
LIMIT_OF_REFERENCES = 11
LIMIT_OF_PRONOUNS = 8  # in 10000 words

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"]
)
MODULES = sorted((ROOT / "fuser").rglob("*.py"))


def paragraphs(document: Path) -> list[str]:
    """The paragraphs of a document, items of lists apart, without code and tables."""
    text = re.sub(r"^ *```.*?^ *```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [p for p in re.split(r"\n\s*\n|\n(?=- )", text) if not p.lstrip().startswith("|")]


def pronouns(text: str) -> int:
    """How often a text says "that of" or "those of" where a noun could stand."""
    return len(re.findall(r"\b(?:that|those) of\b", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_paragraph_repeats_its_noun(document: Path) -> None:
    crowded = [p for p in paragraphs(document) if pronouns(p) > 1]
    assert not crowded


def test_documents_say_the_noun() -> None:
    texts = [p for document in DOCUMENTS for p in paragraphs(document)]
    words = sum(len(text.split()) for text in texts)
    assert sum(map(pronouns, texts)) <= LIMIT_OF_PRONOUNS * words / 10000


def test_variables_are_named_by_what_they_hold() -> None:
    names: Counter[str] = Counter()
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg):
                names[node.arg] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] += 1
    counts = {name: names[name] for name in LIMITS_OF_NAMES}
    assert all(counts[name] <= limit for name, limit in LIMITS_OF_NAMES.items()), counts


def test_docstrings_say_what_their_reader_came_for() -> None:
    """A docstring that is "As :meth:`other`" sends its reader on."""
    references = []
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_docstring(node) or ""
                if re.match(r"(?:As|See|Like) (?::\w+:)?`", text):
                    references.append(f"{module.relative_to(ROOT)}:{node.lineno}")
    assert len(references) <= LIMIT_OF_REFERENCES, references
