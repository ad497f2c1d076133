"""The test files that a change may affect, found in the imports: ``make test-fast``.

    python tests/affected.py                        # what differs from main, or is not committed
    python tests/affected.py --since HEAD~3 --steps 4

A test file is chosen if at most ``--steps`` imports lead from it to a changed file. An import leads
to the files that define the names it uses, through packages that only pass them on. A source of
kernels counts as its launchers, and a file that is no Python as the tests that name it. After a
change of what all tests share, all are chosen.

In two steps a change of a file of the library leads to a quarter of the test files on average, and
for five of six mutants (tests/mutants) to one that notices it. Of these as many are chosen as take
``--seconds`` of CPU time by ``tests/seconds.json``: the nearest first, and of equally near ones the
quickest. The others are named. ``make test`` runs all.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 2
# Of two cores for five minutes, of which starting and collecting take some.
SECONDS = 480.0
PACKAGES = ("fuser", "forecast/fuser_forecast", "tests/emulator", "tests/mutants")
# Folders whose files are imported by their bare names; those of ``tests/`` too.
FLAT = ("examples", "benchmarks")
SHARED = ("tests/conftest.py", "pyproject.toml", "constraints.txt", "Makefile")
# Tests that read files instead of importing them: after a change of which.
READERS = {
    "fuser/*.py": ("test_floors", "test_messages", "test_mutants", "test_torch_private"),
    "tests/*.py": ("test_mutants",),
    "docs/site/*": ("test_messages", "test_site"),
    "*.md": ("test_documents", "test_document_code"),
    ".github/*": ("test_workflows",),
    "setup.py": ("test_distribution",),
    "tests/emulator/*": ("emulator.compile",),
}


@dataclass(frozen=True)
class Module:
    """A Python file of the repository, under the name by which it is imported."""

    name: str
    path: Path

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def is_test(self) -> bool:
        return self.path.name.startswith("test_") and self.path.parent.name != "gpu"

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The syntax tree without what only a type checker reads.

        A package has these names by its ``__getattr__``.
        """
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        return tuple(ast.walk(tree) if self.is_package else _executed(tree))

    @functools.cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """What each imported name is: a module, and the name in it, "" for the module itself."""
        names: dict[str, tuple[str, str]] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                source = self._source(node)
                names |= {a.asname or a.name: (source, a.name) for a in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    names[alias.asname or top] = (alias.name if alias.asname else top, "")
        return names

    def _source(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        above = self.name.split(".")
        above = above[: len(above) - node.level + self.is_package]
        return ".".join([*above, *([node.module] if node.module else [])])

    @functools.cached_property
    def texts(self) -> frozenset[str]:
        """The strings in it."""
        constants = (n.value for n in self.nodes if isinstance(n, ast.Constant))
        return frozenset(value for value in constants if isinstance(value, str))


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in _chain(node.test):
            continue
        yield node
        left.extend(ast.iter_child_nodes(node))


def _chain(node: ast.AST) -> list[str]:
    """The names of ``a.b.c``; the first is empty if an expression comes before the first dot."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(names)]


class Imports:
    """Which file of a repository imports which.

    Parameters
    ----------
    root
        The repository.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for package in PACKAGES:
            top = (root / package).parent
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(top).with_suffix("").parts
                self._add(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path)
        folders = [folder for folder in (root / "tests").glob("*/") if folder.name != "__pycache__"]
        for folder in (*(root / name for name in FLAT), root / "tests", *folders):
            if not (folder / "__init__.py").exists():
                for path in sorted(folder.glob("*.py")):
                    self._add(path.stem, path)

    def _add(self, name: str, path: Path) -> None:
        self.modules.setdefault(name, Module(name, path))

    def defining(self, module: str, name: str) -> str | None:
        """The module that has ``name`` of ``module``, past packages that import it; or None."""
        if module not in self.modules:
            return None
        imports = self.modules[module].imports
        source, inner = imports.get(name, (module, name))
        if name not in imports and "*" in imports and self._has(imports["*"][0], name):
            source = imports["*"][0]
        if self.modules[module].is_package and (source, inner) != (module, name):
            return source if not inner else self.defining(source, inner)
        return f"{module}.{name}" if f"{module}.{name}" in self.modules else module

    def _has(self, module: str, name: str) -> bool:
        """Whether a module has a name in its ``__all__``, or is a package that imports it."""
        inside = self.modules[module]
        if name in inside.imports or name in inside.texts:
            return True
        return "*" in inside.imports and self._has(inside.imports["*"][0], name)

    @functools.cache  # noqa: B019 - as long as the process
    def imported_by(self, name: str) -> frozenset[str]:
        """The modules whose names a module uses."""
        module = self.modules[name]
        packages: dict[str, str] = {}
        used: set[str | None] = set()
        for local, (source, inner) in module.imports.items():
            target = self.defining(source, inner) if inner else source
            if target in self.modules and self.modules[target].is_package:
                packages[local] = target
            used.add(target)
        for node in module.nodes:
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute):
                first, *names = _chain(node)
                if first in packages:
                    used.add(self._followed(packages[first], names))
        used |= self._registering(name.rpartition(".")[0])
        return frozenset(
            target
            for target in used
            if target in self.modules and target != name and not self.modules[target].is_package
        )

    def _followed(self, package: str, names: Sequence[str]) -> str | None:
        target: str | None = package
        for name in names:
            if target not in self.modules or not self.modules[target].is_package:
                break
            target = self.defining(target, name)
        return target

    def _registering(self, package: str) -> set[str]:
        """The modules that a package imports whole, for what they register."""
        if "." not in package or package not in self.modules:
            return set()
        imports = self.modules[package].imports.values()
        return {f"{source}.{name}" for source, name in imports if source == package}

    def away(self, changed: Iterable[str]) -> dict[str, int]:
        """How many imports lead from each module to the nearest of ``changed``."""
        importers: dict[str, set[str]] = {}
        for name in self.modules:
            for imported in self.imported_by(name):
                importers.setdefault(imported, set()).add(name)
        steps = dict.fromkeys(changed, 0)
        reached = list(steps)
        for name in reached:  # grows
            for importer in importers.get(name, ()):
                if importer not in steps:
                    steps[importer] = steps[name] + 1
                    reached.append(importer)
        return steps

    def changed_by(self, file: str) -> set[str]:
        """The modules that a changed file counts as."""
        path = self.root / file
        readers = {
            name
            for pattern in READERS
            if fnmatch.fnmatch(file, pattern)
            for name in READERS[pattern]
        }
        if path.suffix in (".cu", ".cuh"):
            return readers | self._launchers(path)
        if path.suffix == ".py":
            return readers | {name for name, m in self.modules.items() if m.path == path}
        named = (n for n, m in self.modules.items() if any(path.name in t for t in m.texts))
        return readers | {name for name in named if self.modules[name].is_test}

    def _launchers(self, path: Path) -> set[str]:
        """The modules that name a source of kernels, or one that includes a header."""
        including = {path}
        sources = {
            p: set(re.findall(r"#include [<\"](.*)[>\"]", p.read_text(encoding="utf-8")))
            for folder in (self.root / "fuser", self.root / "tests")
            for p in folder.rglob("*.cu*")
        }
        while more := {
            source
            for source, headers in sources.items()
            if source not in including
            and any(p.as_posix().endswith(f"/{h}") for p in including for h in headers)
        }:
            including |= more
        names = {name for p in including if p.suffix == ".cu" for name in (p.stem, p.name)}
        return {
            name
            for name, module in self.modules.items()
            if names & module.texts and (name.startswith("fuser.cuda.") or module.is_test)
        }

    def tests(self, files: Iterable[str], steps: int = STEPS) -> list[str]:
        """The test files that at most ``steps`` imports separate from changed files."""
        return sorted(self.nearest(files, steps))

    def nearest(self, files: Iterable[str], steps: int = STEPS) -> dict[str, int]:
        """Those test files, and how many imports separate each from the nearest changed file."""
        changed: set[str] = set()
        for file in files:
            if file in SHARED:
                steps, changed = 0, {n for n, m in self.modules.items() if m.is_test}
                break
            changed |= self.changed_by(file)
        away = self.away(changed & self.modules.keys())
        near = ((self.modules[name], count) for name, count in away.items() if count <= steps)
        return {m.path.relative_to(self.root).as_posix(): n for m, n in near if m.is_test}


def within(near: Mapping[str, int], seconds: float, known: Mapping[str, float]) -> list[str]:
    """As many test files as take ``seconds``: the nearest first, then the quickest.

    A file that is not among the ``known`` ones takes their median. Changed files are always chosen.
    """
    usual = statistics.median(known.values()) if known else 0.0
    chosen: list[str] = []
    left = seconds
    for file in sorted(near, key=lambda file: (near[file], known.get(file, usual), file)):
        taken = known.get(file, usual)
        if near[file] == 0 or taken <= left:
            chosen.append(file)
            left -= taken
    return sorted(chosen)


def known_seconds(root: Path = ROOT) -> dict[str, float]:
    """The CPU seconds of test files as they were measured; ``pytest --write-seconds`` does it."""
    file = root / "tests" / "seconds.json"
    known: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return known


def changed_files(since: str | None, root: Path = ROOT) -> list[str]:
    """Files that differ from a commit, or are new; from the last one on main if it is None."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    if since is None:
        has_main = git("branch", "--list", "main", "--format=%(refname)")
        (since,) = git("merge-base", "HEAD", "main") if has_main else ["HEAD"]
    return sorted(
        {*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--since", help="a commit; the last one that main has too")
    parser.add_argument("--steps", type=int, default=STEPS, help="imports to follow")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU time of what is chosen")
    options = parser.parse_args(arguments)
    files = changed_files(options.since)
    near = Imports().nearest(files, options.steps)
    tests = within(near, options.seconds, known_seconds())
    print(f"{len(files)} changed files, {len(tests)} test files for them.", file=sys.stderr)
    if left_out := sorted(near.keys() - set(tests)):
        print(f"For {options.seconds:g} s too much: {' '.join(left_out)}", file=sys.stderr)
    print("\n".join(tests))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
