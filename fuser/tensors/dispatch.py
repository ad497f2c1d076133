"""Torch operations on quantized tensors: views, copies, in-place writes.

All other operations run on a dequantized copy.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import FuserWarning, StateError
from fuser.formats import GROUP_TILE, ceil_div, round_up
from fuser.tensors.base import USAGES, QuantizedTensor, RowsOf, geometry
from fuser.tensors.dequantized_view import DequantizedView, Step, follow
from fuser.tensors.writes import blocks_around, quantize_all
from fuser.torch_private import STAGER, is_called_from, is_module_conversion, pytree, schema_of
from fuser.wrapper_tensor import WrapperTensor

aten = torch.ops.aten
_is_inference_mode = torch.is_inference_mode_enabled

# The nominal dtypes to which a tensor can be converted without a change of its bytes.
NOMINAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, where some arguments are quantized tensors or views of them."""
    handler = HANDLERS.get(func)
    if handler is not None:
        result = handler(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    if func.is_view and isinstance(args[0], WrapperTensor):
        return _view(func, *args, **kwargs)
    if schema_of(func).is_mutable:
        return _mutate(func, args, kwargs)
    return func(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))


WrapperTensor._dispatch = staticmethod(dispatch)


def _plain(value: Any) -> Any:
    return value._values() if isinstance(value, WrapperTensor) else value


# -- in-place operations ---------------------------------------------------------


