"""Cases: options of ``fully_shard``, and models that are sharded in other ways."""

from __future__ import annotations

import contextlib
from typing import Any

import oracles
import torch
from ranks import device_type
from sharded_models import (
    EXACT,
    RECIPES,
    SMALL,
    assert_same_bytes,
    each,
    inputs,
    linears,
    loss_of,
    model,
    rank,
    ranks,
    sharded,
    train,
    unsharded,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fuser


@each("current", "mxfp8", "blocks of 1x128")
def gradients_are_accumulated_over_microbatches(name: str) -> None:
    for reshards, says_last in ((True, False), (False, False), (True, True)):
        layers, reference, recipe = sharded(model(name)), model(name), RECIPES[name]()
        for step in range(2):
            for micro in range(3):
                layers.set_requires_gradient_sync(micro == 2)
                layers.set_is_last_backward(micro == 2 or not says_last)
                layers.set_reshard_after_backward(reshards or micro == 2)
                seed = 100 * step + 10 * micro
                x = inputs(layers, seed + rank()).requires_grad_()
                loss_of(layers, x, recipe).backward()
                for place in range(ranks()):
                    x_place = inputs(reference, seed + place).requires_grad_()
                    (loss_of(reference, x_place, recipe) / ranks()).backward()
            for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
                grad = parameter.grad.full_tensor()
                torch.testing.assert_close(grad, own.grad, rtol=1e-5, atol=1e-7)


@each("current", "nvfp4")
def gradients_are_clipped_by_the_norm_of_all_ranks(name: str) -> None:
    layers, reference, recipe = sharded(model(name)), model(name), RECIPES[name]()
    x = inputs(layers, 1)
    for m in (layers, reference):
        loss_of(m, x, recipe).backward()
    found = torch.nn.utils.clip_grad_norm_(layers.parameters(), 1e-3)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    torch.testing.assert_close(found.full_tensor(), expected)
    for m in (layers, reference):
        torch.optim.SGD(m.parameters(), lr=64.0).step()
    for weight, layer in zip(unsharded(layers), linears(reference), strict=True):
        torch.testing.assert_close(weight.dequantize(), layer.weight.dequantize())


@each(*EXACT)
def a_mixed_precision_policy_sets_the_dtype_of_the_compute(name: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers, reference = sharded(model(name), mp_policy=policy), model(name)
    reference.bfloat16()
    recipe = RECIPES[name]()
    x = inputs(layers, 1).bfloat16()
    for compute in (recipe, None):
        losses = [loss_of(m, x.clone().requires_grad_(), compute) for m in (layers, reference)]
        assert losses[0].dtype is torch.bfloat16
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for parameter, own in zip(layers.parameters(), reference.parameters(), strict=True):
        assert parameter.dtype is parameter.grad.dtype is torch.float32
        found = parameter.grad.full_tensor()
        torch.testing.assert_close(
            found, own.grad.float(), rtol=2e-2, atol=2e-2 * float(found.abs().max())
        )


@each("mxfp8")
def one_op_of_a_pipeline_with_channels_may_be_sharded(name: str) -> None:
    def layers() -> fuser.Sequential:
        torch.manual_seed(1)
        with fuser.quantized_model_init(recipe=RECIPES[name]()):
            return fuser.Sequential(
                fuser.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False),
                fuser.BasicLinear(64, 64),
                fuser.GELU(),
                fuser.BasicLinear(64, 64),
                fuser.AddExtraInput().set_extra_input_channel(0, "skip"),
                fuser.RMSNorm(64),
            )

    own, reference, recipe = layers(), layers(), RECIPES[name]()
    fully_shard(own[3])
    x, twin = (oracles.random_tensor((32, 64), torch.float32, 3) for _ in range(2))
    x.requires_grad_()
    twin.requires_grad_()
    losses = [loss_of(own, x, recipe), loss_of(reference, twin, recipe)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert isinstance(own[3].weight, DTensor)
    assert not isinstance(own[1].weight, DTensor)
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(own[3].weight.grad.full_tensor(), reference[3].weight.grad)
    torch.testing.assert_close(own[1].weight.grad, reference[1].weight.grad)


@each()
def evaluation_and_inference_gather_too(name: str) -> None:
    layers, reference, recipe = sharded(model(name, SMALL)), model(name, SMALL), RECIPES[name]()
    x = inputs(layers, 1)
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with context(), fuser.autocast(recipe=recipe):
            found, expected = layers(x), reference(x)
        if name != "delayed":
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    found.sum().backward()


@each("current", "mxfp8")
def a_mesh_of_replicas_has_whole_parameters(name: str) -> None:
    mesh = init_device_mesh(device_type(), (ranks(), 1), mesh_dim_names=("replicate", "shard"))
    layers = sharded(model(name), mesh=mesh)
    train(name, layers, model(name), steps=2)


@each("current", "mxfp8")
def a_model_may_be_sharded_after_it_has_run(name: str) -> None:
    layers, reference, recipe = model(name), model(name), RECIPES[name]()
    loss_of(layers, inputs(layers, 1), recipe).backward()
    layers.zero_grad()
    train(name, sharded(layers), reference, steps=2)


@each("current", "mxfp8")
def shards_may_be_kept_on_the_cpu(name: str) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    train(name, sharded(model(name), offload_policy=policy), model(name), steps=2)


@each("mxfp8", "current", "nvfp4")
def layers_of_modules_are_sharded(name: str) -> None:
    def layer() -> Any:
        torch.manual_seed(1)
        with fuser.quantized_model_init(recipe=RECIPES[name]()):
            return fuser.modules.LayerNormMLP(64, 128)

    own, reference, recipe = layer(), layer(), RECIPES[name]()
    fully_shard(own)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (own, reference)]
    for step in range(2):
        grads = []
        for m in (own, reference):
            x = oracles.random_tensor((32, 64), torch.float32, step)
            loss_of(m, x.requires_grad_(), recipe).backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own.unshard()
    for found, expected in zip(own.parameters(), reference.parameters(), strict=True):
        if isinstance(expected, fuser.QuantizedTensor):
            assert_same_bytes(found, expected)
        else:
            assert torch.equal(found, expected)


@each("mxfp8", "current")
def the_plan_of_a_sharded_model_is_that_of_the_model(name: str) -> None:
    layers, recipe = model(name), RECIPES[name]()
    x = inputs(layers, 1).requires_grad_()
    with fuser.autocast(recipe=recipe):
        expected = str(layers.plan(x))
        assert str(sharded(layers, each_layer=False).plan(x)) == expected


@each("current", "blocks of 128x128", "mxfp8")
def views_of_a_gathered_parameter_have_its_values(name: str) -> None:
    """Also of the transposed copy, in forward, where one copy is there, and in backward."""
    layers, own = sharded(model(name)), model(name)[0].weight.dequantize()
    seen: list[bool] = []

    def look(module: Any, *_: Any) -> None:
        weight = module.weight.detach()
        half = len(own) // 2
        for found, expected in (
            (weight.t(), own.t()),
            (weight[:half], own[:half]),
            (weight.split(half)[1], own.split(half)[1]),
            (weight.view(2, half, -1), own.view(2, half, -1)),
            (weight.view(-1)[3:9], own.view(-1)[3:9]),
            (weight.as_strided((half, own.shape[1]), (own.shape[1], 1)), own[:half]),
            (weight.clone(), own),
            (weight[:, 2:5], own[:, 2:5]),
        ):
            seen.append(torch.allclose(found.dequantize(), expected, rtol=0.1, atol=1e-2))
        assert not weight.new_zeros(weight.shape).dequantize().any()

    layers[0].basic_ops[0].register_forward_hook(look)
    layers[0].basic_ops[0].register_full_backward_pre_hook(look)
    loss_of(layers, inputs(layers, 1).requires_grad_(), RECIPES[name]()).backward()
    assert len(seen) == 16
    assert all(seen), seen


@each("current", "mxfp8")
def plain_weights_are_quantized_again_after_they_are_gathered_again(name: str) -> None:
    results = []
    for is_kept in (True, False):
        torch.manual_seed(0)
        like: Any = {"device": device_type()}
        layers = torch.nn.Sequential(
            *(
                fuser.Sequential(
                    fuser.RMSNorm(SMALL[0], **like),
                    fuser.Linear(SMALL[0], SMALL[0], **like),
                    fuser.GELU(),
                    fuser.Linear(SMALL[0], SMALL[0], **like),
                )
                for _ in range(2)
            )
        )
        for layer in layers:
            fully_shard(layer)
        fully_shard(layers)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for step in range(4):  # recorded, and repeated
            torch.manual_seed(10 * step + rank())
            x = torch.randn(64, SMALL[0], **like).requires_grad_()
            budget = fuser.activation_memory_budget(1, keep_weight_copies=is_kept)
            with fuser.autocast(recipe=RECIPES[name]()), budget:
                y = layers(x)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results += [y.detach(), x.grad]
        results += [parameter.to_local().detach() for parameter in layers.parameters()]
    half = len(results) // 2
    assert all(map(torch.equal, results[:half], results[half:]))
