"""Values that stay as they are, where a quantized tensor is expected."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from fuser.errors import InputError, StateError
from fuser.formats import UNQUANTIZED, NumberFormat, unquantized_format
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.quantizer import QUANTIZABLE, Quantizer


class IdentityTensor(QuantizedTensor, layout=UNQUANTIZED):
    """Unquantized values, as products read them in place of a quantized tensor.

    Buffers: ``_rowwise_data`` and ``_columnwise_data``, ``[M, K]`` in the dtype of the values; one
    tensor in both places, unless the buffers are copied.
    """

    _rowwise_data: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _quantizer: IdentityQuantizer

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        values = self._columnwise_data if self._rowwise_data is None else self._rowwise_data
        if values is None:
            raise StateError(
                f"{self} has no values: they were cleared or given to another tensor."
                " Take the values again."
            )
        return values.to(dtype, copy=True)

    @property
    def derives_columnwise(self) -> bool:
        return True

    def derive(
        self, usage: str, source: dict[str, torch.Tensor | None], out: dict[str, torch.Tensor]
    ) -> None:
        (target,), (origin,) = self._names(usage), self._names(_OTHER[usage])
        values = source[origin]
        assert values is not None
        out[target].copy_(values)


_OTHER = {"rowwise": "columnwise", "columnwise": "rowwise"}


@dataclass(frozen=True)
class IdentityQuantizer(Quantizer):
    """Leaves values unquantized: for tensors, or copies of them, in high precision.

    The result shares the memory of a contiguous tensor of the right dtype: do not write to that
    tensor while the result is in use.

    Parameters
    ----------
    dtype
        Round the values to fp32, fp16 or bf16; None keeps their own dtype.

    Raises
    ------
    InputError
        If ``dtype`` is another one.
    """

    dtype: torch.dtype | None = field(default=None, kw_only=True)
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)

    tensor_class = IdentityTensor

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in QUANTIZABLE:
            raise InputError(
                f"IdentityQuantizer got dtype {self.dtype}; it takes fp32, fp16 or bf16."
            )

    @functools.cached_property
    def format(self) -> NumberFormat:
        return unquantized_format(self.dtype)

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        values = x.detach().to(self.dtype or x.dtype).contiguous()
        return self.copies(values if self.rowwise else None, values if self.columnwise else None)
