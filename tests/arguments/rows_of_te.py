"""Rows of the arguments of Transformer Engine's layers and functions."""

from __future__ import annotations

OPTIONS: dict[str, tuple[str, ...]] = {}
