"""What Megatron-LM asks of Transformer Engine's names beyond the layers, on a CPU."""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from said import said

import fuser
from fuser import modules, recipe
from fuser.te.pytorch import (
    attention,
    cpu_offload,
    cross_entropy,
    distributed,
    layers,
    master_weights,
    permutation,
    recipes,
    rope,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _same(value: Any) -> Any:
    return value


# -- recomputation -------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_has_the_random_states_of_its_forward(use_reentrant: bool) -> None:
    def dropped(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        with tracker.fork("a"):
            return torch.nn.functional.dropout(x, 0.5) * scale

    results = []
    for is_checkpointed in (False, True):
        tracker = distributed.CudaRNGStatesTracker()
        tracker.add("a", 1)
        x = torch.ones(64, requires_grad=True)
        outputs = []
        for _ in range(2):  # the second forward draws other numbers, before any backward
            if is_checkpointed:
                y = fuser.checkpoint(
                    dropped,
                    x,
                    scale=3.0,
                    use_reentrant=use_reentrant,
                    get_rng_state_tracker=functools.partial(_same, tracker),
                )
            else:
                y = dropped(x, scale=3.0)
            outputs.append(y)
        assert not torch.equal(*outputs)
        outputs[0].sum().backward()
        with tracker.fork("a"):
            results.append((outputs[0].detach(), x.grad, torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_every_recomputation_has_the_random_states_of_its_forward(use_reentrant: bool) -> None:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("a", 1)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("a"):
            return torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(64, requires_grad=True)
    options: Any = {"use_reentrant": use_reentrant, "get_rng_state_tracker": lambda: tracker}
    y = fuser.checkpoint(dropped, x, **options)
    for _ in range(2):
        x.grad = None
        y.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, y)  # of ones, both are the factors


def test_a_recomputation_that_fails_leaves_the_random_states() -> None:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("a", 1)
    fails: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("a"):
            if fails:
                raise ValueError("again")
            return x * torch.rand(3)

    x = torch.ones(3, requires_grad=True)
    y = fuser.checkpoint(function, x, get_rng_state_tracker=lambda: tracker)
    before = tracker.get_states()
    fails.append(True)
    with pytest.raises(ValueError, match="again"):
        y.sum().backward()
    assert torch.equal(tracker.get_states()["a"], before["a"])


# -- states of experts ---------------------------------------------------------------


def grouped(groups: int = 3, steps: int = 2) -> layers.GroupedLinear:
    layer = layers.GroupedLinear(groups, 16, 32)
    for seed in range(steps):
        torch.manual_seed(seed)
        sizes = list(range(1, groups + 1))
        with fuser.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            layer(torch.randn(sum(sizes), 16), sizes).square().sum().backward()
    return layer


def numbers(layer: layers.GroupedLinear) -> torch.Tensor:
    """The state of the op, in fp32."""
    return modules.GroupedLinear.get_extra_state(layer)


@pytest.fixture
def recipes_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``fuser.te.install()``."""
    for name in ("transformer_engine", "transformer_engine.common", recipes.NAME):
        monkeypatch.setitem(sys.modules, name, recipe)


def test_a_state_of_experts_names_no_class_but_that_of_its_recipe() -> None:
    """Programs read such states with a list of the classes that they may have."""
    written = grouped().get_extra_state().numpy().tobytes()
    opcodes = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(written)]
    assert not any("STACK_GLOBAL" in name for name, _ in opcodes)
    named = {str(argument).replace(" ", ".") for name, argument in opcodes if name == "GLOBAL"}
    assert "transformer_engine.common.recipe.DelayedScaling" in named
    others = {name for name in named if not name.startswith("transformer_engine.common.recipe.")}
    assert all(name.startswith(("torch.", "collections.")) for name in others)


@pytest.mark.usefixtures("recipes_by_their_name")
def test_a_state_of_experts_with_classes_of_fuser_is_loaded() -> None:
    """As it was written before."""
    layer, again = grouped(), grouped(steps=1)
    content = pickle.loads(layer.get_extra_state().numpy().tobytes())
    written = bytearray(pickle.dumps(content))
    assert b"fuser.recipe" in written
    again.set_extra_state(torch.frombuffer(written, dtype=torch.uint8))
    assert torch.equal(numbers(again), numbers(layer))


def test_a_state_of_experts_is_loaded_where_torchs_reader_of_storages_has_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron-LM 0.18 and newer has its own in the place of torch's, which pickles then name."""
    name = "megatron.core.safe_globals"

    def safe_load_from_bytes(data: bytes) -> Any:
        return torch.load(io.BytesIO(data), weights_only=True)

    safe_load_from_bytes.__module__, safe_load_from_bytes.__qualname__ = (
        name,
        "safe_load_from_bytes",
    )
    for each in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, each, SimpleNamespace())
    place = SimpleNamespace(safe_load_from_bytes=safe_load_from_bytes)
    monkeypatch.setitem(sys.modules, name, place)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load_from_bytes)
    layer, again = grouped(), grouped(steps=1)
    state = layer.get_extra_state()
    assert name.encode() in state.numpy().tobytes()
    assert layer.fp8_meta["recipe"].amax_history_len == 4
    again.set_extra_state(state)
    assert torch.equal(numbers(again), numbers(layer))


@pytest.mark.usefixtures("recipes_by_their_name")
def test_a_state_of_experts_has_the_keys_that_programs_take_apart() -> None:
    layer = grouped()
    (op,) = layer.ops
    content = pickle.loads(layer.get_extra_state().numpy().tobytes())
    assert content["recipe"] == recipe.DelayedScaling(amax_history_len=4)
    assert layer.fp8_meta["fp8_checkpoint"]
    assert layer.fp8_meta["recipe"].amax_history_len == 4
    forward = op.get_extra_state()[2:8].view(3, 2)
    scales = content["scale_fwd"].view(3, 3)
    assert torch.equal(scales[:2], forward.T)
    assert torch.equal(scales[2], torch.ones(3))
    assert content["amax_history_fwd"].shape == (4, 9)
    assert content["amax_history_fwd"].view(4, 3, 3)[1:, :2].amax(0).gt(0).all()
    assert content["scale_bwd"].view(2, 3)[0].ne(1).all()
    assert content["amax_history_bwd"].shape == (4, 6)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_state_of_experts_is_saved_and_loaded(steps: int) -> None:
    layer, again = grouped(steps=steps), grouped(steps=1)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(numbers(again), numbers(layer))
    outputs = []
    for each in (layer, again):
        with fuser.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            outputs.append(each(torch.full((6, 16), 0.3), [1, 2, 3]))
    assert torch.equal(*outputs)
    plain = layers.GroupedLinear(3, 16, 32)
    plain.set_extra_state(numbers(layer))
    assert torch.equal(numbers(plain), numbers(layer))


@pytest.mark.usefixtures("recipes_by_their_name")
def test_a_state_of_experts_in_evaluation_has_no_amaxes_of_gradients() -> None:
    layer = layers.GroupedLinear(2, 16, 32)
    with torch.no_grad(), fuser.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
        layer(torch.randn(4, 16), [1, 3])
    again = layers.GroupedLinear(2, 16, 32)
    again.set_extra_state(layer.get_extra_state())
    for each in (layer, again):
        content = pickle.loads(each.get_extra_state().numpy().tobytes())
        assert torch.equal(content["scale_bwd"], torch.ones(4))
        assert not content["amax_history_bwd"].any()
        assert content["amax_history_bwd"].shape == (4, 4)
        assert content["recipe"].amax_history_len == 4


class _Elsewhere:
    """A class of another library, in the state of its layer."""

    was_read = False

    def __setstate__(self, state: Any) -> None:
        type(self).was_read = True

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def test_a_state_of_another_library_is_not_read_and_another_number_of_groups_is_refused() -> None:
    layer = grouped()
    before = numbers(layer)
    content = {"recipe": _Elsewhere(), "scale_fwd": torch.ones(9)}
    data = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
    for each in (data, data[:20], torch.arange(40, dtype=torch.uint8)):
        layer.set_extra_state(each)
    assert not _Elsewhere.was_read
    assert torch.equal(numbers(layer), before)
    sentence = said("grouped-state-linear-groups-delayed", 2, 9, "forward")
    with pytest.raises(fuser.InputError, match=sentence):
        grouped(2).set_extra_state(layer.get_extra_state())


# -- attention -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no_mask", "causal", "padding", "bias"])
@pytest.mark.parametrize("groups", [4, 2])
def test_attention_returns_the_largest_logit_of_each_head(
    kind: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ROWS", 3)
    q = torch.randn(7, 2, 4, 8)
    k, v = torch.randn(2, 7, 2, groups, 8).unbind()
    mask = torch.rand(2, 1, 1, 7) < 0.5
    bias = torch.randn(1, 4, 7, 7)
    logits = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(4 // groups, 2)) * 0.3
    call: dict[str, Any] = {"attn_mask_type": kind}
    if kind == "causal":
        logits = logits.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), float("-inf"))
    elif kind == "padding":
        logits = logits.masked_fill(mask, float("-inf"))
        call["attention_mask"] = mask
    elif kind == "bias":
        logits = logits + bias
        call = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
        call["attn_mask_type"] = "no_mask"
    options: dict[str, Any] = {"num_gqa_groups": groups, "softmax_scale": 0.3}
    output, largest = attention.DotProductAttention(4, 8, return_max_logit=True, **options)(
        q, k, v, **call
    )
    torch.testing.assert_close(largest, logits.amax((0, 2, 3)))
    assert torch.equal(output, attention.DotProductAttention(4, 8, **options)(q, k, v, **call))


def test_attention_refuses_a_mask_of_integers() -> None:
    q = torch.randn(5, 2, 4, 8)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.int64)
    with pytest.raises(fuser.InputError, match=said("attention-mask-torch-bool", "torch.int64")):
        attention.DotProductAttention(4, 8, attn_mask_type="padding")(q, q, q, mask)


