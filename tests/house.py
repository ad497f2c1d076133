"""Figures of the house: how much there is to read, to know and to follow. A report, no check.

    python tests/house.py              the figures of this tree
    python tests/house.py 024aaa6 v1   beside those of other commits

All counts are of ``fuser/``, from its syntax trees, but for calls, which are walked (``walks.py``).
Rooms are those that ``rooms.py`` has now. A figure that is met by splitting what belongs
together is a step back. The private names of torch alone are a test (test_torch_private.py).
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import rooms
from private_names import defined, private_names

ROOT = Path(__file__).parents[1]
# Forecasts are no part of the engine, also where they were in its folder.
APART = ("scale",)
THE_ONE = "torch_private.py"
FILLERS = ("made", "found", "wanted", "what", "each")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Source:
    """A file of the library."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def functions(self) -> list[Function]:
        return [n for n in ast.walk(self.tree) if isinstance(n, Function)]


def sources(tree: Path) -> list[Source]:
    """The files of the engine in a checkout."""
    folder = tree / "fuser"
    return [
        Source(path.relative_to(folder), text := path.read_text(), ast.parse(text))
        for path in sorted(folder.rglob("*.py"))
        if path.relative_to(folder).parts[0] not in APART
    ]


# -- lines -------------------------------------------------------------------------------


def _docstring(node: ast.AST) -> ast.Expr | None:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_text and isinstance(first.value.value, str) else None


def code_lines(source: Source) -> set[int]:
    """The numbers of lines with code: no comments, docstrings and blank lines."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        # Also the texts below attributes.
        for each in getattr(node, "body", ()) if isinstance(getattr(node, "body", 0), list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                lines.difference_update(range(each.lineno, (each.end_lineno or 0) + 1))
    return lines


def body_lines(function: Function, code: set[int]) -> int:
    """The lines of code in the body of a function."""
    first, last = function.body[0].lineno, function.end_lineno or 0
    return len(code.intersection(range(first, last + 1)))


# -- functions ---------------------------------------------------------------------------

BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.Match)


def branches(function: Function) -> int:
    """The conditions and loops of a function, also in expressions; ``and`` and ``or`` count."""
    nodes = list(ast.walk(function))
    operators = sum(len(n.values) - 1 for n in nodes if isinstance(n, ast.BoolOp))
    return sum(isinstance(n, BRANCHES) for n in nodes) + operators


def variables(function: Function) -> int:
    """The names that a function assigns, and its parameters."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {argument.arg for argument in named} - {"self", "cls"}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return len(names)


# -- types and names ---------------------------------------------------------------------


def count_names(files: Iterable[Source], name: str) -> int:
    """How often a name occurs in the code, annotations included."""
    return sum(
        isinstance(node, ast.Name) and node.id == name
        for source in files
        for node in ast.walk(source.tree)
    )


def private_torch_names(files: list[Source]) -> int:
    """Private names of torch and looks at the stack, as the test sees them, outside one file."""
    others = [source for source in files if source.path.name != THE_ONE]
    own = defined([source.tree for source in others])
    return sum(len(list(private_names(source.tree, own))) for source in others)


def set_from_outside(files: list[Source]) -> int:
    """Members that are set on a class that is defined elsewhere: ``Class.name = ...``, setattr."""
    count = 0
    for source in files:
        own = {node.name for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assign):
                count += sum(
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id[:1].isupper()
                    and target.value.id not in own
                    for target in node.targets
                )
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                count += ast.unparse(node.args[0])[:1].isupper()
    return count


def concepts(tree: Path) -> int:
    """The rows of the table of words in ARCHITECTURE.md."""
    text = (tree / "ARCHITECTURE.md").read_text()
    table = text.partition("## Words")[2].partition("\n## ")[0]
    return len(re.findall(r"^\| ", table, re.M)) - 1


def repetitions(tree: Path) -> float:
    """``those of``, ``that of`` and ``those that`` in 10 000 words of the documents."""
    texts = [path.read_text() for path in [*tree.glob("*.md"), *tree.glob("docs/**/*.md")]]
    words = sum(len(text.split()) for text in texts)
    found = sum(len(re.findall(r"\b(?:those|that) of\b", text)) for text in texts)
    return 1e4 * found / words


