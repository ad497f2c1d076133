"""Loads of checkpoints whose chunks are other rows than those of the tensor that is loaded into.

``torch.distributed.checkpoint`` copies chunk by chunk: the shards of other ranks, or parts of them.
In a format of blocks each brings its scales. If one scale belongs to all rows, the first chunk
brings that of the whole tensor: the tensor takes it with the bytes, and the chunks that follow have
the same scale. No rank waits for another, as ranks may load different numbers of chunks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fuser.errors import FuserWarning, StateError
from fuser.tensors.base import QuantizedTensor
from fuser.torch_private import is_called_from

CHECKPOINT = "torch.distributed.checkpoint"


class _Loaded(NamedTuple):
    """The rows of a tensor that the running load has filled, and the tensor's version then."""

    rows: int
    version: int


# By the first buffer of a tensor that is partly loaded.
_partly: MutableMapping[torch.Tensor, _Loaded] = WeakTensorKeyDictionary()


def takes_chunk(target: QuantizedTensor, source: QuantizedTensor) -> bool:
    """Whether the bytes of a checkpoint's chunk can be written to rows of a tensor with one scale.

    The tensor has the scale of the chunk then; its other rows, which are loaded later, are zeros if
    its scale was another.

    Raises
    ------
    StateError
        If the tensor is a shard, and chunks of this load have several scales.
    """
    view = target._view_of
    if view is None or view.is_turned or not is_called_from(CHECKPOINT):
        return False
    root = view.root
    copies = ("rowwise", "columnwise")
    if root._rows_of_a_write() or any(target._has(usage) != root._has(usage) for usage in copies):
        return False
    of_rows = root._layout.rows
    if all(
        torch.equal(own, brought)
        for name, own, brought in _pairs(root, source)
        if name not in of_rows
    ):
        return True
    if not _rows_loaded(root):
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


def note_chunk(target: QuantizedTensor) -> None:
    """After the bytes of a chunk were written to rows of a tensor with one scale."""
    assert target._view_of is not None
    root = target._view_of.root
    root._took_bytes()
    first = root._memory()[0]
    rows = _rows_loaded(root) + target._matrix()[0]
    whole = root._matrix()[0] if root._sharding is None else root._sharding.rows
    if rows >= whole:
        _partly.pop(first, None)
    elif not first.is_inference():
        _partly[first] = _Loaded(rows, first._version)


def _pairs(
    root: QuantizedTensor, source: QuantizedTensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The name of each buffer that both have, with those of the tensor and of the chunk."""
    brought = source.buffers()
    for name, own in root.buffers().items():
        other = brought[name]
        if own is not None and other is not None:
            yield name, own, other.to(own.device)


def _rows_loaded(root: QuantizedTensor) -> int:
    first = root._memory()[0]
    loaded = _partly.get(first)
    is_same = loaded is not None and not first.is_inference() and loaded.version == first._version
    return loaded.rows if loaded is not None and is_same else 0


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
