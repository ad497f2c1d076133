"""Rows of the arguments of Transformer Engine's attention and transformer layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from argument_rows import Of, ignores, refuses, sets
from rows_of_te_layers import (
    TWO,
    Given,
    Parameters,
    close,
    filled,
    linear,
    normed,
    parameters_of,
    reference,
    swiglu,
    tracker_of,
)
from torch.nn import functional as F
from torch.testing import assert_close

import fuser
from fuser import recipe
from fuser.communication import PlannedGroup
from fuser.te import pytorch as te
from fuser.te.pytorch.attention import DotProductAttention
from fuser.te.pytorch.layers import TransformerEngineBaseModule

LENGTH, BATCH, HIDDEN, HEADS = 6, 2, 8, 4
DPA, MHA, LAYER = (
    f"fuser.te.pytorch.{name}"
    for name in ("DotProductAttention", "MultiheadAttention", "TransformerLayer")
)
_OVERLAPS = (
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)
_OF_PACKED = (
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("max_seqlen_q", "max_seqlen_kv"),
)
_ABSENT_CALLS: Given = {
    **dict.fromkeys(_OF_PACKED[:4], torch.tensor([0, 6])),
    **dict.fromkeys(_OF_PACKED[4:], 6),
    "alibi_slopes": torch.ones(4),
    "inference_params": object(),
    "pad_between_seqs": True,
}
"""Arguments of calls that are refused, with values that turn them on."""
_ABSENT_BLOCKS: Given = {"checkpoint_core_attention": True, "fast_zero_fill": False}
_ABSENT_LAYERS: Given = {
    "encoder_output": torch.ones(1),
    "enc_dec_attn_mask": torch.ones(1),
    "enc_dec_attn_mask_type": "causal",
    "enc_dec_window_size": (1, 1),
}
_ABSENT_OF_MHA: Given = {
    "attention_type": "cross",
    "return_layernorm_output": True,
    "qk_norm_type": "RMSNorm",
    "rotary_pos_interleaved": True,
    "softmax_type": "learnable",
    "cp_group": TWO,
    "cp_global_ranks": [0, 1],
    "cp_stream": object(),
    "delay_wgrad_compute": True,
    "bottom_right_diagonal": True,
}
_ABSENT_OF_LAYER: Given = {
    "apply_residual_connection_post_layernorm": True,
    "output_layernorm": True,
    "parallel_attention_mlp": True,
    "layer_type": "decoder",
    "drop_path_rate": 0.5,
    "enc_dec_attn_mask_type": "causal",
    "enc_dec_window_size": (1, 1),
    "bias_dropout_fusion": False,
    "qk_norm_type": "RMSNorm",
    "softmax_type": "learnable",
    "rotary_pos_interleaved": True,
    "bottom_right_diagonal": True,
    "enc_dec_bottom_right_diagonal": True,
}
_OF_NORMS_THAT_ARE_REFUSED = ("qk_norm_eps", "qk_norm_before_rope")
OPTIONS: dict[str, tuple[str, ...]] = {
    MHA: (
        *(*_ABSENT_OF_MHA, *_OVERLAPS, *_OF_NORMS_THAT_ARE_REFUSED),
        *("name", "seq_length", "micro_batch_size"),
    ),
    LAYER: (
        *(*_ABSENT_OF_LAYER, *_OVERLAPS, "ub_tp_comm_overlap", *_OF_NORMS_THAT_ARE_REFUSED),
        *("name", "seq_length", "micro_batch_size"),
    ),
    f"{DPA}.forward": (*_ABSENT_CALLS, "fast_zero_fill", "fp8_output", "num_splits"),
    f"{MHA}.forward": (*_ABSENT_CALLS, *_ABSENT_BLOCKS),
    f"{LAYER}.forward": (*_ABSENT_CALLS, *_ABSENT_BLOCKS, *_ABSENT_LAYERS),
}
METHODS = (
    *(f"{path}.forward" for path in (DPA, MHA, LAYER)),
    f"{DPA}.set_context_parallel_group",
    f"{MHA}.set_context_parallel_group",
    f"{MHA}.set_tensor_parallel_group",
)


# -- references ------------------------------------------------------------------------


def places(queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(queries)[:, None], torch.arange(keys)[None]


def sees(kind: str, window: tuple[int, int] = (-1, -1), length: int = LENGTH) -> torch.Tensor:
    """``[queries, keys]``: the keys that a query sees."""
    query, key = places(length, length)
    seen = key <= query if kind == "causal" else torch.ones(length, length, dtype=torch.bool)
    left, right = window
    seen = seen & (key >= query - left) if left >= 0 else seen
    return seen & (key <= query + right) if right >= 0 else seen


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seen: torch.Tensor | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``[s, b, h, d]`` by its formula, in fp64; causal if ``seen`` is None."""
    q, k, v = (t.double().permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias.double()
    seen = sees("causal") if seen is None else seen
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ v).permute(2, 0, 1, 3).flatten(2)


