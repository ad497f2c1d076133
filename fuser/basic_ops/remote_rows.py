"""Rows that experts get from other ranks: sent as bytes or values, which the quantizer decides."""

from __future__ import annotations

from typing import Any

import torch

from fuser.basic_ops.expert_parallel import Routed
from fuser.communication import start_all_gather, start_all_to_all
from fuser.cuda.launch import call_each_time
from fuser.formats import NumberFormat
from fuser.functional.amax import largest_of_ranks
from fuser.functional.grouped import PaddedGroups, padded_groups, padded_rows, unpad
from fuser.functional.lazy import LazyTensor, materialize
from fuser.functional.permutation import gathered_rows, permute, row_map_of
from fuser.reference.fp8 import scale_from_amax
from fuser.reference.grouped import pad
from fuser.tensors import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    QuantizedTensor,
    Quantizer,
    groups_quantizer,
)
from fuser.tensors.group_formats import Float8GroupsQuantizer, amaxes_of_groups
from fuser.torch_private import foreach_maximum_

WORD = 8
"""Rows are moved in words of this many bytes."""


def sends_bytes(format_: NumberFormat, features: int) -> bool:
    """Whether rows of ``features`` that the experts quantize in a format are sent as bytes.

    They do if an expert has one scale: the sending ranks can then agree on it.
    """
    return format_.name == "FP8" and features % WORD == 0


class RemoteRows(LazyTensor):
    """The rows of a rank's experts, sorted by expert, of tokens that have not been sent yet.

    They are sent once, in the same form by all ranks: :meth:`quantized` sends bytes, all other
    readers values. ``may_send_bytes``: the groups that are quantized are the experts.
    """

    def __init__(self, routed: Routed, group: Any, *, may_send_bytes: bool) -> None:
        self.routed, self.group, self.may_send_bytes = routed, group, may_send_bytes
        self.shape = torch.Size((len(routed.row_map), routed.x.shape[1]))
        self.dtype, self.device = routed.x.dtype, routed.x.device
        self._is_sent = False

    def gathered(self) -> torch.Tensor | LazyTensor:
        """The values; kernels read them by index from the received rows. It is called once."""
        assert not self._is_sent, "rows are sent once"
        self._is_sent = True
        received = self.routed.received(self.group)
        return gathered_rows(received, self.routed.row_map, self.routed.places)

    def _from_kernel(self) -> torch.Tensor:
        return materialize(self.gathered())

    _from_reference = _from_kernel

    # -- bytes ---------------------------------------------------------------------------

    def quantized(
        self, quantizers: list[Quantizer], groups: PaddedGroups, *, rowwise: bool, columnwise: bool
    ) -> QuantizedTensor | None:
        """The rows of padded ``groups``, sent as bytes; None if they must be sent as values.

        The bytes are those of rows that are quantized after they have arrived: a scale is that of
        the amax of an expert's rows on all ranks, or the one that the expert's rank has.
        """
        if not (self.may_send_bytes and sends_bytes(quantizers[0].format, self.shape[1])):
            return None
        routed, exchange = self.routed, self.routed.exchange
        sent, scale = self._sent_bytes(quantizers)
        arriving = start_all_to_all(sent, self.group, exchange.send_sizes, exchange.receive_sizes)
        # The received place of each padded row, -1 in the padding and after the last group.
        places = pad(routed.row_map.view(-1, 1) + 1, groups.tiles).view(-1) - 1
        own = torch.distributed.get_rank(self.group) * routed.counts.shape[1]
        scale_inv = scale[own : own + len(groups.ends)].reciprocal()
        of_tiles = scale_inv[groups.tiles[:, 0].clamp(min=0).long()]
        data = permute(arriving.wait(), places, routed.places).view(torch.uint8)
        quantizer = groups_quantizer(quantizers, groups, rowwise=rowwise, columnwise=columnwise)
        buffers = {"_rowwise_data": data, "_columnwise_data": None, "_scale_inv": of_tiles}
        tensor = quantizer.tensor_class(
            buffers, tuple(data.shape), self.dtype, self.device, quantizer
        )
        if columnwise:
            tensor._make_copy("columnwise")
            if not rowwise:
                tensor.release("rowwise")
        return tensor

    def _sent_bytes(self, quantizers: list[Quantizer]) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes of the rows that this rank sends, in words; and the scale of each group."""
        routed, inverse_map = self.routed, self.routed.exchange.inverse_map
        count, sizes = routed.exchange.sent, routed.counts.view(-1)
        groups = padded_groups(sizes, len(sizes), count, sizes.device)
        rows = gathered_rows(routed.x, row_map_of(inverse_map, count), inverse_map)
        tensor, scale = self._quantized_here(quantizers, padded_rows(rows, groups), groups)
        return unpad(tensor._rowwise_data.view(torch.int64), groups), scale

    def _quantized_here(
        self, quantizers: list[Quantizer], rows: Any, groups: PaddedGroups
    ) -> tuple[Any, torch.Tensor]:
        """This rank's rows for all experts, quantized; and the scales, as :attr:`Routed.counts`."""
        first = quantizers[0]
        if isinstance(first, Float8CurrentScalingQuantizer):
            amaxes = _largest(amaxes_of_groups(rows, groups), self.group)
            how = (first.force_pow_2_scales, first.amax_epsilon)
            scale = scale_from_amax(amaxes, first.fp8_dtype.max, *how)
            return Float8GroupsQuantizer(groups, first, **_state(scale))(rows), scale
        states = [q for q in quantizers if isinstance(q, Float8Quantizer)]
        own_scales = torch.cat([*(q.scale for q in states), states[0].scale])
        scale = start_all_gather(own_scales, self.group).wait()
        amaxes = torch.zeros_like(scale)
        recorded = {"amaxes": amaxes.view(-1, 1).unbind(), **_state(scale)}
        alone = Float8CurrentScalingQuantizer(states[0].fp8_dtype)
        tensor = Float8GroupsQuantizer(groups, alone, **recorded)(rows)
        if states[0].amax is not None:
            begin = torch.distributed.get_rank(self.group) * len(own_scales)
            own = _largest(amaxes, self.group)[begin : begin + len(states)]
            kept = [q.amax for q in states if q.amax is not None]
            foreach_maximum_(kept, list(own.view(-1, 1).unbind()))
        return tensor, scale


def _state(scale: torch.Tensor) -> dict[str, Any]:
    """Arguments of a quantizer of rows that has these scales, and makes rowwise copies alone."""
    return {"scales": scale.view(-1, 1).unbind(), "rowwise": True, "columnwise": False}


def _largest(amaxes: torch.Tensor, group: Any) -> torch.Tensor:
    """The maxima over the ranks, in place."""
    call_each_time(largest_of_ranks, amaxes, group)
    return amaxes
