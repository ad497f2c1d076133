"""MoeDispatch and MoeCombine: tokens to rows sorted by expert, and back, in a pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fuser.basic_ops.linear_operands import plain
from fuser.errors import InputError
from fuser.functional import permutation as ops
from fuser.functional.routing import (
    check_assignments,
    check_device,
    check_options,
    check_values,
    route,
)
from fuser.op import (
    BasicOperation,
    Grads,
    OperationContext,
    cast,
    write_grad_input,
    write_output,
)
from fuser.specs import PlanKey, TensorSpec


class MoeDispatch(BasicOperation):
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

    Parameters
    ----------
    num_experts
        The number of experts.
    capacity, drop_policy
        As in :func:`fuser.moe.permute`: the number of rows, ``T * k`` by default, and the
        assignments that are dropped if there are more.
    expert_parallel_group
        A process group over which experts are spread. This version has all experts on one rank.

    Raises
    ------
    InputError
        If a number or a name is not as described, or the group has more than one rank. A call
        raises it if a shape, dtype, device or index is not.
    InputTypeError
        If ``num_experts`` or ``capacity`` is not an int.
    """

    parameter_names = ()
    num_extra_inputs = 2
    num_extra_outputs = 3
    saves_input = False
    can_quantize_output = ("forward", "backward")

    def __init__(
        self,
        num_experts: int,
        *,
        capacity: int | None = None,
        drop_policy: str = "position",
        expert_parallel_group: Any | None = None,
    ) -> None:
        super().__init__()
        check_options("MoeDispatch", num_experts, capacity, drop_policy)
        _check_ranks("MoeDispatch", expert_parallel_group)
        self.num_experts = num_experts
        self.capacity = capacity
        self.drop_policy = drop_policy

    def extra_repr(self) -> str:
        capacity = "" if self.capacity is None else f", capacity={self.capacity}"
        return f"num_experts={self.num_experts}{capacity}"

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        check_assignments("MoeDispatch", math.prod(spec.shape[:-1]), *extras)
        return TensorSpec((self._rows(extras[0]), spec.shape[-1]), autocast or spec.dtype)

    def extra_output_specs(
        self, spec: TensorSpec, extras: Sequence[TensorSpec]
    ) -> tuple[TensorSpec, ...]:
        indices, probs = extras
        return (
            TensorSpec((self.num_experts,), torch.int32),
            TensorSpec((self._rows(indices),), probs.dtype),
            TensorSpec(indices.shape, torch.int32),
        )

    def _rows(self, expert_indices: TensorSpec) -> int:
        return math.prod(expert_indices.shape) if self.capacity is None else self.capacity

    def notes(self, key: PlanKey, rows: int) -> tuple[str, ...]:
        """Experts, and the number of rows."""
        if self.capacity is None:
            how = "no fixed capacity: a row for each assignment, none is dropped."
        else:
            how = (
                f"a capacity of {self.capacity} rows, whatever the number of tokens; of more "
                f'assignments some are dropped (drop_policy "{self.drop_policy}").'
            )
        return (f"{self.num_experts} experts; {how}",)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        if side == "forward":
            return ("sort by expert", "permute", "permute probs")
        (op,) = key.ops
        wanted = {
            "unpermute": op.input_requires_grad,
            "unpermute probs": op.extra_inputs[1].requires_grad,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        (ctx,), (extras,) = basic_op_ctxs, basic_op_extra_inputs
        x, row_map, made = self.sorted_tokens(ctx, input_, extras)
        y = ops.permute(x, row_map, made[2])
        return write_output(y, next_op_input_quantizer), [made]

    def sorted_tokens(
        self, ctx: OperationContext, input_: torch.Tensor, extras: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """The tokens ``[T, hidden]``, the assignment of each row, and the extra outputs.

        All of a forward but the copy of the tokens to their rows; saves what backward reads.
        """
        indices, probs = extras
        check_assignments("MoeDispatch", math.prod(input_.shape[:-1]), indices, probs)
        for name, extra in (("expert_indices", indices), ("probs", probs)):
            check_device("MoeDispatch", name, extra, "the input", input_)
        check_values("MoeDispatch", indices, self.num_experts)
        dtype = ctx.autocast_dtype or input_.dtype
        x = cast(plain(input_, dtype), dtype).reshape(-1, input_.shape[-1])
        split_sizes, row_map, inverse_map = route(
            indices, probs, self.num_experts, self.capacity, self.drop_policy
        )
        # A matrix of one column, and a token for each assignment.
        row_probs = ops.permute(probs.reshape(-1, 1), row_map, inverse_map.view(-1, 1)).view(-1)
        ctx.input_shape = input_.shape  # type: ignore[attr-defined]
        if ctx.requires_grad:
            ctx.save_for_backward(inverse_map)
        return x, row_map, (split_sizes, row_probs, inverse_map)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        (ctx,) = basic_op_ctxs
        (inverse_map,) = ctx.saved_tensors
        dx = dprobs = None
        if ctx.input_requires_grad:
            dy = plain(grad_output, ctx.autocast_dtype or ctx.input_dtype)
            dx = ops.unpermute(dy, inverse_map, None).view(ctx.input_shape)
            dx = write_grad_input(dx, ctx)
        if ctx.extra_inputs_require_grad[1]:
            drows = basic_op_grad_extra_outputs[0][1].reshape(-1, 1)
            dprobs = ops.unpermute(drows, inverse_map.view(-1, 1), None).view(inverse_map.shape)
        return dx, [()], [(None, dprobs)]


class MoeCombine(BasicOperation):
    """Add the rows of each token: ``out[t] = sum over j of y[inverse_map[t, j]]``.

    :func:`fuser.moe.unpermute` without probabilities as an op, with the same bits: ``[rows,
    hidden]`` becomes ``[T, hidden]``, in the dtype of the input. The sum is in fp32, in the order
    of j; a dropped assignment adds nothing, and a token without a row gets 0. Unused rows get a
    gradient of 0, and nothing in them reaches a result. Nothing waits for the device.

    The extra input, on the device of the input, is the extra output 2 of ``MoeDispatch``:
    ``inverse_map``, int32 ``[T, k]``. On a CPU its values are checked: each is -1, or a row
    of the input that occurs once.

    Parameters
    ----------
    expert_parallel_group
        As in ``MoeDispatch``.

    Raises
    ------
    InputError
        If the group has more than one rank. A call raises it if a shape, dtype, device or row is
        not as described.
    """

    parameter_names = ()
    num_extra_inputs = 1
    saves_input = False
    can_quantize_output = ("forward", "backward")

    def __init__(self, *, expert_parallel_group: Any | None = None) -> None:
        super().__init__()
        _check_ranks("MoeCombine", expert_parallel_group)

    def output_spec(
        self, spec: TensorSpec, extras: Sequence[TensorSpec], autocast: torch.dtype | None
    ) -> TensorSpec:
        self._check(spec, extras[0])
        return TensorSpec((extras[0].shape[0], spec.shape[-1]), spec.dtype)

    def kernels(self, side: str, key: PlanKey) -> tuple[str, ...]:
        return ("unpermute" if side == "forward" else "permute",)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        (ctx,), ((inverse_map,),) = basic_op_ctxs, basic_op_extra_inputs
        self._check(input_, inverse_map)
        check_device("MoeCombine", "inverse_map", inverse_map, "the input", input_)
        _check_rows(inverse_map, input_.shape[0])
        ctx.num_rows = input_.shape[0]  # type: ignore[attr-defined]
        if ctx.requires_grad:
            ctx.save_for_backward(inverse_map)
        y = ops.unpermute(plain(input_, input_.dtype), inverse_map.contiguous(), None)
        return write_output(y, next_op_input_quantizer), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Grads], Iterable[Grads]]:
        (ctx,) = basic_op_ctxs
        (inverse_map,) = ctx.saved_tensors
        dy = plain(grad_output, ctx.input_dtype)
        row_map = ops.row_map_of(inverse_map, ctx.num_rows)
        dx = ops.permute(dy, row_map, inverse_map.contiguous())
        return write_grad_input(dx, ctx), [()], [(None,)]

    def _check(self, rows: Any, inverse_map: Any) -> None:
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


def _check_ranks(name: str, group: Any | None) -> None:
    ranks = 1 if group is None else torch.distributed.get_world_size(group)
    if ranks > 1:
        raise InputError(
            f"{name} got an expert_parallel_group of {ranks} ranks; this version of fuser computes "
            "all experts on the rank of their tokens."
        )


def _check_rows(inverse_map: torch.Tensor, rows: int) -> None:
    """Raise if a map on the CPU names a row that the input does not have, or a row twice."""
    if inverse_map.device.type != "cpu":
        return
    found = inverse_map.reshape(-1)
    found = found[found != -1]
    is_wrong = (found < 0) | (found >= rows)
    if is_wrong.any():
        raise InputError(
            f"MoeCombine got row {int(found[is_wrong][0])} of an input of {rows} rows; its "
            "extra input has rows of the input, or -1."
        )
    counts = found.bincount()
    if (counts > 1).any():
        raise InputError(
            f"MoeCombine got row {int(counts.argmax())} {int(counts.max())} times; each row has "
            "one assignment. Its extra input is extra output 2 of MoeDispatch, not expert indices."
        )
