"""Layers, functions and optimizers of fuser.te on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fuser
from fuser import recipe
from fuser.te.pytorch import (
    attention,
    cpu_offload,
    cross_entropy,
    distributed,
    layers,
    permutation,
    rope,
    transformer,
)
from fuser.te.pytorch import optimizers as fused

BF16 = torch.bfloat16
RECIPES = (recipe.DelayedScaling(), recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def layer(dtype: torch.dtype, device: str) -> Any:
    return transformer.TransformerLayer(
        256, 512, 8, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
        activation="swiglu", fuse_qkv_params=True, params_dtype=dtype, device=device,
    )  # fmt: skip


def test_a_transformer_layer_computes_as_on_a_cpu() -> None:
    ours = layer(torch.float32, "cuda")
    theirs = layer(torch.float32, "cpu")
    theirs.load_state_dict(ours.state_dict())
    x, dy = torch.randn(2, 64, 2, 256)
    results = []
    for net, device in ((ours, "cuda"), (theirs, "cpu")):
        leaf = x.to(device).requires_grad_()
        angles = rope.RotaryPositionEmbedding(32)(64).to(device)
        y = net(leaf, rotary_pos_emb=angles)
        y.backward(dy.to(device))
        assert leaf.grad is not None
        results.append([y, leaf.grad, *(p.grad for p in net.parameters())])
    for found, expected in zip(*results, strict=True):
        limit = 2e-3 * float(expected.abs().max())  # products of a GPU, perhaps in TF32
        torch.testing.assert_close(found.cpu(), expected, atol=limit, rtol=0.0)


@pytest.mark.parametrize("scaling", RECIPES, ids=lambda scaling: type(scaling).__name__)
def test_a_transformer_layer_trains_under_recipes(scaling: recipe.Recipe) -> None:
    net = layer(BF16, "cuda")
    optimizer = fused.FusedAdam(net.parameters(), 1e-3, master_weights=True)
    x, target = torch.randn(2, 64, 4, 256, device="cuda", dtype=BF16)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with fuser.autocast(recipe=scaling):
            loss = F.mse_loss(net(x).float(), target.float())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_attention_is_its_formula_in_bf16() -> None:
    q = torch.randn(64, 2, 8, 64, device="cuda", dtype=BF16)
    k, v = torch.randn(2, 64, 2, 2, 64, device="cuda", dtype=BF16)
    for window in (None, (8, 0)):
        y = attention.DotProductAttention(8, 64, 2, window_size=window)(q, k, v)
        a, b, c = (t.double().permute(1, 2, 0, 3) for t in (q, k, v))
        b, c = (t.repeat_interleave(4, 1) for t in (b, c))
        place, key = torch.arange(64)[:, None], torch.arange(64)[None]
        sees = key <= place
        if window is not None:
            sees &= key >= place - window[0]
        scores = (a @ b.transpose(-1, -2) / 8).masked_fill(~sees.cuda(), float("-inf"))
        expected = (scores.softmax(-1) @ c).permute(2, 0, 1, 3).flatten(2)
        torch.testing.assert_close(y.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("master", [False, True])
def test_fused_adam_computes_as_torch_and_runs_in_a_graph(master: bool) -> None:
    dtype = BF16 if master else torch.float32
    p = torch.nn.Parameter(torch.randn(256, 256, device="cuda", dtype=dtype))
    plain = torch.nn.Parameter(p.detach().float().clone())
    p.grad = torch.randn_like(p)
    plain.grad = p.grad.float()
    optimizer = fused.FusedAdam([p], 1e-3, weight_decay=0.1, capturable=True, master_weights=master)
    reference = torch.optim.AdamW([plain], 1e-3, weight_decay=0.1, fused=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(2):
        graph.replay()
    for _ in range(5):
        reference.step()
    torch.cuda.synchronize()
    values = optimizer.state[p]["master_param"] if master else p.detach()
    assert float(optimizer.param_groups[0]["step"]) == 5
    if master:  # fuser's kernel
        torch.testing.assert_close(values, plain.detach(), atol=1e-7, rtol=1e-6)
    else:
        assert torch.equal(values, plain.detach())
    assert torch.equal(p.detach(), values.to(dtype))


@pytest.mark.parametrize("scaling", RECIPES[1:], ids=lambda scaling: type(scaling).__name__)
def test_a_quantized_parameter_is_written_from_its_master(scaling: recipe.Recipe) -> None:
    with fuser.quantized_model_init(recipe=scaling, preserve_high_precision_init_val=True):
        net = fuser.Linear(256, 256, bias=False, dtype=BF16, device="cuda")
    optimizer = fused.FusedAdam(net.parameters(), 1e-3, master_weights=True)
    for _ in range(3):
        optimizer.zero_grad()
        with fuser.autocast(recipe=scaling):
            net(torch.randn(256, 256, device="cuda", dtype=BF16)).square().mean().backward()
        optimizer.step()
    master = optimizer.state[net.weight]["master_param"]
    expected = net.weight._quantizer(master.to(BF16)).dequantize()
    assert torch.equal(net.weight.dequantize(), expected)


def test_rows_are_permuted_without_a_wait_and_summed_in_one_order() -> None:
    mask = torch.rand(512, 16, device="cuda") < 0.25
    probs = torch.rand(512, 16, device="cuda") * mask
    x = torch.randn(512, 128, device="cuda", dtype=BF16, requires_grad=True)
    count = int(mask.sum())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, row_probs, ids = permutation.moe_permute_with_probs(x, probs, mask, count)
        back = permutation.moe_unpermute(y, ids, probs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(row_probs, probs.T[mask.T])
    expected = x.detach().float() * probs.sum(1, keepdim=True)
    torch.testing.assert_close(back.detach().float(), expected, atol=5e-2, rtol=2e-2)
    grads: list[torch.Tensor | None] = []
    for _ in range(3):
        x.grad = None
        back.backward(torch.ones_like(back), retain_graph=True)
        grads.append(copy.deepcopy(x.grad))
    first, *others = grads
    assert first is not None
    assert all(grad is not None and torch.equal(grad, first) for grad in others)


def test_cross_entropy_is_that_of_torch() -> None:
    logits = torch.randn(64, 1024, device="cuda", dtype=BF16, requires_grad=True)
    target = torch.randint(0, 1024, (64,), device="cuda")
    loss = cross_entropy.parallel_cross_entropy(logits, target, 0.1)
    loss.sum().backward()
    grad, logits.grad = logits.grad, None
    expected = F.cross_entropy(logits.float(), target, reduction="none", label_smoothing=0.1)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, logits.grad, atol=1e-3, rtol=1e-2)


def test_random_states_are_of_the_gpu() -> None:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("a", 1)
    with tracker.fork("a"):
        found = torch.randn(4, device="cuda")
    torch.cuda.manual_seed(1)
    assert torch.equal(found, torch.randn(4, device="cuda"))


def test_wrong_classes_and_positions_are_nan_in_a_graph() -> None:
    logits, t = torch.randn(4, 6, device="cuda"), torch.randn(3, 2, 1, 8, device="cuda")
    freqs = torch.randn(5, 1, 1, 8, device="cuda")
    target, starts = torch.zeros(2, 4, dtype=torch.int64, device="cuda")
    starts = starts[:2]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss = cross_entropy.parallel_cross_entropy(logits, target)
        return loss, rope.apply_rotary_pos_emb(t, freqs, start_positions=starts)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, y = step()
    target.copy_(torch.tensor([1, 6, -1, -100]))
    starts.copy_(torch.tensor([2, 3]))
    graph.replay()
    assert loss.isnan().tolist() == [False, True, True, False]
    torch.testing.assert_close(loss[0], F.cross_entropy(logits[:1], target[:1]))
    expected = rope.apply_rotary_pos_emb(t[:, :1], freqs[2:])
    torch.testing.assert_close(y[:, :1], expected)
    assert y[:2, 1].isfinite().all()
    assert y[2, 1].isnan().all()


def test_offloaded_layers_keep_less_on_the_gpu_and_have_the_same_gradients() -> None:
    net = [layer(BF16, "cuda") for _ in range(4)]
    x = torch.randn(512, 8, 256, device="cuda", dtype=BF16)
    grads, kept = [], []
    for enabled in (False, True):
        context, commit = cpu_offload.get_cpu_offload_context(enabled, 3, 4)
        for each in net:
            each.zero_grad()
        y = x
        before = torch.cuda.memory_allocated()
        for each in net:
            with context:
                y = commit(each(y))
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        y.float().square().mean().backward()
        grads.append([p.grad for each in net for p in each.parameters()])
    print(f"kept: {kept}")
    assert kept[1] < 0.5 * kept[0]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_recomputation_drops_what_its_forward_dropped() -> None:
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    attend = attention.DotProductAttention(
        4, 64, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker
    )
    x = torch.randn(64, 2, 4, 64, device="cuda")
    states, results = tracker.get_states(), []
    for is_checkpointed in (False, True):
        tracker.set_states(dict(states))
        leaf = x.clone().requires_grad_()
        if is_checkpointed:
            y = fuser.checkpoint(attend, leaf, leaf, leaf, get_rng_state_tracker=lambda: tracker)
        else:
            y = attend(leaf, leaf, leaf)
        attend(x, x, x)  # other numbers, before backward
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_padded_permutations_and_largest_logits_are_those_of_a_cpu() -> None:
    x, probs = torch.randn(64, 16), torch.rand(64, 8)
    mask = torch.rand(64, 8) < 0.3
    expected = permutation.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 16)
    found = permutation.moe_permute_and_pad_with_probs(
        x.cuda(), probs.cuda(), mask.cuda(), mask.sum(0).cuda(), 16
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)
    q = torch.randn(64, 2, 4, 64)
    attend = attention.DotProductAttention(4, 64, return_max_logit=True)
    largest = [attend(each, each, each)[1].cpu() for each in (q, q.cuda())]
    torch.testing.assert_close(*largest, atol=2e-2, rtol=2e-3)


def test_states_of_experts_are_loaded_on_a_gpu() -> None:
    made = [layers.GroupedLinear(2, 64, 64, device="cuda", params_dtype=BF16) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    x = torch.randn(64, 64, device="cuda", dtype=BF16)
    scaling = recipe.DelayedScaling(amax_history_len=4)
    for _ in range(3):
        with fuser.autocast(recipe=scaling):
            made[0](x, [16, 48]).float().square().sum().backward()
    made[1].set_extra_state(made[0].get_extra_state())
    outputs = []
    for each in made:
        with fuser.autocast(recipe=scaling):
            outputs.append(each(3 * x, [16, 48]))
    assert torch.equal(*outputs)
