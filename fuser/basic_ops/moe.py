"""MoeDispatch and MoeCombine: tokens to rows sorted by expert, and back, in a pipeline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fuser.basic_ops.activation import ScaledActivation
from fuser.basic_ops.expert_parallel import (
    Exchange,
    ExpertParallelOperation,
    RemoteRows,
    Sizes,
    block_of_most,
    packed_shape,
    route_to_experts,
    tokens_of,
)
from fuser.basic_ops.grouped_linear import GroupedLinear
from fuser.basic_ops.linear_operands import plain
from fuser.communication import GroupArgument, divided, resolved
from fuser.cuda.launch import call_each_time
from fuser.errors import InputError
from fuser.functional import permutation as ops
from fuser.functional.lazy import materialize
from fuser.functional.permutation import gathered_rows
from fuser.functional.routing import (
    DropPolicy,
    check_assignments,
    check_device,
    check_options,
    check_values,
    route,
)
from fuser.op import (
    BasicOperation,
    Contexts,
    Counter,
    OperationContext,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    Values,
    cast,
    write_grad_input,
    write_output,
)
from fuser.specs import Collective, PlanKey, TensorSpec

_Shaped = torch.Tensor | TensorSpec
ExchangeSizes = tuple[Sizes | None, Sizes | None] | None
BLOCK = "rows_to_each_rank"
"""The keyword argument of a dispatch whose rows were counted before its pass."""


class MoeDispatchSaved(NamedTuple):
    """What a dispatch saves: extra output 2, and tokens of which it copies the rows again."""

    inverse_map: torch.Tensor
    row_map: torch.Tensor | None = None
    x: torch.Tensor | None = None


class MoeDispatchState(NamedTuple):
    """What a dispatch keeps for its backward besides."""

    input_shape: torch.Size
    dtype: torch.dtype
    received: int = 0
    """On several ranks, the number of received rows."""
    sizes: ExchangeSizes = None
    """On several ranks, the numbers of rows that are known on the host."""


class MoeDispatch(ExpertParallelOperation):
    """Copy each token to one row for each of its experts; rows are sorted by expert.

    :func:`fuser.moe.permute` as an op, with the same rows, order and bits. ``[..., hidden]``
    becomes ``[rows, hidden]``; T is the product of the leading dimensions. Under torch's autocast
    the rows have its dtype. Nothing waits for the device, and gradients, to the input and to the
    probabilities, are the same in every run.

    Extra inputs, both on the device of the input:

    0. ``expert_indices``, int32 or int64 ``[T, k]``. -1 drops an assignment. Other indices outside
       of ``0..num_experts - 1`` are an error on a CPU; on other devices they count as -1.
    1. ``probs``, fp32, fp16 or bf16 ``[T, k]``, with a gradient.

    Extra outputs, usually for channels:

    0. ``split_sizes``, int32 ``[num_experts]``: the number of rows of each expert, for
       ``GroupedLinear``.
    1. ``probs`` of the rows, ``[rows]``, 0 in unused rows: the ``scales`` of ``ScaledSwiGLU``.
    2. ``inverse_map``, int32 ``[T, k]``: the row of each assignment, -1 if it was dropped, for
       ``MoeCombine``.

    With experts on R ranks, rank r has the experts ``r * num_experts / R`` up to the next rank's,
    and its own tokens, of which there may be any number. The rows of these experts come from all
    ranks: sorted by expert, then by rank, then as on one rank, so that the ranks together have the
    rows of one rank with the tokens of all. The extra outputs 0 and 1 describe these rows. Extra
    output 2, int32 ``[n, k]``, is for ``MoeCombine`` alone: its first T rows are the places of the
    assignments among the rows that this rank sends; the others are the order of received rows, and
    the numbers of sent and received rows (``fuser.basic_ops.expert_parallel.Exchange``).

    Parameters
    ----------
    num_experts
        The number of experts, of all ranks together.
    capacity, drop_policy
        As in :func:`fuser.moe.permute`: the number of rows, ``T * k`` by default, and the
        assignments that are dropped if there are more. On R ranks it is the number of rows of this
        rank's experts, equal on all ranks. Every rank sends a block of ``capacity / R`` rows to
        every rank, and drops its assignments beyond a block. Nothing waits for the device then.
        Without a capacity nothing is dropped, and the numbers of rows are read on the host, once a
        forward. In one pipeline with experts and ``MoeCombine`` on a GPU, every rank then sends
        every rank a block of the most rows that one has for another, and the passes are recorded.
        Rows travel as they are if blocks were more than 1.5 times what the fullest rank receives.
    expert_parallel_group
        The process group over which experts are spread, or a mesh of one dimension. None: all
        experts are on this rank.

    Raises
    ------
    InputError
        If a number or a name is not as described, if the ranks do not divide the experts or the
        capacity, or if this rank is not in the group. A call raises it if a shape, dtype, device or
        index is not as described, and at the first call on all ranks if these differ: experts,
        capacity, k, hidden size, dtypes, recipe and wanted gradients.
    InputTypeError
        If ``num_experts`` or ``capacity`` is not an int.
    StateError
        If a group is given and torch.distributed is not initialised. A call raises it under delayed
        scaling that reduces amaxes over ranks of the group.
    """

    num_extra_inputs = 2
    num_extra_outputs = 3
    copies_input = True

    def __init__(
        self,
        num_experts: int,
        *,
        capacity: int | None = None,
        drop_policy: DropPolicy = "position",
        expert_parallel_group: GroupArgument = None,
    ) -> None:
        super().__init__(expert_parallel_group)
        check_options("MoeDispatch", num_experts, capacity, drop_policy)
        ranks = self.expert_parallel_size
        self.num_experts = num_experts
        self.num_local_experts = divided("MoeDispatch's num_experts", num_experts, ranks)
        if capacity is not None:
            divided("MoeDispatch's capacity", capacity, ranks)
        self.capacity = capacity
        self.drop_policy = drop_policy

    def extra_repr(self) -> str:
        capacity = "" if self.capacity is None else f", capacity={self.capacity}"
        ranks = f", ranks={self.expert_parallel_size}" if self.expert_parallel_size > 1 else ""
        return f"num_experts={self.num_experts}{capacity}{ranks}"

    @property
    def is_recordable(self) -> bool:  # type: ignore[override]
        """Whether no number of rows is read on the host."""
        return self.expert_parallel_size == 1 or self.capacity is not None

    def counter(self, following: Sequence[BasicOperation]) -> Counter | None:
        """Rows for each pair of ranks, if all that reads the rows leaves unused ones out."""
        if self.is_recordable:
            return None
        last = next(itertools.dropwhile(_is_of_experts, following), None)
        name, _ = self._output_channels.get(2, ("", True))
        is_whole = isinstance(last, MoeCombine) and last._input_channels.get(0) == name
        return self._counted if is_whole else None

    def _counted(self, x: torch.Tensor, extra_inputs: Tensors) -> Mapping[str, int | None]:
        if self.is_recordable:  # it was given a capacity since
            return {}
        indices, name = extra_inputs[0], type(self).__name__
        group = resolved(name, self.expert_parallel_group)
        facts = f"num_experts {self.num_experts}", "rows counted before the pass"
        self._agreement.check(
            f"{name} counts rows and", group, None, x, *facts, compares_rows=False
        )
        if indices.dtype not in (torch.int32, torch.int64) or indices.device != x.device:
            return {}  # which is refused in the pass
        return {BLOCK: block_of_most(indices, self.num_experts, group)}

    @property
    def rebuilds_output(self) -> bool:  # type: ignore[override]
        """Whether the rows are copies of this rank's tokens."""
        return self.expert_parallel_size == 1

    def rebuild(self, ctx: OperationContext, input_: Values | None) -> Values:
        inverse_map, row_map, x = MoeDispatchSaved(*ctx.saved_tensors)
        if x is None:
            assert input_ is not None
            x = self._tokens(ctx, materialize(input_), ctx.state.dtype)
        assert row_map is not None
        return gathered_rows(x, row_map, inverse_map)

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        check_assignments("MoeDispatch", math.prod(spec.shape[:-1]), *extras)
        return TensorSpec((self._rows(extras[0]), spec.shape[-1]), autocast or spec.dtype)

    def extra_output_specs(
        self, spec: TensorSpec, extras: Sequence[TensorSpec]
    ) -> tuple[TensorSpec, ...]:
        indices, probs = extras
        rows, ranks, shape = self._rows(indices), self.expert_parallel_size, indices.shape
        if ranks > 1:
            shape = packed_shape(shape[0], shape[1], rows, ranks)
        return (
            TensorSpec((self.num_local_experts,), torch.int32),
            TensorSpec((rows,), probs.dtype),
            TensorSpec(shape, torch.int32),
        )

    def _rows(self, expert_indices: TensorSpec) -> int:
        """The number of rows; on several ranks without a capacity, that of equal load."""
        return math.prod(expert_indices.shape) if self.capacity is None else self.capacity

    def collectives(self, side: str, key: PlanKey) -> tuple[Collective, ...]:
        ranks, kind = self.expert_parallel_size, "all-to-all"
        if ranks == 1:
            return ()
        if side == "forward":
            probs = Collective(kind, "probs", ranks, extra_output=1)
            return (Collective(kind, "output", ranks), probs)
        (op,) = key.ops
        of_rows = (Collective(kind, "grad_output", ranks),) * op.input_requires_grad
        of_probs = Collective(kind, "grad of probs", ranks, extra_output=1)
        return (*of_rows, *[of_probs] * op.extra_inputs[1].requires_grad)

    def notes(self, key: PlanKey, rows: int) -> tuple[str, ...]:
        """Experts, ranks, and the number of rows."""
        if self.expert_parallel_size > 1:
            return (self._note_on_ranks(self.expert_parallel_size),)
        if self.capacity is None:
            how = "no fixed capacity: a row for each assignment, none is dropped."
        else:
            how = (
                f"a capacity of {self.capacity} rows, whatever the number of tokens; of more "
                f'assignments some are dropped (drop_policy "{self.drop_policy}").'
            )
        return (f"{self.num_experts} experts; {how}",)

    def _note_on_ranks(self, ranks: int) -> str:
        if self.capacity is None:
            how = (
                "ranks first exchange the number of rows of each expert, and read the sizes on the "
                "host; none is dropped."
            )
        else:
            block = self.capacity // ranks
            how = (
                f"a capacity of {self.capacity} rows on each rank, {block} from each rank; sizes "
                "are not read on the host. Of more assignments from one rank to another some are "
                f'dropped (drop_policy "{self.drop_policy}").'
            )
        local = self.num_local_experts
        return f"{self.num_experts} experts on {ranks} ranks, {local} on each; {how}"

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        is_spread = self.expert_parallel_size > 1
        if side == "forward":
            received = ("sort by expert", "permute probs", "permute")
            sent = ("sort by expert", "permute probs to ranks", "permute to ranks")
            return (*sent, *received) if is_spread else received
        (op,) = key.ops
        is_launched = {
            "unpermute to ranks": is_spread and op.input_requires_grad,
            "unpermute": op.input_requires_grad,
            "unpermute probs to ranks": is_spread and op.extra_inputs[1].requires_grad,
            "unpermute probs": op.extra_inputs[1].requires_grad,
        }
        return tuple(name for name, is_one in is_launched.items() if is_one)

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        (ctx,) = ctxs
        dtype = ctx.autocast_dtype or x.dtype
        block = inputs.kwargs[0].get(BLOCK)
        rows, outputs = self.rows_of_experts(ctx, x, inputs.extras, dtype, block)
        return write_output(materialize(rows), inputs.quantizer), outputs

    def rows_of_experts(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        extras: Tensors,
        dtype: torch.dtype,
        block: int | None = None,
        *,
        is_lazy: bool = False,
        may_send_bytes: bool = False,
    ) -> tuple[Values, tuple[torch.Tensor, ...]]:
        """The rows in ``dtype``, and the extra outputs; saves what backward reads.

        ``block``: the rows that each rank sends to each, if they were counted. ``is_lazy``: the
        rows may be lazy. ``may_send_bytes``: a quantizer of the experts then decides in which form
        they travel.
        """
        indices, probs = extras
        check_assignments("MoeDispatch", math.prod(input_.shape[:-1]), indices, probs)
        for name, extra in (("expert_indices", indices), ("probs", probs)):
            check_device("MoeDispatch", name, extra, "the input", input_)
        check_values("MoeDispatch", indices, self.num_experts)
        x = self._tokens(ctx, input_, dtype)
        ctx.state = MoeDispatchState(input_.shape, dtype)
        if self.expert_parallel_size > 1:
            return self._from_ranks(ctx, x, indices, probs, block, is_lazy, may_send_bytes)
        split_sizes, row_map, inverse_map = route(
            indices, probs, self.num_experts, self.capacity, self.drop_policy
        )
        # A matrix of one column, and a token for each assignment.
        row_probs = ops.permute(probs.reshape(-1, 1), row_map, inverse_map.view(-1, 1)).view(-1)
        if ctx.requires_grad:
            ctx.to_save = MoeDispatchSaved(inverse_map, row_map, x if ctx.keeps_source else None)
        copy = gathered_rows if is_lazy else ops.permute
        return copy(x, row_map, inverse_map), (split_sizes, row_probs, inverse_map)

    def _tokens(
        self, ctx: OperationContext, input_: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The tokens ``[T, hidden]`` in the dtype of the rows."""
        computed = ctx.autocast_dtype or input_.dtype
        # The rows have the bits of tokens, so they may be cast before or after the copy.
        return cast(cast(plain(input_, computed), computed), dtype).reshape(-1, input_.shape[-1])

    def _from_ranks(
        self,
        ctx: OperationContext,
        x: torch.Tensor,
        indices: torch.Tensor,
        probs: torch.Tensor,
        block: int | None,
        is_lazy: bool,
        may_send_bytes: bool,
    ) -> tuple[Values, tuple[torch.Tensor, ...]]:
        """As :meth:`rows_of_experts`, of tokens ``x`` from all ranks."""
        counts = (f"num_experts {self.num_experts}", f"capacity {self.capacity}")
        of_k, of_probs = f"k {indices.shape[1]}", str(probs.dtype).removeprefix("torch.")
        form = "tokens as bytes or values" if may_send_bytes else "tokens as values"
        time = "sent by the experts" if is_lazy else "sent at once"
        group = self._agreed_group(ctx, x, *counts, of_k, f"probs in {of_probs}", form, time)
        policy: DropPolicy | None = None
        if self.capacity is not None:
            block, policy = self.capacity // self.expert_parallel_size, self.drop_policy
        options = (self.num_experts, block, policy, group)
        with torch.no_grad():
            routed = route_to_experts(x, indices, probs, *options, sends_rows=not is_lazy)
        if ctx.requires_grad:
            ctx.to_save = MoeDispatchSaved(routed.packed)
            received, sizes = len(routed.places), routed.exchange.sizes
            ctx.state = ctx.state._replace(received=received, sizes=sizes)
        rows = RemoteRows(routed, group, may_send_bytes=may_send_bytes)
        outputs = (routed.split_sizes, routed.probs, routed.packed)
        return (rows if is_lazy else materialize(rows)), outputs

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (ctx,), (_, drows, _) = ctxs, grad_extras
        if self.expert_parallel_size > 1:
            return self._backward_over_ranks(ctx, dy, drows)
        inverse_map = MoeDispatchSaved(*ctx.saved_tensors).inverse_map
        state: MoeDispatchState = ctx.state
        dx = dprobs = None
        if ctx.input_requires_grad:
            dy = plain(dy, ctx.autocast_dtype or ctx.input_dtype)
            dx = ops.unpermute(dy, inverse_map, None).view(state.input_shape)
            dx = write_grad_input(dx, ctx)
        if ctx.extra_inputs_require_grad[1]:
            drows = drows.reshape(-1, 1)
            dprobs = ops.unpermute(drows, inverse_map.view(-1, 1), None).view(inverse_map.shape)
        return dx, (), (None, dprobs)

    def _backward_over_ranks(
        self, ctx: OperationContext, dy: torch.Tensor, drows: torch.Tensor | None
    ) -> StepGrads:
        """As :meth:`step_backward`; both gradients travel at once."""
        packed, group = MoeDispatchSaved(*ctx.saved_tensors).inverse_map, self._group_of(ctx)
        state: MoeDispatchState = ctx.state
        ranks = self.expert_parallel_size
        exchange = Exchange.unpacked(packed, state.received, ranks, state.sizes)
        dx = dprobs = moving = moving_probs = None
        if ctx.input_requires_grad:
            dy = plain(dy, ctx.autocast_dtype or ctx.input_dtype)
            moving = exchange.start_to_tokens(dy, group)
        if ctx.extra_inputs_require_grad[1]:
            assert drows is not None
            moving_probs = exchange.start_to_tokens(drows.reshape(-1, 1), group)
        if moving is not None:
            dx = exchange.sum_of_tokens(moving.wait()).view(state.input_shape)
            dx = write_grad_input(dx, ctx)
        if moving_probs is not None:
            inverse_map = exchange.inverse_map
            dprobs = ops.unpermute(moving_probs.wait(), inverse_map.reshape(-1, 1), None)
            dprobs = dprobs.view(inverse_map.shape)
        return dx, (), (None, dprobs)


class MoeCombineSaved(NamedTuple):
    """What a combine saves: its extra input."""

    inverse_map: torch.Tensor


class MoeCombineState(NamedTuple):
    """What a combine keeps for its backward besides."""

    num_rows: int
    sizes: ExchangeSizes = None
    """On several ranks, the numbers of rows that are known on the host."""


class MoeCombine(ExpertParallelOperation):
    """Add the rows of each token: ``out[t] = sum over j of y[inverse_map[t, j]]``.

    :func:`fuser.moe.unpermute` without probabilities as an op, with the same bits: ``[rows,
    hidden]`` becomes ``[T, hidden]``, in the dtype of the input. The sum is in fp32, in the order
    of j; a dropped assignment adds nothing, and a token without a row gets 0. Unused rows get a
    gradient of 0, and nothing in them reaches a result. Nothing waits for the device.

    The extra input, on the device of the input, is the extra output 2 of ``MoeDispatch``:
    ``inverse_map``, int32 ``[T, k]``. On a CPU its values are checked: each is -1, or a row
    of the input that occurs once.

    With experts on several ranks every row first returns to the rank of its token. In another
    pipeline than the ``MoeDispatch``, or given a copy of its extra output, the op reads the numbers
    of rows on the host: it waits for the device.

    Parameters
    ----------
    expert_parallel_group
        As in ``MoeDispatch``, and the same group.

    Raises
    ------
    InputError
        If this rank is not in the group. A call raises it if a shape, dtype, device or row is
        not as described, and as that of ``MoeDispatch`` if ranks differ.
    StateError
        As ``MoeDispatch``.
    """

    num_extra_inputs = 1

    def __init__(self, *, expert_parallel_group: GroupArgument = None) -> None:
        super().__init__(expert_parallel_group)

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        self._check(spec, extras[0])
        return TensorSpec((self._tokens(spec, extras[0]), spec.shape[-1]), spec.dtype)

    def _tokens(self, rows: _Shaped, inverse_map: _Shaped) -> int:
        ranks, shape = self.expert_parallel_size, inverse_map.shape
        return shape[0] if ranks == 1 else tokens_of(shape, rows.shape[0], ranks)

    def collectives(self, side: str, key: PlanKey) -> tuple[Collective, ...]:
        ranks = self.expert_parallel_size
        if ranks == 1:
            return ()
        tensor = "input" if side == "forward" else "grad_input"
        return (Collective("all-to-all", tensor, ranks),)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        name = "unpermute" if side == "forward" else "permute"
        return (name,) if self.expert_parallel_size == 1 else (f"{name} to ranks", name)

    def step_forward(self, ctxs: Contexts, x: torch.Tensor, inputs: StepInputs) -> StepOutputs:
        (ctx,), (inverse_map,) = ctxs, inputs.extras
        self._check(x, inverse_map)
        check_device("MoeCombine", "inverse_map", inverse_map, "the input", x)
        x = plain(x, x.dtype)
        if self.expert_parallel_size == 1:
            if hasattr(inverse_map, "exchange_sizes"):
                raise InputError(
                    "MoeCombine has experts on one rank, and got extra output 2 of a MoeDispatch "
                    "with experts on several. Give both ops the same expert_parallel_group."
                )
            _check_rows(inverse_map, x.shape[0])
            y, sizes = ops.unpermute(x, inverse_map.contiguous(), None), None
        else:
            y, sizes = self._over_ranks(ctx, x, inverse_map)
        ctx.state = MoeCombineState(x.shape[0], sizes)
        if ctx.requires_grad:
            ctx.to_save = MoeCombineSaved(inverse_map)
        return write_output(y, inputs.quantizer), ()

    def _over_ranks(
        self, ctx: OperationContext, x: torch.Tensor, packed: torch.Tensor
    ) -> tuple[torch.Tensor, ExchangeSizes]:
        exchange = Exchange.unpacked(packed, x.shape[0], self.expert_parallel_size)
        _check_exchange(exchange)
        group = self._agreed_group(ctx, x, f"k {packed.shape[1]}")
        y = exchange.sum_of_tokens(exchange.start_to_tokens(x, group).wait())
        return y, exchange.sizes

    def step_backward(self, ctxs: Contexts, dy: torch.Tensor, grad_extras: Tensors) -> StepGrads:
        (ctx,) = ctxs
        (inverse_map,) = MoeCombineSaved(*ctx.saved_tensors)
        state: MoeCombineState = ctx.state
        dy = plain(dy, ctx.input_dtype)
        ranks = self.expert_parallel_size
        if ranks == 1:
            row_map = ops.row_map_of(inverse_map, state.num_rows)
            dx = ops.permute(dy, row_map, inverse_map.contiguous())
        else:
            exchange = Exchange.unpacked(inverse_map, state.num_rows, ranks, state.sizes)
            dx = exchange.sorted(exchange.start_of_tokens(dy, self._group_of(ctx)).wait())
        return write_grad_input(dx, ctx), (), (None,)

    def _check(self, rows: _Shaped, inverse_map: _Shaped) -> None:
        """Check shapes and dtypes: of tensors, or of their specs."""
        if len(rows.shape) != 2:
            raise InputError(
                f"MoeCombine takes an input of shape [rows, hidden]; got {tuple(rows.shape)}."
            )
        if inverse_map.dtype is not torch.int32 or len(inverse_map.shape) != 2:
            raise InputError(
                "MoeCombine takes the rows of each token, extra output 2 of MoeDispatch, int32 of "
                f"shape [T, k]; got {inverse_map.dtype} of shape {tuple(inverse_map.shape)}."
            )
        ranks, shape = self.expert_parallel_size, tuple(inverse_map.shape)
        if ranks > 1 and (shape[1] == 0 or self._tokens(rows, inverse_map) < 0):
            raise InputError(
                f"MoeCombine got an input of {rows.shape[0]} rows, and {shape} as the shape of "
                f"extra output 2 of a MoeDispatch over {ranks} ranks, which belongs to fewer rows. "
                "Give both ops the same expert_parallel_group."
            )


def _is_of_experts(op: BasicOperation) -> bool:
    """Whether an op reads the rows of experts alone, and no unused ones."""
    return isinstance(op, (GroupedLinear, ScaledActivation))


def _check_exchange(exchange: Exchange) -> None:
    """Raise if maps on the CPU are not those of an exchange of as many rows."""
    sent, received = exchange.sent, len(exchange.received_map)
    sizes = exchange.receive_sizes
    is_whole = sizes is None or (sum(sizes) == received and min(sizes) >= 0)
    if not is_whole or min(exchange.send_sizes or (0,)) < 0:
        raise InputError(
            f"MoeCombine got an input of {received} rows, and ranks that received {sizes} rows and "
            f"sent {exchange.send_sizes}. Its extra input must be extra output 2 of the "
            "MoeDispatch that made the rows of the input."
        )
    _check_rows(exchange.inverse_map, sent)
    _check_rows(exchange.received_map, received)


def _check_rows(inverse_map: torch.Tensor, rows: int) -> None:
    """Raise if a map on the CPU names a row that the input does not have, or a row twice."""
    if inverse_map.device.type == "cpu":
        call_each_time(_check_rows_on_cpu, inverse_map, rows)


def _check_rows_on_cpu(inverse_map: torch.Tensor, rows: int) -> None:
    named = inverse_map.reshape(-1)
    named = named[named != -1]
    is_wrong = (named < 0) | (named >= rows)
    if is_wrong.any():
        raise InputError(
            f"MoeCombine got row {int(named[is_wrong][0])} of an input of {rows} rows; its "
            "extra input, extra output 2 of MoeDispatch, has rows of the input, or -1. Give both "
            "ops the same expert_parallel_group."
        )
    counts = named.bincount()
    if (counts > 1).any():
        raise InputError(
            f"MoeCombine got row {int(counts.argmax())} {int(counts.max())} times; each row has "
            "one assignment. Its extra input is extra output 2 of MoeDispatch, not expert indices."
        )
