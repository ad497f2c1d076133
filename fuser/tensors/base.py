"""What every quantizer is and what every quantized tensor does, whatever the format.

A quantizer is a frozen value; calling it quantizes. A quantized tensor is a
``torch.Tensor`` whose contents live in buffers of their own (bytes and scales,
rowwise and columnwise); what torch asks of it is answered from the buffers
where they can answer, and from a dequantized copy where they cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

from fuser.errors import InputError, StateError
from fuser.formats import DType, NumberFormat
from fuser.native_gemm import Operand

aten = torch.ops.aten


@dataclass(frozen=True)
class Quantizer:
    """How to make a quantized tensor, as a value: equal by contents and hashable.

    ``rowwise`` and ``columnwise`` say which copies are made: the one that a
    GEMM reads along rows, and the one that it reads along columns.
    """

    rowwise: bool = True
    columnwise: bool = True

    def __call__(self, tensor: torch.Tensor) -> QuantizedTensor:
        """Quantize ``tensor``, of any shape ``[..., K]``; fp32, fp16 or bf16.

        Raises
        ------
        InputError
            If the format cannot take the shape.
        """
        source = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.detach()
        if not (self.rowwise or self.columnwise):
            raise InputError(f"{self} makes neither a rowwise nor a columnwise copy.")
        rows = source.reshape(-1, source.shape[-1])
        buffers = self.buffers_of(rows)
        return self.tensor_class(buffers, source.shape, source.dtype, source.device, self.unbound())

    tensor_class: ClassVar[type[QuantizedTensor]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])

    @property
    def format(self) -> NumberFormat:
        """What it quantizes to."""
        raise NotImplementedError

    def buffers_of(self, rows: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The buffers of a quantized ``[M, K]`` tensor, by name."""
        raise NotImplementedError

    def with_usage(self, *, rowwise: bool, columnwise: bool) -> Quantizer:
        """The same quantizer for other copies."""
        if (self.rowwise, self.columnwise) == (rowwise, columnwise):
            return self
        return replace(self, rowwise=rowwise, columnwise=columnwise)

    def bound_to(self, group: Any) -> Callable[[torch.Tensor], QuantizedTensor]:
        """For one call: amaxes are reduced over ``group``. Itself where that means nothing."""
        return self

    def unbound(self) -> Quantizer:
        """This quantizer as a tensor may carry it, without a process group."""
        return self


