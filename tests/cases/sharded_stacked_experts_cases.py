"""Cases: experts whose quantized weights are one parameter, under ``fully_shard``, on two ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_launch_experts import one_by_one
from ranks import device_type
from sharded_models import (
    RECIPES,
    assert_same_bytes,
    expected_of_shards,
    gathers,
    rank,
    ranks,
    said,
    shard_of,
)
from sharded_models import each as each_of
from sharded_quantized_experts_cases import (
    EXACT,
    check_checkpoints,
    experts,
    inputs_of,
    loss_of,
    sharded,
    train,
    train_gathered,
    weights,
    whole_weights,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

import fuser
from fuser.errors import InputError
from fuser.gemm import grouped

CASES: dict[str, Callable[[], None]] = {}
each = functools.partial(each_of, into=CASES)

STACKED = [name for name in EXACT if name not in ("rowwise", "nvfp4 4over6")]
"""Formats of one parameter for all experts."""


def stack(name: str, *, count: int = 4, **options: Any) -> fuser.Sequential:
    """Two grouped linears of quantized weights ``[count, N, K]``; equal on all ranks."""
    return experts(name, size=128, count=count, single_grouped_weight=True, **options)


@each(*STACKED)
def three_steps_of_stacked_experts_are_those_of_the_unsharded_experts(name: str) -> None:
    for how, reshards in (("each", True), ("all", False)):
        layers = sharded(stack(name), how, reshard_after_forward=reshards)
        assert all(len(shard_of(w)) == 4 // ranks() for w in weights(layers))
        with gathers() as found:
            train(layers, stack(name), RECIPES[name]())
        assert all("values" not in names for names, _ in found)


@each("mxfp8", "blocks of 128x128")
def ranks_may_have_different_numbers_of_stacked_experts(name: str) -> None:
    """Three on two ranks, and one: the other rank has none."""
    for count in (3, 1):
        train(sharded(stack(name, count=count)), stack(name, count=count), RECIPES[name]())


@each("current", "nvfp4", "nvfp4 of 1x16", "blocks of 1x128")
def uneven_stacked_experts_are_quantized_from_gathered_values(name: str) -> None:
    for count in (3, 1):
        layers, reference = sharded(stack(name, count=count)), stack(name, count=count)
        losses = [loss_of(m, inputs_of(m, 1), RECIPES[name]()) for m in (layers, reference)]
        torch.testing.assert_close(*losses, rtol=0.05, atol=0)
        losses[0].backward()
        torch.optim.SGD(layers.parameters(), lr=0.5).step()
        expected = [expected_of_shards(weight) for weight in weights(layers)]
        for found, own in zip(whole_weights(layers), expected, strict=True):
            assert_same_bytes(found, own)


@each("current", "mxfp8", "nvfp4")
def stacked_experts_under_an_override_or_without_a_recipe(name: str) -> None:
    for override in ("high_precision", "dequantized"):
        recipe = RECIPES[name](backward_override=override)
        train(sharded(stack(name)), stack(name), recipe, steps=2)
    train(sharded(stack(name)), stack(name), None, steps=2)


@each("current", "mxfp8", "nvfp4", "blocks of 1x128")
def a_pass_gathers_the_copy_of_stacked_experts_that_it_reads(name: str) -> None:
    _check_copies_gathered(name)
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        _check_copies_gathered(name)


def _check_copies_gathered(name: str) -> None:
    layers, recipe = sharded(stack(name)), RECIPES[name]()
    numel = sum(w.numel() for w in weights(layers)) // ranks()
    bits = 4.6 if "nvfp4" in name else 8.3
    with gathers() as forward:
        loss = loss_of(layers, inputs_of(layers, 1), recipe)
    with gathers() as backward:
        loss.backward()
    reads = "rowwise" if name == "current" else "columnwise"
    assert len(forward) == len(backward) == 2
    for found, usage in ((forward, "rowwise"), (backward, reads)):
        assert all(usage in names for names, _ in found)
        assert sum(size for _, size in found) <= numel * bits / 8 + 64 * len(found)


@each("current", "mxfp8", "nvfp4", "blocks of 128x128")
def the_fusion_of_stacked_experts_is_that_of_the_unsharded_experts(name: str) -> None:
    """As on a GPU: all experts are one product, and the three ops one fusion."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: dtype is torch.bfloat16)
        patch.setattr(fuser.GroupedLinear, "runs_at_once", lambda self, key: True)
        layers, reference = sharded(stack(name), mp_policy=policy), stack(name).bfloat16()
        separate = experts(name, size=128, count=4).bfloat16()
        losses, grads = [], []
        for model in (layers, reference, separate):
            given = inputs_of(layers, 1 + rank(), torch.bfloat16)
            losses.append(loss_of(model, given, RECIPES[name]()))
            losses[-1].backward()
            grads.append(given[0].grad)
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[0], losses[2])
        assert torch.equal(grads[0], grads[1])
        assert torch.equal(grads[0], grads[2])


