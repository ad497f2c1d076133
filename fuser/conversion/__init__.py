"""Models of torch that run pipelines in place: convert, and back."""

from fuser.conversion.convert import convert, converted, revert
from fuser.conversion.report import ConversionReport, ConversionRow

__all__ = ["ConversionReport", "ConversionRow", "convert", "converted", "revert"]
