"""The layers, functions and optimizers of Transformer Engine's import paths, on a CPU."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import every_format as formats
import pytest
import torch
from said import said
from torch.nn import functional as F

import fuser
from fuser import recipe
from fuser.communication import PlannedGroup
from fuser.te.pytorch import (
    attention,
    cross_entropy,
    distributed,
    layers,
    padding,
    permutation,
    rope,
    router,
    transformer,
    userbuffers,
)
from fuser.te.pytorch import optimizers as fused
from fuser.te.pytorch.operations import BasicLinear

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# -- layers --------------------------------------------------------------------------


def test_a_layer_returns_its_bias_in_place_of_adding_it() -> None:
    layer = layers.Linear(16, 8, return_bias=True)
    x = torch.randn(4, 16)
    y, bias = layer(x)
    assert torch.equal(y, x @ layer.weight.T)
    assert bias.data_ptr() == layer.bias.data_ptr()
    assert torch.equal(bias, torch.zeros(8))
    assert set(layer.state_dict()) >= {"weight", "bias"}
    plain = layers.Linear(16, 8)
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        layer.bias.fill_(0.5)
    assert torch.equal(layer(x)[0], y)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(plain(x), y + 0.5)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_norm_and_a_linear_have_the_attributes_that_programs_read(normalization: str) -> None:
    layer = layers.LayerNormLinear(16, 8, normalization=normalization, return_bias=True, eps=1e-6)
    x = torch.randn(4, 16)
    y, bias = layer(x)
    normed = (
        F.layer_norm(x, (16,), eps=1e-6)
        if normalization == "LayerNorm"
        else F.rms_norm(x, (16,), eps=1e-6)
    )
    torch.testing.assert_close(y, normed @ layer.weight.T)
    assert (layer.layer_norm_bias is None) == (normalization == "RMSNorm")
    assert (layer.in_features, layer.out_features, layer.tp_size) == (16, 8, 1)
    assert layer.parallel_mode is None
    assert not layer.sequence_parallel
    assert layer.use_bias
    assert isinstance(layer, layers.TransformerEngineBaseModule)
    assert bias.data_ptr() == layer.bias.data_ptr()


def test_biases_begin_with_zeros_and_weights_with_small_normal_values() -> None:
    for layer in (layers.Linear(256, 256), layers.LayerNormMLP(64, 128)):
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                assert not parameter.any(), name
            elif parameter.dim() == 2:
                assert abs(float(parameter.detach().std()) - layers.DEFAULT_STD) < 2e-3
        layer.reset_parameters()
        assert not any(p.any() for n, p in layer.named_parameters() if "bias" in n)


def test_biases_that_are_returned_are_reset_to_zeros() -> None:
    for layer in (
        layers.Linear(16, 8, return_bias=True),
        layers.LayerNormLinear(16, 8, return_bias=True),
        layers.GroupedLinear(2, 16, 8, return_bias=True),
        layers.GroupedLinear(2, 16, 8, return_bias=True, single_grouped_bias=True),
    ):
        biases = [p for n, p in layer.named_parameters() if "bias" in n]
        for bias in biases:
            torch.nn.init.ones_(bias)
        layer.reset_parameters(defer_init=True)
        assert all(bias.all() for bias in biases)
        layer.reset_parameters()
        assert not any(p.any() for n, p in layer.named_parameters() if "bias" in n)


@pytest.mark.parametrize("name", ["fuse_wgrad_accumulation", "accumulate_into_main_grad"])
def test_a_layer_says_under_either_name_that_it_adds_to_main_grad(name: str) -> None:
    for cls, sizes in (
        (layers.Linear, (16, 8)),
        (layers.LayerNormLinear, (16, 8)),
        (layers.LayerNormMLP, (16, 32)),
        (layers.GroupedLinear, (2, 16, 8)),
    ):
        made: Any = cls
        assert made(*sizes, **{name: True}).fuse_wgrad_accumulation is True
        assert made(*sizes).fuse_wgrad_accumulation is False


def test_arguments_for_userbuffers_are_ignored_with_one_warning() -> None:
    layers._warn_of_overlap.cache_clear()
    with pytest.warns(
        fuser.FuserWarning,
        match=said("layers-ignores-communication-overlapped", "Linear", "ub_overlap_ag"),
    ):
        layers.Linear(16, 16, ub_overlap_ag=True, ub_name="qkv")
    with pytest.warns(
        fuser.FuserWarning,
        match=said("layers-ignores-communication-overlapped", None, "userbuffers_options"),
    ):
        op = BasicLinear(16, 16, userbuffers_options={"comm_name": "fc1"})
    plan = fuser.Sequential(op, fuser.Bias(16), fuser.GELU()).plan(torch.randn(4, 16))
    assert "ForwardLinearBiasActivation" in str(plan)  # fused as BasicLinear itself
    options: dict[str, Any] = {"ub_overlap_ag": True, "device": "cpu"}
    for make in (
        lambda: layers.Linear(16, 16, ub_overlap_ag=True),  # the second of these layers
        lambda: layers.Linear(16, 16, ub_overlap_ag=False, ub_bulk_wgrad=False),
        lambda: layers.GroupedLinear(2, 16, 16, ub_overlap_ag=False),
        userbuffers.destroy_ub,
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make()
    makers: dict[str, Any] = {
        said(
            "layers-ignores-communication-overlapped", "LayerNormLinear", "ub_overlap_ag"
        ): lambda: layers.LayerNormLinear(16, 16, **options),
        said("layers-ignores-communication-overlapped", "LayerNormMLP", "ub_overlap_ag"): lambda: (
            layers.LayerNormMLP(16, 32, **options)
        ),
        said(
            "layers-ignores-communication-overlapped", "TransformerLayer", "ub_tp_comm_overlap"
        ): lambda: transformer.TransformerLayer(16, 32, 2, ub_tp_comm_overlap=True, device="cpu"),
        said("layers-ignores-communication-overlapped", "initialize_ub"): lambda: (
            userbuffers.initialize_ub(
                [64, 16], 2, use_fp8=False, ub_cfgs={"qkv_fprop": {}}, bootstrap_backend="gloo"
            )
        ),
    }
    for words, make in makers.items():
        with pytest.warns(fuser.FuserWarning, match=words):
            make()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make()


@pytest.mark.parametrize("single", [False, True])
def test_a_grouped_layer_returns_its_biases(single: bool) -> None:
    layer = layers.GroupedLinear(3, 16, 8, return_bias=True, single_grouped_bias=single)
    x = torch.randn(9, 16)
    y, biases = layer(x, [2, 3, 4])
    expected = [rows @ getattr(layer, f"weight{i}").T for i, rows in enumerate(x.split([2, 3, 4]))]
    torch.testing.assert_close(y, torch.cat(expected))
    assert [tuple(bias.shape) for bias in biases] == [(8,)] * 3


def test_a_norm_takes_either_name_of_its_size() -> None:
    norm = layers.RMSNorm(hidden_size=16, params_dtype=BF16, sequence_parallel=True)
    assert norm.weight.dtype is BF16
    assert norm.weight.sequence_parallel
    assert layers.LayerNorm(16, eps=1e-6).eps == 1e-6
    for wrong in ({}, {"normalized_shape": 16, "hidden_size": 16}):
        with pytest.raises(fuser.InputError, match=said("layers-normalized-shape-hidden")):
            layers.LayerNorm(**wrong)


def test_a_norm_before_an_mxfp8_linear_has_the_gradients_of_one_alone() -> None:
    """A comment in Megatron-LM says that such a norm has wrong gradients elsewhere."""
    norm, linear = fuser.RMSNorm(64), fuser.Linear(64, 32, bias=False)
    x, dy = torch.randn(32, 64), torch.randn(32, 32)
    results = []
    for together in (True, False):
        leaf = x.clone().requires_grad_()
        norm.zero_grad()
        with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
            y = fuser.Sequential(norm, linear)(leaf) if together else None
        if y is None:
            h = norm(leaf)
            with fuser.autocast(recipe=recipe.MXFP8BlockScaling()):
                y = linear(h)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, norm.weight.grad))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_group_of_another_size_is_refused_later() -> None:
    layer = layers.Linear(16, 16)
    layer.set_tensor_parallel_group(None)
    layer.tp_size = 2
    with pytest.raises(fuser.InputError, match=said("layers-set-tensor-group", None, 1)):
        layer.set_tensor_parallel_group(None)


@pytest.mark.parametrize(
    "make",
    [
        lambda **group: layers.Linear(16, 32, parallel_mode="column", **group),
        lambda **group: layers.Linear(32, 16, parallel_mode="row", **group),
        lambda **group: layers.LayerNormLinear(16, 32, parallel_mode="column", **group),
        lambda **group: layers.LayerNormMLP(16, 32, set_parallel_mode=True, **group),
        lambda **group: transformer.MultiheadAttention(16, 2, set_parallel_mode=True, **group),
        lambda **group: transformer.TransformerLayer(16, 32, 2, set_parallel_mode=True, **group),
    ],
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_group_that_is_set_later_is_that_of_every_op(make: Any, sequence_parallel: bool) -> None:
    module = make(tp_group=PlannedGroup(2), sequence_parallel=sequence_parallel)
    group = PlannedGroup(2)
    module.set_tensor_parallel_group(group)
    inside = [m for m in module.modules() if isinstance(m, layers.TransformerEngineBaseModule)]
    assert all(layer.tp_group is group for layer in inside)
    groups = [one for layer in inside for _, op in layer._basic_ops() for one in op.process_groups]
    assert groups
    assert all(one is group for one in groups)


# -- attention -----------------------------------------------------------------------


def reference_attention(q: Any, k: Any, v: Any, sees: Any, bias: Any = 0.0) -> torch.Tensor:
    """Attention of ``[s, b, h, d]`` by its formula, in fp64."""
    q, k, v = (t.double().permute(1, 2, 0, 3) for t in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    output: torch.Tensor = weights @ v
    return output.permute(2, 0, 1, 3).flatten(2)


def places(queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(queries)[:, None], torch.arange(keys)[None]


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        *(("no_mask", None), ("causal", None), ("causal", (2, 0)), ("padding", (2, 1))),
        *(("causal_bottom_right", None), ("padding", None), ("padding_causal", None)),
        *(("arbitrary", None), ("padding,causal", None), ("causal,padding", None)),
        *(("no_mask", window) for window in ((0, 0), (0, 1), (1, 0), (-1, 0), (0, -1))),
        *(("causal", (0, 0)), ("causal", (1, 0)), ("padding", (2, 0)), ("padding", (-1, 0))),
        *(("causal_bottom_right", (0, 0)), ("causal_bottom_right", (2, 0))),
        ("padding_causal", (2, 0)),
    ],
)
def test_attention_sees_what_its_mask_says(kind: str, window: Any, layout: str) -> None:
    has_more_keys = kind in ("causal_bottom_right", "arbitrary")
    has_more_keys |= (kind, window) == ("no_mask", None)
    queries, keys = 6, 9 if has_more_keys else 6
    q = torch.randn(queries, 2, 4, 8)
    k, v = torch.randn(2, keys, 2, 2, 8)
    place, key = places(queries, keys)
    sees = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    mask = None
    if "bottom_right" in kind:
        place = place + keys - queries
    if "causal" in kind:
        sees = sees & (key <= place)
    left, right = window or (-1, -1)
    if left >= 0:
        sees = sees & (key >= place - left)
    if right >= 0:
        sees = sees & (key <= place + right)
    if "padding" in kind:
        mask = torch.zeros(2, 1, 1, keys, dtype=torch.bool)
        mask[1, ..., 4:] = True
        sees = sees & ~mask
    if kind == "arbitrary":
        mask = torch.rand(2, 1, queries, keys) < 0.3
        mask[..., 0] = False
        sees = ~mask
    layer = attention.DotProductAttention(
        4, 8, 2, attn_mask_type=kind, window_size=window, qkv_format=layout
    )
    inputs = [t if layout == "sbhd" else t.transpose(0, 1) for t in (q, k, v)]
    y = layer(*inputs, mask)
    y = y if layout == "sbhd" else y.transpose(0, 1)
    torch.testing.assert_close(y.double(), reference_attention(q, k, v, sees), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "window", "is_torchs"),
    [
        ("causal", None, True),
        ("causal_bottom_right", None, True),
        ("causal", (-1, 0), True),
        ("causal", (2, 0), False),
        ("no_mask", None, False),
    ],
)
def test_a_causal_mask_is_left_to_torch(
    kind: str, window: Any, is_torchs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fast kernels take no other mask."""
    asked = []
    attend = F.scaled_dot_product_attention

    def note(*args: Any, **options: Any) -> torch.Tensor:
        asked.append((options["attn_mask"] is None, options["is_causal"]))
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    module = attention.DotProductAttention(2, 8, attn_mask_type=kind, window_size=window)
    module(*torch.randn(3, 5, 1, 2, 8))
    assert asked == [(window != (2, 0), is_torchs)]