# -- rotation ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_of_one_tensor_are_rotated(layout: Any, interleaved: bool) -> None:
    length, batch, groups, heads, d = 5, 2, 2, 3, 8
    shape = (length, batch) if layout == "sbhd" else (batch, length)
    qkv = torch.randn(*shape, groups, (heads + 2) * d, requires_grad=True)
    q_freqs, k_freqs = torch.randn(2, length, 1, 1, d).unbind()
    found = rope.apply_fused_qkv_rotary_pos_emb(
        qkv, q_freqs, k_freqs, [heads * d, d, d], layout, interleaved=interleaved
    )
    parts = qkv.detach().clone().requires_grad_()
    heads_of = parts.unflatten(-1, (heads + 2, d))
    expected = (
        rotated(heads_of[..., :heads, :].flatten(2, 3), q_freqs, layout, interleaved),
        rotated(heads_of[..., heads, :], k_freqs, layout, interleaved),
        heads_of[..., heads + 1, :],
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    dy = [torch.randn_like(each) for each in expected]
    torch.autograd.backward(found, dy)
    torch.autograd.backward(expected, dy)
    torch.testing.assert_close(qkv.grad, parts.grad)


def rotated(x: torch.Tensor, angles: torch.Tensor, layout: str, interleaved: bool) -> torch.Tensor:
    """Pairs of features as complex numbers, turned by their angles."""
    angles = angles if layout == "sbhd" else angles.transpose(0, 1)
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        parts = (
            first * cos[..., ::2] - second * sin[..., ::2],
            second * cos[..., 1::2] + first * sin[..., 1::2],
        )
        return torch.stack(parts, -1).flatten(-2)
    first, second = x.chunk(2, -1)
    of_first, of_second = angles.chunk(2, -1)
    parts = (
        first * of_first.cos() - second * of_first.sin(),
        second * of_second.cos() + first * of_second.sin(),
    )
    return torch.cat(parts, -1)


@pytest.mark.parametrize(
    ("split", "layout"), [([16, 8, 8], "thd"), ([16, 8, 4], "sbhd"), ([12, 8, 12], "sbhd")]
)
def test_parts_that_are_no_heads_are_refused(split: list[int], layout: Any) -> None:
    qkv, angles = torch.randn(3, 2, 2, 32), torch.randn(3, 1, 1, 8)
    with pytest.raises(fuser.InputError, match=said("rope-apply-fused-qkv", None, None, 32)):
        rope.apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, split, layout)


