"""The floors of the house: a file imports from lower floors only, and nothing goes round.

One table gives each file its floor; everything else is read from the source with ``ast``.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import networkx as nx
import pytest

import fuser

ROOT = Path(fuser.__file__).parent

# The first pattern that fits a path decides. Paths are relative to the package.
FLOORS = (
    ("errors.py", 0),
    ("formats.py", 1),
    ("version.py", 0),
    ("recipe.py", 1),
    ("written.py", 1),
    ("graph_break.py", 1),
    ("module_calls.py", 1),
    ("cuda/arguments.py", 1),
    ("cuda/module.py", 1),
    ("cuda/chain.py", 2),
    ("cuda/launch.py", 2),
    ("cuda/norm_operands.py", 2),
    ("cuda/operands.py", 2),
    ("reference/activation.py", 2),
    ("reference/dropout.py", 2),
    ("reference/fp8.py", 2),
    ("native_gemm.py", 2),
    ("cuda/*.py", 3),
    ("reference/*.py", 3),
    ("tensors/wrapper.py", 2),
    ("tensors/base.py", 3),
    ("tensors/dequantized_view.py", 4),
    ("functional/values.py", 3),
    ("functional/*.py", 4),
    ("tensors/quantizer.py", 4),
    ("tensors/compatibility.py", 6),
    ("tensors/*.py", 5),
    ("gemm.py", 6),
    ("collectives.py", 6),
    ("plan_key.py", 6),
    ("role_quantizers.py", 6),
    ("precision.py", 7),
    ("availability.py", 7),
    ("linear_operands.py", 7),
    ("delayed_scaling.py", 8),
    ("recomputation.py", 8),
    ("op.py", 9),
    ("plan.py", 9),
    ("window.py", 9),
    ("basic_ops/*.py", 10),
    ("signature.py", 10),
    ("blame.py", 10),
    ("fused_ops/*.py", 11),
    ("graph.py", 11),
    ("catalog.py", 12),
    ("checks.py", 12),
    ("layout.py", 12),
    ("padding.py", 12),
    ("planner.py", 12),
    ("plan_writer.py", 12),
    ("executor.py", 13),
    ("pipeline.py", 14),
    ("group.py", 15),
    ("picture.py", 15),
    ("grouping.py", 16),
    ("cuda_graph.py", 16),
    ("draw.py", 16),
    ("doctor.py", 16),
    ("sequential.py", 17),
    ("modules/*.py", 18),
    ("compatibility/*.py", 18),
    ("ops/*.py", 18),
    ("__init__.py", 19),
    ("__main__.py", 19),
)


@dataclass(frozen=True)
class Import:
    """One import of a fuser file by another: relative paths, and the line."""

    source: str
    line: int
    target: str


def floor_of(path: str) -> int | None:
    """The floor of a file, None where the table has none."""
    # A folder's __init__ stands on the folder's floor; fnmatch's * would also
    # cross folders, so the depth has to agree.
    for pattern, floor in FLOORS:
        if fnmatch(path, pattern) and path.count("/") == pattern.count("/"):
            return floor
    return None


def imports_of(path: str, text: str, files: set[str]) -> tuple[list[Import], list[str]]:
    """The fuser files that ``path`` imports, and sentences about imports that are not absolute."""
    found: list[Import] = []
    relative: list[str] = []
    for node in ast.walk(ast.parse(text)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                dots = "." * node.level
                relative.append(f"{path}:{node.lineno} imports from {dots}{node.module or ''}")
                continue
            # ``from fuser import gemm`` imports a file, ``from fuser.op import X`` a name in one.
            module = node.module or ""
            whole = [f"{module}.{alias.name}" for alias in node.names]
            targets = [n if existing(n, files) in files else module for n in whole]
        for name in targets:
            if name.partition(".")[0] == "fuser":
                found.append(Import(path, node.lineno, existing(name, files)))
    return found, relative


def file_of(name: str) -> str:
    """The relative path of the module with a dotted name."""
    return "/".join(name.split(".")[1:]) + ".py"


def existing(name: str, files: set[str]) -> str:
    """The file behind a dotted name: the module, or else the package's ``__init__``."""
    package = "/".join([*name.split(".")[1:], "__init__.py"])
    return package if package in files else file_of(name)


def complaints(sources: dict[str, str]) -> list[str]:
    """Everything in ``sources``, a mapping of paths to texts, that breaks a rule of the house."""
    result: list[str] = []
    files = set(sources)
    graph = nx.DiGraph()
    for path, text in sorted(sources.items()):
        floor = floor_of(path)
        if floor is None:
            result.append(f"{path} stands on no floor; give it one in the table of this test.")
            continue
        found, relative = imports_of(path, text, files)
        result += [f"{sentence}; imports are absolute." for sentence in relative]
        for one in found:
            target_floor = floor_of(one.target)
            where = f"{path}:{one.line} (floor {floor}) imports {one.target} (floor {target_floor})"
            if one.target not in files:
                result.append(f"{path}:{one.line} imports {one.target}, which does not exist.")
                continue
            graph.add_edge(path, one.target)
            if target_floor is None or is_reexport(path, one.target):
                continue
            if target_floor == floor:
                result.append(f"{where}: a neighbour on the same floor.")
            elif target_floor > floor:
                result.append(f"{where}: only lower floors may be imported.")
    result += [f"Imports go round: {' -> '.join(cycle)}." for cycle in nx.simple_cycles(graph)]
    return result


