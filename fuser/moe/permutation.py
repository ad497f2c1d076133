"""Permutation of tokens to rows sorted by expert, and back, with gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from fuser.errors import InputError, InputTypeError
from fuser.functional import permutation
from fuser.functional.routing import (
    DropPolicy,
    check_assignments,
    check_device,
    check_options,
    check_plain,
    check_probs,
    check_values,
    route,
)
from fuser.moe import graph_operations


class Permuted(NamedTuple):
    """The result of :func:`permute`; an *assignment* is a token and one of its k experts."""

    x: torch.Tensor
    """``[rows, hidden]``: the rows of expert 0, then those of expert 1, and so on; then zeros."""
    split_sizes: torch.Tensor
    """int32 ``[num_experts]`` on the device of x: the number of rows of each expert."""
    probs: torch.Tensor | None
    """``[rows]``: the probability of each row, 0 in unused rows. None without probabilities."""
    row_map: torch.Tensor
    """int32 ``[rows]``: ``token * k + choice`` of each row's assignment, -1 in unused rows."""
    inverse_map: torch.Tensor
    """int32 ``[T, k]``: the row of each assignment, -1 if it was dropped."""


def permute(
    x: torch.Tensor,
    expert_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    num_experts: int,
    capacity: int | None = None,
    drop_policy: DropPolicy = "position",
) -> Permuted:
    """Copy each token to one row for each of its experts; rows are sorted by expert.

    The order is stable: by expert, then by token, then by choice. All shapes follow from shapes
    and from ``capacity``, and nothing waits for the device, so a CUDA graph can contain the call
    and be replayed with other indices. Gradients flow to ``x`` (the sum over a token's rows, in
    fp32 and in the order of choices) and to ``probs``; they are the same in every run.

    The rows after the sum of the split sizes are zero, as are their probabilities. Nothing that is
    in them later, not even NaN, reaches a result or a gradient of this function and
    :func:`unpermute`.

    Parameters
    ----------
    x
        ``[..., hidden]``; fp32, fp16 or bf16, or fp64, which has no kernel. T is the product of the
        leading dimensions.
    expert_indices
        ``[T, k]``, int32 or int64. -1 drops an assignment: it has no row. Other indices outside
        of ``0..num_experts - 1`` are an error on a CPU; on other devices they count as -1, because
        an error would have to wait for the device.
    probs
        ``[T, k]``, of any of the dtypes of x; see :attr:`Permuted.probs`.
    num_experts
        The number of experts. More than 1024 are sorted by PyTorch.
    capacity
        The number of rows; ``T * k`` by default. If there are fewer assignments, the remaining rows
        are unused.
    drop_policy
        The assignments that are dropped if there are more than ``capacity``: ``"position"`` drops
        the last ones in the order of tokens and choices, ``"probs"`` those of the lowest
        probability, and among equal ones the last. The names are those of Megatron-LM's
        ``moe_token_drop_policy``, whose capacity is that of one expert. Split sizes and maps
        contain what remains.

    Raises
    ------
    InputError
        If a shape, dtype, device or value does not match its description.
    InputTypeError
        If ``num_experts`` or ``capacity`` is not an int, or ``x`` is not a plain tensor.
    """
    check_plain("permute", "x", x)
    if x.dim() == 0:
        raise InputError("permute takes x of shape [..., hidden]; got a scalar.")
    if x.dim() != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    check_options("permute", num_experts, capacity, drop_policy)
    if drop_policy == "probs" and probs is None:
        raise InputError("permute got drop_policy='probs' and no probs. Give probs.")
    if probs is not None:
        check_plain("permute", "probs", probs)
    check_assignments("permute", x.shape[0], expert_indices, probs)
    check_device("permute", "expert_indices", expert_indices, "x", x)
    if probs is not None:
        check_device("permute", "probs", probs, "the rows", x)
    options = (num_experts, capacity, drop_policy)
    if torch.compiler.is_compiling():
        split_sizes, row_map, inverse_map = graph_operations.route(expert_indices, probs, *options)
    else:
        check_values("permute", expert_indices, num_experts)
        split_sizes, row_map, inverse_map = route(expert_indices, probs, *options)
    y: torch.Tensor = _Permute.apply(x, row_map, inverse_map)  # type: ignore[no-untyped-call]
    row_probs: torch.Tensor | None = None
    if probs is not None:  # a matrix of one column, and a token for each assignment
        column, rows_of_assignments = probs.reshape(-1, 1), inverse_map.view(-1, 1)
        row_probs = _Permute.apply(column, row_map, rows_of_assignments)  # type: ignore[no-untyped-call]
        assert row_probs is not None
        row_probs = row_probs.view(-1)
    return Permuted(y, split_sizes, row_probs, row_map, inverse_map)


