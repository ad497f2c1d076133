"""Cases: experts of quantized weights under ``fully_shard`` (FSDP2), on two ranks."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from one_launch_experts import one_by_one
from ranks import device_type
from sharded_checkpoints_cases import shared_folder
from sharded_experts_cases import Chain
from sharded_models import RECIPES, assert_same_bytes, gathers, rank, ranks, shard_of
from sharded_models import each as each_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fuser
from fuser.gemm import grouped

CASES: dict[str, Callable[[], None]] = {}
each = functools.partial(each_of, into=CASES)

EXPERTS = 3
SIZES = (9, 0, 23)
EXACT = [name for name in RECIPES if name != "delayed"]


def width(name: str) -> int:
    return 256 if name.startswith("blocks") else 64


def experts(
    name: str,
    *,
    seed: int = 1,
    plain: bool = False,
    size: int | None = None,
    count: int = EXPERTS,
    **options: Any,
) -> fuser.Sequential:
    """Two grouped linears, quantized; equal on all ranks."""
    torch.manual_seed(seed)
    size = size or width(name)
    with fuser.quantized_model_init(enabled=not plain, recipe=RECIPES[name]()):
        return fuser.Sequential(
            fuser.GroupedLinear(count, size, 2 * size, **options),
            fuser.ScaledSwiGLU(),
            fuser.GroupedLinear(count, size, size, **options),
        )


def sharded(layers: Any, how: str = "each", **options: Any) -> Any:
    for layer in (layers[0], layers[2]) if how == "each" else ():
        fully_shard(layer, **options)
    return fully_shard(layers, **options)


def inputs_of(layers: Any, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Rows for each expert of the layers, or none for one of them."""
    counts = (*SIZES, 5)[: layers[0].num_groups]
    rows, sizes = sum(counts), torch.tensor(counts)
    x = oracles.random_tensor((rows, layers[0].in_features), torch.float32, seed).to(dtype)
    scales = oracles.random_tensor((rows,), torch.float32, seed + 1).to(dtype)
    return x.requires_grad_(), sizes, scales.requires_grad_(), sizes


def loss_of(layers: Any, given: tuple[Any, ...], recipe: Any) -> torch.Tensor:
    with fuser.autocast(enabled=recipe is not None, recipe=recipe):
        y: torch.Tensor = layers(*given)
    return y.float().square().mean()


def weights(layers: Any) -> list[Any]:
    """The weights, as the ops have them now."""
    found = [layer.__dict__["_parameters"] for layer in (layers[0], layers[2])]
    return [w for each in found for n, w in each.items() if n.startswith("weight")]


def whole_weights(layers: Any) -> list[Any]:
    for module in (layers[0], layers[2], layers):
        if hasattr(module, "unshard"):
            module.unshard()
    return weights(layers)


def resharded(layers: Any) -> None:
    for module in (layers[0], layers[2], layers):
        if hasattr(module, "reshard"):
            module.reshard()


def train(layers: Any, reference: Any, recipe: Any, *, steps: int = 3) -> None:
    """Steps of both models on the data of all ranks: outputs, gradients and bytes are equal."""
    make = functools.partial(torch.optim.SGD, lr=0.5)
    optimizer, other = make(layers.parameters()), make(reference.parameters())
    for step in range(steps):
        given = inputs_of(layers, 10 * step + rank())
        loss = loss_of(layers, given, recipe)
        loss.backward()
        for place in range(ranks()):
            of_place = inputs_of(layers, 10 * step + place)
            expected = loss_of(reference, of_place, recipe)
            (expected / ranks()).backward()
            if place == rank():
                torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
                torch.testing.assert_close(
                    given[0].grad, ranks() * of_place[0].grad, rtol=1e-5, atol=1e-8
                )
        for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), own.grad, rtol=1e-5, atol=1e-7)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        for found, own in zip(whole_weights(layers), weights(reference), strict=True):
            assert_same_bytes(found, own)
        resharded(layers)


@each(*EXACT)
def three_steps_of_quantized_experts_are_those_of_the_unsharded_experts(name: str) -> None:
    for how, reshards in (("each", True), ("each", False), ("all", True)):
        layers = sharded(experts(name), how, reshard_after_forward=reshards)
        assert all(isinstance(shard_of(w), fuser.QuantizedTensor) for w in weights(layers))
        train(layers, experts(name), RECIPES[name]())


