"""Attention by the names of Transformer Engine, on ``torch``'s scaled dot product attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fuser.communication import GroupArgument, group_size
from fuser.errors import InputError
from fuser.precision.contexts import current_recipe
from fuser.te.pytorch.positions import also_by_position

__all__ = ["DotProductAttention", "_SplitAlongDim"]

MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "arbitrary",
)
NAMES_OF_PADDING_CAUSAL = ("padding,causal", "causal,padding")
FORMATS = ("sbhd", "bshd")
ROWS = 1024
"""Queries whose logits are held at once where the largest logit is asked for."""


class DotProductAttention(torch.nn.Module):
    """``softmax(q k^T scale + bias) v`` in the unquantized precision of its inputs.

    Parameters
    ----------
    num_attention_heads
        The heads of all ranks together.
    kv_channels
        The features of a head, or those of keys and of values.
    num_gqa_groups
        The heads of keys and values; None for as many as there are of queries.
    attention_dropout
        The probability with which a weight is dropped in training.
    qkv_format
        ``"sbhd"`` or ``"bshd"``: the order of sequence, batch, heads and features.
    attn_mask_type
        ``"no_mask"``, ``"causal"``, ``"causal_bottom_right"``, whose last query sees the last key,
        ``"arbitrary"``, or ``"padding"`` and ``"padding_causal"``, with a mask at each call.
        ``"padding,causal"`` and ``"causal,padding"`` are other names of the last one.
    window_size
        ``(left, right)``: a query sees the keys from ``left`` before its own to ``right`` behind
        it; -1 is all.
    softmax_scale
        None for ``1 / sqrt(kv_channels)``.
    return_max_logit
        Return ``(output, max_logit)``: for each head ``[heads]``, in fp32 and without a gradient,
        the largest scaled product, with its bias, of a query and a key that it sees. It is
        computed beside the attention, from products of its own.
    tp_size, tp_group, get_rng_state_tracker
        Each rank has ``1 / tp_size`` of the heads; the tracker's ``fork()`` is the context of
        dropout.

    Raises
    ------
    InputError
        If an argument asks for what torch's attention does not do: sequences shared by ranks,
        another softmax, other formats.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: GroupArgument = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        _refuse_shared_sequences(cp_group)
        if softmax_type != "vanilla":
            raise InputError(
                f"DotProductAttention got softmax_type={softmax_type!r}; it is torch's attention, "
                "whose softmax is 'vanilla'. Use the program's own attention."
            )
        channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if num_attention_heads % groups or num_attention_heads % tp_size or groups % tp_size:
            raise InputError(
                f"DotProductAttention got {num_attention_heads} heads, num_gqa_groups={groups} and "
                f"tp_size={tp_size}: give groups that divide heads, and ranks that divide both."
            )
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = groups
        self.num_gqa_groups_per_partition = groups // tp_size
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = channels
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = _mask(attn_mask_type)
        self.window_size = window_size
        self.tp_size, self.tp_group = tp_size, tp_group
        self.get_rng_state_tracker = get_rng_state_tracker
        self.return_max_logit = return_max_logit
        self.layer_number, self.attention_type = layer_number, attention_type
        self.softmax_scale = channels[0] ** -0.5 if softmax_scale is None else softmax_scale

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Accepts a group of one rank, or None.

        Raises
        ------
        InputError
            If the group has more.
        """
        _refuse_shared_sequences(cp_group)

    def extra_repr(self) -> str:
        return (
            f"num_attention_heads={self.num_attention_heads}, "
            f"num_gqa_groups={self.num_gqa_groups}, attn_mask_type={self.attn_mask_type!r}"
        )

    @also_by_position(
        "cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q "
        "max_seqlen_kv attn_mask_type window_size checkpoint_core_attention "
        "core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill "
        "inference_params pad_between_seqs fp8_output num_splits"
    )
    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: str | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        checkpoint_core_attention: bool = False,
        **options: Any,
    ) -> Any:
        """The output ``[s, b, heads * features]``, or ``[b, s, ...]`` for ``"bshd"``.

        ``attention_mask`` is True where a key is not seen: ``[b, 1, 1, s]`` for padding, a pair of
        such for cross attention, or a shape that broadcasts to ``[b, heads, queries, keys]``.
        With ``return_max_logit`` the result is a pair.
        ``core_attention_bias`` is added to the scaled products (``"post_scale_bias"``).

        Raises
        ------
        InputError
            If a mask is missing, or an argument asks for what is not here.
        """
        recipe = current_recipe()
        if recipe is not None and (recipe.fp8_dpa or recipe.fp8_mha):
            raise InputError(
                "The recipe asks for attention in FP8, which is not here. Use a recipe with "
                "fp8_dpa and fp8_mha off."
            )
        for name, value in options.items():
            is_default = value is None or value is False or (name, value) == ("num_splits", 1)
            if not is_default and name != "fast_zero_fill":
                raise InputError(
                    f"DotProductAttention got {name}; torch's attention has no such argument. Give "
                    "a mask or core_attention_bias, or use the program's own attention."
                )
        if core_attention_bias_type == "no_bias" and core_attention_bias is not None:
            raise InputError(
                "DotProductAttention got a core_attention_bias of the type 'no_bias'; give "
                "core_attention_bias_type='post_scale_bias'."
            )
        layout = self.qkv_format if qkv_format is None else qkv_format
        if layout not in FORMATS:
            raise InputError(
                f"DotProductAttention got qkv_format={layout!r}; it is {' or '.join(FORMATS)} "
                "here. Pad packed sequences, and give a padding mask."
            )
        kind = self.attn_mask_type if attn_mask_type is None else _mask(attn_mask_type)
        window = self.window_size if window_size is None else window_size
        # To [b, h, s, d].
        order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(order) for t in (query_layer, key_layer, value_layer))
        if q.shape[1] * self.num_gqa_groups != k.shape[1] * self.num_attention_heads:
            raise InputError(
                f"DotProductAttention for {self.num_attention_heads} heads and "
                f"{self.num_gqa_groups} groups got {q.shape[1]} heads of queries and {k.shape[1]} "
                "of keys; give them in this proportion."
            )
        seen, is_causal = _seen(kind, window, attention_mask, q, k)
        bias: torch.Tensor | None = seen
        if core_attention_bias_type != "no_bias":
            if core_attention_bias_type != "post_scale_bias":
                raise InputError(
                    f"DotProductAttention got core_attention_bias_type={core_attention_bias_type!r}"
                    "; it is 'no_bias' or 'post_scale_bias' here, and ALiBi is not supported. Give "
                    "the bias of ALiBi, or one from before the scale times softmax_scale, as a "
                    "core_attention_bias of the type 'post_scale_bias'."
                )
            if core_attention_bias is None:
                raise InputError(
                    "DotProductAttention got core_attention_bias_type='post_scale_bias' without a "
                    "core_attention_bias: give one."
                )
            if is_causal:
                seen, is_causal = _window(q, k, (-1, 0), "causal"), False
            bias = core_attention_bias.to(q.dtype)
            if seen is not None:
                bias = bias.masked_fill(~seen, float("-inf"))
        fork: Any = contextlib.nullcontext()
        dropout = self.attention_dropout if self.training else 0.0
        if dropout and self.get_rng_state_tracker is not None:
            fork = self.get_rng_state_tracker().fork()
        with fork:
            output = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bias,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        back = (2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)
        output = output.permute(back).flatten(2)
        if not self.return_max_logit:
            return output
        if is_causal:
            bias = _window(q, k, (-1, 0), "causal")
        return output, _largest_logits(q, k, bias, self.softmax_scale)


def _refuse_shared_sequences(cp_group: Any) -> None:
    if cp_group is None:
        return
    groups = cp_group if isinstance(cp_group, list) else [cp_group]
    ranks = max(group_size("DotProductAttention", group) for group in groups)
    if ranks > 1:
        raise InputError(
            f"DotProductAttention got a cp_group of {ranks} ranks; sequences are not shared by "
            "ranks here. Give each rank whole sequences."
        )


def _mask(kind: str) -> str:
    """The name in ``MASKS`` of a kind of mask."""
    if kind in NAMES_OF_PADDING_CAUSAL:
        return "padding_causal"
    if kind not in MASKS:
        raise InputError(
            f"DotProductAttention got attn_mask_type={kind!r}; it is one of {', '.join(MASKS)} "
            "here. Give another mask as 'arbitrary', with the whole attention_mask."
        )
    return kind


def _window(q: torch.Tensor, k: torch.Tensor, window: tuple[int, int], kind: str) -> torch.Tensor:
    """``[queries, keys]``: whether a query sees a key by their places alone."""
    queries, keys = q.shape[2], k.shape[2]
    shift = keys - queries if kind.endswith("bottom_right") else 0
    place = torch.arange(queries, device=q.device)[:, None] + shift
    key = torch.arange(keys, device=q.device)[None, :]
    left, right = window
    sees = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if left >= 0:
        sees &= key >= place - left
    if right >= 0:
        sees &= key <= place + right
    return sees


@torch.no_grad()
def _largest_logits(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """``[heads]``: the largest logit that a query sees, by sequences and ``ROWS`` queries."""
    batch, heads, queries, features = q.shape
    groups, keys = k.shape[1:3]
    if bias is not None:
        bias = bias.expand(batch, heads, queries, keys)
    largest = q.new_full((heads,), float("-inf"), dtype=torch.float32)
    for i in range(batch):
        for first in range(0, queries, ROWS):
            rows = q[i, :, first : first + ROWS].reshape(groups, -1, features)
            logits = (rows @ k[i].mT).reshape(heads, -1, keys).float() * scale
            if bias is not None:
                part = bias[i, :, first : first + ROWS]
                if part.dtype == torch.bool:
                    logits = logits.masked_fill(~part, float("-inf"))
                else:
                    logits = logits + part
            largest = torch.maximum(largest, logits.flatten(1).amax(dim=1))
    return largest


def _seen(
    kind: str,
    window: tuple[int, int] | None,
    mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    q: torch.Tensor,
    k: torch.Tensor,
) -> tuple[torch.Tensor | None, bool]:
    """What queries see, None for all; or whether torch's own causal mask says it."""
    left, right = (-1, -1) if window is None else window
    if (left, right) != (-1, -1) and "causal" not in kind and q.shape[2] != k.shape[2]:
        raise InputError(
            f"DotProductAttention got the window {window} with attn_mask_type={kind!r} for "
            f"{q.shape[2]} queries and {k.shape[2]} keys; give 'causal' or 'causal_bottom_right', "
            "which say where queries are."
        )
    if "causal" in kind:
        right = 0
    is_plain = kind == "causal" or (kind == "causal_bottom_right" and q.shape[2] == k.shape[2])
    if is_plain and left < 0:
        return None, True
    seen = None if (left, right) == (-1, -1) else _window(q, k, (left, right), kind)
    if "padding" in kind or kind == "arbitrary":
        if mask is None:
            raise InputError(
                f"DotProductAttention got attn_mask_type={kind!r} without an attention_mask: give "
                "one."
            )
        of_keys = mask[1] if isinstance(mask, tuple) else mask
        if of_keys.dtype != torch.bool:
            raise InputError(
                f"DotProductAttention got an attention_mask of {of_keys.dtype}; give one of "
                "torch.bool, True where a key is not seen."
            )
        seen = ~of_keys if seen is None else seen & ~of_keys
    return seen, False


class _SplitAlongDim:
    """Parts of a tensor along a dimension, by a function's method of autograd."""

    @staticmethod
    def apply(
        tensor: torch.Tensor, dim: int, sizes: Any, squeeze: bool = False
    ) -> tuple[torch.Tensor, ...]:
        parts = torch.split(tensor, sizes, dim=dim)
        return tuple(part.squeeze(dim) for part in parts) if squeeze else parts