def unpermute(
    y: torch.Tensor, permuted: Permuted, *, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the rows of each token: ``[T, hidden_out]``, in the dtype of ``y``.

    ``out[t] = sum over j of y[inverse_map[t, j]] * probs[t, j]``, from 0 and in the order of j.
    Products and sums are in fp32 (fp64 for fp64), and only the result is rounded to the dtype of
    ``y``. A dropped assignment adds nothing; a token without a row gets 0. Gradients flow to ``y``
    and to ``probs``, and are the same in every run; unused rows of ``y`` get 0. Nothing waits for
    the device.

    Parameters
    ----------
    y
        ``[rows, hidden_out]``; the experts' outputs, in the rows of ``permuted.x``.
    permuted
        The result of :func:`permute`.
    probs
        ``[T, k]``; weights of the rows, such as the probabilities of the router. If None,
        every weight is 1, which is right if the experts have used ``permuted.probs``.

    Raises
    ------
    InputError
        If a shape, dtype or device does not match its description.
    InputTypeError
        If ``permuted`` is not a :class:`Permuted`, or ``y`` is not a plain tensor.
    """
    if not isinstance(permuted, Permuted):
        raise InputTypeError(
            f"unpermute takes the Permuted that permute returned; got a {type(permuted).__name__}."
        )
    check_plain("unpermute", "y", y)
    rows, shape = permuted.row_map.shape[0], tuple(permuted.inverse_map.shape)
    if y.dim() != 2 or y.shape[0] != rows:
        raise InputError(
            f"unpermute takes y of shape [{rows}, hidden], the rows that permute made; got "
            f"{tuple(y.shape)}."
        )
    check_device("unpermute", "y", y, "the maps", permuted.row_map)
    if probs is not None:
        check_plain("unpermute", "probs", probs)
        check_probs("unpermute", probs, shape)
        check_device("unpermute", "probs", probs, "the rows", y)
    out: torch.Tensor = _Unpermute.apply(  # type: ignore[no-untyped-call]
        y, probs, permuted.row_map, permuted.inverse_map
    )
    return out


# -- gradients ----------------------------------------------------------------


def _operations() -> Any:
    """The functions of permutations, or the operations that graphs contain in their place."""
    return graph_operations if torch.compiler.is_compiling() else permutation


class _Permute(torch.autograd.Function):
    """Rows of x by the maps; the gradient of x is an unpermute without probabilities."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, row_map: torch.Tensor, inverse_map: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_map)
        y: torch.Tensor = _operations().permute(x, row_map, inverse_map)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse_map,) = ctx.saved_tensors
        return _operations().unpermute(dy, inverse_map, None), None, None


class _Unpermute(torch.autograd.Function):
    """Sums of rows of y; the gradient of y is a permute, with probabilities if there are any."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        probs: torch.Tensor | None,
        row_map: torch.Tensor,
        inverse_map: torch.Tensor,
    ) -> torch.Tensor:
        kept = y if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, probs, row_map, inverse_map)
        out: torch.Tensor = _operations().unpermute(y, inverse_map, probs)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        y, probs, row_map, inverse_map = ctx.saved_tensors
        if probs is None:
            return _operations().permute(dout, row_map, inverse_map), None, None, None
        dy, dprobs = _operations().unpermute_backward(dout, y, row_map, inverse_map, probs)
        return dy, None if dprobs is None else dprobs.to(probs.dtype), None, None
