"""The names of ``fuser`` that products define: each product is loaded when one is first used."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fuser.errors import missing_attribute

MODULES = ("inspection", "ops", "te")
NAMES = (
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8TensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4TensorStorage",
    "QuantizedTensorStorage",
    "checkpoint",
    "deinterleave_glu_tensor",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "inspect",
    "interleave_glu_tensor",
    "is_bf16_available",
    "ops",
)
"""Public names of ``fuser``."""


def name_of_product(name: str) -> Any:
    """The ``__getattr__`` of ``fuser``: a product, or a name that one of them defines."""
    if name in MODULES:
        return importlib.import_module(f"fuser.{name}")
    if name not in NAMES:
        missing_attribute(name)
    product = importlib.import_module("fuser.inspection" if name == "inspect" else "fuser.te")
    value = vars(sys.modules["fuser"])[name] = getattr(product, name)
    return value


# The last module that ``import fuser`` runs.
if os.environ.get("FUSER_AS_TE") == "1":
    importlib.import_module("fuser.te").install()
