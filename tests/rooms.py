"""The rooms of the library: a core, wings that plug into it, and products that nothing needs.

    python tests/rooms.py            # lines of each room, names that lead where they should not
    python tests/rooms.py -v         # each of these names
    python tests/rooms.py experts    # the files of a room, and what each is for

The core is what a dense block needs, eager, on a CPU and on a GPU. A wing imports the core, and a
product imports both. The core imports neither, and nothing imports a product.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LIBRARY = Path(__file__).parents[1] / "fuser"

Kind = Literal["core", "wing", "product"]


@dataclass(frozen=True)
class Room:
    """Files that belong together: folders, which end with a slash, and files without ``.py``."""

    name: str
    kind: Kind
    places: tuple[str, ...]


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


CORE = Room(
    "core",
    "core",
    # All that is in no other room, and these, whose folders are.
    ("report/__init__", "report/text", "communication/"),
)
ROOMS = (
    CORE,
    Room(
        "experts",
        "wing",
        (
            *("moe/", "gemm/grouped", "gemm/quantized_groups", "modules/grouped_linear"),
            *_in("basic_ops", "expert_parallel", "grouped_linear", "grouped_loop"),
            *_in("basic_ops", "grouped_parameters", "grouped_products", "moe"),
            *_in("fused_ops", "dispatched_experts", "grouped_mlp"),
            *_in("cuda", "grouped", "grouped_gemm", "permutation"),
            *_in("reference", "grouped", "permutation"),
            *_in("functional", "grouped", "permutation", "routing"),
            *_in("tensors", "group_formats", "grouped", "stacks"),
        ),
    ),
    Room(
        "sharding",
        "wing",
        (
            *("distributed/", "precision/amax_reduction", "runtime/local_parts"),
            *_in("tensors", "gathering", "joined_gathering", "loading", "master_weight"),
            "tensors/sharding",
            *_in("basic_ops", "collectives", "linear_parallel"),
            "modules/parallel",
        ),
    ),
    Room("conversion", "wing", ("conversion/",)),
    Room(
        "compile",
        "wing",
        (
            *_in("runtime", "compiled", "compiled_passes", "compiled_runner", "compiled_values"),
            *_in("runtime", "exported", "graph_parameters", "joined_weights", "traced"),
            *("moe/graph_operations", "op/graph_operations", "precision/numbered_calls"),
        ),
    ),
    Room(
        "recording",
        "wing",
        ("cuda/pass_graphs", "cuda/repeated", "cuda/sequence", "runtime/recorded"),
    ),
    Room(
        "model plans",
        "wing",
        (
            *_in("plan", "model", "plain_torch", "torch_calls", "transformers"),
            "runtime/model_plan",
            "modules/decoder",
        ),
    ),
    Room("capture", "wing", _in("runtime", "captured", "graphed", "graphs")),
    Room("layers", "wing", ("modules/",)),
    Room("checks", "wing", ("testing/",)),
    Room("LoRA", "wing", _in("basic_ops", "lora_adapters", "lora_linear")),
    Room(
        "memory plans",
        "wing",
        (
            *_in("plan", "kept", "memory_curve", "rebuilt"),
            "runtime/repeated_forward",
        ),
    ),
    Room("cuts", "wing", ("plan/cuts", "runtime/cut", "runtime/split_backward")),
    Room("AdamW", "wing", ("cuda/adamw", "functional/adamw", "reference/adamw")),
    Room("notes", "wing", ("runtime/notes",)),
    Room("te", "product", ("te/", "ops/")),
    Room("demo", "product", ("demo/",)),
    Room("inspection", "product", ("inspection/",)),
    Room("pictures", "product", ("report/",)),
    Room("integrations", "product", ("integrations/",)),
    Room("doctor", "product", ("testing/doctor",)),
    Room("command line", "product", ("__main__",)),
)


def room_of(path: str) -> Room:
    """The room of a file: that of the longest place that has it, and the core of others."""
    name = path.removesuffix(".py")

    def length(place: str) -> int:
        has = name.startswith(place) if place.endswith("/") else name == place
        return len(place) if has else -1

    longest, room = max(
        ((max(map(length, room.places)), room) for room in ROOMS), key=lambda pair: pair[0]
    )
    return CORE if longest < 0 else room


@dataclass(frozen=True)
class Name:
    """A name that a file imports from another one of the library."""

    path: str
    line: int
    target: str
    name: str
    is_lazy: bool
    """Whether a function imports it, when it is called."""

    @property
    def rooms(self) -> tuple[Room, Room]:
        """The rooms of the file, and of where the name is defined."""
        return room_of(self.path), room_of(self.target)

    @property
    def is_forbidden(self) -> bool:
        """Whether it leads from the core into a wing, or into a product from elsewhere.

        A function may import a product when it is called, and the command line may import all.
        """
        source, target = self.rooms
        if source == target or source.name == "command line":
            return False
        if target.kind == "product":
            return not self.is_lazy
        return source is CORE


def sources() -> dict[str, str]:
    """The text of every file of the library, by its relative path."""
    return {
        path.relative_to(LIBRARY).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(LIBRARY.rglob("*.py"))
    }


def names(texts: Mapping[str, str]) -> Iterator[Name]:
    """All names that files import from each other, but for packages that only re-export."""
    for path, text in texts.items():
        if path.endswith("__init__.py"):
            continue
        tree = ast.parse(text)
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        lazy = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            first, *folders = node.module.split(".")
            if first != "fuser" or node.level:
                continue
            for alias in node.names:
                target = defining("/".join(folders), alias.name, texts)
                if target is not None:
                    yield Name(path, node.lineno, target, alias.name, id(node) in lazy)


def defining(module: str, name: str, texts: Mapping[str, str]) -> str | None:
    """The file that defines a name of ``module``, which may be a package that re-exports it."""
    for path in (f"{module}/{name}.py", f"{module}/{name}/__init__.py", f"{module}.py"):
        if path.lstrip("/") in texts:
            return path.lstrip("/")
    package = f"{module}/__init__.py".lstrip("/")
    for node in ast.walk(ast.parse(texts.get(package, ""))):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        source = "/".join(node.module.split(".")[1:])
        if any(name in (alias.asname, alias.name) for alias in node.names):
            return defining(source, name, texts)
        if node.names[0].name == "*":
            target = defining(source, name, texts)
            if target is not None and f'"{name}"' in texts[target]:  # in its __all__
                return target
    return package if package in texts else None


def files_of(room: str, texts: Mapping[str, str]) -> Iterator[str]:
    """A line for each file of a room: its path, and the first sentence of its docstring."""
    for path, text in texts.items():
        if room_of(path).name == room:
            about = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
            yield f"{path:36} {' '.join(about.split())}"


def main() -> None:
    texts = sources()
    for room in ROOMS:
        if room.name in sys.argv[1:]:
            print(*files_of(room.name, texts), sep="\n")
            return
    forbidden = [name for name in names(texts) if name.is_forbidden]
    lines: Counter[Room] = Counter()
    for path, text in texts.items():
        lines[room_of(path)] += text.count("\n")
    pairs = Counter(tuple(room.name for room in name.rooms) for name in forbidden)
    for room in ROOMS:
        print(f"{room.kind:8} {room.name:16} {lines[room]:6} lines")
    print(f"{sum(lines.values())} lines; {len(forbidden)} names that lead where they should not:")
    for (source, target), count in pairs.most_common():
        print(f"  {source} to {target}: {count}")
        for name in forbidden if "-v" in sys.argv else ():
            if tuple(room.name for room in name.rooms) == (source, target):
                print(f"    {name.path}:{name.line} {name.target} {name.name}")


if __name__ == "__main__":
    main()
