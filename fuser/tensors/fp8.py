"""FP8 with one scale for each tensor: current and delayed scaling."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fuser.cuda import fp8_scaling as kernels
from fuser.doors import OfProduct
from fuser.errors import InputError
from fuser.formats import FP8, DType, NumberFormat, check_fp8_dtype
from fuser.functional.amax import amax, raise_amax
from fuser.functional.lazy import LazyTensor, filled, matrix_of, rows_of, source_of
from fuser.recipe import Float8CurrentScaling, fp8_options
from fuser.reference import fp8
from fuser.reference import fp8_scaling as reference
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.hybrid import HybridQuantizer
from fuser.tensors.identity import IdentityQuantizer
from fuser.tensors.quantizer import AMAXES, Quantizer

_OPERANDS = {
    "rowwise": ("_rowwise_data", "_scale_inv"),
    "columnwise": ("_columnwise_data", "_scale_inv"),
}


class Float8Tensor(QuantizedTensor, layout=FP8):
    """FP8 bytes with one fp32 scale.

    Buffers: ``_rowwise_data`` [M, K] uint8, ``_columnwise_data`` [K, M] uint8
    (the transpose of the same bytes), ``_scale_inv`` [1] fp32. ``_data`` is the
    rowwise buffer in the tensor's own shape, ``_transpose`` the columnwise buffer.
    """

    _rowwise_data: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _scale_inv: torch.Tensor

    @property
    def _data(self) -> torch.Tensor | None:
        """The bytes in the tensor's own shape, shared. Assignment drops the transpose.

        A write to the bytes themselves makes the transpose stale: drop it with
        ``_reset_caches()``.
        """
        data = self._rowwise_data
        return data if data is None or self.dim() == 2 else data.view(self.shape)

    @_data.setter
    def _data(self, data: torch.Tensor | None) -> None:
        self._rowwise_data = None if data is None else _as_matrix(data, *self._matrix())
        if data is not None:
            self._columnwise_data = None
        self._was_written()

    @property
    def _transpose(self) -> torch.Tensor | None:
        """The transposed bytes, ``[K, M]``, shared. An assigned tensor must match ``_data``."""
        return self._columnwise_data

    @_transpose.setter
    def _transpose(self, data: torch.Tensor | None) -> None:
        m, k = self._matrix()
        self._columnwise_data = None if data is None else _as_matrix(data, k, m)

    _reset_caches = OfProduct("fuser.te.tensors")

    @property
    def _fp8_dtype(self) -> DType:
        dtype: DType = self._quantizer.fp8_dtype
        return dtype

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        usage, names = self._copy_to_read()
        data, columnwise = getattr(self, names[0]), usage == "columnwise"
        if columnwise and not self.has_scales_of_rows:
            data = transposed_bytes(data)
        args = (data.contiguous(), self._scale_inv, self._quantizer.fp8_dtype, dtype)
        if not self.has_scales_of_rows:
            out = torch.empty(data.shape, dtype=dtype, device=data.device)
            return filled(out, kernels.dequantize, reference.dequantize, *args)
        shape = data.shape[::-1] if columnwise else data.shape
        out = torch.empty(shape, dtype=dtype, device=data.device)
        by_kernel, by_torch = kernels.dequantize_groups, reference.dequantize_groups
        return filled(out, by_kernel, by_torch, *args, columnwise=columnwise)

    def _operand_names(self, usage: str) -> tuple[str, ...]:
        return _OPERANDS[usage]

    def _took_bytes(self) -> None:
        quantizer = self._quantizer
        if not isinstance(quantizer, Float8Quantizer):
            return
        if quantizer.amax is None:
            self._leave_state()
        else:  # a weight's: with another scale, the recorded amax is of values that are gone
            scale = self._scale_inv.reciprocal()
            quantizer.amax.masked_fill_(quantizer.scale != scale, 0.0)
            quantizer.scale.copy_(scale)

    def _leave_state(self) -> None:
        """Writes keep the scale of the bytes, and record no amax."""
        if isinstance(self._quantizer, Float8Quantizer):
            scale = self._scale_inv.reciprocal()
            self._quantizer = replace(self._quantizer, scale=scale, amax=None)

    def _is_transposable(self) -> bool:
        return True

    @property
    def derives_columnwise(self) -> bool:
        return True

    def derive(
        self, usage: str, source: dict[str, torch.Tensor | None], out: dict[str, torch.Tensor]
    ) -> None:
        names = ("_rowwise_data", "_columnwise_data")
        target, origin = names if usage == "rowwise" else names[::-1]
        data = source[origin]
        assert data is not None
        transposed_bytes(data, out[target])


def transposed_bytes(data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The transpose of the bytes ``[M, K]``: ``[K, M]``, contiguous; in ``out`` if it is given."""
    target = data.new_empty(data.shape[::-1]) if out is None else out
    transposed = filled(target, kernels.transpose, fp8.transpose, data.contiguous())
    return transposed if out is None or transposed is out else out.copy_(transposed)


