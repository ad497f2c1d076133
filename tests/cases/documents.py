"""The documents of the repository, and the Python in them."""

from __future__ import annotations

import re

from paths import ROOT

FOLDERS = (
    *(".", "docs", "docs/dev", "docs/notebooks"),
    *("benchmarks", "benchmarks/results", "examples"),
)

DOCUMENTS = tuple(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.md"))
)

# Each Python block of these runs by itself, as a reader copies it. Blocks of CONTRIBUTING.md and of
# docs/extending.md have tests of their own; those of docs/parallel.md run on two ranks
# (test_parallel_ops.py), and the pages of other libraries where these are (tests/integrations).
RUN = (
    "README.md",
    "docs/convert.md",
    "docs/experts.md",
    "docs/index.md",
    "docs/lora.md",
    "docs/low_precision.md",
    "docs/memory.md",
    "docs/migrate.md",
    "docs/performance.md",
    "docs/plans.md",
    "docs/recipes.md",
    "docs/shapes.md",
    "docs/sharded.md",
    "docs/start.md",
    "docs/state_dicts.md",
)


def read(document: str) -> str:
    """The text of a document."""
    return (ROOT / document).read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    """The Python in a text that begins at the margin: indented blocks are parts of a file."""
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def snippets(document: str, heading: str) -> list[str]:
    """The Python in a section of a document, up to the next heading of its rank or above."""
    rank = heading.partition(" ")[0]
    text = read(document).split(f"\n{heading}\n")[1]
    return python_blocks(re.split(rf"^#{{1,{len(rank)}}} ", text, flags=re.M)[0])
