"""The entries of the activations: ``.. activations:: plain``, ``gated`` or ``scaled`` in a page."""

from __future__ import annotations

import re
from typing import Any

import fuser
from fuser.basic_ops import activation


def entries(kind: str) -> str:
    """A directive for each public activation of a kind, in the order of the file."""
    public = set(activation.__all__) - {"Activation"}
    names: dict[str, list[str]] = {"plain": [], "gated": [], "scaled": []}
    for name, cls in vars(activation).items():
        if name in public:
            is_scaled = not issubclass(cls, fuser.Activation)
            is_gated = not is_scaled and cls().function.is_gated
            names["scaled" if is_scaled else "gated" if is_gated else "plain"].append(name)
    return "\n\n".join(f".. autoclass:: {name}" for name in names[kind])


def _replace(app: Any, document: str, source: list[str]) -> None:
    source[0] = re.sub(
        r"^\.\. activations:: (\w+)$", lambda line: entries(line[1]), source[0], flags=re.M
    )


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("source-read", _replace)
    return {"parallel_read_safe": True}
