"""The names of ``fuser`` that products define: each product is loaded when one is first used."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fuser.errors import missing_attribute

MODULES = ("inspection", "ops", "te")


def name_of_product(name: str) -> Any:
    """The ``__getattr__`` of ``fuser``: a product, or a name that one of them defines."""
    fuser = sys.modules["fuser"]
    if name in MODULES:
        return importlib.import_module(f"fuser.{name}")
    if name not in fuser.__all__:
        missing_attribute(name)
    product = importlib.import_module("fuser.inspection" if name == "inspect" else "fuser.te")
    value = vars(fuser)[name] = getattr(product, name)
    return value


# The last module that ``import fuser`` runs.
if os.environ.get("FUSER_AS_TE") == "1":
    importlib.import_module("fuser.te").install()