def rotated(x: torch.Tensor, angles: torch.Tensor, *, is_interleaved: bool = False) -> torch.Tensor:
    """Rotary embedding by complex numbers, in fp64: features ``i`` and ``i + r / 2`` are one,
    or ``2 i`` and ``2 i + 1``."""
    size = angles.shape[-1]
    part, rest = x.double()[..., :size], x.double()[..., size:]
    pairs = part.unflatten(-1, (-1, 2)) if is_interleaved else part.unflatten(-1, (2, -1)).mT
    half = angles.double()[..., ::2] if is_interleaved else angles.double()[..., : size // 2]
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(half), half)
    )
    return torch.cat(((turned if is_interleaved else turned.mT).flatten(-2), rest), dim=-1)


def projected(
    parameters: Parameters,
    x: torch.Tensor,
    *,
    groups: int = HEADS,
    channels: int = HIDDEN // HEADS,
    is_interleaved: bool = False,
    has_bias: bool = True,
    has_norm: bool = False,
    has_last_bias: bool = True,
    rotation: torch.Tensor | None = None,
    norm: Given | None = None,
    **attention: Any,
) -> torch.Tensor:
    """Multi-head attention of ``[s, b, hidden]`` by its formula, in fp64."""
    prefix = "layernorm_qkv." if has_norm else "qkv."
    x = normed(x, parameters, f"{prefix}layer_norm_", **(norm or {})) if has_norm else x
    mixed = linear(x, parameters, f"{prefix}weight", has_bias)
    if is_interleaved:
        mixed = mixed.unflatten(-1, (groups, -1, channels))
        q, k, v = (mixed[..., :-2, :].flatten(-3, -2), mixed[..., -2, :], mixed[..., -1, :])
    else:
        heads = mixed.unflatten(-1, (-1, channels))
        q, k, v = heads.split([heads.shape[-2] - 2 * groups, groups, groups], dim=-2)
    if rotation is not None:
        q, k = rotated(q, rotation), rotated(k, rotation)
    return linear(attended(q, k, v, **attention), parameters, "proj.weight", has_last_bias)


def transformed(
    parameters: Parameters, x: torch.Tensor, *, activation: Any = None, **settings: Any
) -> torch.Tensor:
    """A transformer layer by its formula, in fp64."""
    halves: list[Parameters] = [
        {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
        for prefix in ("self_attention.", "layernorm_mlp.")
    ]
    norm, has_bias = settings.get("norm") or {}, settings.get("has_bias", True)
    x = x.double() + projected(halves[0], x, has_norm=True, has_last_bias=has_bias, **settings)
    return x + reference(
        "LayerNormMLP", halves[1], x, has_bias=has_bias, activation=activation, **norm
    )


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (LENGTH, BATCH, HIDDEN)))


class Attention:
    """What the rows of attention alone share."""

    def __call__(self, **given: Any) -> Any:
        sizes = {"num_attention_heads": HEADS, "kv_channels": HIDDEN}
        return te.DotProductAttention(**{**sizes, **given})

    def inputs(self, groups: int = HEADS) -> list[torch.Tensor]:
        return [torch.randn(LENGTH, BATCH, heads, HIDDEN) for heads in (HEADS, groups, groups)]


def blocks(**given: Any) -> Any:
    sizes: Given = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "attention_dropout": 0.0}
    return filled(te.MultiheadAttention(**{**sizes, **given}))


def transformers(**given: Any) -> Any:
    sizes: Given = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 12,
        "num_attention_heads": HEADS,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return filled(te.TransformerLayer(**{**sizes, **given}))