def is_reexport(path: str, target: str) -> bool:
    """Whether a package's ``__init__`` imports one of its own files."""
    folder, _, name = path.rpartition("/")
    return bool(folder) and name == "__init__.py" and target.rpartition("/")[0] == folder


def sources() -> dict[str, str]:
    """The text of every file of the package, by its relative path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.rglob("*.py"))
    }


def test_every_file_has_a_floor_and_imports_only_lower_ones() -> None:
    found = complaints(sources())
    assert not found, "\n".join(found)


def test_the_package_was_read() -> None:
    paths = sources()
    assert {"op.py", "planner.py", "pipeline.py", "basic_ops/bias.py"} <= set(paths)
    imports = [one for path, text in paths.items() for one in imports_of(path, text, set(paths))[0]]
    assert len(imports) > 50
    assert Import("op.py", imports_line("op.py", "fuser.errors"), "errors.py") in imports


def imports_line(path: str, module: str) -> int:
    """The line on which ``path`` imports from ``module``."""
    lines = sources()[path].splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.startswith(f"from {module} "))


def test_only_one_file_imports_cupy() -> None:
    importers = {
        f"{path}:{node.lineno}"
        for path, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if "cupy" in imported_roots(node)
    }
    assert {one.partition(":")[0] for one in importers} <= {"cuda/module.py"}, importers


def imported_roots(node: ast.AST) -> set[str]:
    """The top-level packages that a statement imports, or a call of ``import_module`` names."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {(node.module or "").partition(".")[0]}
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in ("import_module", "__import__"):
            return {str(node.args[0].value).partition(".")[0]}
    return set()


@pytest.mark.parametrize("path", [p for p in sources() if p.endswith("__init__.py")])
def test_an_init_file_only_reexports(path: str) -> None:
    """Imports, docstrings, and assignments that compute nothing, such as ``__all__``.

    Imports may be for type checkers alone, or for all but them.
    """
    computing = (ast.Call, ast.Lambda, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp)
    nodes: list[ast.stmt] = []
    for node in ast.parse(sources()[path]).body:
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        nodes += node.body if is_for_types else [node]  # type: ignore[attr-defined]
    for node in nodes:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_alias = isinstance(node, (ast.Assign, ast.AnnAssign)) and not any(
            isinstance(part, computing) for part in ast.walk(node)
        )
        assert isinstance(node, (ast.Import, ast.ImportFrom)) or is_docstring or is_alias, (
            f"{path}:{node.lineno} holds a {type(node).__name__}; it only re-exports."
        )


def test_every_file_says_its_subject_first() -> None:
    silent = [
        path
        for path, text in sources().items()
        if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


# -- the rules themselves -------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"errors.py": "", "op.py": "from fuser import draw", "draw.py": ""},
         ["op.py:1 (floor 9)", "draw.py (floor 16)", "lower"]),
        ({"op.py": "def f():\n    from fuser.draw import g\n", "draw.py": ""},
         ["op.py:2 (floor 9)", "draw.py (floor 16)"]),
        ({"basic_ops/bias.py": "import fuser.basic_ops.reshape", "basic_ops/reshape.py": ""},
         ["basic_ops/bias.py:1 (floor 10)", "basic_ops/reshape.py (floor 10)", "neighbour"]),
        ({"basic_ops/bias.py": "from fuser.basic_ops import X", "basic_ops/__init__.py": ""},
         ["basic_ops/bias.py:1 (floor 10)", "basic_ops/__init__.py (floor 10)", "neighbour"]),
        ({"graph.py": "from fuser.fused_ops import X", "fused_ops/__init__.py": ""},
         ["graph.py:1 (floor 11)", "fused_ops/__init__.py (floor 11)", "neighbour"]),
        ({"op.py": "from . import errors", "errors.py": ""}, ["op.py:1", "absolute"]),
        ({"helpers.py": ""}, ["helpers.py", "no floor"]),
        ({"modules/deeper/linear.py": ""}, ["modules/deeper/linear.py", "no floor"]),
        ({"op.py": "from fuser.nowhere import x"}, ["op.py:1", "nowhere.py", "does not exist"]),
        ({"plan.py": "import fuser.window", "window.py": "import fuser.plan"},
         ["Imports go round", "plan.py", "window.py"]),
    ],
)  # fmt: skip
def test_a_broken_rule_is_reported_with_file_line_and_floors(
    broken: dict[str, str], words: list[str]
) -> None:
    report = "\n".join(complaints(broken))
    assert all(word in report for word in words), report


def test_what_the_house_allows_is_not_reported() -> None:
    house = {
        "errors.py": "import torch\n",
        "op.py": "from fuser.errors import E\n",
        "basic_ops/__init__.py": "from fuser.basic_ops.bias import Bias\n",
        "basic_ops/bias.py": "from fuser import errors\nfrom fuser.op import B\n",
        "fused_ops/linear.py": "from fuser.basic_ops import Bias\n",
        "__init__.py": "from fuser.fused_ops.linear import Linear\n",
    }
    assert complaints(house) == []