def test_attention_adds_a_bias_to_the_scaled_products() -> None:
    q, k, v = torch.randn(3, 5, 2, 4, 8)
    bias = torch.randn(1, 4, 5, 5)
    layer = attention.DotProductAttention(4, 8)
    y = layer(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    place, key = places(5, 5)
    expected = reference_attention(q, k, v, key <= place, bias.double())
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "call", "sentence"),
    [
        ({"softmax_type": "learnable"}, {}, said("attention-softmax-torch-whose")),
        ({"attn_mask_type": "some"}, {}, said("attention-attn-mask-type", "'some'")),
        ({"num_gqa_groups": 3}, {}, said("attention-heads-num-gqa")),
        ({"attn_mask_type": "padding"}, {}, said("attention-attn-mask-without")),
        ({"qkv_format": "thd"}, {}, said("attention-qkv-format-pad", "'thd'")),
        ({}, {"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
        *(
            ({}, {"core_attention_bias_type": kind}, said("attention-bias-type-here", f"'{kind}'"))
            for kind in ("alibi", "pre_scale_bias", "some")
        ),
        (
            {},
            {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": torch.ones(5, 5)},
            said("attention-bias-type-here", "'pre_scale_bias'"),
        ),
        ({}, {"core_attention_bias_type": "post_scale_bias"}, said("attention-bias-missing")),
        (
            {},
            {"attn_mask_type": "padding_causal_bottom_right"},
            said("attention-attn-mask-type", "'padding_causal_bottom_right'"),
        ),
    ],
)
def test_attention_refuses_what_is_not_here(arguments: Any, call: Any, sentence: str) -> None:
    q = torch.randn(5, 2, 4, 8)
    with pytest.raises(fuser.InputError, match=sentence):
        attention.DotProductAttention(4, 8, **arguments)(q, q, q, **call)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize(("queries", "keys"), [(4, 6), (6, 4)])
def test_a_causal_query_sees_the_keys_up_to_its_place(
    queries: int, keys: int, window: Any, has_bias: bool
) -> None:
    """Counted from the first key, however many keys there are."""
    q, (k, v) = torch.randn(queries, 2, 4, 8), torch.randn(2, keys, 2, 4, 8)
    place, key = places(queries, keys)
    sees = (key <= place) & (key >= place - (queries if window is None else window[0]))
    bias, given = torch.zeros(()), {}
    if has_bias:
        bias = torch.randn(1, 4, queries, keys)
        given = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    y = attention.DotProductAttention(4, 8, window_size=window)(q, k, v, **given)
    expected = reference_attention(q, k, v, sees, bias.double())
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keys", [5, 7])
def test_of_two_masks_the_second_is_that_of_keys(keys: int) -> None:
    q, (k, v) = torch.randn(5, 2, 4, 8), torch.randn(2, keys, 2, 4, 8)
    of_queries = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    of_keys = torch.zeros(2, 1, 1, keys, dtype=torch.bool)
    of_queries[0, ..., 3:] = of_keys[1, ..., 2:] = True
    place, key = places(5, keys)
    for kind, sees in (("padding", ~of_keys), ("padding_causal", ~of_keys & (key <= place))):
        layer = attention.DotProductAttention(4, 8, attn_mask_type=kind)
        y = layer(q, k, v, (of_queries, of_keys))
        expected = reference_attention(q, k, v, sees)
        torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_bias_from_before_the_scale_is_one_after_it_times_the_scale() -> None:
    """As the refusal of 'pre_scale_bias' says."""
    q, k, v = torch.randn(3, 5, 2, 4, 8)
    bias = torch.randn(1, 4, 5, 5)
    scale = 8**-0.5
    layer = attention.DotProductAttention(4, 8, attn_mask_type="no_mask")
    y = layer(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias * scale)
    heads = [t.double().permute(1, 2, 0, 3) for t in (q, k, v)]
    weights = ((heads[0] @ heads[1].mT + bias.double()) * scale).softmax(-1)
    expected = (weights @ heads[2]).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_product_of_complex_numbers(interleaved: bool) -> None:
    angles = rope.RotaryPositionEmbedding(8, interleaved=interleaved)(6)
    t = torch.randn(6, 2, 3, 10)  # the last two features stay
    y = rope.apply_rotary_pos_emb(t, angles, interleaved=interleaved)
    part = t[..., :8]
    pairs = (
        part.unflatten(-1, (4, 2)) if interleaved else part.unflatten(-1, (2, 4)).transpose(-1, -2)
    )
    frequencies = 10000.0 ** (-torch.arange(4).double() / 4)
    turns = torch.polar(
        torch.ones(6, 4, dtype=torch.float64), torch.outer(torch.arange(6).double(), frequencies)
    )
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.double().contiguous()) * turns[:, None, None]
    )
    expected = turned if interleaved else turned.transpose(-1, -2)
    torch.testing.assert_close(y[..., :8].double(), expected.flatten(-2), atol=1e-5, rtol=1e-5)
    assert torch.equal(y[..., 8:], t[..., 8:])
    bshd = rope.apply_rotary_pos_emb(
        t.transpose(0, 1), angles, tensor_format="bshd", interleaved=interleaved
    )
    assert torch.equal(bshd.transpose(0, 1), y)