MAKERS: dict[str, Any] = {MHA: blocks, LAYER: transformers}
FORMULAS: dict[str, Any] = {MHA: projected, LAYER: transformed}


# -- attention alone -------------------------------------------------------------------

attention = Attention()


def _row_of_attention(argument: str, value: Any, **settings: Any) -> None:
    @sets(DPA, **{argument: value})
    def _values_of_attention(given: Given) -> None:
        q, k, v = attention.inputs()
        close(attention(**given)(q, k, v), attended(q, k, v, **settings))


_row_of_attention("attn_mask_type", "no_mask", seen=sees("no_mask"))
_row_of_attention("window_size", (2, 0), seen=sees("causal", (2, 0)))
_row_of_attention("softmax_scale", 0.7, scale=0.7)
_row_of_attention("kv_channels", Of(HIDDEN, instead=2))


@sets(DPA, num_attention_heads=Of(HEADS, instead=2))
def _heads_of_queries(given: Given) -> None:
    layer, (q, k, v) = attention(num_gqa_groups=2, **given), attention.inputs(2)
    close(layer(q, k, v), attended(q, k, v))


@sets(DPA, num_gqa_groups=2)
def _heads_that_share_keys(given: Given) -> None:
    layer, (q, k, v) = attention(**given), attention.inputs(2)
    assert layer.num_gqa_groups == layer.num_gqa_groups_per_partition == 2
    close(layer(q, k, v), attended(q, k, v))


@sets(DPA, tp_size=2)
def _heads_of_a_rank(given: Given) -> None:
    assert attention(num_gqa_groups=2, **given).num_gqa_groups_per_partition == 1


@sets(DPA, qkv_format="bshd")
def _the_batch_first(given: Given) -> None:
    q, k, v = attention.inputs()
    y = attention(**given)(*(t.transpose(0, 1) for t in (q, k, v)))
    close(y.transpose(0, 1), attended(q, k, v))


def weights_with_dropout(layer: Any, length: int = 48) -> torch.Tensor:
    """The weights of attention that sees all, which are equal before the dropout."""
    heads, batch = HEADS, BATCH
    q = torch.zeros(length, batch, heads, length)
    v = torch.eye(length)[:, None, None].expand(length, batch, heads, length)
    weights: torch.Tensor = layer(q, q, v)
    return weights * length


def has_dropped_half(weights: torch.Tensor) -> bool:
    """Whether half of the weights are 0 and the others twice their value."""
    is_dropped = weights == 0
    assert_close(weights[~is_dropped], torch.full_like(weights[~is_dropped], 2.0))
    share = float(is_dropped.double().mean())
    return abs(share - 0.5) < 5 * 0.5 / math.sqrt(weights.numel())


@sets(DPA, attention_dropout=0.5)
def _weights_are_dropped_in_training(given: Given) -> None:
    layer = attention(kv_channels=48, attn_mask_type="no_mask", **given)
    weights = weights_with_dropout(layer)
    assert has_dropped_half(weights)
    assert abs(float(weights.mean()) - 1.0) < 0.03
    weights = weights_with_dropout(layer.eval())
    assert_close(weights, torch.ones_like(weights))


@sets(DPA, get_rng_state_tracker=True)
def _a_tracker_draws_the_dropout(given: Given) -> None:
    def weights(seed: int) -> torch.Tensor:
        options = dict.fromkeys(given, tracker_of(model_parallel_rng=seed))
        layer = attention(
            kv_channels=48, attn_mask_type="no_mask", attention_dropout=0.5, **options
        )
        return weights_with_dropout(layer)

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@sets(DPA, return_max_logit=True)
def _the_largest_logit_of_each_head(given: Given) -> None:
    q, k, v = attention.inputs()
    y, largest = attention(**given)(q, k, v)
    close(y, attended(q, k, v))
    logits = torch.einsum("qbhd,kbhd->bhqk", q.double(), k.double()) / HIDDEN**0.5
    logits = logits.masked_fill(~sees("causal"), float("-inf"))
    close(largest, logits.amax((0, 2, 3)))


@sets(DPA, softmax_type="learnable", cp_group=TWO)
def _what_torch_does_not_do(given: Given) -> None:
    refuses(lambda: attention(**given), "DotProductAttention", *given)


