"""Rows of the arguments of ops, layers and experts: each subject has a file of its own."""

from __future__ import annotations

# Imported for their rows.
import rows_of_activations  # noqa: F401
import rows_of_experts  # noqa: F401
import rows_of_groups  # noqa: F401
import rows_of_layers
import rows_of_linears  # noqa: F401
import rows_of_norms  # noqa: F401
import rows_of_pipelines  # noqa: F401

OPTIONS: dict[str, tuple[str, ...]] = rows_of_layers.OPTIONS
