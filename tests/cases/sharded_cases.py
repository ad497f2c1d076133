"""All cases of quantized parameters under ``fully_shard`` (FSDP2) on two ranks."""

from __future__ import annotations

import importlib

from sharded_models import CASES

__all__ = ["CASES"]

for subject in ("training", "gathering", "staying", "options", "values", "checkpoints"):
    importlib.import_module(f"sharded_{subject}_cases")
