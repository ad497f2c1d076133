"""Permutation of tokens to rows sorted by expert, and back, with gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from fuser.errors import InputError, InputTypeError
from fuser.functional import permutation as ops
from fuser.graph_break import breaks_graph
from fuser.wrapper_tensor import WrapperTensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
DROP_POLICIES = ("position", "probs")
# Numbers of rows and assignments are int32; kernels count a little past the last assignment.
MAX_COUNT = 2**31 - 2**16


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


@breaks_graph
def permute(
    x: torch.Tensor,
    expert_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    num_experts: int,
    capacity: int | None = None,
    drop_policy: str = "position",
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
        If ``num_experts`` or ``capacity`` is no int, or ``x`` no plain tensor.
    """
    _check_plain("permute", "x", x)
    if x.dim() == 0:
        raise InputError("permute takes x of shape [..., hidden]; got a scalar.")
    if x.dim() != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    _check_arguments(x, expert_indices, probs, num_experts, capacity, drop_policy)
    _check_values(expert_indices, num_experts)
    count = expert_indices.numel()
    rows = count if capacity is None else capacity
    with torch.no_grad():
        if rows < count:
            key = probs if drop_policy == "probs" else None
            expert_indices = _within_capacity(expert_indices, key, num_experts, rows)
        split_sizes, row_map, inverse_map = ops.sort_by_expert(expert_indices, num_experts, rows)
    y: torch.Tensor = _Permute.apply(x, row_map, inverse_map)  # type: ignore[no-untyped-call]
    row_probs: torch.Tensor | None = None
    if probs is not None:  # a matrix of one column, and a token for each assignment
        column, each = probs.reshape(-1, 1), inverse_map.view(-1, 1)
        row_probs = _Permute.apply(column, row_map, each)  # type: ignore[no-untyped-call]
        assert row_probs is not None
        row_probs = row_probs.view(-1)
    return Permuted(y, split_sizes, row_probs, row_map, inverse_map)