@each(*STACKED)
def unquantized_stacked_experts_are_gathered_quantized(name: str) -> None:
    """Of three experts, which two ranks cannot share equally, values are gathered."""
    for count in (4, 3):
        layers, reference = (stack(name, plain=True, count=count) for _ in range(2))
        found = train_gathered(layers, reference, RECIPES[name]())
        assert len(found) == 4
        assert all(("values" in names) == (count == 3) for names, _ in found)


@each("rowwise", "mxfp8", "nvfp4 4over6")
def stacks_that_a_recipe_cannot_quantize_are_not_gathered_quantized(name: str) -> None:
    layers = experts(name, plain=True, size=96, count=4, single_grouped_weight=True)
    recipe = RECIPES[name]()
    sentence = said(InputError, lambda: fuser.distributed.gather_quantized(layers, recipe))
    assert "0.weight of shape (4, 192, 96)" in sentence
    assert type(recipe).__name__ in sentence
    assert "single_grouped_weight=False" in sentence
    assert type(layers[0].weight) is torch.nn.Parameter


@each("current", "mxfp8", "nvfp4")
def stacked_experts_on_meta_are_sharded_and_then_initialised(name: str) -> None:
    with torch.device("meta"):
        layers = sharded(stack(name))
    parameters = list(layers.parameters())
    layers.to_empty(device=device_type())
    for layer in (layers[0], layers[2]):
        layer.reset_parameters()
    assert all(a is b for a, b in zip(parameters, layers.parameters(), strict=True))
    for weight in weights(layers):
        values = weight.full_tensor()
        assert all(0 < float(each.std()) < 1 for each in values)
    before = loss_of(layers, inputs_of(layers, 1), RECIPES[name]())
    before.backward()
    torch.optim.SGD(layers.parameters(), lr=4.0).step()
    assert loss_of(layers, inputs_of(layers, 1), RECIPES[name]()) != before


@each("mxfp8", "current", "nvfp4", "blocks of 128x128")
def a_shard_of_a_stack_on_meta_counts_rows_of_matrices(name: str) -> None:
    """So a write to a part of the shard is none of the whole shard, and leaves the other bytes."""
    with torch.device("meta"):
        layers = sharded(stack(name))
    layers.to_empty(device=device_type())
    for layer in (layers[0], layers[2]):
        layer.reset_parameters()
        shard = shard_of(layer._parameters["weight"])
        experts_of_rank, rows = shard.shape[:2]
        assert experts_of_rank == 4 // ranks()
        assert shard._sharding.rows == experts_of_rank * rows
        before = shard.dequantize()
        new = torch.full((128, shard.shape[-1]), 2.0, device=before.device)
        with torch.no_grad():
            shard.view(-1, shard.shape[-1])[:128].copy_(new)
        values = shard.dequantize()
        assert torch.equal(values[1:], before[1:])
        torch.testing.assert_close(values[0, :128], new, rtol=0.2, atol=0)


@each("current", "mxfp8", "nvfp4", "blocks of 128x128")
def checkpoints_of_stacked_experts_are_loaded_with_their_bytes(name: str) -> None:
    check_checkpoints(name, functools.partial(stack, name))