def test_positions_without_an_angle_are_refused_on_a_cpu_and_nan_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t, freqs = torch.randn(4, 3, 2, 8), torch.randn(6, 1, 1, 8)
    starts = torch.tensor([0, 2, -1])
    with pytest.raises(fuser.InputError, match=said("rope-apply-start-positions", -1)):
        rope.apply_rotary_pos_emb(t, freqs, start_positions=starts)
    with pytest.raises(fuser.InputError, match=said("rope-apply-angles-positions", 6, 7)):
        rope.apply_rotary_pos_emb(t, freqs, start_positions=-3 * starts.clamp(max=0))
    monkeypatch.setattr(rope, "_ends", lambda length, starts: (0, length))  # as on a GPU
    starts[1] = 4
    y = rope.apply_rotary_pos_emb(t, freqs, start_positions=starts)
    assert torch.equal(y[:, 0], rope.apply_rotary_pos_emb(t[:, :1], freqs)[:, 0])
    assert y[:2, 1].isfinite().all()
    assert y[2:, 1].isnan().all()
    assert y[:1, 2].isnan().all()
    assert y[1:, 2].isfinite().all()


# -- permutation ---------------------------------------------------------------------


@pytest.mark.parametrize("align", [1, 4])
def test_rows_of_experts_are_padded_and_come_back(align: int) -> None:
    tokens, experts = 7, 4
    mask = torch.rand(tokens, experts) < 0.5
    mask[:, 2] = False
    mask[:5, 3], mask[5:, 3] = True, False
    probs = torch.rand(tokens, experts, requires_grad=True)
    x = torch.randn(tokens, 3, requires_grad=True)
    sizes = mask.sum(0)
    y, weights, rows, offsets, padded = permutation.moe_permute_and_pad_with_probs(
        x, probs, mask, sizes, align
    )
    assert torch.equal(padded, (sizes + align - 1) // align * align)
    plain, plain_weights, _ = permutation.moe_permute_with_probs(x, probs, mask)
    start = 0
    for expert, (own, own_weights) in enumerate(
        zip(plain.split(sizes.tolist()), plain_weights.split(sizes.tolist()), strict=True)
    ):
        size, end = int(sizes[expert]), start + int(padded[expert])
        assert torch.equal(y[start : start + size], own)
        assert torch.equal(weights[start : start + size], own_weights)
        assert not y[start + size : end].any()
        assert not weights[start + size : end].any()
        if offsets is not None:
            assert offsets[expert] == start - sizes[:expert].sum()
        start = end
    assert y.shape[0] == start
    assert (offsets is None) == (align == 1)
    out = permutation.moe_unpermute(
        y * weights[:, None], rows, restore_shape=x.shape, pad_offsets=offsets
    )
    expected = x * (probs * mask).sum(1, keepdim=True)
    torch.testing.assert_close(out, expected)
    dy = torch.randn_like(out)
    pairs = zip(
        torch.autograd.grad(out, (x, probs), dy),
        torch.autograd.grad(expected, (x, probs), dy),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    with pytest.raises(fuser.InputError, match=said("permutation-per-expert-routing")):
        permutation.moe_permute_and_pad_with_probs(x, probs, mask, sizes + 1, align)
    with pytest.raises(fuser.InputError, match=said("permutation-pad-align-size", 0)):
        permutation.moe_permute_and_pad_with_probs(x, probs, mask, sizes, 0)


# -- cross entropy -------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [6, -1])
def test_a_class_outside_of_the_vocabulary_is_refused_on_a_cpu_and_nan_elsewhere(
    wrong: int,
) -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    target = torch.tensor([0, wrong, -100, 5])
    with pytest.raises(fuser.InputError, match=said("cross-entropy-target-classes-0", wrong, 6)):
        cross_entropy.parallel_cross_entropy(logits, target)
    loss = cross_entropy._CrossEntropy.apply(logits, target, 0.0, None, -100)  # as on a GPU
    assert loss.isnan().tolist() == [False, True, False, False]
    loss.sum().backward()
    assert logits.grad.isnan().all(1).tolist() == [False, True, False, False]
    ignored = torch.full((4,), -100)
    assert not cross_entropy.parallel_cross_entropy(logits, ignored).any()


# -- memory of the host --------------------------------------------------------------


def test_the_first_layers_keep_in_the_host_what_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    to_host = cpu_offload._to_host

    def counted(tensor: torch.Tensor) -> Any:
        kept = to_host(tensor)
        copies.append(isinstance(kept, tuple))
        return kept

    monkeypatch.setattr(cpu_offload, "DEVICE", "cpu")
    monkeypatch.setattr(cpu_offload, "_to_host", counted)
    net = [fuser.Sequential(fuser.Linear(16, 16), fuser.GELU()) for _ in range(3)]
    x = torch.randn(4, 16)
    grads = []
    for enabled in (False, True):
        context, commit = cpu_offload.get_cpu_offload_context(enabled, 2, 3)
        for _ in range(2):
            y, counts = x.clone().requires_grad_(), []
            for layer in net:
                layer.zero_grad()
                copies.clear()
                with context:
                    y = commit(layer(y))
                counts.append(sum(copies))
            y.square().sum().backward()
            grads.append([p.grad.clone() for layer in net for p in layer.parameters()])
            assert [count > 0 for count in counts] == [enabled, enabled, False]
    for others in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], others, strict=True))


