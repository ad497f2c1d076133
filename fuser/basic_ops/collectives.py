"""AllGather, ReduceScatter and AllReduce: communication of the main input, along dimension 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.basic_ops.quantized_rows import gathered, group_of, note_group, travelling
from fuser.communication import (
    Agreement,
    GroupArgument,
    GroupRef,
    check_divides,
    check_shard,
    group_size,
    resolved,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from fuser.errors import StateError
from fuser.op import BasicOperation, Grads, OperationContext, write_grad_input, write_output
from fuser.precision.contexts import current_recipe
from fuser.specs import Collective, PlanKey, TensorSpec
from fuser.tensors import QuantizedTensor, Quantizer


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
        If this rank is not a member of the group.
    StateError
        If a group is given and torch.distributed is not initialised.
    """

    parameter_names = ()
    saves_input = False
    can_quantize_output = ("forward", "backward")

    def __init__(self, process_group: GroupArgument = None) -> None:
        super().__init__()
        self._group = GroupRef(process_group)
        self._agreement = Agreement()
        self.process_group_size = group_size(type(self).__name__, process_group)

    @property
    def process_group(self) -> Any | None:
        """The argument of the constructor; it may be set to another group of the same size."""
        return self._group.group

    @process_group.setter
    def process_group(self, group: GroupArgument) -> None:
        self._group = GroupRef(group)

    @property
    def process_groups(self) -> tuple[GroupArgument, ...]:
        return (self.process_group,) if self.process_group_size > 1 else ()

    # No state is saved, so that a checkpoint has the same keys on any number of ranks.
    get_extra_state = torch.nn.Module.get_extra_state

    def extra_repr(self) -> str:
        return f"ranks={self.process_group_size}"

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Refuse a group whose size has changed since the op was made.

        Raises
        ------
        StateError
        """
        ranks = group_size(type(self).__name__, self.process_group)
        if ranks != self.process_group_size:
            raise StateError(
                f"{type(self).__name__} was made for {self.process_group_size} ranks, and its "
                f"process group has {ranks} now: initialise torch.distributed before the model is "
                "made."
            )

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        return spec

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return tuple(each.kind for each in self.collectives(side, key))

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
        return self._forward(ctx, input_, group, next_op_input_quantizer)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Grads]:
        if self.process_group_size == 1:
            return write_grad_input(grad_output, ctx), ()
        group = group_of(ctx, type(self).__name__, self.process_group)
        return self._backward(ctx, grad_output, group), ()

    def _forward(
        self, ctx: OperationContext, x: torch.Tensor, group: Any, quantizer: Quantizer | None
    ) -> torch.Tensor:
        raise NotImplementedError

    def _backward(self, ctx: OperationContext, dy: torch.Tensor, group: Any) -> torch.Tensor:
        raise NotImplementedError

    def _on(self, side: str, key: PlanKey, kind: str) -> tuple[Collective, ...]:
        """One collective of ``side``; none in a group of one rank."""
        if self.process_group_size == 1:
            return ()
        tensor = {
            "forward": "input" if kind == "all-gather" else "output",
            "backward": "grad_output" if kind == "all-gather" else "grad_input",
        }[side]
        made = None
        if kind == "all-gather":
            (op,) = key.ops
            made = travelling(key.recipe, op.output if side == "forward" else op.grad_input)
        return (Collective(kind, tensor, self.process_group_size, made),)


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

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        if self.process_group_size == 1:
            return spec
        check_shard("AllGather", spec.shape)
        return TensorSpec((self.process_group_size * spec.shape[0], *spec.shape[1:]), spec.dtype)

    def collectives(self, side: str, key: PlanKey) -> tuple[Collective, ...]:
        return self._on(side, key, "all-gather" if side == "forward" else "reduce-scatter")

    def _forward(
        self, ctx: OperationContext, x: torch.Tensor, group: Any, quantizer: Quantizer | None
    ) -> torch.Tensor:
        check_shard("AllGather", x.shape)
        return gathered(x, quantizer, group, reduces_amaxes=ctx.reduces_amaxes)

    def _backward(self, ctx: OperationContext, dy: torch.Tensor, group: Any) -> torch.Tensor:
        dx = start_reduce_scatter(_values(dy), group).wait()
        return write_grad_input(dx, ctx)


class ReduceScatter(CollectiveOperation):
    """Add the inputs of all ranks; each rank gets its rows: ``[M, ...]`` to ``[M / ranks, ...]``.

    Backward gathers the gradients, as :class:`AllGather` gathers inputs.

    Raises
    ------
    InputError
        As the base; if the ranks do not divide the rows, or on an input of one dimension.
    """

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        if self.process_group_size == 1:
            return spec
        shape = check_divides("ReduceScatter", spec.shape, self.process_group_size)
        return TensorSpec(shape, spec.dtype)

    def collectives(self, side: str, key: PlanKey) -> tuple[Collective, ...]:
        return self._on(side, key, "reduce-scatter" if side == "forward" else "all-gather")

    def _forward(
        self, ctx: OperationContext, x: torch.Tensor, group: Any, quantizer: Quantizer | None
    ) -> torch.Tensor:
        check_divides("ReduceScatter", x.shape, self.process_group_size)
        y = start_reduce_scatter(_values(x), group).wait()
        return write_output(y, quantizer)

    def _backward(self, ctx: OperationContext, dy: torch.Tensor, group: Any) -> torch.Tensor:
        if ctx.grad_input_quantizer is not None and dy.dtype is not ctx.input_dtype:
            return write_grad_input(start_all_gather(_values(dy), group).wait(), ctx)
        return gathered(dy, ctx.grad_input_quantizer, group, reduces_amaxes=ctx.reduces_amaxes)


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

    def __init__(
        self, process_group: GroupArgument = None, reduce_in_backward: bool = False
    ) -> None:
        super().__init__(process_group)
        self._reduce_in_backward = reduce_in_backward

    def collectives(self, side: str, key: PlanKey) -> tuple[Collective, ...]:
        if side == "backward" and not self._reduce_in_backward:
            return ()
        return self._on(side, key, "all-reduce")

    def _forward(
        self, ctx: OperationContext, x: torch.Tensor, group: Any, quantizer: Quantizer | None
    ) -> torch.Tensor:
        return write_output(start_all_reduce(_values(x), group).wait(), quantizer)

    def _backward(self, ctx: OperationContext, dy: torch.Tensor, group: Any) -> torch.Tensor:
        if not self._reduce_in_backward:
            return write_grad_input(dy, ctx)
        return write_grad_input(start_all_reduce(_values(dy), group).wait(), ctx)


def _values(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize() if isinstance(x, QuantizedTensor) else x
