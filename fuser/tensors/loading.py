"""Loads of checkpoints whose chunks are other rows than those of the tensor that is loaded into.

``torch.distributed.checkpoint`` copies chunk by chunk: the shards of other ranks, or parts of them.
In a format of blocks each brings its scales. If one scale belongs to all rows, the first chunk
brings that of the whole tensor: the tensor takes it with the bytes, and the chunks that follow have
the same scale. No rank waits for another, as ranks may load different numbers of chunks. Rows
that the load has not reached yet are zeros then: their values are those of before the load.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fuser.errors import FuserWarning, StateError
from fuser.tensors.base import QuantizedTensor
from fuser.torch_private import is_called_from, running_load

CHECKPOINT = "torch.distributed.checkpoint"


@dataclass
class _Load:
    """The load that writes a tensor: its plan, the rows that it has written, the version then."""

    plan: weakref.ref[Any]
    rows: torch.Tensor
    version: int


# By the first buffer of a tensor, the load that wrote to it last.
_loads: MutableMapping[torch.Tensor, _Load] = WeakTensorKeyDictionary()


def takes_chunk(target: QuantizedTensor, source: QuantizedTensor) -> bool:
    """Whether the bytes of a checkpoint's chunk can be written to rows of a tensor with one scale.

    The tensor has the scale of the chunk then. Not if rows that the load has written, or that
    belong to another tensor, have another scale: their values are kept.

    Raises
    ------
    StateError
        If the tensor is a shard, and chunks of this load have several scales.
    """
    view = target._view_of
    if view is None or view.is_turned:
        return False
    root, copies = view.root, ("rowwise", "columnwise")
    if root._rows_of_a_write() or any(target._has(usage) != root._has(usage) for usage in copies):
        return False
    load = _load_of(root)
    if load is None:
        return False
    of_rows = root._layout.rows
    if all(
        torch.equal(own, brought)
        for name, own, brought in _pairs(root, source)
        if name not in of_rows
    ):
        return True
    if not load.rows.any():
        for name, own, _ in _pairs(root, source):
            if name in of_rows:
                own.zero_()
        return True
    if root._sharding is not None and root._sharding.is_exact:
        raise StateError(
            f"A checkpoint has several scales for the rows of a {type(root).__name__} shard of "
            f"shape {tuple(root.shape)}, as of parts that were quantized apart. Load it on as many "
            "ranks as have saved it, or without fully_shard."
        )
    return False


def note_rows(target: QuantizedTensor) -> None:
    """After a write to rows of a tensor: the load that wrote them has them."""
    view = target._view_of
    if view is None or view.is_turned or not _loads:
        return
    first = view.root._memory()[0]
    load = _loads.get(first)
    if load is not None:
        load.rows[view.start : view.start + target._matrix()[0]] = True
        load.version = first._version


def _load_of(root: QuantizedTensor) -> _Load | None:
    """The running load, if all rows of the tensor belong to it; with a record of what it wrote."""
    running = running_load()
    first = root._memory()[0]
    if running is None or first.is_inference():
        return None
    plan, state = running
    load = _loads.get(first)
    if load is None or load.plan() is not plan:
        if not any(_is_whole(value, first) for value in state.values()):
            return None
        rows = torch.zeros(root._matrix()[0], dtype=torch.bool, device="cpu")
        load = _loads[first] = _Load(weakref.ref(plan), rows, first._version)
    elif load.version != first._version:  # others wrote to it: all rows are kept
        load.rows.fill_(True)
    return load


def _is_whole(value: Any, first: torch.Tensor) -> bool:
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


def _pairs(
    root: QuantizedTensor, source: QuantizedTensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The name of each buffer that both have, with those of the tensor and of the chunk."""
    brought = source.buffers()
    for name, own in root.buffers().items():
        other = brought[name]
        if own is not None and other is not None:
            yield name, own, other.to(own.device)


def warn_of_other_format(target: QuantizedTensor, source: QuantizedTensor) -> None:
    """Warn if ``source`` is of a checkpoint, in another format than ``target``."""
    one, other = ((type(t), t._usage().encoding()) for t in (source, target))
    if one == other:
        return
    if is_called_from(CHECKPOINT) or is_called_from(
        "torch.nn.modules.module", "_load_from_state_dict"
    ):
        formats = (f"{type(t).__name__} ({t._quantizer.unbound()})" for t in (source, target))
        warnings.warn(
            "A checkpoint of another recipe is loaded: its values, rounded in {}, are rounded "
            "again in {}. Load a checkpoint of unquantized values to round once.".format(*formats),
            FuserWarning,
            stacklevel=2,
        )