@sets(f"{DPA}.set_context_parallel_group", cp_group=Of(TWO, instead=None))
def _sequences_are_not_shared(given: Given) -> None:
    refuses(lambda: attention().set_context_parallel_group(**given), "a cp_group of 2 ranks")


@sets(f"{MHA}.set_context_parallel_group", cp_group=Of(TWO, instead=None))
def _sequences_of_a_block_are_not_shared(given: Given) -> None:
    for block in (blocks(), transformers()):
        refuses(partial(block.set_context_parallel_group, **given), "a cp_group of 2 ranks")


@sets(f"{MHA}.set_tensor_parallel_group", tp_group=Of(TWO, instead=PlannedGroup(2)))
def _the_group_of_the_layers_of_a_block(given: Given) -> None:
    """Each linear of a block has it, and its attention, also in a layer."""
    ranks: Given = {"set_parallel_mode": True, "tp_group": PlannedGroup(2)}
    for block in (blocks(**ranks), transformers(**ranks)):
        block.set_tensor_parallel_group(**given)
        kinds = (TransformerEngineBaseModule, DotProductAttention)
        layers = [m for m in block.modules() if isinstance(m, kinds)]
        assert {*map(type, layers)} > {DotProductAttention}
        assert all(layer.tp_group is TWO for layer in layers)


ignores(
    f"{DPA}.set_context_parallel_group",
    "sequences are not shared by ranks",
    *("cp_global_ranks", "cp_stream", "cp_comm_type"),
)

for _name, _value in {"tp_group": TWO, "layer_number": 3, "attention_type": "cross"}.items():

    @sets(DPA, **{_name: _value})
    def _an_attribute_that_programs_read(
        given: Given, name: str = _name, value: Any = _value
    ) -> None:
        assert getattr(attention(**given), name) == value


ignores(DPA, "attention reads whole sequences", "sequence_parallel")
_OF_SHARED_SEQUENCES = ("cp_global_ranks", "cp_stream", "cp_comm_type")
for _path in (DPA, f"{MHA}.set_context_parallel_group"):
    ignores(_path, "sequences are not shared by ranks", *_OF_SHARED_SEQUENCES)


# -- calls of attention ----------------------------------------------------------------

_Q, _K, _V = torch.randn(
    3, LENGTH, BATCH, HEADS, HIDDEN, generator=torch.Generator().manual_seed(0)
)
_OTHER = torch.randn(LENGTH, BATCH, HEADS, HIDDEN, generator=torch.Generator().manual_seed(1))
_BIAS = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))
_PADDING = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
_PADDING[1, ..., 4:] = True


def _call(argument: str, value: Any, given: Given = {}, made: Given = {}, **settings: Any) -> None:  # noqa: B006
    @sets(f"{DPA}.forward", **{argument: value})
    def _values_of_a_call(own: Given) -> None:
        tensors = {"query_layer": _Q, "key_layer": _K, "value_layer": _V}
        close(attention(**made)(**{**tensors, **given, **own}), attended(_Q, _K, _V, **settings))


_call("query_layer", Of(_Q, instead=_OTHER))
_call("key_layer", Of(_K, instead=_OTHER))
_call("value_layer", Of(_V, instead=_OTHER))
_call("attn_mask_type", "no_mask", seen=sees("no_mask"))
_call("window_size", (1, 0), seen=sees("causal", (1, 0)))
_call("attention_mask", _PADDING, made={"attn_mask_type": "padding"}, seen=~_PADDING)
_call(
    "core_attention_bias", _BIAS, given={"core_attention_bias_type": "post_scale_bias"}, bias=_BIAS
)
_call(
    "core_attention_bias_type", "post_scale_bias", given={"core_attention_bias": _BIAS}, bias=_BIAS
)


@sets(f"{DPA}.forward", qkv_format="bshd")
def _the_batch_first_in_one_call(given: Given) -> None:
    y = attention()(*(t.transpose(0, 1) for t in (_Q, _K, _V)), **given)
    close(y.transpose(0, 1), attended(_Q, _K, _V))


@sets(f"{DPA}.forward", **_ABSENT_CALLS, fp8_output=True, num_splits=2)
def _calls_that_are_refused(given: Given) -> None:
    refuses(lambda: attention()(_Q, _K, _V, **given), "DotProductAttention got", *given)