@each(*EXACT)
def quantized_experts_compute_in_high_precision_too(name: str) -> None:
    train(sharded(experts(name)), experts(name), None, steps=2)


@each("current", "mxfp8", "nvfp4")
def overrides_of_the_backward_of_quantized_experts(name: str) -> None:
    for override in ("high_precision", "dequantized"):
        recipe = RECIPES[name](backward_override=override)
        train(sharded(experts(name)), experts(name), recipe, steps=2)


@each("mxfp8", "rowwise", "current")
def a_rank_without_rows_gathers_as_the_others_do(name: str) -> None:
    """Also if parameters stay gathered, and backward gathers what it reads."""
    for reshards in (True, False):
        layers = sharded(experts(name), reshard_after_forward=reshards)
        reference, recipe = experts(name), RECIPES[name]()
        for turn in range(2):
            counts = SIZES if rank() == turn else (0, 0, 0)
            found, expected = (
                _gradient_of_rows(m, counts, seed=turn, recipe=recipe) for m in (layers, reference)
            )
            assert torch.equal(found, expected)


def _gradient_of_rows(
    layers: Any, counts: tuple[int, ...], *, seed: int, recipe: Any
) -> torch.Tensor:
    """The gradient of the input of a step with so many rows for each expert."""
    rows, sizes = sum(counts), torch.tensor(counts)
    x = oracles.random_tensor((rows, layers[0].in_features), torch.float32, seed).requires_grad_()
    scales = oracles.random_tensor((rows,), torch.float32, seed + 1).requires_grad_()
    with fuser.autocast(recipe=recipe):
        y = layers(x, sizes, scales, sizes)
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


@each("delayed")
def other_formats_of_quantized_experts_train(name: str) -> None:
    """All ranks with the same data."""
    layers, reference = sharded(experts(name)), experts(name)
    recipes = [RECIPES[name](reduce_amax=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layers, reference)]
    for step in range(3):
        losses = [
            loss_of(m, inputs_of(m, step), recipe)
            for m, recipe in zip((layers, reference), recipes, strict=True)
        ]
        torch.testing.assert_close(*losses, rtol=0, atol=0)
        for loss in losses:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@each("current", "mxfp8", "nvfp4", "blocks of 128x128", "delayed")
