"""Rows of the arguments of recipes and quantizers."""

from __future__ import annotations
