"""What torch may ask of a quantized tensor: views, copies, in-place writes.

Anything else is answered from a dequantized copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fuser.formats import ceil_div, round_up
from fuser.tensors.base import QuantizedTensor, RowsOf, geometry

aten = torch.ops.aten

# Nominal dtypes that a tensor may be converted to with its bytes left alone.
NOMINAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, some of which are quantized."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        result = handler(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    elif func.is_view and isinstance(args[0], QuantizedTensor):
        return _view(func, *args, **kwargs)
    if func._schema.is_mutable:
        return _mutate(func, args, kwargs)
    return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


QuantizedTensor._dispatch = staticmethod(dispatch)


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


# -- views ---------------------------------------------------------------------


def _view(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """A view, or a list of them: quantized if of whole rows, else of a dequantized copy."""
    # Lies in memory as the tensor would, were it plain.
    shadow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if tensor._view_of is not None:
        shadow = shadow.as_strided(tensor.shape, *geometry(tensor.shape, tensor._view_of))
    seen = func(shadow, *args, **kwargs)
    is_one = isinstance(seen, torch.Tensor)
    views = [_view_at(tensor, one) for one in ([seen] if is_one else seen)]
    if any(view is None for view in views):
        # Its offset counts from the start of the memory, which is the parent's.
        source = _whole(tensor) if func is aten.as_strided.default else tensor
        plain = func(source.dequantize(), *args, **kwargs)
        plains = [plain] if is_one else plain
        views = [p if view is None else view for view, p in zip(views, plains, strict=True)]
    return views[0] if is_one else views


def _view_at(tensor: QuantizedTensor, seen: torch.Tensor) -> QuantizedTensor | None:
    """The view that lies in memory as ``seen``, a view of the shadow.

    None if it is not of whole rows of the tensor that is viewed, or cuts the
    blocks of every copy.
    """
    whole = _whole(tensor)
    m, k = whole._matrix()
    is_turned = seen.dim() == 2 and not seen.is_contiguous()
    rows = seen.t() if is_turned else seen
    if not k or not rows.dim() or rows.shape[-1] != k or not rows.is_contiguous():
        return None
    start, rest = divmod(int(seen.storage_offset()), k)
    stop = start + rows.numel() // k
    if rest or stop > m or seen.dtype != tensor.dtype:
        return None
    if tensor._view_of is None and not is_turned and (start, stop) == (0, m):
        return tensor._with(tensor.buffers(), seen.shape, None)
    buffers = _rows(whole, start, stop)
    if is_turned:
        if not tensor._is_transposable():
            return None
        for row, column in zip(tensor.rowwise_names, tensor.columnwise_names, strict=True):
            buffers[row], buffers[column] = buffers[column], buffers[row]
    if buffers[tensor.rowwise_names[0]] is None and buffers[tensor.columnwise_names[0]] is None:
        return None
    root = tensor._alias() if tensor._view_of is None else tensor._view_of.root
    return tensor._with(buffers, seen.shape, RowsOf(root, start, is_turned))


def _whole(tensor: QuantizedTensor) -> QuantizedTensor:
    """What ``tensor`` is a view of, with the copies that it has itself; or ``tensor``."""
    view = tensor._view_of
    if view is None:
        return tensor
    whole, copies = view.root._alias(), ("rowwise", "columnwise")
    names = copies[::-1] if view.is_turned else copies
    whole._keep(dict(zip(names, map(tensor._has, copies), strict=True)))
    return whole


def _rows(whole: QuantizedTensor, start: int, stop: int) -> dict[str, torch.Tensor | None]:
    """Views of the buffers for some rows of ``[M, K]``; None for a copy whose blocks they cut."""
    parts = whole.buffers()
    if (start, stop) == (0, whole._matrix()[0]):
        return parts
    units = whole._row_units()
    for which in ("rowwise", "columnwise"):
        is_cut = whole._cuts(which, start, stop)
        end = stop
        if which == "columnwise" and stop == whole._matrix()[0]:
            # Rows that pad the last block are part of it: a GEMM contracts them too.
            end = round_up(stop, whole.format.multiple)
        for name in whole._names(which):
            buffer = parts[name]
            if is_cut:
                parts[name] = None
            elif buffer is not None and name in units:
                dim, unit = units[name]
                first = start // unit
                parts[name] = buffer.narrow(dim, first, ceil_div(end, unit) - first)
    return parts


# -- handlers: return NotImplemented to fall back to dequantizing ------------------------


def _alias(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    alias = tensor._alias()
    alias._take_attributes(tensor)
    return alias


def _clone(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    return tensor._like(torch.clone)


def _to_copy(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Any:
    """Bytes and scales are left alone: another dtype is another nominal one."""
    dtype = kwargs.get("dtype") or tensor.dtype
    device = kwargs.get("device") or tensor.device
    if dtype not in NOMINAL_DTYPES:
        return NotImplemented
    non_blocking = kwargs.get("non_blocking", False)
    copy = tensor._like(
        lambda b: b.to(device=device, non_blocking=non_blocking, copy=True), dtype=dtype
    )
    copy._take_attributes(tensor)
    return copy


def _copy_(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.dequantize(), non_blocking)
    exchanges_bytes = (
        type(source) is type(target)
        and source.shape == target.shape
        and source._usage().encoding() == target._usage().encoding()
        and all(source._has(which) == target._has(which) for which in ("rowwise", "columnwise"))
    )
    if exchanges_bytes and target._can_be_written_alone():
        target._write(source, non_blocking)
        return target
    return target.quantize_(_plain(source))


def _new_zeros(func: Any, tensor: QuantizedTensor, shape: list[int], **kwargs: Any) -> Any:
    """Quantized zeros for as many rows as are asked for, if that is all that differs.

    Plain ones for a part of a block: a chunk of so many rows has lost a copy, and would be
    quantized again.
    """
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device") or tensor.device
    zeros, quantizer = torch.zeros(shape, dtype=dtype, device=device), tensor._usage()
    is_like = dtype == tensor.dtype and zeros.shape[-1:] == tensor.shape[-1:]
    rows = math.prod(shape[:-1])
    is_taken = rows % quantizer.format.multiple == 0 or rows == tensor._matrix()[0]
    return quantizer(zeros) if is_like and is_taken else zeros


def _is_pinned(func: Any, tensor: QuantizedTensor, *args: Any) -> Any:
    return all(b is None or b.is_pinned() for b in tensor.buffers().values())


def _pin_memory(func: Any, tensor: QuantizedTensor, *args: Any) -> Any:
    return tensor._like(lambda buffer: buffer.pin_memory())


def _record_stream(func: Any, tensor: QuantizedTensor, stream: Any) -> None:
    for buffer in tensor.buffers().values():
        if buffer is not None:
            buffer.record_stream(stream)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._unsafe_view.default: _view,
    aten.new_zeros.default: _new_zeros,
    aten.is_pinned.default: _is_pinned,
    aten._pin_memory.default: _pin_memory,
    aten.record_stream.default: _record_stream,
}
