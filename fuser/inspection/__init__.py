"""Inspection of quantized steps: how well each operand is represented, and which layers to spare."""

from fuser.inspection.inspector import inspect
from fuser.inspection.report import InspectionReport, LayerScore, Row

__all__ = ["InspectionReport", "LayerScore", "Row", "inspect"]