def test_packed_sequences_begin_at_position_0() -> None:
    angles = rope.RotaryPositionEmbedding(8)(6)
    t = torch.randn(9, 3, 8)
    ends = torch.tensor([0, 4, 9])
    y = rope.apply_rotary_pos_emb(t, angles, tensor_format="thd", cu_seqlens=ends)
    parts = [rope.apply_rotary_pos_emb(part[:, None], angles)[:, 0] for part in t.split([4, 5])]
    assert torch.equal(y, torch.cat(parts))
    starts = torch.tensor([1, 0])
    both = rope.apply_rotary_pos_emb(
        t[:4, None].expand(-1, 2, -1, -1), angles, start_positions=starts
    )
    assert torch.equal(both[:3, 0], rope.apply_rotary_pos_emb(t[:3, None], angles[1:])[:, 0])
    with pytest.raises(fuser.InputError, match=said("rope-apply-angles-positions", 6, 9)):
        rope.apply_rotary_pos_emb(t[:, None], angles)


def test_multi_head_attention_returns_the_bias_of_its_projection() -> None:
    options: Any = {"attention_dropout": 0.0, "attn_mask_type": "no_mask"}
    module = transformer.MultiheadAttention(16, 2, return_bias=True, **options)
    torch.nn.init.ones_(module.proj.bias)
    x = torch.randn(5, 1, 16)
    y, bias = module(x)
    assert torch.equal(bias, torch.ones(16))
    plain = transformer.MultiheadAttention(16, 2, **options)
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(plain(x), y + bias)