def test_a_forward_after_one_that_failed_begins_with_the_first_layer() -> None:
    context, _ = cpu_offload.get_cpu_offload_context(True, 1, 2)
    with pytest.raises(ValueError, match="no"), context:
        raise ValueError("no")
    for is_first in (True, False, True):
        with context:
            assert (context._hooks[-1] is not None) == is_first


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"offload_weights": True}, said("cpu-offload-activations-weights-alone", None, True)),
        ({"offload_activations": False}, said("cpu-offload-activations-weights-alone", False)),
        ({"num_layers": 3, "model_layers": 2}, said("cpu-offload-num-layers-model", 3, 2)),
    ],
)
def test_offloading_of_weights_is_refused(options: Any, sentence: str) -> None:
    with pytest.raises(fuser.InputError, match=sentence):
        cpu_offload.get_cpu_offload_context(True, **options)


# -- weights that shards of an optimizer write -------------------------------------------


def quantized_weight(scaling: recipe.Recipe | None = None) -> Any:
    with fuser.quantized_model_init(recipe=scaling or recipe.Float8CurrentScaling()):
        return fuser.Linear(32, 16, bias=False).weight


def test_bytes_of_a_weight_are_moved_and_written_by_shards() -> None:
    weight = quantized_weight()
    before = weight.dequantize()
    buffer = torch.full((600,), 255, dtype=torch.uint8)
    master_weights.replace_raw_data(weight, buffer[4:516])
    assert torch.equal(weight.dequantize(), before)
    assert weight._data.data_ptr() == buffer[4:].data_ptr()
    flat = torch.randn(512)
    flat[:100] *= 0.01  # the largest value is in the second shard
    expected = weight._quantizer(flat.view(16, 32))
    master_weights.cast_master_weights_to_fp8([weight], [flat[100:]], [100], None)
    assert torch.equal(weight._data.view(-1)[100:], expected._data.view(-1)[100:])
    assert torch.equal(weight._scale_inv, expected._scale_inv)
    shard = torch.empty(100, dtype=torch.uint8)
    quantizer = weight._quantizer.with_amaxes(flat.abs().amax()[None])
    shard.copy_(quantizer(flat[None, :100])._data.view(-1))
    buffer[4:104] = shard  # as a collective does
    master_weights.post_all_gather_processing([weight])
    assert torch.equal(weight.dequantize(), expected.dequantize())
    assert torch.equal(buffer[:4], torch.full((4,), 255, dtype=torch.uint8))


