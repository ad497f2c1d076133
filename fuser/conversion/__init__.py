"""Models of torch that run pipelines in place: convert, and back."""

from fuser.conversion.convert import (
    ConversionReport,
    ConversionRow,
    convert,
    converted,
    revert,
)

__all__ = ["ConversionReport", "ConversionRow", "convert", "converted", "revert"]
