"""The library without a wing or a product: it trains the same, and tests of the core pass.

    make wing-out WING=cuts
    python tests/wing_out.py "memory plans" --seconds 300 -- -n0

A copy of the repository loses the files of the wing, and those that import them. Packages lose the
names that they have from these files; who uses one is told so. A dense block then has the losses
of the whole library, under each recipe. Tests of ops, tensors and recipes that lead to no lost file
follow: as many as take ``--seconds`` by ``tests/seconds.json``. pytest gets what is after ``--``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import rooms
from affected import ROOT, Imports, known_seconds, within

FOLDERS = ("ops", "recipes", "tensors")
SECONDS = 60.0
LIST_LOSSES = "--list-losses"


def lost_files(room: str, texts: Mapping[str, str]) -> dict[str, str]:
    """The files of a room, and those that import them when they are imported; each with its room.

    Raises
    ------
    SystemExit
        If there is no such wing or product, or a file of the core is among them.
    """
    outside = [one.name for one in rooms.ROOMS if one.kind != "core"]
    if room not in outside:
        raise SystemExit(f"there is no wing or product {room!r}; there are {', '.join(outside)}.")
    names = [name for name in rooms.names(texts) if not name.is_lazy]
    lost = {path for path in texts if rooms.room_of(path).name == room}
    while more := {n.path for n in names if n.target in lost} - lost:
        lost |= more
    owners = {path: rooms.room_of(path).name for path in sorted(lost)}
    if core := [path for path, owner in owners.items() if owner == rooms.CORE.name]:
        raise SystemExit(f"the core imports {room}: {', '.join(core)}.")
    return owners


def without_names(path: str, texts: Mapping[str, str], lost: Mapping[str, str]) -> str:
    """The text of a package's ``__init__`` without the names of lost files.

    An attribute of this name is an error that names the room.
    """
    absent: dict[str, str] = {}

    class Transformer(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | ast.Pass:
            kept = []
            for alias in node.names:
                module = (node.module or "").partition(".")[2].replace(".", "/")
                target = rooms.defining(module, alias.name, texts)
                if target in lost and (node.module or "").partition(".")[0] == "fuser":
                    absent[alias.asname or alias.name] = lost[target]
                else:
                    kept.append(alias)
            node.names = kept
            return node if kept else ast.Pass()

        def visit_List(self, node: ast.List) -> ast.List:  # __all__, which comes after the imports
            node.elts = [e for e in node.elts if _text(e) not in absent]
            return node

    tree = Transformer().visit(ast.parse(texts[path]))
    if not absent:
        return texts[path]
    return f"{ast.unparse(tree)}\n\n_absent = {absent!r}\n{_GETATTR}"


_GETATTR = """
_missing = globals().get("__getattr__")


def __getattr__(name):
    if name in _absent:
        raise AttributeError(f"{__name__}.{name} is of {_absent[name]}, which is not here.")
    if _missing is not None:
        return _missing(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
"""


def _text(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def copy_without(lost: Mapping[str, str], texts: Mapping[str, str], to: Path) -> None:
    """Copy the files of the repository but for the lost ones."""
    listed = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    files = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    for file in filter(None, files):
        inside = file.removeprefix("fuser/") if file.startswith("fuser/") else None
        if inside in lost or not (ROOT / file).exists():
            continue
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        if inside is not None and inside.endswith("__init__.py"):
            (to / file).write_text(without_names(inside, texts, lost), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / file, to / file)


def core_tests(lost: Iterable[str], seconds: float) -> list[str]:
    """Test files that lead to no lost file."""
    imports = Imports()
    gone = {"fuser." + path.removesuffix(".py").replace("/", ".") for path in lost}
    reached = imports.away(gone & imports.modules.keys())
    tests = {
        module.path.relative_to(ROOT).as_posix(): 1
        for name, module in imports.modules.items()
        if module.is_test and module.path.parent.name in FOLDERS and name not in reached
    }
    return within(tests, seconds, known_seconds())


def losses() -> dict[str, list[float]]:
    """Three steps of a dense block without a recipe, and under each."""
    import torch

    import fuser

    recipes = fuser.recipe
    kinds = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
    of_recipe: dict[str, list[float]] = {}
    for name in ("none", *kinds, "MXFP8BlockScaling", "NVFP4BlockScaling"):
        torch.manual_seed(0)
        block = fuser.Sequential(
            fuser.RMSNorm(128),
            fuser.Linear(128, 256),
            fuser.SwiGLU(),
            fuser.Linear(128, 128),
        )
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        recipe = None if name == "none" else getattr(recipes, name)()
        of_recipe[name] = []
        for _ in range(3):
            with fuser.autocast(enabled=recipe is not None, recipe=recipe):
                loss = block(torch.randn(128, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            of_recipe[name].append(loss.item())
    return of_recipe


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *arguments]
    is_read = LIST_LOSSES in arguments
    return subprocess.run(
        command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE if is_read else None
    )


def main(arguments: Sequence[str]) -> int:
    if [*arguments] == [LIST_LOSSES]:
        print(json.dumps(losses()))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("room", help="a wing or a product of tests/rooms.py")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU time of the tests")
    parser.add_argument("flags", nargs="*", help="options of pytest")
    options = parser.parse_args(arguments)
    texts = rooms.sources()
    lost = lost_files(options.room, texts)
    others = sorted({*lost.values()} - {options.room})
    print(f"{options.room} is out: {len(lost)} files, with files of {', '.join(others) or 'it'}.")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_without(lost, texts, copy)
        script = Path("tests", "wing_out.py")
        runs = [_run(root, str(root / script), LIST_LOSSES) for root in (ROOT, copy)]
        if any(run.returncode for run in runs):
            return 1
        whole, rest = (json.loads(run.stdout) for run in runs)
        if whole != rest:
            print(f"the losses are {rest}, and those of the whole library {whole}.")
            return 1
        print(f"{len(whole)} trainings of a dense block have the same losses.")
        tests = core_tests(lost, options.seconds)
        if not tests:
            return 0
        return _run(
            copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options.flags, *tests
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
