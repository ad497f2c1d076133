"""Loads of checkpoints whose chunks are other rows than those of the tensor that is loaded into.

``torch.distributed.checkpoint`` copies chunk by chunk: the shards of other ranks, or parts of them.
In a format of blocks each brings its scales. If one scale belongs to all rows, the first chunk
brings that of the whole tensor: the tensor takes it with the bytes, and the chunks that follow have
the same scale. No rank waits for another, as ranks may load different numbers of chunks. Rows
that the load has not reached yet are zeros until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fuser.errors import StateError
from fuser.tensors.base import QuantizedTensor
from fuser.tensors.dispatch import HANDLERS, aten, copy_, has_bytes_for, take_bytes
from fuser.torch_private import running_load

# By the first buffer of a tensor, the plan of the load that wrote rows of it last.
_loads: MutableMapping[torch.Tensor, weakref.ref[object]] = WeakTensorKeyDictionary()


def _copy_(func: object, target: Any, source: Any, non_blocking: bool = False) -> Any:
    """A copy to rows of a tensor, which notes those that the running load has written."""
    view = target._view_of if isinstance(target, QuantizedTensor) else None
    if view is None:
        return copy_(func, target, source, non_blocking)
    chunk = source._present() if isinstance(source, QuantizedTensor) else source
    has_bytes = has_bytes_for(target, chunk)
    running = None if has_bytes and target._can_be_written_alone() else running_load()
    if running is None:
        return copy_(func, target, source, non_blocking)
    if has_bytes and _takes_chunk(target, chunk, *running):
        take_bytes(target, chunk, non_blocking)
        view.root._took_bytes()
    else:
        copy_(func, target, source, non_blocking)
    _loads[view.root._memory()[0]] = weakref.ref(running[0])
    return target


HANDLERS[aten.copy_.default] = _copy_


def _takes_chunk(
    target: QuantizedTensor, source: QuantizedTensor, plan: object, state: Mapping[str, object]
) -> bool:
    """Whether the bytes of a checkpoint's chunk can be written to rows of a tensor with one scale.

    The tensor has the scale of the chunk then. False if its scale is another, and rows have it that
    the load has written, or that are not in the checkpoint: their values are kept. StateError if
    the tensor is a shard, and chunks of this load have several scales.
    """
    view = target._view_of
    if view is None or view.is_turned:
        return False
    root, copies = view.root, ("rowwise", "columnwise")
    if root._rows_of_a_write() or any(target._has(usage) != root._has(usage) for usage in copies):
        return False
    first, of_rows = root._memory()[0], root._layout.rows
    brought = source.buffers()
    pairs = [
        (name, buffer, other.to(buffer.device))
        for name, buffer in root.buffers().items()
        if buffer is not None and (other := brought[name]) is not None
    ]
    if all(torch.equal(buffer, other) for name, buffer, other in pairs if name not in of_rows):
        return True
    written_by = _loads.get(first)
    if written_by is None or written_by() is not plan:
        is_whole = any(_is_whole(value, first) for value in state.values())
        for name, buffer, _ in pairs if is_whole else ():
            if name in of_rows:
                buffer.zero_()
        return is_whole
    if root._sharding is not None and root._sharding.is_exact:
        raise StateError(
            f"A checkpoint has several scales for the rows of a {type(root).__name__} shard of "
            f"shape {tuple(root.shape)}, as of parts that were quantized apart. Load it on as many "
            "ranks as have saved it, or without fully_shard."
        )
    return False


def _is_whole(value: object, first: torch.Tensor) -> bool:
    """Whether an entry of a state has this first buffer, and all rows but padding of a shard."""
    local = getattr(value, "_local_tensor", value)
    if not isinstance(local, QuantizedTensor):
        return False
    view = local._view_of
    if view is None:
        return local._memory()[0] is first
    root = view.root
    is_shard = root._sharding is not None and local._matrix()[0] >= root._sharding.rows
    return is_shard and view.start == 0 and root._memory()[0] is first