@breaks_graph
def unpermute(
    y: torch.Tensor, permuted: Permuted, *, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the rows of each token: ``[T, hidden_out]``, in the dtype of ``y``.

    ``out[t] = sum over j of y[inverse_map[t, j]] * probs[t, j]``, in the order of j, begun with 0.
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
        ``[T, k]``; weights of the rows, such as the probabilities of the router. None for ones,
        which is right if the experts have used ``permuted.probs``.

    Raises
    ------
    InputError
        If a shape, dtype or device does not match its description.
    InputTypeError
        If ``permuted`` is no :class:`Permuted`, or ``y`` no plain tensor.
    """
    if not isinstance(permuted, Permuted):
        raise InputTypeError(
            f"unpermute takes the Permuted that permute returned; got a {type(permuted).__name__}."
        )
    _check_plain("unpermute", "y", y)
    rows, shape = permuted.row_map.shape[0], tuple(permuted.inverse_map.shape)
    if y.dim() != 2 or y.shape[0] != rows:
        raise InputError(
            f"unpermute takes y of shape [{rows}, hidden], the rows that permute made; got "
            f"{tuple(y.shape)}."
        )
    _check_device("unpermute", "y", y, "the maps", permuted.row_map)
    if probs is not None:
        _check_probs("unpermute", probs, shape, y)
    out: torch.Tensor = _Unpermute.apply(  # type: ignore[no-untyped-call]
        y, probs, permuted.row_map, permuted.inverse_map
    )
    return out


# -- gradients ----------------------------------------------------------------


class _Permute(torch.autograd.Function):
    """Rows of x by the maps; the gradient of x is an unpermute without probabilities."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, row_map: torch.Tensor, inverse_map: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_map)
        return ops.permute(x, row_map, inverse_map)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse_map,) = ctx.saved_tensors
        return ops.unpermute(dy, inverse_map, None), None, None


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
        return ops.unpermute(y, inverse_map, probs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        y, probs, row_map, inverse_map = ctx.saved_tensors
        if probs is None:
            return ops.permute(dout, row_map, inverse_map), None, None, None
        dy, dprobs = ops.unpermute_backward(dout, y, row_map, inverse_map, probs)
        return dy, None if dprobs is None else dprobs.to(probs.dtype), None, None


# -- capacity -----------------------------------------------------------------


def _within_capacity(
    expert_indices: torch.Tensor, probs: torch.Tensor | None, num_experts: int, capacity: int
) -> torch.Tensor:
    """The indices, with -1 for all but ``capacity`` assignments.

    The first ones remain, or with ``probs`` those of the highest probability.
    """
    has_expert = (expert_indices >= 0) & (expert_indices < num_experts)
    if probs is None:
        numbers = has_expert.view(-1).cumsum(0).view(has_expert.shape)
        return expert_indices.masked_fill(has_expert.logical_not() | (numbers > capacity), -1)
    # Only an assignment without an expert is -infinity.
    values = probs.clamp(min=torch.finfo(probs.dtype).min).masked_fill(~has_expert, -torch.inf)
    order = values.view(-1).sort(descending=True, stable=True).indices
    is_kept = torch.zeros_like(has_expert).view(-1)
    is_kept.index_fill_(0, order[:capacity], True)
    return expert_indices.masked_fill(~(has_expert & is_kept.view(has_expert.shape)), -1)


# -- checks -------------------------------------------------------------------


def _check_arguments(
    x: torch.Tensor,
    expert_indices: torch.Tensor,
    probs: torch.Tensor | None,
    num_experts: int,
    capacity: int | None,
    drop_policy: str,
) -> None:
    for name, value, least in (("num_experts", num_experts, 1), ("capacity", capacity, 0)):
        if value is None and name == "capacity":
            continue
        if type(value) is not int:
            raise InputTypeError(f"permute takes an int as {name}; got {value!r}.")
        if not least <= value <= MAX_COUNT:
            raise InputError(f"permute got {name}={value}; it is {least} to {MAX_COUNT}.")
    if drop_policy not in DROP_POLICIES:
        raise InputError(f"permute got drop_policy={drop_policy!r}; it is 'position' or 'probs'.")
    if drop_policy == "probs" and probs is None:
        raise InputError("permute got drop_policy='probs' and no probs.")
    tokens, shape = x.shape[0], tuple(expert_indices.shape)
    if expert_indices.dtype not in INDEX_DTYPES:
        raise InputError(
            f"permute takes expert_indices of int32 or int64; got {expert_indices.dtype}."
        )
    if len(shape) != 2 or shape[0] != tokens or shape[1] == 0:
        raise InputError(
            f"permute takes expert_indices of shape [{tokens}, k], because x has {tokens} tokens; "
            f"got {shape}."
        )
    if expert_indices.numel() > MAX_COUNT:
        raise InputError(
            f"permute got {expert_indices.numel()} assignments, {shape[0]} tokens of {shape[1]} "
            f"experts; the most is {MAX_COUNT}."
        )
    _check_device("permute", "expert_indices", expert_indices, "x", x)
    if probs is not None:
        _check_probs("permute", probs, shape, x)


def _check_plain(function: str, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, WrapperTensor):
        raise InputTypeError(
            f"{function} takes a plain tensor as {name}; got a {type(tensor).__name__}. Call "
            ".dequantize() on a quantized tensor first."
        )
    if tensor.dtype not in DTYPES:
        raise InputError(
            f"{function} takes {name} of float64, float32, float16 or bfloat16; got {tensor.dtype}."
        )


def _check_probs(
    function: str, probs: torch.Tensor, shape: tuple[int, ...], other: torch.Tensor
) -> None:
    if tuple(probs.shape) != shape:
        raise InputError(
            f"{function} takes probs of shape {shape}, one for each expert index; got "
            f"{tuple(probs.shape)}."
        )
    _check_plain(function, "probs", probs)
    _check_device(function, "probs", probs, "the rows", other)


def _check_device(
    function: str, name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor
) -> None:
    if tensor.device != other.device:
        raise InputError(
            f"{function} got {name} on {tensor.device} and {other_name} on {other.device}."
        )


def _check_values(expert_indices: torch.Tensor, num_experts: int) -> None:
    """Raise if an index on the CPU is neither an expert nor -1. Others are not read."""
    if expert_indices.device.type != "cpu":
        return
    is_wrong = (expert_indices < -1) | (expert_indices >= num_experts)
    if is_wrong.any():
        token, choice = is_wrong.nonzero()[0].tolist()
        raise InputError(
            f"permute got expert index {int(expert_indices[token, choice])} for token {token}, "
            f"choice {choice}; an index is 0 to {num_experts - 1}, or -1 to drop it."
        )
