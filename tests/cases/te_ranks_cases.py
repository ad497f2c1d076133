"""Layers and functions of fuser.te on several ranks: each case runs on a rank, as in ranks.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import RANKS, device_type, part
from torch.distributed.fsdp import fully_shard

import fuser
from fuser import recipe
from fuser.te.pytorch import (
    cross_entropy,
    distributed,
    layers,
    master_weights,
    optimizers,
    rope,
    transformer,
)

HIDDEN, LENGTH, BATCH, CLASSES = 64, 8, 2, 12


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device_type())


def targets() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=generator).to(device_type())
    target[0, 1] = -100
    return target


def entropy(rank: int, smoothing: float) -> dict[str, torch.Tensor]:
    logits = part(random(BATCH, LENGTH, CLASSES), rank, -1).requires_grad_()
    loss = cross_entropy.parallel_cross_entropy(
        logits, targets(), smoothing, dist_process_group=dist.group.WORLD
    )
    (loss * random(BATCH, LENGTH, seed=1)).sum().backward()
    assert logits.grad is not None
    return {"loss": loss.detach(), "dx": logits.grad}


def row_parallel(rank: int, *, has_shards: bool) -> dict[str, Any]:
    """A row parallel linear, whose bias has the gradient of the rows that its rank has."""
    layer = layers.Linear(
        HIDDEN,
        HIDDEN,
        parallel_mode="row",
        tp_group=dist.group.WORLD,
        sequence_parallel=has_shards,
        device=device_type(),
    )
    group = dist.new_group(list(range(RANKS)))
    layer.set_tensor_parallel_group(group)
    assert all(op.process_groups == (group,) for op in layer.ops[0].members[1:])
    with torch.no_grad():
        layer.weight.copy_(part(random(HIDDEN, HIDDEN), rank, 1))
        layer.bias.copy_(random(HIDDEN, seed=1))
    x = part(random(LENGTH, HIDDEN, seed=2), rank, 1).requires_grad_()
    y = layer(x)
    dy = random(LENGTH, HIDDEN, seed=3)
    y.backward(part(dy, rank, 0) if has_shards else dy)
    assert x.grad is not None
    assert getattr(layer.bias, "sequence_parallel", False) == has_shards
    return {"y": y.detach(), "dx": x.grad, "db": layer.bias.grad, "dw": layer.weight.grad}


def made(ranks: int, *, has_shards: bool = False) -> Any:
    torch.manual_seed(0)
    return transformer.TransformerLayer(
        HIDDEN,
        2 * HIDDEN,
        4,
        2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        fuse_qkv_params=True,
        set_parallel_mode=ranks > 1,
        tp_size=ranks,
        tp_group=dist.group.WORLD if ranks > 1 else None,
        sequence_parallel=has_shards,
        device=device_type(),
    )


def parts_of(whole: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """The part of each parameter of a layer that a rank has; of a gated unit, of both halves."""
    found = {}
    for name, value in whole.items():
        if name.endswith(("fc1_weight", "fc1_bias")):
            found[name] = torch.cat([part(half, rank, 0) for half in value.chunk(2)])
        elif name.endswith(("qkv.weight", "qkv.bias")):
            found[name] = part(value, rank, 0)
        elif name.endswith(("proj.weight", "fc2_weight")):
            found[name] = part(value, rank, 1)
        else:
            found[name] = value
    return found


def layer(rank: int, *, has_shards: bool) -> dict[str, float]:
    """How far output and gradients of a parallel layer are from those of one on one rank."""
    whole, ours = made(1), made(RANKS, has_shards=has_shards)
    values = {
        name: random(*p.shape, seed=i) * (0.1 if p.dim() == 2 else 1.0)
        for i, (name, p) in enumerate(whole.named_parameters())
    }
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(values[name])
        own = parts_of(values, rank)
        for name, parameter in ours.named_parameters():
            parameter.copy_(own[name])
    x, dy = random(LENGTH, BATCH, HIDDEN, seed=50), random(LENGTH, BATCH, HIDDEN, seed=51)
    angles = rope.RotaryPositionEmbedding(HIDDEN // 4)(LENGTH).to(device_type())
    expected = whole(x, rotary_pos_emb=angles)
    expected.backward(dy)
    found = ours(part(x, rank, 0) if has_shards else x, rotary_pos_emb=angles)
    found.backward(part(dy, rank, 0) if has_shards else dy)
    expected = part(expected, rank, 0) if has_shards else expected
    differences = {"y": float((found - expected).detach().abs().max())}
    grads = parts_of({n: p.grad for n, p in whole.named_parameters()}, rank)
    for name, parameter in ours.named_parameters():
        grad = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad)
        differences[name] = float((grad - grads[name]).abs().max() / grads[name].abs().max())
    return differences


def alone(rank: int) -> dict[str, bool]:
    """Whether layers with a parallel mode over one rank, or no group, are those of a rank."""
    own = [dist.new_group([one]) for one in range(RANKS)][rank]
    x = random(LENGTH, HIDDEN, seed=rank)
    results = {}
    for group in (None, own):
        for mode in ("column", "row"):
            shared = {"tp_size": 1, "tp_group": group, "device": device_type()}
            for cls in (layers.Linear, layers.LayerNormLinear):
                torch.manual_seed(0)
                layer = cls(HIDDEN, HIDDEN, parallel_mode=mode, sequence_parallel=True, **shared)
                y = x if cls is layers.Linear else torch.nn.functional.layer_norm(x, (HIDDEN,))
                is_same = layer.weight.shape == (HIDDEN, HIDDEN) and torch.allclose(
                    layer(x), y @ layer.weight.T, atol=1e-5
                )
                has_mode = layer.parallel_mode == mode and layer.tp_size == 1
                results[f"{cls.__name__} {mode} {group is None}"] = is_same and has_mode
    return results


def shards(rank: int) -> dict[str, torch.Tensor]:
    """The bytes and scale of a weight whose shards ranks write and gather."""
    with fuser.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        weight: Any = fuser.Linear(16, 8, bias=False, device=device_type()).weight
    buffer = torch.zeros(128, dtype=torch.uint8, device=device_type())
    master_weights.replace_raw_data(weight, buffer)
    size = 128 // RANKS
    own = slice(rank * size, (rank + 1) * size)
    values = random(128) * torch.arange(1, 129, device=device_type())  # the last is the largest
    master_weights.quantize_master_weights(
        [weight], [values[own]], [own.start], dist.group.WORLD, None, True
    )
    dist.all_gather_into_tensor(buffer, buffer[own].clone())
    master_weights.post_all_gather_processing([weight])
    expected = weight._quantizer(values.view(8, 16))
    return {
        "found": weight.dequantize(),
        "expected": expected.dequantize(),
        "scales": torch.stack((weight._scale_inv, expected._scale_inv)),
    }


def rows(rank: int) -> dict[str, torch.Tensor]:
    x = random(4, 3, seed=rank)
    gathered, _ = distributed.gather_along_first_dim(x, dist.group.WORLD)
    summed, _ = distributed.reduce_scatter_along_first_dim(gathered * (1 + rank), dist.group.WORLD)
    return {"gathered": gathered, "summed": summed}


def stepped_shards(rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Small steps of a quantized weight under ``fully_shard``, from its initial values."""
    torch.manual_seed(0)
    scaling = recipe.MXFP8BlockScaling()
    with fuser.quantized_model_init(recipe=scaling, preserve_high_precision_init_val=True):
        layer = fuser.Linear(128, 128, bias=False, dtype=dtype, device=device_type())
    weight: Any = layer.weight
    initial = part(weight.get_high_precision_init_val().float(), rank, 0)
    fully_shard(layer)
    optimizer = optimizers.FusedAdam(layer.parameters(), 1e-4, master_weights=True)
    for _ in range(10):
        with fuser.autocast(recipe=scaling):
            y = layer(torch.ones(64, 128, dtype=dtype, device=device_type()))
        y.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (sharded,) = layer.parameters()
    master: Any = optimizer.state[sharded]["master_param"]
    return {"moved": master.to_local().cpu() - initial.cpu()}


def cases() -> dict[str, Callable[[int], Any]]:
    return {
        "entropy": functools.partial(entropy, smoothing=0.0),
        "smoothed": functools.partial(entropy, smoothing=0.1),
        "alone": alone,
        "shards": shards,
        "row": functools.partial(row_parallel, has_shards=False),
        "row of shards": functools.partial(row_parallel, has_shards=True),
        "layer": functools.partial(layer, has_shards=False),
        "layer of shards": functools.partial(layer, has_shards=True),
        "rows": rows,
        "steps in bf16": functools.partial(stepped_shards, dtype=torch.bfloat16),
        "steps in fp32": functools.partial(stepped_shards, dtype=torch.float32),
    }
