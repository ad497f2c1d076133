"""Tensors whose rowwise and columnwise copies are in two formats."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from fuser.errors import InputError, InputTypeError
from fuser.formats import HYBRID, NumberFormat, hybrid_format, names_of_copy, padded_shape
from fuser.functional.lazy import materialize
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.quantizer import Quantizer, whole_blocks

ColumnwiseSource = Literal["original", "rowwise_dequantized"]
"""What a columnwise copy is quantized from."""


class HybridQuantizedTensor(QuantizedTensor, layout=HYBRID):
    """A tensor whose two copies were made by two quantizers.

    Buffers: ``_rowwise_data``, ``_rowwise_scale_inv`` and ``_amax_rowwise`` are the buffers of the
    format of the rowwise copy, in the order of its own tensors, the others of the columnwise copy;
    None for those that a format does not have. Data is padded with zeros for both formats.
    """

    _rowwise_data: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _quantizer: HybridQuantizer

    def part(self, usage: str) -> QuantizedTensor:
        """The copy ``usage`` as a tensor of its own format, ``[M, K]`` with the padding."""
        quantizer = self._quantizer.of_usage(usage)
        layout = quantizer.format.layout
        slots = names_of_copy(HYBRID, usage)
        buffers = {
            name: getattr(self, slot)
            for slot, name in zip(slots, names_of_copy(layout, usage), strict=False)
        }
        shape = padded_shape(*self._matrix(), self.format.multiple)
        return quantizer.tensor_class(buffers, shape, self.dtype, self.device, quantizer)

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        return self.part(self._copy_to_read()[0])._dequantize_rows(dtype)

    @property
    def column_transform(self) -> Hashable | None:
        return self.part("columnwise").column_transform

    def transformed_columns(self, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.with_usage("columnwise").compact()
        assert isinstance(tensor, HybridQuantizedTensor)
        return tensor.part("columnwise").transformed_columns(dtype)


@dataclass(frozen=True)
class HybridQuantizer(Quantizer):
    """The rowwise copy by one quantizer, and the columnwise copy by another.

    A product reads the copies as tensors in their own formats.

    Parameters
    ----------
    rowwise_quantizer, columnwise_quantizer
        Only one usage of each is taken.
    columnwise_source
        Quantize the columnwise copy from the tensor, ``"original"``, or from the values of its
        rowwise copy, ``"rowwise_dequantized"``.

    Raises
    ------
    InputTypeError
        If one of the two is no quantizer.
    InputError
        If one of the two is hybrid itself, or ``columnwise_source`` has another value.
    """

    rowwise_quantizer: Quantizer = field(kw_only=True)
    columnwise_quantizer: Quantizer = field(kw_only=True)
    columnwise_source: ColumnwiseSource = field(default="original", kw_only=True)
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)

    tensor_class = HybridQuantizedTensor

    def __post_init__(self) -> None:
        for usage in ("rowwise", "columnwise"):
            name = f"{usage}_quantizer"
            quantizer = getattr(self, name)
            if not isinstance(quantizer, Quantizer):
                raise InputTypeError(
                    f"HybridQuantizer got {name}={quantizer!r}; it takes a Quantizer for each copy."
                )
            value = quantizer.value()
            slots, names = (
                names_of_copy(layout, usage) for layout in (HYBRID, value.format.layout)
            )
            if isinstance(value, HybridQuantizer) or len(names) > len(slots):
                raise InputError(
                    f"HybridQuantizer got {name}={quantizer!r}; it takes a quantizer of one "
                    "format, which a hybrid one is not."
                )
            usages = {copy_name: copy_name == usage for copy_name in ("rowwise", "columnwise")}
            object.__setattr__(self, name, value.with_usage(**usages))
        if self.columnwise_source not in get_args(ColumnwiseSource):
            raise InputError(
                f"HybridQuantizer got columnwise_source={self.columnwise_source!r}; it is "
                f"{' or '.join(map(repr, get_args(ColumnwiseSource)))}."
            )

    def of_usage(self, usage: str) -> Quantizer:
        """The quantizer of the ``"rowwise"`` or of the ``"columnwise"`` copy."""
        return self.rowwise_quantizer if usage == "rowwise" else self.columnwise_quantizer

    @functools.cached_property
    def format(self) -> NumberFormat:
        return hybrid_format(self.rowwise_quantizer.format, self.columnwise_quantizer.format)

    def encoding(self) -> tuple[object, ...]:
        parts = (self.rowwise_quantizer, self.columnwise_quantizer)
        return tuple((part.format, part.encoding()) for part in parts)

    def state_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (*self.rowwise_quantizer.state_tensors(), *self.columnwise_quantizer.state_tensors())

    def unbound(self) -> Quantizer:
        return self._of_parts(self.rowwise_quantizer.unbound(), self.columnwise_quantizer.unbound())

    def without_state(self) -> Quantizer:
        parts = (self.rowwise_quantizer, self.columnwise_quantizer)
        return self._of_parts(*(part.without_state() for part in parts))

    def to_repeat(self, tensor: QuantizedTensor) -> torch.Tensor | None:
        """What the rowwise copy needs; the columnwise one is measured again."""
        assert isinstance(tensor, HybridQuantizedTensor)
        return self.rowwise_quantizer.to_repeat(tensor.part("rowwise"))

    def repeating(self, kept: torch.Tensor | None) -> Quantizer:
        if kept is None:
            return self
        return self._of_parts(self.rowwise_quantizer.repeating(kept), self.columnwise_quantizer)

    def _of_parts(self, rowwise: Quantizer, columnwise: Quantizer) -> Quantizer:
        if rowwise is self.rowwise_quantizer and columnwise is self.columnwise_quantizer:
            return self
        return replace(self, rowwise_quantizer=rowwise, columnwise_quantizer=columnwise)

    def buffers_of(self, rows: Any) -> dict[str, torch.Tensor | None]:
        source = materialize(whole_blocks(rows, self.format.multiple))
        buffers: dict[str, torch.Tensor | None] = dict.fromkeys(HYBRID.buffers)
        reads_rows = self.columnwise and self.columnwise_source == "rowwise_dequantized"
        if self.rowwise or reads_rows:
            quantized = self.rowwise_quantizer(source)
            if self.rowwise:
                buffers |= _in_slots(quantized, "rowwise")
            if reads_rows:
                source = quantized.dequantize(dtype=source.dtype)
        if self.columnwise:
            buffers |= _in_slots(self.columnwise_quantizer(source), "columnwise")
        return buffers


def _in_slots(tensor: QuantizedTensor, usage: str) -> dict[str, torch.Tensor | None]:
    """The buffers of a copy by their names in a hybrid tensor."""
    slots, names = names_of_copy(HYBRID, usage), names_of_copy(tensor.format.layout, usage)
    return {slot: getattr(tensor, name) for slot, name in zip(slots, names, strict=False)}
