"""Finds private names of torch, and looks at the Python stack, in sources."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator

# Methods and tables of Module and Tensor that subclasses override and read, and what torch's
# documents name.
OF_SUBCLASSES = {
    *("_apply", "_buffers", "_modules", "_parameters", "_load_from_state_dict", "_replace_all"),
    *("_save_to_state_dict", "_non_persistent_buffers_set", "_get_name", "_named_members"),
    *("_version", "_base", "_backward_hooks", "_hook_methods", "_is_view"),
}
OF_NAMED_TUPLES = {"_asdict", "_fields", "_replace"}
STACK = {"_getframe", "f_back", "f_locals", "currentframe", "stack"}


def defined(trees: Iterable[ast.Module]) -> set[str]:
    """Every name that is defined, assigned or spelled out in the sources."""
    names: set[str] = set()
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # of __slots__, and of attributes that are set by name
    return names


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _chain(node: ast.expr) -> str:
    """``torch._C._nn.gelu`` of such an expression; empty if it does not begin with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (chain := _chain(node.value)):
        return f"{chain}.{node.attr}"
    return ""


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names of torch, and the looks at the stack, in a source with ``own`` names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [*module.split("."), *(alias.name for alias in node.names)]
            if module.split(".")[0] == "torch" and any(map(_private, names)):
                yield f"{node.lineno}: from {module} import {', '.join(names)}"
        elif isinstance(node, ast.Attribute):
            chain = _chain(node)
            if chain.split(".")[0] in ("aten", "_aten") or chain.startswith("torch.ops.aten"):
                continue  # the names of operators that __torch_dispatch__ gets
            is_torchs = chain.startswith("torch.") and any(map(_private, chain.split(".")))
            known = OF_SUBCLASSES | OF_NAMED_TUPLES
            is_foreign = _private(node.attr) and node.attr not in own | known
            is_known = node.attr in known and chain.count("._") == 1
            if (is_torchs and not is_known) or is_foreign or node.attr in STACK - {"stack"}:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split(".")
            if words[0] == "torch" and " " not in node.value and any(map(_private, words)):
                yield f"{node.lineno}: {node.value!r}"
