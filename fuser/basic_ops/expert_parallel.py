"""Experts on several ranks: the exchange of rows between ranks, before and after the experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fuser.basic_ops.collectives import group_of, note_group
from fuser.communication import (
    Agreement,
    Group,
    GroupArgument,
    GroupRef,
    Pending,
    group_size,
    may_cross_hosts,
    resolved,
    start_all_gather,
    start_all_to_all,
)
from fuser.cuda.launch import call_each_time, refuse_recording
from fuser.errors import InputError, StateError
from fuser.formats import NumberFormat, round_up
from fuser.functional import permutation as ops
from fuser.functional.amax import largest_of_ranks
from fuser.functional.grouped import PaddedGroups, padded_groups, padded_rows, unpad
from fuser.functional.lazy import LazyTensor, materialize
from fuser.functional.routing import DropPolicy, within_blocks
from fuser.op import BasicOperation, OperationContext
from fuser.precision.contexts import current_recipe
from fuser.precision.delayed_scaling import mixes_amaxes_of
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

Sizes = tuple[int, ...]
READS = "numbers of rows are read on the host"
SMALL_BLOCK = 128
"""Rows of a block whose memory does not matter."""


class ExpertParallelOperation(BasicOperation):
    """Base of the two ops that take tokens to their experts and back.

    ``group``: the process group over which experts are spread, or a mesh of one dimension. None:
    all experts are on this rank.

    Raises InputError if this rank is not a member of the group. Raises StateError if a group is
    given and torch.distributed is not initialised.
    """

    parameter_names = ()
    saves_input = False
    can_quantize_output = ("forward", "backward")

    def __init__(self, group: GroupArgument) -> None:
        super().__init__()
        name = type(self).__name__
        self._group = GroupRef(group)
        self._agreement = Agreement()
        self.expert_parallel_size = 1 if group is None else group_size(name, group)
        self.may_cross_hosts = group is not None and may_cross_hosts(name, group)
        """Whether ranks may be on several hosts, between which fewer bytes take less time."""

    @property
    def expert_parallel_group(self) -> GroupArgument:
        """The argument of the constructor; it may be set to another group of the same size."""
        return self._group.group

    @expert_parallel_group.setter
    def expert_parallel_group(self, group: GroupArgument) -> None:
        name = type(self).__name__
        ranks = 1 if group is None else group_size(name, group)
        if ranks != self.expert_parallel_size:
            raise InputError(
                f"{name} was made for experts on {self.expert_parallel_size} ranks, and got an "
                f"expert_parallel_group of {ranks}."
                " Make the op with that group."
            )
        self._group = GroupRef(group)
        self.may_cross_hosts = group is not None and may_cross_hosts(name, group)

    @property
    def process_groups(self) -> tuple[GroupArgument, ...]:
        return (self.expert_parallel_group,) if self.expert_parallel_size > 1 else ()

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can contain it: torch captures these collectives."""
        return self.is_recordable

    def _agreed_group(self, ctx: OperationContext, x: torch.Tensor, *others: str) -> Group:
        """The group of a forward, after its ranks have compared their recipe, dtypes and options.

        ``x`` has the dtype and the last dimension of the rows. Notes the group for backward.
        """
        name = type(self).__name__
        group, recipe = resolved(name, self.expert_parallel_group), current_recipe()
        of_probs = any(ctx.extra_inputs_require_grad)
        grads = [bool(ctx.requires_grad and wants) for wants in (ctx.input_requires_grad, of_probs)]
        facts = (*others, f"gradients {grads}")
        self._agreement.check(name, group, recipe, x, *facts, compares_rows=False)
        if recipe is not None and recipe.delayed() and mixes_amaxes_of(group):
            raise StateError(
                f"{name} spreads experts over {self.expert_parallel_size} ranks, and delayed "
                "scaling reduces amaxes over these ranks, so that experts of different ranks would "
                "share scales. Use DelayedScaling(reduce_amax=False), or an autocast around the "
                "experts whose amax_reduction_group has only ranks with the same experts."
            )
        note_group(ctx, group)
        return group

    def _group_of(self, ctx: OperationContext) -> Group:
        """The group of the forward, in its backward."""
        return group_of(ctx, type(self).__name__, self.expert_parallel_group)


