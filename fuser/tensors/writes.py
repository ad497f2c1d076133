"""Writes to quantized tensors. Shards that are written together reduce their amaxes together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.formats import buffers_for_kernels, round_up
from fuser.functional.lazy import LazyTensor, materialize
from fuser.tensors.base import QuantizedTensor, geometry
from fuser.tensors.quantizer import Quantizer, RankRows, quantized_parts


def quantize_all(
    writes: Sequence[tuple[QuantizedTensor, torch.Tensor]], noop_flag: torch.Tensor | None = None
) -> None:
    """Quantize values into tensors, in place, for the copies that each has.

    ``writes`` are targets, which share no memory, and their values. ``noop_flag`` is that of
    :meth:`QuantizedTensor.quantize_`. StateError if a target is read-only; nothing is written then.
    """
    targets = [target for target, _ in writes]
    writes = [_alone(target, values) for target, values in writes]
    for seen, (target, _), fresh in zip(
        targets, writes, quantized_parts([_part(*write) for write in writes]), strict=True
    ):
        target._write(fresh if noop_flag is None else _unless(noop_flag, target, fresh))
        if seen is not target:
            seen._was_written()


def write_updated(target: QuantizedTensor, values: torch.Tensor | LazyTensor) -> None:
    """Quantize values into a tensor, in place, as :func:`quantize_all`.

    If they are lazy, the kernel that computes them writes the bytes of this tensor, where it can.
    They are not computed if the tensor is read-only.
    """
    quantizer = target._usage()
    is_whole = target._sharding is None and target._gathering is None
    takes_lazy = is_whole and quantizer.accepts_lazy
    if not (isinstance(values, LazyTensor) and target._can_be_written_alone() and takes_lazy):
        quantize_all([(target, materialize(values))])
        return
    buffers = target.buffers()
    if _are_for_kernels(buffers, target, quantizer):
        values.buffers = buffers
    fresh = quantizer.buffers_of(values)
    if all(fresh[name] is buffer for name, buffer in buffers.items()):
        target._was_written()
    else:  # torch has quantized them, or their blocks were padded
        target._write(quantizer._made(fresh, values))


def _are_for_kernels(
    buffers: dict[str, torch.Tensor | None], target: QuantizedTensor, quantizer: Quantizer
) -> bool:
    """Whether these are buffers as :meth:`Quantizer.new_buffers` makes them."""
    return all(
        (buffer := buffers[name]) is None
        or (
            buffer.shape == shape
            and buffer.dtype is kind.dtype
            and buffer.is_contiguous()
            and buffer.data_ptr() % kind.alignment == 0
        )
        for name, kind, shape in buffers_for_kernels(quantizer._layout, *target._matrix())
    )


def _alone(target: QuantizedTensor, values: torch.Tensor) -> tuple[QuantizedTensor, torch.Tensor]:
    """This write, or else the write to the blocks of its root that ``target`` is in."""
    source = values.detach().to(dtype=target.dtype, device=target.device).expand(target.shape)
    if target._can_be_written_alone():
        return target, source
    view = target._view_of
    assert view is not None
    rows = target.numel() // view.root.shape[-1]
    around, start = blocks_around(view.root, view.start, view.start + rows)
    values = around._values()
    strides, offset = geometry(target.shape, view)
    values.as_strided(target.shape, strides, offset - start * values.shape[-1]).copy_(source)
    return around, values


def blocks_around(root: QuantizedTensor, start: int, stop: int) -> tuple[QuantizedTensor, int]:
    """The fewest rows of ``root``, and the first of them, that are written for these rows alone.

    Whole blocks, or whole matrices of a stack; ``root`` if a scale belongs to all rows.
    """
    m, k = root._matrix()
    unit = root._rows_of_a_write() or max(m, 1)
    first, last = start // unit * unit, min(round_up(stop, unit), m)
    if last - first < m:
        part = root.detach().view(m, k)[first:last]
        if isinstance(part, QuantizedTensor) and part._can_be_written_alone():
            return part, first
    root._can_be_written_alone()  # refuses if it is read-only
    return root, 0


def _part(target: QuantizedTensor, values: torch.Tensor) -> RankRows:
    quantizer, sharding = target._usage(), target._sharding
    return RankRows(quantizer, values) if sharding is None else sharding.write(quantizer, values)


def _unless(flag: torch.Tensor, target: QuantizedTensor, fresh: QuantizedTensor) -> QuantizedTensor:
    """The current contents of ``target`` if ``flag`` is set, else ``fresh``."""
    is_set = flag.to(target.device).reshape(()) != 0
    chosen, held = fresh.buffers(), target.compact().buffers()
    for name, new in chosen.items():
        old = held[name]
        if new is not None and old is not None:
            chosen[name] = torch.where(is_set, old, new)
    return target._with(chosen, target.shape, None)


QuantizedTensor._write_all = staticmethod(quantize_all)
