"""AllGather, ReduceScatter, AllReduce of the main input; and quantized rows that ranks gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fuser.communication import (
    Agreement,
    Group,
    GroupArgument,
    GroupRef,
    Pending,
    WeakGroup,
    can_gather,
    check_divides,
    check_shard,
    group_size,
    makes_columns,
    resolved,
    start_all_gather,
    start_all_reduce,
    start_quantized_gather,
    start_reduce_scatter,
)
from fuser.errors import InputError, StateError
from fuser.op import (
    BasicOperation,
    Grads,
    OperationContext,
    write_grad_input,
    write_output,
)
from fuser.precision.contexts import current_recipe
from fuser.precision.delayed_scaling import reduces_amaxes_over
from fuser.recipe import DelayedScaling, Recipe
from fuser.specs import Collective, PlanKey, QuantSpec, TensorSpec
from fuser.tensors import Float8Quantizer, QuantizedTensor, Quantizer
from fuser.tensors.base import USAGES


def note_group(ctx: OperationContext, group: Group) -> None:
    """Note in ``ctx`` the group of a forward, which its backward uses, without keeping it.

    Also whether delayed scaling reduces its amaxes over the group, which backward cannot see.
    """
    ctx.group = WeakGroup(group)  # type: ignore[attr-defined]
    ctx.reduces_amaxes = ctx.has_recipe and reduces_amaxes_over(group)


def group_of(ctx: OperationContext, op: str, group: GroupArgument) -> Group:
    """The group of the forward; ``group``, that of the op, if a user's fused op ran the forward."""
    noted = ctx.__dict__.get("group")
    return resolved(op, group) if noted is None else noted(op)


def travelling(recipe: Recipe | None, spec: QuantSpec | None) -> QuantSpec | None:
    """The form in which ranks send rows that are quantized as ``spec``; None for their values.

    It assumes that no block has rows of two ranks: shapes are not part of a plan.
    """
    if recipe is None or spec is None or recipe.custom():
        return None
    if isinstance(recipe, DelayedScaling) and not recipe.reduce_amax:
        return None
    if spec.format.parts is not None:
        return None
    if spec.format.name == "FP8":  # the columnwise copy is made from the rowwise one
        return replace(spec, rowwise=True, columnwise=False)
    return spec


class Rows(NamedTuple):
    """Rows that one rank holds, quantized so that gathered bytes are those of one tensor."""

    tensor: QuantizedTensor
    """The quantized rows, with the copies that travel."""
    checks_scales: bool
    """Whether scales that rows of all ranks share are compared when they are gathered."""

    def start(self, usages: tuple[str, ...], group: Group) -> Pending[QuantizedTensor]:
        """Start to gather ``usages``, the rowwise and the columnwise copy, of all rows."""
        tensor = self.tensor
        is_made = makes_columns(tensor._quantizer)
        pending = [
            start_quantized_gather(tensor, usage, group, checks_scales=self.checks_scales)
            for usage in dict.fromkeys("rowwise" if is_made else usage for usage in usages)
        ]

        def finish() -> QuantizedTensor:
            whole, *others = (gathering.wait() for gathering in pending)
            for other in others:
                for name, buffer in other.buffers().items():
                    if buffer is not None:
                        setattr(whole, name, buffer)
            if is_made and "columnwise" in usages:
                whole._make_copy("columnwise")
                if "rowwise" not in usages:
                    whole.release("rowwise")
            return whole

        return Pending(finish)


