"""Rotary position embedding (Su et al., 2021) by the names of Transformer Engine."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fuser.errors import InputError

__all__ = ["RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]

TensorFormat = Literal["sbhd", "bshd", "thd"]


class RotaryPositionEmbedding(torch.nn.Module):
    """The angles of positions, ``[length, 1, 1, dim]`` in fp32.

    Parameters
    ----------
    dim
        The features of a head that are rotated.
    rotary_percent
        The part of ``dim`` that is rotated.
    seq_len_interpolation_factor
        Positions are divided by it, if ``pretrained_max_position_embeddings`` is given too.
    pretrained_max_position_embeddings
        The length that a model has learned. For more than the factor times it, positions are
        divided so that the last one lies within that length.
    rotary_base
        The base of the inverse frequencies ``base^(-2i / dim)``.
    interleaved
        Whether neighbouring features are a pair, in place of features half of ``dim`` apart.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        rotated = int(dim * rotary_percent)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = interleaved
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """The angles of ``max_seq_len`` positions from ``offset`` on."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32)
        positions = positions + offset
        factor, learned = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and learned is not None:
            is_longer = max_seq_len > learned * factor
            positions = positions / (max_seq_len / learned if is_longer else factor)
        angles = torch.outer(positions, self.inv_freq)
        if self.interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: TensorFormat = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    **options: Any,
) -> torch.Tensor:
    """Rotate the first features of heads by the angles of their positions.

    Computes in fp32 and rounds once to the dtype of ``t``.

    Parameters
    ----------
    t
        ``[s, b, h, d]``, ``[b, s, h, d]`` or, for ``"thd"``, ``[tokens, h, d]``, by
        ``tensor_format``.
    freqs
        The angles ``[positions, 1, 1, r]`` with ``r <= d``; the other features stay.
    start_positions
        ``[b]``: the position of the first token of each sequence; None for 0. On a GPU they are
        not read by the host, and positions without an angle give NaNs.
    interleaved
        As in :class:`RotaryPositionEmbedding`.
    fused
        Accepted, no effect.
    cu_seqlens
        ``[sequences + 1]``: where sequences begin and end, for ``"thd"``.

    Raises
    ------
    InputError
        If the format is unknown, a position is negative or has no angle, or a sequence is shared
        by ranks.
    """
    if options:
        raise InputError(
            f"apply_rotary_pos_emb takes no argument {next(iter(options))!r} here: leave it out."
        )
    if cp_size != 1:
        raise InputError(
            f"apply_rotary_pos_emb got cp_size={cp_size}; sequences are not shared by ranks here. "
            "Give each rank whole sequences."
        )
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise InputError(
                "apply_rotary_pos_emb got tensor_format='thd' without cu_seqlens: give them."
            )
        tokens = torch.arange(t.shape[0], device=t.device)
        bounds = cu_seqlens.to(t.device, torch.int64)
        sequences = (torch.searchsorted(bounds, tokens, right=True) - 1).clamp(0, len(bounds) - 2)
        steps = tokens - bounds[sequences]
        if start_positions is not None:
            steps = steps + start_positions.to(t.device)[sequences]
        if steps.device.type == "cpu" and steps.numel():
            _check_positions(int(steps.min()), int(steps.max()) + 1, freqs.shape[0])
        angles = _angles_at(steps, freqs)[:, None, :]
    elif tensor_format in ("sbhd", "bshd"):
        length = t.shape[0] if tensor_format == "sbhd" else t.shape[1]
        begin, end = _ends(length, start_positions)
        _check_positions(begin, end, freqs.shape[0])
        if start_positions is None:
            angles = freqs.flatten(0, -2).to(t.device)[:length][:, None, None, :]
        else:
            steps = torch.arange(length, device=t.device)[:, None]
            angles = _angles_at(steps + start_positions.to(t.device)[None, :], freqs)[:, :, None, :]
        if tensor_format == "bshd":
            angles = angles.transpose(0, 1)
    else:
        raise InputError(
            f"apply_rotary_pos_emb got tensor_format={tensor_format!r}; it is 'sbhd', 'bshd' or "
            "'thd'."
        )
    rotated = freqs.shape[-1]
    part, rest = t[..., :rotated].float(), t[..., rotated:]
    if interleaved:
        pairs = part.reshape(*part.shape[:-1], -1, 2)
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    else:
        first, second = part.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    angles = angles.float()
    out = (part * angles.cos() + turned * angles.sin()).to(t.dtype)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def _check_positions(begin: int, end: int, count: int) -> None:
    if count < end:
        raise InputError(
            f"apply_rotary_pos_emb got the angles of {count} positions for {end}: give more."
        )
    if begin < 0:
        raise InputError(
            f"apply_rotary_pos_emb got start_positions with {begin}; give positions from 0 on."
        )


def _angles_at(positions: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """The angles of positions, ``[..., r]``; NaNs where there are none, which no host looks at."""
    table = freqs.flatten(0, -2).to(positions.device)
    has_angle = (positions >= 0) & (positions < len(table))
    angles = table[positions.clamp(0, len(table) - 1)]
    return angles.masked_fill(~has_angle[..., None], float("nan"))


def _ends(length: int, start_positions: torch.Tensor | None) -> tuple[int, int]:
    """The first position and the number after the last, as far as the host knows them."""
    if start_positions is None or start_positions.device.type != "cpu":
        return 0, length
    if not start_positions.numel():
        return 0, 0
    first, last = start_positions.aminmax()
    return int(first), length + int(last)


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: TensorFormat = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one tensor, the first two rotated as one is by
    :func:`apply_rotary_pos_emb`.

    Parameters
    ----------
    qkv
        ``[s, b, groups, features]`` or ``[b, s, groups, features]``: for each group the queries of
        its heads, its key and its value.
    q_freqs, k_freqs
        The angles of queries and of keys.
    qkv_split_arg_list
        The features of a group's queries, of its key and of its value.

    Returns
    -------
    tuple of torch.Tensor
        Queries ``[..., heads, d]``, whose heads have the features of a key, keys and values
        ``[..., groups, d]``.

    Raises
    ------
    InputError
        If the features are not those of ``qkv``, queries are no whole heads, the format is
        ``"thd"``, or :func:`apply_rotary_pos_emb` refuses the arguments.
    """
    of_q, of_k, of_v = qkv_split_arg_list
    if tensor_format == "thd" or of_q % of_k or of_q + of_k + of_v != qkv.shape[-1]:
        raise InputError(
            f"apply_fused_qkv_rotary_pos_emb got tensor_format={tensor_format!r} and "
            f"qkv_split_arg_list={list(qkv_split_arg_list)} for {qkv.shape[-1]} features: give "
            "'sbhd' or 'bshd', and the features of queries, which are heads of the size of a key, "
            "of the key and of the value, which are all of them."
        )
    q, k, v = torch.split(qkv, [of_q, of_k, of_v], dim=-1)
    q = q.reshape(*q.shape[:2], -1, of_k)
    q, k = (
        apply_rotary_pos_emb(
            part,
            freqs,
            tensor_format,
            start_positions,
            interleaved,
            cu_seqlens=cu_seqlens,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
        for part, freqs in ((q, q_freqs), (k, k_freqs))
    )
    return q, k, v
