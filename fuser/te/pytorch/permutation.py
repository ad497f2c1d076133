"""Tokens as rows in the order of their experts, and back, by the names of Transformer Engine."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fuser.errors import InputError

__all__ = [
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

MapType = Literal["mask"]


class _Take(torch.autograd.Function):
    """Rows by index; backward adds the gradients of a token's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.tokens = x.shape[0]
        return x.index_select(0, rows.clamp(min=0)).masked_fill_((rows < 0)[:, None], 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return _sum_of_rows(grad, rows, ctx.tokens), None


def _sum_of_rows(x: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[tokens, ...]``: for each token the sum of the rows of ``x`` that are its, in fp32.

    The order of a sum is that of the rows, on every device and in every run. Rows of no token, -1,
    are left out.
    """
    rows = torch.where(rows < 0, tokens, rows)
    order = rows.argsort(stable=True)
    counts = torch.zeros(tokens + 1, dtype=torch.int64, device=rows.device)
    counts.scatter_add_(0, rows, torch.ones_like(rows))
    sums = torch.segment_reduce(
        x.index_select(0, order).float().flatten(1),
        "sum",
        lengths=counts,
        axis=0,
        unsafe=True,  # the counts are those of the rows: a check would wait for the GPU
        initial=0,
    )
    return sums[:tokens].reshape(tokens, *x.shape[1:]).to(x.dtype)


def _row_ids(
    name: str, routing_map: torch.Tensor, num_out_tokens: int, map_type: str
) -> torch.Tensor:
    """``[2, rows]``: token and expert of each row, by expert, then by token; -1 for none."""
    if map_type != "mask" or routing_map.dim() != 2:
        raise InputError(
            f"{name} got map_type={map_type!r} and a routing map of shape "
            f"{tuple(routing_map.shape)}; it takes a mask [tokens, experts]. For indices "
            "[tokens, k] there is fuser.moe.permute."
        )
    by_expert = routing_map.to(torch.bool).T
    if num_out_tokens > 0:
        places = torch.nonzero_static(by_expert, size=num_out_tokens, fill_value=-1)
    else:
        places = by_expert.nonzero()
    return places.T.flip(0).contiguous()


def _probabilities(probs: torch.Tensor, row_id_map: torch.Tensor) -> torch.Tensor:
    token, expert = row_id_map.clamp(min=0).unbind()
    return probs[token, expert].masked_fill(row_id_map[0] < 0, 0.0)


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: MapType = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of tokens, sorted by expert, and which row is whose.

    Parameters
    ----------
    inp
        Tokens ``[tokens, features]``.
    routing_map
        A mask ``[tokens, experts]``.
    num_out_tokens
        The number of copies, that of the mask's ones; more are rows of zeros at the end. -1 reads
        it from the mask, for which the host waits for the GPU.
    max_token_num
        Accepted, no effect.

    Returns
    -------
    tuple of torch.Tensor
        ``[copies, features]``, and the map that :func:`moe_unpermute` takes.

    Raises
    ------
    InputError
        If the map is not a mask.
    """
    rows = _row_ids("moe_permute", routing_map, num_out_tokens, map_type)
    output: torch.Tensor = _Take.apply(inp, rows[0])  # type: ignore[no-untyped-call]
    return output, rows


def moe_permute_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of tokens, sorted by expert, the probability of each ``[copies]``, and which is whose.

    ``probs`` are ``[tokens, experts]``; the other arguments are those of :func:`moe_permute`.
    """
    rows = _row_ids("moe_permute_with_probs", routing_map, num_out_tokens, "mask")
    output: torch.Tensor = _Take.apply(inp, rows[0])  # type: ignore[no-untyped-call]
    return output, _probabilities(probs, rows), rows


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """:func:`moe_permute_with_probs`, and rows of zeros behind the rows of each expert.

    The host waits for the GPU, to know the number of rows.

    Parameters
    ----------
    inp, probs, routing_map
        As there.
    tokens_per_expert
        The sums ``[experts]`` of the mask's columns.
    align_size
        The rows of each expert become a multiple of it.

    Returns
    -------
    tuple
        ``[rows, features]``, probabilities ``[rows]``, the map for :func:`moe_unpermute`, which
        knows the padding; the rows of padding before each expert's, None if there are none; and
        the numbers of rows ``[experts]``.

    Raises
    ------
    InputError
        If the map is not a mask, or the numbers of tokens are not its sums.
    """
    if align_size < 1:
        raise InputError(
            f"moe_permute_and_pad_with_probs got align_size={align_size}; give a positive number."
        )
    name = "moe_permute_and_pad_with_probs"
    rows = _row_ids(name, routing_map, -1, "mask")
    sizes = tokens_per_expert.to(rows.device, torch.int64)
    sums = torch.zeros(routing_map.shape[1], dtype=torch.int64, device=rows.device)
    sums.scatter_add_(0, rows[1], torch.ones_like(rows[1]))
    if sizes.shape != sums.shape or not torch.equal(sizes, sums):
        raise InputError(
            f"{name} got tokens_per_expert={tokens_per_expert.tolist()} for a routing map of "
            f"{sums.tolist()}; give the sums of its columns."
        )
    padded = -(-sizes // align_size) * align_size
    padding = padded - sizes
    offsets = padding.cumsum(0) - padding
    place = torch.arange(rows.shape[1], device=rows.device) + offsets[rows[1]]
    padded_rows = rows.new_full((2, int(padded.sum())), -1)
    padded_rows[:, place] = rows
    output: torch.Tensor = _Take.apply(inp, padded_rows[0])  # type: ignore[no-untyped-call]
    has_padding = padded_rows.shape[1] > rows.shape[1]
    probabilities = _probabilities(probs, padded_rows)
    return output, probabilities, padded_rows, offsets if has_padding else None, padded


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: tuple[int, ...] | torch.Size | None = None,
    map_type: MapType = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's rows, weighted by its probabilities if they are given.

    Parameters
    ----------
    inp
        Rows ``[copies, features]`` in the order of :func:`moe_permute`.
    row_id_map
        Its second result.
    merging_probs, probs
        ``[tokens, experts]``; two names of one argument.
    restore_shape
        ``(tokens, features)``; needed without probabilities.
    pad_offsets
        Accepted, no effect: the map says which rows are padding.

    Raises
    ------
    InputError
        If neither the probabilities nor the shape tell the number of tokens.
    """
    weights = probs if merging_probs is None else merging_probs
    if map_type != "mask" or (weights is None and restore_shape is None):
        raise InputError(
            f"moe_unpermute got map_type={map_type!r}, merging_probs={weights} and restore_shape="
            f"{restore_shape}; it takes a mask's map, and the probabilities [tokens, experts] or "
            "the shape (tokens, features)."
        )
    token = row_id_map[0]
    if restore_shape is not None:
        tokens = restore_shape[0]
    else:
        assert weights is not None
        tokens = weights.shape[0]
    if weights is not None:
        inp = inp * _probabilities(weights, row_id_map)[:, None].to(inp.dtype)
    output: torch.Tensor = _Add.apply(inp, token, tokens)  # type: ignore[no-untyped-call]
    return output


class _Add(torch.autograd.Function):
    """The sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _sum_of_rows(x, rows, tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        dx = grad.index_select(0, rows.clamp(min=0))
        return dx.masked_fill_((rows < 0)[:, None], 0.0), None, None


def _chunk_rows(split_sizes: torch.Tensor, sorted_index: torch.Tensor, rows: int) -> torch.Tensor:
    """The rows of chunks of these sizes, in another order of the chunks."""
    sizes = split_sizes.to(torch.int64)
    if int(sizes.sum()) != rows:
        raise InputError(
            f"moe_sort_chunks_by_index got chunks of {sizes.tolist()} for {rows} rows; give sizes "
            "whose sum is the number of rows."
        )
    order = sorted_index.to(device=sizes.device, dtype=torch.int64)
    starts = (sizes.cumsum(0) - sizes)[order]
    lengths = sizes[order]
    total = rows
    ends = lengths.cumsum(0)
    within = torch.arange(total, device=sizes.device)
    within = within - torch.repeat_interleave(ends - lengths, lengths, output_size=total)
    return torch.repeat_interleave(starts, lengths, output_size=total) + within


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """Chunks of the rows of ``inp``, of these sizes, in the order of ``sorted_index``."""
    rows = _chunk_rows(split_sizes, sorted_index, inp.shape[0]).to(inp.device)
    return inp.index_select(0, rows)


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks of rows and of their probabilities ``[rows]``, in the order of ``sorted_index``."""
    rows = _chunk_rows(split_sizes, sorted_index, inp.shape[0]).to(inp.device)
    return inp.index_select(0, rows), probs.index_select(0, rows)