def test_a_weight_whose_bytes_are_moved_has_its_initial_values() -> None:
    """Until it is written: they begin the master weights of an optimizer."""
    scaling = recipe.Float8CurrentScaling()
    with fuser.quantized_model_init(recipe=scaling, preserve_high_precision_init_val=True):
        weight: Any = fuser.Linear(32, 16, bias=False).weight
    initial = weight.get_high_precision_init_val().clone()
    master_weights.replace_raw_data(weight, torch.empty(512, dtype=torch.uint8))
    assert torch.equal(weight.get_high_precision_init_val(), initial)
    master_weights.quantize_master_weights([weight], [torch.ones(512)], [0], None)
    assert weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("empty", [None, torch.empty(0)], ids=["none", "empty"])
def test_a_rank_without_a_shard_of_a_weight_writes_the_others(empty: Any) -> None:
    weights, flat = [quantized_weight() for _ in range(3)], torch.randn(512)
    bytes_before = weights[1]._data.clone()
    masters = [flat, empty, 2 * flat]
    master_weights.quantize_master_weights(weights, masters, [0, None, 0], None)
    for weight, values in ((weights[0], flat), (weights[2], 2 * flat)):
        assert torch.equal(weight._data, weight._quantizer(values.view(16, 32))._data)
    assert torch.equal(weights[1]._data, bytes_before)