class QuantizedTensor(torch.Tensor):
    """Base of the quantized tensors.

    Its dtype is the nominal one, in which it was given and is dequantized.
    Subclasses name their ``buffer_names`` and say how to dequantize.
    """

    buffer_names: ClassVar[tuple[str, ...]]
    _quantizer: Quantizer

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        buffers: dict[str, torch.Tensor | None],
        shape: tuple[int, ...] | torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        quantizer: Quantizer,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        self: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        for name in cls.buffer_names:
            setattr(self, name, buffers.get(name))
        self._quantizer = quantizer
        return self

    # torch asks this for every function; answered below autograd, in dispatch.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        usage = [u for u in ("rowwise", "columnwise") if getattr(self._usage(), u)]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"{' and '.join(usage)}, {self._quantizer})"
        )

    # -- contents -------------------------------------------------------------

    @property
    def format(self) -> NumberFormat:
        """What the tensor is quantized to."""
        return self._quantizer.format

    def buffers(self) -> dict[str, torch.Tensor | None]:
        """The buffers by name; None for a copy that was not made."""
        return {name: getattr(self, name) for name in self.buffer_names}

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of this shape, in ``dtype`` or the nominal one."""
        rows = self._dequantize_rows(dtype or self.dtype)
        return rows.view(self.shape)

    def _dequantize_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """The values as ``[M, K]``."""
        raise NotImplementedError

    def _usage(self) -> Quantizer:
        """The quantizer with the copies that are really here."""
        raise NotImplementedError

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Keep or drop the rowwise and the columnwise copy; None leaves it as it is.

        Raises
        ------
        StateError
            If a copy is asked for that is not here and cannot be made from the
            other, or both would be dropped.
        """
        have = self._usage()
        rowwise = have.rowwise if rowwise_usage is None else rowwise_usage
        columnwise = have.columnwise if columnwise_usage is None else columnwise_usage
        if not (rowwise or columnwise):
            raise StateError(f"{type(self).__name__} would be left without any copy of its data.")
        for wanted, present, name in (
            (rowwise, have.rowwise, "rowwise"),
            (columnwise, have.columnwise, "columnwise"),
        ):
            if wanted and not present:
                self._make_copy(name)
        self._drop_copies(rowwise=rowwise, columnwise=columnwise)

    def _make_copy(self, which: str) -> None:
        raise StateError(
            f"{type(self).__name__} has no {which} copy, and in this format one cannot be made "
            "from the other: quantize the original with both."
        )

    def _drop_copies(self, *, rowwise: bool, columnwise: bool) -> None:
        raise NotImplementedError

    def only(self, which: str) -> QuantizedTensor:
        """This tensor with its ``"rowwise"`` or its ``"columnwise"`` copy alone; shares buffers."""
        alias = self._like(lambda buffer: buffer)
        alias.update_usage(which == "rowwise", which == "columnwise")
        return alias

    def operand(self, which: str) -> Operand:
        """The ``"rowwise"`` or ``"columnwise"`` copy as a GEMM reads it, contracted dimension last.

        Raises
        ------
        StateError
            If that copy is not here and cannot be made from the other.
        """
        raise NotImplementedError

    high_precision_source: torch.Tensor | None = None
    """What the tensor was quantized from, for a backward that wants that; kept by a reshape."""

    _high_precision_init_val: torch.Tensor | None = None

    def set_high_precision_init_val(self, value: torch.Tensor) -> None:
        """Keep the values that a parameter had before it was quantized."""
        self._high_precision_init_val = value

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The values before quantization, on the CPU; None unless they were kept."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Free the values kept from before quantization."""
        self._high_precision_init_val = None

    def quantize_(self, tensor: torch.Tensor) -> QuantizedTensor:
        """Quantize ``tensor`` into this one, in place, with the copies that are here."""
        usage = self._usage()
        source = tensor.to(dtype=self.dtype, device=self.device).expand(self.shape)
        fresh = usage(source).buffers()
        for name, buffer in self.buffers().items():
            if buffer is not None:
                new = fresh[name]
                assert new is not None
                buffer.copy_(new)
        return self

    def _like(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> QuantizedTensor:
        """A quantized tensor of ``change`` of every buffer."""
        changed = {n: None if b is None else change(b) for n, b in self.buffers().items()}
        device = next(b.device for b in changed.values() if b is not None)
        return type(self)(
            changed,
            self.shape if shape is None else shape,
            dtype or self.dtype,
            device,
            self._quantizer,
        )

    # -- what torch asks ------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable:
            return _mutate(func, args, kwargs)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = (
            type(self),
            self.buffers(),
            tuple(self.shape),
            self.dtype,
            self.device,
            self._quantizer,
            self.requires_grad,
        )
        return rebuild, state


class BlockScaledTensor(QuantizedTensor):
    """Base of the formats whose rowwise and columnwise copies have scales of their own."""

    buffer_names: ClassVar[tuple[str, ...]] = (
        "_rowwise_data",
        "_columnwise_data",
        "_rowwise_scale_inv",
        "_columnwise_scale_inv",
    )
    _rowwise_data: torch.Tensor | None
    _columnwise_data: torch.Tensor | None
    _rowwise_scale_inv: torch.Tensor | None
    _columnwise_scale_inv: torch.Tensor | None

    def _one_copy(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Data and scales of a copy that is here, the rowwise one if it is; is it columnwise?"""
        columnwise = self._rowwise_data is None
        data = self._columnwise_data if columnwise else self._rowwise_data
        scale = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        assert data is not None
        assert scale is not None
        return data, scale, columnwise

    def operand(self, which: str) -> Operand:
        columnwise = which == "columnwise"
        data = self._columnwise_data if columnwise else self._rowwise_data
        scale = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        if data is None or scale is None:
            self._make_copy(which)
        assert data is not None
        assert scale is not None
        return Operand(data, self._quantizer.format, scale)

    def _usage(self) -> Quantizer:
        return self._quantizer.with_usage(
            rowwise=self._rowwise_data is not None, columnwise=self._columnwise_data is not None
        )

    def _drop_copies(self, *, rowwise: bool, columnwise: bool) -> None:
        for which, is_kept in (("rowwise", rowwise), ("columnwise", columnwise)):
            for name in self.buffer_names:
                if which in name and not is_kept:
                    setattr(self, name, None)


def rebuild(
    cls: type[QuantizedTensor],
    buffers: dict[str, torch.Tensor | None],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Quantizer,
    requires_grad: bool,
) -> QuantizedTensor:
    """Unpickle a quantized tensor; safe for ``torch.load(weights_only=True)``."""
    present = (b.device for b in buffers.values() if b is not None)
    return cls(buffers, shape, dtype, next(present, device), quantizer, requires_grad)


# ``torch.load(weights_only=True)`` may build quantized tensors and quantizers,
# which are plain data; each class adds itself.
torch.serialization.add_safe_globals([rebuild, DType, torch.device])


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def _mutate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An in-place op: run it on dequantized copies and quantize what it wrote to."""
    originals: list[tuple[QuantizedTensor, torch.Tensor]] = []

    def plain(value: Any, is_written: bool) -> Any:
        if not isinstance(value, QuantizedTensor):
            return value
        copy = value.dequantize()
        if is_written:
            originals.append((value, copy))
        return copy

    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
    converted = {
        name: tree_map(lambda v, w=name in written: plain(v, w), value)
        for name, value in named.items()
    }
    positional = [converted.pop(a.name) for a in func._schema.arguments[: len(args)]]
    result = func(*positional, **converted)
    for target, copy in originals:
        target.quantize_(copy)
    back = {id(copy): target for target, copy in originals}
    return tree_map(lambda v: back.get(id(v), v), result)


# -- handlers: return NotImplemented to fall back to dequantizing ------------------------


def _alias(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    return tensor._like(lambda buffer: buffer)


def _clone(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    return tensor._like(torch.clone)


def _to_copy(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype")
    device = kwargs.get("device") or tensor.device
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    non_blocking = kwargs.get("non_blocking", False)
    return tensor._like(
        lambda b: b.to(device=device, non_blocking=non_blocking, copy=True), dtype=dtype
    )


def _copy_(func: Any, target: Any, source: Any, *args: Any) -> Any:
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.dequantize(), *args)
    same = (
        type(source) is type(target)
        and source.shape == target.shape
        and [b is None for b in source.buffers().values()]
        == [b is None for b in target.buffers().values()]
    )
    if not same:
        return target.quantize_(_plain(source))
    for name, buffer in target.buffers().items():
        if buffer is not None:
            buffer.copy_(getattr(source, name), *args)
    return target


def _view(func: Any, tensor: QuantizedTensor, shape: list[int]) -> Any:
    """Another shape of the leading dimensions; scales follow the last one."""
    new = torch.empty(tensor.shape, device="meta").reshape(shape).shape
    if not new or not tensor.shape or new[-1] != tensor.shape[-1]:
        return NotImplemented
    view = tensor._like(lambda buffer: buffer, shape=tuple(new))
    if tensor.high_precision_source is not None:
        view.high_precision_source = tensor.high_precision_source.reshape(new)
    return view


def _new_zeros(func: Any, tensor: QuantizedTensor, shape: list[int], **kwargs: Any) -> Any:
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device") or tensor.device
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    if list(shape) != list(tensor.shape):
        return zeros
    return tensor._usage()(zeros)


def _is_pinned(func: Any, tensor: QuantizedTensor, *args: Any) -> Any:
    return all(b is None or b.is_pinned() for b in tensor.buffers().values())


def _pin_memory(func: Any, tensor: QuantizedTensor, *args: Any) -> Any:
    return tensor._like(lambda buffer: buffer.pin_memory())


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.new_zeros.default: _new_zeros,
    aten.is_pinned.default: _is_pinned,
    aten._pin_memory.default: _pin_memory,
}