def _mutate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place op on dequantized copies, and quantize the results into its targets."""
    named = dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)) | kwargs
    written = {a.name for a in schema_of(func).arguments if a.alias_info and a.alias_info.is_write}
    targets = [
        value
        for name in written
        for value in pytree.tree_leaves(named.get(name))
        if isinstance(value, WrapperTensor)
    ]
    if targets and torch.Tag.inplace_view in func.tags:
        raise StateError(
            f"{func} would change the shape or memory of {_named(targets[0])} in place, which "
            "cannot be done to a quantized tensor; use the form that returns a new tensor."
        )
    for target in targets:  # before an op on a list changes plain tensors among them
        for tensor in {target, _place(target)[0]}:
            if isinstance(tensor, QuantizedTensor):
                tensor._check_can_be_written()
    sharing = Counter(map(_memory_of, targets))
    # Tensors to quantize with new values: in `alone` a target itself; in `whole` the parent of a
    # target, by memory, so that several parts of one tensor are written together.
    alone: list[tuple[QuantizedTensor, torch.Tensor]] = []
    whole: dict[int, tuple[QuantizedTensor, torch.Tensor]] = {}
    back: dict[int, tuple[WrapperTensor, torch.Tensor]] = {}

    def plain(value: Any, is_written: bool) -> Any:
        if not isinstance(value, WrapperTensor):
            return value
        if not is_written:
            return value._values()
        memory = _memory_of(value)
        if isinstance(value, QuantizedTensor) and sharing[memory] == 1:
            copy = value._values()
            alone.append((value, copy))
        else:
            root, path = _place(value)
            if memory not in whole:
                whole[memory] = root, root._values()
            copy = follow(path, whole[memory][1])
        back[id(copy)] = value, copy
        return copy

    converted = {
        name: pytree.tree_map(lambda v, w=name in written: plain(v, w), value)
        for name, value in named.items()
    }
    positional = [converted.pop(a.name) for a in schema_of(func).arguments[: len(args)]]
    result = func(*positional, **converted)
    for target, copy in back.values():
        if copy.shape != target.shape:
            raise StateError(f"{func} gives shape {tuple(copy.shape)} to {_named(target)}.")
    written_parts = (
        _written_part(
            *write, [copy for value, copy in back.values() if _memory_of(value) == memory]
        )
        for memory, write in whole.items()
    )
    quantize_all((*alone, *written_parts))
    for target, _ in back.values() if whole else ():
        target._was_written()
    return pytree.tree_map(lambda v: back[id(v)][0] if id(v) in back else v, result)


def _written_part(
    root: QuantizedTensor, values: torch.Tensor, written: list[torch.Tensor]
) -> tuple[QuantizedTensor, torch.Tensor]:
    """The write of ``values`` to ``root`` for the rows that have ``written``, views of them."""
    k, written = root.shape[-1], [view for view in written if view.numel()]
    if not written or any(view.dtype is not values.dtype for view in written):
        return root, values
    first = [view.storage_offset() for view in written]
    last = [
        start + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
        for start, view in zip(first, written, strict=True)
    ]
    part, start = blocks_around(root, min(first) // k, max(last) // k + 1)
    rows = values.view(-1, k)[start : start + part.shape[:-1].numel()]
    return part, rows.view(part.shape)


def _place(value: WrapperTensor) -> tuple[QuantizedTensor, tuple[Step, ...]]:
    """The quantized tensor that ``value`` is, or is a view of, and the view operations between."""
    if isinstance(value, DequantizedView):
        return value._root, value._path
    assert isinstance(value, QuantizedTensor)
    view = value._view_of
    if view is None:
        return value, ()
    strides, offset = geometry(value.shape, view)
    step = functools.partial(torch.as_strided, size=value.shape, stride=strides)
    return view.root, (functools.partial(step, storage_offset=offset),)


def _named(value: WrapperTensor) -> str:
    return f"a {type(value).__name__} of shape {tuple(value.shape)}"


def _memory_of(value: WrapperTensor) -> int:
    """A number that is equal for all tensors that share bytes."""
    return id(_place(value)[0]._memory()[0])


# -- views ---------------------------------------------------------------------


def _view(func: Any, tensor: WrapperTensor, *args: Any, **kwargs: Any) -> Any:
    """A view, or a list of views: quantized for whole rows, else a ``DequantizedView``."""
    if func in _LAZY_SIGNS:
        raise StateError(
            f"{func} of {_named(tensor)} is not supported: dequantize or clone it first."
        )
    if _is_inference_mode():
        # In inference mode torch has not decomposed compound operations (`to`, `reshape`, `chunk`).
        result = func.decompose(tensor, *args, **kwargs)
        if result is not NotImplemented:
            return result
    # A meta tensor with the strides and offset that the tensor would have if it were plain.
    shadow = torch.empty(0, dtype=tensor.dtype, device="meta").as_strided(
        tensor.shape, *_geometry(tensor)
    )
    seen = func(shadow, *args, **kwargs)
    with _inference_as(tensor):
        if isinstance(seen, torch.Tensor):
            return _view_at(tensor, seen, lambda values: func(values, *args, **kwargs))

        def one_of(index: int) -> Step:
            return lambda values: func(values, *args, **kwargs)[index]

        return [_view_at(tensor, one, one_of(index)) for index, one in enumerate(seen)]


def _view_at(tensor: WrapperTensor, seen: torch.Tensor, step: Step) -> WrapperTensor:
    """The view at the position of ``seen``, a view of the shadow; quantized if possible.

    ``step`` makes the view from plain values.
    """
    rows = _rows_at(tensor, seen) if isinstance(tensor, QuantizedTensor) else None
    if rows is not None:
        return rows
    root, path = _place(tensor)
    return DequantizedView(root._alias() if root is tensor else root, (*path, step), seen)


def _geometry(tensor: WrapperTensor) -> tuple[Sequence[int], int]:
    if isinstance(tensor, QuantizedTensor):
        return geometry(tensor.shape, tensor._view_of)
    return tensor.stride(), int(tensor.storage_offset())


def _inference_as(tensor: WrapperTensor) -> contextlib.AbstractContextManager[object]:
    """Context in which to make views: a view of a normal tensor is never an inference tensor."""
    if _is_inference_mode() and not tensor.is_inference():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def _rows_at(tensor: QuantizedTensor, seen: torch.Tensor) -> QuantizedTensor | None:
    """The quantized view at the position of ``seen``, a view of the shadow.

    None if it is not a range of whole rows of the tensor's parent, or if it cuts
    the blocks of every copy.
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
    buffers = _rows(whole._present(), start, stop)
    if is_turned:
        if tensor.has_scales_of_rows or not tensor._is_transposable():
            return None
        for row, column in zip(tensor.rowwise_names, tensor.columnwise_names, strict=True):
            buffers[row], buffers[column] = buffers[column], buffers[row]
    if buffers[tensor.rowwise_names[0]] is None and buffers[tensor.columnwise_names[0]] is None:
        return None
    root = tensor._alias() if tensor._view_of is None else tensor._view_of.root
    view = tensor._with(buffers, seen.shape, RowsOf(root, start, is_turned))
    if type(root) is type(tensor):
        view._quantizer = tensor._quantizer.of_view(root._quantizer, start)
    return view


