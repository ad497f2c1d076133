"""Directive ``sentences``: every error, refusal and warning of the library, from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FUSER = Path(__file__).resolve().parents[2] / "fuser"
# Functions of these names return why something is not done, or None.
REASONS = ("refus", "why", "reason", "unsupported", "does_not")
TITLES = {
    "basic_ops": "Ops",
    "chain.py": "Stages of chains",
    "communication": "Collectives",
    "conversion": "fuser.convert",
    "cuda": "Kernels",
    "distributed": "Sharded parameters",
    "errors.py": "Arguments and names",
    "formats.py": "Formats",
    "functional": "Routing and products",
    "fused_ops": "Fusions",
    "gemm": "Matrix products",
    "inspection": "fuser.inspect",
    "integrations": "Other libraries",
    "__main__.py": "Command line",
    "modules": "Layers",
    "moe": "Experts",
    "op": "Base classes of ops",
    "plan": "Plans",
    "precision": "Recipes in contexts",
    "recipe.py": "Recipes",
    "reference": "Reference kernels",
    "report": "Pictures and reports",
    "runtime": "Calls, graphs and recordings",
    "sequential.py": "Sequential",
    "specs.py": "Inputs",
    "te": "Names of te.ops",
    "tensors": "Quantized tensors",
    "testing": "fuser.testing",
    "wrapper_tensor.py": "Quantized tensors",
}


class Sentence(NamedTuple):
    """A message: what raises, warns or refuses with it, its text, and the module."""

    kind: str
    text: str
    module: str


def sentences() -> Iterator[Sentence]:
    """All messages, in the order of the sources."""
    for path in sorted(FUSER.rglob("*.py")):
        module = path.relative_to(FUSER).as_posix()
        seen: set[tuple[str, str]] = set()
        for kind, text in _of(ast.parse(path.read_text(encoding="utf-8"))):
            if " " in text.strip("… ") and (kind, text) not in seen:
                seen.add((kind, text))
                yield Sentence(kind, text, module)


def _of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Kind and text of every message in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = _name(node.exc.func)
            if name.endswith(("Error", "Untraceable", "Unavailable")) and node.exc.args:
                yield from ((name, text) for text in _texts(node.exc.args[0]))
        elif isinstance(node, ast.Call) and node.args:
            if _name(node.func) == "warn":
                yield from (("warning", text) for text in _texts(node.args[0]))
            elif _name(node.func) == "refuse":
                yield from (("refusal", text) for text in _texts(node.args[0]))
        elif isinstance(node, ast.FunctionDef) and any(n in node.name for n in REASONS):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from (("refusal", text) for text in _texts(inner.value))


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _texts(value: ast.expr) -> list[str]:
    """The texts that an expression may have, with an ellipsis for each value in it."""
    if isinstance(value, ast.IfExp):
        return _texts(value.body) + _texts(value.orelse)
    text = _text(value)
    return [] if text is None else [" ".join(text.split())]


def _text(value: ast.expr) -> str | None:
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if isinstance(value, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in value.values
        )
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        left, right = _text(value.left), _text(value.right)
        return None if left is None and right is None else (left or "…") + (right or "…")
    return None


def setup(app: object) -> dict[str, bool]:
    """Registers the directive."""
    from docutils import nodes
    from sphinx.application import Sphinx
    from sphinx.util.docutils import SphinxDirective

    class Sentences(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            groups: dict[str, list[Sentence]] = {}
            for sentence in sentences():
                groups.setdefault(sentence.module.partition("/")[0], []).append(sentence)
            result: list[nodes.Node] = []
            for folder, members in sorted(groups.items(), key=lambda g: TITLES.get(g[0], g[0])):
                title = TITLES.get(folder, folder)
                section = nodes.section(ids=[nodes.make_id(f"messages of {title}")])
                section += nodes.title(text=title)
                rows = nodes.bullet_list()
                for sentence in members:
                    paragraph = nodes.paragraph()
                    paragraph += nodes.strong(text=sentence.kind)
                    paragraph += nodes.Text(f": {sentence.text}")
                    rows += nodes.list_item("", paragraph)
                section += rows
                result.append(section)
            return result

    assert isinstance(app, Sphinx)
    app.add_directive("sentences", Sentences)
    return {"parallel_read_safe": True}
