"""Several parameters that ``fully_shard`` gathers quantized, as one: joined weights of a linear.

Their bytes and scales are copied into one memory for a forward, and again for its backward, which
may read the other copy. Between these there is none, as of the parameters themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from fuser.formats import GROUP_TILE
from fuser.tensors.base import USAGES, QuantizedTensor
from fuser.tensors.gathering import Gathering
from fuser.tensors.quantizer import Quantizer


def can_join(quantizer: Quantizer, rows: Sequence[int]) -> bool:
    """Whether weights of so many ``rows``, each quantized by ``quantizer``, are one by their bytes.

    No block of the format reaches over the end of one. A scale of a whole weight is one that can be
    that of all, as largest amax of theirs.
    """
    if quantizer.format.parts is not None or any(count % GROUP_TILE for count in rows):
        return False
    return not has_one_scale(quantizer) or type(quantizer).amaxes_of is not Quantizer.amaxes_of


def has_one_scale(quantizer: Quantizer) -> bool:
    """Whether a scale or an amax of the format belongs to all rows."""
    layout = quantizer.format.layout
    return layout.rows.keys() != layout.buffers.keys()


class JoinedGathering(Gathering):
    """The memory of gathered parameters as one ``[M, K]``; see :class:`Gathering`.

    ``parts`` have the rows, in their order.
    """

    def __init__(self, parts: Sequence[QuantizedTensor]) -> None:
        self.parts = tuple(parts)
        first = parts[0]
        shape = torch.Size((sum(part.shape[0] for part in parts), first.shape[1]))
        layout = first._layout.shapes(*shape)
        buffers: dict[str, torch.Tensor | None] = dict.fromkeys(layout)
        memory: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False):
            for name, of_first in first.buffers().items():
                if of_first is not None:
                    flat = of_first.new_empty(layout[name])
                    flat.untyped_storage().resize_(0)
                    memory[name] = buffers[name] = flat
        one: Gathering = first._gathering
        super().__init__(shape, one.shard, buffers, memory, set(), one.group)

    def is_of(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether it is that of these."""
        return len(parts) == len(self.parts) and all(map(operator.is_, parts, self.parts))

    def whole(self) -> torch.Tensor:
        """The parameters as one weight, which a forward reads; differentiable.

        StateError if they are not gathered now.
        """
        whole: torch.Tensor = _Whole.apply(self, *self.parts)  # type: ignore[no-untyped-call]
        return whole

    def free_all(self) -> None:
        """Free the memory, until a forward or a backward reads it."""
        self.free(tuple(self.memory))

    def complete(self, usage: str) -> bool:
        """Copy the copy ``usage`` from the parameters; False if one of them has none."""
        names = self.parts[0]._names(usage)
        if not set(names) <= self.memory.keys():
            return False
        if not self.holds(names):
            self._fill(usage)
        return True

    def note_backward_read(self, usage: str | None) -> None:
        super().note_backward_read(usage)
        for part in self.parts:
            part._gathering.note_backward_read(usage)

    def _fill(self, usage: str) -> None:
        present = [part._present(usage) for part in self.parts]
        if not all(part._has(usage) for part in present):  # one makes it of its other copy
            present = [part.with_usage(usage) for part in present]
        layout = present[0]._layout
        of_one = [name for name in self.memory if name not in layout.rows]
        for name in dict.fromkeys((*present[0]._names(usage), *layout.shared, *of_one)):
            held = [getattr(part, name) for part in present]
            if name not in self.memory or held[0] is None:
                continue
            if name in of_one:  # they have one
                self.allocated(name).copy_(held[0])
            else:
                dim, unit = layout.rows[name]
                counts = [part.shape[0] // unit for part in self.parts]
                target = _bytes(self.allocated(name))
                if target.shape[dim] > sum(counts):  # scales have padding
                    target.zero_()
                    target = target.narrow(dim, 0, sum(counts))
                sources = [
                    _bytes(buffer).narrow(dim, 0, count)
                    for buffer, count in zip(held, counts, strict=True)
                ]
                torch.cat(sources, dim, out=target)


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer


class _Whole(torch.autograd.Function):
    """Gathered parameters as one; the gradient of each is its rows."""

    @staticmethod
    def forward(ctx: Any, gathering: JoinedGathering, *parts: QuantizedTensor) -> QuantizedTensor:
        ctx.gathering = gathering
        first = parts[0]
        gathering.recipe, gathering.shard = first._gathering.recipe, first._gathering.shard
        # Theirs, which a forward clears: a read of a pass before needs what this one has not.
        gathering.backward_reads = first._gathering.backward_reads
        gathering.complete(USAGES[0])
        shape, device = gathering.shape, first.device
        whole = type(first)(gathering.buffers, shape, first.dtype, device, first._quantizer)
        whole._gathering = gathering
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.gathering.free_all()  # what computes this gradient has read the weight
        return None, *torch.split(grad, [part.shape[0] for part in ctx.gathering.parts])