@pytest.mark.parametrize("is_scatter", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_rows_of_ranks_have_the_dtype_of_a_ranks_rows(
    dtype: torch.dtype, is_scatter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []

    def note(out: torch.Tensor, x: torch.Tensor, **options: Any) -> None:
        asked.extend((out, x))

    monkeypatch.setattr(distributed, "get_distributed_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", note)
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", note)
    x = torch.randn(6, 4).to(dtype).t()
    move = (
        distributed.reduce_scatter_along_first_dim
        if is_scatter
        else distributed.gather_along_first_dim
    )
    y, _ = move(x, None)
    assert (y.shape, y.dtype) == ((2 if is_scatter else 8, 6), dtype)
    assert asked[0] is y
    assert asked[1].is_contiguous()
    assert torch.equal(asked[1], x)


@pytest.mark.parametrize("fused_qkv", [False, True])
@pytest.mark.parametrize("groups", [None, 2])
def test_a_transformer_layer_is_its_formula(groups: int | None, fused_qkv: bool) -> None:
    layer = transformer.TransformerLayer(
        32, 48, 4, groups, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=fused_qkv,
        activation="swiglu", normalization="RMSNorm",
    )  # fmt: skip
    x = torch.randn(5, 2, 32)
    angles = rope.RotaryPositionEmbedding(8)(5)
    parts = dict(layer.named_parameters())
    h = F.rms_norm(x, (32,), parts["self_attention.layernorm_qkv.layer_norm_weight"], eps=1e-5)
    mixed = h @ parts["self_attention.layernorm_qkv.weight"].T
    kv = groups or 4
    if fused_qkv:
        grouped = mixed.unflatten(-1, (kv, 4 // kv + 2, 8))
        q, k, v = grouped[..., :-2, :].flatten(-3, -2), grouped[..., -2, :], grouped[..., -1, :]
    else:
        q, k, v = mixed.unflatten(-1, (-1, 8)).split((4, kv, kv), dim=-2)
    q, k = (rope.apply_rotary_pos_emb(t, angles) for t in (q, k))
    place, key = places(5, 5)
    context = reference_attention(q, k, v, key <= place).float()
    x1 = x + context @ parts["self_attention.proj.weight"].T
    h = F.rms_norm(x1, (32,), parts["layernorm_mlp.layer_norm_weight"], eps=1e-5)
    gate, up = (h @ parts["layernorm_mlp.fc1_weight"].T).chunk(2, -1)
    expected = x1 + (F.silu(gate) * up) @ parts["layernorm_mlp.fc2_weight"].T
    torch.testing.assert_close(layer(x, rotary_pos_emb=angles), expected, atol=1e-5, rtol=1e-5)


def test_of_two_rotations_the_second_is_that_of_keys() -> None:
    layer = transformer.MultiheadAttention(32, 4, 8, attention_dropout=0.0, bias=False)
    x, angles = torch.randn(5, 2, 32), rope.RotaryPositionEmbedding(8)(9)
    q, k, v = (x @ layer.qkv.weight.T).unflatten(-1, (-1, 8)).split((4, 4, 4), dim=-2)
    q, k = rope.apply_rotary_pos_emb(q, angles[4:]), rope.apply_rotary_pos_emb(k, angles[:5])
    place, key = places(5, 5)
    expected = reference_attention(q, k, v, key <= place).float() @ layer.proj.weight.T
    y = layer(x, rotary_pos_emb=(angles[4:], angles[:5]))
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "option", [{"layer_type": "decoder"}, {"drop_path_rate": 0.5}, {"output_layernorm": True}]
)
def test_a_transformer_layer_refuses_what_is_not_here(option: Any) -> None:
    with pytest.raises(fuser.InputError, match=next(iter(option))):
        transformer.TransformerLayer(32, 48, 4, **option)


# -- functions -----------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_cross_entropy_is_that_of_torch(smoothing: float, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5, 11).to(dtype)
    target = torch.randint(0, 11, (3, 5))
    target[0, 0] = -100
    results = []
    for is_ours in (True, False):
        leaf = logits.clone().requires_grad_()
        if is_ours:
            loss = cross_entropy.parallel_cross_entropy(leaf, target, smoothing)
        else:
            loss = F.cross_entropy(
                leaf.float().flatten(0, 1), target.flatten(), reduction="none",
                label_smoothing=smoothing,
            ).view(3, 5)  # fmt: skip
        (loss * torch.arange(1.0, 16.0).view(3, 5)).sum().backward()
        results.append((loss, leaf.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    mean = cross_entropy.parallel_cross_entropy(logits, target, smoothing, True)
    torch.testing.assert_close(mean, results[1][0].sum() / 14)
    with pytest.raises(
        fuser.InputError, match=said("cross-entropy-logits-shape-targets", None, (3, 4))
    ):
        cross_entropy.parallel_cross_entropy(logits, target[:, :4])


def test_a_class_that_cannot_be_has_a_probability_of_0() -> None:
    """Its logit is minus infinity, as of the padding of a vocabulary."""
    logits = torch.randn(3, 6)
    logits[:, 4:] = -torch.inf
    target = torch.tensor([0, 3, 1])
    found, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy.parallel_cross_entropy(found, target)
    torch.testing.assert_close(loss, F.cross_entropy(expected, target, reduction="none"))
    loss.sum().backward()
    F.cross_entropy(expected, target, reduction="sum").backward()
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("given", [True, False])
def test_permuted_rows_are_sorted_by_expert_and_come_back(given: bool) -> None:
    tokens, experts = 7, 4
    mask = torch.rand(tokens, experts) < 0.5
    mask[3] = False
    probs = torch.rand(tokens, experts) * mask
    x = torch.randn(tokens, 6)
    count = int(mask.sum()) if given else -1
    rows = [(e, t) for e in range(experts) for t in range(tokens) if mask[t, e]]
    leaf, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y, row_probs, ids = permutation.moe_permute_with_probs(leaf, weights, mask, count)
    assert torch.equal(y, torch.stack([x[t] for _, t in rows]))
    assert torch.equal(row_probs, torch.stack([probs[t, e] for e, t in rows]))
    assert torch.equal(permutation.moe_permute(x, mask, count)[0], y)
    dy, dp = torch.randn(len(rows), 6), torch.randn(len(rows))
    torch.autograd.backward((y, row_probs), (dy, dp))
    dx = torch.zeros_like(x)
    for place, (_, t) in enumerate(rows):
        dx[t] += dy[place]
    torch.testing.assert_close(leaf.grad, dx)
    assert torch.equal(weights.grad, torch.zeros_like(probs).index_put(
        (torch.tensor([t for _, t in rows]), torch.tensor([e for e, _ in rows])), dp))  # fmt: skip

    rows_leaf, weights = y.detach().requires_grad_(), probs.clone().requires_grad_()
    back = permutation.moe_unpermute(rows_leaf, ids, weights)
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))
    back.backward(x)
    torch.testing.assert_close(rows_leaf.grad, torch.stack([x[t] * probs[t, e] for e, t in rows]))
    if given:  # rows of no token
        leaf, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
        longer, more, its_ids = permutation.moe_permute_with_probs(leaf, weights, mask, count + 3)
        assert torch.equal(longer[:-3], y)
        assert not longer[-3:].any()
        assert not more[-3:].any()
        torch.autograd.backward(
            (longer, more), (F.pad(dy, (0, 0, 0, 3), value=9.0), F.pad(dp, (0, 3)))
        )
        torch.testing.assert_close(leaf.grad, dx)
        again = permutation.moe_unpermute(longer.detach(), its_ids, probs)
        torch.testing.assert_close(again, x * probs.sum(1, keepdim=True))
    plain = permutation.moe_unpermute(y.detach(), ids, restore_shape=x.shape)
    torch.testing.assert_close(plain, x * mask.sum(1, keepdim=True))


@pytest.mark.parametrize(("dtype", "large"), [(BF16, 256.0), (torch.float16, 2048.0)])
def test_rows_of_a_token_are_added_in_fp32(dtype: torch.dtype, large: float) -> None:
    """In 16 bits ``large + 1`` is ``large``."""
    rows = torch.tensor([[large], [1.0], [1.0]], dtype=dtype)
    mask = torch.ones(1, 3, dtype=torch.bool)
    token = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    y, ids = permutation.moe_permute(token, mask)
    y.backward(rows)
    assert token.grad is not None
    assert float(token.grad) == large + 2
    assert float(permutation.moe_unpermute(rows, ids, restore_shape=(1, 1))) == large + 2
    assert float(permutation.moe_unpermute(rows, ids, torch.ones(1, 3))) == large + 2


def test_maps_of_indices_and_missing_shapes_are_refused() -> None:
    x, index = torch.randn(4, 6), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(fuser.InputError, match=said("permutation-type-routing-shape")):
        permutation.moe_permute(x, index, map_type="index")
    with pytest.raises(
        fuser.InputError, match=said("permutation-unpermute-type-merging", None, None, "None")
    ):
        permutation.moe_unpermute(x, index.T)


def test_chunks_are_sorted_by_index() -> None:
    x, sizes = torch.randn(9, 3), torch.tensor([2, 0, 4, 3])
    order = torch.tensor([3, 0, 2, 1])
    parts = x.split(sizes.tolist())
    expected = torch.cat([parts[i] for i in order.tolist()])
    assert torch.equal(permutation.moe_sort_chunks_by_index(x, sizes, order), expected)
    y, p = permutation.moe_sort_chunks_by_index_with_probs(x, x[:, 0], sizes, order)
    assert torch.equal(y, expected)
    assert torch.equal(p, expected[:, 0])


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_router_chooses_the_largest_scores(score: Any, pre: bool, k: int) -> None:
    """One expert's sigmoid is not divided by itself, so that the router gets a gradient."""
    logits = torch.randn(6, 8).requires_grad_()
    bias = torch.randn(8) if score == "sigmoid" else None
    probs, mask = router.fused_topk_with_score_function(
        logits, k, pre, scaling_factor=2.0, score_function=score, expert_bias=bias
    )
    leaf = logits.detach().double().requires_grad_()
    rows = []
    for row in range(6):
        scores = leaf[row].sigmoid() if score == "sigmoid" else leaf[row].softmax(0)
        chosen = (scores if bias is None else scores + bias).topk(k).indices
        taken = scores[chosen]
        if (score == "sigmoid" and k > 1) or (score == "softmax" and not pre):
            taken = taken / taken.sum()
        rows.append(torch.zeros(8, dtype=torch.float64).index_put((chosen,), 2 * taken))
        assert mask[row].nonzero().flatten().tolist() == sorted(chosen.tolist())
    expected, weights = torch.stack(rows), torch.randn(6, 8).double()
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-6)
    (probs.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), leaf.grad, rtol=1e-5, atol=1e-6)


def test_the_router_chooses_within_the_best_groups() -> None:
    logits = torch.tensor([[9.0, 0.0, 8.0, 7.5, 8.5, 0.0, 0.0, 0.0]])  # groups of two
    _, mask = router.fused_topk_with_score_function(logits, 2, num_groups=4, group_topk=1)
    assert mask.nonzero()[:, 1].tolist() == [2, 3]  # 15.5 is the best sum
    for k, groups, best in ((2, 3, 1), (2, None, 1), (3, 4, 2)):
        with pytest.raises(
            fuser.InputError, match=said("router-fused-topk-num", groups, best, k, 8)
        ):
            router.fused_topk_with_score_function(logits, k, num_groups=groups, group_topk=best)
    with pytest.raises(
        fuser.InputError, match=said("router-score-function-softmax-sigmoid", None, "'tanh'")
    ):
        router.fused_topk_with_score_function(logits, 2, score_function="tanh")


def test_the_loss_that_balances_experts() -> None:
    logits = torch.randn(6, 4)
    mask, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
    counts = mask.sum(0)
    loss = router.fused_moe_aux_loss(scores, counts, 6, 4, 2, 0.5)
    fractions, means = counts / (6 * 2), logits.softmax(1).mean(0)
    torch.testing.assert_close(loss, 0.5 * 4 * (fractions * means).sum())


def test_padding_and_back() -> None:
    x, sizes = torch.randn(9, 3), [2, 0, 7]
    y, padded = padding.Fp8Padding(3, 4)(x, sizes)
    assert padded == [4, 0, 8]
    assert torch.equal(y[:2], x[:2])
    assert not y[2:4].any()
    assert torch.equal(padding.Fp8Unpadding(3, 4)(y, sizes), x)
    with pytest.raises(fuser.InputError, match=said("padding-groups-sizes-give", None, 3, 2)):
        padding.Fp8Padding(3)(x, [4, 5])


def test_random_states_have_names() -> None:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    torch.manual_seed(5)
    expected = torch.randn(2, 3)
    torch.manual_seed(5)
    with tracker.fork("a"):
        first = torch.randn(3)
    assert torch.equal(torch.randn(2, 3), expected)
    with tracker.fork("a"):
        second = torch.randn(3)
    torch.manual_seed(1)
    assert torch.equal(torch.cat((first, second)), torch.cat((torch.randn(3), torch.randn(3))))
    assert set(distributed.get_all_rng_states()) == {"a", "b"}
    for name, seed in (("a", 3), ("c", 1)):
        with pytest.raises(fuser.InputError):
            tracker.add(name, seed)
    with (
        pytest.raises(fuser.StateError, match=said("distributed-no-among-add", "'z'")),
        tracker.fork("z"),
    ):
        pass


# -- optimizers ----------------------------------------------------------------------


def model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def trained(net: torch.nn.Module, optimizer: Any, steps: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(6, 8, generator=generator)
        optimizer.zero_grad()
        net(x.to(next(net.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("adam_w", [False, True])
def test_fused_adam_is_that_of_torch(adam_w: bool, capturable: bool) -> None:
    ours, theirs = model(), model()
    found = trained(
        ours,
        fused.FusedAdam(
            ours.parameters(), 1e-2, weight_decay=0.1, adam_w_mode=adam_w, capturable=capturable
        ),
    )
    cls = torch.optim.AdamW if adam_w else torch.optim.Adam
    expected = trained(theirs, cls(theirs.parameters(), 1e-2, weight_decay=0.1, fused=True))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_fused_sgd_is_that_of_torch() -> None:
    ours, theirs = model(), model()
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    found = trained(ours, fused.FusedSGD(ours.parameters(), **options))
    expected = trained(theirs, torch.optim.SGD(theirs.parameters(), fused=True, **options))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(fuser.InputError, match=said("optimizers-fusedsgd-wd-after")):
        fused.FusedSGD(ours.parameters(), 0.1, wd_after_momentum=True)


@pytest.mark.parametrize("cls", ["FusedAdam", "FusedSGD"])
def test_master_weights_are_in_fp32_and_the_parameter_is_their_rounding(cls: str) -> None:
    """And have the values that torch's optimizer gives fp32 weights for the same gradients."""
    net = model().to(BF16)
    plain = [torch.nn.Parameter(p.detach().float()) for p in net.parameters()]
    optimizer = getattr(fused, cls)(net.parameters(), 1e-3, master_weights=True)
    of_torch = {"FusedAdam": torch.optim.AdamW, "FusedSGD": torch.optim.SGD}[cls]
    reference = of_torch(plain, 1e-3, weight_decay=0.0)
    for step in range(20):
        trained(net, optimizer, 1)
        for p, twin in zip(net.parameters(), plain, strict=True):
            assert p.grad is not None, step
            twin.grad = p.grad.float()
        reference.step()
    for parameter, twin in zip(net.parameters(), plain, strict=True):
        master = optimizer.state[parameter]["master_param"]
        assert master.dtype is torch.float32
        assert torch.equal(master.to(BF16), parameter)
        assert not torch.equal(master, parameter.float())
        torch.testing.assert_close(master, twin.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaling", [recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()])
def test_a_quantized_parameter_is_written_from_its_master(scaling: recipe.Recipe) -> None:
    with fuser.quantized_model_init(recipe=scaling, preserve_high_precision_init_val=True):
        net = fuser.Sequential(fuser.Linear(32, 32), fuser.GELU(), fuser.Linear(32, 32))
    weight = net[0].weight
    first = weight.get_high_precision_init_val().clone()
    optimizer = fused.FusedAdam(net.parameters(), 1e-3, master_weights=True)
    plain = torch.nn.Parameter(first.clone())
    reference = torch.optim.AdamW([plain], 1e-3, weight_decay=0.0, fused=True)
    for seed in range(3):
        torch.manual_seed(seed)
        with fuser.autocast(recipe=scaling):
            net(torch.randn(32, 32)).square().mean().backward()
        plain.grad = weight.grad.clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    master = optimizer.state[weight]["master_param"]
    torch.testing.assert_close(master, plain.detach(), atol=1e-7, rtol=1e-6)
    assert torch.equal(weight.dequantize(), weight._quantizer(master).dequantize())


@pytest.mark.parametrize("name", formats.RECIPES)
@pytest.mark.parametrize("experts", [False, True])
def test_every_format_has_the_bytes_of_the_quantized_master(name: str, experts: bool) -> None:
    scaling = formats.deterministic(formats.RECIPES[name])
    with fuser.quantized_model_init(recipe=scaling):
        net: Any = fuser.GroupedLinear(3, 64, 32, dtype=BF16) if experts else fuser.Linear(64, 32)
    optimizer = fused.FusedAdam(net.parameters(), 1e-2, weight_decay=0.1, master_weights=True)
    weights = [p for p in net.parameters() if isinstance(p, fuser.QuantizedTensor)]
    assert len(weights) == (3 if experts else 1)
    before = [p.dequantize() for p in weights]
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
    optimizer.step()
    for weight, old in zip(weights, before, strict=True):
        master = optimizer.state[weight]["master_param"]
        torch.testing.assert_close(
            master,
            old.float() * (1 - 1e-3) - 1e-2 * weight.grad.float().sign(),
            atol=1e-3 * float(old.abs().max()) + 1e-5,  # the first values are not rounded to bf16
            rtol=2**-8,
        )
        again = weight.detach().clone()
        again.quantize_(master.to(weight.dtype))
        for buffer, found in weight.buffers().items():
            assert found is None or torch.equal(found, again.buffers()[buffer])


def test_an_optimizer_begins_with_the_values_that_were_loaded() -> None:
    scaling = recipe.Float8CurrentScaling()
    with fuser.quantized_model_init(recipe=scaling, preserve_high_precision_init_val=True):
        net, other = (fuser.Linear(32, 32, bias=False) for _ in range(2))
    net.load_state_dict(other.state_dict())
    optimizer = fused.FusedAdam(net.parameters(), 0.0, master_weights=True)
    net.weight.grad = torch.ones(32, 32)
    optimizer.step()
    master = optimizer.state[net.weight]["master_param"]
    weight: Any = other.weight
    assert torch.equal(master, weight.dequantize(dtype=torch.float32))


def test_initial_values_are_taken_once_and_freed() -> None:
    scaling = recipe.Float8CurrentScaling()
    with fuser.quantized_model_init(recipe=scaling, preserve_high_precision_init_val=True):
        weight: Any = fuser.Linear(32, 32, bias=False).weight
    first = weight.get_high_precision_init_val().clone()
    optimizer = fused.FusedAdam([weight], lr=0.0, master_weights=True)
    optimizer.initialize_state(weight)  # before any write, which would free them too
    assert torch.equal(optimizer.state[weight]["master_param"], first)
    assert weight.get_high_precision_init_val() is None


def test_a_view_of_a_weight_has_no_initial_values_of_the_whole() -> None:
    with fuser.quantized_model_init(
        recipe=recipe.Float8CurrentScaling(), preserve_high_precision_init_val=True
    ):
        weight: Any = fuser.Linear(32, 32, bias=False).weight
    assert weight.get_high_precision_init_val().shape == (32, 32)
    assert weight.detach()[:16].get_high_precision_init_val() is None
    with torch.no_grad():
        weight.detach().to("cpu", copy=True).zero_()  # another memory
    assert weight.get_high_precision_init_val() is not None
    turned = torch.nn.Parameter(weight.detach().t())
    before = turned.dequantize()
    optimizer = fused.FusedAdam([turned], 1e-3, master_weights=True)
    turned.grad = torch.ones(32, 32)
    optimizer.step()
    assert float((turned.dequantize() - before).abs().max()) < 0.02


def test_a_refused_step_changes_nothing_and_is_not_counted() -> None:
    first, second = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    for cls in (fused.FusedAdam, fused.FusedSGD):
        optimizer = cls([{"params": [first]}, {"params": [second]}], lr=0.1)
        first.grad, second.grad = torch.ones(4, 4), torch.ones(4, 4).to_sparse()
        before = first.detach().clone()
        for _ in range(2):
            with pytest.raises(fuser.InputError, match=said("optimizers-sparse-shape-takes")):
                optimizer.step()
        assert torch.equal(first, before)
        assert "step" not in optimizer.param_groups[0]


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_a_state_of_another_optimizer_is_refused(option: str) -> None:
    net = model()
    reference = torch.optim.AdamW(net.parameters(), 1e-2, **{option: True})
    trained(net, reference, 1)
    with pytest.raises(fuser.InputError, match=said("optimizers-state-load-into", None, option)):
        fused.FusedAdam(net.parameters()).load_state_dict(reference.state_dict())


def test_moments_of_a_state_in_16_bits_become_fp32() -> None:
    net = model().to(BF16)
    reference = torch.optim.AdamW(net.parameters(), 1e-2)
    trained(net, reference, 1)
    optimizer = fused.FusedAdam(net.parameters(), 1e-2, master_weights=True)
    optimizer.load_state_dict(reference.state_dict())
    trained(net, optimizer, 1)
    for state in optimizer.state.values():
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_hard_values_are_stepped_as_in_torch() -> None:
    """Infinite weights, whose moments stay finite, and a gradient with a negation bit."""
    ours = torch.nn.Parameter(torch.tensor([[float("inf"), 1.0, -2.0, 3.0]], dtype=BF16))
    theirs = torch.nn.Parameter(ours.detach().float())
    negative = torch._neg_view(torch.ones(1, 4, dtype=BF16))
    ours.grad, theirs.grad = negative, -torch.ones(1, 4)
    optimizer = fused.FusedAdam([ours], 0.1, master_weights=True)
    optimizer.step()
    torch.optim.AdamW([theirs], 0.1, weight_decay=0.0).step()
    torch.testing.assert_close(optimizer.state[ours]["master_param"], theirs.detach())
    assert torch.isfinite(optimizer.state[ours]["exp_avg"]).all()


def test_a_state_is_saved_and_loaded_in_fp32() -> None:
    net = model().to(BF16)
    optimizer = fused.FusedAdam(net.parameters(), 1e-2, master_weights=True)
    trained(net, optimizer)
    other = copy.deepcopy(net)
    again = fused.FusedAdam(other.parameters(), 1e-2, master_weights=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(trained(net, optimizer), trained(other, again), strict=True):
        assert torch.equal(a, b)
    for state in again.state.values():
        assert {t.dtype for t in state.values()} == {torch.float32}


def test_a_state_with_three_projections_is_loaded_into_one() -> None:
    ours = transformer.TransformerLayer(64, 64, 4, 2, bias=True)
    state = ours.state_dict()
    prefix = "self_attention.layernorm_qkv."
    for kind in ("weight", "bias"):
        whole = torch.randn_like(state.pop(f"{prefix}{kind}"))
        names = [f"{prefix}{part}_{kind}" for part in ("query", "key", "value")]
        state |= dict(zip(names, whole.split([64, 32, 32]), strict=True))
    ours.load_state_dict(state)
    found = dict(ours.named_parameters())[f"{prefix}weight"]
    parts = [state[f"{prefix}{part}_weight"] for part in ("query", "key", "value")]
    assert torch.equal(found, torch.cat(parts))
    assert f"{prefix}query_weight" in state


def test_inputs_of_packed_sequences_are_taken_if_they_are_not_there() -> None:
    layer = transformer.TransformerLayer(64, 64, 4)
    x = torch.randn(5, 2, 64)
    absent: Any = dict.fromkeys(("cu_seqlens_q", "max_seqlen_kv", "enc_dec_attn_mask"))
    assert layer(x, **absent).shape == x.shape
    with pytest.raises(
        fuser.InputError,
        match=said("transformer-tensor-shape-not", None, "cu_seqlens_q", "a tensor of shape (3,)"),
    ):
        layer(x, cu_seqlens_q=torch.zeros(3))
    with pytest.raises(
        fuser.InputError,
        match=said("transformer-multihead-attention-hidden", None, "[s, b, hidden]"),
    ):
        layer(x[0])


def test_a_parallel_mode_is_one_that_there_is() -> None:
    for make in (layers.Linear, layers.LayerNormLinear):
        with pytest.raises(
            fuser.InputError, match=said("layers-mode-column-row", None, "'columns'")
        ):
            make(8, 8, parallel_mode="columns")


@pytest.mark.parametrize(
    "option",
    [
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"eps": -1.0},
        {"weight_decay": -0.1},
        {"bias_correction": False},
        {"amsgrad": True},
        {"exp_avg_dtype": BF16},
        {"store_param_remainders": True},
    ],
)
def test_fused_adam_refuses_what_is_not_here(option: Any) -> None:
    with pytest.raises(fuser.InputError, match=next(iter(option))):
        fused.FusedAdam(model().parameters(), **option)


def test_norms_and_scales_of_lists() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5)]
    flag = torch.zeros(1, dtype=torch.int32)
    norm, each = fused.multi_tensor_applier(fused.multi_tensor_l2norm, flag, [tensors], True)
    torch.testing.assert_close(norm[0], torch.cat([t.flatten() for t in tensors]).norm())
    torch.testing.assert_close(each, torch.stack([t.norm() for t in tensors]))
    targets = [torch.empty_like(t) for t in tensors]
    fused.multi_tensor_applier(fused.multi_tensor_scale, flag, [tensors, targets], 0.5)
    assert torch.equal(targets[0], tensors[0] * 0.5)
    assert not flag.any()
    for value, place in ((float("inf"), 1), (float("nan"), 0)):  # the last tensor, and the first
        chosen = [t.clone() for t in tensors]
        chosen[place].view(-1)[0] = value
        flag.zero_()
        fused.multi_tensor_applier(fused.multi_tensor_scale, flag, [chosen, targets], 0.5)
        assert flag.all()
    fused.multi_tensor_applier(fused.multi_tensor_scale, flag, [tensors, targets], 0.5)
    assert flag.all()  # stays until it is cleared


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_lists_in_16_bits_are_in_fp32(dtype: torch.dtype) -> None:
    tensors = [torch.full((33, 67), 2000.0, dtype=dtype), torch.randn(501).to(dtype)]
    flag = torch.zeros(1, dtype=torch.int32)
    norm, each = fused.multi_tensor_l2norm(0, flag, [tensors], True)
    expected = torch.stack([t.double().norm() for t in tensors])
    assert float(expected[0]) > torch.finfo(torch.float16).max
    assert norm.dtype == each.dtype == torch.float32
    torch.testing.assert_close(each.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm[0].double(), expected.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("cls", ["FusedAdam", "FusedSGD"])
def test_views_and_other_strides_are_updated_as_torch_does(cls: str) -> None:
    whole = torch.zeros(3, 6)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, generator=generator)
    whole[:, :4] = values
    strided = torch.nn.Parameter(whole[:, :4])
    turned = torch.nn.Parameter(values.t().clone().t())  # columns next to each other
    plain = torch.nn.Parameter(values.clone())
    grad = torch.randn(3, 4, generator=generator)
    strided.grad, turned.grad, plain.grad = grad.clone(), grad.clone(), grad.clone()
    getattr(fused, cls)([strided, turned], 0.1).step()
    reference = torch.optim.AdamW if cls == "FusedAdam" else torch.optim.SGD
    reference([plain], 0.1, weight_decay=0.0, fused=True).step()
    assert torch.equal(strided, plain)
    assert torch.equal(turned, plain)
    assert not whole[:, 4:].any()


def test_optimizers_are_copied_and_begin_late() -> None:
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = fused.FusedSGD([p, q], 0.1, momentum=0.9)
    p.grad = torch.ones(4)
    optimizer.step()
    q.grad = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), 1 - 0.1 - 0.19))
    torch.testing.assert_close(q.detach(), torch.full((4,), 0.9))
    twin = copy.deepcopy(fused.FusedAdam([p], 0.1, capturable=True))
    (of_twin,) = twin.param_groups[0]["params"]
    of_twin.grad = torch.ones(4)
    twin.step()
    assert not torch.equal(of_twin, p)


def test_a_state_of_torch_is_loaded_with_its_step() -> None:
    ours, theirs = model(), model()
    reference = torch.optim.AdamW(theirs.parameters(), 1e-2, fused=True)
    trained(theirs, reference)
    ours.load_state_dict(theirs.state_dict())
    optimizer = fused.FusedAdam(ours.parameters(), 1e-2, weight_decay=1e-2)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for a, b in zip(trained(ours, optimizer), trained(theirs, reference), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_scales_of_half_precision_are_computed_in_fp32() -> None:
    target, flag = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    fused.multi_tensor_scale(0, flag, [[torch.tensor([60000.0]).half()], [target]], 4.0)
    assert float(target) == 240000.0
    scale = torch.tensor(0.5)
    fused.multi_tensor_applier(fused.multi_tensor_scale_tensor, flag, [[target], [target]], scale)
    assert float(target) == 120000.0
    assert not flag.any()


def test_a_bias_that_is_returned_goes_through_a_checkpoint() -> None:
    layer = layers.Linear(16, 8, return_bias=True)
    x = torch.randn(4, 16, requires_grad=True)
    y, bias = fuser.checkpoint(layer, x)
    (y + bias).square().sum().backward()
    assert layer.bias.is_leaf
    torch.testing.assert_close(layer.bias.grad, 2 * (y + bias).detach().sum(0))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"atn_mask_type": "no_mask"}, said("attention-no-such-argument", "atn_mask_type")),
        ({"core_attention_bias": torch.zeros(1)}, said("attention-core-bias-no")),
        ({"attn_mask_type": "no_mask", "window_size": (1, 1)}, said("attention-window-attn-mask")),
    ],
)
def test_attention_ignores_no_argument(call: Any, sentence: str) -> None:
    q, k = torch.randn(5, 2, 4, 8), torch.randn(7, 2, 4, 8)
    with pytest.raises(fuser.InputError, match=sentence):
        attention.DotProductAttention(4, 8)(q, k, k, **call)


def test_a_step_allocates_no_moments_again_and_a_refused_state_changes_nothing() -> None:
    net = model()
    optimizer = fused.FusedAdam(net.parameters(), 1e-2)
    trained(net, optimizer, 1)
    addresses = {k: v.data_ptr() for s in optimizer.state.values() for k, v in s.items()}
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert not [e for e in profile.events() if e.name == "aten::zeros_like"]
    assert addresses == {k: v.data_ptr() for s in optimizer.state.values() for k, v in s.items()}
    state = optimizer.state_dict()
    wrong = copy.deepcopy(state)
    for number, own in wrong["state"].items():
        own["step"] = torch.tensor(float(number))
    before = copy.deepcopy(state)
    with pytest.raises(fuser.InputError, match=said("optimizers-whose-parameters-steps")):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, own in before["state"].items():
        assert all(torch.equal(value, after["state"][number][name]) for name, value in own.items())