def quantized_rows(
    x: torch.Tensor, quantizer: Any, usages: tuple[str, ...], group: Group, *, reduces_amaxes: bool
) -> Rows | None:
    """The rows ``x`` of this rank quantized, for gathering the copies ``usages``.

    Scales that all rows share are those of the amax over all ranks: reduced here, or by delayed
    scaling, if ``reduces_amaxes``. None if ranks cannot quantize their rows alone: a block would
    have rows of two ranks, or the format reduces no amax; if the quantizer is a user's; or if
    ``x`` is quantized already and its bytes cannot travel.
    """
    arrived = x if isinstance(x, QuantizedTensor) else None
    quantizer = quantizer if arrived is None else arrived._quantizer
    if not isinstance(quantizer, Quantizer):
        return None
    quantizer = quantizer.value()
    if type(quantizer).__module__.partition(".")[0] != "fuser":
        return None  # a user's quantizer may read rows of other ranks, or reduce no amax
    is_delayed = isinstance(quantizer, Float8Quantizer) and reduces_amaxes
    has_equal_scales = arrived is None and (quantizer.reduces_scales or is_delayed)
    is_made = makes_columns(quantizer)
    needed = tuple(dict.fromkeys("rowwise" if is_made else usage for usage in usages))
    rows = x.shape[:-1].numel()
    if not all(can_gather(quantizer, u, rows, has_equal_scales=has_equal_scales) for u in needed):
        return None
    if arrived is not None:
        return Rows(arrived, False) if all(map(arrived._has, needed)) else None
    copies = quantizer.with_usage(rowwise="rowwise" in needed, columnwise="columnwise" in needed)
    return Rows(copies.bound_to(group)(x), is_delayed)


def gathered(
    x: torch.Tensor, quantizer: Any | None, group: Group, *, reduces_amaxes: bool
) -> torch.Tensor:
    """The rows of all ranks, quantized by ``quantizer``; as ``x`` is without one.

    Bytes travel if the ranks can quantize their rows alike, else values.
    """
    copies: Any = quantizer
    if isinstance(x, QuantizedTensor) and not isinstance(quantizer, Quantizer):
        copies = x._usage()
    usages = tuple(usage for usage in USAGES if getattr(copies, usage, False))
    rows, whole = None, x
    if usages:
        rows = quantized_rows(x, quantizer, usages, group, reduces_amaxes=reduces_amaxes)
    if rows is not None:
        whole = rows.start(usages, group).wait()
    else:
        whole = start_all_gather(x, group).wait()
        whole = whole if quantizer is None else quantizer(whole)
    source = getattr(x, "high_precision_source", None)
    if source is not None:
        gathering = start_all_gather(source, group)
        whole.high_precision_source = gathering.wait()  # type: ignore[attr-defined]
    return whole