def the_fusion_of_quantized_experts_is_that_of_the_unsharded_experts(name: str) -> None:
    """As on a GPU: all experts are one product, and the three ops one fusion."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"reduce_amax": False} if name == "delayed" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "has_grouped_mm", lambda device, dtype: dtype is torch.bfloat16)
        patch.setattr(fuser.GroupedLinear, "runs_at_once", lambda self, key: True)
        for how in ("all", "each"):
            layers = sharded(experts(name), how, mp_policy=policy)
            reference = experts(name).bfloat16()
            recipes = [RECIPES[name](**options) for _ in range(2)]
            given = [inputs_of(layers, 1, torch.bfloat16) for _ in range(2)]
            losses = [
                loss_of(m, x, r)
                for m, x, r in zip((layers, reference), given, recipes, strict=True)
            ]
            assert torch.equal(*losses), how
            for loss in losses:
                loss.backward()
            for place in (0, 2):
                assert torch.equal(given[0][place].grad, given[1][place].grad)


@each("current", "mxfp8", "nvfp4", "blocks of 1x128")
def a_pass_gathers_the_copies_of_experts_that_it_reads(name: str) -> None:
    layers, recipe = sharded(experts(name)), RECIPES[name]()
    numel = sum(w.numel() for w in weights(layers)) // ranks()
    bits = 4.6 if "nvfp4" in name else 8.3
    for compute, usage in ((recipe, "columnwise"), (None, "rowwise")):
        usage = "rowwise" if name == "current" else usage
        with gathers() as forward:
            loss = loss_of(layers, inputs_of(layers, 1), compute)
        with gathers() as backward:
            loss.backward()
        assert len(forward) == len(backward) == 2 * EXPERTS
        for found, of_pass in ((forward, "rowwise"), (backward, usage)):
            assert sum(size for _, size in found) <= numel * bits / 8 + 8 * len(found)
            assert all(of_pass in names for names, _ in found)


@each("current", "mxfp8")
def the_memory_of_quantized_experts_does_not_grow_from_layer_to_layer(name: str) -> None:
    """Gathered bytes, transposes and joined copies, of 10 layers, in one launch and one by one."""
    one_layer = 4 * 64 * 64
    for is_one_launch in (False, True):
        gc.collect()  # of other cases
        others = bytes_in_memory()
        with pytest.MonkeyPatch.context() as patch:
            if is_one_launch:
                patch.setattr(grouped, "has_grouped_mm", lambda d, dtype: dtype is torch.bfloat16)
            else:
                one_by_one(patch)
            torch.manual_seed(1)
            with fuser.quantized_model_init(recipe=RECIPES[name]()):
                layers = [
                    fuser.GroupedLinear(4, 64, 64, bias=False, dtype=torch.bfloat16)
                    for _ in range(10)
                ]
            model = Chain(*layers)
            for layer in layers:
                fully_shard(layer)
            fully_shard(model)
            seen: list[int] = []
            layers[-1].register_forward_pre_hook(
                lambda *_, seen=seen: seen.append(bytes_in_memory())
            )
            layers[0].register_full_backward_pre_hook(
                lambda *_, seen=seen: seen.append(bytes_in_memory())
            )
            for _ in range(2):
                x = oracles.random_tensor((384, 64), torch.bfloat16, 1).requires_grad_()
                with fuser.autocast(recipe=RECIPES[name]()):
                    y = model(x, torch.tensor([96, 96, 96, 96]))
                y.square().mean().backward()
            assert len(seen) == 4
            assert one_layer <= max(seen) - others <= 6 * one_layer, (is_one_launch, seen, others)


def bytes_in_memory() -> int:
    """Of all tensors of bytes that are as large as an expert's weight or the padded layer's."""
    found = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.dtype is torch.uint8:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.size()
    return sum(size for size in found.values() if size in (64 * 64, 4 * 64 * 64, 4 * 128 * 64))


@each("current", "mxfp8", "nvfp4", "delayed")
def quantized_experts_on_meta_are_sharded_and_then_initialised(name: str) -> None:
    with torch.device("meta"):
        layers = experts(name)
    sharded(layers)
    parameters = list(layers.parameters())
    layers.to_empty(device=device_type())
    for layer in (layers[0], layers[2]):
        layer.reset_parameters()
    assert all(a is b for a, b in zip(parameters, layers.parameters(), strict=True))
    for weight in weights(layers):
        assert isinstance(shard_of(weight), fuser.QuantizedTensor)
        values = weight.full_tensor()
        assert torch.isfinite(values).all()
        assert float(values.std()) > 0
    optimizer = torch.optim.SGD(layers.parameters(), lr=4.0)
    losses = []
    for _ in range(3):
        losses.append(loss_of(layers, inputs_of(layers, 1), RECIPES[name]()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    # Values, and so the descent, depend on the device's generator.
    assert torch.isfinite(losses[-1])
    assert losses[-1] != losses[0]


@each("current", "mxfp8", "nvfp4", "blocks of 128x128")
def checkpoints_of_quantized_experts_are_loaded_with_their_bytes(name: str) -> None:
    check_checkpoints(name, functools.partial(experts, name))


def check_checkpoints(name: str, make: Callable[..., Any]) -> None:
    """From two ranks to two and to one, and from one to two; ``make`` takes a seed.

    One rank quantizes the values of the shards of two. Scales that are powers of two come out as
    they were; others may round differently.
    """
    is_exact_on_one = name in ("mxfp8", "blocks of 128x128")
    folder, reference = shared_folder(), make()
    layers = sharded(make())
    dcp.save(layers.state_dict(), checkpoint_id=f"{folder}/two")
    if rank() == 0:
        dcp.save(reference.state_dict(), checkpoint_id=f"{folder}/one", no_dist=True)
        alone = make(seed=2)
        state = alone.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/two", no_dist=True)
        alone.load_state_dict(state)
        for found, own in zip(weights(alone), weights(reference), strict=True):
            if is_exact_on_one:
                assert_same_bytes(found, own)
            torch.testing.assert_close(found.dequantize(), own.dequantize(), rtol=0.3, atol=0.05)
    dist.barrier()
    for source in ("two", "one"):
        loaded = sharded(make(seed=2))
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{source}")
        loaded.load_state_dict(state)
        for found, own in zip(whole_weights(loaded), weights(reference), strict=True):
            assert_same_bytes(found, own)


@each(*(name for name in RECIPES if name != "delayed"))
def unquantized_experts_are_gathered_quantized(name: str) -> None:
    layers, reference = (experts(name, plain=True) for _ in range(2))
    found = train_gathered(layers, reference, RECIPES[name]())
    assert len(found) == 4 * EXPERTS
    assert all("values" not in names for names, _ in found)


def train_gathered(layers: Any, reference: Any, recipe: Any) -> list[tuple[str, int]]:
    """Three steps are those of the unsharded experts, which quantize weights at each call.

    Returns the gatherings of the last step, as ``gathers`` does.
    """
    sharded(fuser.distributed.gather_quantized(layers, recipe))
    models = (layers, reference)
    # The fused op of unsharded experts sums gradients of biases tile by tile. With a small eps a
    # step of AdamW is as large for a gradient that is little more than what the sum rounds.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-3) for m in models]
    for step in range(3):
        with gathers() as found:
            losses = [loss_of(m, inputs_of(m, step), recipe) for m in models]
            for loss in losses:
                loss.backward()
        assert torch.equal(*losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
            gathered = parameter.full_tensor()
            assert type(gathered) is torch.Tensor
            torch.testing.assert_close(gathered, own, rtol=1e-5, atol=1e-6)
            own.data.copy_(gathered)  # a last bit would be one of the next loss
    return found


@each("current", "mxfp8", "nvfp4", "blocks of 1x128")
def ranks_may_have_rows_of_different_experts(name: str) -> None:
    """Backward gathers one copy of a weight from all ranks, also from those without rows for it."""
    for override, is_plain in itertools.product((None, "dequantized"), (False, True)):
        _train_on_different_experts(name, override, is_plain=is_plain)
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        _train_on_different_experts(name, None, is_plain=False)


def _train_on_different_experts(name: str, override: str | None, *, is_plain: bool) -> None:
    recipe = RECIPES[name](backward_override=override)
    layers: Any
    layers, reference = (experts(name, plain=is_plain) for _ in range(2))
    if is_plain:
        layers = fuser.distributed.gather_quantized(layers, recipe)
    sharded(layers)
    for place in range(ranks()):
        x, _, scales, _ = inputs_of(reference, place)
        sizes = torch.tensor(((0, 12, 20), (32, 0, 0))[place % 2])
        loss = loss_of(reference, (x, sizes, scales, sizes), recipe) / ranks()
        loss.backward()
        if place == rank():
            own = x.detach().clone().requires_grad_()
            loss_of(layers, (own, sizes, scales.detach(), sizes), recipe).backward()
            torch.testing.assert_close(own.grad, ranks() * x.grad, rtol=1e-5, atol=1e-8)
    for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
        found = parameter.grad.full_tensor()
        torch.testing.assert_close(found, own.grad, rtol=1e-5, atol=1e-7)


@each("mxfp8")
def a_copy_of_experts_that_are_gathered_quantized_trains_alone(name: str) -> None:
    """The original is not sharded, and its values stay."""
    recipe = RECIPES[name]()
    layers = fuser.distributed.gather_quantized(experts(name, plain=True), recipe)
    values = [p.detach().clone() for p in layers.parameters()]
    copied = sharded(copy.deepcopy(layers))
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.5)
    loss = loss_of(copied, inputs_of(copied, 1), recipe)
    reference = experts(name, plain=True)
    assert torch.equal(loss, loss_of(reference, inputs_of(reference, 1), recipe))
    loss.backward()
    optimizer.step()
    for own, value, other in zip(layers.parameters(), values, copied.parameters(), strict=True):
        assert own.grad is None
        assert torch.equal(own, value)
        expected = value - 0.5 * other.grad.full_tensor()
        torch.testing.assert_close(other.full_tensor(), expected)
