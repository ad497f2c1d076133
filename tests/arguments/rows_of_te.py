"""Rows of the arguments of Transformer Engine's layers and functions, by subject."""

from __future__ import annotations

import rows_of_te_attention
import rows_of_te_experts
import rows_of_te_functions
import rows_of_te_layers
import rows_of_te_optimizers

MODULES = (
    "fuser.te",
    "fuser.te.pytorch",
    *(
        f"fuser.te.pytorch.{name}"
        for name in (
            *(
                "attention",
                "cpu_offload",
                "cross_entropy",
                "custom_recipes",
                "distributed",
                "graph",
            ),
            *("layers", "master_weights", "operations", "optimizers", "padding", "permutation"),
            *("recipes", "rope", "router", "state", "tensors", "transformer", "userbuffers"),
        )
    ),
)
"""The modules of which the import paths of Transformer Engine have names."""
METHODS = (
    *rows_of_te_attention.METHODS,
    *rows_of_te_experts.METHODS,
    *rows_of_te_functions.METHODS,
    *rows_of_te_layers.METHODS,
    *rows_of_te_optimizers.METHODS,
)
OPTIONS: dict[str, tuple[str, ...]] = {
    **rows_of_te_attention.OPTIONS,
    **rows_of_te_functions.OPTIONS,
    **rows_of_te_layers.OPTIONS,
}
RESULTS = {
    "fuser.te.pytorch.layers.TransformerEngineBaseModule": (
        "the base of layers, of which programs ask isinstance"
    ),
}
