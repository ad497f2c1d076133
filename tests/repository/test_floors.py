"""The packages of the library: each imports only packages before it, and no imports go round.

One table gives the order; everything else is read from the source with ``ast``.
"""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import pytest

import fuser

ROOT = Path(fuser.__file__).parent

# A package, or a module at the root, imports only those before it. Inside a package files import
# each other, without a circle, and not the package.
PACKAGES = (
    "version",
    "errors",
    "report",
    "formats",
    "source",
    "torch_private",
    "doors",
    "wrapper_tensor",
    "chain",
    "recipe",
    "cuda",
    "reference",
    "functional",
    "tensors",
    "communication",
    "gemm",
    "precision",
    "specs",
    "op",
    "basic_ops",
    "plan",
    "fused_ops",
    "runtime",
    "sequential",
    "modules",
    "moe",
    "distributed",
    "conversion",
    "inspection",
    "testing",
    "te",
    "integrations",
    "ops",
    "fuser",
    "demo",
    "__main__",
)


@dataclass(frozen=True)
class Import:
    """One import of a fuser file by another: relative paths, and the line."""

    source: str
    line: int
    target: str


def package_of(path: str) -> str:
    """The package of a file; of one at the root its own name, and fuser for the root's own.

    The command line is after all of them: it also runs the demo, which imports fuser as users do.
    """
    folder, _, _ = path.partition("/")
    name = folder.removesuffix(".py")
    return "fuser" if name == "__init__" else name


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
    place = {package: number for number, package in enumerate(PACKAGES)}
    for path, text in sorted(sources.items()):
        package = package_of(path)
        if package not in place:
            result.append(f"{path} is of no package; {package} is not in the table of this test.")
            continue
        found, relative = imports_of(path, text, files)
        result += [f"{sentence}; imports are absolute." for sentence in relative]
        for one in found:
            where = f"{path}:{one.line} imports {one.target}"
            if one.target not in files:
                result.append(f"{where}, which does not exist.")
                continue
            graph.add_edge(path, one.target)
            target = package_of(one.target)
            if is_reexport(path, one.target):
                continue
            if target == package and one.target.endswith("__init__.py"):
                result.append(f"{where}: the package that it is in.")
            elif place.get(target, -1) > place[package]:
                result.append(f"{where}: {target} comes after {package}.")
    cycles = itertools.islice(nx.simple_cycles(graph), 5)  # an import may close thousands
    return result + [f"Imports go round: {' -> '.join(cycle)}." for cycle in cycles]


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


def test_every_package_imports_only_packages_before_it() -> None:
    found = complaints(sources())
    assert not found, "\n".join(found)


def test_the_package_was_read() -> None:
    paths = sources()
    assert {"op/basic.py", "plan/planner.py", "runtime/pipeline.py", "basic_ops/moe.py"} <= set(
        paths
    )
    imports = [one for path, text in paths.items() for one in imports_of(path, text, set(paths))[0]]
    assert len(imports) > 50
    assert (
        Import("op/basic.py", imports_line("op/basic.py", "fuser.errors"), "errors.py") in imports
    )
    assert {package_of(path) for path in paths} == set(PACKAGES)
    at_root = [path for path in paths if "/" not in path]
    assert len(at_root) <= 13, "ten or so modules and the package's two: others go into packages"


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
    """Imports, docstrings, and assignments that compute nothing but the names of the imports.

    Imports may be for type checkers alone, or for all but them.
    """
    computing = (ast.Call, ast.Lambda, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp)
    nodes: list[ast.stmt] = []
    for node in ast.parse(sources()[path]).body:
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        nodes += node.body if is_for_types else [node]
    for node in nodes:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_alias = isinstance(node, (ast.Assign, ast.AnnAssign)) and not any(
            isinstance(part, computing)
            for part in ast.walk(node)
            if not ast.unparse(part).startswith(("_public_names(", "vars()"))
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


def test_every_warning_has_a_category_that_a_suite_can_name() -> None:
    """Else ``-W error`` cannot leave out the warnings of fuser without those of other libraries."""
    categories = {}
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn"):
                named = [keyword.value for keyword in node.keywords if keyword.arg == "category"]
                category = [*node.args[1:2], *named]
                categories[f"{path}:{node.lineno}"] = ast.unparse(category[0]) if category else ""
    assert "EmulationWarning" in categories.values()
    own = ("EmulationWarning", "FuserWarning", "DeprecationWarning")
    assert {place: name for place, name in categories.items() if name not in own} == {}


# -- the rules themselves -------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"op.py": "from fuser.runtime import cut", "runtime/cut.py": ""},
         ["op.py:1", "imports runtime/cut.py", "runtime comes after op"]),
        ({"op.py": "def f():\n    from fuser.runtime.cut import g\n", "runtime/cut.py": ""},
         ["op.py:2", "runtime/cut.py"]),
        ({"basic_ops/bias.py": "from fuser.basic_ops import X", "basic_ops/__init__.py": ""},
         ["basic_ops/bias.py:1", "basic_ops/__init__.py", "the package that it is in"]),
        ({"plan/graph.py": "from fuser.fused_ops import X", "fused_ops/__init__.py": ""},
         ["plan/graph.py:1", "fused_ops/__init__.py", "fused_ops comes after plan"]),
        ({"op.py": "from . import errors", "errors.py": ""}, ["op.py:1", "absolute"]),
        ({"helpers.py": ""}, ["helpers.py", "no package"]),
        ({"helpers/linear.py": ""}, ["helpers/linear.py", "no package"]),
        ({"op.py": "from fuser.nowhere import x"}, ["op.py:1", "nowhere.py", "does not exist"]),
        ({"plan/plan.py": "import fuser.plan.window", "plan/window.py": "import fuser.plan.plan"},
         ["Imports go round", "plan/plan.py", "plan/window.py"]),
    ],
)  # fmt: skip
def test_a_broken_rule_is_reported_with_file_and_line(
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
        "basic_ops/linear.py": "from fuser.basic_ops.bias import Bias\n",
        "fused_ops/linear.py": "from fuser.basic_ops import Bias\n",
        "__init__.py": "from fuser.fused_ops.linear import Linear\n",
    }
    assert complaints(house) == []
