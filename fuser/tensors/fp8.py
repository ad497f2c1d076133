"""FP8 with one scale a tensor: current and delayed scaling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fuser.errors import InputError
from fuser.formats import DType, NumberFormat
from fuser.functional import fp8_scaling
from fuser.functional.values import Values
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.quantizer import Quantizer

_OPERANDS = {"rowwise": ("_data", "_scale_inv"), "columnwise": ("_transpose", "_scale_inv")}


class Float8Tensor(QuantizedTensor):
    """FP8 bytes with one fp32 scale.

    Buffers: ``_data`` [M, K] uint8, ``_transpose`` [K, M] uint8 (the same bytes
    turned), ``_scale_inv`` [1] fp32.
    """

    buffer_names = ("_data", "_transpose", "_scale_inv")
    rowwise_names = ("_data",)
    columnwise_names = ("_transpose",)
    has_independent_blocks = False  # one scale for all
    _data: torch.Tensor | None
    _transpose: torch.Tensor | None
    _scale_inv: torch.Tensor

    @property
    def _fp8_dtype(self) -> DType:
        dtype: DType = self._quantizer.fp8_dtype
        return dtype

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        data = self._data
        if data is None:
            assert self._transpose is not None
            data = fp8_scaling.transpose(self._transpose)
        return fp8_scaling.dequantize(data, self._scale_inv, self._fp8_dtype, dtype)

    def _operand_names(self, which: str) -> tuple[str, ...]:
        return _OPERANDS[which]

    def _layout(self, m: int, k: int) -> dict[str, tuple[int, ...]]:
        return {"_data": (m, k), "_transpose": (k, m), "_scale_inv": (1,)}

    def _row_units(self) -> dict[str, tuple[int, int]]:
        return {"_data": (0, 1), "_transpose": (1, 1)}

    def _is_transposable(self) -> bool:
        return True

    def _make_copy(self, which: str) -> None:
        if which == "rowwise":
            assert self._transpose is not None
            self._data = fp8_scaling.transpose(self._transpose)
        else:
            assert self._data is not None
            self._transpose = fp8_scaling.transpose(self._data)


@dataclass(frozen=True)
class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 with the scale from the tensor's own amax.

    Parameters
    ----------
    fp8_dtype
        E4M3 or E5M2.
    device
        Accepted for compatibility; tensors are quantized where they are.
    force_pow_2_scales
        Round scales down to powers of two.
    amax_epsilon
        A smaller amax counts as this.
    """

    fp8_dtype: DType = DType.kFloat8E4M3
    device: Any = field(default=None, compare=False)
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    force_pow_2_scales: bool = field(default=False, kw_only=True)
    amax_epsilon: float = field(default=0.0, kw_only=True)
    group: Any = field(default=None, kw_only=True, repr=False)

    tensor_class = Float8Tensor
    takes_values = True

    @functools.cached_property
    def format(self) -> NumberFormat:
        return NumberFormat("FP8", self.fp8_dtype)

    def buffers_of(self, rows: torch.Tensor | Values) -> dict[str, torch.Tensor | None]:
        amax = None
        if self.group is not None:
            amax = fp8_scaling.amax(rows)
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=self.group)
        data, transpose, scale_inv = fp8_scaling.quantize_current(
            rows,
            self.fp8_dtype,
            pow2=self.force_pow_2_scales,
            eps=self.amax_epsilon,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
            amax_value=amax,
        )
        return {"_data": data, "_transpose": transpose, "_scale_inv": scale_inv}

    @functools.cached_property
    def replay_key(self) -> Hashable | None:
        if self.group is not None:
            return None
        copies = (self.rowwise, self.columnwise)
        return ("current", self.fp8_dtype, *copies, self.force_pow_2_scales, self.amax_epsilon)

    def encoding(self) -> tuple[Any, ...]:
        return (self.fp8_dtype,)

    def bound_to(self, group: Any) -> Callable[[torch.Tensor], QuantizedTensor]:
        return replace(self, group=group)

    def unbound(self) -> Quantizer:
        return self if self.group is None else replace(self, group=None)


@dataclass(frozen=True, eq=False)
class Float8Quantizer(Quantizer):
    """FP8 with a scale from earlier steps; records the amax that it sees.

    Parameters
    ----------
    scale, amax
        fp32 of one element each, parts of the delayed-scaling state: the scale is read,
        and ``amax`` is raised at every call; None records nothing. Two
        quantizers are equal if they hold the same state.
    fp8_dtype
        E4M3 or E5M2.
    """

    scale: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    amax: torch.Tensor | None = field(default_factory=lambda: torch.zeros(1))
    fp8_dtype: DType = DType.kFloat8E4M3
    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)

    tensor_class = Float8Tensor
    takes_values = True

    @functools.cached_property
    def format(self) -> NumberFormat:
        return NumberFormat("FP8", self.fp8_dtype)

    def __post_init__(self) -> None:
        for name in ("scale", "amax"):
            state = getattr(self, name)
            if state is None or state.shape == (1,):
                continue
            if state.numel() != 1:
                raise InputError(
                    f"Float8Quantizer got {name} of shape {tuple(state.shape)}; it is one number."
                )
            object.__setattr__(self, name, state.view(1))  # of the same memory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Float8Quantizer) and self._contents() == other._contents()

    def __hash__(self) -> int:
        return hash(self._contents())

    def _contents(self) -> tuple[Any, ...]:
        return (id(self.scale), id(self.amax), self.fp8_dtype, self.rowwise, self.columnwise)

    def buffers_of(self, rows: torch.Tensor | Values) -> dict[str, torch.Tensor | None]:
        data, transpose, scale_inv = fp8_scaling.quantize_delayed(
            rows,
            self.scale,
            self.fp8_dtype,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
            amax=self.amax,
        )
        return {"_data": data, "_transpose": transpose, "_scale_inv": scale_inv}

    @functools.cached_property
    def replay_key(self) -> Hashable | None:
        return "delayed", self.fp8_dtype, self.rowwise, self.columnwise

    def state_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.scale, self.amax

    def encoding(self) -> tuple[Any, ...]:
        return (self.fp8_dtype,)

    def unbound(self) -> Quantizer:
        """For a tensor to carry: writing to that is no step of training."""
        return self if self.amax is None else self._unbound

    @functools.cached_property
    def _unbound(self) -> Quantizer:
        return replace(self, amax=None)