def test_shards_are_rounded_to_the_dtype_of_the_weight_before_they_are_quantized() -> None:
    with fuser.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        weight: Any = layers.Linear(32, 16, bias=False, params_dtype=torch.bfloat16).weight
    flat = torch.randn(512)
    flat[300] = 4 + 2**-7  # rounds down, and with it the scale
    expected = weight._quantizer(flat.bfloat16().view(16, 32))
    assert not torch.equal(weight._quantizer(flat.view(16, 32))._scale_inv, expected._scale_inv)
    master_weights.quantize_master_weights([weight], [flat], [0], None)
    assert torch.equal(weight._data, expected._data)
    assert torch.equal(weight._scale_inv, expected._scale_inv)


def test_a_layer_reads_the_bytes_that_were_written() -> None:
    scaling = recipe.Float8CurrentScaling()
    with fuser.quantized_model_init(recipe=scaling):
        layer: Any = layers.Linear(32, 16, bias=False)
    values, x = torch.randn(16, 32), torch.randn(8, 32)
    results = []
    for is_shard in (False, True):
        for is_first in (True, False):  # the transposed copy of the weight before is kept
            leaf = x.clone().requires_grad_()
            with fuser.autocast(recipe=scaling):
                y = layer(leaf, is_first_microbatch=is_first)
            y.square().sum().backward()
        results.append((y.detach(), leaf.grad))
        if not is_shard:
            master_weights.quantize_master_weights([layer.weight], [values.flatten()], [0], None)
    expected = x @ layer.weight._quantizer(values).dequantize().T
    torch.testing.assert_close(results[1][0], expected, atol=0.5, rtol=0.1)
    assert not torch.equal(results[0][0], results[1][0])
    with torch.no_grad():
        layer.weight.copy_(values)
    leaf = x.clone().requires_grad_()
    with fuser.autocast(recipe=scaling):
        y = layer(leaf)
    y.square().sum().backward()
    for one, other in zip(results[1], (y.detach(), leaf.grad), strict=True):
        assert torch.equal(one, other)


def test_shards_are_written_of_weights_with_one_current_scale() -> None:
    weight, blocks = quantized_weight(), quantized_weight(recipe.MXFP8BlockScaling())
    before = weight.dequantize()
    for name in ("replace_raw_data", "post_all_gather_processing"):
        given = (blocks, None) if name == "replace_raw_data" else ([blocks],)
        with pytest.raises(
            fuser.InputError, match=said("master-weights-shards-written-scale", name, "MXFP8Tensor")
        ):
            getattr(master_weights, name)(*given)
    with pytest.raises(
        fuser.InputError, match=said("master-weights-shards-written-scale", None, "MXFP8Tensor")
    ):
        master_weights.quantize_master_weights(
            [weight, blocks], [torch.ones(512), None], [0, None], None
        )
    with pytest.raises(
        fuser.InputError, match=said("master-weights-quantize-lists-length", [1, 2, 1, 1])
    ):
        master_weights.quantize_master_weights([weight], [None, None], [0], None)
    with pytest.raises(
        fuser.InputError, match=said("master-weights-replace-raw-data", 511, "torch.uint8")
    ):
        master_weights.replace_raw_data(weight, torch.empty(511, dtype=torch.uint8))
    assert torch.equal(weight.dequantize(), before)
    master_weights.quantize_master_weights([], [], [], None)
    target = torch.zeros(512, dtype=torch.uint8)
    values = torch.randn(512)
    master_weights.quantize_master_weights([weight], [values], [0], None, [target])
    assert torch.equal(target.view(16, 32), weight._quantizer(values.view(16, 32))._data)
