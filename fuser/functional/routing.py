"""Routing of tokens to experts: checks, the capacity, and the sort by expert."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from fuser.cuda.launch import call_each_time
from fuser.errors import InputError, InputTypeError
from fuser.functional.permutation import sort_by_expert
from fuser.wrapper_tensor import WrapperTensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
DropPolicy = Literal["position", "probs"]
# Numbers of rows and assignments are int32; kernels count a little past the last assignment.
MAX_COUNT = 2**31 - 2**16


def route(
    expert_indices: torch.Tensor,
    probs: torch.Tensor | None,
    num_experts: int,
    capacity: int | None,
    drop_policy: DropPolicy,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The split sizes, ``row_map`` and ``inverse_map`` of assignments that were checked.

    At most ``capacity`` of them remain, by default all.
    """
    count = expert_indices.numel()
    rows = count if capacity is None else capacity
    with torch.no_grad():
        if rows < count:
            key = probs if drop_policy == "probs" else None
            expert_indices = _within_capacity(expert_indices, key, num_experts, rows)
        return sort_by_expert(expert_indices, num_experts, rows)


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
    order = _largest_first(values)
    is_kept = torch.zeros_like(has_expert).view(-1)
    is_kept.index_fill_(0, order[:capacity], True)
    return expert_indices.masked_fill(~(has_expert & is_kept.view(has_expert.shape)), -1)


def within_blocks(
    expert_indices: torch.Tensor,
    probs: torch.Tensor | None,
    blocks_of: torch.Tensor,
    blocks: int,
    size: int,
) -> torch.Tensor:
    """The indices, with -1 for all but ``size`` assignments of each block.

    ``blocks_of``, ``[T, k]``, is the block of each assignment; one outside of ``0..blocks - 1`` is
    in none. The first ones of a block remain, or with ``probs`` those of the highest probability.
    """
    flat = blocks_of.reshape(-1)
    order = None
    if probs is not None:
        order = _largest_first(probs)
        flat = flat[order]
    sizes, _, places = sort_by_expert(flat.view(-1, 1), blocks, flat.numel())
    begins = sizes.cumsum(0, dtype=torch.int32) - sizes
    places = places.view(-1)
    is_kept = (places >= 0) & (places - begins[flat.clamp(0, blocks - 1).long()] < size)
    if order is not None:
        is_kept = torch.empty_like(is_kept).scatter_(0, order, is_kept)
    return expert_indices.masked_fill(~is_kept.view(expert_indices.shape), -1)


def _largest_first(values: torch.Tensor) -> torch.Tensor:
    """The places of all values, those of the largest first, and of equal ones the first."""
    return values.reshape(-1).sort(descending=True, stable=True).indices


# -- checks: each error begins with the name of the function or op ----------------


def check_options(
    name: str, num_experts: int, capacity: int | None, drop_policy: DropPolicy
) -> None:
    """Check what does not depend on tensors."""
    for option, value, least in (("num_experts", num_experts, 1), ("capacity", capacity, 0)):
        if value is None and option == "capacity":
            continue
        if type(value) is not int:
            raise InputTypeError(f"{name} takes an int as {option}; got {value!r}.")
        if not least <= value <= MAX_COUNT:
            raise InputError(f"{name} got {option}={value}; it is {least} to {MAX_COUNT}.")
    if drop_policy not in get_args(DropPolicy):
        raise InputError(f"{name} got drop_policy={drop_policy!r}; it is 'position' or 'probs'.")


def check_assignments(name: str, tokens: int, expert_indices: Any, probs: Any | None) -> None:
    """Check shapes and dtypes: of tensors, or of their specs."""
    shape = tuple(expert_indices.shape)
    if expert_indices.dtype not in INDEX_DTYPES:
        raise InputError(
            f"{name} takes expert_indices of int32 or int64; got {expert_indices.dtype}."
        )
    if len(shape) != 2 or shape[0] != tokens or shape[1] == 0:
        raise InputError(
            f"{name} takes expert_indices of shape [{tokens}, k], because x has {tokens} tokens; "
            f"got {shape}."
        )
    if math.prod(shape) > MAX_COUNT:
        raise InputError(
            f"{name} got {math.prod(shape)} assignments, {shape[0]} tokens of {shape[1]} "
            f"experts; at most {MAX_COUNT} are possible."
        )
    if probs is not None:
        check_probs(name, probs, shape)


def check_probs(name: str, probs: Any, shape: tuple[int, ...]) -> None:
    """Check the shape of probabilities, and their dtype."""
    if tuple(probs.shape) != shape:
        raise InputError(
            f"{name} takes probs of shape {shape}, one for each expert index; got "
            f"{tuple(probs.shape)}."
        )
    _check_dtype(name, "probs", probs)


def check_plain(name: str, argument: str, tensor: torch.Tensor) -> None:
    """Check that an argument is an unquantized tensor of floating-point values."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, WrapperTensor):
        raise InputTypeError(
            f"{name} takes a plain tensor as {argument}; got a {type(tensor).__name__}. Call "
            ".dequantize() on a quantized tensor first."
        )
    _check_dtype(name, argument, tensor)


def _check_dtype(name: str, argument: str, tensor: Any) -> None:
    if tensor.dtype not in DTYPES:
        raise InputError(
            f"{name} takes {argument} of float64, float32, float16 or bfloat16; got {tensor.dtype}."
        )


def check_device(
    name: str, argument: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor
) -> None:
    """Check that two arguments are on one device."""
    if tensor.device != other.device:
        raise InputError(
            f"{name} got {argument} on {tensor.device} and {other_name} on {other.device}."
            " Move one to the other."
        )


def check_values(name: str, expert_indices: torch.Tensor, num_experts: int) -> None:
    """Raise if an index on the CPU is neither an expert nor -1. Others are not read."""
    if expert_indices.device.type == "cpu":
        call_each_time(_check_values, name, expert_indices, num_experts)


def _check_values(name: str, expert_indices: torch.Tensor, num_experts: int) -> None:
    is_wrong = (expert_indices < -1) | (expert_indices >= num_experts)
    if is_wrong.any():
        token, choice = is_wrong.nonzero()[0].tolist()
        raise InputError(
            f"{name} got expert index {int(expert_indices[token, choice])} for token {token}, "
            f"choice {choice}; an index is 0 to {num_experts - 1}, or -1 to drop it."
        )