def _whole(tensor: QuantizedTensor) -> QuantizedTensor:
    """The tensor that ``tensor`` is a view of, with the same copies; or ``tensor`` itself."""
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
    units = whole._layout.rows
    for usage in ("rowwise", "columnwise"):
        # The rows after those of a shard may be padding, in the same block.
        is_cut = whole._cuts(usage, start, stop) and not (whole._sharding and start == 0)
        end = stop
        if usage == "columnwise" and stop == whole._matrix()[0]:
            # The rows that pad the last block belong to it: a GEMM contracts them too.
            end = round_up(stop, whole.format.multiple)
        for name in whole._names(usage):
            buffer = parts[name]
            if is_cut:
                parts[name] = None
            elif buffer is not None and name in units:
                parts[name] = _entries(buffer, *units[name], start, end)
    for name in set(whole._layout.shared) & units.keys():
        buffer = parts[name]
        assert buffer is not None
        parts[name] = _entries(buffer, *units[name], start, stop)
    return parts


def _entries(buffer: torch.Tensor, dim: int, unit: int, start: int, stop: int) -> torch.Tensor:
    """The entries of rows ``start`` to ``stop``; ``unit`` rows share one of dimension ``dim``."""
    first = start // unit
    return buffer.narrow(dim, first, ceil_div(stop, unit) - first)


# -- handlers: return NotImplemented to run the op on a dequantized copy -------------------


def _alias(func: object, tensor: WrapperTensor, *args: object, **kwargs: object) -> Any:
    if not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    if _is_inference_mode():
        with _inference_as(tensor):
            alias = tensor._alias()
    else:
        alias = tensor._alias()
    alias._take_attributes(tensor)
    return alias


def _clone(func: object, tensor: WrapperTensor, *args: object, **kwargs: object) -> Any:
    return tensor._like(torch.clone) if isinstance(tensor, QuantizedTensor) else NotImplemented


def _to_copy(func: object, tensor: WrapperTensor, **kwargs: Any) -> Any:
    """Another device: bytes and scales are copied unchanged. Another dtype: plain values.

    In the conversion of a module the bytes stay, and only the nominal dtype changes.
    """
    if not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    dtype = kwargs.get("dtype") or tensor.dtype
    device = kwargs.get("device") or tensor.device
    if dtype not in NOMINAL_DTYPES or (dtype != tensor.dtype and not is_module_conversion()):
        return NotImplemented
    non_blocking = kwargs.get("non_blocking", False)
    copy = tensor._like(
        lambda b: b.to(device=device, non_blocking=non_blocking, copy=True), dtype=dtype
    )
    copy._take_attributes(tensor)
    if tensor._high_precision_init_val is not None:  # a write to one is none to the other
        copy._high_precision_init_val = list(tensor._high_precision_init_val)
    copy._sharding = tensor._sharding
    return copy


def copy_(func: object, target: Any, source: Any, non_blocking: bool = False) -> Any:
    """A copy of bytes if they are the same in the target, else of values that are quantized."""
    if not isinstance(target, WrapperTensor):
        return target.copy_(_plain(source), non_blocking)
    if not isinstance(target, QuantizedTensor):
        return NotImplemented
    if isinstance(source, QuantizedTensor):
        source = source._present()
    if has_bytes_for(target, source) and target._can_be_written_alone():
        take_bytes(target, source, non_blocking)
        target._took_bytes()
        return target
    if isinstance(source, WrapperTensor):
        _warn_of_other_format(target, _place(source)[0])
    target.quantize_(_plain(source))
    return target