class CollectiveOperation(BasicOperation):
    """Base of the ops that only communicate.

    Parameters
    ----------
    process_group
        A process group, a mesh of one dimension, or None for all ranks. Its size is that at
        construction. Nothing is communicated in a group of one rank, or without process groups.

    Raises
    ------
    InputError
        If this rank is not a member of the group; if ``process_group`` is set to a group of another
        size.
    StateError
        If a group is given and torch.distributed is not initialised.
    """

    forward_kind: str
    backward_kind: str | None
    """How the ranks communicate, as :class:`Collective` names it; None if they do not."""
    parameter_names = ()
    saves_input = False
    can_quantize_output = ("forward", "backward")

    def __init__(self, process_group: GroupArgument = None) -> None:
        super().__init__()
        self._group = GroupRef(process_group)
        self._agreement = Agreement()
        self.process_group_size = group_size(type(self).__name__, process_group)

    @property
    def process_group(self) -> GroupArgument:
        """The argument of the constructor; it may be set to another group of the same size."""
        return self._group.group

    @process_group.setter
    def process_group(self, group: GroupArgument) -> None:
        name = type(self).__name__
        ranks = group_size(name, group)
        if ranks != self.process_group_size:
            raise InputError(
                f"{name} was made for {self.process_group_size} ranks, and got a process_group of "
                f"{ranks}. Make the op with that group."
            )
        self._group = GroupRef(group)

    @property
    def process_groups(self) -> tuple[GroupArgument, ...]:
        return (self.process_group,) if self.process_group_size > 1 else ()

    # No state is saved, so that a checkpoint has the same keys on any number of ranks.
    get_extra_state = torch.nn.Module.get_extra_state

    def extra_repr(self) -> str:
        return f"ranks={self.process_group_size}"

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """A StateError for a group whose size has changed since the op was made."""
        ranks = group_size(type(self).__name__, self.process_group)
        if ranks != self.process_group_size:
            raise StateError(
                f"{type(self).__name__} was made for {self.process_group_size} ranks, and its "
                f"process group has {ranks} now: initialise torch.distributed before the model is "
                "made."
            )

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output on this rank; of more than one rank."""
        return shape

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        if self.process_group_size == 1:
            return spec
        return TensorSpec(self.output_shape(spec.shape), spec.dtype)

    def collectives(self, side: str, key: PlanKey) -> tuple[Collective, ...]:
        kind = self.forward_kind if side == "forward" else self.backward_kind
        if kind is None or self.process_group_size == 1:
            return ()
        if kind != "all-gather":
            tensor = "output" if side == "forward" else "grad_input"
            return (Collective(kind, tensor, self.process_group_size),)
        (op,) = key.ops
        tensor, quantized = (
            ("input", op.output) if side == "forward" else ("grad_output", op.grad_input)
        )
        sent = travelling(key.recipe, quantized)
        return (Collective(kind, tensor, self.process_group_size, sent),)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return tuple(collective.kind for collective in self.collectives(side, key))

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
    ) -> torch.Tensor:
        if self.process_group_size == 1:
            return write_output(input_, next_op_input_quantizer)
        name = type(self).__name__
        group = resolved(name, self.process_group)
        grads = f"gradients {ctx.requires_grad and ctx.input_requires_grad}"
        self._agreement.check(name, group, current_recipe(), input_, grads)
        note_group(ctx, group)
        self.output_shape(input_.shape)  # raises for rows that cannot be communicated
        kind, quantizer = self.forward_kind, next_op_input_quantizer
        if kind == "all-gather":
            return gathered(input_, quantizer, group, reduces_amaxes=ctx.reduces_amaxes)
        return write_output(_STARTS[kind](input_, group).wait(), quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        kind, quantizer = self.backward_kind, ctx.grad_input_quantizer
        if kind is None or self.process_group_size == 1:
            return write_grad_input(grad_output, ctx), ()
        group = group_of(ctx, type(self).__name__, self.process_group)
        is_cast = quantizer is not None and grad_output.dtype is not ctx.input_dtype
        if kind == "all-gather" and not is_cast:
            dx = gathered(grad_output, quantizer, group, reduces_amaxes=ctx.reduces_amaxes)
            return dx, ()
        return write_grad_input(_STARTS[kind](grad_output, group).wait(), ctx), ()


_STARTS: dict[str, Callable[[torch.Tensor, Group], Pending[torch.Tensor]]] = {
    "all-gather": start_all_gather,
    "all-reduce": start_all_reduce,
    "reduce-scatter": start_reduce_scatter,
}


class AllGather(CollectiveOperation):
    """Gather the rows of all ranks: ``[M, ...]`` becomes ``[ranks * M, ...]``, in their order.

    Backward adds the gradients of all ranks, and each rank gets its rows. If the next op wants a
    quantized input and rows of two ranks share no scale, each rank quantizes its rows and sends
    bytes and scales; otherwise the gathered values are quantized. The same holds for a quantized
    input: its bytes are sent if that is possible, otherwise its values.

    Raises
    ------
    InputError
        As the base; on an input of one dimension.
    """

    forward_kind, backward_kind = "all-gather", "reduce-scatter"

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        check_shard("AllGather", shape)
        return (self.process_group_size * shape[0], *shape[1:])


class ReduceScatter(CollectiveOperation):
    """Add the inputs of all ranks; each rank gets its rows: ``[M, ...]`` to ``[M / ranks, ...]``.

    Backward gathers the gradients, as :class:`AllGather` gathers inputs.

    Raises
    ------
    InputError
        As the base; if the ranks do not divide the rows, or on an input of one dimension.
    """

    forward_kind, backward_kind = "reduce-scatter", "all-gather"

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return check_divides("ReduceScatter", shape, self.process_group_size)


class AllReduce(CollectiveOperation):
    """Add the inputs of all ranks; each rank gets the sum.

    Parameters
    ----------
    process_group
        As in the base.
    reduce_in_backward
        Whether backward adds the gradients of all ranks, for ranks that compute different losses
        from the sum. By default it returns the gradient unchanged, as te.ops does: all ranks
        compute the same loss.
    """

    forward_kind = "all-reduce"

    def __init__(
        self, process_group: GroupArgument = None, reduce_in_backward: bool = False
    ) -> None:
        super().__init__(process_group)
        self.backward_kind = "all-reduce" if reduce_in_backward else None
