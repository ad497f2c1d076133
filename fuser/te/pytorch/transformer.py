"""Multi-head attention and a transformer layer, of the layers here and torch's attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fuser.errors import InputError
from fuser.te.pytorch.attention import DotProductAttention
from fuser.te.pytorch.layers import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    TransformerEngineBaseModule,
    _warn_of_overlap,
    ranks_of,
)
from fuser.te.pytorch.positions import also_by_position
from fuser.te.pytorch.rope import TensorFormat, apply_rotary_pos_emb

__all__ = ["MultiheadAttention", "TransformerLayer"]


_WITHOUT_EFFECT = ("micro_batch_size", "seq_length", "name", "qk_norm_eps", "qk_norm_before_rope")
"""Arguments that say nothing about the layers here: sizes, and of norms that are refused."""
_ABSENT_INPUTS: dict[str, Any] = dict.fromkeys(
    (
        *("inference_params", "encoder_output", "enc_dec_attn_mask", "enc_dec_attn_mask_type"),
        *("enc_dec_window_size", "alibi_slopes", "pad_between_seqs", "bottom_right_diagonal"),
        *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
        *("max_seqlen_q", "max_seqlen_kv", "enc_dec_bottom_right_diagonal"),
    )
)
"""Inputs of decoders, caches and packed sequences."""


def _refuse(layer: str, options: dict[str, Any], off: dict[str, Any]) -> None:
    """Refuse arguments of Transformer Engine's layer that are on, and unknown ones.

    Those for userbuffers are ignored, with one warning if they are on.
    """
    overlaps = tuple(name for name in options if name.startswith("ub_") and options[name])
    if overlaps:
        _warn_of_overlap(layer, overlaps)
    for name, value in options.items():
        if name.startswith("ub_") or name in _WITHOUT_EFFECT:
            continue
        if name not in off:
            raise InputError(f"{layer} takes no argument {name!r} here: leave it out.")
        if value is not off[name] and value != off[name]:
            is_tensor = isinstance(value, torch.Tensor)
            shown = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
            raise InputError(
                f"{layer} got {name}={shown}, which is not here; it takes {off[name]!r}."
            )


class _Block(torch.nn.Module):
    """What multi-head attention and a transformer layer share: groups that are set later."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of each layer inside, whose size must be that of before."""
        for child in self.children():
            if isinstance(child, (TransformerEngineBaseModule, _Block)):
                child.set_tensor_parallel_group(tp_group)
            elif isinstance(child, DotProductAttention):  # after the linears, which check the size
                child.tp_group = tp_group

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Accepts a group of one rank, or None."""
        for child in self.children():
            if isinstance(child, (DotProductAttention, _Block)):
                child.set_context_parallel_group(cp_group)


class MultiheadAttention(_Block):
    """Self attention: a linear for queries, keys and values, attention, and a linear.

    Parameters
    ----------
    hidden_size, num_attention_heads, kv_channels, num_gqa_groups
        Features of the input and of a head, heads of queries, and heads of keys and values.
    input_layernorm
        Whether a norm of the input, of the kind ``normalization``, comes first.
    qkv_weight_interleaved
        Whether the rows of the first weight are, for each group of heads, its queries, key and
        value (with ``fuse_qkv_params``); else all queries, then keys, then values. Either way it
        is one parameter.
    qkv_format
        ``"sbhd"`` or ``"bshd"``: the order of sequence and batch in the input.
    attn_mask_type, window_size, attention_dropout, softmax_scale
        As of :class:`~fuser.te.pytorch.attention.DotProductAttention`.
    set_parallel_mode, tp_group, tp_size, sequence_parallel
        The first linear is column parallel, the last row parallel, and each rank has some heads.

    Raises
    ------
    InputError
        For cross attention, norms of queries and keys, and other arguments that are not here.
    """

    @also_by_position(
        "return_layernorm_output input_layernorm attention_type set_parallel_mode "
        "fuse_qkv_params zero_centered_gamma qkv_weight_interleaved rotary_pos_interleaved "
        "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad bias "
        "normalization device qkv_format name qk_norm_type qk_norm_eps qk_norm_before_rope "
        "seq_length micro_batch_size softmax_type"
    )
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        *,
        input_layernorm: bool = False,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: TensorFormat = "sbhd",
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        off = {
            "attention_type": "self",
            "return_layernorm_output": False,
            "qk_norm_type": None,
            "cp_group": None,
            "cp_global_ranks": None,
            "cp_stream": None,
            "delay_wgrad_compute": False,
            "softmax_type": "vanilla",
            "bottom_right_diagonal": None,
            "rotary_pos_interleaved": False,
        }
        _refuse("MultiheadAttention", options, off)
        self.channels = kv_channels or hidden_size // num_attention_heads
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        ranks = ranks_of("MultiheadAttention", tp_size, tp_group) if set_parallel_mode else 1
        self.heads, self.groups = num_attention_heads // ranks, groups // ranks
        self.qkv_format, self.return_bias = qkv_format, return_bias
        self.is_interleaved = qkv_weight_interleaved and fuse_qkv_params
        shared = {
            "tp_group": tp_group,
            "tp_size": ranks,
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "params_dtype": params_dtype,
            "device": device,
        }
        rows = (num_attention_heads + 2 * groups) * self.channels
        column = {**shared, "parallel_mode": "column" if set_parallel_mode else None, "bias": bias}
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size,
                rows,
                layernorm_epsilon,
                init_method=init_method,
                normalization=normalization,
                zero_centered_gamma=zero_centered_gamma,
                **column,
            )
        else:
            self.qkv = Linear(hidden_size, rows, init_method=init_method, **column)
        if not fuse_qkv_params:
            self.register_load_state_dict_pre_hook(_join_projections)  # type: ignore[no-untyped-call]
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.channels,
            groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            tp_size=ranks,
            tp_group=tp_group,
            get_rng_state_tracker=get_rng_state_tracker,
            layer_number=layer_number,
            softmax_scale=softmax_scale,
        )
        self.proj = Linear(
            num_attention_heads * self.channels,
            hidden_size,
            init_method=output_layer_init_method,
            bias=bias,
            return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None,
            **shared,
        )

    @also_by_position(
        "checkpoint_core_attention inference_params rotary_pos_emb core_attention_bias_type "
        "core_attention_bias alibi_slopes cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded "
        "cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv fast_zero_fill pad_between_seqs"
    )
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        *,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The output, of the shape of ``hidden_states``; with ``return_bias`` also the bias.

        ``rotary_pos_emb`` are angles as of ``RotaryPositionEmbedding``, or a pair for queries and
        for keys.

        Raises
        ------
        InputError
            For ``encoder_output``, a cache, and other arguments that are not here.
        """
        off = {**_ABSENT_INPUTS, "checkpoint_core_attention": False, "fast_zero_fill": True}
        _refuse("MultiheadAttention", {**options, "encoder_output": encoder_output}, off)
        if hidden_states.dim() != 3:
            raise InputError(
                f"MultiheadAttention got hidden states of shape {tuple(hidden_states.shape)}; give "
                f"{'[s, b, hidden]' if self.qkv_format == 'sbhd' else '[b, s, hidden]'}."
            )
        first = self.layernorm_qkv if hasattr(self, "layernorm_qkv") else self.qkv
        mixed = first(hidden_states, is_first_microbatch)
        sizes = (self.heads // self.groups, 1, 1)
        if self.is_interleaved:
            grouped = mixed.reshape(*mixed.shape[:-1], self.groups, sum(sizes), self.channels)
            q, k, v = (part.flatten(-3, -2) for part in torch.split(grouped, list(sizes), dim=-2))
        else:
            heads = mixed.reshape(*mixed.shape[:-1], -1, self.channels)
            q, k, v = torch.split(heads, [self.heads, self.groups, self.groups], dim=-2)
        if rotary_pos_emb is not None:
            pair = isinstance(rotary_pos_emb, tuple)
            angles = rotary_pos_emb if pair else (rotary_pos_emb, rotary_pos_emb)
            q, k = (
                apply_rotary_pos_emb(part, freqs, self.qkv_format)
                for part, freqs in zip((q, k), angles, strict=True)
            )
        context = self.core_attention(
            q,
            k,
            v,
            attention_mask,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
        )
        return self.proj(context, is_first_microbatch)


def _join_projections(
    layer: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Separate queries, keys and values of a state, as Transformer Engine has them, as one."""
    for linear in ("qkv", "layernorm_qkv"):
        for kind in ("weight", "bias"):
            names = [f"{prefix}{linear}.{part}_{kind}" for part in ("query", "key", "value")]
            if all(name in state for name in names):
                state[f"{prefix}{linear}.{kind}"] = torch.cat([state.pop(name) for name in names])


class TransformerLayer(_Block):
    """A pre-norm transformer layer: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Parameters
    ----------
    hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, kv_channels
        Sizes; see :class:`MultiheadAttention` and ``LayerNormMLP``.
    hidden_dropout, attention_dropout
        Probabilities: of the outputs of both halves, and of attention's weights.
    self_attn_mask_type, window_size, attn_input_format
        As ``attn_mask_type``, ``window_size`` and ``qkv_format`` of attention.
    activation, activation_params, normalization, zero_centered_gamma, bias
        As of ``LayerNormMLP``.
    set_parallel_mode, tp_group, tp_size, sequence_parallel
        Both halves are tensor parallel.

    Raises
    ------
    InputError
        For decoders, residuals after norms, drop paths, and other arguments that are not here.
    """

    @also_by_position(
        "enc_dec_attn_mask_type enc_dec_window_size tp_group tp_size params_dtype "
        "get_rng_state_tracker fuse_wgrad_accumulation seq_length micro_batch_size "
        "sequence_parallel apply_residual_connection_post_layernorm output_layernorm "
        "parallel_attention_mlp layer_type drop_path_rate set_parallel_mode fuse_qkv_params "
        "rotary_pos_interleaved zero_centered_gamma qkv_weight_interleaved "
        "ub_tp_comm_overlap ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad "
        "ub_bulk_wgrad bias activation activation_params normalization device "
        "attn_input_format name qk_norm_type qk_norm_eps qk_norm_before_rope softmax_type"
    )
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        sequence_parallel: bool = False,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: TensorFormat = "sbhd",
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        off = {
            "apply_residual_connection_post_layernorm": False,
            "output_layernorm": False,
            "parallel_attention_mlp": False,
            "layer_type": "encoder",
            "drop_path_rate": 0.0,
            "enc_dec_attn_mask_type": "no_mask",
            "enc_dec_window_size": None,
            "bias_dropout_fusion": True,
            "qk_norm_type": None,
            "softmax_type": "vanilla",
            "bottom_right_diagonal": None,
            "enc_dec_bottom_right_diagonal": None,
            "rotary_pos_interleaved": False,
        }
        _refuse("TransformerLayer", options, off)
        shared: dict[str, Any] = {
            "tp_group": tp_group,
            "tp_size": tp_size,
            "set_parallel_mode": set_parallel_mode,
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker,
            "params_dtype": params_dtype,
            "device": device,
            "bias": bias,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            layer_number=layer_number,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            num_gqa_groups=num_gqa_groups,
            input_layernorm=True,
            fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved,
            qkv_format=attn_input_format,
            softmax_scale=softmax_scale,
            **shared,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            **shared,
        )
        self.hidden_dropout = hidden_dropout
        self.get_rng_state_tracker = get_rng_state_tracker
        self.is_sequence_parallel = self.layernorm_mlp.sequence_parallel
        self.layer_number = layer_number

    @also_by_position(
        "encoder_output enc_dec_attn_mask enc_dec_attn_mask_type enc_dec_window_size "
        "is_first_microbatch checkpoint_core_attention inference_params rotary_pos_emb "
        "core_attention_bias_type core_attention_bias alibi_slopes cu_seqlens_q "
        "cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv "
        "fast_zero_fill pad_between_seqs"
    )
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        *,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """The output, of the shape of ``hidden_states``, ``[s, b, hidden_size]`` by default.

        Raises
        ------
        InputError
            For the output of an encoder, a cache, and other arguments that are not here.
        """
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            is_first_microbatch=is_first_microbatch,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            **options,
        )
        hidden_states = hidden_states + self._drop(attended)
        return hidden_states + self._drop(self.layernorm_mlp(hidden_states, is_first_microbatch))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.hidden_dropout and self.training):
            return x
        fork: Any = contextlib.nullcontext()
        if self.is_sequence_parallel and self.get_rng_state_tracker is not None:
            fork = self.get_rng_state_tracker().fork()  # rows differ between ranks
        with fork:
            return F.dropout(x, self.hidden_dropout)
