"""Cases: initial values, copies and conversions of shards."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist
from ranks import device_type
from sharded_models import (
    RECIPES,
    SMALL,
    WIDTHS,
    each,
    expected_of_shards,
    inputs,
    linears,
    loss_of,
    model,
    rank,
    ranks,
    resharded,
    shard_of,
    sharded,
    unsharded,
)
from torch.distributed.fsdp import fully_shard

import fuser


@each("current", "mxfp8", "nvfp4")
def initial_values_are_kept_by_shards(name: str) -> None:
    layers = model(name, preserve_high_precision_init_val=True)
    kept = [layer.weight.get_high_precision_init_val() for layer in linears(layers)]
    sharded(layers)
    for layer, values in zip(linears(layers), kept, strict=True):
        local = layer.weight.to_local()
        own = local.get_high_precision_init_val()
        assert torch.equal(own, values.chunk(ranks())[rank()])
        assert own.untyped_storage().nbytes() == own.nbytes  # not a view of the whole parameter's
        local.clear_high_precision_init_val()
        assert layer.weight.to_local().get_high_precision_init_val() is None


@each("current", "nvfp4", "mxfp8")
def ranks_may_be_initialised_with_different_values(name: str) -> None:
    torch.manual_seed(5 + rank())
    with fuser.quantized_model_init(recipe=RECIPES[name]()):
        layers = fuser.Sequential(fuser.Linear(64, 64))
    own = layers[0].weight.dequantize().chunk(ranks())[rank()]
    fully_shard(layers)
    layers.unshard()
    weight = layers[0].weight
    found = weight.dequantize().chunk(ranks())[rank()]
    torch.testing.assert_close(found, own, rtol=0.3 if name == "nvfp4" else 0.07, atol=0.01)
    assert_same_on_all_ranks([b for b in weight.buffers().values() if b is not None])


def assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        every = [torch.empty_like(tensor) for _ in range(ranks())]
        dist.all_gather(every, tensor)
        assert all(torch.equal(one, every[0]) for one in every)


@each()
def full_tensors_and_copies_of_shards_have_the_values(name: str) -> None:
    layers, reference = sharded(model(name)), model(name)
    for layer, own in zip(linears(layers), linears(reference), strict=True):
        values = own.weight.dequantize()
        full = layer.weight.full_tensor()
        torch.testing.assert_close(full, values)
        local = layer.weight.to_local()
        assert isinstance(local, fuser.QuantizedTensor)
        alone = pickle.loads(pickle.dumps(local.detach()))
        assert alone._sharding is None
        assert torch.equal(alone.dequantize(), local.dequantize())
        twin = copy.deepcopy(local.detach())
        assert torch.equal(twin.dequantize(), local.dequantize())
        assert local.detach().clone()._sharding is None
        assert getattr(local._quantizer, "group", None) is None


@each()
def a_model_on_meta_is_sharded_and_then_initialised(name: str) -> None:
    for widths in (WIDTHS.get(name, SMALL), (33, 32)):
        with torch.device("meta"):
            layers = model(name, widths, preserve_high_precision_init_val=True)
        sharded(layers)
        parameters = list(layers.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        assert all(p.is_meta for p in parameters)
        layers.to_empty(device=device_type())
        for module in layers.modules():
            if isinstance(module, (fuser.BasicLinear, fuser.Bias)):
                module.reset_parameters()
        assert [id(p) for p in layers.parameters()] == [id(p) for p in parameters]
        for layer in linears(layers):
            local = shard_of(layer.weight)
            assert isinstance(local, fuser.QuantizedTensor)
            kept = local.get_high_precision_init_val()
            assert torch.isfinite(kept).all()
            assert kept.std() > 0
            torch.testing.assert_close(
                local.dequantize().cpu(), kept, rtol=0.3, atol=0.2 * float(kept.abs().max())
            )
        expected = [expected_of_shards(layer.weight) for layer in linears(layers)]
        for weight, values in zip(unsharded(layers), expected, strict=True):
            if name in ("current", "nvfp4", "mxfp8") or widths == (33, 32):
                torch.testing.assert_close(weight.dequantize(), values.dequantize())
        resharded(layers)
        before = loss_of(layers, inputs(layers, 1), RECIPES[name]())
        before.backward()
        optimizer.step()
        after = loss_of(layers, inputs(layers, 1), RECIPES[name]())
        assert torch.isfinite(after)
        assert not torch.equal(after, before)