def _as_matrix(data: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if data.numel() != rows * columns or data.element_size() != 1:
        raise InputError(
            f"The bytes of this Float8Tensor are {rows} x {columns}; got a tensor of shape "
            f"{tuple(data.shape)} and dtype {data.dtype}."
            " Give bytes of this shape."
        )
    return data.view(torch.uint8).view(rows, columns)


@dataclass(frozen=True)
class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 with the scale from the tensor's own amax.

    Parameters
    ----------
    fp8_dtype
        E4M3 or E5M2.
    device
        Accepted for compatibility and ignored; a tensor is quantized on its own device.
    force_pow_2_scales
        Round scales down to powers of two.
    amax_epsilon
        Lower bound of the amax from which the scale is computed.
    """

    fp8_dtype: DType = DType.kFloat8E4M3
    device: Any = field(default=None, compare=False)
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    force_pow_2_scales: bool = field(default=False, kw_only=True)
    amax_epsilon: float = field(default=0.0, kw_only=True)

    tensor_class = Float8Tensor
    recipe_class = Float8CurrentScaling
    accepts_lazy = True
    is_repeatable = True
    reduces_scales = True

    def __post_init__(self) -> None:
        check_fp8_dtype("Float8CurrentScalingQuantizer", self.fp8_dtype)

    @classmethod
    def of_recipe(cls, recipe: Float8CurrentScaling, role: str) -> Quantizer:
        return cls(**fp8_options(recipe, role))

    @functools.cached_property
    def format(self) -> NumberFormat:
        return NumberFormat("FP8", self.fp8_dtype)

    def amaxes_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        return amax(rows)

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        buffers, (m, k), amax_value = self.new_buffers(x), matrix_of(x), self.reduced_amaxes
        if isinstance(x, torch.Tensor):
            x = rows_of(x)
        measured = None
        if amax_value is None:
            measured = torch.zeros(1, dtype=torch.float32, device=x.device)
            if not kernels.is_one_tile(m, k):
                raise_amax(x, measured)
                amax_value, measured = measured, None
        kernels.quantize(
            self.format,
            source_of(x),
            buffers,
            pow2=self.force_pow_2_scales,
            eps=self.amax_epsilon,
            amax_value=amax_value,
            recorded=measured,  # of one tile, whose kernel finds it
        )
        buffers[AMAXES] = amax_value if measured is None else measured
        return buffers

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        amaxes = reference.amax(x) if self.reduced_amaxes is None else self.reduced_amaxes
        buffers = reference.quantize_current(
            x,
            self.fp8_dtype,
            pow2=self.force_pow_2_scales,
            eps=self.amax_epsilon,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
            amax_value=amaxes,
        )
        return {**dict(zip(Float8Tensor.buffer_names, buffers, strict=True)), AMAXES: amaxes}


@dataclass(frozen=True, eq=False)
class Float8Quantizer(Quantizer):
    """FP8 with a scale from earlier steps; records the amax of each tensor.

    Parameters
    ----------
    scale, amax
        fp32, one element each, parts of the delayed-scaling state. ``scale`` is
        read; ``amax`` becomes the maximum of itself and the tensor's amax at every
        call. If ``amax`` is None, nothing is recorded. Two quantizers are equal if
        they hold the same state.
    fp8_dtype
        E4M3 or E5M2.
    saturates
        True: values that are too large for the scale are clamped. False: a tensor
        with such values gets the scale of its own amax.
    """

    scale: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    amax: torch.Tensor | None = field(default_factory=lambda: torch.zeros(1))
    fp8_dtype: DType = DType.kFloat8E4M3
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    saturates: bool = field(default=True, kw_only=True)

    tensor_class = Float8Tensor
    accepts_lazy = True
    is_repeatable = True

    @functools.cached_property
    def format(self) -> NumberFormat:
        return NumberFormat("FP8", self.fp8_dtype)

    def __post_init__(self) -> None:
        check_fp8_dtype("Float8Quantizer", self.fp8_dtype)
        for name in ("scale", "amax"):
            state = getattr(self, name)
            if state is None or state.shape == (1,):
                continue
            if state.numel() != 1:
                raise InputError(
                    f"Float8Quantizer got {name} of shape {tuple(state.shape)}; it has one element."
                )
            object.__setattr__(self, name, state.view(1))  # shares memory with the argument

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Float8Quantizer) and self._contents() == other._contents()

    def __hash__(self) -> int:
        return hash(self._contents())

    def _contents(self) -> tuple[object, ...]:
        usage = (self.rowwise, self.columnwise)
        return (id(self.scale), id(self.amax), self.fp8_dtype, *usage, self.saturates)

    def buffers_of(self, rows: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        amaxes = self.reduced_amaxes
        if amaxes is None:
            return super().buffers_of(rows)
        # As of the whole tensor: its amax is recorded on every rank, and one scale is chosen.
        self._record(amaxes)
        scale = self.scale if self.saturates else self._scale_for_amax(amaxes)
        quantizer = replace(self, scale=scale, amax=None, saturates=True)
        return Quantizer.buffers_of(quantizer, rows)

    def amaxes_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        return amax(rows)

    def from_kernel(self, x: torch.Tensor | LazyTensor) -> dict[str, torch.Tensor | None]:
        buffers, own_amax = self.new_buffers(x), None
        if not self.saturates:
            own_amax = torch.zeros(1, dtype=torch.float32, device=x.device)
            raise_amax(x, own_amax)
        scaling: dict[str, Any] = {"scale": self.scale, "amax_value": own_amax}
        kernels.quantize(self.format, source_of(x), buffers, **scaling, recorded=self.amax)
        return buffers

    def from_reference(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        usages = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        scale = self.scale if self.saturates else self._scale_for_amax(amax(x))
        *copies, measured = reference.quantize_delayed(x, scale, self.fp8_dtype, **usages)
        self._record(measured)
        return dict(zip(Float8Tensor.buffer_names, copies, strict=True))

    def _record(self, amaxes: torch.Tensor) -> None:
        if self.amax is not None:
            self.amax.copy_(torch.maximum(self.amax, amaxes))

    def _scale_for_amax(self, measured: torch.Tensor) -> torch.Tensor:
        """The scale, or a smaller one that holds every finite value up to ``measured``."""
        largest = self.fp8_dtype.max / measured
        return torch.where((measured < math.inf) & (largest < self.scale), largest, self.scale)

    def state_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.scale, self.amax

    @functools.cached_property
    def with_exact_columns(self) -> Quantizer:
        """This quantizer for the rowwise copy, and the values themselves for the columnwise one."""
        return HybridQuantizer(rowwise_quantizer=self, columnwise_quantizer=IdentityQuantizer())

    def to_repeat(self, tensor: QuantizedTensor) -> torch.Tensor | None:
        return self.scale.clone()  # a step may end before the tensor is quantized again

    def repeating(self, kept: torch.Tensor | None) -> Quantizer:
        assert kept is not None
        return replace(self, scale=kept, amax=None)

    def unbound(self) -> Quantizer:
        """The quantizer that a tensor keeps: later writes to the tensor record no amax."""
        return self if self.amax is None and self.reduced_amaxes is None else self._unbound

    def without_state(self) -> Quantizer:
        usages = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        return Float8CurrentScalingQuantizer(self.fp8_dtype, **usages)

    @functools.cached_property
    def _unbound(self) -> Quantizer:
        return replace(self, amax=None)