ignores(f"{DPA}.forward", "the memory is torch's", "fast_zero_fill")
ignores(
    f"{DPA}.forward",
    "torch says what attention keeps for backward",
    "checkpoint_core_attention",
)


# -- blocks ----------------------------------------------------------------------------


def _row(path: str, argument: str, value: Any, made: Given = {}, **settings: Any) -> None:  # noqa: B006
    """``argument`` changes the output of a block as ``settings`` change the formula."""

    @sets(path, **{argument: value})
    def _values_of_a_block(given: Given) -> None:
        layer, x = MAKERS[path](**{**made, **given}), hidden()
        close(layer(x), FORMULAS[path](parameters_of(layer), x, **settings))


for _path in (MHA, LAYER):
    _mask = "attn_mask_type" if _path == MHA else "self_attn_mask_type"
    _norm: Given = {"input_layernorm": True} if _path == MHA else {}
    _has_norm: Given = {"has_norm": True} if _path == MHA else {}
    _row(_path, "num_attention_heads", Of(HEADS, instead=2))
    _row(_path, "hidden_size", Of(HIDDEN, instead=16))
    _row(_path, "kv_channels", 5, channels=5)
    _row(_path, "num_gqa_groups", 2, groups=2)
    _row(_path, _mask, "no_mask", seen=sees("no_mask"))
    _row(_path, "window_size", (2, 0), seen=sees("causal", (2, 0)))
    _row(_path, "softmax_scale", 0.1, scale=0.1)
    _row(_path, "fuse_qkv_params", True, is_interleaved=True)
    _row(_path, "qkv_weight_interleaved", False, {"fuse_qkv_params": True})
    _row(_path, "layernorm_epsilon", 0.5, _norm, **_has_norm, norm={"eps": 0.5})
    _row(_path, "normalization", "RMSNorm", _norm, **_has_norm, norm={"kind": "RMSNorm"})
    _row(_path, "zero_centered_gamma", True, _norm, **_has_norm, norm={"is_zero_centered": True})
_row(MHA, "bias", False, has_bias=False, has_last_bias=False)
_row(LAYER, "bias", False, has_bias=False)
_row(MHA, "input_layernorm", True, has_norm=True)
_row(LAYER, "ffn_hidden_size", Of(12, instead=0))
_row(LAYER, "activation", "swiglu", activation=swiglu)
_row(LAYER, "activation_params", {"approximate": "none"}, activation=F.gelu)


@sets(MHA, return_bias=True)
def _a_block_returns_its_bias(given: Given) -> None:
    layer, x = blocks(**given), hidden()
    y, bias = layer(x)
    close(y, projected(parameters_of(layer), x, has_last_bias=False))
    assert torch.equal(bias, layer.proj.bias)