class Exchange(NamedTuple):
    """The rows that this rank sends to the experts' ranks, and those that its experts receive.

    A rank sends ``sent`` rows, sorted by expert: those for rank 0, then those for rank 1, and so
    on. It receives rows from rank 0, then from rank 1, and so on: ``received`` rows, which are then
    sorted by expert. ``inverse_map``, int32 ``[T, k]``, is the place of each assignment among the
    sent rows, -1 if it was dropped. ``received_map``, int32 ``[received]``, is the row of each
    received place after that sort, -1 if the place is unused.

    ``send_sizes`` and ``receive_sizes`` are rows by rank; None if all are equal.
    """

    inverse_map: torch.Tensor
    received_map: torch.Tensor
    send_sizes: Sizes | None
    receive_sizes: Sizes | None

    @property
    def sent(self) -> int:
        """The number of rows that this rank sends."""
        return len(self.received_map) if self.send_sizes is None else sum(self.send_sizes)

    def start_to_tokens(self, rows: torch.Tensor, group: Group) -> Pending[torch.Tensor]:
        """Start to send rows of experts, ``[received, ...]``, back; returns ``[sent, ...]``."""
        back = ops.unpermute(rows, self.received_map.view(-1, 1), None)
        return start_all_to_all(back, group, self.receive_sizes, self.send_sizes)

    def sum_of_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of each token's returned rows, ``[T, ...]``."""
        return ops.unpermute(rows, self.inverse_map, None)

    def start_of_tokens(self, x: torch.Tensor, group: Group) -> Pending[torch.Tensor]:
        """Start to send each token of ``x [T, ...]``; returns received rows, not sorted yet."""
        row_map = ops.row_map_of(self.inverse_map, self.sent)
        rows = ops.permute(x, row_map, self.inverse_map)
        return start_all_to_all(rows, group, self.send_sizes, self.receive_sizes)

    def sorted(self, rows: torch.Tensor) -> torch.Tensor:
        """Received rows, sorted by expert."""
        row_map = ops.row_map_of(self.received_map, len(self.received_map))
        return ops.permute(rows, row_map, self.received_map.view(-1, 1))

    # -- as one tensor, for a channel ------------------------------------------------------

    def packed(self, sizes: torch.Tensor) -> torch.Tensor:
        """The exchange as one tensor of :func:`packed_shape`.

        ``sizes`` are the rows by rank, int32 ``[2 * ranks]`` on the device: sent, then received.
        The tensor has them as its attribute ``exchange_sizes`` too, for a reader in the same
        pipeline, which then need not wait for the device.
        """
        (tokens, k), received = self.inverse_map.shape, len(self.received_map)
        shape = packed_shape(tokens, k, received, len(sizes) // 2)
        rest = shape[0] * k - tokens * k - received - len(sizes)
        parts = [self.inverse_map.reshape(-1), self.received_map, sizes, sizes.new_zeros(rest)]
        whole = torch.cat(parts).view(shape)
        whole.exchange_sizes = (self.send_sizes, self.receive_sizes)  # type: ignore[attr-defined]
        return whole

    @classmethod
    def unpacked(
        cls, packed: torch.Tensor, received: int, ranks: int, sizes: Any = None
    ) -> Exchange:
        """The exchange of a tensor of :meth:`packed`.

        ``sizes``: its sizes by rank, if they are known. Otherwise they are the tensor's attribute
        ``exchange_sizes``. A copy of the tensor lacks it: the sizes are then read from its values,
        which waits for the device.
        """
        tokens, k = tokens_of(packed.shape, received, ranks), packed.shape[1]
        flat = packed.reshape(-1)
        end = tokens * k + received
        if sizes is None:
            sizes = getattr(packed, "exchange_sizes", None)
        if sizes is None:
            refuse_recording(READS)
            counts = flat[end : end + 2 * ranks].tolist()
            sizes = tuple(counts[:ranks]), tuple(counts[ranks:])
        return cls(flat[: tokens * k].view(tokens, k), flat[tokens * k : end], *sizes)

    @property
    def sizes(self) -> tuple[Sizes | None, Sizes | None]:
        """The sizes by rank, for :meth:`unpacked`."""
        return self.send_sizes, self.receive_sizes


def packed_shape(tokens: int, k: int, received: int, ranks: int) -> tuple[int, int]:
    """The shape of a packed exchange: rows of k numbers."""
    return tokens + round_up(received + 2 * ranks, k) // k, k


def tokens_of(shape: tuple[int, ...], received: int, ranks: int) -> int:
    """The number of tokens T of a packed exchange; negative for another tensor."""
    return shape[0] - round_up(received + 2 * ranks, shape[1]) // shape[1]


class Routed(NamedTuple):
    """Tokens on their way to the experts, and the maps by which received rows are sorted.

    ``x`` are the tokens of this rank, ``counts`` the numbers of rows that it sends to each expert,
    and of unused rows, int32 ``[ranks, experts of a rank + 1]``. ``row_map`` and ``places`` are the
    maps of :func:`fuser.functional.permutation.permute` of received rows, ``probs`` their
    probabilities after the sort, and ``packed`` is the exchange for a channel.
    """

    x: torch.Tensor
    counts: torch.Tensor
    row_map: torch.Tensor
    places: torch.Tensor
    split_sizes: torch.Tensor
    probs: torch.Tensor
    exchange: Exchange
    packed: torch.Tensor
    moving: Pending[torch.Tensor] | None
    """The rows, if they were sent already."""

    def received(self, group: Group) -> torch.Tensor:
        """The rows as they arrive, ``[received, hidden]``."""
        moving = self.moving
        if moving is None:
            moving = self.exchange.start_of_tokens(self.x, group)
        return moving.wait()


def block_of_most(expert_indices: torch.Tensor, num_experts: int, group: Group) -> int | None:
    """Rows of a block that holds what any rank sends to any other: the host waits for them.

    The number is rounded up, so that it comes back in later steps. None if there are no rows, or if
    equal blocks were more than 1.5 times as many as the rank gets that gets most; small blocks may.
    """
    ranks = torch.distributed.get_world_size(group)
    of_ranks = expert_indices.reshape(-1, 1).div(num_experts // ranks, rounding_mode="floor")
    numbers = torch.arange(ranks, device=expert_indices.device)
    sent_here = (of_ranks == numbers).sum(0, dtype=torch.int32)
    sent = start_all_gather(sent_here, group).wait().view(ranks, ranks)
    refuse_recording(READS)
    most, most_received = torch.stack([sent.max(), sent.sum(0).max().int()]).tolist()
    block = round_up(most, max(8, 1 << max(0, most.bit_length() - 6)))
    is_small = block * ranks <= 1.5 * most_received + SMALL_BLOCK * ranks
    return block if block and is_small else None


def route_to_experts(
    x: torch.Tensor,
    expert_indices: torch.Tensor,
    probs: torch.Tensor,
    num_experts: int,
    block: int | None,
    drop_policy: DropPolicy | None,
    group: Group,
    *,
    sends_rows: bool,
) -> Routed:
    """Send each token ``x [T, hidden]`` to the ranks of its experts.

    Ranks exchange equal blocks of ``block`` rows, and nothing waits for the device; ``drop_policy``
    is None if no rank has more rows for another. Without a block the numbers of rows are read on
    the host. If not ``sends_rows``, the tokens are not sent yet.
    """
    ranks = torch.distributed.get_world_size(group)
    local = num_experts // ranks
    counts, inverse_map = _places(expert_indices, probs, num_experts, ranks, block, drop_policy)
    received = start_all_to_all(counts, group).wait()
    send_sizes: Sizes | None = None
    receive_sizes: Sizes | None = None
    if block is None:
        sizes = torch.cat([counts.sum(1, dtype=torch.int32), received.sum(1, dtype=torch.int32)])
        refuse_recording(READS)
        counts_by_rank = sizes.tolist()  # the one place that waits for the device
        send_sizes, receive_sizes = tuple(counts_by_rank[:ranks]), tuple(counts_by_rank[ranks:])
        rows = sum(receive_sizes)
    else:
        sizes = counts.new_full((2 * ranks,), block)
        rows = ranks * block
    sent = rows if send_sizes is None else sum(send_sizes)
    # Unused places between two blocks may hold any values: no map of the receiver reads them.
    row_map = ops.row_map_of(inverse_map, sent)
    moving = None
    if sends_rows:
        moving = start_all_to_all(
            ops.permute(x, row_map, inverse_map), group, send_sizes, receive_sizes
        )
    of_rows = ops.permute(probs.reshape(-1, 1), row_map, inverse_map.view(-1, 1))
    moving_probs = start_all_to_all(of_rows, group, send_sizes, receive_sizes)
    # The expert of each received place; ``local`` for an unused one, which the sort leaves out.
    ends = received.view(-1).cumsum(0, dtype=torch.int32)
    numbers = torch.arange(rows, dtype=torch.int32, device=x.device)
    experts = torch.searchsorted(ends, numbers, right=True, out_int32=True) % (local + 1)
    split_sizes, row_map, places = ops.sort_by_expert(experts.view(-1, 1), local, rows)
    exchange = Exchange(inverse_map, places.view(-1), send_sizes, receive_sizes)
    packed = exchange.packed(sizes)
    of_rows = ops.permute(moving_probs.wait(), row_map, places).view(-1)
    maps = (row_map, places, split_sizes, of_rows)
    return Routed(x, counts, *maps, exchange, packed, moving)


def _places(
    expert_indices: torch.Tensor,
    probs: torch.Tensor,
    num_experts: int,
    ranks: int,
    block: int | None,
    drop_policy: DropPolicy | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``counts`` of :class:`Routed`, and the places of assignments among the sent rows.

    Places are int32 ``[T, k]``, -1 for a dropped assignment. With ``block`` each rank gets that
    many rows, of which the last may be unused.
    """
    local, count = num_experts // ranks, expert_indices.numel()
    with torch.no_grad():
        ranks_of = expert_indices.div(local, rounding_mode="floor")
        if block is not None and block < count and drop_policy is not None:
            key = probs if drop_policy == "probs" else None
            expert_indices = within_blocks(expert_indices, key, ranks_of, ranks, block)
        sizes, _, places = ops.sort_by_expert(expert_indices, num_experts, count)
        counts = sizes.view(ranks, local)
        if block is None:
            return F.pad(counts, (0, 1)), places
        unused = block - counts.sum(1, keepdim=True, dtype=torch.int32)
        # Each rank's rows begin after the unused ones of those before it.
        shifts = (unused.cumsum(0, dtype=torch.int32) - unused).view(-1)
        shifted = places + shifts[ranks_of.clamp(0, ranks - 1).long()]
        return torch.cat([counts, unused], 1), torch.where(places < 0, places, shifted)


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

    def __init__(self, routed: Routed, group: Group, *, may_send_bytes: bool) -> None:
        self.routed, self.group, self.may_send_bytes = routed, group, may_send_bytes
        self.shape = torch.Size((len(routed.row_map), routed.x.shape[1]))
        self.dtype, self.device = routed.x.dtype, routed.x.device
        self._is_sent = False

    def gathered(self) -> torch.Tensor | LazyTensor:
        """The values; kernels read them by index from the received rows. It is called once."""
        assert not self._is_sent, "rows are sent once"
        self._is_sent = True
        received = self.routed.received(self.group)
        return ops.gathered_rows(received, self.routed.row_map, self.routed.places)

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
        first = torch.distributed.get_rank(self.group) * routed.counts.shape[1]
        scale_inv = scale[first : first + len(groups.ends)].reciprocal()
        of_tiles = scale_inv[groups.tiles[:, 0].clamp(min=0).long()]
        data = ops.permute(arriving.wait(), places, routed.places).view(torch.uint8)
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
        rows = ops.gathered_rows(routed.x, ops.row_map_of(inverse_map, count), inverse_map)
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
            largest = _largest(amaxes, self.group)[begin : begin + len(states)]
            kept = [q.amax for q in states if q.amax is not None]
            foreach_maximum_(kept, list(largest.view(-1, 1).unbind()))
        return tensor, scale


def _state(scale: torch.Tensor) -> dict[str, Any]:
    """Arguments of a quantizer of rows that has these scales, and makes rowwise copies alone."""
    return {"scales": scale.view(-1, 1).unbind(), "rowwise": True, "columnwise": False}


def _largest(amaxes: torch.Tensor, group: Group) -> torch.Tensor:
    """The maxima over the ranks, in place."""
    call_each_time(largest_of_ranks, amaxes, group)
    return amaxes
