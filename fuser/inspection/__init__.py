"""Inspection of quantized steps: what each operand loses, and which layers lose most."""

from fuser.inspection.inspector import inspect
from fuser.inspection.report import InspectionReport, LayerScore, Row

__all__ = ["InspectionReport", "LayerScore", "Row", "inspect"]