def _rows_of_a_block(path: str) -> None:
    make, formula = MAKERS[path], FORMULAS[path]
    layout = "qkv_format" if path == MHA else "attn_input_format"

    def inner(layer: Any) -> Any:
        return layer if path == MHA else layer.self_attention

    @sets(path, **{layout: "bshd"})
    def _the_batch_is_first(given: Given) -> None:
        layer, x = make(**given), hidden()
        close(layer(x.transpose(0, 1)).transpose(0, 1), formula(parameters_of(layer), x))

    cls: Any = te.MultiheadAttention if path == MHA else te.TransformerLayer
    sizes = (HIDDEN, HEADS) if path == MHA else (HIDDEN, 12, HEADS)

    @sets(path, init_method=lambda weight: weight.fill_(0.25))
    def _first_weights(given: Given) -> None:
        parameters = dict(cls(*sizes, **given).named_parameters())
        for name, parameter in parameters.items():
            if "qkv.weight" in name or "fc1_weight" in name:
                assert (parameter == 0.25).all()
            elif "proj.weight" in name or "fc2_weight" in name:
                assert not (parameter == 0.25).any()

    @sets(path, output_layer_init_method=lambda weight: weight.fill_(0.25))
    def _last_weights(given: Given) -> None:
        parameters = dict(cls(*sizes, **given).named_parameters())
        for name, parameter in parameters.items():
            if "proj.weight" in name or "fc2_weight" in name:
                assert (parameter == 0.25).all()
            elif "qkv.weight" in name or "fc1_weight" in name:
                assert not (parameter == 0.25).any()

    @sets(path, params_dtype=torch.bfloat16)
    def _in_16_bits(given: Given) -> None:
        layer, x = make(**given), hidden().bfloat16()
        assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
        y = formula(parameters_of(layer), x)
        assert_close(layer(x).double(), y, atol=0.1, rtol=0.05)

    @sets(path, device="meta")
    def _on_meta(given: Given) -> None:
        assert all(parameter.is_meta for parameter in cls(*sizes, **given).parameters())

    @sets(path, layer_number=3)
    def _the_number_of_a_layer(given: Given) -> None:
        assert inner(make(**given)).core_attention.layer_number == 3

    @sets(path, fuse_wgrad_accumulation=True)
    def _gradients_in_main_grad(given: Given) -> None:
        layer, x = make(**given), hidden()
        weights = {n: p for n, p in layer.named_parameters() if p.dim() == 2}
        for weight in weights.values():
            weight.main_grad = torch.ones_like(weight)
        y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        parameters = parameters_of(layer)
        formula(parameters, x).backward(dy.double())
        for name, weight in weights.items():
            expected = parameters[name].grad
            assert_close((weight.main_grad - 1.0).double(), expected, atol=1e-4, rtol=1e-4)

    ranks: Given = {"set_parallel_mode": True, "tp_group": TWO}

    def _is_shared(given: Given) -> None:
        layer = cls(*sizes, **given)
        shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
        prefix = "" if path == MHA else "self_attention."
        qkv = f"{prefix}{'qkv' if path == MHA else 'layernorm_qkv'}.weight"
        assert shapes[qkv] == (3 * HIDDEN // 2, HIDDEN)
        assert shapes[f"{prefix}proj.weight"] == (HIDDEN, HIDDEN // 2)
        if path == LAYER:
            assert shapes["layernorm_mlp.fc1_weight"] == (6, HIDDEN)
            assert shapes["layernorm_mlp.fc2_weight"] == (HIDDEN, 6)
        assert inner(layer).core_attention.num_gqa_groups_per_partition == HEADS // 2

    for argument, value in ranks.items():
        rest = {key: other for key, other in ranks.items() if key != argument}

        @sets(path, **{argument: value})
        def _a_rank_has_half_of_the_heads(given: Given, rest: Given = rest) -> None:
            _is_shared(rest | given)

    @sets(path, tp_size=2)
    def _a_number_without_a_group(given: Given) -> None:
        refuses(lambda: cls(*sizes, set_parallel_mode=True, **given), "got tp_size=2", "1 rank")

    @sets(path, sequence_parallel=True)
    def _a_rank_has_some_rows(given: Given) -> None:
        children = inner(cls(*sizes, **ranks, **given)).children()
        linears = [each for each in children if isinstance(each, te.Linear | te.LayerNormLinear)]
        last = linears[-1]
        assert all(each.sequence_parallel for each in linears)
        assert "ReduceScatter" in str(last.plan(torch.randn(4, last.in_features)))

    def length_of(layer: Any) -> Any:
        """A layer that returns the weights of its attention, for the rows of eye(48)."""
        attention_ = inner(layer)
        first = attention_.qkv if path == MHA else attention_.layernorm_qkv
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            first.weight[-48:] = torch.eye(48)
            attention_.proj.weight.copy_(torch.eye(48))
            if path == LAYER:
                first.layer_norm_weight.fill_(48**-0.5)
        return layer

    def dropped(layer: Any) -> torch.Tensor:
        x = torch.eye(48)[:, None].expand(48, 8, 48)
        y: torch.Tensor = layer(x)
        return (y if path == MHA else y - x) * 48

    # The weights of attention of all tokens are the output for these parameters.
    plainly: Given = {
        **({"attn_mask_type": "no_mask"} if path == MHA else {"self_attn_mask_type": "no_mask"}),
        **({} if path == MHA else {"hidden_dropout": 0.0, "normalization": "RMSNorm"}),
    }

    def _large(**given: Any) -> Any:
        own = (48, 1) if path == MHA else (48, 48, 1)
        return length_of(cls(*own, **plainly, **given))

    @sets(path, attention_dropout=0.5)
    def _weights_of_attention_are_dropped(given: Given) -> None:
        layer = _large(**given)
        weights = dropped(layer)
        weights = weights.where(weights.abs() > 0.1, 0.0)
        assert has_dropped_half(weights.where(weights == 0, weights.round(decimals=3)))
        weights = dropped(layer.eval())
        assert_close(weights, torch.ones_like(weights), atol=1e-3, rtol=0.0)

    @sets(path, get_rng_state_tracker=True)
    def _a_tracker_draws(given: Given) -> None:
        def weights(seed: int) -> torch.Tensor:
            options = dict.fromkeys(given, tracker_of(model_parallel_rng=seed))
            return dropped(_large(attention_dropout=0.5, **options))

        assert torch.equal(weights(1), weights(1))
        assert not torch.equal(weights(1), weights(2))

    absent = _ABSENT_OF_MHA if path == MHA else _ABSENT_OF_LAYER

    @sets(path, **absent)
    def _what_is_not_here(given: Given) -> None:
        refuses(lambda: cls(*sizes, **given), f"{cls.__name__} got", *given)

    overlaps = [name for name in OPTIONS[path] if name.startswith("ub_")]
    ignores(path, "communication is not overlapped with GEMMs", *overlaps)
    ignores(path, "norms of queries and keys are refused", *_OF_NORMS_THAT_ARE_REFUSED)
    ignores(path, "a layer takes any number of rows", "seq_length", "micro_batch_size")
    ignores(path, "linears inside have no name for the factory of a custom recipe", "name")


for _path in (MHA, LAYER):
    _rows_of_a_block(_path)


@sets(LAYER, hidden_dropout=0.5)
def _outputs_of_both_halves_are_dropped(given: Given) -> None:
    for bias in ("self_attention.proj.bias", "layernorm_mlp.fc2_bias"):
        layer = te.TransformerLayer(HIDDEN, 12, HEADS, attention_dropout=0.0, **given)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            layer.get_parameter(bias).fill_(1.0)
        x = torch.zeros(64, 16, HIDDEN)
        assert has_dropped_half(layer(x))
        y = layer.eval()(x)
        assert torch.equal(y, torch.ones_like(y))


# -- calls of blocks -------------------------------------------------------------------

_X, _OTHER_X = torch.randn(2, LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3))
_ANGLES = te.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH)
_FULL_BIAS = torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4))


