"""Rows of the arguments of functions, contexts, layers, experts and tensors."""

from __future__ import annotations

OPTIONS: dict[str, tuple[str, ...]] = {}
