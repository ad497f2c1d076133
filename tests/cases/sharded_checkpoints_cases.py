"""Cases: unquantized weights that are gathered quantized, checkpoints, and refusals."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import device_type
from sharded_models import (
    RECIPES,
    SMALL,
    WIDTHS,
    assert_same_bytes,
    case,
    changed,
    each,
    gathers,
    inputs,
    linears,
    loss_of,
    model,
    plain_model,
    rank,
    ranks,
    resharded,
    said,
    shard_of,
    sharded,
    shared_folder,
    train,
    unsharded,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fuser
from fuser.errors import InputError, InputTypeError, StateError
from fuser.recipe import CustomRecipe, MXFP8BlockScaling
from fuser.tensors import HybridQuantizer, IdentityQuantizer, MXFP8Quantizer


@each(*[name for name in RECIPES if name != "delayed"])
def unquantized_weights_are_gathered_quantized(name: str) -> None:
    """Three steps are those of the unsharded model, which quantizes weights at each call."""
    for widths in (WIDTHS.get(name, SMALL), (40, 50)):
        reference, recipe = plain_model(widths), RECIPES[name]()
        layers = sharded(fuser.distributed.gather_quantized(plain_model(widths), recipe))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.05)
        other = torch.optim.AdamW(reference.parameters(), lr=0.05)
        for step in range(3):
            x = inputs(reference, step)
            with gathers() as found:
                loss = loss_of(layers, x, recipe)
                loss.backward()
            expected = loss_of(reference, x, recipe)
            expected.backward()
            assert torch.equal(loss, expected)
            if widths != (40, 50):
                assert all("data" in names and "values" not in names for names, _ in found)
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
            for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
                assert type(parameter.full_tensor()) is torch.Tensor
                torch.testing.assert_close(parameter.full_tensor(), own, rtol=1e-5, atol=1e-6)


@case
def half_of_the_bytes_of_bf16_weights_are_gathered() -> None:
    recipe = RECIPES["mxfp8"]()
    layers = fuser.distributed.gather_quantized(plain_model(SMALL, torch.bfloat16), recipe)
    sharded(layers)
    with gathers() as found:
        loss_of(layers, inputs(layers, 1).bfloat16().requires_grad_(), recipe).backward()
    plain = sum(layer.weight.numel() * 2 // ranks() for layer in linears(layers))
    assert sum(size for _, size in found) <= 0.52 * 2 * plain
    assert all(p.grad.dtype is p.dtype is torch.bfloat16 for p in layers.parameters())


@case
def unquantized_weights_on_meta_are_gathered_quantized() -> None:
    recipe = RECIPES["current"]()
    with torch.device("meta"):
        layers = fuser.distributed.gather_quantized(plain_model(SMALL), recipe)
    sharded(layers)
    layers.to_empty(device=device_type())
    for module in layers.modules():
        if isinstance(module, (fuser.BasicLinear, fuser.Bias)):
            module.reset_parameters()
    state = {
        name: value.full_tensor() for name, value in layers.state_dict().items() if value.numel()
    }
    reference = plain_model(SMALL)
    reference.load_state_dict(state, strict=False)
    x = inputs(reference, 1)
    policy = [loss_of(m, x, recipe) for m in (layers, reference)]
    assert torch.equal(*policy)
    folder = shared_folder()
    dcp.save(layers.state_dict(), checkpoint_id=folder)
    other = sharded(fuser.distributed.gather_quantized(plain_model((64, 128)), recipe))
    loaded = other.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded)
    assert torch.equal(loss_of(other, x, recipe), policy[0])


@case
def what_cannot_be_gathered_quantized_is_refused() -> None:
    gather = fuser.distributed.gather_quantized
    assert "DelayedScaling" in said(
        InputError, lambda: gather(plain_model(SMALL), RECIPES["delayed"]())
    )
    quantized, recipe = model("mxfp8"), RECIPES["mxfp8"]()
    sentence = said(InputError, lambda: gather(quantized, recipe))
    assert "weight of shape (128, 64), which is quantized already" in sentence
    layers = sharded(plain_model(SMALL))
    assert "which is sharded already" in said(InputError, lambda: gather(layers, recipe))
    assert "a GELU without" in said(InputError, lambda: gather(fuser.GELU(), recipe))
    layers = gather(plain_model(SMALL), recipe)
    sentence = said(InputError, lambda: gather(layers, RECIPES["current"]()))
    assert f"which is gathered quantized under {recipe} already" in sentence
    exact = MXFP8BlockScaling(backward_override="high_precision")
    sentence = said(InputError, lambda: gather(plain_model(SMALL), exact))
    assert "reads the unquantized weight, which is not gathered" in sentence
    sentence = said(InputTypeError, lambda: gather(plain_model(SMALL), MXFP8BlockScaling))
    assert "such as MXFP8BlockScaling()" in sentence


@case
def parameters_of_two_formats_are_not_sharded_and_unquantized_ones_are() -> None:
    hybrid = HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=IdentityQuantizer()
    )
    recipe = CustomRecipe(qfactory=lambda role: hybrid)
    with fuser.quantized_model_init(recipe=recipe):
        layers = fuser.Linear(64, 64)
    words = "has its copies in two formats, MXFP8 E4M3 / unquantized, and is not sharded"
    assert words in said(InputError, lambda: fully_shard(layers))
    torch.manual_seed(1)
    plain = fuser.Linear(64, 64)
    sentence = said(InputError, lambda: fuser.distributed.gather_quantized(plain, recipe))
    assert "weight of shape (64, 64)" in sentence
    assert words in sentence
    exact = CustomRecipe(qfactory=lambda role: IdentityQuantizer())
    with fuser.quantized_model_init(recipe=exact):
        layers = fuser.Linear(64, 64)
    layers.load_state_dict(plain.state_dict())
    fully_shard(layers)
    x = torch.randn(32, 64)
    for _ in range(2):
        losses = []
        for module in (layers, plain):
            with fuser.autocast(enabled=module is layers, recipe=exact):
                loss = module(x).square().mean()
            loss.backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
            for parameter in module.parameters():
                parameter.grad = None
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-7)


@case
def weights_that_are_gathered_quantized_are_not_read_under_another_recipe() -> None:
    own = RECIPES["mxfp8"]()
    layers, reference = (fuser.Sequential(fuser.Linear(64, 64)) for _ in range(2))
    with torch.no_grad():
        for parameter, own_part in zip(layers.parameters(), reference.parameters(), strict=True):
            parameter.copy_(own_part)
    fully_shard(fuser.distributed.gather_quantized(layers, own))
    x = inputs(reference, 1)
    for recipe in (RECIPES["current"](), RECIPES["delayed"](), RECIPES["nvfp4"](), own):
        if recipe == own:
            assert torch.equal(*(loss_of(m, x, own) for m in (layers, reference)))
        for other in (recipe, dataclasses.replace(own, backward_override="dequantized")):
            if other == own:
                continue
            sentence = said(InputError, lambda other=other: loss_of(layers, x, other))
            assert "A weight of shape (64, 64) is gathered quantized under MXFP8" in sentence
            assert f"under {own}, and this forward runs under {other}:" in sentence
    with torch.no_grad():
        layers.unshard()
        weight = layers[0].weight.dequantize()
        expected = x @ weight.t() + layers[0].bias
        torch.testing.assert_close(layers(x), expected)  # without a recipe it is read as it is


@case
def copies_of_a_weight_that_is_gathered_quantized_are_independent() -> None:
    """A forward of the copy comes between forward and backward of the first."""
    recipe, grads = RECIPES["mxfp8"](), []
    for is_master in (True, False):
        first, second = (fuser.Sequential(fuser.BasicLinear(64, 64)) for _ in range(2))
        torch.nn.init.normal_(
            first[0].weight, generator=torch.Generator(device_type()).manual_seed(1)
        )
        if is_master:
            fuser.distributed.gather_quantized(first, recipe)
        second[0].weight = torch.nn.Parameter(first[0].weight.detach().clone())
        with torch.no_grad():
            second[0].weight.mul_(-3)
        if is_master:
            for layers in (first, second):
                fully_shard(layers, reshard_after_forward=True)
        x = torch.linspace(-1, 1, 640).view(10, 64).requires_grad_()
        with fuser.autocast(recipe=recipe):
            y = first(x)
            with torch.no_grad():
                second(x)
        y.square().mean().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@case
def weights_that_are_gathered_quantized_are_converted() -> None:
    recipe, losses = RECIPES["mxfp8"](), []
    for is_master in (True, False):
        layers = plain_model(SMALL)
        if is_master:
            fuser.distributed.gather_quantized(layers, recipe)
        values = torch.nn.utils.parameters_to_vector(layers.parameters()) / 2
        torch.nn.utils.vector_to_parameters(values, layers.parameters())
        layers.bfloat16()
        assert all(p.dtype is (p + 1).dtype is torch.bfloat16 for p in layers.parameters())
        if is_master:
            sharded(layers)
        losses.append(loss_of(layers, inputs(layers, 1).bfloat16().requires_grad_(), recipe))
    assert torch.equal(*losses)


@each("current", "mxfp8", "blocks of 128x128", "nvfp4", "delayed")
def checkpoints_of_shards_are_loaded_with_their_bytes(name: str) -> None:
    """From two ranks, to two ranks and to one; and from one to two."""
    folder, reference = shared_folder(), model(name)
    layers = sharded(model(name))
    dcp.save(layers.state_dict(), checkpoint_id=f"{folder}/two")
    if rank() == 0:
        dcp.save(reference.state_dict(), checkpoint_id=f"{folder}/one", no_dist=True)
        alone = changed(model(name))
        state = alone.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/two", no_dist=True)
        alone.load_state_dict(state)
    dist.barrier()
    for source in ("two", "one"):
        loaded = sharded(changed(model(name)))
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{source}")
        loaded.load_state_dict(state)
        for found, own in zip(linears(loaded), linears(layers), strict=True):
            found, own = shard_of(found.weight), shard_of(own.weight)
            if source == "two":
                assert_same_bytes(found, own)
            assert found._sharding is not None
        for weight, layer in zip(unsharded(loaded), linears(reference), strict=True):
            assert_same_bytes(weight, layer.weight)
    dist.barrier()  # if a comparison fails, no rank waits
    if rank() == 0:
        for found, layer in zip(linears(alone), linears(reference), strict=True):
            assert_same_bytes(found.weight, layer.weight)


@each("current", "mxfp8", "nvfp4", "blocks of 128x128")
def a_full_state_dict_has_plain_values_and_is_loaded_into_shards(name: str) -> None:
    layers, reference = sharded(model(name)), model(name)
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(layers, options=options)
    expected = reference.state_dict()
    assert full.keys() == expected.keys()
    for key, value in full.items():
        if isinstance(expected[key], fuser.QuantizedTensor):
            assert type(value) is torch.Tensor
            torch.testing.assert_close(value, expected[key].dequantize())
    loaded = sharded(changed(model(name)))
    set_model_state_dict(loaded, dict(full), options=options)
    for weight, layer in zip(unsharded(loaded), linears(reference), strict=True):
        torch.testing.assert_close(weight.dequantize(), layer.weight.dequantize())
    resharded(loaded)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(loaded, dict(full) if rank() == 0 else {}, options=options)
    for weight, layer in zip(unsharded(loaded), linears(reference), strict=True):
        torch.testing.assert_close(weight.dequantize(), layer.weight.dequantize())
    resharded(loaded)
    train(name, sharded(model(name)), model(name), steps=1)


@each("delayed")
def an_optimizer_state_that_is_made_after_a_load_changes_no_byte(name: str) -> None:
    """torch makes it by a step with a learning rate of 0, which writes every weight."""
    folder, layers, recipe = shared_folder(), sharded(model(name)), RECIPES[name]()
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    for seed in range(2):
        loss_of(layers, inputs(layers, seed + rank()), recipe).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(get_model_state_dict(layers), checkpoint_id=f"{folder}/model")
    loaded = sharded(changed(model(name)))
    fuser.distributed.init_delayed_scaling(loaded, recipe)
    fresh = torch.optim.Adam(loaded.parameters(), lr=0.01)
    state = get_model_state_dict(loaded)
    dcp.load(state, checkpoint_id=f"{folder}/model")
    for is_set in (False, True):
        if is_set:
            set_model_state_dict(loaded, state)
        get_optimizer_state_dict(loaded, fresh)
        fresh.state.clear()
        for found, own in zip(linears(loaded), linears(layers), strict=True):
            assert_same_bytes(shard_of(found.weight), shard_of(own.weight))
    for one in (loaded, layers):
        loss_of(one, inputs(one, 7 + rank()), recipe).backward()
    for found, own in zip(linears(loaded), linears(layers), strict=True):
        torch.testing.assert_close(found.weight.grad.full_tensor(), own.weight.grad.full_tensor())


@each("current", "mxfp8")
def an_assigned_state_dict_of_shards_is_used(name: str) -> None:
    layers, loaded, reference = sharded(model(name)), sharded(changed(model(name))), model(name)
    state = {key: value.detach().clone() for key, value in layers.state_dict().items()}
    loaded.load_state_dict(state, assign=True)
    train(name, loaded, reference, steps=1)


@each("current", "mxfp8", "nvfp4")
def conversions_of_a_sharded_model_keep_its_bytes(name: str) -> None:
    layers, reference = sharded(model(name)), model(name)
    layers.bfloat16()
    for layer in linears(layers):
        assert layer.weight.dtype is torch.bfloat16
        assert shard_of(layer.weight)._sharding is not None
    for weight, layer in zip(unsharded(layers), linears(reference), strict=True):
        assert weight.dtype is torch.bfloat16
        assert_same_bytes(weight, layer.weight)


@case
def what_cannot_be_sharded_is_refused() -> None:
    layer = fuser.BasicLinear(64, 64)
    with fuser.quantized_model_init(recipe=RECIPES["mxfp8"]()):
        layer = fuser.BasicLinear(64, 64)
    sentence = said(InputError, lambda: fully_shard(layer, shard_placement_fn=lambda p: Shard(1)))
    assert "shard a MXFP8Tensor of shape (64, 64) along dimension 1" in sentence
    local = model("current")[0].weight
    sentence = said(
        StateError, lambda: local.fsdp_pre_all_gather(None, local.shape, (), layer, None)
    )
    assert "was called by other code than fully_shard" in sentence


@case
def bytes_of_different_tensors_in_the_shards_are_refused() -> None:
    layers = sharded(model("current"))
    loss_of(layers, inputs(layers, 1), None)
    resharded(layers)
    local = shard_of(layers[0].weight)
    with torch.no_grad():
        local.copy_(fuser.Float8CurrentScalingQuantizer()(torch.randn(local.shape) * (1 + rank())))
    sentence = said(StateError, lambda: layers[0].unshard())
    assert "have the scales or amaxes" in sentence
    assert f"{float(local._scale_inv):.9g}" in sentence