def _rows_of_calls(path: str) -> None:
    make, formula, forward = MAKERS[path], FORMULAS[path], f"{path}.forward"
    mask = "attn_mask_type" if path == MHA else "self_attn_mask_type"

    def _row(
        argument: str,
        value: Any,
        call: Given | None = None,
        made: Given | None = None,
        **settings: Any,
    ) -> None:
        @sets(forward, **{argument: value})
        def _values_of_a_call(given: Given) -> None:
            layer = make(**(made or {}))
            y = layer(**{"hidden_states": _X, **(call or {}), **given})
            close(y, formula(parameters_of(layer), _X, **settings))

    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": _FULL_BIAS}
    _row("hidden_states", Of(_X, instead=_OTHER_X))
    _row("attention_mask", _PADDING, made={mask: "padding"}, seen=~_PADDING)
    _row(mask, "no_mask", seen=sees("no_mask"))
    _row("window_size", (1, 0), seen=sees("causal", (1, 0)))
    _row("rotary_pos_emb", _ANGLES, rotation=_ANGLES[..., 0, 0, :][:, None, None])
    for argument, value in bias.items():
        rest = {key: other for key, other in bias.items() if key != argument}
        _row(argument, value, rest, bias=_FULL_BIAS)

    @sets(forward, is_first_microbatch=False)
    def _later_microbatches_use_kept_weights(given: Given) -> None:
        layer = make()
        with fuser.autocast(recipe=recipe.Float8CurrentScaling()), torch.no_grad():
            y = layer(_X, is_first_microbatch=True)
            for weight in [p for p in layer.parameters() if p.dim() == 2]:
                weight.data.mul_(2.0)  # which torch does not count
            assert torch.equal(layer(_X, **given), y)

    absent = {**_ABSENT_CALLS, **_ABSENT_BLOCKS}
    absent |= {"encoder_output": torch.ones(1)} if path == MHA else _ABSENT_LAYERS

    @sets(forward, **absent)
    def _calls_that_are_refused(given: Given) -> None:
        refuses(lambda: make()(_X, **given), "MultiheadAttention", *given)


for _path in (MHA, LAYER):
    _rows_of_calls(_path)