# -- rooms and calls ---------------------------------------------------------------------


def lines_of_rooms(files: Iterable[Source]) -> dict[str, str]:
    """The lines of each room, and the names that lead where they should not."""
    texts = {source.path.as_posix(): source.text for source in files}
    lines = {room.name: 0 for room in rooms.ROOMS}
    for path, text in texts.items():
        lines[rooms.room_of(path).name] += text.count("\n")
    forbidden = sum(name.is_forbidden for name in rooms.names(texts))
    rows = {f"lines: {name}": str(count) for name, count in lines.items()}
    return {**rows, "names from the core into wings, or into products": str(forbidden)}


def walked(tree: Path) -> dict[str, str]:
    """What calls meet in the library of a checkout; empty if they do not run there."""
    command = [sys.executable, str(ROOT / "tests" / "walks.py"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tree)
    walks = json.loads(done.stdout) if not done.returncode else {}
    return {
        f"{name}: {', '.join(row)}": ", ".join(map(str, row.values()))
        for name, row in walks.items()
    }


def shared_class_names(files: Iterable[Source]) -> list[str]:
    """The names that two classes have, outside of ``fuser.te``, which has the names of others."""
    names = Counter(
        node.name.lstrip("_")
        for source in files
        if source.path.parts[0] != "te"
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


# -- the report --------------------------------------------------------------------------


def figures(tree: Path) -> dict[str, str]:
    """The rows of the report for a checkout."""
    files = sources(tree)
    code = {source.path: code_lines(source) for source in files}
    functions = [(source, function) for source in files for function in source.functions]
    sizes = [
        (body_lines(function, code[source.path]), f"{source.path}: {function.name}")
        for source, function in functions
    ]

    def most(measure: Callable[[Function], int]) -> str:
        value, source, function = max(
            ((measure(function), source, function) for source, function in functions),
            key=lambda triple: triple[0],
        )
        return f"{value} ({source.path.stem}: {function.name})"

    fillers = sum(count_names(files, name) for name in FILLERS)
    return {
        "files": str(len(files)),
        "lines": str(sum(source.text.count("\n") for source in files)),
        "lines of code": str(sum(map(len, code.values()))),
        "functions": str(len(functions)),
        "bodies of 60 lines or more": str(sum(size >= 60 for size, _ in sizes)),
        "longest body": "{} ({})".format(*max(sizes)),
        "most branches": most(branches),
        "most variables": most(variables),
        "functions of 20 branches or more": str(sum(branches(f) >= 20 for _, f in functions)),
        "functions of 20 variables or more": str(sum(variables(f) >= 20 for _, f in functions)),
        "type: ignore": str(sum(source.text.count("# type: ignore") for source in files)),
        "Any": str(count_names(files, "Any")),
        f"private names of torch outside {THE_ONE}": str(private_torch_names(files)),
        "members set from outside a class": str(set_from_outside(files)),
        f"variables called {', '.join(FILLERS)}": str(fillers),
        "class names that two classes have": str(len(shared_class_names(files))),
        "words in the table of ARCHITECTURE.md": str(concepts(tree)),
        '"those of", "that of" in 10 000 words': f"{repetitions(tree):.1f}",
        "files that name MXFP8": str(sum("MXFP8" in source.text for source in files)),
        **lines_of_rooms(files),
        **walked(tree),
    }


def of_commit(commit: str) -> dict[str, str]:
    """The rows of the report for a commit."""
    command = ["git", "-C", str(ROOT), "archive", commit]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        return figures(Path(folder))


def table(columns: dict[str, dict[str, str]]) -> str:
    """The report as a Markdown table."""
    rows = [["", *columns], ["---"] * (1 + len(columns))]
    for name in dict.fromkeys(itertools.chain(*columns.values())):
        rows.append([name, *(column.get(name, "") for column in columns.values())])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in itertools.chain(rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commits", nargs="*", help="commits to show beside this tree")
    commits = parser.parse_args().commits
    print(table({**{c: of_commit(c) for c in commits}, "this tree": figures(ROOT)}))


if __name__ == "__main__":
    main()
