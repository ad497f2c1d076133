"""Cases: gathered bytes, and training against unsharded models."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from ranks import device_type
from sharded_models import (
    EXACT,
    RECIPES,
    assert_same_bytes,
    case,
    each,
    expected_of_shards,
    inputs,
    linear,
    linears,
    loss_of,
    model,
    rank,
    ranks,
    reductions,
    resharded,
    shard_of,
    sharded,
    train,
    unsharded,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import fuser
from fuser import recipe as recipes


@each()
def gathered_bytes_are_those_of_the_unsharded_parameter(name: str) -> None:
    reference, layers = model(name), sharded(model(name))
    for layer, own in zip(linears(layers), linears(reference), strict=True):
        local = shard_of(layer.weight)
        assert isinstance(layer.weight, DTensor)
        assert type(local) is type(own.weight.detach())
        assert local.shape[0] == own.weight.shape[0] // ranks()
    for found, own in zip(unsharded(layers), linears(reference), strict=True):
        assert isinstance(found, torch.nn.Parameter)
        assert_same_bytes(found, own.weight)


@each()
def shards_that_cut_blocks_are_gathered_as_values_and_quantized(name: str) -> None:
    layers = sharded(model(name, (40, 50)))
    expected = [expected_of_shards(layer.weight) for layer in linears(layers)]
    is_whole = name in ("current", "delayed", "rowwise")  # no block is cut
    for weight, of_shards, own in zip(
        unsharded(layers), expected, linears(model(name, (40, 50))), strict=True
    ):
        assert_same_bytes(weight, own.weight if is_whole else of_shards)


@each("mxfp8", "blocks of 1x128", "nvfp4 of 1x16", "rowwise", "current")
def rows_of_a_weight_without_columnwise_copy_cut_no_block(name: str) -> None:
    """Under an override of the backward; any rows are whole blocks."""
    recipe = RECIPES[name](backward_override="dequantized")
    layers, own = (linear(recipe, 40, 50) for _ in range(2))
    sharded(layers)
    assert shard_of(layers[0].weight)._sharding.is_exact
    (weight,) = unsharded(layers)
    assert weight._columnwise_data is None
    assert_same_bytes(weight, own[0].weight)
    resharded(layers)
    loss_of(layers, inputs(layers, 1).requires_grad_(), recipe).backward()


@each()
def the_last_rank_may_have_fewer_rows_or_none(name: str) -> None:
    for out in (33, 3, 1):
        layer, own = (linear(RECIPES[name](), 32, out) for _ in range(2))
        fully_shard(layer)
        is_whole = name in ("current", "delayed")
        expected = own[0].weight if is_whole else expected_of_shards(layer[0].weight)
        layer.unshard()
        assert_same_bytes(layer[0].weight, expected)
        layer.reshard()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (layer, own)]
        x = torch.randn(32, 32)
        for m in (layer, own):
            loss_of(m, x, RECIPES[name]()).backward()
        for optimizer in optimizers:
            optimizer.step()
        if is_whole:
            layer.unshard()
            assert_same_bytes(layer[0].weight, own[0].weight)


@each(*EXACT)
def three_steps_are_those_of_the_unsharded_model(name: str) -> None:
    train(name, sharded(model(name)), model(name))


@each(*EXACT)
def three_steps_in_high_precision_are_those_of_the_unsharded_model(name: str) -> None:
    """FP8 parameters without autocast: backward reads what forward read."""
    train(name, sharded(model(name)), model(name), compute="high precision")


@each("current", "mxfp8")
def parameters_may_stay_gathered_from_forward_to_backward(name: str) -> None:
    train(name, sharded(model(name), reshard_after_forward=False), model(name))


@each("current", "mxfp8")
def a_whole_pipeline_may_be_one_group(name: str) -> None:
    layers = sharded(model(name), each_layer=False)
    train(name, layers, model(name))


@each("current", "nvfp4")
def the_amax_of_an_optimizer_step_is_that_of_all_ranks(name: str) -> None:
    """The largest value moves from rank to rank."""
    for make in (functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW):
        layers, reference = sharded(model(name)), model(name)
        # AdamW's kernels for one tensor and for many round differently on a GPU.
        optimizers = [make(m.parameters(), lr=0.1, foreach=False) for m in (layers, reference)]
        for step in range(3):
            for weight, own in zip(layers.parameters(), reference.parameters(), strict=True):
                own.grad = torch.zeros(own.shape)
                own.grad[step * (len(own) // 2) % len(own)] = 3.0 + step
                part = own.grad.chunk(ranks())[rank()].clone()
                weight.grad = DTensor.from_local(part, weight.device_mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
            for weight, layer in zip(unsharded(layers), linears(reference), strict=True):
                assert_same_bytes(weight, layer.weight)
            resharded(layers)


def give_gradients(layers: Any, step: int) -> None:
    """The same gradients to all models; the largest moves from rank to rank."""
    for place, weight in enumerate(layers.parameters()):
        grad = torch.linspace(-1, 1, weight.numel()).view(weight.shape) * (place + 1)
        grad[step * (len(grad) // 2) % len(grad)] = 3.0 + step
        if isinstance(weight, DTensor):
            own = grad.chunk(ranks())[rank()].clone()
            weight.grad = DTensor.from_local(own, weight.device_mesh, [Shard(0)])
        else:
            weight.grad = grad


@each("current", "nvfp4", "delayed", "mxfp8")
def optimizers_of_lists_reduce_the_amaxes_of_a_write_together(name: str) -> None:
    """The bytes are those of the unsharded model, and of writes one by one."""
    is_scaled = name != "mxfp8"
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    for make, options, writes in (
        (sgd, {"momentum": 0.9, "foreach": True}, 1),
        (adamw, {"foreach": True}, 2),  # the decay of weights is a write of its own
        (adamw, {"fused": True}, 1),
    ):
        of_lists, one_by_one = sharded(model(name)), sharded(model(name))
        reference, loop = model(name), {**options, "foreach": False, "fused": False}
        optimizers = [
            make(m.parameters(), lr=0.1, **given)
            for m, given in ((of_lists, options), (one_by_one, loop), (reference, options))
        ]
        for step in range(3):
            found = []
            for m, optimizer in zip((of_lists, one_by_one, reference), optimizers, strict=True):
                give_gradients(m, step)
                with reductions() as each_of:
                    optimizer.step()
                found.append(each_of)
            assert found[0] == [3] * writes * is_scaled, (make, found)
            assert found[1] == [1] * len(found[1])
            assert len(found[1]) >= 3 * is_scaled
            assert found[2] == []
            every = (unsharded(of_lists), unsharded(one_by_one), linears(reference))
            for weight, other, layer in zip(*every, strict=True):
                if name != "delayed":  # whose new scale comes from a forward
                    assert_same_bytes(weight, layer.weight)
                if "fused" not in options and device_type() == "cpu":
                    assert_same_bytes(weight, other)
            resharded(of_lists)
            resharded(one_by_one)


@each("current", "nvfp4")
def a_write_to_shards_of_two_groups_reduces_in_each(name: str) -> None:
    """Of whole shards and of rows that are written with the rest of their shard."""
    meshes = [
        DeviceMesh.from_group(dist.new_group(list(range(ranks()))), device_type()) for _ in range(2)
    ]
    own, other = model(name), model(name)
    for m in (own, other):
        for layer, place in zip(linears(m), (0, 1, 0), strict=True):
            fully_shard(layer, mesh=meshes[place])
    lists = [
        [shard_of(layers.weight)[5:7] if k == 2 else shard_of(layers.weight) for k, layers in found]
        for found in (enumerate(linears(own)), enumerate(linears(other)))
    ]
    factors = [2.0 + rank(), 0.5, 5.0 - rank()]
    with reductions() as found, torch.no_grad():
        torch._foreach_mul_(lists[0], factors)
        for tensor, factor in zip(lists[1], factors, strict=True):
            tensor.mul_(factor)
    assert found == [2, 1, 1, 1, 1]
    for one, twin in zip(linears(own), linears(other), strict=True):
        assert_same_bytes(shard_of(one.weight), shard_of(twin.weight))


@case
def weights_of_delayed_scaling_have_one_scale_on_all_ranks() -> None:
    """Also if a write is too large for the scale of earlier steps, and without reduced amaxes."""
    recipe = recipes.DelayedScaling(amax_history_len=4, reduce_amax=False)
    layers, own = (linear(recipe, 64, 32) for _ in range(2))
    fully_shard(layers)
    for value in (0.5, 900.0, 2.0, 2.0):
        new = torch.full((32, 64), 0.25)
        new[3, 5] = value  # of the first rank
        x = torch.ones(16, 64)
        for m in (layers, own):
            with torch.no_grad():
                part = new.chunk(ranks())[rank()] if m is layers else new
                (shard_of(m[0].weight) if m is layers else m[0].weight).copy_(part)
            with fuser.autocast(recipe=recipe):
                y = m(x.clone().requires_grad_())
            y.sum().backward()
        layers.unshard()
        assert_same_bytes(layers[0].weight, own[0].weight)
        layers.reshard()


@case
def delayed_scaling_trains_as_on_one_rank_with_all_data() -> None:
    layers, reference, recipe = sharded(model("delayed")), model("delayed"), RECIPES["delayed"]()
    # fully_shard averages the gradients of ranks, and one rank sums them.
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    other = torch.optim.SGD(reference.parameters(), lr=0.5 / ranks())
    for step in range(3):
        parts = [inputs(reference, 10 * step + place) for place in range(ranks())]
        for m, x in ((layers, parts[rank()]), (reference, torch.cat(parts))):
            with fuser.autocast(recipe=recipe):
                y = m(x.requires_grad_())
            y.square().sum().mul(0.01).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        for weight, layer in zip(unsharded(layers), linears(reference), strict=True):
            if device_type() == "cuda":
                # Sums of 14 bits in another order give a few gradients another E5M2 value. After
                # the next step the amax may differ, and with the scale all roundings to E4M3.
                values, own = weight.dequantize(), layer.weight.dequantize()
                error = float((values - own).norm() / own.norm())
                assert error < (2**-4 if step else 1e-3), (step, error)
                continue
            assert torch.equal(weight._scale_inv, layer.weight._scale_inv)
            # Sums over rows are made in another order, and a few values round differently.
            assert (weight._data != layer.weight._data).float().mean() < 0.01
        resharded(layers)


@case
def weights_of_delayed_scaling_follow_the_state_of_their_op() -> None:
    """A state that is loaded replaces that of the op; writes to the shard are recorded in it."""
    layers, recipe = sharded(model("delayed")), RECIPES["delayed"]()
    other = sharded(model("delayed"))
    for m in (layers, other):
        loss_of(m, inputs(m, 1), recipe).backward()
    layers.load_state_dict(other.state_dict())
    for _ in range(2):
        loss_of(layers, inputs(layers, 1), recipe).backward()
        for layer in linears(layers):
            (state,) = (
                op._delayed["forward"] for op in layer.basic_ops if op.num_quantizers("forward")
            )
            shard = shard_of(layer.weight)
            assert shard._quantizer.scale is state.parameter_quantizer(1).scale
            with torch.no_grad():
                layer.weight.mul_(1.0)
            assert float(state.amax_history[0, 1]) > 0