def has_bytes_for(target: QuantizedTensor, source: Any) -> bool:
    """Whether the bytes of ``source`` are right in ``target``, with its scales."""
    return (
        type(source) is type(target)
        and source.shape == target.shape
        and source._usage().encoding() == target._usage().encoding()
        and (source.derives_columnwise or not _missing(target, source))
    )


def _missing(target: QuantizedTensor, source: QuantizedTensor) -> list[str]:
    return [usage for usage in USAGES if target._has(usage) and not source._has(usage)]


def take_bytes(target: QuantizedTensor, source: QuantizedTensor, non_blocking: bool) -> None:
    """Copy the bytes and scales of ``source``, which :func:`has_bytes_for` the target."""
    if target._sharding is not None:
        target._sharding.has_new_bytes = True
    missing = _missing(target, source)
    if missing:  # a shard has one of two copies that are each other's transpose
        source = source.compact()._alias()
        source._make_copy(*missing)
    target._write(source, non_blocking)


def _warn_of_other_format(target: QuantizedTensor, source: QuantizedTensor) -> None:
    """Warn if ``source`` is of a checkpoint, in another format than ``target``."""
    one, other = ((type(t), t._usage().encoding()) for t in (source, target))
    if one == other:
        return
    if is_called_from("torch.distributed.checkpoint") or is_called_from(
        "torch.nn.modules.module", "_load_from_state_dict"
    ):
        formats = (f"{type(t).__name__} ({t._quantizer.unbound()})" for t in (source, target))
        warnings.warn(
            "A checkpoint of another recipe is loaded: its values, rounded in {}, are rounded "
            "again in {}. Load a checkpoint of unquantized values to round once.".format(*formats),
            FuserWarning,
            stacklevel=2,
        )


def new_zeros(func: object, tensor: WrapperTensor, shape: list[int], **kwargs: Any) -> Any:
    """Quantized zeros if only the number of rows differs; else plain zeros.

    Plain zeros also for a number of rows that is not whole blocks: a chunk of that many rows
    has lost a copy, and would be quantized again.
    """
    if not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device") or tensor.device
    zeros, quantizer = torch.zeros(shape, dtype=dtype, device=device), tensor._usage()
    is_like = dtype == tensor.dtype and zeros.shape[-1:] == tensor.shape[-1:]
    rows = math.prod(shape[:-1])
    multiple = GROUP_TILE if quantizer.stacked_rows > 1 else quantizer.format.multiple
    is_taken = rows % multiple == 0 or rows == tensor._matrix()[0]
    return quantizer(zeros) if is_like and is_taken else zeros


def _new_empty(func: object, tensor: WrapperTensor, shape: list[int], **kwargs: Any) -> Any:
    """A quantized tensor without buffers for ``dcp.async_save``, which sets copies of them."""
    is_like = isinstance(tensor, QuantizedTensor) and torch.Size(shape) == tensor.shape
    if not is_like or not is_called_from(STAGER):
        return NotImplemented
    assert isinstance(tensor, QuantizedTensor)
    device = kwargs.get("device") or tensor.device
    return type(tensor)({}, tensor.shape, tensor.dtype, device, tensor._quantizer)


def _is_pinned(func: object, tensor: WrapperTensor, *args: object) -> bool:
    return all(buffer.is_pinned() for buffer in tensor._memory())


def _pin_memory(func: object, tensor: WrapperTensor, *args: object) -> Any:
    if not isinstance(tensor, QuantizedTensor):
        return NotImplemented
    pinned = tensor._like(lambda buffer: buffer.pin_memory())
    pinned._sharding = tensor._sharding
    return pinned


def _record_stream(func: object, tensor: WrapperTensor, stream: Any) -> None:
    for buffer in tensor._memory():
        buffer.record_stream(stream)


# Views that torch marks with a bit and evaluates at a read; a wrapper has no such bit.
_LAZY_SIGNS = (aten._conj.default, aten._neg_view.default)

# A wing replaces the handler of an operation by one that calls it.
HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: copy_,
    aten._unsafe_view.default: _view,
    aten.new_zeros.default: new_zeros,
    aten.new_empty.default: _new_empty,
    aten.is_pinned.default: _is_pinned,
    aten._pin_memory.default: _pin_memory,
    aten.record_stream.default: _record_stream,
}
