"""Gathering quantized tensors: ranks send the bytes and scales of their rows, not values."""

from __future__ import annotations

import torch

from fuser.communication.collectives import Pending, start_all_gather
from fuser.communication.groups import Group
from fuser.cuda.launch import call_each_time
from fuser.errors import StateError
from fuser.tensors import QuantizedTensor, Quantizer


def _blank(quantizer: Quantizer, rows: int) -> QuantizedTensor:
    """A tensor without bytes, which knows how its format stores rows."""
    cls = quantizer.tensor_class
    return cls({}, (rows, 1), torch.float32, torch.device("meta"), quantizer)


def _buffers_of(tensor: QuantizedTensor, usage: str) -> list[str]:
    """The buffers of one copy, and those of both."""
    other = tensor._names("columnwise" if usage == "rowwise" else "rowwise")
    return [name for name in tensor.buffer_names if name not in other]


def can_gather(quantizer: Quantizer, usage: str, rows: int, *, has_equal_scales: bool) -> bool:
    """Whether the copies of all ranks, of ``rows`` rows each, make up the copy of all rows.

    They do if no block has rows of two ranks, and if the scales that all rows share are equal on
    all ranks, ``has_equal_scales``.
    """
    blank = _blank(quantizer, rows)
    units = blank._layout.rows
    return all(
        rows % units[name][1] == 0 if name in units else has_equal_scales
        for name in _buffers_of(blank, usage)
    )


def makes_columns(quantizer: Quantizer) -> bool:
    """Whether the columnwise copy is made from the rowwise one, and so need not be sent."""
    return _blank(quantizer, 1).derives_columnwise


def start_quantized_gather(
    tensor: QuantizedTensor, usage: str, group: Group, *, checks_scales: bool = False
) -> Pending[QuantizedTensor]:
    """Start to gather the ``"rowwise"`` or ``"columnwise"`` copy of the rows of all ranks.

    The caller has asked :func:`can_gather`. With ``checks_scales`` the scale of the tensor is
    gathered too: if those of two ranks differ, ``wait`` raises a StateError on the CPU, and on
    other devices, where a check would wait for the device, the scale becomes NaN.
    """
    source = tensor.compact()
    units, (rows, columns) = source._layout.rows, source._matrix()
    ranks = torch.distributed.get_world_size(group)
    layout = source._layout.shapes(rows * ranks, columns)
    pending: dict[str, Pending[torch.Tensor]] = {}
    shared: dict[str, Pending[torch.Tensor]] = {}
    buffers: dict[str, torch.Tensor | None] = {}
    for name in _buffers_of(source, usage):
        buffer = getattr(source, name)
        if name in units:
            dim, unit = units[name]
            pending[name] = start_all_gather(buffer.narrow(dim, 0, rows // unit), group, dim)
            continue
        buffers[name] = buffer
        if checks_scales:
            shared[name] = start_all_gather(buffer, group)

    def finish() -> QuantizedTensor:
        for name, gathering in pending.items():
            buffers[name] = _padded(gathering.wait(), layout[name])
        for name, gathering in shared.items():
            scale = buffers[name]
            assert scale is not None
            buffers[name] = _checked(scale, gathering.wait(), tensor)
        shape = (ranks * tensor.shape[0], *tensor.shape[1:])
        return type(tensor)(buffers, shape, tensor.dtype, tensor.device, tensor._quantizer)

    return Pending(finish)


def _padded(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``buffer`` with zeros at its end, in ``shape``."""
    if buffer.shape == shape:
        return buffer
    out = buffer.new_zeros(shape)
    out[tuple(map(slice, buffer.shape))] = buffer
    return out


def _refuse_other_scales(are_equal: torch.Tensor, scales: torch.Tensor, name: str) -> None:
    if not are_equal:
        raise StateError(
            f"A {name} cannot be gathered: the ranks quantized their rows with "
            f"the inverse scales {scales.tolist()}. Under delayed scaling, start ranks "
            "that share rows from one state, and reduce amaxes over a group that has all of them."
        )


def _checked(scale: torch.Tensor, scales: torch.Tensor, tensor: QuantizedTensor) -> torch.Tensor:
    """The ``scale`` of this rank, if the ``scales`` of all ranks equal it."""
    are_equal = (scales == scale).all()
    if scale.device.type == "cpu":
        call_each_time(_refuse_other_scales, are_equal, scales, type(tensor).__name__)
    return torch.where(are_equal, scale, torch.full_like(scale, float("nan")))
